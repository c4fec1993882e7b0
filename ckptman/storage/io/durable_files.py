"""Durable file operations. Every fsync, rename and removal of ckptman is in this file, behind one small class.

What holds after each call returns, on a file system that keeps POSIX's word (ext4, XFS, Lustre, GPFS, NFS with sync):
the bytes of `write_file` survive a power cut once `sync_folder` was called on the folder that names them; `rename` is
atomic for everybody who looks, and durable after `sync_folder` of the parent.
What does not: nothing here protects against a disk that acknowledges a flush it did not make.

In a root that several users may write to, somebody may put a link in place of a folder at any moment. A folder that is
being written is therefore opened once (see `holding`), and while that lasts what is made, renamed and removed in it is
in the folder that was opened, whatever has its name by then. Nothing is changed behind a link that has the name of a
checkpoint or of a run's own folder, and the super-user, who may do anything to anybody, follows no link of one user to
a folder of another.

Folders get the permissions that the user's umask leaves, or 0700 where `CKPTMAN_PRIVATE` is set to 1: then nobody else
gets at what is in them, whatever permissions the files have.

There is one `Disk`, `DISK`. Tests replace its methods to fail, or to die, at the n-th operation.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import stat
import threading
import time
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


RUN_FOLDER = ".ckptman"
"""The name of the folder in a root with the run's own files."""
_NEVER_LINKS = re.compile(rf"{re.escape(RUN_FOLDER)}|step-[0-9]{{10}}(\..+)?", re.ASCII | re.DOTALL)
"""Names of folders in which nothing is changed if they are links: what they lead to is none of a root."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MOST_LINKS = 40
"""As the system has it."""


class _Folder:
    """An open folder. It is closed when the last who uses it has let it go, in whatever thread that is."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


_held: dict[Path, list[_Folder]] = {}
"""Folders that are held, once for each who does."""
_turn = threading.Lock()


def _forked() -> None:
    global _turn
    _turn = threading.Lock()  # somebody may have had it


os.register_at_fork(after_in_child=_forked)


@contextlib.contextmanager
def holding(folder: Path, *, through_link: bool = False) -> Iterator[os.stat_result]:
    """While this lasts, what this process makes, renames and removes in a folder is in the one that has its name now.
    Gives what the system says of it.

    Raises: OSError, also where it is a link, unless `through_link`.
    """
    if (held := _held_folder(folder)) is not None:
        # Not dup(): who lists it would share the place with others.
        mine = _Folder(os.open(".", _FOLDER, dir_fd=held.fd))
    elif (parent := _held_folder(folder.parent)) is not None:
        with named(folder):
            mine = _Folder(os.open(folder.name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent.fd))
    elif through_link:
        mine = _Folder(_open_through_links(folder))
    else:
        mine = _Folder(os.open(folder, _FOLDER | os.O_NOFOLLOW))
    with _turn:
        _held.setdefault(folder, []).append(mine)
    try:
        yield os.fstat(mine.fd)
    finally:
        with _turn:
            _held[folder].remove(mine)
            if not _held[folder]:
                del _held[folder]


def is_super_user() -> bool:
    """Return whether this process may do anything to anybody. The user 0 of a user namespace may not."""
    if os.geteuid() != 0:
        return False
    try:
        return Path("/proc/self/uid_map").read_text().split()[:2] == ["0", "0"]
    except OSError:
        return True


