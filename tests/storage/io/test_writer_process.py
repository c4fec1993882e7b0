"""A process writes what threads would have written; where there is none, or it dies, threads do."""

import errno
import os
import signal
import subprocess
import sys
import time
from unittest import mock

import numpy as np
import psutil
import pytest

from benchmarks.engine.cache import resident_share
from ckptman.storage.io import writer_process
from ckptman.storage.io.checksums import digest_file
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.file_reader import drop_from_cache
from ckptman.storage.io.file_writer import FiniteScan, Range
from ckptman.storage.io.threads import ALIGN_BYTES, STRIDE_BYTES
from ckptman.storage.io.writer_process import Shared, WriterProcess, shared_memory

SIZE = 3 * STRIDE_BYTES + 777


@pytest.fixture(autouse=True)
def _small_files_too(monkeypatch):
    monkeypatch.setattr(writer_process, "LEAST_BYTES", 0)


@pytest.fixture
def process():
    made = WriterProcess()
    yield made
    made.close()


@pytest.fixture
def source():
    memory, fd = shared_memory(SIZE)
    data = np.random.default_rng(0).standard_normal(SIZE // 4 + 1, dtype=np.float32).tobytes()[:SIZE]
    memory[:] = data
    tail = b"the rest".ljust(-SIZE % ALIGN_BYTES + ALIGN_BYTES, b"\0")
    yield Shared(fd, SIZE, tail), data + tail
    memory.release()


def child_of(process):
    return psutil.Process(process._running[1].pid)


def test_what_it_writes_is_what_the_memory_holds(folder, process, source):
    shared, data = source
    for name in ("x", "y"):
        written = process.write(folder / name, shared)
        assert (folder / name).read_bytes() == data
        assert written.digests.blocks == b"".join(digest_file(folder / name)[1])
        assert written.digests.size_bytes == len(data)
    assert child_of(process).nice() == min(19, psutil.Process().nice() + 5)
    child = child_of(process)
    process.close()
    assert not child.is_running()


def test_nan_is_found(folder, process, source):
    shared, _ = source
    with os.fdopen(os.dup(shared.fd), "r+b") as memory:
        memory.seek(STRIDE_BYTES)
        memory.write(np.float32("nan").tobytes())
    scan = FiniteScan([Range(0, 4096, "a", "float32"), Range(4096, SIZE // 4 * 4, "b", "float32")])
    assert process.write(folder / "x", shared, scan=scan) is not None
    assert scan.found == {"b"}


def test_signals_of_the_job_are_not_for_it(folder, process, source):
    shared, data = source
    process.write(folder / "x", shared)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        child_of(process).send_signal(number)
    assert process.write(folder / "y", shared) is not None
    assert (folder / "y").read_bytes() == data


def test_where_it_was_killed_threads_write(folder, process, source):
    shared, _ = source
    process.write(folder / "x", shared)
    child_of(process).kill()
    with pytest.warns(RuntimeWarning, match="threads write them from now on"):
        assert process.write(folder / "y", shared) is None
    assert not (folder / "y").exists()
    assert process.write(folder / "y", shared) is None, "it is not tried again"


def test_where_it_cannot_be_started_threads_write(folder, process, source, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(folder / "no-such-python"))
    with pytest.warns(RuntimeWarning, match="threads write them from now on"):
        assert process.write(folder / "x", source[0]) is None
    assert not (folder / "x").exists()


def test_an_error_of_the_disk_is_raised_here(folder, process, source):
    shared, _ = source
    process.write(folder / "x", shared)
    child_of(process).rlimit(psutil.RLIMIT_FSIZE, (STRIDE_BYTES, STRIDE_BYTES))
    with pytest.raises(OSError, match="File too large") as caught:
        process.write(folder / "y", shared)
    assert caught.value.filename == str(folder / "y")


def until(true):
    end = time.monotonic() + 240
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_last_file_is_kept_in_the_page_cache_and_no_other(tmp_path, process, source):
    shared, data = source
    files = [tmp_path / name for name in "abc"]
    for path in files:
        process.write(path, shared)
    if any(map(resident_share, files)):
        pytest.skip("no direct I/O here: what is written is in the page cache anyway")

    def keep(number):
        process.keep_cached(files[number], starts=True)
        until(lambda: resident_share(files[number]) > 0.9)

    keep(0)
    keep(1)
    assert not resident_share(files[0])
    files[1].unlink()
    keep(2)
    process.keep_cached(files[1], starts=True)
    keep(0)
    assert process.write(tmp_path / "d", shared) is not None
    assert (tmp_path / "d").read_bytes() == data


def test_it_is_started_to_keep_what_others_wrote(tmp_path, process):
    DISK.write_file(tmp_path / "x", bytes(SIZE))
    drop_from_cache(tmp_path / "x")
    process.keep_cached(tmp_path / "x", starts=True)
    until(lambda: resident_share(tmp_path / "x") > 0.9)


def test_keeping_a_file_fails_nothing(tmp_path, process, source):
    shared, _ = source
    process.keep_cached(tmp_path / "none", starts=True)
    assert process.write(tmp_path / "x", shared) is not None
    child_of(process).kill()
    child_of(process).wait(20)
    process.keep_cached(tmp_path / "x", starts=True)
    with pytest.warns(RuntimeWarning, match="threads write them from now on"):
        process.write(tmp_path / "y", shared)
    process.keep_cached(tmp_path / "x", starts=True)
    assert process._running is None, "nor is it started again"


def test_room_for_a_file_is_taken_before_it_is_started(folder, process, source):
    full = mock.patch.object(DISK, "reserve", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with full, pytest.raises(OSError, match="No space left") as caught:
        process.write(folder / "x", source[0])
    assert caught.value.filename == str(folder / "x")
    assert process._running is None


ORPHAN = """
import os, signal, sys
from pathlib import Path
from benchmarks.engine.cache import resident_share
from ckptman.storage.io import writer_process
writer_process.LEAST_BYTES = 0
memory, fd = writer_process.shared_memory(4096)
process = writer_process.WriterProcess()
process.write(Path(sys.argv[1]), writer_process.Shared(fd, 4096, b""))
print(process._running[1].pid, flush=True)
if os.fork() == 0:
    signal.pause()  # it has our end of the pipe, too
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_leaves_when_its_parent_was_killed(folder):
    command = [sys.executable, "-c", ORPHAN, str(folder / "x")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        try:
            child.wait(20)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
    assert not child.is_running()


def test_a_fork_ends_nothing(folder, process, source):
    shared, data = source
    process.write(folder / "x", shared)
    pid = os.fork()
    if pid == 0:
        try:
            process.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert process.write(folder / "y", shared) is not None
    assert (folder / "y").read_bytes() == data
