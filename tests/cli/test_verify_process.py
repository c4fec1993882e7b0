"""`verify --world-size` with real checkpoints and real processes: it passes what loads, and finds each way not to."""

import json
import os
import shutil

import pytest

from ckptman.cli import verify_process
from ckptman.cli.app import main
from ckptman.cli.verify_process import load_on
from ckptman.errors import CkptmanError, ConfigError
from ckptman.io.threads import cores
from tests.helpers.ranks import run_ranks


def _save(folder):
    """On 4 ranks, 2 x 2 HSDP: a checkpoint of ckptman under `root`, and one of plain DCP in `plain`."""
    import torch
    import torch.distributed.checkpoint as dcp

    import ckptman
    from tests.helpers.apps import App

    app = App((2, 2))
    app.train_step()
    torch.manual_seed(7)  # the same on all ranks
    app.state["odd"] = {
        "nan": torch.tensor([float("nan"), -0.0, 0.0]),
        "half": torch.randn(5, 3).bfloat16(),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
        "wave": torch.randn(3, dtype=torch.complex64),
    }
    with ckptman.Checkpointer(f"{folder}/root", app.state, deadline=None, timeout_seconds=30) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1)
        checkpointer.wait()
    dcp.save({"model": app.model.state_dict(), "epoch": 3}, checkpoint_id=f"{folder}/plain")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(4, _save, str(folder))
    return folder


@pytest.mark.slow
def test_what_was_saved_loads_on_other_world_sizes(saved, ends):
    told = ends(0, "verify", saved / "root", "--world-size", "1,3", "--mesh", "2x3")
    assert [line.strip() for line in told.out.splitlines()[1:4]] == [
        "on 1 process: loads, bit for bit what was saved",
        "on 3 processes: loads, bit for bit what was saved",
        "on 6 processes (2 x 3): loads, bit for bit what was saved",
    ]
    assert told.err == ""


@pytest.mark.slow
def test_plain_dcp_is_compared_though_it_has_no_digests(saved, ends):
    assert "written by plain DCP, without digests: " in ends(0, "verify", saved / "plain").out
    (report,) = json.loads(ends(0, "verify", saved / "plain", "--world-size", "2", "--json").out)["checkpoints"]
    assert (report["good"], report["digests"], report["world_sizes"]) == (True, False, {"2": []})
    out = ends(0, "show", saved / "plain").out
    assert "model.0.weight  [7, 5]  float32  2 shards along dim 0" in out
    assert "1 plain value: epoch" in out


@pytest.mark.slow
def test_a_lie_about_the_dtype_does_not_load(saved, tmp_path, ends):
    from ckptman.catalog.catalog import Catalog
    from ckptman.format.index import Index
    from ckptman.format.manifest import FileRecord
    from ckptman.format.paths import INDEX
    from ckptman.io.checksums import digest_bytes

    shutil.copytree(saved / "root", tmp_path / "root")
    (entry,) = Catalog(tmp_path / "root").scan()
    manifest = entry.require_manifest()
    index = Index.model_validate_json((entry.path / INDEX).read_bytes())
    index.tensors["model.0.bias"] = index.tensors["model.0.bias"].model_copy(update={"dtype": "float64"})
    data = index.to_json()
    (entry.path / INDEX).write_bytes(data)
    files = {**manifest.files, INDEX: FileRecord(bytes=len(data), digest=digest_bytes(data))}
    (entry.path / "manifest.json").write_bytes(manifest.model_copy(update={"files": files}).to_json())
    told = ends(7, "verify", tmp_path / "root", "--world-size", "2")
    assert "rank 0 of 2: model.0.bias: " in told.out
    assert "instead of torch.float64" in told.out
    assert told.err == "Error: step 1 does not load on 2 processes as it was saved: see the lines above\n"


@pytest.mark.slow
def test_a_plan_is_made_without_loading_and_may_fail(saved, tmp_path, capsys):
    for name in ("root", "plain"):
        assert main(["verify", str(saved / name), "--plan-only", "--world-size", "16,1000", "--mesh", "4x4"]) == 0
        assert capsys.readouterr().err == ""
    shutil.copytree(saved / "plain", tmp_path / "plain")
    os.truncate(tmp_path / "plain" / "__1_0.distcp", 1000)
    assert main(["verify", str(tmp_path / "plain"), "--plan-only", "--world-size", "3"]) in (4, 7)
    assert "__1_0.distcp" in capsys.readouterr().out


@pytest.mark.slow
def test_what_keeps_the_check_from_running_is_an_error_and_not_a_verdict(saved, tmp_path, monkeypatch):
    folder = saved / "root" / "step-0000000001"
    with pytest.raises(CkptmanError, match="is no checkpoint"):
        list(load_on(tmp_path, [1]))
    with pytest.raises(ConfigError, match="such as 2x4"):
        list(load_on(folder, [1], (2, 2, 2)))
    ends = "import sys; print('so it goes', file=sys.stderr); sys.exit(9) # {} {}"
    monkeypatch.setattr(verify_process, "_START", ends)
    with pytest.raises(CkptmanError, match="ended with exit code 9: so it goes"):
        list(load_on(folder, [1]))


@pytest.mark.slow
def test_what_waves_leave_open_is_noted(saved, monkeypatch):
    two, forty = load_on(saved / "root" / "step-0000000001", [2, 40])
    assert (two.world_size, two.problems, two.notes) == (2, [], [])
    assert (forty.world_size, forty.problems) == (40, [])
    (note,) = forty.notes
    assert note.startswith("that the ranks fit into memory together: they loaded ")
    assert note.endswith(f" at a time, as there are {cores()} cores")
