"""Leases: what a reader or a copy leaves in a root while it is at work there, so that no prune takes it away.

    with lease(root, ["step-0000000100"], what="verify"):
        ...

A lease is a file `.ckptman/lease-<nonce>.json` that names the folders in use. It is taken *before* the first look at
them. A prune says in the same way what it is about to take, looks for readers, and only then renames a folder; a reader
that finds such a word waits until the folder is gone or the prune is past it. So either the reader finds nothing there,
or the prune finds the reader. Where a prune cannot say so (a full disk), it looks again after the rename, and puts the
folder back where somebody came in between.

It is dead when its process is, on the same host; from another host, when nobody touched it for `PATIENCE_SECONDS` while
we watched: clocks of two hosts are never compared. What is not known to be dead holds.
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

from ckptman.catalog.writer_lock import BEAT_SECONDS, PATIENCE_SECONDS, Owner, process_lives, this_process, touched_at
from ckptman.errors import CorruptError, RootError, plain
from ckptman.format.paths import is_lease, lease_path, parse_step, run_folder
from ckptman.io.durable_files import DISK, Disk
from ckptman.io.safe_open import read_regular
from ckptman.io.threads import Flag

_MOST_BYTES = 1024 * 1024
_LOOK_SECONDS = 0.1
_END_SECONDS = 5.0
TAKING = "prune, which takes them away"
"""What a prune says of the folders that it is about to rename. That holds nothing: readers wait until it is done."""
_PASS_SECONDS = 10.0
_PASS_LOOK_SECONDS = 0.005
_TRIES = 10
_first_seen: dict[Path, tuple[int, float]] = {}
"""For each lease that only watching can judge: when it was touched last, and since when we know (monotonic clock).

Kept from look to look: a run that prunes after each save has watched between its saves, and needs not wait.
"""


class Lease(BaseModel):
    """A process that uses folders of a root. `names`: of the folders; `what`: what it does, such as "verify"."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    owner: Owner
    names: tuple[str, ...]
    what: str = Field(max_length=100)

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
def lease(root: Path, names: Sequence[str], *, what: str, disk: Disk = DISK) -> Iterator[str]:
    """Hold folders of a root until the block ends. Called by readers and copies, of several ranks by the leader only.

    Gives its nonce: a tag that begins with it is that of somebody who is alive. Where the lease cannot be written (no
    permission, no space) there is none, and that is "": the reader has to live with what vanishes.
    """
    made = not os.path.lexists(run_folder(root))
    taken = _take(root, names, what, disk)
    if taken is None:
        yield ""
        return
    path, text = taken
    if what != TAKING:
        _let_prunes_pass(root, names)
    done, pid = Flag(), os.getpid()
    thread = threading.Thread(target=_beat, args=(path, text, done, disk), name="ckptman-lease", daemon=True)
    with contextlib.suppress(RuntimeError):  # no more threads for this user: the process itself says that it is alive
        thread.start()
    try:
        yield path.stem.removeprefix("lease-")
    finally:
        if os.getpid() == pid:  # a forked child that leaves the block leaves the lease, which is its parent's
            done.set()
            if thread.ident is not None:
                thread.join(_END_SECONDS)
            if not thread.is_alive():  # else it waits for a file system that hangs, and nobody else is to
                with contextlib.suppress(OSError):
                    disk.remove_file(path)
                    # Who only looks leaves nothing behind.
                    if made:
                        disk.remove_empty_folder(run_folder(root))


@contextmanager
def reading(folder: Path, *, what: str, disk: Disk = DISK) -> Iterator[None]:
    """Hold the one checkpoint in `folder`, by whatever path it is named. Nothing where it has no checkpoint's name:
    no prune takes such a folder."""
    where = Path(os.path.realpath(folder))
    with (
        lease(where.parent, [where.name], what=what, disk=disk) if parse_step(where.name) else contextlib.nullcontext()
    ):
        yield


