"""The draft of a copy: claimed by one process at a time, found again by the next one, and cleared where nobody will.

It is `NAME.tmp-copy-<tag of the original>`, beside what it becomes. Torch-free.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.backends.source import Facts, is_regular
from ckptman.catalog.writer_lock import Claim, claim, process_lives, read_owner
from ckptman.errors import BusyError, CkptmanError, RootError
from ckptman.format.paths import DOT
from ckptman.io.file_scan import Scanned, scan
from ckptman.io.filesystem import Disk
from ckptman.transfer.progress import Meter
from ckptman.transfer.read_back import Means

_ATTEMPTS = 3
_LITTLE_BYTES = 1024 * 1024
"""A draft with less than this in it is not worth keeping."""
# With a letter: what people add, such as `.old-copy-20261122`, is none of ours.
_LEFT = re.compile(
    r"(?P<name>.+)\.(?P<kind>tmp|old|trash)-copy-(?=[0-9]*[a-f])([0-9a-f]{8}|[0-9a-f]{16})", re.ASCII | re.DOTALL
)


@contextmanager
def claimed(draft: Path, place: LocalBackend, disk: Disk) -> Iterator[Claim]:
    """The draft is ours alone: made if there is none. Raises: BusyError."""
    if draft.is_symlink():  # through it, what lies elsewhere would be tidied up
        disk.remove_file(draft)
    for attempt in range(_ATTEMPTS):
        with contextlib.suppress(FileExistsError):
            place.begin(*draft.name.split(".tmp-", 1))
        try:
            with _telling_who_copies(place.root):
                held = claim(draft, "copy", os.environ.get("SLURM_JOB_ID"), disk=disk)
            break
        except RootError as error:
            # The draft was made visible, or cleared, this very moment?
            if draft.exists() or attempt == _ATTEMPTS - 1:
                raise error.__cause__ or error from None
    try:
        yield held
    finally:
        held.release()


def check_claim(held: Claim, place: LocalBackend) -> None:
    """A draft is still ours: who was stopped for long is taken for dead, and what it has sealed is opened again by the
    one who takes it over. Called before it becomes visible. Raises: BusyError, OSError."""
    with _telling_who_copies(place.root):
        held.check()


@contextmanager
def _telling_who_copies(root: Path) -> Iterator[None]:
    try:
        yield
    except BusyError as error:
        raise BusyCopyingError(str(root), error.host, error.pid, error.job_id) from None


def tidy(draft: Path, facts: Facts, means: Means, meter: Meter) -> dict[str, bytes]:
    """Clear a draft of what has no place in it, and digest what an attempt before left in the files that have."""
    sizes: dict[str, int] = {}
    with os.scandir(draft) as items:
        for item in list(items):
            status = item.stat(follow_symlinks=False)
            if item.name in facts.sizes and is_regular(status):
                sizes[item.name] = min(status.st_size, facts.sizes[item.name])
            elif item.is_dir(follow_symlinks=False):
                if item.name != DOT:
                    means.disk.remove_tree(Path(item.path))
            else:
                means.disk.remove_file(Path(item.path))
    there: dict[str, bytes] = {}

    def finish(found: Scanned) -> None:
        if found.refused is None and not found.unreadable:
            there[found.name] = bytes(found.blocks)

    if sizes:
        meter.begin("looking", sum(sizes.values()), 0)
        passed = partial(means.passed, meter)
        scan(draft, list(sizes.items()), facts.block_bytes, finish=finish, threads=means.threads, done=passed)
    return there


def check_room(draft: Path, facts: Facts, place: LocalBackend) -> None:
    """A disk that would be full half way is left as it is, for whoever saves to it. Raises: OSError."""
    with os.scandir(draft) as items:
        taken = sum(item.stat(follow_symlinks=False).st_blocks * 512 for item in items)
    system = os.statvfs(draft)
    if facts.bytes - taken <= system.f_bavail * system.f_frsize:
        return
    if taken < _LITTLE_BYTES:
        place.abandon(str(draft))
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(draft))


def clear_left(draft: Path, name: str, place: LocalBackend, disk: Disk) -> None:
    """Remove what other copies of a checkpoint of others left, once nobody works on it. Of ours, prunes know the names.

    What cannot be removed fails no copy.
    """
    for other in place.root.iterdir():
        found = _LEFT.fullmatch(other.name)
        if other == draft or found is None or found["name"] != name:
            continue
        with contextlib.suppress(OSError, CkptmanError):
            if found["kind"] == "tmp":  # what the same folder held before it was saved over
                owner = read_owner(other)
                if owner is None or process_lives(owner) is False:
                    with claimed(other, place, disk):
                        disk.remove_tree(other)
            elif os.path.lexists(place.root / name):  # what was replaced by that
                disk.remove_tree(other)


class BusyCopyingError(BusyError):
    """Another copy to the same place is at work. That says nothing about other checkpoints."""

    def __init__(self, root: str, host: str, pid: int, job_id: str | None) -> None:
        super().__init__(root, host, pid, job_id)
        job = f", job {job_id}" if job_id else ""
        self.args = (
            f"another copy of the same checkpoint to {root} is at work (host {host}, pid {pid}{job}): let it end, "
            f"then there is nothing left to do",
        )
