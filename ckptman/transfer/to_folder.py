"""A checkpoint is copied into a root: to a draft that the next attempt finds again, proved there, then made visible.

The draft has the digest of the manifest in its name (see `copydraft`), so a copy that was interrupted anywhere is taken
up where it was, and nothing else. Torch-free.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.backends.source import AGAIN, Facts, Original, SourceError, refused
from ckptman.catalog.pins import PINNED
from ckptman.catalog.reader_lease import lease
from ckptman.catalog.replaceable import may_be_replaced
from ckptman.catalog.rollback_records import hand_on, read_rollbacks
from ckptman.catalog.writer_lock import Claim, Owner, is_alive, is_this_process, read_owner
from ckptman.errors import BusyError, CkptmanError, CorruptError, ExistsError, RootError
from ckptman.format.manifest import missing_file, read_manifest
from ckptman.format.paths import DOT, MANIFEST, new_nonce
from ckptman.io.failure_cause import FULL
from ckptman.io.filesystem import Disk, holding
from ckptman.io.safe_open import read_regular
from ckptman.transfer.partial_copy import check_claim, check_room, claimed, clear_left, tidy
from ckptman.transfer.pieces import move
from ckptman.transfer.progress import Meter
from ckptman.transfer.read_back import (
    Means,
    NotReadBackError,
    difference_in_bytes,
    drop_all,
    is_proved,
    manifest_of,
    note,
    prove,
    verify,
)

_known_dead: set[str] = set()
"""Runs that were watched once and found to be gone: of another host that takes half a minute."""


@dataclass(frozen=True)
class Copied:
    """What became of one checkpoint. Bytes without the manifest; times in seconds.

    `already`: it was there, and is what it is here. `written_bytes`: the others were there from an attempt before.
    `from_memory`: why what was read back may not have come from storage; "" where it did. `remarks`: what did not
    travel, or could not be noted.
    """

    source: str
    path: str
    step: int | None
    files: int
    bytes: int
    already: bool
    written_bytes: int = 0
    copy_seconds: float = 0.0
    verify_seconds: float = 0.0
    buffered_because: str = ""
    from_memory: str = ""
    remarks: tuple[str, ...] = ()


def copy_to_folder(original: Original, place: LocalBackend, means: Means) -> Copied:
    """Copy a checkpoint into a root, prove every byte of it there, and only then make it visible, durably.

    Raises: BusyError (another copy of it is at work, or a run that is alive owns the root), ExistsError (another
    checkpoint has its name), CorruptError (the original is damaged; what was copied of it is removed), NotFoundError
    (the original was deleted meanwhile; the same), RootError (one of the places cannot be read or written; what was
    copied stays, and the next attempt takes it up).
    """
    facts = original.facts
    with _told(place.root, facts):
        place.make()
        draft = place.root / f"{facts.name}.tmp-copy-{facts.tag}"
        with lease(place.root, [draft.name, facts.name], what="copy", disk=means.disk) as nonce:
            if (copied := _already(original, place, means)) is None:
                _refuse_live_run(place.root)
                copied = _copy_alone(original, place, draft, means, nonce)
            if facts.manifest is None:
                clear_left(draft, facts.name, place, means.disk)
            return copied


def _copy_alone(original: Original, place: LocalBackend, draft: Path, means: Means, nonce: str) -> Copied:
    with claimed(draft, place, means.disk) as held, holding(draft):
        try:
            # Another copy may have ended while this one waited for nothing.
            if (found := _already(original, place, means)) is not None:
                means.disk.remove_tree(draft)
                return found
            if original.facts.manifest is None:  # to make room
                clear_left(draft, original.facts.name, place, means.disk)
            return _copy(original, place, draft, means, held, nonce)
        except ExistsError:
            place.abandon(str(draft))
            raise


def _copy(original: Original, place: LocalBackend, draft: Path, means: Means, held: Claim, nonce: str) -> Copied:
    facts, disk, meter = original.facts, means.disk, means.meter or Meter()
    begun = time.monotonic()
    try:
        there = tidy(draft, facts, means, meter)
        check_room(draft, facts, place)
        moved = move(original, draft, there, disk=disk, meter=meter, limit=means.limit, threads=means.threads)
        copied = time.monotonic()
        proof = facts.manifest or manifest_of(facts, moved.digests)
        why = prove(draft, proof, means, meter)
        # Without digests, what was read may be some of what was there and some of what was saved over it since.
        if facts.manifest is None and (lost := original.lost()) is not None:
            raise lost
    except (CorruptError, OSError) as error:
        # What can never be finished would only take up room.
        lost = original.lost()
        if lost is not None or isinstance(error, CorruptError):
            place.abandon(str(draft))
        if lost is not None:
            raise lost from error
        raise
    verified = time.monotonic()
    _seal(draft, facts, disk)
    # Asked again: all this may have taken hours.
    _refuse_live_run(place.root)
    # Before it can be the newest there.
    hand_on(facts.rollbacks, place.root, disk)
    check_claim(held, place)
    final = place.publish(draft, facts.name, f"copy-{new_nonce()}", replace=means.overwrite, nonce=nonce)
    disk.remove_tree(final / DOT)
    return Copied(
        source=facts.where,
        path=str(final),
        step=facts.manifest.step if facts.manifest else None,
        files=len(facts.sizes),
        bytes=facts.bytes,
        already=False,
        written_bytes=moved.written_bytes,
        copy_seconds=copied - begun,
        verify_seconds=verified - copied,
        buffered_because=moved.buffered_because,
        from_memory=why,
        remarks=facts.remarks,
    )


def _already(original: Original, place: LocalBackend, means: Means) -> Copied | None:
    """The same checkpoint at the destination, proved now if that was not noted. None: nothing is in the way.

    Raises: ExistsError.
    """
    facts = original.facts
    final = place.root / facts.name
    if not os.path.lexists(final):
        return None
    begun = time.monotonic()
    remedy = "copy to another root, or say --overwrite to replace it"
    problem = _difference(final, facts)
    if not problem and facts.manifest is None:
        problem = difference_in_bytes(facts, final, means)
    elif not problem and facts.manifest is not None and not is_proved(final, facts.manifest):
        drop_all(final, facts.sizes, means.disk)
        report = verify(final, facts.manifest, means, means.meter or Meter())
        if report.good:
            note(final, facts, means.disk)
        problem = "is damaged there: " + "; ".join((*report.problems, *report.unread)) if not report.good else ""
    if problem:
        if means.overwrite and not may_be_replaced(final):
            raise ExistsError(f"{final} {problem}, and is no checkpoint: move it away, or copy to another root")
        if means.overwrite or place.is_abandoned(final):
            return None
        raise ExistsError(f"{final} {problem}: {remedy}")
    # Who made it visible may have been killed before that was durable, and now the original may go.
    for folder in (final, place.root):
        means.disk.sync_folder(folder)
    if (final / DOT).is_dir():  # a copy was killed when it had nothing left to do but this
        means.disk.remove_tree(final / DOT)
    if facts.pinned is not None and not os.path.lexists(final / PINNED):
        means.disk.replace_file(final / PINNED, facts.pinned)
    return Copied(
        facts.where,
        str(final),
        facts.manifest.step if facts.manifest else None,
        len(facts.sizes),
        facts.bytes,
        already=True,
        verify_seconds=time.monotonic() - begun,
        remarks=(*facts.remarks, *_hand_on_later(facts, place.root, means.disk)),
    )


def _hand_on_later(facts: Facts, root: Path, disk: Disk) -> Iterator[str]:
    """Hand on the rollbacks since a checkpoint was copied; or why not, in words."""
    known = {each.id for each in read_rollbacks(root).values()}
    if not (new := [each for each in facts.rollbacks if each.id not in known]):
        return
    if (owner := _live_run(root)) is not None:
        who = f"a run is at work (host {owner.host}, pid {owner.pid})"
        yield f"what was abandoned {new[-1]} still counts in {root}, where {who}: copy again once it has ended"
        return
    hand_on(new, root, disk)


def _difference(final: Path, facts: Facts) -> str:
    """Why what has this name is not what is to be copied, by names and sizes; "" where it is."""
    if final.is_symlink() or not final.is_dir():
        return "is there, and is no folder"
    if facts.manifest is None:
        with os.scandir(final) as items:
            sizes = {item.name: item.stat(follow_symlinks=False).st_size for item in items if item.name != DOT}
        return "" if sizes == facts.sizes else "is there, with other files"
    try:
        if read_manifest(final).to_json() != facts.manifest.to_json():
            return "is there, and is another checkpoint"
        problem = missing_file(final, facts.manifest)
    except (CkptmanError, FileNotFoundError) as error:
        return f"is there, and is no complete checkpoint ({error})"
    return f"is there, and is not complete: {problem}" if problem else ""


def _seal(draft: Path, facts: Facts, disk: Disk) -> None:
    """What is beside the files, the manifest, and the note of what was proved: the last things that are written."""
    written = {}
    if facts.pinned is not None:
        written[PINNED] = facts.pinned
    if facts.manifest is not None:
        written[MANIFEST] = facts.data
    for name, data in written.items():
        disk.write_file(draft / name, data)
    drop_all(draft, {name: len(data) for name, data in written.items()})
    for name, data in written.items():
        if read_regular(draft / name, len(data) + 1) != data:
            raise NotReadBackError(draft, (f"{name} has other bytes",))
    if facts.manifest is not None:
        note(draft, facts, disk)
    disk.sync_folder(draft)


@contextmanager
def _told(root: Path, facts: Facts) -> Iterator[None]:
    """An error of a file system as one of ours, which says which side it is on and what is left there."""
    try:
        yield
    except CkptmanError:
        raise
    except OSError as error:
        raise _root_error(root, facts, error) from error


def _root_error(root: Path, facts: Facts, error: OSError) -> RootError:
    if error.errno in FULL:
        return RootError(
            error.errno,
            f"{root} has no room for {facts.name} ({error.strerror or error}; it needs {facts.bytes:,} "
            f"bytes{_free(root, error.errno)}): free some with ckptman prune, or raise the quota. Until then {AGAIN} "
            f"({'ckptman prune --leftovers clears it' if facts.manifest else 'or remove it by hand'})",
        )
    is_of_source = Path(facts.where) in Path(str(error.filename or root)).parents
    return refused(SourceError if is_of_source else RootError, error, root)


def _free(root: Path, code: int | None) -> str:
    """What is left there, in words: of a quota nobody knows."""
    if code != errno.ENOSPC or not root.is_dir():
        return ""
    system = os.statvfs(root)
    files = ", and no more files can be made" if system.f_files and not system.f_favail else ""
    return f", {system.f_bavail * system.f_frsize:,} bytes are free{files}"


def _refuse_live_run(root: Path) -> None:
    """What is copied into the root of a run that is alive would become its newest checkpoint behind its back."""
    if (owner := _live_run(root)) is not None:
        raise BusyError(str(root), owner.host, owner.pid, owner.job_id)


def _live_run(root: Path) -> Owner | None:
    """The run that owns a root, unless it is this process, or gone."""
    owner = read_owner(root)
    if owner is None or is_this_process(owner) or owner.nonce in _known_dead:
        return None
    if is_alive(root, owner):
        return owner
    _known_dead.add(owner.nonce)
    return None
