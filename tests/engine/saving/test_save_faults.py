"""A save that fails says so on every rank, leaves nothing of itself, harms no older checkpoint, and can be repeated.

Each operation of a save on one rank, and disks that really are full: `tests.faults`.
"""

import errno
import fcntl
import gc
import os
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckptman
from ckptman.runtime.journal import read_journal
from ckptman.storage.format.paths import journal_path
from ckptman.storage.io.durable_files import Disk
from tests.engine.dcp.test_values import bits, load, noise, save
from tests.helpers.faulty_disk import on_disk
from tests.helpers.ranks import run_ranks

WAYS = {"sync": {"async_save": False}, "async": {}, "overlap": {"overlap": True}}


def state_of(step):
    """Sharded rows that change with every step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = noise(torch.int32, 2000, 300) + step
    rows = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    return {"x": {"rows": rows, "small": torch.full((3,), step)}, "epoch": step}


def open_run(root, state, **options):
    return ckptman.Checkpointer(root, state, deadline=None, timeout_seconds=20, **options)


def names(root):
    return sorted(each.name for each in Path(root).iterdir() if each.name[0] != ".")


def loaded(path, step):
    """Whether a checkpoint holds the state of that step. Every rank calls it."""
    fresh, saved = state_of(0), state_of(step)
    load(fresh, path, "StorageReader")
    pairs = [(local(fresh["x"][name]), local(each)) for name, each in saved["x"].items()]
    return fresh["epoch"] == step and all(torch.equal(bits(found), bits(wanted)) for found, wanted in pairs)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class FailingDisk(Disk):
    """From its n-th write or flush of an open file on, it refuses; `left` None: it works."""

    left = None
    error = 0

    def __init__(self):
        self._lock = threading.Lock()

    def write_at(self, fd, data, offset):
        self._count()
        return super().write_at(fd, data, offset)

    def sync_file(self, fd):
        self._count()
        super().sync_file(fd)

    def remove_tree(self, path):
        # What takes no byte because of a quota gives none back either.
        if self.left is not None and self.error == errno.EDQUOT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().remove_tree(path)

    def _count(self):
        with self._lock:
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise OSError(self.error, os.strerror(self.error))


def attempt(checkpointer, step):
    """Save and wait; the rank and the cause of a failure."""
    try:
        checkpointer.save(step)
        checkpointer.wait()
        failure = None
    except ckptman.CommitError as error:
        assert error.step == step
        failure = error.rank, error.cause
    dist.barrier()
    return failure


FAULTS = [(0, errno.ENOSPC, 0), (1, errno.EIO, 0), (0, errno.EIO, 1), (1, errno.ENOSPC, 1)]
"""A rank, the error that its disk gives, and from which write on."""


def fail_in_turn(root, options):
    """Save, fail in each way, and save again. Returns the failure of each step, and the checkpoints after it."""
    disk, state, events = FailingDisk(), state_of(1), []
    with on_disk(disk), open_run(root, state, **options) as checkpointer:
        checkpointer.restore()
        for step, (rank, error, left) in enumerate([(None, 0, 0), *FAULTS, (None, 0, 0)], 1):
            state.update(state_of(step))
            if dist.get_rank() == rank:
                disk.left, disk.error = left, error
            failure = attempt(checkpointer, step)
            disk.left = None
            events.append((failure, names(root)))
            dist.barrier()
    assert all(loaded(f"{root}/{name}", int(name[-10:])) for name in names(root))
    return events


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_save_that_fails_on_one_rank(tmp_path, way):
    first, second = run_ranks(2, fail_in_turn, str(tmp_path), WAYS[way])
    assert first == second
    before, *failed, after = first
    assert (before[0], after[0]) == (None, None)
    for (failure, left), (rank, error, _) in zip(failed, FAULTS, strict=True):
        assert failure is not None, f"{error} on rank {rank} did not fail the save"
        assert failure[0] == rank
        assert os.strerror(error) in failure[1]
        assert left == ["step-0000000001"]
    assert names(tmp_path) == ["step-0000000001", "step-0000000006"]


def fail_where_warnings_are_errors(root, options):
    warnings.simplefilter("error", RuntimeWarning)
    disk, state, failures = FailingDisk(), state_of(1), []
    with on_disk(disk), open_run(root, state, **options) as checkpointer:
        for step in (1, 2, 3):
            state.update(state_of(step))
            disk.left, disk.error = (0, errno.EDQUOT) if step == 2 else (None, 0)
            failures.append(attempt(checkpointer, step))
        checkpointer.save(4, {"loss": "no number"})
    return failures


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_warning_that_is_an_error_parts_no_ranks(tmp_path, way):
    """The leader cannot remove what it wrote, and warns, while the others wait to hear whether there is more room."""
    first, second = run_ranks(2, fail_where_warnings_are_errors, str(tmp_path), WAYS[way])
    assert first == second
    assert (first[0], first[2]) == (None, None)
    assert "quota" in first[1][1]


def fail_alone(folder, writer):
    """`ckptman.save` and `dcp.save` with no Checkpointer around them."""
    save(state_of(1), f"{folder}/one", writer)
    disk = FailingDisk()
    disk.left, disk.error = (0, errno.EFBIG) if dist.get_rank() == 1 else (None, 0)
    try:
        with on_disk(disk):
            save(state_of(2), f"{folder}/two", writer)
        text = ""
    except dcp.api.CheckpointException as error:
        assert list(error.failures) == [1]
        assert isinstance(error.failures[1][0], OSError)
        text = str(error.failures[1][0])
    except (ckptman.CommitError, OSError) as error:
        text = str(error)
    # DCP tells its writer nothing of another rank's failure: the leader's draft goes with its writer.
    gc.collect()
    dist.barrier()
    left = names(folder)
    dist.barrier()
    save(state_of(2), f"{folder}/two", writer)
    assert loaded(f"{folder}/one", 1)
    assert loaded(f"{folder}/two", 2)
    return text, left


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["StorageWriter", "ckptman.save"])
def test_a_save_without_a_checkpointer(tmp_path, writer):
    for text, left in run_ranks(2, fail_alone, str(tmp_path), writer):
        assert "File too large" in text
        assert left == ["one"]
    assert names(tmp_path) == ["one", "two"]


class NoDirectIO(Disk):
    """A file system that takes the flag for direct I/O and refuses the writes, as some do."""

    def write_at(self, fd, data, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().write_at(fd, data, offset)


def test_where_there_is_no_direct_io_the_journal_says_so_once(tmp_path):
    state = {"x": noise(torch.int32, 2000, 300)}
    with on_disk(NoDirectIO()), open_run(tmp_path, state) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step)
    events, _ = read_journal(journal_path(tmp_path))
    reasons = [each["reason"] for each in events if each["event"] == "direct_io_unavailable"]
    assert reasons == ["a direct write was refused (Invalid argument)"]
    fresh = {"x": torch.zeros(2000, 300, dtype=torch.int32)}
    ckptman.load(fresh, tmp_path / "step-0000000002")
    assert torch.equal(fresh["x"], state["x"])
