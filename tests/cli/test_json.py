"""What `--json` gives to programs: every key, and every value that is the same each time, in `golden.json`.

A value that is not is there as its type, such as `<float>`. A command runs in a folder of its own, on the root `run`.
"""

import json
import math
import shlex
from itertools import zip_longest
from pathlib import Path

import pytest

import ckptman.data.resumable_loader  # noqa: F401 so that no process of a probe takes seconds to import torch
from ckptman import __version__
from ckptman.cli.app import main
from ckptman.storage.format import paths
from ckptman.storage.format.manifest import Mesh
from tests.helpers.checkpoints import commit, flip_byte
from tests.helpers.journals import write_journal
from tests.helpers.node_memory import nodes_with
from tests.tools.monitoring.invented_run import invented

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text(encoding="utf-8"))
LOADER = "from torch.utils.data import DataLoader\n\ndef make_loader(num_workers):\n    return DataLoader(range(64), 4)"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Step 3, which did not end, and 5, which is a checkpoint with all that one can have."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "MEMORY_PATH", str(tmp_path / "shm"))
    monkeypatch.setenv("SLURMD_NODENAME", "a")
    metrics = {"loss": float("nan"), "gain": -math.inf}
    values = {"best": math.inf, "pair": (1, 2)}
    mesh = Mesh(names=("shard",), shape=(2,))
    commit(tmp_path / "run", 5, metrics=metrics, values=values, restored_from=4, mesh=mesh)
    (tmp_path / "run" / "step-0000000003").mkdir()
    (tmp_path / "run" / "step-0000000009.trash-abcdef00").mkdir()
    return tmp_path / "run"


def damage(run):
    flip_byte(run / "step-0000000005" / "__1_0.distcp")


def finish(run):
    write_journal(run, invented(5).events, ago_seconds=60)


def hold_in_memory(run):
    nodes_with(run.parent, 120, {"a": range(4)})
    commit(run.parent / "root", 100)


def write_loader(run):
    (run.parent / "program.py").write_text(LOADER)


def nothing(run):
    pass


COMMANDS = [
    ("list run", 0, nothing),
    ("list root", 0, hold_in_memory),
    ("show run/step-0000000005", 0, nothing),
    ("verify run --step 5", 0, nothing),
    ("verify run --step 5", 4, damage),
    ("copy run backup", 0, nothing),
    ("copy run backup --all", 4, damage),
    ("diff run/step-0000000005 run/step-0000000005", 0, nothing),
    ("memory list --path shm", 0, hold_in_memory),
    ("memory flush root --path shm", 0, hold_in_memory),
    ("plan --params 7B --tier a=2GB/s --memory", 0, nothing),
    ("simulate --mtbf 8h --runs 2 --memory", 0, nothing),
    ("status run --no-slurm", 0, finish),
    ("report run --no-slurm", 0, finish),
    ("probe loader program.py:make_loader --seconds 0.05 --workers 0 --steps-per-second 0.01", 0, write_loader),
]


def fitted(found, told):
    """What was found, with `<type>` for a value of which no more is told."""
    if isinstance(found, dict) and isinstance(told, dict):
        return {name: fitted(each, told.get(name)) for name, each in found.items()}
    if isinstance(found, list) and isinstance(told, list):
        return [fitted(each, of) for each, of in zip_longest(found, told)]
    return told if told == f"<{type(found).__name__}>" else found


@pytest.mark.parametrize(("command", "code", "prepare"), COMMANDS, ids=[each[0].split(" --")[0] for each in COMMANDS])
def test_json_has_these_keys_and_values(command, code, prepare, run, capsys):
    prepare(run)
    assert main(shlex.split(f"{command} --json")) == code
    found = json.loads(capsys.readouterr().out.replace(__version__, "VERSION"), parse_constant=pytest.fail)
    told = GOLDEN[f"{command}: {code}"]
    assert fitted(found, told) == told
