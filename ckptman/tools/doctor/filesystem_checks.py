"""The promises that a commit relies on besides rename: what is fsynced is durable, and a claim is exclusive.

Each check does what ckptman does, through the same `Disk`. Raises: OSError if the file system refuses what must work.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

from ckptman.errors import BusyError, CkptmanError
from ckptman.storage.catalog.writer_lock import Claim, claim
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.failure_cause import FULL
from ckptman.storage.io.threads import ALIGN_BYTES
from ckptman.tools.doctor.finding import Finding, Place, found, why
from ckptman.tools.doctor.mount_checks import unsafe_sync
from ckptman.tools.doctor.second_client import Pipe

SLOW_SYNC_SECONDS = 0.5
_RACES = 10
"""Each takes an fsync on both sides, which takes a second on some file systems."""
_RESERVE_BYTES = 8 * 1024 * 1024
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_SAID_OF_OTHERS = (errno.EPERM, errno.EACCES, errno.EIO, errno.ESTALE)
"""What some clients say of a file that another one has made: SFTP has no error of its own for that."""
_FILE_BYTES = 4096
_ROOT, _LOCK = "claimed", "lock"
_GIVEN_BACK_SECONDS = 2.0
"""How long a server may take to hand a lock to the next."""
_NOT_DURABLE = "nothing that is saved here is durable"


def check_sync(place: Place) -> Finding:
    """Check that fsync of files and of directories works, and how long it takes. The bytes are read back."""
    files, folders, refused = list[float](), list[float](), ""
    deadline = time.monotonic() + place.repeat_seconds
    while len(files) < 3 or (len(files) < 20 and time.monotonic() < deadline):
        path, data = place.own / f"sync-{len(files)}", os.urandom(_FILE_BYTES)
        try:
            files.append(_seconds_to_sync(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, data))
        except OSError as error:
            if error.errno in FULL:
                raise
            return found("FAILED", f"fails on a file: {why(error)}", _NOT_DURABLE)
        if path.read_bytes() != data:
            return found("FAILED", "what was written is not what is read", "bytes are lost or changed here")
        try:
            # Not Disk.sync_folder: that one ignores a refusal, which is what is asked here.
            folders.append(_seconds_to_sync(place.own, os.O_RDONLY | os.O_DIRECTORY))
        except OSError as error:
            refused = why(error)
            if error.errno not in _REFUSED:
                advice = "a power cut may take back the name of a checkpoint that was committed"
                return found("FAILED", f"fails on a folder: {refused}", advice)
    figures = {"file_seconds": median(files), "folder_seconds": median(folders) if folders else None}
    value = f"file {1000 * median(files):.2g} ms"
    value += f"; refused on folders: {refused}" if refused else f", folder {1000 * median(folders):.2g} ms"
    if unsafe := unsafe_sync(place.mount):
        return found("warning", value, unsafe, **figures)
    if refused:
        advice = "a power cut may take back the newest checkpoint; the one before it is still there if you keep several"
        return found("warning", value, advice, **figures)
    if max(median(files), median(folders)) > SLOW_SYNC_SECONDS:
        return found("slow", value, "a commit makes several of them, one after the other", **figures)
    return found("ok", value, **figures)


def _seconds_to_sync(path: Path, flags: int, data: bytes = b"") -> float:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        if data:
            os.write(fd, data)
        began = time.monotonic()
        DISK.sync_file(fd)
        seconds = time.monotonic() - began
        with suppress(OSError):  # so that the bytes are read from the disk
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return seconds


def check_claim(place: Place) -> Finding:
    """Check that exactly one of two processes makes a file, and that a root that is owned is refused to the other."""
    root, two = place.own / _ROOT, f"two {place.second.kind}"
    consequence = "two runs could write to one root, and rename and prune each other's checkpoints"
    with place.second.start(rival_claims, place.own) as rival:
        DISK.make_folder(root)
        rival.pipe.send("race")
        ours, refusal = _race(place.own)
        won, their_refusal = rival.receive()
        theirs, refusal = set(won), refusal or their_refusal
        if both := ours & theirs:
            value = f"{two} made the same file, each as the only one, {len(both)} times of {_RACES}"
            return found("FAILED", value, consequence)
        if nobodys := _RACES - len(ours | theirs):
            value = f"of {two} none could make a file that was not there, {nobodys} times"
            return found("FAILED", value + (f": {refusal}" if refusal else ""), "no run could claim its root")
        rival.pipe.send("claim")
        rival.receive()
        with suppress(BusyError):
            claim(root, "doctor", None).release()
            return found("FAILED", "a root that the other process owns was given to this one", consequence)
        rival.pipe.send("release")
        rival.receive()
        claim(root, "doctor", None).release()
    value = f"one owner at a time; {_RACES} files each made by one of {two}"
    if refusal:
        advice = "a run that is refused may report that, and not the run that is there"
        return found("warning", f"{value}; the other one was refused with: {refusal}", advice)
    return found("ok", value)


def _race(folder: Path) -> tuple[set[int], str]:
    """Return the files that this process made, and why not the others, if not because they exist."""
    won, refusal = set(), ""
    for number in range(_RACES):
        try:
            DISK.create_file(folder / f"race-{number}", b"x")
            won.add(number)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in _SAID_OF_OTHERS:
                raise
            refusal = why(error)
    return won, refusal


def rival_claims(pipe: Pipe, folder: Path) -> None:
    """Task: do what the message says, and answer with the result."""
    held: Claim | None = None
    while True:
        task = pipe.recv()
        result: object = None
        try:
            if task == "race":
                won, refusal = _race(folder)
                result = [sorted(won), refusal]
            elif task == "claim":
                held = claim(folder / _ROOT, "doctor", None)
            elif held is not None:
                held.release()
        except (OSError, CkptmanError) as error:
            result = error
        pipe.send(result)


def check_locks(place: Place) -> Finding:
    """Check flock and fcntl locks: while one process holds a lock, the other one does not get it.

    ckptman needs no locks between hosts: if they only hold on each host, it is a warning.
    """
    good, refused, broken = list[str](), list[str](), list[str]()
    second = place.second
    with second.start(lock_when_told, place.own) as other:
        for kind in ("flock", "fcntl"):
            # A file for each: on some file systems one kind excludes the other.
            with (place.own / f"{_LOCK}-{kind}").open("w+b", buffering=0) as file:
                try:
                    lock(kind, file.fileno())
                except OSError as error:
                    refused.append(f"{kind} ({why(error)})")
                    continue
                other.pipe.send(kind)
                if other.receive():
                    broken.append(f"two {second.kind} hold the same {kind} lock")
                    continue
            deadline, taken = time.monotonic() + _GIVEN_BACK_SECONDS, False
            while not taken and time.monotonic() < deadline:
                other.pipe.send(kind)
                taken = other.receive()
            if taken:
                good.append(kind)
            else:
                broken.append(f"a {kind} lock is never given back")
    figures = {"work": good, "refused": refused, "broken": broken}
    if broken:
        advice = "what relies on locks is not safe here; ckptman's own claims do not need them"
        return found("warning" if second.is_elsewhere else "FAILED", "; ".join(broken), advice, **figures)
    if refused:
        works = f"{', '.join(good)} works; " if good else ""
        advice = "ckptman's claims do without; two prunes at a time report the same bytes as freed"
        return found("warning", f"{works}refused: {', '.join(refused)}", advice, **figures)
    between = f"this host and {second.host}" if second.is_elsewhere else "two processes of this host"
    return found("ok", f"flock and fcntl hold between {between}", **figures)


def lock_when_told(pipe: Pipe, folder: Path) -> None:
    """Task: try to take the named lock, answer whether that worked, and give it back."""
    while True:
        kind = pipe.recv()
        with (folder / f"{_LOCK}-{kind}").open("r+b", buffering=0) as file:
            taken = False
            with suppress(OSError):
                lock(kind, file.fileno())
                taken = True
            pipe.send(taken)


def lock(kind: str, fd: int) -> None:
    """Take a lock on an open file, or raise BlockingIOError: `flock`, or `fcntl` (POSIX)."""
    (fcntl.flock if kind == "flock" else fcntl.lockf)(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def check_direct(place: Place) -> Finding:
    """Check whether files can be written past the page cache, as saves do if they can."""
    from ckptman.storage.io.file_writer import FileWriter  # not at the top: it loads numpy, which the verb does without

    with FileWriter(place.own / "direct", 0) as file:
        file.write(memoryview(mmap.mmap(-1, ALIGN_BYTES)), 0)
    if file.is_direct:
        return found("ok", "accepted", accepted=True)
    advice = "saves go through the page cache: somewhat slower, and the cache counts as memory of the job"
    return found("slow", f"refused: {file.buffered_because}", advice, accepted=False)


def check_reserve(place: Place) -> Finding:
    """Check whether room can be reserved before it is written to."""
    path, size_bytes = place.own / "reserve", min(_RESERVE_BYTES, max(place.size_bytes, 4096))
    with path.open("wb") as file:
        DISK.reserve(file.fileno(), size_bytes)
        DISK.sync_file(file.fileno())
        taken = os.fstat(file.fileno()).st_blocks * 512
    DISK.remove_file(path)
    figures = {"reserved_bytes": size_bytes, "taken_bytes": taken}
    if taken >= size_bytes:
        return found("ok", "room for a file is taken before it is written", **figures)
    advice = "a full disk or quota shows only while a save is being written: keep room for two checkpoints"
    return found("warning", "no room is taken before it is written (no real fallocate)", advice, **figures)
