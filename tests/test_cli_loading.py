"""`verify --world-size` with real checkpoints and real processes: it passes what loads, and finds each way not to."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptman.cli.app import main
from tests.ranks import run_ranks

BREAKAGES = """
import json, os, signal, sys
from pathlib import Path
import psutil, torch.distributed as dist
from ckptman.sharded import reshard_check as module

folder, real, real_values = Path(sys.argv[1]), module._read_into, module._check_values

def on_rank_1(harm):
    def read(state, targets):
        if dist.get_rank() == 1:
            harm(state, targets)
        else:
            real(state, targets)
    return read

def flip(state, targets):
    real(state, targets)
    for name, target in targets.items():
        if name.endswith("model.2.weight"):
            module._bytes_of(target.local)[-1] ^= 1

def refuse(state, targets):
    if "model.0.bias" in targets:
        raise ValueError("this one is refused")
    real(state, targets)

harms = {
    "none": real,
    "flip": on_rank_1(flip),
    "forget": on_rank_1(lambda state, targets: None),
    "refuse": on_rank_1(refuse),
    "die": on_rank_1(lambda state, targets: os.kill(os.getpid(), signal.SIGKILL)),
    "exit": on_rank_1(lambda state, targets: os._exit(3)),
    "hang": on_rank_1(lambda state, targets: signal.pause()),
}
found = {}
for name, harm in harms.items():
    module._read_into = harm
    found[name] = module.check(folder, 2, silence_seconds=4.0 if name == "hang" else 60.0)
    assert not psutil.Process().children()
print(json.dumps(found))
"""


def _save(folder: str) -> None:
    """On 4 ranks, 2 x 2 HSDP: a checkpoint of ckptman under `root`, and one of plain DCP in `plain`."""
    import torch
    import torch.distributed.checkpoint as dcp

    import ckptman
    from tests.apps import App

    app = App((2, 2))
    app.train_step()
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
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(4, _save, str(folder))
    return folder


def test_what_was_saved_loads_on_other_world_sizes(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(saved / "root"), "--world-size", "1,3,4"]) == 0
    told = capsys.readouterr()
    assert [line.strip() for line in told.out.splitlines()[1:]] == [
        "on 1 process: loads, bit for bit what was saved",
        "on 3 processes: loads, bit for bit what was saved",
        "on 4 processes: loads, bit for bit what was saved",
    ]
    assert told.err == ""


def test_plain_dcp_is_compared_though_it_has_no_digests(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(saved / "plain")]) == 0
    assert "without digests: changed bytes cannot be found" in capsys.readouterr().out
    assert main(["verify", str(saved / "plain"), "--world-size", "2", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (report["good"], report["digests"], report["world_sizes"]) == (True, False, {"2": []})
    assert main(["show", str(saved / "plain")]) == 0
    out = capsys.readouterr().out
    assert "model.0.weight  [7, 5]  float32  2 shards along dim 0" in out
    assert "1 plain value: epoch" in out


def test_a_lie_about_the_dtype_does_not_load(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ckptman.store.catalogue import Catalogue
    from ckptman.store.digest import digest_bytes
    from ckptman.store.index import Index
    from ckptman.store.manifest import FileRecord
    from ckptman.store.names import INDEX

    shutil.copytree(saved / "root", tmp_path / "root")
    (entry,) = Catalogue(tmp_path / "root").scan()
    manifest = entry.require_manifest()
    index = Index.model_validate_json((entry.path / INDEX).read_bytes())
    index.tensors["model.0.bias"] = index.tensors["model.0.bias"].model_copy(update={"dtype": "float64"})
    data = index.to_json()
    (entry.path / INDEX).write_bytes(data)
    files = {**manifest.files, INDEX: FileRecord(bytes=len(data), digest=digest_bytes(data))}
    (entry.path / "manifest.json").write_bytes(manifest.model_copy(update={"files": files}).to_json())
    assert main(["verify", str(tmp_path / "root"), "--world-size", "2"]) == 7
    told = capsys.readouterr()
    assert "rank 0 of 2: model.0.bias: " in told.out
    assert "instead of torch.float64" in told.out
    assert told.err == "Error: step 1 does not load on 2 processes as it was saved: see the lines above\n"


def test_a_metadata_that_would_run_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = tmp_path / "evil"
    evil.mkdir()
    mark = tmp_path / "ran"
    (evil / ".metadata").write_bytes(f"cos\nsystem\n(S'touch {mark}'\ntR.".encode())
    assert main(["show", str(evil)]) == 4
    assert main(["verify", str(evil), "--world-size", "1"]) == 4
    assert "asks for" in capsys.readouterr().err
    assert not mark.exists()


@pytest.fixture(scope="module")
def found(saved: Path) -> dict[str, Any]:
    """What the check says of each way to harm rank 1 of 2."""
    ran = subprocess.run(
        [sys.executable, "-c", BREAKAGES, str(saved / "root" / "step-0000000001")],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ran.returncode == 0, ran.stderr
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def test_no_harm_no_problem(found: dict[str, Any]) -> None:
    assert found["none"] == []


def test_one_flipped_bit_names_tensor_rank_and_world_size(found: dict[str, Any]) -> None:
    problems = [problem for problem in found["flip"] if ": model.2.weight: " in problem]
    assert len(problems) == 1
    assert problems[0].startswith("rank 1 of 2: model.2.weight: rows 2 to 2 differ from what is in __")
    assert problems[0].endswith(": 1 of 7 elements")


def test_what_was_never_loaded_is_found(found: dict[str, Any]) -> None:
    assert any(problem.startswith("rank 1 of 2: model.0.weight: ") for problem in found["forget"])


def test_a_tensor_that_cannot_be_read_is_named_and_the_others_are_compared(found: dict[str, Any]) -> None:
    assert found["refuse"] == ["rank 1 of 2: model.0.bias: it does not load: ValueError: this one is refused"]


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        ("die", "SIGKILL (out of memory?)"),
        ("exit", "exit code 3"),
        ("hang", "was silent for 4 s"),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_check_with_its_name(harm: str, why: str, found: dict[str, Any]) -> None:
    assert any(problem.startswith("rank 1 of 2 ") and why in problem for problem in found[harm])
