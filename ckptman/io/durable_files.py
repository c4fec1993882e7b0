"""Durable file operations. Every fsync, rename and removal of ckptman is in this file, behind one small class.

What holds after each call returns, on a file system that keeps POSIX's word (ext4, XFS, Lustre, GPFS, NFS with sync):
the bytes of `write_file` survive a power cut once `sync_folder` was called on the folder that names them; `rename` is
atomic for everybody who looks, and durable after `sync_folder` of the parent.
What does not: nothing here protects against a disk that acknowledges a flush it did not make.

In a root that several users may write to, somebody may put a link in place of a folder at any moment. A folder that is
being written is therefore opened once (see `holding`), and while that lasts files in it are made in the folder that was
opened, whatever has its name by then.

Folders get the permissions that the user's umask leaves, or 0700 where `CKPTMAN_PRIVATE` is set to 1: then nobody else
gets at what is in them, whatever permissions the files have.

Tests replace one method of `Disk` to fail, or to die, at the n-th operation.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

PRIVATE_ENV = "CKPTMAN_PRIVATE"
"""1: folders that ckptman makes are for their owner alone. 0, empty or not set: as the umask says."""


def folder_mode() -> int:
    """Return the permissions of a new folder, from which the umask takes its part.

    Raises: OSError where the setting is none: a slip in it must not lay open what was to be private.
    """
    setting = os.environ.get(PRIVATE_ENV, "")
    if setting not in ("", "0", "1"):
        raise OSError(
            errno.EINVAL, f"{PRIVATE_ENV} is {setting!r}: set it to 1 (folders for you alone) or 0 (by umask)"
        )
    return 0o700 if setting == "1" else 0o777


_held: dict[Path, list[int]] = {}
"""Folders that are held, with a descriptor for each who does. No lock: a process may fork at any moment."""


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[None]:
    """While this lasts, what this process makes in a folder goes to the one that has its name now.

    Raises: OSError, also where it is a link.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    fds = _held.setdefault(folder, [])
    fds.append(fd)
    try:
        yield
    finally:
        fds.remove(fd)
        if not fds and _held.get(folder) is fds:
            del _held[folder]
        os.close(fd)


def check_held(folder: Path) -> None:
    """Raises: OSError where something else has the name of a folder that is held. One that is not held: nothing."""
    fd = _fd_of(folder)
    if fd is None:
        return
    held, there = os.fstat(fd), os.lstat(folder)
    if (held.st_dev, held.st_ino) != (there.st_dev, there.st_ino):
        raise OSError(errno.ESTALE, "something else was put in its place while it was written", str(folder))


def open_new(path: Path, flags: int) -> int:
    """Open a file for writing, made where it is missing, and through no link where its folder is held. Raises: OSError.

    A file in a held folder of somebody else is not made: it would be read or changed before it counts.
    """
    folder = _fd_of(path.parent)
    if folder is None:
        return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with named(path):
        fd = os.open(path.name, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666, dir_fd=folder)
        # Not the id of this process: servers map ids, but those of a file and of its folder alike.
        if flags & os.O_EXCL and os.fstat(fd).st_uid != os.fstat(folder).st_uid:
            os.close(fd)
            os.unlink(path.name, dir_fd=folder)
            raise OSError(errno.EPERM, "its folder belongs to another user", str(path))
        return fd