def _open_through_links(folder: Path) -> int:
    """Open a folder. For the super-user a link on the way counts only if it is his own, or what it leads to belongs to
    whom the link belongs to: anybody else could have him work in there for them. Raises: OSError."""
    if not is_super_user():
        return os.open(folder, _FOLDER)
    left: list[str | tuple[int, str]] = list(reversed(folder.absolute().parts[1:]))
    at, links = os.open("/", _FOLDER), 0
    try:
        while left:
            name = left.pop()
            if isinstance(name, tuple):
                owner, link = name
                if owner not in (0, os.fstat(at).st_uid):
                    told = f"{link} on the way is a link of a user who does not own it"
                    raise OSError(errno.EPERM, told, str(folder))
                continue
            with named(folder):
                found = os.stat(name, dir_fd=at, follow_symlinks=False)
                if stat.S_ISLNK(found.st_mode):
                    target, links = os.readlink(name, dir_fd=at), links + 1
                    if links > _MOST_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                    left.append((found.st_uid, name))  # looked at when the link was followed to its end
                    left += reversed([each for each in target.split("/") if each])
                    name = "/" if target.startswith("/") else "."
                # On the way there what may be passed need not be readable.
                is_last = not any(isinstance(each, str) for each in left)
                fd = os.open(name, (_FOLDER if is_last else _FOLDER | os.O_PATH) | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = fd
    except BaseException:
        os.close(at)
        raise
    return at


def check_held(folder: Path) -> None:
    """Raises: OSError where something else has the name of a folder that is held. One that is not held: nothing."""
    if (mine := _held_folder(folder)) is None:
        return
    held, there = os.fstat(mine.fd), os.lstat(folder)
    if (held.st_dev, held.st_ino) != (there.st_dev, there.st_ino):
        raise OSError(errno.ESTALE, "something else was put in its place while it was written", str(folder))


def owner_of(path: Path) -> int | None:
    """Return the user id that something belongs to, by the folder that is held; None: there is nothing of that name."""
    with contextlib.suppress(FileNotFoundError), _folder_of(path) as folder:
        return os.stat(path if folder is None else path.name, dir_fd=folder, follow_symlinks=False).st_uid
    return None


def stat_of(folder: Path) -> os.stat_result:
    """Return what the system says of a folder: of the one that is held, if it is. Raises: OSError."""
    held = _held_folder(folder)
    return folder.stat() if held is None else os.fstat(held.fd)


def through(path: Path) -> Path:
    """Return a path to something in a held folder that leads there whatever has the name of the folder by now. Where
    the system has no such paths: the same."""
    if (folder := _held_folder(path.parent)) is None:
        return path
    held = Path(f"/proc/self/fd/{folder.fd}")
    return held / path.name if held.exists() else path


def open_new(path: Path, flags: int) -> int:
    """Open a file for writing, made where it is missing, and through no link where its folder is held. Raises: OSError.

    A file in a held folder of somebody else is not made: it would be read or changed before it counts.
    """
    with _folder_of(path) as folder:
        if folder is None:
            return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fd = os.open(path.name, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666, dir_fd=folder)
        # Not the id of this process: servers map ids, but those of a file and of its folder alike.
        if flags & os.O_EXCL and path.parent in _held and os.fstat(fd).st_uid != os.fstat(folder).st_uid:
            os.close(fd)
            os.unlink(path.name, dir_fd=folder)
            raise OSError(errno.EPERM, "its folder belongs to another user", str(path))
        return fd


def _held_folder(folder: Path) -> _Folder | None:
    try:
        return _held[folder][0]
    except (KeyError, IndexError):
        return None


@contextlib.contextmanager
def _folder_of(path: Path) -> Iterator[int | None]:
    """Gives the folder that something is in where it is held, or is one that is never a link; None: go by its path.
    An error of the system tells the whole path."""
    folder = path.parent
    held = _held_folder(folder)
    if held is not None:
        with named(path):
            yield held.fd
        return
    if _NEVER_LINKS.fullmatch(folder.name) is None:
        yield None
        return
    above = _held_folder(folder.parent)
    with named(path):
        try:
            if above is None:
                fd = os.open(folder, _FOLDER | os.O_NOFOLLOW)
            else:
                fd = os.open(folder.name, _FOLDER | os.O_NOFOLLOW, dir_fd=above.fd)
        except NotADirectoryError:
            raise OSError(errno.ENOTDIR, f"{folder} is no folder, or a link, which ckptman does not follow") from None
        try:
            yield fd
        finally:
            os.close(fd)


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
        with _folder_of(path) as folder:
            os.mkdir(path if folder is None else path.name, folder_mode(), dir_fd=folder)

    def make_folders(self, path: Path) -> None:
        """Make a folder and its parents where missing, each of them durable."""
        missing = []
        while not path.exists() and path != path.parent:
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            folder.mkdir(folder_mode(), exist_ok=True)
            self.sync_folder(folder.parent)

    def make_folder_if_missing(self, path: Path) -> None:
        """Make a folder where it is missing, durably, but none above it: where those are missing, a mount is away.

        Raises: FileNotFoundError, OSError.
        """
        if path.exists():
            return
        path.mkdir(folder_mode(), exist_ok=True)
        if path.name == RUN_FOLDER:
            with _folder_of(path / "any") as made:
                assert made is not None
                give_to_owner_of(path.parent, made)
        self.sync_folder(path.parent)

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
            with _folder_of(path) as folder:
                if folder is None:
                    os.link(temporary, path)
                else:
                    os.link(temporary.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
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
        held = _held_folder(path)
        fd = os.dup(held.fd) if held is not None else os.open(path, _FOLDER)
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
        with _folder_of(source) as blaming_source, _folder_of(target) as of_target:
            if blaming_source is None or of_target is None:
                source.rename(target)
            else:
                os.rename(source.name, target.name, src_dir_fd=blaming_source, dst_dir_fd=of_target)

    def link(self, path: Path, name: Path) -> None:
        """Give a file one more name, which nothing has yet. Raises FileExistsError."""
        os.link(path, name, follow_symlinks=False)

    def remove_file(self, path: Path) -> None:
        """Remove a file or a link; one that is gone already is no error."""
        with contextlib.suppress(FileNotFoundError), _folder_of(path) as folder:
            os.unlink(path if folder is None else path.name, dir_fd=folder)

    def remove_empty_folder(self, path: Path) -> None:
        """Remove a folder with nothing in it; one that is gone, or is in use by now, is no error."""
        try:
            with _folder_of(path) as folder:
                os.rmdir(path if folder is None else path.name, dir_fd=folder)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and what is in it, or a file. Links are removed, never followed; gone already is no error."""
        # Somebody else may be removing the same tree.
        with contextlib.suppress(FileNotFoundError), _folder_of(path) as above:
            name = path if above is None else path.name
            try:
                fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                os.unlink(name, dir_fd=above)
                return
            try:
                held = _held_folder(path)  # it may have another name by now, and count
                if held is not None and not os.path.samestat(os.fstat(held.fd), os.fstat(fd)):
                    raise OSError(errno.ESTALE, "something else was put in its place", str(path))
                _empty(fd)
            finally:
                os.close(fd)
            os.rmdir(name, dir_fd=above)


def _empty(folder: int) -> None:
    with os.scandir(folder) as items:
        names = {item.name: item.is_dir(follow_symlinks=False) for item in items}
    for name, is_folder in names.items():
        with contextlib.suppress(FileNotFoundError):
            if not is_folder:
                os.unlink(name, dir_fd=folder)
                continue
            fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            try:
                _empty(fd)
            finally:
                os.close(fd)
            os.rmdir(name, dir_fd=folder)


def remove_by_file(folder: Path, before_each: Callable[[], object]) -> None:
    """Remove a folder, with a call before each file. Links are removed, never followed. Raises: OSError."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), holding(folder):
        with os.scandir(_held[folder][0].fd) as items:
            names = [item.name for item in items if not item.is_dir(follow_symlinks=False)]
        for name in names:
            before_each()
            DISK.remove_file(folder / name)
        DISK.remove_tree(folder)
        return
    DISK.remove_tree(folder)


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
DISK = Disk()


def give_to_owner_of(folder: Path, fd: int) -> None:
    """What the super-user makes in somebody's root must not keep them from it."""
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            its = stat_of(folder)
            os.fchown(fd, its.st_uid, its.st_gid)


def _write(fd: int, data: bytes) -> None:
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


class ThrottledDelete:
    """Removes folders, from several threads, no more than `files_per_second` files in all of them together."""

    def __init__(self, files_per_second: float) -> None:
        self._seconds = 1 / files_per_second
        self._turn = threading.Lock()
        self._next = time.monotonic()

    def __call__(self, folder: Path) -> None:
        """Remove a folder that nobody sees any more. Raises: OSError."""
        remove_by_file(folder, self._wait)

    def _wait(self) -> None:
        with self._turn:
            now = time.monotonic()
            due = max(self._next, now)
            self._next = due + self._seconds
        if due > now:
            time.sleep(due - now)
