"""What nodes hold in memory, made by hand: parts of a checkpoint in a folder for each node. Torch-free."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptman.storage.catalog.backends.node_memory import NodeMemory, Owner
from ckptman.storage.catalog.tiers import make_identity
from ckptman.storage.format.manifest import read_manifest
from ckptman.storage.format.paths import rank_of
from tests.helpers.checkpoints import commit

_LIVE_RANK = """
import sys
from pathlib import Path
from ckptman.storage.catalog.backends.node_memory import NodeMemory
memory = NodeMemory.at(Path(sys.argv[1]))
memory.open(memory.owner())
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shm():
    """A folder in memory."""
    folder = Path("/dev/shm") / f"ckptman-test-{os.getpid()}-{os.urandom(4).hex()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def memory_of(base, root, node, job_id=None, **of_owner):
    """The folder of a run that is over, or, if `of_owner` says so, of another one."""
    root.mkdir(parents=True, exist_ok=True)
    found = NodeMemory(base, make_identity(root, "run"), node)
    base.mkdir(exist_ok=True)
    owner = Owner(root_id=found.root_id, root=str(root.absolute()), node=node, run_id="run", job_id=job_id)
    found.open(owner.model_copy(update=of_owner))
    found.close()
    return found


def hold(memory, checkpoint, ranks, *, manifest=True, **changes):
    """Put the parts of some ranks of a checkpoint there, with all that belongs to no rank.

    `manifest` False: as when the node was killed before it had it. `changes`: to fields of the manifest.
    """
    found = read_manifest(checkpoint).model_copy(update={"attempt": 1, **changes})
    folder = memory.begin(found.step)
    for name in found.files:
        if rank_of(name) is None or rank_of(name) in ranks:
            shutil.copy(checkpoint / name, folder / name)
    if manifest:
        memory.commit(found.step, found.to_json())
    return found


def nodes_with(tmp_path, step, parts, *, rows=8, **changes):
    """Nodes that hold parts of a step of the root `tmp_path / "root"`, whose ranks are 0 to 3."""
    checkpoint = commit(tmp_path / "made", step, ranks=4, rows=rows).path
    memories = {node: memory_of(tmp_path / "shm", tmp_path / "root", node) for node in parts}
    for node, ranks in parts.items():
        hold(memories[node], checkpoint, ranks, **changes)
    return memories


@contextlib.contextmanager
def live_rank(memory):
    """While this lasts, a rank of the run lives."""
    command = [sys.executable, "-c", _LIVE_RANK, str(memory.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        yield
