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
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from ckptman.catalog.writer_lock import Claim, claim
from ckptman.doctor.finding import Finding, why
from ckptman.errors import BusyError, CkptmanError
from ckptman.io.durable_files import DISK, Disk
from ckptman.io.failure_cause import FULL
from ckptman.io.isolated_process import IsolatedProcess
from ckptman.io.threads import ALIGN_BYTES
from ckptman.policies.intervals import seconds_text

SLOW_SYNC_SECONDS = 0.5
SKEW_SECONDS = 2.0
"""Some file systems keep whole seconds, and the kernel's coarse clock is behind by some milliseconds."""
_RACES = 10
"""Each takes an fsync on both sides, and there are file systems where that takes a second."""
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_FILE_BYTES = 4096


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


def check_claim(folder: Path, disk: Disk = DISK) -> Finding:
    """Two processes claim: each of some files is made by exactly one of them, and a root that is owned is refused."""
    root = folder / "claimed"
    consequence = "two runs could write to one root, and rename and prune each other's checkpoints"
    with IsolatedProcess(lambda pipe: _rival(pipe, folder, root, disk), duplex=True) as rival:
        rival.pipe.send("race")
        ours = _race(folder, disk)
        theirs = rival.receive()
        if both := sorted(ours & theirs):
            value = f"two processes made the same file, each as the only one, {len(both)} times of {_RACES}"
            return Finding("claim", "FAILED", value, consequence)
        if len(ours | theirs) < _RACES:
            value = f"of two processes none could make a file that was not there, {_RACES - len(ours | theirs)} times"
            return Finding("claim", "FAILED", value, "no run could claim its root")
        rival.pipe.send("claim")
        rival.receive()
        with suppress(BusyError):
            claim(root, "doctor", None, disk=disk).release()
            return Finding("claim", "FAILED", "a root that another process owns was given to this one", consequence)
        rival.pipe.send("release")
        rival.receive()
        claim(root, "doctor", None, disk=disk).release()
    return Finding("claim", "ok", f"one owner at a time; {_RACES} files each made by one of two processes")


def lock(kind: str, fd: int) -> None:
    """Take a lock on an open file, or raise BlockingIOError: `flock`, or `fcntl` (POSIX)."""
    (fcntl.flock if kind == "flock" else fcntl.lockf)(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def check_locks(folder: Path) -> Finding:
    """flock and fcntl locks between two processes: one holds it, the other does not get it until it is given back."""
    path = folder / "lock"
    path.touch()
    good, refused, broken = list[str](), list[str](), list[str]()
    with IsolatedProcess(lambda pipe: _lock_when_told(pipe, path), duplex=True) as other:
        for kind in ("flock", "fcntl"):
            with path.open("r+b", buffering=0) as file:
                try:
                    lock(kind, file.fileno())
                except OSError as error:
                    refused.append(f"{kind} ({why(error)})")
                    continue
                other.pipe.send(kind)
                if other.receive():
                    broken.append(f"two processes hold the same {kind} lock")
                    continue
            other.pipe.send(kind)
            if other.receive():
                good.append(kind)
            else:
                broken.append(f"a {kind} lock is never given back")
    figures = {"work": good, "refused": refused, "broken": broken}
    if broken:
        advice = "what relies on locks is not safe here; ckptman's own claims do not need them"
        return Finding("locks", "FAILED", "; ".join(broken), advice, figures)
    if refused:
        works = f"{', '.join(good)} works; " if good else ""
        advice = "ckptman's claims do without; two prunes at a time report the same bytes as freed"
        return Finding("locks", "warning", f"{works}refused: {', '.join(refused)}", advice, figures)
    return Finding("locks", "ok", "flock and fcntl hold between two processes of this host", "", figures)


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
    from ckptman.io.file_writer import FileWriter  # not at the top: it loads numpy, which the verb does without

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


def _rival(pipe: Connection, folder: Path, root: Path, disk: Disk) -> None:
    """The other process: does what it is told, and says what came of it."""
    held: Claim | None = None
    while True:
        task = pipe.recv()
        said: object = None
        try:
            if task == "race":
                said = _race(folder, disk)
            elif task == "claim":
                held, said = claim(root, "doctor", None, disk=disk), "held"
            elif held is not None:
                held.release()
                said = "released"
        except (OSError, CkptmanError) as error:
            said = error
        pipe.send(said)


def _race(folder: Path, disk: Disk) -> set[int]:
    won = set()
    for number in range(_RACES):
        with suppress(FileExistsError):
            disk.create_file(folder / f"race-{number}", b"x")
            won.add(number)
    return won


def _lock_when_told(pipe: Connection, path: Path) -> None:
    while True:
        kind = pipe.recv()
        with path.open("r+b", buffering=0) as file:
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
