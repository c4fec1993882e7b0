"""The promises that a commit builds on, besides that of a rename (see `renames`): what is fsynced is there, what one
process claims another does not get; and what makes saves fast or early to fail.

Each check does what ckptman does, through the same `Disk`, in a folder that nobody else uses. Called in a process of
its own (`run_isolated`), which may hang. Raises: OSError where the file system refuses what must work.
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
from ckptman.policies.intervals import seconds_text
from ckptman.storage.catalog.writer_lock import Claim, claim
from ckptman.storage.io.durable_files import DISK, Disk
from ckptman.storage.io.failure_cause import FULL
from ckptman.storage.io.threads import ALIGN_BYTES
from ckptman.tools.doctor.finding import Finding, why
from ckptman.tools.doctor.second_client import HERE, Pipe, Second

SLOW_SYNC_SECONDS = 0.5
SKEW_SECONDS = 2.0
"""Some file systems keep whole seconds, and the kernel's coarse clock is behind by some milliseconds."""
_RACES = 10
"""Each takes an fsync on both sides, and there are file systems where that takes a second."""
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_SAID_OF_OTHERS = (errno.EPERM, errno.EACCES, errno.EIO, errno.ESTALE)
"""What some clients say of a file that another one has made: SFTP has no error of its own for that."""
_FILE_BYTES = 4096
_ROOT, _LOCK = "claimed", "lock"
_GIVEN_BACK_SECONDS = 2.0
"""How long a server may take to give a lock to the next."""


def check_sync(folder: Path, disk: Disk = DISK, seconds: float = 1.0) -> Finding:
    """fsync of files and of folders: whether it works, and what it takes. What was written is read back."""
    files, folders, refused = list[float](), list[float](), None
    deadline = time.monotonic() + seconds
    while len(files) < 3 or (len(files) < 20 and time.monotonic() < deadline):
        path, data = folder / f"sync-{len(files)}", os.urandom(_FILE_BYTES)
        try:
            files.append(_sync_file(path, data, disk))
        except OSError as error:
            if error.errno in FULL:
                raise
            return Finding("fsync", "FAILED", f"fails on a file: {why(error)}", "nothing that is saved here is durable")
        if path.read_bytes() != data:
            return Finding("fsync", "FAILED", "what was written is not what is read", "bytes are lost or changed here")
        try:
            folders.append(_sync_folder(folder, disk))
        except OSError as error:
            refused = why(error)
            if error.errno not in _REFUSED:
                advice = "a power cut may take back the name of a checkpoint that was committed"
                return Finding("fsync", "FAILED", f"fails on a folder: {refused}", advice)
    figures = {"file_seconds": median(files), "folder_seconds": median(folders) if folders else None}
    value = f"file {_milliseconds(median(files))}"
    if refused is not None:
        advice = "a power cut may take back the newest checkpoint; the one before it is still there if you keep several"
        return Finding("fsync", "warning", f"{value}; refused on folders: {refused}", advice, figures)
    value += f", folder {_milliseconds(median(folders))}"
    if max(median(files), median(folders)) > SLOW_SYNC_SECONDS:
        return Finding("fsync", "slow", value, "a commit makes several of them, one after the other", figures)
    return Finding("fsync", "ok", value, "", figures)


def check_claim(folder: Path, disk: Disk = DISK, second: Second = HERE) -> Finding:
    """Two processes claim: each of some files is made by exactly one of them, and a root that is owned is refused."""
    root = folder / _ROOT
    consequence = "two runs could write to one root, and rename and prune each other's checkpoints"
    two = f"two {second.kind}"
    with second.start(rival_claims, folder, disk) as rival:
        disk.make_folder(root)
        rival.pipe.send("race")
        ours, refusal = _race(folder, disk)
        won, their_refusal = rival.receive()
        theirs, refusal = set(won), refusal or their_refusal
        if both := sorted(ours & theirs):
            value = f"{two} made the same file, each as the only one, {len(both)} times of {_RACES}"
            return Finding("claim", "FAILED", value, consequence)
        if len(ours | theirs) < _RACES:
            value = f"of {two} none could make a file that was not there, {_RACES - len(ours | theirs)} times"
            value += f": {refusal}" if refusal else ""
            return Finding("claim", "FAILED", value, "no run could claim its root")
        rival.pipe.send("claim")
        rival.receive()
        with suppress(BusyError):
            claim(root, "doctor", None, disk=disk).release()
            return Finding("claim", "FAILED", "a root that the other process owns was given to this one", consequence)
        rival.pipe.send("release")
        rival.receive()
        claim(root, "doctor", None, disk=disk).release()
    value = f"one owner at a time; {_RACES} files each made by one of {two}"
    if refusal:
        advice = "a run that is refused may report that, and not the run that is there"
        return Finding("claim", "warning", f"{value}; the other one was refused with: {refusal}", advice)
    return Finding("claim", "ok", value)


