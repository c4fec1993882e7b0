"""Who writes to a root. Two runs that write to one root would rename and prune each other's checkpoints.

The claim is a file with host, pid and start time of its owner, who touches it every few seconds. On the same host a
claim is dead when its process is; from another host, when it was not touched for `PATIENCE_SECONDS` while we watched:
clocks of two hosts are never compared. Claiming is a hard link, which exactly one of several claimants gets.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ckptman.errors import BusyError, RootError
from ckptman.store.durable import DISK, Disk
from ckptman.store.names import owner_path

BEAT_SECONDS = 5.0
PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class Owner:
    """A process that claims a root. `host_key` tells apart boots and containers that share a host name."""

    host: str
    host_key: str
    pid: int
    started_seconds: float
    job_id: str | None
    run_id: str
    nonce: str


def this_process(run_id: str, job_id: str | None) -> Owner:
    """The owner that this process would be."""
    import psutil

    started = psutil.Process().create_time()
    return Owner(socket.gethostname(), _host_key(), os.getpid(), started, job_id, run_id, os.urandom(4).hex())


def read_owner(root: Path) -> Owner | None:
    """Who claims a root, dead or alive; None if nobody does, or if the claim is unreadable rubbish."""
    return _read(owner_path(root))


def is_alive(root: Path, owner: Owner, patience_seconds: float = PATIENCE_SECONDS) -> bool:
    """Whether the process behind a claim lives. From another host this takes up to `patience_seconds` to deny."""
    if owner.host == socket.gethostname() and owner.host_key == _host_key():
        return _process_lives(owner)
    return _is_touched(owner_path(root), owner, patience_seconds)


class Claim:
    """This process's right to write to a root, held until `release`. Made by `claim`."""

    def __init__(self, root: Path, owner: Owner, disk: Disk = DISK) -> None:
        self.root, self.owner, self._disk = root, owner, disk
        self._counter = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ckptman-owner", daemon=True)
        self._thread.start()

    def next_tag(self) -> str:
        """A tag for a tmp or trash name that nobody used before, and that tells whose it is."""
        self._counter += 1
        return f"{self.owner.nonce}-{self._counter}"

    def check(self) -> None:
        """Raises: BusyError if another run took the root over (this process was silent for too long)."""
        owner = read_owner(self.root)
        if owner is not None and owner.nonce != self.owner.nonce:
            raise BusyError(str(self.root), owner.host, owner.pid, owner.job_id)

    def release(self) -> None:
        """Give the root free. Never takes away somebody else's claim."""
        self._done.set()
        self._thread.join()
        owner = read_owner(self.root)
        if owner is not None and owner.nonce == self.owner.nonce:
            with contextlib.suppress(OSError):
                self._disk.remove_file(owner_path(self.root))

    def _beat(self) -> None:
        while not self._done.wait(BEAT_SECONDS):
            # A file system that is away for a moment is no reason to die here: the next save will tell.
            with contextlib.suppress(OSError):
                owner = read_owner(self.root)
                if owner is None or owner.nonce != self.owner.nonce:
                    return
                os.utime(owner_path(self.root))


def claim(
    root: Path, run_id: str, job_id: str | None, *, patience_seconds: float = PATIENCE_SECONDS, disk: Disk = DISK
) -> Claim:
    """Claim a root for this process. A dead owner's claim is taken over. Called by the leader only.

    Raises: BusyError (a live run owns it), RootError (it cannot be written).
    """
    me = this_process(run_id, job_id)
    path = owner_path(root)
    try:
        disk.make_folders(path.parent)
        with _same_host_lock(path.with_name("owner.lock")):
            other = read_owner(root)
            if other is not None and is_alive(root, other, patience_seconds):
                raise BusyError(str(root), other.host, other.pid, other.job_id)
            _take(path, me, other, disk)
    except BusyError:
        raise
    except OSError as error:
        raise RootError(
            error.errno or errno.EIO,
            f"the checkpoint root {root} cannot be written ({error.strerror}): check permissions, quota and the mount",
        ) from error
    return Claim(root, me, disk)


def _take(path: Path, me: Owner, dead: Owner | None, disk: Disk) -> None:
    mine = path.with_name(f"owner.{me.nonce}")
    disk.write_file(mine, json.dumps(asdict(me)).encode())
    try:
        if os.path.lexists(path):
            # Renamed, not removed: of two that take over at once, the second would remove the first one's new claim.
            aside = path.with_name(f"owner.dead-{me.nonce}")
            with contextlib.suppress(FileNotFoundError):
                disk.rename(path, aside)
                moved = _read(aside)
                if moved is not None and (dead is None or moved.nonce != dead.nonce):
                    with contextlib.suppress(FileExistsError):
                        disk.link(aside, path)
                disk.remove_file(aside)
        disk.link(mine, path)
    except FileExistsError:
        winner = _read(path)
        raise BusyError(
            str(path.parent.parent), winner.host if winner else "?", winner.pid if winner else 0, None
        ) from None
    finally:
        disk.remove_file(mine)


def _read(path: Path) -> Owner | None:
    try:
        return Owner(**json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _process_lives(owner: Owner) -> bool:
    import psutil

    try:
        process = psutil.Process(owner.pid)
        # A pid is reused; the start time tells. A zombie has closed its files and will write no more.
        same = abs(process.create_time() - owner.started_seconds) < 1.0
        return same and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _is_touched(path: Path, owner: Owner, patience_seconds: float) -> bool:
    first = _touched_at(path)
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        time.sleep(min(1.0, patience_seconds / 10))
        if _touched_at(path) != first:
            current = _read(path)
            return current == owner
    return False


def _touched_at(path: Path) -> int | None:
    # Opened, not only stat'ed: NFS looks at the server again when a file is opened.
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _host_key() -> str:
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
    try:
        return f"{boot.read_text().strip()} {os.readlink(namespace)}"  # noqa: PTH115 not a path, a label
    except OSError:
        return ""


@contextlib.contextmanager
def _same_host_lock(path: Path) -> Iterator[None]:
    from filelock import FileLock

    try:
        lock = FileLock(path, timeout=PATIENCE_SECONDS)
        lock.acquire()
    except (NotImplementedError, OSError):
        # No flock here (some Lustre mounts), or held for very long: the link below decides alone.
        yield
        return
    try:
        yield
    finally:
        lock.release()
