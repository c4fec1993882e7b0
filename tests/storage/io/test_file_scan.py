"""Reading files from end to end: the digest of each block, by threads or by processes, whatever becomes of these."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from ckptman.storage.io import file_reader, file_scan
from ckptman.storage.io.checksums import BLOCK_BYTES, digest_file
from ckptman.storage.io.file_scan import default_threads, scan
from ckptman.storage.io.threads import STRIDE_BYTES, THREADS_ENV


def _scan(folder, sizes, block=BLOCK_BYTES, **more):
    """Read files, and compare the digests of their blocks with those of one reading."""
    found = {}
    scan(folder, list(sizes.items()), block, finish=lambda each: found.update({each.name: each}), **more)
    assert found.keys() == sizes.keys()
    for name, size in sizes.items():
        assert (size, bytes(found[name].blocks)) == (size, b"".join(digest_file(folder / name, block)[1]))
        assert (found[name].unreadable, found[name].refused) == ({}, None)


def _write(folder, sizes):
    for name, size in sizes.items():
        (folder / name).write_bytes(np.random.default_rng(size).bytes(size))
    return folder, sizes


@pytest.mark.parametrize("block", [512, 4096, 12288, BLOCK_BYTES, 6 * 1024 * 1024])
@pytest.mark.parametrize("cold", [False, True])
def test_digests_are_those_of_one_reading_whatever_the_blocks(block, cold, tmp_path, monkeypatch):
    if cold:
        monkeypatch.setattr(file_scan.ScanFile, "is_cold", lambda *_: True)
    sizes = {"empty": 0, "one": 1, "page": 4096, "odd": 3 * block + 77, "long": 2 * STRIDE_BYTES + block + 5}
    _scan(*_write(tmp_path, sizes), block, threads=3)


@pytest.fixture
def apart(monkeypatch):
    """Processes are worth it whatever there is to read."""
    monkeypatch.setattr(file_scan, "LEAST_BYTES", 0)
    return monkeypatch


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    sizes = {"a": 3 * STRIDE_BYTES + 1, "b": 0, "c": 5000, "d": 2 * STRIDE_BYTES, "e": STRIDE_BYTES + BLOCK_BYTES + 7}
    return _write(tmp_path_factory.mktemp("large"), sizes)


@pytest.mark.parametrize("cached", [True, False, None])
def test_processes_find_the_same_digests(cached, large, apart):
    folder, sizes = large
    apart.setattr(file_reader.FileReader, "is_cached", lambda *_: cached)
    # Nothing is left for this process to read.
    apart.setattr(file_scan.ScanFile, "read", lambda *_: pytest.fail("not apart"))
    told = []
    _scan(folder, sizes, threads=2, processes=True, done=told.append)
    assert sum(told) == sum(sizes.values())


def test_what_a_process_that_died_left_undone_is_read_here(large, apart):
    folder, sizes = large
    real, here = file_scan.ScanFile.digests, os.getpid()

    def die(self, low, high, *more):
        if os.getpid() == here:
            return real(self, low, high, *more)
        if low == STRIDE_BYTES:
            os.kill(os.getpid(), signal.SIGBUS)  # as a page does that is gone
        if low == 2 * STRIDE_BYTES:
            raise OSError(errno.EIO, "as a disk does")
        return real(self, low, high, *more)

    apart.setattr(file_scan.ScanFile, "digests", die)
    for processes in (1, 2, 5):
        _scan(folder, sizes, threads=processes, processes=True)


def _open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_where_there_can_be_no_process_threads_do_it(large, apart):
    folder, sizes = large

    def refuse():
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    apart.setattr(os, "fork", refuse)
    before = _open_files()
    _scan(folder, sizes, threads=2, processes=True)
    assert _open_files() == before


def test_no_process_outlives_an_interruption(large, apart):
    folder, sizes = large

    def stop(done):
        raise KeyboardInterrupt

    before, others = _open_files(), set(psutil.Process().children())
    with pytest.raises(KeyboardInterrupt):
        _scan(folder, sizes, threads=3, processes=True, done=stop)
    left = set(psutil.Process().children()) - others
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]
    assert _open_files() == before


ORPHANS = """
import os, signal, sys, time
from pathlib import Path
from ckptman.storage.io import file_scan
file_scan.LEAST_BYTES = 0
file_scan.MOST_PIECES = 1
real = file_scan.ScanFile.digests
def slow(*arguments):
    time.sleep(0.2)
    return real(*arguments)
file_scan.ScanFile.digests = slow
folder = Path(sys.argv[1])
sizes = [(path.name, path.stat().st_size) for path in folder.iterdir()] * 40
print("begun", flush=True)
file_scan.scan(folder, sizes, 32768, finish=lambda each: None, threads=3, processes=True,
               done=lambda size: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_processes_whose_parent_was_killed_end_too(large):
    command = [sys.executable, "-c", ORPHANS, str(large[0])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        # They have our pipe, too: it ends when the last of them has ended.
        assert process.communicate(timeout=240)[0] == "begun\n"
    assert process.returncode == -signal.SIGKILL


def test_threads_follow_the_cores_or_the_environment(monkeypatch):
    monkeypatch.delenv(THREADS_ENV, raising=False)
    assert 1 <= default_threads() <= 8
    monkeypatch.setenv(THREADS_ENV, "3")
    assert default_threads() == 3
