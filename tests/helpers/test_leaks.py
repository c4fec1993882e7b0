"""The guard sees each kind of thing that a test can leave behind."""

import os
import signal
import threading

import pytest

from ckptman.storage.io import checksums
from tests.helpers import leaks
from tests.helpers.leaks import Leaks, Patches


def test_nothing_is_left():
    assert Leaks().left() == []


@pytest.mark.parametrize(
    ("leave", "told"),
    [
        (lambda stack, folder: stack.chdir(folder), "another directory"),
        (lambda stack, folder: stack.setenv("SLURM_JOB_ID", "1"), "an environment variable: SLURM_JOB_ID"),
        (lambda stack, folder: stack.delenv("PATH"), "an environment variable: PATH"),
    ],
)
def test_what_is_changed_is_named(leave, told, tmp_path, monkeypatch):
    before = Leaks()
    leave(monkeypatch, tmp_path)
    (found,) = before.left()
    assert told in found


def test_a_file_a_handler_and_a_thread_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(leaks, "WAIT_SECONDS", 0.0)
    before, ended = Leaks(), threading.Event()
    thread = threading.Thread(target=ended.wait, name="ckptman-left")
    thread.start()
    handler = signal.signal(signal.SIGUSR1, lambda *_: None)
    with (tmp_path / "open").open("w"):
        found = before.left()
        assert Leaks(["open"]).left() == []
    signal.signal(signal.SIGUSR1, handler)
    ended.set()
    thread.join()
    assert found == [f"1 descriptors: {tmp_path}/open", "another handler: SIGUSR1", "a thread: ckptman-left"]
    assert before.left() == []


def test_patches_of_the_package_and_the_environment_are_undone():
    before, size = Patches(), checksums.BLOCK_BYTES
    checksums.BLOCK_BYTES = 1
    os.environ["CKPTMAN_ATTEMPT"] = "7"
    before.undo()
    assert size == checksums.BLOCK_BYTES
    assert "CKPTMAN_ATTEMPT" not in os.environ
