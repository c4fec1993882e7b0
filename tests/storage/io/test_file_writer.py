"""Writing files: what is written is what the source gave, by direct I/O where that can be, or an error is raised."""

import errno
import fcntl
import os
import threading

import numpy as np
import pytest

from ckptman.storage.io import file_writer
from ckptman.storage.io import threads as parallel
from ckptman.storage.io.checksums import Digests, digest_file, digest_of_blocks
from ckptman.storage.io.durable_files import Disk
from ckptman.storage.io.file_writer import Written, write_source
from ckptman.storage.io.threads import ALIGN_BYTES, STRIDE_BYTES
from tests.helpers.faulty_disk import on_disk
from tests.helpers.files import BLOCK, digests_of, random_bytes, refuse_direct


@pytest.fixture(autouse=True)
def _large_blocks(monkeypatch):
    monkeypatch.setattr(file_writer, "BLOCK_BYTES", BLOCK)


class Bytes:
    """A source in memory: views of its own memory (`own`, at `shift` bytes from a page), or copies in the scratch."""

    def __init__(self, data, own=True, shift=64):
        page = np.zeros(len(data) + 2 * ALIGN_BYTES, np.uint8)
        start = -page.ctypes.data % ALIGN_BYTES + shift
        page[start : start + len(data)] = np.frombuffer(data, np.uint8)
        self.size_bytes, self._own = len(data), own
        self._data = page.data[start : start + len(data)]
        self.views = 0

    def view(self, offset, scratch):
        self.views += 1
        data = self._data[offset : offset + len(scratch)]
        if self._own:
            return data
        scratch[:] = data
        return scratch


class FailingDisk(Disk):
    """Fails, or does less, at write number `at`."""

    def __init__(self, at, what):
        self.at, self.what, self.writes, self.syncs = at, what, 0, 0
        self._lock = threading.Lock()

    def write_at(self, fd, data, offset):
        with self._lock:
            self.writes += 1
            mine = self.writes - 1
        return self.what(fd, data, offset) if mine == self.at else super().write_at(fd, data, offset)

    def sync_file(self, fd):
        self.syncs += 1
        super().sync_file(fd)


def failing(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("own", [True, False])
def test_a_file_holds_the_bytes_of_its_source(folder, threads, own):
    for number, size in enumerate([0, ALIGN_BYTES, BLOCK, STRIDE_BYTES, 2 * STRIDE_BYTES + BLOCK + 3 * ALIGN_BYTES]):
        data, path = random_bytes(size), folder / f"file-{number}"
        for shift in (0, 64) if own else (0,):
            path.unlink(missing_ok=True)
            written = write_source(path, Bytes(data, own, shift), threads=threads)
            assert path.read_bytes() == data
            _, blocks = digest_file(path, BLOCK)
            assert written == Written(digests_of(path), digest_of_blocks(blocks), written.buffered_because)
            assert Digests.from_bytes(written.digests.to_bytes(), BLOCK, size) == written.digests


def test_direct_io_is_used_where_the_file_system_takes_it(tmp_path, monkeypatch):
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system takes no direct I/O")
    flags = []

    def look(fd, data, offset):
        flags.append(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        assert np.frombuffer(data, np.uint8).ctypes.data % ALIGN_BYTES == 0
        return os.pwrite(fd, data, offset)

    with on_disk(FailingDisk(0, look)):
        written = write_source(tmp_path / "x", Bytes(random_bytes(BLOCK)))
    assert written.buffered_because is None
    assert flags == [os.O_DIRECT]
    refuse_direct(monkeypatch)
    plain = write_source(tmp_path / "y", Bytes(random_bytes(BLOCK)))
    assert "no direct I/O" in str(plain.buffered_because)
    assert "Invalid argument" in str(plain.buffered_because)
    assert (tmp_path / "y").read_bytes() == (tmp_path / "x").read_bytes()
    assert plain.digests == written.digests


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_refusal_at_a_write_falls_back_and_keeps_what_is_there(tmp_path, at, threads, number):
    data = random_bytes(3 * STRIDE_BYTES + BLOCK)
    with on_disk(FailingDisk(at, failing(number))) as disk:
        written = write_source(tmp_path / "x", Bytes(data), threads=threads)
    assert (tmp_path / "x").read_bytes() == data
    assert written.digests.blocks == digests_of(tmp_path / "x").blocks
    assert os.strerror(number) in written.buffered_because
    assert (disk.writes, disk.syncs) == (5, 1)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("taken", [1, 511, ALIGN_BYTES, BLOCK + 512])
def test_short_writes_are_completed(tmp_path, monkeypatch, direct, taken):
    if not direct:
        refuse_direct(monkeypatch)

    def take_less(fd, data, offset):
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        try:
            return os.pwrite(fd, data[:taken], offset)
        finally:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)

    data = random_bytes(STRIDE_BYTES + BLOCK)
    with on_disk(FailingDisk(0, take_less)):
        write_source(tmp_path / "x", Bytes(data), threads=2)
    assert (tmp_path / "x").read_bytes() == data


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("at", [0, 2])
def test_a_disk_that_fails_stops_the_write(tmp_path, threads, number, at):
    source, disk = Bytes(bytes(16 * STRIDE_BYTES)), FailingDisk(at, failing(number))
    with on_disk(disk), pytest.raises(OSError, match=str(tmp_path / "x")) as caught:
        write_source(tmp_path / "x", source, threads=threads)
    assert caught.value.errno == number
    assert source.views <= at + 3 * threads
    assert disk.syncs == 0


def test_a_write_that_writes_nothing_is_an_error(tmp_path):
    with on_disk(FailingDisk(0, lambda *_: 0)), pytest.raises(OSError, match="wrote nothing") as caught:
        write_source(tmp_path / "x", Bytes(bytes(BLOCK)))
    assert caught.value.errno == errno.EIO


def test_a_flush_that_fails_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError, match=str(tmp_path / "x")):
        write_source(tmp_path / "x", Bytes(bytes(BLOCK)))


@pytest.mark.parametrize("error", [ValueError("no such tensor"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_of_the_source_is_raised_as_it_is(tmp_path, error, threads):
    class Failing(Bytes):
        def view(self, offset, scratch):
            if offset == 2 * STRIDE_BYTES:
                raise error
            return super().view(offset, scratch)

    source = Failing(bytes(16 * STRIDE_BYTES))
    with pytest.raises(type(error)) as caught:
        write_source(tmp_path / "x", source, threads=threads)
    assert caught.value is error
    assert source.views <= 2 + 3 * threads


def test_a_source_that_gives_too_little_is_refused(tmp_path):
    class Short(Bytes):
        def view(self, offset, scratch):
            return super().view(offset, scratch)[:-1]

    with pytest.raises(ValueError, match="4095 bytes where 4096"):
        write_source(tmp_path / "x", Short(bytes(ALIGN_BYTES)))


def test_a_file_that_is_there_is_not_touched(tmp_path):
    (tmp_path / "x").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        write_source(tmp_path / "x", Bytes(bytes(ALIGN_BYTES)))
    assert (tmp_path / "x").read_bytes() == b"precious"


def test_scratch_is_used_again_and_bounded(tmp_path):
    for number in range(12):
        data = bytes(8 * STRIDE_BYTES)
        write_source(tmp_path / f"{number}", Bytes(data, own=False), threads=4)
        assert sum(len(buffer) for buffer in parallel._free) <= 8 * 4 * STRIDE_BYTES
        assert len(parallel._free) <= 8
        (tmp_path / f"{number}").unlink()
