"""A folder as another client of a distributed file system shows it: a mount of its own, made by FUSE.

    with other_client(folder, tmp_path / "mount") as client:
        client.turn("stale")    # from now on it goes on finding what it has found, by the same names
        ...
        client.turn("stale", False)

What it may be:

    stale          names that were looked up before lead to what they led to then, though somebody renamed or removed
                   it since; a file that is removed cannot be opened (ESTALE). Listings are new, as on GlusterFS and
                   MooseFS, where this lasts for a second
    whole seconds  times have no fractions, as on MooseFS
    away           nothing answers (ENOTCONN), as when the process behind a mount was killed
    read only      nothing can be written (EROFS)
    other clock    times are an hour ahead
    unmounted      there is the empty folder that is below the mount, for who opens anything anew

The file system runs in a process of its own: one that serves itself would wait for itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import pytest

Way = Literal["stale", "whole seconds", "away", "read only", "other clock", "unmounted"]
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_DETACH = 2
_READY = b"mounted\n"


class Client:
    """A mount at `path`, and the process that serves it."""

    def __init__(self, path: Path, control: Path, server: subprocess.Popen[bytes]) -> None:
        self.path, self.server, self._control = path, server, control

    def turn(self, way: Way, on: bool = True, *, at: int = 0) -> None:
        """Have it be so, or no longer. `at`: from that operation on, as counted from now."""
        if way == "unmounted" and on and not at:
            _unmount(str(self.path))
        elif on and at:
            (self._control / "at").write_text(f"{at} {way}")
            self._control.joinpath("at").rename(self._control / "plan")
        elif on:
            (self._control / way).touch()
        else:
            for each in (way, "plan"):
                (self._control / each).unlink(missing_ok=True)

    def has_come(self, way: Way) -> bool:
        """Whether it is so now."""
        return (self._control / way).exists()


@contextmanager
def other_client(folder: Path, mount: Path) -> Iterator[Client]:
    """Show a folder at `mount`, too. Skips the test where FUSE cannot be had, unless it must (CKPTMAN_TEST_MOUNTS)."""
    control = mount.with_name(f"{mount.name}-control")
    for each in (mount, control):
        each.mkdir()
    command = [sys.executable, __file__, str(folder), str(mount), str(control)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as server:
        try:
            if server.stdout.readline() != _READY:
                why = f"no FUSE here: {server.stderr.read().decode()[-300:]}"
                if os.environ.get("CKPTMAN_TEST_MOUNTS") == "must":
                    pytest.fail(why)
                pytest.skip(why)
            yield Client(mount, control, server)
        finally:
            server.kill()
            with suppress(OSError):
                while True:  # of whatever was mounted there meanwhile
                    _unmount(str(mount))


def _serve(folder: str, mount: str, control: str) -> None:
    import mfusepy as fuse  # type: ignore[import-untyped]

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    class Served(fuse.Operations):  # type: ignore[misc]
        """Passes all through to a folder."""

        use_ns = True

        def __init__(self) -> None:
            self._root = os.open(folder, _FOLDER)
            self._count = 0
            self._known: dict[str, int] = {}
            """Folders and files by the paths at which they were found."""

        def init(self, path: str) -> None:
            os.write(1, _READY)

        def _is(self, way: Way) -> bool:
            return os.path.exists(f"{control}/{way}")  # noqa: PTH110 each operation asks

        def _find(self, path: str) -> int:
            """Return a descriptor of what is at a path, or was there when it was found."""
            if path == "/":
                return self._root
            known = self._known.get(path)
            if known is not None and self._is("stale"):
                return known
            above, _, name = path.rpartition("/")
            # None of them is closed: another one may be in use, and the process ends soon.
            self._known[path] = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._find(above or "/"))
            return self._known[path]

        def _at(self, path: str) -> tuple[int, str]:
            above, _, name = path.rpartition("/")
            return self._find(above or "/"), name

        def __getattribute__(self, name: str):  # type: ignore[no-untyped-def]
            found = super().__getattribute__(name)
            if name.startswith("_") or name in ("init", "use_ns", "destroy") or not callable(found):
                return found
            self._look_at_plan()
            if self._is("away"):
                return _refuse(errno.ENOTCONN)
            if name in _WRITES and self._is("read only"):
                return _refuse(errno.EROFS)
            return found

        def _look_at_plan(self) -> None:
            try:
                number, way = Path(control, "plan").read_text().split(" ", 1)
            except FileNotFoundError:
                self._count = 0
                return
            self._count += 1
            if self._count == int(number):
                Path(control, way).touch()
                if way == "unmounted":
                    _unmount(mount)

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            found = os.fstat(self._find(path))
            told = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
            unit = 1_000_000_000 if self._is("whole seconds") else 1
            ahead = 3_600_000_000_000 if self._is("other clock") else 0
            for name in ("st_atime", "st_mtime", "st_ctime"):
                told[name] = told.pop(f"{name}_ns") // unit * unit + ahead
            return told

        def readdir(self, path: str, fh: int) -> list[str]:
            there = os.open(f"/proc/self/fd/{self._find(path)}", _FOLDER)
            try:
                return [".", "..", *os.listdir(there)]  # noqa: PTH208 of a descriptor
            finally:
                os.close(there)

        def open(self, path: str, flags: int) -> int:
            found = self._find(path)
            if os.fstat(found).st_nlink == 0:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return os.open(f"/proc/self/fd/{found}", flags & ~os.O_NOFOLLOW & ~os.O_CREAT & ~os.O_EXCL)

        def create(self, path: str, mode: int, flags: int | None = None) -> int:
            above, name = self._at(path)
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode, dir_fd=above)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            os.truncate(f"/proc/self/fd/{self._find(path)}" if fh is None else fh, length)
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            return 0

        def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
            return 0

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def mkdir(self, path: str, mode: int) -> int:
            above, name = self._at(path)
            os.mkdir(name, mode, dir_fd=above)
            return 0

        def rmdir(self, path: str) -> int:
            above, name = self._at(path)
            os.rmdir(name, dir_fd=above)
            return 0

        def unlink(self, path: str) -> int:
            above, name = self._at(path)
            os.unlink(name, dir_fd=above)
            return 0

        def rename(self, old: str, new: str) -> int:
            (old_above, old_name), (new_above, new_name) = self._at(old), self._at(new)
            os.rename(old_name, new_name, src_dir_fd=old_above, dst_dir_fd=new_above)
            for path in [path for path in self._known if f"{path}/".startswith((f"{old}/", f"{new}/"))]:
                del self._known[path]
            return 0

        def link(self, target: str, source: str) -> int:
            (old_above, old_name), (new_above, new_name) = self._at(source), self._at(target)
            os.link(old_name, new_name, src_dir_fd=old_above, dst_dir_fd=new_above)
            return 0

        def symlink(self, target: str, source: str) -> int:
            above, name = self._at(target)
            os.symlink(source, name, dir_fd=above)
            return 0

        def readlink(self, path: str) -> str:
            above, name = self._at(path)
            return os.readlink(name, dir_fd=above)

        def chmod(self, path: str, mode: int) -> int:
            Path(f"/proc/self/fd/{self._find(path)}").chmod(stat.S_IMODE(mode))
            return 0

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            os.utime(f"/proc/self/fd/{self._find(path)}", ns=times)
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            found = os.statvfs(folder)
            return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}

    never = {"entry_timeout": 0, "attr_timeout": 0, "negative_timeout": 0}
    fuse.FUSE(Served(), mount, foreground=True, nothreads=True, hard_remove=True, **never)


_WRITES = {"create", "write", "truncate", "mkdir", "rmdir", "unlink", "rename", "link", "symlink", "chmod", "utimens"}


def _unmount(path: str) -> None:
    """Detach a mount from its folder, without asking it anything."""
    if ctypes.CDLL(None, use_errno=True).umount2(path.encode(), _DETACH) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


def _refuse(number: int) -> Callable[..., int]:
    def refuse(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    return refuse


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        _serve(*sys.argv[1:])
