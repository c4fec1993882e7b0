"""Proof of a copy: what was written is read back from storage, and held against what was saved. Torch-free."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ckptman
from ckptman.catalog.backends.source import Facts
from ckptman.catalog.verified import identify, note_verified, read_verified
from ckptman.errors import RootError
from ckptman.format.manifest import FileRecord, Manifest
from ckptman.integrity.check import FileReport, verify_folder
from ckptman.io.file_scan import Scanned, scan
from ckptman.io.filesystem import DISK, Disk
from ckptman.transfer.page_cache import ATTEMPTS, drop
from ckptman.transfer.progress import Limit, Meter


@dataclass(frozen=True)
class Means:
    """How a copy is made. `threads` None: as many as a save and a verify have.

    `limit`: to what is copied, and to what is read back after it. `overwrite`: another checkpoint of its name goes.
    """

    disk: Disk = DISK
    threads: int | None = None
    limit: Limit | None = None
    meter: Meter | None = None
    overwrite: bool = False

    def passed(self, meter: Meter, count: int) -> None:
        """So many bytes were read, to look at them or to check them: held back as those that are copied are."""
        if self.limit is not None:
            self.limit.take(count)
        meter.moved(count, 1.0)


def prove(draft: Path, proof: Manifest, means: Means, meter: Meter) -> str:
    """Read everything back. Why some of it may have come from memory, "" where all came from storage.

    Raises: NotReadBackError.
    """
    cached = drop_all(draft, {name: record.bytes for name, record in proof.files.items()})
    report = verify(draft, proof, means, meter)
    if not report.good:
        raise NotReadBackError(draft, (*report.problems, *report.unread))
    return "this file system keeps what was written in memory" if cached else ""


def verify(folder: Path, proof: Manifest, means: Means, meter: Meter) -> FileReport:
    """Check every byte of a folder, within the limit. Raises: OSError."""
    meter.begin("verifying", proof.total_bytes, 0)
    return verify_folder(folder, proof, threads=means.threads, done=partial(means.passed, meter))


def drop_all(folder: Path, sizes: dict[str, int], flush: Disk | None = None) -> bool:
    """Take files out of the page cache of this host; whether some of one may have stayed in it.

    `flush`: before that, as who brought them may not have done it. Raises: OSError, where that fails.
    """
    stayed = False
    for name, size in sizes.items():
        if not size:
            continue
        try:
            fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # the verification will tell
        try:
            if flush is not None:
                flush.sync_file(fd)
            # Where one stays, all may: then none is waited for.
            stayed = not drop(fd, size, 1 if stayed else ATTEMPTS) or stayed
        finally:
            os.close(fd)
    return stayed


def is_proved(folder: Path, manifest: Manifest) -> bool:
    """Whether it was noted that every byte of a checkpoint was read and is what was saved."""
    noted = read_verified(folder, manifest)
    return noted is not None and noted.every_byte


def difference_in_bytes(facts: Facts, final: Path, means: Means) -> str:
    """Why a folder with files of these sizes is no copy of what has no digests; "" where it is."""
    drop_all(final, facts.sizes, means.disk)
    found = list[dict[str, bytes]]()
    for folder in (Path(facts.where), final):
        digests: dict[str, bytes] = {}

        def finish(each: Scanned, into: dict[str, bytes] = digests) -> None:
            into[each.name] = b"" if each.unreadable or each.refused else bytes(each.blocks) + b"."

        sizes, passed = list(facts.sizes.items()), partial(means.passed, means.meter or Meter())
        scan(folder, sizes, facts.block_bytes, finish=finish, threads=means.threads, done=passed)
        found.append(digests)
    return "" if found[0] == found[1] and all(found[0].values()) else "is there, with other bytes in its files"


def note(folder: Path, facts: Facts, disk: Disk) -> None:
    """Note that every byte was read back. What was proved of the original holds of the very same bytes."""
    assert facts.manifest is not None
    proved = facts.proved
    with contextlib.suppress(PermissionError):
        note_verified(
            folder,
            identify(folder, facts.manifest),
            time_seconds=time.time(),
            ckptman_version=ckptman.__version__,
            levels=("digests", *(proved.levels if proved else ())),
            world_sizes=proved.world_sizes if proved else (),
            meshes=proved.meshes if proved else (),
            plan_world_sizes=proved.plan_world_sizes if proved else (),
            disk=disk,
        )


def manifest_of(facts: Facts, digests: Mapping[str, str]) -> Manifest:
    """Files of others as a manifest would have them, to hold what is read back against what was read."""
    return Manifest(
        step=0,
        sequence=1,
        time_seconds=0,
        reason="",
        world_size=1,
        torch_version="",
        ckptman_version=ckptman.__version__,
        run_id="",
        block_bytes=facts.block_bytes,
        files={name: FileRecord(bytes=size, digest=digests[name]) for name, size in facts.sizes.items()},
    )


class NotReadBackError(RootError):
    """Storage does not give back what was written to it. Attributes: `draft`, `problems`."""

    def __init__(self, draft: Path | str, problems: tuple[str, ...]) -> None:
        self.draft, self.problems = draft, problems
        super().__init__(
            errno.EIO,
            f"{draft} does not give back what was written to it ({'; '.join(problems[:3])}), so the copy does not "
            f"count: copy again, which writes what is wrong once more; if it comes again, do not trust this storage",
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.draft, self.problems)
