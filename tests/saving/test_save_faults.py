"""A save that fails says so on every rank, leaves nothing of itself, harms no older checkpoint, and can be repeated."""

import errno
import fcntl
import gc
import os
import resource
import subprocess
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckptman
from ckptman.catalog.catalog import Catalog
from ckptman.io.durable_files import DISK, Disk
from ckptman.runtime.journal import read_journal
from tests.dcp.test_values import State, bits, load, noise, save
from tests.helpers.faulty_disk import saving_to
from tests.helpers.ranks import run_ranks

WAYS = {"sync": {"async_save": False}, "async": {}, "overlap": {"overlap": True}}
LIMIT_BYTES = 256 * 1024


def tensors(step):
    """Sharded rows that change with every step, more than the limit on each rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = noise(torch.int32, 2000, 300) + step
    return {"rows": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None), "small": torch.full((3,), step)}


def open_run(root, state, disk=DISK, **options):
    with saving_to(disk):
        return ckptman.Checkpointer(root, state, deadline=None, timeout_seconds=20, **options)


def limit(size):
    """Let no file of this process grow over a size: the kernel refuses, as it does with a quota."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def names(root):
    return sorted(each.name for each in Path(root).iterdir() if each.name[0] != "." and each.name != "ballast")


def set_step(state, step):
    state["x"], state["epoch"] = tensors(step), step


def loaded(path, step):
    """Whether a checkpoint holds what the state of that step was. Every rank calls it."""
    fresh, saved = {"x": tensors(0), "epoch": 0}, tensors(step)
    load(fresh, path, "StorageReader")
    return fresh["epoch"] == step and all(
        torch.equal(bits(getattr(fresh["x"][name], "_local_tensor", fresh["x"][name])), bits(each))
        for name, each in ((name, getattr(each, "_local_tensor", each)) for name, each in saved.items())
    )


def attempt(checkpointer, step):
    """Save and wait; the rank and the cause of a failure."""
    try:
        checkpointer.save(step)
        checkpointer.wait()
    except ckptman.CommitError as error:
        assert error.step == step
        dist.barrier()
        return error.rank, error.cause
    dist.barrier()
    return None


def fail_in_the_middle(root, options):
    """Step 2 does not fit on rank 1; 1 and 3 do."""
    events = []
    state = {}
    set_step(state, 1)
    with open_run(root, state, **options) as checkpointer:
        for step in (1, 2, 3):
            if dist.get_rank() == 1:
                limit(LIMIT_BYTES if step == 2 else None)
            set_step(state, step)
            events += [attempt(checkpointer, step), names(root)]
            dist.barrier()
    assert loaded(f"{root}/step-0000000001", 1)
    assert loaded(f"{root}/step-0000000003", 3)
    return events


ONE, THREE = "step-0000000001", "step-0000000003"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_may_not_grow(tmp_path, way):
    first, second = run_ranks(2, fail_in_the_middle, str(tmp_path), WAYS[way])
    assert first == second
    assert first[0] is None
    assert first[1] == [ONE]
    rank, cause = first[2]
    assert rank == 1
    assert "File too large" in cause
    assert first[3:] == [[ONE], None, [ONE, THREE]]
    assert [entry.step for entry in Catalog(tmp_path).complete()] == [1, 3]


class FailingDisk(Disk):
    """From its n-th write or flush of an open file on, it refuses; `left` None: it works."""

    def __init__(self):
        self.left = None
        self.error = 0
        self._lock = threading.Lock()

    def write_at(self, fd, data, offset):
        self._count()
        return super().write_at(fd, data, offset)

    def sync_file(self, fd):
        self._count()
        super().sync_file(fd)

    def _count(self):
        with self._lock:
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise OSError(self.error, os.strerror(self.error))


def fail_at_writes(root, options):
    """Each error on each rank, at the first write and at a later one."""
    disk, events = FailingDisk(), []
    state = {"large": torch.arange(2_500_000), "epoch": 0}
    with open_run(root, state, **options, disk=disk) as checkpointer:
        step = 1
        set_step(state, step)
        assert attempt(checkpointer, step) is None
        for error, rank, left in (
            (errno.ENOSPC, 0, 0),
            (errno.EDQUOT, 1, 0),
            (errno.EIO, 0, 1),
            (errno.ENOSPC, 1, 1),
        ):
            step += 1
            set_step(state, step)
            dist.barrier()
            if dist.get_rank() == rank:
                disk.left, disk.error = left, error
            failure = attempt(checkpointer, step)
            disk.left = None
            events.append((failure, (rank, os.strerror(error)), names(root)))
            dist.barrier()
        step += 1
        set_step(state, step)
        assert attempt(checkpointer, step) is None
    assert loaded(f"{root}/{ONE}", 1)
    assert loaded(f"{root}/step-{step:010d}", step)
    return events


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_errors_of_the_disk_at_any_write(tmp_path, way):
    first, second = run_ranks(2, fail_at_writes, str(tmp_path), WAYS[way])
    assert first == second
    for failure, (rank, text), left in first:
        assert failure is not None, "the failing write did not fail the save"
        assert failure[0] == rank
        assert text in failure[1]
        assert left == [ONE]


