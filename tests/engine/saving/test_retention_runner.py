"""What retention deletes: behind the run and out of the way of its saves, or for the room that a save needs."""

import errno
import os
import subprocess
import threading
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import ckptman
from ckptman.cli.app import main
from ckptman.engine.saving import retention_runner
from ckptman.engine.saving.retention_runner import Remover
from ckptman.errors import CommitError, ConfigError
from ckptman.runtime.journal import read_journal
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.pins import pin
from ckptman.storage.catalog.prune import read_policy
from ckptman.storage.format.paths import journal_path, run_folder, step_folder
from ckptman.storage.io.durable_files import DISK, Disk
from ckptman.storage.io.failure_cause import FULL
from tests.helpers.checkpoints import commit
from tests.helpers.faulty_disk import on_disk
from tests.helpers.ranks import run_ranks
from tests.storage.io.test_durable_files import tree

TENSOR_BYTES = 1024 * 1024
CHECKPOINT_BYTES = 1.1 * TENSOR_BYTES
"""What a checkpoint of that tensor takes, with all that is written besides."""


class SmallDisk(Disk):
    """Holds so many bytes under a root. The call that would be one too many fails, as a quota lets it."""

    def __init__(self, root, capacity_bytes, code=errno.ENOSPC):
        self._root, self._capacity_bytes, self._code = root, capacity_bytes, code

    def write_file(self, path, data):
        self._check(len(data))
        super().write_file(path, data)

    def reserve(self, fd, size):
        self._check(size - os.fstat(fd).st_size)
        super().reserve(fd, size)

    def _check(self, more_bytes):
        used = 0
        for path in self._root.glob("step-*/*"):
            with suppress(FileNotFoundError):  # removed a moment ago
                used += path.stat().st_size
        if used + more_bytes > self._capacity_bytes:
            raise OSError(self._code, os.strerror(self._code))


