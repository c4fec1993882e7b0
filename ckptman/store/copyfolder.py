"""A checkpoint is copied into a root: to a draft that the next attempt finds again, proved there, then made visible.

The draft is `NAME.tmp-copy-<digest of the manifest>`, so a copy that was interrupted anywhere is taken up where it was,
and nothing else. Whoever works on it has a claim in it (see `owner`). Torch-free.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ckptman.errors import BusyError, CkptmanError, CorruptError, ExistsError, RootError, plain
from ckptman.store.abandoned import hand_on, read_rollbacks
from ckptman.store.blockread import Scanned
from ckptman.store.blockscan import scan
from ckptman.store.copypieces import move
from ckptman.store.copyproof import (
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
from ckptman.store.copysource import Facts, Original, SourceError, is_regular
from ckptman.store.durable import Disk
from ckptman.store.lease import lease
from ckptman.store.manifest import missing_file, read_manifest
from ckptman.store.meter import Meter
from ckptman.store.names import DOT, MANIFEST, METADATA, parse_step
from ckptman.store.owner import Owner, claim, is_alive, is_this_process, process_lives, read_owner
from ckptman.store.pins import PINNED
from ckptman.store.place import FolderPlace
from ckptman.store.regular import read_regular

_FULL = (errno.ENOSPC, errno.EDQUOT)
_ATTEMPTS = 3
_LITTLE_BYTES = 1024 * 1024
"""A draft with less than this in it is not worth keeping."""
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


def copy_to_folder(original: Original, place: FolderPlace, means: Means) -> Copied:
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
            if (found := _already(original, place, means)) is not None:
                return found
            _refuse_live_run(place.root)
            with _claimed(draft, place, means.disk):
                try:
                    # Another copy may have ended while this one waited for nothing.
                    if (found := _already(original, place, means)) is not None:
                        means.disk.remove_tree(draft)
                        return found
                    if facts.manifest is None:  # of a checkpoint of ours, a prune knows its name
                        _clear_older(draft, facts.name, means.disk)
                    return _copy(original, place, draft, means, nonce)
                except ExistsError:
                    place.abandon(str(draft))
                    raise


def _clear_older(draft: Path, name: str, disk: Disk) -> None:
    """Remove drafts of what the same folder held before it was saved over, once nobody works on them."""
    for other in draft.parent.iterdir():
        if other != draft and other.name.startswith(f"{name}.tmp-copy-") and not other.is_symlink():
            owner = read_owner(other)
            if owner is not None and process_lives(owner) is False:
                disk.remove_tree(other)


def _copy(original: Original, place: FolderPlace, draft: Path, means: Means, nonce: str) -> Copied:
    facts, disk, meter = original.facts, means.disk, means.meter or Meter()
    begun = time.monotonic()
    try:
        there = _tidy(draft, facts, means, meter)
        _check_room(draft, facts, place)
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
    tag = f"copy-{os.urandom(4).hex()}"
    final = place.publish(draft, facts.name, tag, replace=means.overwrite, nonce=nonce)
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


def _already(original: Original, place: FolderPlace, means: Means) -> Copied | None:
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
        drop_all(final, facts.sizes)
        report = verify(final, facts.manifest, means, means.meter or Meter())
        if report.good:
            note(final, facts, means.disk)
        problem = "is damaged there: " + "; ".join((*report.problems, *report.unread)) if not report.good else ""
    if problem:
        if means.overwrite and not _is_checkpoint(final):
            raise ExistsError(f"{final} {problem}, and is no checkpoint: move it away, or copy to another root")
        if means.overwrite or place.is_abandoned(final):
            return None
        raise ExistsError(f"{final} {problem}: {remedy}")
    # Who made it visible may have been killed before that was durable, and now the original may go.
    means.disk.sync_folder(place.root)
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


def _is_checkpoint(final: Path) -> bool:
    """Whether what is to be replaced is a checkpoint, or is what is left of one."""
    if parse_step(final.name) is not None:
        return True
    return not final.is_symlink() and any(os.path.lexists(final / name) for name in (MANIFEST, METADATA))


def _difference(final: Path, facts: Facts) -> str:
    """Why what has this name is not what is to be copied, by names and sizes; "" where it is."""
    if final.is_symlink() or not final.is_dir():
        return "is there, and is no folder"
    if facts.manifest is None:
        sizes = {item.name: item.stat(follow_symlinks=False).st_size for item in os.scandir(final) if item.name != DOT}
        return "" if sizes == facts.sizes else "is there, with other files"
    try:
        if read_manifest(final).to_json() != facts.manifest.to_json():
            return "is there, and is another checkpoint"
        problem = missing_file(final, facts.manifest)
    except (CkptmanError, FileNotFoundError) as error:
        return f"is there, and is no complete checkpoint ({error})"
    return f"is there, and is not complete: {problem}" if problem else ""


@contextmanager
def _claimed(draft: Path, place: FolderPlace, disk: Disk) -> Iterator[None]:
    """The draft is ours alone: made if there is none. Raises: BusyError."""
    if draft.is_symlink():  # through it, what lies elsewhere would be tidied up
        disk.remove_file(draft)
    for attempt in range(_ATTEMPTS):
        with contextlib.suppress(FileExistsError):
            place.begin(*draft.name.split(".tmp-", 1))
        try:
            held = claim(draft, "copy", os.environ.get("SLURM_JOB_ID"), disk=disk)
            break
        except BusyError as error:
            raise BusyCopyingError(str(place.root), error.host, error.pid, error.job_id) from None
        except RootError as error:
            # The draft was made visible, or cleared, this very moment?
            if draft.exists() or attempt == _ATTEMPTS - 1:
                raise error.__cause__ or error from None
    try:
        yield
    finally:
        held.release()


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


def _check_room(draft: Path, facts: Facts, place: FolderPlace) -> None:
    """A disk that would be full half way is left as it is, for whoever saves to it. Raises: OSError."""
    with os.scandir(draft) as items:
        taken = sum(item.stat(follow_symlinks=False).st_blocks * 512 for item in items)
    system = os.statvfs(draft)
    if facts.bytes - taken <= system.f_bavail * system.f_frsize:
        return
    if taken < _LITTLE_BYTES:
        place.abandon(str(draft))
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(draft))


def _root_error(root: Path, facts: Facts, error: OSError) -> RootError:
    why = error.strerror or str(error)
    again = "what was copied stays; copy again, and it goes on from there"
    if error.errno in _FULL:
        return RootError(
            error.errno,
            f"{root} has no room for {facts.name} ({why}; it needs {facts.bytes:,} bytes{_free(root, error.errno)}): "
            f"free some with ckptman prune, or raise the quota. Until then {again} "
            f"({'ckptman prune --leftovers clears it' if facts.manifest else 'or remove it by hand'})",
        )
    where = str(error.filename or root)
    kind = SourceError if Path(facts.where) in Path(where).parents else RootError
    return kind(error.errno or errno.EIO, f"{plain(where)}: {why}: check the mount and its permissions; {again}")


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


def _tidy(draft: Path, facts: Facts, means: Means, meter: Meter) -> dict[str, bytes]:
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
        lost = min(found.unreadable, default=None)
        if found.refused is None and lost is None:
            there[found.name] = bytes(found.blocks)

    if sizes:
        meter.begin("looking", sum(sizes.values()), 0)
        scan(
            draft,
            list(sizes.items()),
            facts.block_bytes,
            finish=finish,
            threads=means.threads,
            done=partial(means.passed, meter),
        )
    return there


class BusyCopyingError(BusyError):
    """Another copy of the same checkpoint to the same root is at work."""

    def __init__(self, root: str, host: str, pid: int, job_id: str | None) -> None:
        super().__init__(root, host, pid, job_id)
        job = f", job {job_id}" if job_id else ""
        self.args = (
            f"another copy of the same checkpoint to {root} is at work (host {host}, pid {pid}{job}): let it end, "
            f"then there is nothing left to do",
        )
