"""What the tests of files share."""

import os
import threading
from pathlib import Path

import pytest

from ckptman.io.durable_files import DISK


@pytest.fixture
def nothing_left():
    """No test leaves a file open or a thread running."""
    before = _open_files()
    yield
    # What earlier tests left to be collected may go meanwhile.
    assert _open_files() <= before
    assert not [each for each in threading.enumerate() if each.name == "ckptman-io"]


@pytest.fixture(params=["disk", "shm"])
def folder(request, tmp_path, tmp_path_factory):
    """A folder on the disk and one in memory."""
    if request.param == "disk":
        yield tmp_path
        return
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("no /dev/shm")
    made = shm / f"ckptman-test-{os.getpid()}-{os.urandom(4).hex()}"
    made.mkdir()
    try:
        yield made
    finally:
        DISK.remove_tree(made)


def _open_files():
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{each.name}: {each.readlink()}")
        except OSError:  # that of the listing itself
            continue
    return found
