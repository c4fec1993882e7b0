"""`verify --world-size` with real checkpoints and real processes: it passes what loads, and finds what does not.

What is found in which layout is proved in `verify/test_reshard_check.py`.
"""

import json
import shutil

import pytest
import torch.distributed.checkpoint as dcp

import ckptman
from ckptman.cli.app import main
from ckptman.errors import CkptmanError, ConfigError
from ckptman.tools.verify import verify_process
from ckptman.tools.verify.verify_process import load_on
from tests.engine.loading.test_damage import forge
from tests.helpers.apps import App
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("forked")


def _save(folder):
    """On 4 ranks, 2 x 2 HSDP: a checkpoint of ckptman under `root`, and one of plain DCP in `plain`."""
    app = App((2, 2))
    app.train_step()
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
def test_what_was_saved_loads_on_other_world_sizes_and_meshes(saved, capsys):
    assert main(["verify", str(saved / "root"), "--world-size", "1,3", "--mesh", "2x2", "--json"]) == 0
    told = capsys.readouterr()
    (report,) = json.loads(told.out)["checkpoints"]
    assert report["world_sizes"] == {"1": [], "3": [], "4": []}
    assert told.err == ""


@pytest.mark.slow
def test_plain_dcp_is_compared_though_it_has_no_digests(saved, capsys):
    assert main(["verify", str(saved / "plain"), "--world-size", "2", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (report["good"], report["digests"], report["world_sizes"]) == (True, False, {"2": []})
    assert main(["show", str(saved / "plain")]) == 0
    out = capsys.readouterr().out
    assert "model.0.weight  [7, 5]  float32  2 shards along dim 0" in out
    assert "1 plain value: epoch" in out


@pytest.mark.slow
def test_a_lie_about_the_dtype_does_not_load(saved, tmp_path, capsys):
    path = shutil.copytree(saved / "root", tmp_path / "root") / "step-0000000001"
    index = json.loads((path / "index.json").read_bytes())
    index["tensors"]["model.0.bias"]["dtype"] = "float64"
    forge(path, "index.json", json.dumps(index).encode())
    assert main(["verify", str(tmp_path / "root"), "--world-size", "2"]) == 7
    told = capsys.readouterr()
    assert "rank 0 of 2: model.0.bias: " in told.out
    assert "instead of torch.float64" in told.out
    assert told.err == "Error: step 1 does not load on 2 processes as it was saved: see the lines above\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["root", "plain"])
def test_a_plan_is_made_without_loading(name, saved, tmp_path, capsys):
    arguments = ["--plan-only", "--world-size", "16,1000", "--mesh", "4x4"]
    assert main(["verify", str(saved / name), *arguments]) == 0
    assert capsys.readouterr().err == ""
    shutil.copytree(saved / name, tmp_path / name)
    (cut,) = (tmp_path / name).rglob("__1_0.distcp")
    with cut.open("r+b") as file:
        file.truncate(1000)
    assert main(["verify", str(tmp_path / name), *arguments]) in (4, 7)
    assert "__1_0.distcp" in capsys.readouterr().out


@pytest.mark.slow
def test_what_keeps_the_check_from_running_is_an_error_and_not_a_verdict(saved, tmp_path, monkeypatch):
    folder = saved / "root" / "step-0000000001"
    with pytest.raises(CkptmanError, match="is no checkpoint"):
        list(load_on(tmp_path, [1]))
    with pytest.raises(ConfigError, match="such as 2x4"):
        list(load_on(folder, [1], (2, 2, 2)))
    fails = "import sys; print('so it goes', file=sys.stderr); sys.exit(9) # {} {}"
    monkeypatch.setattr(verify_process, "_START", fails)
    with pytest.raises(CkptmanError, match="ended with exit code 9: so it goes"):
        list(load_on(folder, [1]))
