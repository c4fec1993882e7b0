"""Whether the process lives that has left a file behind: a claim, a lease, the mark of an export.

On the same host the kernel tells. On another one nobody does, so whoever lives touches its file every few seconds, and
is dead when that was not touched for `SILENT_SECONDS` while we watched: clocks of two hosts are never compared.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ckptman.errors import CorruptError
from ckptman.storage.format.paths import new_nonce
from ckptman.storage.io.safe_open import open_regular

BEAT_SECONDS = 5.0
SILENT_SECONDS = 30.0
LOOK_SECONDS = 0.1
_first_seen: dict[Path, tuple[int, float]] = {}
"""For each file that only watching can judge: when it was touched last, and since when we know (monotonic clock).

Kept from look to look: a run that prunes after each save has watched between its saves, and needs not wait.
"""


class Owner(BaseModel):
    """A process that claims a root.

    `host_key` tells apart boots and containers that share a host name. `start_ticks` (clock ticks since boot) tells
    apart processes that share a pid; unlike a time of day it cannot change when the clock is set.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    host: str
    host_key: str
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    start_ticks: int
    job_id: str | None
    run_id: str
    nonce: str


def this_process(run_id: str, job_id: str | None) -> Owner:
    """The owner that this process would be."""
    _, ticks = _state_and_start(os.getpid()) or ("", 0)
    return Owner(
        host=socket.gethostname(),
        host_key=_host_key(),
        pid=os.getpid(),
        start_ticks=ticks,
        job_id=job_id,
        run_id=run_id,
        nonce=new_nonce(),
    )


def is_this_process(owner: Owner) -> bool:
    """Whether a claim is that of the process that asks."""
    return (owner.host, owner.host_key, owner.pid) == (socket.gethostname(), _host_key(), os.getpid())


def is_alive(owner: Owner | None, path: Path) -> bool | None:
    """Whether the owner of a file lives; None where it has to be watched for longer. `owner` None: it is unreadable."""
    if owner is not None and (lives := process_lives(owner)) is not None:
        return lives
    try:
        touched = touched_at(path)
    except OSError:
        return None
    if touched is None:  # given back, or no regular file: that is nobody's
        forget(path)
        return False
    before, since = _first_seen.setdefault(path, (touched, time.monotonic()))
    if touched != before:
        _first_seen[path] = touched, time.monotonic()
        return True
    return False if time.monotonic() - since >= SILENT_SECONDS else None


def forget(path: Path) -> None:
    """Forget what was seen of a file: it is watched anew."""
    _first_seen.pop(path, None)


def watched_in(folder: Path) -> list[Path]:
    """Return the files of a folder that have been watched."""
    return [path for path in list(_first_seen) if path.parent == folder]


def process_lives(owner: Owner) -> bool | None:
    """Whether a process lives; None where this host cannot tell: it is another's, or is not shown to us (`hidepid`)."""
    if not owner.host_key or (owner.host, owner.host_key) != (socket.gethostname(), _host_key()):
        return None
    found = _state_and_start(owner.pid)
    if found is not None:
        state, ticks = found
        # A pid is reused; the start tells. A zombie has closed its files and will write no more.
        return ticks == owner.start_ticks and state not in "ZX"
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return None


def _state_and_start(pid: int) -> tuple[str, int] | None:
    try:
        # After the command in brackets, which may hold anything: state is field 3, start time field 22 (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[19])


def touched_at(path: Path) -> int | None:
    """When a file was written or touched last (nanoseconds); None where there is no such file. Raises: OSError."""
    # Opened, not only stat'ed: NFS looks at the server again when a file is opened.
    try:
        fd = open_regular(path)
    except (FileNotFoundError, CorruptError):
        return None
    try:
        return os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)


def _host_key() -> str:
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
    try:
        return f"{boot.read_text().strip()} {os.readlink(namespace)}"  # noqa: PTH115 not a path, a label
    except OSError:
        return ""
