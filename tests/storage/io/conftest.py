"""What the tests of files share."""

import os
from pathlib import Path

import pytest

from ckptman.storage.io.durable_files import DISK


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