def _fd_of(folder: Path) -> int | None:
    # The first is of who began, and ends last.
    fds = _held.get(folder)
    return fds[0] if fds else None


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Inside, an error of the system tells the whole path."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class Disk:
    """The operations a commit is made of. Stateless; `DISK` is the one to use."""

    def make_folder(self, path: Path) -> None:
        """Make one new folder (see `folder_mode`). Raises FileExistsError."""
        path.mkdir(folder_mode())

    def make_folders(self, path: Path) -> None:
        """Make a folder and its parents where missing, each of them durable."""
        missing = []
        while not path.exists() and path != path.parent:
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            folder.mkdir(folder_mode(), exist_ok=True)
            self.sync_folder(folder.parent)

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a whole new file and flush it to storage. The folder is not flushed."""
        _write(open_new(path, os.O_WRONLY | os.O_TRUNC), data)

    def create_file(self, path: Path, data: bytes) -> None:
        """Write a file that nobody has made yet. Raises FileExistsError: exactly one of several callers succeeds."""
        fd = open_new(path, os.O_WRONLY | os.O_EXCL)
        try:
            _write(fd, data)
        except OSError:
            self.remove_file(path)
            raise

    def create_whole_file(self, path: Path, data: bytes) -> None:
        """As `create_file`, where others read it at any time: they see all of it or none, also after a kill.

        Where the file system has no hard links it is no more than `create_file`.
        """
        temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{os.urandom(4).hex()}")
        try:
            self.write_file(temporary, data)
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self.create_file(path, data)
        finally:
            with contextlib.suppress(OSError):
                self.remove_file(temporary)

    def replace_file(self, path: Path, data: bytes) -> None:
        """Put `data` in place of `path`, durably: whoever looks sees the old bytes or the new ones, never a mixture."""
        temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{os.urandom(4).hex()}")
        try:
            self.write_file(temporary, data)
            self.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove_file(temporary)
            raise
        self.sync_folder(path.parent)

    def write_at(self, fd: int, data: memoryview, offset: int) -> int:
        """Write at a place of an open file, and say how many bytes that took. Nothing is flushed."""
        return os.pwrite(fd, data, offset)

    def reserve(self, fd: int, size: int) -> None:
        """Take the room that a file will need, so that a full disk is known at once; where that cannot be, nothing.

        Not os.posix_fallocate: where the file system has no such call, it writes to every block.
        """
        if _fallocate(fd, 0, 0, size):
            code = ctypes.get_errno()
            if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
                raise OSError(code, os.strerror(code))

    def sync_file(self, fd: int) -> None:
        """Flush an open file to storage."""
        os.fsync(fd)

    def sync_folder(self, path: Path) -> None:
        """Flush a folder: the names in it survive a power cut."""
        held = _fd_of(path)
        fd = os.dup(held) if held is not None else os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            # Some network and FUSE file systems refuse to fsync a folder; there is nothing better to do on them.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
                raise
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name, atomically. An existing file is replaced, a non-empty folder refused."""
        of_source, of_target = _fd_of(source.parent), _fd_of(target.parent)
        if of_source is None or of_target is None:
            source.rename(target)
            return
        with named(source):
            os.rename(source.name, target.name, src_dir_fd=of_source, dst_dir_fd=of_target)

    def link(self, path: Path, name: Path) -> None:
        """Give a file one more name, which nothing has yet. Raises FileExistsError."""
        os.link(path, name, follow_symlinks=False)

    def remove_file(self, path: Path) -> None:
        """Remove a file or a link; one that is gone already is no error."""
        path.unlink(missing_ok=True)

    def remove_empty_folder(self, path: Path) -> None:
        """Remove a folder with nothing in it; one that is gone, or is in use by now, is no error."""
        try:
            path.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and what is in it, or a file. Links are removed, never followed; gone already is no error."""
        if path.is_symlink() or not path.is_dir():  # a pipe too, which shutil would wait for
            self.remove_file(path)
        elif sys.version_info >= (3, 12):
            shutil.rmtree(path, onexc=_unless_gone)
        else:
            shutil.rmtree(path, onerror=lambda what, name, info: _unless_gone(what, name, info[1]))


def remove_by_file(folder: Path, disk: Disk, before_each: Callable[[], object]) -> None:
    """Remove a folder, with a call before each file. Links are removed, never followed. Raises: OSError."""
    with contextlib.suppress(FileNotFoundError):
        if folder.is_dir() and not folder.is_symlink():
            with os.scandir(folder) as items:
                names = [item.name for item in items if not item.is_dir(follow_symlinks=False)]
            for name in names:
                before_each()
                disk.remove_file(folder / name)
    disk.remove_tree(folder)


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
DISK = Disk()


def _unless_gone(what: object, name: object, error: BaseException) -> None:
    # Somebody else may be removing the same tree.
    if not isinstance(error, FileNotFoundError):
        raise error


def _write(fd: int, data: bytes) -> None:
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
