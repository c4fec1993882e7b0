"""Files of random bytes, their digests, and ranges of them to be read."""

import errno
import fcntl
import os
import random
from types import SimpleNamespace

from ckptman.storage.io import file_writer
from ckptman.storage.io.checked_reader import Wanted
from ckptman.storage.io.checksums import Digests, digest_file, large_block_bytes
from ckptman.storage.io.file_reader import FileReader

KIB, MIB = 1024, 1024 * 1024
BLOCK = 128 * KIB


def random_bytes(size, seed=0):
    return random.Random(seed).randbytes(size)


def digests_of(path, block_bytes=BLOCK):
    """What a save keeps of a file."""
    size, blocks = digest_file(path, block_bytes)
    large = large_block_bytes(size, block_bytes)
    return Digests(block_bytes, b"".join(blocks), size, large, b"".join(digest_file(path, large)[1]) if large else b"")


def into(file, offset, size, label="", place=None):
    return Wanted(file, offset, size, into=memoryview(place if place is not None else bytearray(size)), label=label)


def tells_what_is_cached(folder):
    """Whether the file system of a folder lets a read ask for what is in the page cache. FUSE does not."""
    path = folder / "asked"
    path.write_bytes(bytes(BLOCK))
    with path.open("rb") as file:
        file.read()
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            pass
        except OSError:
            return False
        finally:
            path.unlink()
    return True


def refuse_direct(monkeypatch):
    """Have files written as on a file system that takes no direct I/O, and read from the page cache."""
    real = fcntl.fcntl

    def refuse(fd, command, flags=0):
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, flags)

    constants = {"F_GETFL": fcntl.F_GETFL, "F_SETFL": fcntl.F_SETFL}
    monkeypatch.setattr(file_writer, "fcntl", SimpleNamespace(fcntl=refuse, **constants))
    monkeypatch.setattr(FileReader, "is_cold", lambda *_: None)
