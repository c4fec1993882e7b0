"""Who writes to a root. Two runs that write to one root would rename and prune each other's checkpoints.

A run that claims a root makes the next of the numbered files `owner-000007.json`; the highest number owns the root.
The file is created exclusively, so each number goes to one claimant, on NFS too; a number stays taken until there is a
higher one, and nobody moves a claim that may be alive. The owner touches its file every few seconds, and adds a line
to it when it leaves. A claim that was not given back is dead when its process is, on the same host; from another host,
when it was not touched for `SILENT_SECONDS` while we watched: clocks of two hosts are never compared.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from ckptman.errors import BusyError, CorruptError, RootError
from ckptman.storage.catalog.liveness import (
    BEAT_SECONDS,
    LOOK_SECONDS,
    Owner,
    forget,
    is_alive,
    is_this_process,
    this_process,
)
from ckptman.storage.format.paths import owner_path, parse_owner, run_folder
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.safe_open import read_regular
from ckptman.storage.io.threads import Flag

_LOOKS = 10
_MOST_BYTES = 1024 * 1024


_given_up: set[str] = set()
"""The nonces of claims that this process has given back, whether that could be written down or not."""


def read_owner(root: Path) -> Owner | None:
    """Who claims a root, dead or alive; None if nobody does, or if the claim is rubbish. Raises: RootError."""
    try:
        mark = _newest(root)
    except OSError as error:
        raise root_error(root, "read", error) from error
    return mark.owner if mark is not None and not mark.released else None


def owner_lives(root: Path, owner: Owner) -> bool:
    """Whether a live process still has its claim on a root. From another host this takes up to `SILENT_SECONDS` to
    deny."""
    mark = _newest(root)
    return mark is not None and mark.owner == owner and _lives(root, mark)


class Claim:
    """This process's right to write to a root, held until `release`. Made by `claim`."""

    def __init__(self, root: Path, owner: Owner, number: int, device: int) -> None:
        self.root, self.owner = root, owner
        self._number, self._device = number, device
        self._counter = itertools.count(1)
        self._done = Flag()
        self._thread = threading.Thread(target=self._beat, name="ckptman-owner", daemon=True)
        self._thread.start()

    def every(self, seconds: float, look: Callable[[], None]) -> None:
        """Call something in a thread of its own until the claim is released. It must not raise."""

        def repeat() -> None:
            while not self._done.wait(seconds):
                look()

        threading.Thread(target=repeat, name="ckptman-look", daemon=True).start()

    def next_tag(self) -> str:
        """A tag for a tmp or trash name that nobody used before, and that tells whose it is."""
        return f"{self.owner.nonce}-{next(self._counter)}"

    def check(self) -> None:
        """Raises: BusyError if another run took the root over (this process was silent for too long), RootError where
        something else lies there now, OSError."""
        mark = self._mark()
        if mark is None:
            # Somebody removed the run's own files: claimed again, or the next run would come in unhindered.
            DISK.make_folder_if_missing(run_folder(self.root))
            _stake(self.root, self._number, self.owner)
        elif not self._is_mine(mark):
            raise _busy(self.root)

    def check_mount(self) -> None:
        """Check that the root is still on its file system. Raises: RootError if it was unmounted, OSError."""
        self._mark()

    def _mark(self) -> _Mark | None:
        mark = _newest(self.root)
        if mark is None:
            check_device(self.root, self._device)
        return mark

    def release(self) -> None:
        """Give the root free. Never takes away somebody else's claim; nothing in a forked child, whose it is not."""
        if os.getpid() != self.owner.pid:
            return
        self._done.set()
        self._thread.join(BEAT_SECONDS)
        _give_back(self.root, self._number, self.owner, self._device)

    def _is_mine(self, mark: _Mark) -> bool:
        return mark.number == self._number and mark.owner == self.owner

    def _beat(self) -> None:
        while not self._done.wait(BEAT_SECONDS):
            # A file system that is away for a moment is no reason to die here: the next save will tell.
            with contextlib.suppress(OSError):
                os.utime(owner_path(self.root, self._number), follow_symlinks=False)


def claim(root: Path, run_id: str, job_id: str | None, device: int | None = None) -> Claim:
    """Claim a root for this process. A dead owner's claim is taken over. Called by the leader only. `device`: that it
    has to be on.

    Raises: BusyError (a live run owns it), RootError (it cannot be written).
    """
    me = this_process(run_id, job_id)
    if run_folder(root).is_symlink():
        raise RootError(
            errno.ELOOP,
            f"{run_folder(root)} is a link, and a run writes nothing outside of its root: remove it, or name another "
            f"root",
        )
    number = 0
    try:
        device = device_of(root) if device is None else device
        check_device(root, device)
        DISK.make_folder_if_missing(run_folder(root))
        last = _newest(root)
        if last is not None and _lives(root, last):
            raise _busy(root)
        number = last.number + 1 if last is not None else 1
        try:
            _stake(root, number, me)
        except FileNotFoundError:  # a reader that is done removed the folder that it had made; or the mount is away
            check_device(root, device)
            DISK.make_folder_if_missing(run_folder(root))
            _stake(root, number, me)
    except OSError as error:
        if number:
            _give_back(root, number, me, device)
        if isinstance(error, RootError):
            raise
        raise root_error(root, "written", error) from error
    # Claims that are over mean nothing any more: one that cannot be removed does no harm.
    with contextlib.suppress(OSError):
        for older in _numbers(root):
            if older < number:
                DISK.remove_file(owner_path(root, older))
    return Claim(root, me, number, device)