def train(root, steps, disk=DISK, *, keep=3, on_full="prune", **options):
    """Save each step. Returns what it warned of."""
    state = {"x": {"w": torch.zeros(TENSOR_BYTES // 4)}}
    options = {"async_save": False, "save_policy": ckptman.EverySteps(1), "deadline": None, **options}
    options |= {"retention": ckptman.KeepLast(keep), "on_full": on_full, "timeout_seconds": 60}
    with (
        warnings.catch_warnings(record=True) as caught,
        on_disk(disk),
        ckptman.Checkpointer(root, state, **options) as checkpointer,
    ):
        warnings.simplefilter("always")
        for step in range(checkpointer.restore() + 1, steps + 1):
            state["x"]["w"].fill_(step)
            checkpointer.step(step, {"loss": 1.0})
    return [str(each.message) for each in caught]


def steps_in(root):
    return [entry.step for entry in Catalog(root).complete()]


def events(root, name):
    return [event for event in read_journal(journal_path(root))[0] if event["event"] == name]


def ranks(root, async_save):
    return train(Path(root), 6, SmallDisk(Path(root), 4.5 * CHECKPOINT_BYTES), async_save=async_save)


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_run_prunes_saves_and_goes_on(tmp_path, async_save, code):
    told = train(tmp_path, 6, SmallDisk(tmp_path, 3.5 * CHECKPOINT_BYTES, code), async_save=async_save)
    assert steps_in(tmp_path) == [4, 5, 6]
    assert all(entry.path.parent == tmp_path for entry in Catalog(tmp_path).scan())
    assert any(
        "the disk is full, so checkpoints were pruned for the save of step 4: step 1 went" in each for each in told
    )
    (first, *_) = events(tmp_path, "disk_full")
    assert (first["step"], first["pruned_steps"]) == (4, [1])
    assert first["freed_bytes"] >= TENSOR_BYTES
    assert os.strerror(code) in first["cause"]
    assert [event["step"] for event in events(tmp_path, "pruned")] == [1, 2, 3]
    assert not events(tmp_path, "save_failed")
    assert {path.name for path in tmp_path.iterdir()} == {run_folder(tmp_path).name, *map(step_folder, (4, 5, 6))}


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [True, False])
def test_all_ranks_save_again(tmp_path, async_save):
    run_ranks(2, ranks, str(tmp_path), async_save)
    assert steps_in(tmp_path) == [4, 5, 6]
    assert not events(tmp_path, "save_failed")


def test_by_default_the_save_fails_and_nothing_is_pruned_for_it(tmp_path):
    with pytest.raises(CommitError, match="No space left"):
        train(tmp_path, 6, SmallDisk(tmp_path, 3.5 * CHECKPOINT_BYTES), on_full="fail")
    assert steps_in(tmp_path) == [1, 2, 3]
    assert not [path for path in tmp_path.iterdir() if ".tmp-" in path.name]


def test_where_nothing_may_go_the_save_fails_and_says_so(tmp_path):
    with pytest.raises(CommitError, match="No space left"):
        train(tmp_path, 3, SmallDisk(tmp_path, 1.5 * CHECKPOINT_BYTES), keep=1)
    assert steps_in(tmp_path) == [1], "the newest stays, whatever comes"
    (event,) = events(tmp_path, "disk_full")
    assert (event["pruned_steps"], event["freed_bytes"]) == ([], 0)


def test_one_that_cannot_be_removed_keeps_no_room_of_others_from_a_save(tmp_path):
    class Stuck(SmallDisk):
        def remove_tree(self, path):
            if path.name.startswith(step_folder(1)):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            super().remove_tree(path)

    train(tmp_path, 3)
    told = train(tmp_path, 4, Stuck(tmp_path, 3.5 * CHECKPOINT_BYTES), keep=1)
    assert steps_in(tmp_path) == [4]
    assert any("could not be pruned" in each and step_folder(1) in each for each in told)
    assert any("for the save of step 4: step 2 went" in each for each in told)
    assert [event["step"] for event in events(tmp_path, "pruned")] == [2, 3]
    assert not events(tmp_path, "save_failed")


def test_what_is_pinned_is_not_pruned_for_room(tmp_path):
    train(tmp_path, 3)
    pin(tmp_path / step_folder(1), "the paper", by="me", time_seconds=1.0)
    train(tmp_path, 5, SmallDisk(tmp_path, 4.5 * CHECKPOINT_BYTES))
    assert steps_in(tmp_path) == [1, 3, 4, 5]


def test_what_a_run_went_on_from_stays_while_it_runs(tmp_path):
    state, options = {"x": {"w": torch.zeros(8)}}, {"retention": ckptman.KeepLast(1), "deadline": None}
    with ckptman.Checkpointer(tmp_path, state, **options) as checkpointer:
        checkpointer.restore()
        checkpointer.save(3)
    with ckptman.Checkpointer(tmp_path, state, **options) as checkpointer:
        for step in range(checkpointer.restore() + 1, 7):
            checkpointer.save(step)
            checkpointer.wait()
            assert steps_in(tmp_path) == [3, step]
            assert main(["prune", str(tmp_path)]) == 0
            assert steps_in(tmp_path) == [3, step]
    assert steps_in(tmp_path) == [6], "and no longer, by the rules"
    commit(tmp_path, 7)
    with ckptman.Checkpointer(tmp_path, state, **options) as checkpointer:
        checkpointer.restore(step=6)
    assert steps_in(tmp_path) == [6, 7], "who saves nothing deletes nothing"
    assert read_policy(tmp_path) == ckptman.KeepLast(1)


@pytest.mark.slow
def test_a_deletion_that_still_runs_is_waited_for_where_its_room_is_needed(tmp_path, monkeypatch):
    """Deleted checkpoints are removed behind the training: a save that finds no room waits for that, by default too."""
    disk = SmallDisk(tmp_path, 2.5 * CHECKPOINT_BYTES)
    pause = Remover._pause

    def wait(remover):
        remover._hurry.wait()  # as if nothing were ever removed unless somebody needs it
        pause(remover)

    monkeypatch.setattr(Remover, "_pause", wait)
    train(tmp_path, 6, disk, keep=1, on_full="fail")
    assert steps_in(tmp_path) == [6]
    assert events(tmp_path, "disk_full")
    assert not events(tmp_path, "save_failed")


def test_a_deletion_that_fails_is_told_once_and_fails_no_save(tmp_path):
    class Stuck(Disk):
        def remove_tree(self, path):
            raise PermissionError(13, "Permission denied", str(path))

    told = train(tmp_path, 5, Stuck(), keep=1)
    assert steps_in(tmp_path) == [5]
    assert len([each for each in told if "older checkpoints could not be pruned" in each]) == 1
    train(tmp_path, 6, keep=1)
    assert not [path for path in tmp_path.iterdir() if ".trash-" in path.name]


@pytest.mark.parametrize("on_full", ["stop", None, True])
def test_other_wishes_are_refused(tmp_path, on_full):
    with pytest.raises(ConfigError, match='on_full is "fail" or "prune"'):
        ckptman.Checkpointer(tmp_path, {"x": 1}, retention=ckptman.KeepLast(1), on_full=on_full)
    with pytest.raises(ConfigError, match="needs a retention policy"):
        ckptman.Checkpointer(tmp_path, {"x": 1}, on_full="prune")


def test_every_code_that_means_full_is_known():
    assert set(FULL) == {errno.ENOSPC, errno.EDQUOT}


@pytest.fixture
def small_mount(tmp_path):
    """A tmpfs with room for three checkpoints and a half."""
    point = tmp_path / "small"
    point.mkdir()
    size = f"size={int(3.5 * CHECKPOINT_BYTES)}"
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(point)], check=False, capture_output=True)
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