def lock(kind: str, fd: int) -> None:
    """Take a lock on an open file, or raise BlockingIOError: `flock`, or `fcntl` (POSIX)."""
    (fcntl.flock if kind == "flock" else fcntl.lockf)(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def check_locks(folder: Path, second: Second = HERE) -> Finding:
    """flock and fcntl locks between two processes: one holds it, the other does not get it until it is given back.

    ckptman needs none between hosts: those that hold on each host alone are a warning.
    """
    good, refused, broken = list[str](), list[str](), list[str]()
    with second.start(lock_when_told, folder) as other:
        for kind in ("flock", "fcntl"):
            # A file for each: there are file systems where one kind excludes the other.
            with (folder / f"{_LOCK}-{kind}").open("w+b", buffering=0) as file:
                try:
                    lock(kind, file.fileno())
                except OSError as error:
                    refused.append(f"{kind} ({why(error)})")
                    continue
                other.pipe.send(kind)
                if other.receive():
                    broken.append(f"two {second.kind} hold the same {kind} lock")
                    continue
            deadline = time.monotonic() + _GIVEN_BACK_SECONDS
            taken = False
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
        return Finding("locks", "warning" if second.is_elsewhere else "FAILED", "; ".join(broken), advice, figures)
    if refused:
        works = f"{', '.join(good)} works; " if good else ""
        advice = "ckptman's claims do without; two prunes at a time report the same bytes as freed"
        return Finding("locks", "warning", f"{works}refused: {', '.join(refused)}", advice, figures)
    between = f"this host and {second.host}" if second.is_elsewhere else "two processes of this host"
    return Finding("locks", "ok", f"flock and fcntl hold between {between}", "", figures)


def check_clock(folder: Path, disk: Disk = DISK) -> Finding:
    """Check the time that the file system gives a new file, against the clock of this host."""
    path = folder / "clock"
    before = time.time()
    disk.write_file(path, b"x")
    after = time.time()
    given = path.stat().st_mtime
    ahead = given - after if given > after else min(0.0, given - before)
    figures = {"ahead_seconds": round(ahead, 3)}
    if abs(ahead) <= SKEW_SECONDS:
        return Finding("clock", "ok", f"new files are within {max(0.01, abs(ahead)):.2g} s of this host", "", figures)
    advice = (
        "ckptman compares no clocks, but what goes by dates does (make, rsync, purges of scratch): tell your site; on "
        "this host, see that NTP runs"
    )
    value = f"the file server is {seconds_text(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} this host"
    return Finding("clock", "warning", value, advice, figures)


def check_direct(folder: Path, disk: Disk = DISK) -> Finding:
    """Check whether files can be written past the page cache, as saves do where they can."""
    from ckptman.storage.io.file_writer import FileWriter  # not at the top: it loads numpy, which the verb does without

    page = memoryview(mmap.mmap(-1, ALIGN_BYTES))
    with FileWriter(folder / "direct", 0, disk=disk) as file:
        file.write(page, 0)
    if file.is_direct:
        return Finding("direct I/O", "ok", "accepted", "", {"accepted": True})
    advice = "saves go through the page cache: somewhat slower, and the cache counts as memory of the job"
    return Finding("direct I/O", "slow", f"refused: {file.buffered_because}", advice, {"accepted": False})


def check_reserve(folder: Path, size_bytes: int, disk: Disk = DISK) -> Finding:
    """Check whether room can be taken before it is written to. `size_bytes`: how much is tried."""
    path = folder / "reserve"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        disk.reserve(fd, size_bytes)
        disk.sync_file(fd)
        taken = os.fstat(fd).st_blocks * 512
    finally:
        os.close(fd)
        disk.remove_file(path)
    figures = {"reserved_bytes": size_bytes, "taken_bytes": taken}
    if taken >= size_bytes:
        return Finding("reserve", "ok", "room for a file is taken before it is written", "", figures)
    advice = "a full disk or quota shows only while a save is being written: keep room for two checkpoints"
    return Finding("reserve", "warning", "no room is taken before it is written (no real fallocate)", advice, figures)


def check_links(folder: Path) -> Finding:
    """Check whether a symbolic link can be made. ckptman makes none, and follows none out of a root."""
    try:
        (folder / "link").symlink_to("nowhere")
    except OSError as error:
        return Finding("links", "ok", f"symbolic links are refused: {why(error)}", "ckptman needs none")
    return Finding("links", "ok", "symbolic links can be made")


def rival_claims(pipe: Pipe, folder: Path, disk: Disk) -> None:
    """Task: do what is told, and say what came of it."""
    held: Claim | None = None
    while True:
        task = pipe.recv()
        said: object = None
        try:
            if task == "race":
                won, refusal = _race(folder, disk)
                said = [sorted(won), refusal]
            elif task == "claim":
                held, said = claim(folder / _ROOT, "doctor", None, disk=disk), "held"
            elif held is not None:
                held.release()
                said = "released"
        except (OSError, CkptmanError) as error:
            said = error
        pipe.send(said)


def _race(folder: Path, disk: Disk) -> tuple[set[int], str]:
    """Return which files this process made, and the reason why not the others, where it is not that they are there."""
    won, refusal = set(), ""
    for number in range(_RACES):
        try:
            disk.create_file(folder / f"race-{number}", b"x")
            won.add(number)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in _SAID_OF_OTHERS:
                raise
            refusal = why(error)
    return won, refusal


def lock_when_told(pipe: Pipe, folder: Path, disk: Disk) -> None:
    """Task: try to take the lock that is named, tell whether that worked, and give it back."""
    while True:
        kind = pipe.recv()
        with (folder / f"{_LOCK}-{kind}").open("r+b", buffering=0) as file:
            taken = False
            with suppress(OSError):
                lock(kind, file.fileno())
                taken = True
            pipe.send(taken)


def _sync_file(path: Path, data: bytes, disk: Disk) -> float:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, data)
        began = time.monotonic()
        disk.sync_file(fd)
        seconds = time.monotonic() - began
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return seconds


def _sync_folder(folder: Path, disk: Disk) -> float:
    # Not Disk.sync_folder: that one passes over a refusal, which is what is asked here.
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        began = time.monotonic()
        disk.sync_file(fd)
        return time.monotonic() - began
    finally:
        os.close(fd)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2g} ms"