def look(root: Path, *, wait: bool = True, but: str = "") -> Leases:
    """The leases of a root, `but` the one of that nonce. To know a lease of another host to be dead takes up to
    `PATIENCE_SECONDS`; those that would need a `wait` that is not wanted are held.

    Raises: RootError where they cannot be listed: what may be in use is not to be deleted. Called by prunes.
    """
    found = Leases()
    questions = dict.fromkeys(path for path in _paths(root) if path != lease_path(root, but))
    for gone in [path for path in _first_seen if path.parent == run_folder(root) and path not in questions]:
        _first_seen.pop(gone, None)
    while questions:
        for path in list(questions):
            # Looked at again each time: it may have been written only now.
            one = questions[path] = questions[path] or _read(path)
            lives = _lives(path, one)
            if lives is None and wait:
                continue
            if lives is False:
                # A folder is none that we made, and stays.
                found.dead += [path] if path.is_symlink() or not path.is_dir() else []
            else:
                if one is None:
                    found.unknown = "perhaps in use: a lease that cannot be read may be on it"
                elif one.what != TAKING:
                    for name in one.names:
                        found.names.setdefault(name, str(one))
                found.nonces.add(path.stem.removeprefix("lease-"))
            del questions[path]
        if questions:
            time.sleep(_LOOK_SECONDS)
    return found


def _take(root: Path, names: Sequence[str], what: str, disk: Disk) -> tuple[Path, bytes] | None:
    me = this_process("", os.environ.get("SLURM_JOB_ID"))
    path = lease_path(root, me.nonce)
    try:
        if run_folder(root).is_symlink() or not root.is_dir():
            return None
        text = Lease(owner=me, names=tuple(names), what=what).model_dump_json().encode() + b"\n"
        for _ in range(_TRIES):
            disk.make_folders(run_folder(root))
            # Another reader that is done may have removed the folder again.
            with contextlib.suppress(FileNotFoundError):
                disk.create_whole_file(path, text)
                return path, text
    except OSError:
        # Half of one would be a lease that nobody can read: any folder may be on it.
        with contextlib.suppress(OSError):
            disk.remove_file(path)
    return None


def _let_prunes_pass(root: Path, names: Sequence[str]) -> None:
    """Wait until no prune is about to take a folder away: it is gone then, or stays. Otherwise it could be gone for the
    moment that a prune needs to see this lease, and to put it back."""
    deadline = time.monotonic() + _PASS_SECONDS
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            found = [(path, one) for path in _paths(root) if (one := _read(path)) is not None and one.what == TAKING]
            going = {name for path, one in found if _lives(path, one) is not False for name in one.names}
            if not any(name in going and os.path.lexists(root / name) for name in names):
                return
            time.sleep(_PASS_LOOK_SECONDS)


def _beat(path: Path, text: bytes, done: Flag, disk: Disk) -> None:
    """Touch a lease now and then, and once more when it is over: that tells whether the file system still answers."""
    over = False
    while not over:
        over = done.wait(BEAT_SECONDS)
        # A file system that is away for a moment is no reason to stop.
        with contextlib.suppress(OSError):
            try:
                os.utime(path, follow_symlinks=False)
            except FileNotFoundError:  # a prune that heard nothing of us for long took us for dead
                if not over:
                    disk.create_whole_file(path, text)


def _paths(root: Path) -> list[Path]:
    try:
        if run_folder(root).is_symlink():  # what lies elsewhere is none of this root's: nobody leases through a link
            return []
        names = os.listdir(run_folder(root))  # noqa: PTH208 names alone are wanted
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RootError(
            error.errno or errno.EIO,
            f"{run_folder(root)} cannot be read ({error.strerror}), so nobody can tell which checkpoints are being "
            f"read: check its permissions and the mount",
        ) from error
    return [run_folder(root) / name for name in sorted(names) if is_lease(name)]


def _read(path: Path) -> Lease | None:
    """None where it cannot be read: rubbish, or being written this very moment."""
    try:
        return Lease.model_validate_json(read_regular(path, _MOST_BYTES))
    except (CorruptError, OSError, ValidationError, RecursionError):
        return None


def _lives(path: Path, one: Lease | None) -> bool | None:
    """Whether the process behind a lease lives; None where it has to be watched for longer."""
    if one is not None and (lives := process_lives(one.owner)) is not None:
        return lives
    try:
        touched = touched_at(path)
    except OSError:
        return None
    if touched is None:  # given back, or no regular file: that is no lease
        _first_seen.pop(path, None)
        return False
    before, since = _first_seen.setdefault(path, (touched, time.monotonic()))
    if touched != before:
        _first_seen[path] = touched, time.monotonic()
        return True
    return False if time.monotonic() - since >= PATIENCE_SECONDS else None