@pytest.mark.parametrize("async_save", [True, False])
def test_a_file_system_that_is_full(small_mount, async_save):
    root = small_mount / "run"
    told = train(root, 8, async_save=async_save)
    assert steps_in(root) == [6, 7, 8]
    assert any("the disk is full" in each for each in told)
    state = {"x": {"w": torch.empty(TENSOR_BYTES // 4)}}
    ckptman.load(state, root / step_folder(8))
    assert torch.all(state["x"]["w"] == 8)


def test_what_is_to_go_is_removed_behind_the_run(tmp_path):
    remover = Remover(lambda path, error: None)
    for number in range(5):
        remover.add(tree(tmp_path / str(number)))
    remover.close(60)
    assert list(tmp_path.iterdir()) == []
    assert remover.pending == []
    remover.close(1)
    remover.close(1)


def test_while_the_run_saves_it_waits_between_two_files_unless_somebody_needs_the_room(tmp_path, monkeypatch):
    monkeypatch.setattr(retention_runner, "_GENTLY_SECONDS", 600.0)
    remover = Remover(lambda path, error: None)
    remover.slow_down(True)
    remover.add(tree(tmp_path / "folder"))
    assert not remover.drain(0) or not (tmp_path / "folder").exists()
    assert remover.drain(60)
    remover.slow_down(False)
    remover.add(tree(tmp_path / "other"))
    remover.close(60)
    assert list(tmp_path.iterdir()) == []


def test_at_the_end_what_takes_too_long_is_left(tmp_path):
    stuck, seen = threading.Event(), threading.Event()

    class Slow(Disk):
        def remove_file(self, path):
            seen.set()
            stuck.wait()
            super().remove_file(path)

    remover = Remover(lambda path, error: None)
    with on_disk(Slow()):
        remover.add(tree(tmp_path / "folder"))
        assert seen.wait(60)
        threading.Timer(0.2, stuck.set).start()
        remover.close(0.05)
    assert (tmp_path / "folder").exists()


def test_what_cannot_be_removed_is_told_and_the_rest_goes_on(tmp_path):
    class Refusing(Disk):
        def remove_tree(self, path):
            if path.name == "bad":
                raise PermissionError(13, "Permission denied")
            super().remove_tree(path)

    told = []
    remover = Remover(lambda path, error: told.append(path))
    with on_disk(Refusing()):
        for name in ("bad", "good"):
            remover.add(tree(tmp_path / name))
        assert remover.drain(60)
    assert told == [tmp_path / "bad"]
    assert not (tmp_path / "good").exists()
    remover.close(1)
