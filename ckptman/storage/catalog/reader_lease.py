"""Leases: how a reader or a copy keeps prunes from deleting what it reads.

    with lease(root, ["step-0000000100"], what="verify"):
        ...

A lease is a file `.ckptman/lease-<nonce>.json` that names the directories in use. A reader takes it before it looks at
them. A prune takes one of its own for what it is about to delete, then looks for readers, and only then renames a
directory. A reader that finds the lease of a prune waits until the directory is gone or the prune is done with it, and
then lists the root. So either the reader does not find the directory in the listing, or the prune finds the reader. A
prune that cannot write a lease (the disk is full) looks again after the rename, and puts the directory back if somebody
came in between.

Only the listing tells whether a checkpoint is there. On a distributed file system, another client can open a directory
and its files by their old name for a second, or for a minute, after a rename, but it no longer lists that name. So
what cannot be read is damaged only if its checkpoint is still listed (`is_gone`).

On the same host, a lease is dead when its process is. On another host, it is dead when it was not touched for
`SILENT_SECONDS` while we watched: clocks of two hosts are never compared. A lease that is not known to be dead holds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ckptman.errors import CorruptError, NotFoundError, RootError, plain
from ckptman.storage.catalog.liveness import (
    BEAT_SECONDS,
    LOOK_SECONDS,
    Owner,
    forget,
    is_alive,
    this_process,
    watched_in,
)
from ckptman.storage.catalog.writer_lock import device_of
from ckptman.storage.format.paths import DOT, is_lease, lease_path, parse_step, run_folder
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.safe_open import read_regular
from ckptman.storage.io.threads import Flag

_MOST_BYTES = 1024 * 1024
_END_SECONDS = 5.0
_PASS_SECONDS = 10.0
_PASS_LOOK_SECONDS = 0.005
_TRIES = 10


class GoneError(NotFoundError):
    """A checkpoint that is read was deleted, or another one has its name now."""


class Lease(BaseModel):
    """A process that uses folders of a root. `names`: of the folders; `what`: what it does, such as "verify"; `takes`:
    a prune is about to rename them, which holds nothing: readers wait until it is done."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    owner: Owner
    names: tuple[str, ...]
    what: str = Field(max_length=100)
    takes: bool = False

    def __str__(self) -> str:
        job = f", job {self.owner.job_id}" if self.owner.job_id else ""
        return plain(f"in use by {self.what} (pid {self.owner.pid} on host {self.owner.host}{job})")


@dataclass
class Leases:
    """What was found: the folder names in use, with who uses them, and the files of leases that are over.

    `unknown`: there is a lease that cannot be read, so any folder may be in use; "" where there is none.
    """

    names: dict[str, str] = field(default_factory=dict)
    unknown: str = ""
    nonces: set[str] = field(default_factory=set)
    """Of those that are alive."""
    dead: list[Path] = field(default_factory=list)

    def holder(self, name: str) -> str:
        """Who uses a folder, in words; "" where nobody does."""
        return self.names.get(name, self.unknown)


@contextmanager
def lease(root: Path, names: Sequence[str], *, what: str, takes: bool = False) -> Iterator[str]:
    """Hold folders of a root until the block ends. Called by readers and copies, of several ranks by the leader only.

    Gives its nonce: a tag that begins with it is that of somebody who is alive. Where the lease cannot be written (no
    permission, no space) there is none, and that is "": the reader has to live with what vanishes.
    """
    made = not os.path.lexists(run_folder(root))
    taken = _take(root, names, what, takes)
    if taken is None:
        yield ""
        return
    path, text = taken
    if not takes:
        _let_prunes_pass(root, names)
    held, pid = _Held(path, text, made), os.getpid()
    try:
        yield path.stem.removeprefix("lease-")
    finally:
        if os.getpid() == pid:  # a forked child that leaves the block leaves the lease, which is its parent's
            held.give_back()


@contextmanager
def reading(folder: Path, *, what: str) -> Iterator[None]:
    """Hold one checkpoint (see `held`), and tell what is deleted meanwhile from what is damaged.

    For who reads alone: where several ranks do, all of them have to raise the same. Raises: GoneError; what the block
    raises.
    """
    with held(folder, what=what):
        refuse_gone(folder)
        try:
            yield
        except GoneError:
            raise
        except (CorruptError, NotFoundError, OSError):
            refuse_gone(folder)
            raise


@contextmanager
def held(folder: Path, *, what: str) -> Iterator[None]:
    """Hold the one checkpoint in `folder`, by whatever path it is named. Nothing where it has no checkpoint's name:
    no prune takes such a folder."""
    where = Path(os.path.realpath(folder))
    with lease(where.parent, [where.name], what=what) if parse_step(where.name) else contextlib.nullcontext():
        yield


def is_gone(folder: Path) -> bool:
    """Whether a fresh listing of the root lacks a checkpoint. False if the root cannot be listed, and while the step is
    being saved again."""
    where = Path(os.path.realpath(folder))
    named = parse_step(where.name)
    if named is None:
        return False
    for _ in range(2):  # of a long list a name may be missed that changes meanwhile
        try:
            names = os.listdir(where.parent)  # noqa: PTH208 names alone are wanted
        except OSError:
            return False
        there = [each for name in names if (each := parse_step(name)) is not None]
        if where.name in names or any(each.kind == "old" and each.step == named.step for each in there):
            return False
    return bool(there) or DOT in names  # else its mount is away, which has lost nothing


def refuse_gone(folder: Path) -> None:
    """Raises: GoneError, if a checkpoint is no longer in its root."""
    if is_gone(folder):
        raise GoneError(f"{folder} was deleted: ckptman list {folder.parent} shows the checkpoints there are")


