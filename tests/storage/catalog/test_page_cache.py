import os
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptman.storage.catalog.backends import page_cache as pagecache
from ckptman.storage.catalog.backends.page_cache import drop
from tests.helpers.node_memory import shm

__all__ = ["shm"]


@contextmanager
def written(path, size):
    """A file of so many bytes that are durable, open."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.write(fd, os.urandom(size))
        os.fsync(fd)
        yield fd
    finally:
        os.close(fd)


def in_memory(path):
    found = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    around = [(mount, kind) for _, mount, kind, *_ in found if path.is_relative_to(mount)]
    return max(around, key=lambda each: len(each[0]))[1] in ("tmpfs", "ramfs", "overlay")


@pytest.mark.parametrize("size", [1, 4096, 300_000, 9_000_001])
def test_what_is_dropped_is_no_longer_in_memory(size, tmp_path):
    if in_memory(tmp_path):
        pytest.skip("the file system of this folder is memory")
    with written(tmp_path / "file", size) as fd:
        os.pread(fd, size, 0)  # FUSE does not keep the part of a page that was written
        assert pagecache._is_resident(fd, size)
        assert drop(fd, size)
        assert not pagecache._is_resident(fd, size)
        os.pread(fd, 1, 0)
        assert pagecache._is_resident(fd, size)


def test_a_file_system_that_is_memory_lets_go_of_nothing(shm):
    with written(shm / "file", 5000) as fd:
        assert not drop(fd, 5000, attempts=1)
