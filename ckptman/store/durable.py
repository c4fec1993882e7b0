"""Durable file operations. Every fsync, rename and removal of ckptman is in this file, behind one small class.

What holds after each call returns, on a file system that keeps POSIX's word (ext4, XFS, Lustre, GPFS, NFS with sync):
the bytes of `write_file` survive a power cut once `sync_folder` was called on the folder that names them; `rename` is
atomic for everybody who looks, and durable after `sync_folder` of the parent.
What does not: nothing here protects against a disk that acknowledges a flush it did not make.

Tests replace one method of `Disk` to fail, or to die, at the n-th operation.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path


class Disk:
    """The operations a commit is made of. Stateless; `DISK` is the one to use."""

    def make_folder(self, path: Path) -> None:
        """Make one new folder. Raises FileExistsError."""
        path.mkdir()

    def make_folders(self, path: Path) -> None:
        """Make a folder and its parents where missing, each of them durable."""
        missing = []
        while not path.exists():
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            self.sync_folder(folder.parent)

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a whole new file and flush it to storage. The folder is not flushed."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    def replace_file(self, path: Path, data: bytes) -> None:
        """Put `data` in place of `path`, durably: whoever looks sees the old bytes or the new ones, never a mixture."""
        temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{os.urandom(4).hex()}")
        try:
            self.write_file(temporary, data)
            self.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self.sync_folder(path.parent)

    def sync_file(self, fd: int) -> None:
        """Flush an open file to storage."""
        os.fsync(fd)

    def sync_folder(self, path: Path) -> None:
        """Flush a folder: the names in it survive a power cut."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
        source.rename(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name. Raises FileExistsError: of several callers exactly one succeeds, on NFS too."""
        target.hardlink_to(source)

    def remove_file(self, path: Path) -> None:
        """Remove a file; one that is gone already is no error."""
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and what is in it, never through a link; what is gone already is no error."""
        if path.is_symlink():
            raise OSError(errno.ELOOP, "refusing to remove what a link points to", str(path))
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if path.exists():  # somebody removes it at the same time: once more for the rest
                shutil.rmtree(path, ignore_errors=True)


DISK = Disk()