def look(root: Path, *, wait: bool = True, but: str = "", names: Sequence[str] | None = None) -> Leases:
    """The leases of a root, `but` the one of that nonce. To know a lease of another host to be dead takes up to
    `SILENT_SECONDS`; those that would need a `wait` that is not wanted are held. `names`: what `run_names` gave.

    Raises: RootError where they cannot be listed: what may be in use is not to be deleted. Called by prunes.
    """
    found = Leases()
    questions = dict.fromkeys(path for path in _paths(root, names) if path != lease_path(root, but))
    for path in watched_in(run_folder(root)):
        if is_lease(path.name) and path not in questions:  # it is gone
            forget(path)
    while questions:
        for path in list(questions):
            # Looked at again each time: it may have been written only now.
            one = questions[path] = questions[path] or _read(path)
            lives = is_alive(one.owner if one is not None else None, path)
            if lives is None and wait:
                continue
            if lives is False:
                # A folder is none that we made, and stays.
                found.dead += [path] if path.is_symlink() or not path.is_dir() else []
            else:
                if one is None:
                    found.unknown = "perhaps in use: a lease that cannot be read may be on it"
                elif not one.takes:
                    for name in one.names:
                        found.names.setdefault(name, str(one))
                found.nonces.add(path.stem.removeprefix("lease-"))
            del questions[path]
        if questions:
            time.sleep(LOOK_SECONDS)
    return found


def _take(root: Path, names: Sequence[str], what: str, takes: bool) -> tuple[Path, bytes] | None:
    me = this_process("", os.environ.get("SLURM_JOB_ID"))
    path = lease_path(root, me.nonce)
    try:
        if run_folder(root).is_symlink() or not root.is_dir():
            return None
        text = Lease(owner=me, names=tuple(names), what=what, takes=takes).model_dump_json().encode() + b"\n"
        for _ in range(_TRIES):
            DISK.make_folder_if_missing(run_folder(root))
            # Another reader that is done may have removed the folder again.
            with contextlib.suppress(FileNotFoundError):
                DISK.create_whole_file(path, text)
                return path, text
    except OSError:
        # Half of one would be a lease that nobody can read: any folder may be on it.
        with contextlib.suppress(OSError):
            DISK.remove_file(path)
    return None


def _let_prunes_pass(root: Path, names: Sequence[str]) -> None:
    """Wait until no prune is about to take a folder away: it is gone then, or stays. Otherwise it could be gone for the
    moment that a prune needs to see this lease, and to put it back."""
    deadline = time.monotonic() + _PASS_SECONDS
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            found = [(path, one) for path in _paths(root) if (one := _read(path)) is not None and one.takes]
            going = {name for path, one in found if is_alive(one.owner, path) is not False for name in one.names}
            if not any(name in going and os.path.lexists(root / name) for name in names):
                return
            time.sleep(_PASS_LOOK_SECONDS)


class _Held:
    """A lease that is touched now and then by a thread of its own, which also removes it when it is given back.

    A file system that is away for a moment is no reason to stop: it is touched later, and removed later. `made`: its
    folder goes, too.
    """

    def __init__(self, path: Path, text: bytes, made: bool) -> None:
        self._path, self._text, self._made = path, text, made
        self._device: int | None = None
        with contextlib.suppress(OSError):
            self._device = device_of(path.parent)
        self._over, self._tried = Flag(), Flag()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._beat, name="ckptman-lease", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads for this user: the process says that it is alive
            self._thread.start()

    def give_back(self) -> None:
        """Remove the lease. If that fails now, its thread keeps trying."""
        self._over.set()
        if self._thread.ident is None:
            self._is_removed()
        else:
            self._tried.wait(_END_SECONDS)  # no longer: it may wait for a file system that hangs
            if self._failed is not None:
                raise self._failed

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError, MemoryError):
                try:
                    os.utime(self._path, follow_symlinks=False)
                except FileNotFoundError:  # a prune that heard nothing of us for long took us for dead
                    DISK.create_whole_file(self._path, self._text)
        try:
            while not self._is_removed():
                self._tried.set()
                time.sleep(BEAT_SECONDS)
        except BaseException as error:  # noqa: BLE001 it is raised by who gives it back
            self._failed = error
        finally:
            self._tried.set()

    def _is_removed(self) -> bool:
        try:
            device = device_of(self._path.parent)
            if not os.path.lexists(self._path):  # below a mount point nothing is, while the mount is away
                return self._device in (None, device)
            DISK.remove_file(self._path)
            if self._made:  # who only looks leaves nothing behind
                DISK.remove_empty_folder(self._path.parent)
        except OSError:
            return False
        return True


def run_names(root: Path) -> list[str]:
    """List `.ckptman`. Empty if it is missing or a symbolic link, as leases are never written through one.

    Raises: RootError.
    """
    try:
        if run_folder(root).is_symlink():  # what lies elsewhere is none of this root's
            return []
        return sorted(os.listdir(run_folder(root)))  # noqa: PTH208 names alone are wanted
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RootError(
            error.errno or errno.EIO,
            f"{run_folder(root)} cannot be read ({error.strerror}), so nobody can tell which checkpoints are being "
            f"read: check its permissions and the mount",
        ) from error


def _paths(root: Path, names: Sequence[str] | None = None) -> list[Path]:
    folder = run_folder(root)
    return [folder / name for name in (run_names(root) if names is None else names) if is_lease(name)]


def _read(path: Path) -> Lease | None:
    """None where it cannot be read: rubbish, or being written this very moment."""
    try:
        return Lease.model_validate_json(read_regular(path, _MOST_BYTES))
    except (CorruptError, OSError, ValidationError, RecursionError):
        return None