def check_device(root: Path, device: int) -> None:
    """Raises: RootError if a root is on another device than that, OSError."""
    if device_of(root) != device:
        raise RootError(
            errno.ENODEV,
            f"{root} is not on the file system that this run began on, so what is saved there would be hidden once "
            f"that is back: see whether it is still mounted",
        )


def _give_back(root: Path, number: int, owner: Owner, device: int | None) -> None:
    """Mark a claim of this process as released, and keep trying if the file system does not answer now: otherwise the
    root would stay locked until this process ends. `device`: that of the root; None if unknown."""
    _given_up.add(owner.nonce)

    def is_marked() -> bool:
        try:
            here = device_of(root)
            mark = _read(root, number)
            if (mark.number, mark.owner) == (number, owner) and not mark.released:
                # Marked, not removed: a claimant that looked a moment ago must not find this number free again.
                with owner_path(root, number).open("r+b", buffering=0) as file:
                    file.seek(0, os.SEEK_END)
                    file.write(b"released\n")
        except FileNotFoundError:  # it was never made, or it was removed; or the mount is away
            return device in (None, here)
        except OSError:
            return False
        return True

    def go_on() -> None:
        while not is_marked():
            time.sleep(BEAT_SECONDS)

    if not is_marked():
        threading.Thread(target=go_on, name="ckptman-owner", daemon=True).start()


@dataclass(frozen=True)
class _Mark:
    """A claim as it is on disk. `owner` is None if it cannot be read: rubbish, or being written this very moment."""

    number: int
    owner: Owner | None
    released: bool


def _stake(root: Path, number: int, me: Owner) -> None:
    path = owner_path(root, number)
    try:
        DISK.create_file(path, me.model_dump_json().encode() + b"\n")
    except FileExistsError:
        raise _busy(root) from None
    with contextlib.ExitStack() as undo:
        undo.callback(DISK.remove_file, path)
        # What we saw before may be old (NFS remembers listings): whoever has a higher number looked after us, and wins.
        now = _newest(root)
        if now is None:
            raise FileNotFoundError(errno.ENOENT, "it is gone again", str(path))
        if now.owner != me:
            raise _busy(root)
        undo.pop_all()


def _newest(root: Path) -> _Mark | None:
    for _ in range(_LOOKS):
        numbers = _numbers(root)
        if not numbers:
            return None
        # A claim that is gone was taken over just now: then there is one with a higher number.
        with contextlib.suppress(FileNotFoundError):
            return _read(root, max(numbers))
    return None


def _numbers(root: Path) -> list[int]:
    try:
        names = os.listdir(run_folder(root))  # noqa: PTH208 names alone are wanted
    except FileNotFoundError:
        return []
    return [number for name in names if (number := parse_owner(name)) is not None]


def _read(root: Path, number: int) -> _Mark:
    try:
        owner, _, more = read_regular(owner_path(root, number), _MOST_BYTES).partition(b"\n")
    except CorruptError:  # a link, a pipe, a device: no run claims a root like that
        return _Mark(number, None, released=True)
    try:
        return _Mark(number, Owner.model_validate_json(owner), released=bool(more))
    except ValidationError:
        return _Mark(number, None, released=False)


def _busy(root: Path) -> BusyError:
    mark = _newest(root)
    owner = mark.owner if mark is not None else None
    if owner is None:
        return BusyError(str(root), "unknown", 0, None)
    return BusyError(str(root), owner.host, owner.pid, owner.job_id, is_this_process(owner))


def device_of(path: Path) -> int:
    """Return the device of the file system that a path is on, or would be. Raises: OSError."""
    while True:
        try:
            return path.stat().st_dev
        except FileNotFoundError:
            path = path.parent


def root_error(root: Path, done: str, error: OSError) -> RootError:
    """The error that tells of trouble with a root, which could not be `done` ("read", "written")."""
    return RootError(
        error.errno or errno.EIO,
        f"the checkpoint root {root} cannot be {done} ({error.strerror}): check permissions, quota and the mount",
    )


def _lives(root: Path, mark: _Mark) -> bool:
    if mark.released or (mark.owner is not None and mark.owner.nonce in _given_up):
        return False
    path = owner_path(root, mark.number)
    forget(path)
    while True:
        lives = is_alive(mark.owner, path)
        # Compared with what was judged, too: a claim that was being written then may have been whole ever since.
        now = _newest(root)
        if now != mark:
            return now is not None and now.number == mark.number and not now.released
        if lives is not None:
            return lives
        time.sleep(LOOK_SECONDS)