class FullDisk(Disk):
    """While it is `full`, it takes no byte, and gives none back either."""

    full = False

    def write_at(self, fd, data, offset):
        if self.full:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return super().write_at(fd, data, offset)

    def remove_tree(self, path):
        if self.full:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().remove_tree(path)


def fail_where_warnings_are_errors(root, options):
    warnings.simplefilter("error", RuntimeWarning)
    disk, state, failures = FullDisk(), State(), []
    set_step(state, 1)
    with open_run(root, state, **options, disk=disk) as checkpointer:
        for step in (1, 2, 3):
            set_step(state, step)
            disk.full = step == 2
            failures.append(attempt(checkpointer, step))
        checkpointer.save(4, {"loss": "no number"})
    return failures


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_warning_that_is_an_error_parts_no_ranks(tmp_path, way):
    """The leader cannot remove what it wrote, and says so, where the others wait to hear whether there is more room."""
    first, second = run_ranks(2, fail_where_warnings_are_errors, str(tmp_path), WAYS[way])
    assert first == second
    assert (first[0], first[2]) == (None, None)
    assert "quota" in first[1][1]


def fail_alone(folder, writer):
    """`ckptman.save` and `dcp.save` with no Checkpointer around them."""
    texts = []
    state = {}
    set_step(state, 1)
    save(state, f"{folder}/one", writer)
    if dist.get_rank() == 1:
        limit(LIMIT_BYTES)
    set_step(state, 2)
    try:
        save(state, f"{folder}/two", writer)
    except dcp.api.CheckpointException as error:
        assert list(error.failures) == [1]
        assert isinstance(error.failures[1][0], OSError)
        texts.append(str(error.failures[1][0]))
    except (ckptman.CommitError, OSError) as error:
        texts.append(str(error))
    # DCP tells its writer nothing of another rank's failure: the leader's draft goes with its writer.
    gc.collect()
    dist.barrier()
    limit(None)
    texts += names(folder)
    dist.barrier()
    save(state, f"{folder}/two", writer)
    assert loaded(f"{folder}/one", 1)
    assert loaded(f"{folder}/two", 2)
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["StorageWriter", "ckptman.save"])
def test_a_save_without_a_checkpointer(tmp_path, writer):
    for text, *left in run_ranks(2, fail_alone, str(tmp_path), writer):
        assert "File too large" in text
        assert left == ["one"]
    assert names(tmp_path) == ["one", "two"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MiB."""
    folder = tmp_path / "mount"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0777", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except OSError as error:
        pytest.skip(f"no mount here: {error}")
    if done.returncode:
        pytest.skip(f"only root may mount: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_the_disk(root, options):
    """Two checkpoints fit beside each other, but not beside the ballast."""
    events = []
    state = {}
    set_step(state, 1)
    ballast = Path(root) / "ballast"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the journal")
        with open_run(root, state, **options) as checkpointer:
            for step in (1, 2, 3):
                if dist.get_rank() == 0 and step == 2:
                    free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
                    ballast.write_bytes(bytes(free - 300 * 1024))
                if dist.get_rank() == 0 and step == 3:
                    ballast.unlink()
                dist.barrier()
                set_step(state, step)
                events += [attempt(checkpointer, step), names(root)]
                dist.barrier()
    assert loaded(f"{root}/step-0000000001", 1)
    assert loaded(f"{root}/step-0000000003", 3)
    return events


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_disk_that_is_really_full(small_disk, way):
    first, second = run_ranks(2, fill_the_disk, str(small_disk), WAYS[way])
    assert first == second
    assert first[:2] == [None, [ONE]]
    assert first[2] is not None
    assert "No space left" in first[2][1]
    assert first[3:] == [[ONE], None, [ONE, THREE]]


class NoDirectIO(Disk):
    """A file system that takes the flag for direct I/O and refuses the writes, as some do."""

    def write_at(self, fd, data, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().write_at(fd, data, offset)


def test_where_there_is_no_direct_io_the_journal_says_so_once(tmp_path):
    state = {"x": noise(torch.int32, 2000, 300)}
    with open_run(str(tmp_path / "run"), state, disk=NoDirectIO()) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step)
    events, _ = read_journal(tmp_path / "run" / ".ckptman" / "journal.jsonl")
    reasons = [each["reason"] for each in events if each["event"] == "direct_io_unavailable"]
    assert reasons == ["a direct write was refused (Invalid argument)"]
    fresh = {"x": torch.zeros(2000, 300, dtype=torch.int32)}
    ckptman.load(fresh, tmp_path / "run" / "step-0000000002")
    assert torch.equal(fresh["x"], state["x"])
