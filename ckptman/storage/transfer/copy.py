"""Copying checkpoints from backend to backend: one function for the command, and for whoever drains a root.

A copy counts only after every byte of it was read back and found to be what was saved. It keeps step and sequence, so
what is newest stays newest.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import ckptman
from ckptman.errors import CkptmanError, ConfigError, CorruptError, ExistsError
from ckptman.storage.catalog.backends.backend import Backend
from ckptman.storage.catalog.backends.drafts import CopyDraft, NotReadBackError
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.backends.source import (
    CopySource,
    Finish,
    ForeignSource,
    SourceError,
    SourceInfo,
    blaming_source,
)
from ckptman.storage.catalog.catalog import Entry
from ckptman.storage.format.manifest import FileRecord, Manifest
from ckptman.storage.format.paths import MANIFEST, parse_step
from ckptman.storage.integrity.damage_report import Damage, located, of_bytes
from ckptman.storage.io.checksums import digest_of_blocks
from ckptman.storage.io.file_scan import Scanned
from ckptman.storage.transfer.copy_bytes import move
from ckptman.storage.transfer.progress import Limit, Meter, Phase


@dataclass(frozen=True)
class CopyOptions:
    """How a copy is made. `threads` None: as many as a save and a verify have.

    `limit`: to what is copied, and to what is read back after it. `overwrite`: another checkpoint of its name goes.
    """

    threads: int | None = None
    limit: Limit | None = None
    meter: Meter = field(default_factory=Meter)
    overwrite: bool = False

    def passed(self, count: int) -> None:
        """So many bytes were read, to look at them or to check them: held back as those that are copied are."""
        if self.limit is not None:
            self.limit.take(count)
        self.meter.moved(count, 1.0)


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


def copy_checkpoint(
    entry: Entry, place: Backend, options: CopyOptions | None = None, *, source: Backend | None = None
) -> Copied:
    """Copy one complete checkpoint to another place, verified there, and then visible as a whole.

    One that is there already is not copied again. Interrupted anywhere, it can be called again and goes on from what
    was copied. Both sides are leased meanwhile, so no prune takes anything away. Called by `ckptman copy`, and by a
    drain, which may remove the source once this returns.

    Args:
        entry: As `source` lists it.
        place: Where to.
        options: How the copy is made; None: as a save and a verify would, and nothing is replaced.
        source: Where the entry lies, if not in the folder at its path.
    Raises: BusyError (another copy of it is at work, or a run that is alive owns the place), ConfigError (the place is
        where the checkpoint lies), CorruptError (the original is damaged; what was copied of it is removed),
        ExistsError (something else has its name), NotFoundError (the original was deleted meanwhile; the same),
        RootError (one of the places cannot be read or written; what was copied stays, and the next attempt takes it
        up).
    """
    source = source or LocalBackend(entry.path.parent)
    if entry.in_folder:
        check_apart(entry.path, place.where)
    with source.reading(entry, "copy"):
        return _copy(source.open(entry), place, options or CopyOptions())


def copy_foreign(folder: Path, place: Backend, options: CopyOptions | None = None) -> Copied:
    """The same of what plain DCP wrote: its files as they are, held against digests of what was read.

    Raises: as `copy_checkpoint`; ConfigError also where a place holds only what has a manifest.
    """
    check_apart(folder, place.where)
    return _copy(ForeignSource(folder), place, options or CopyOptions())


def check_apart(folder: Path, where: str | os.PathLike[str]) -> None:
    """Refuse a destination that is where the checkpoint lies, in it, or no root. Raises: ConfigError."""
    if "://" in os.fspath(where):
        return
    source, target = Path(os.path.realpath(folder)), Path(os.path.realpath(where))
    if parse_step(target.name) or os.path.lexists(target / MANIFEST):
        raise ConfigError(f"{where} is a checkpoint: name the root to copy to; a copy keeps the name of its folder")
    if target == source.parent:
        raise ConfigError(f"{folder} is in {where} already: name another root to copy to")
    # What is in a root is a run's; a folder without a checkpoint's name may lie anywhere.
    around = source.parent if parse_step(source.name) else source
    if around == target or around in target.parents:
        raise ConfigError(f"{where} is inside of {around}, from which is copied: name a root outside of it")


def _copy(original: CopySource, place: Backend, options: CopyOptions) -> Copied:
    with place.receive(original.facts) as draft:
        if (found := _already(original, draft, options)) is not None:
            return found
        if draft.in_place and draft.difference():
            _check_original(original, options)
        with draft.claimed(options.overwrite):  # nobody else copies the same meanwhile
            try:
                # Another copy may have ended while this one waited for nothing.
                if (found := _already(original, draft, options)) is not None:
                    draft.abandon()
                    return found
                return _bring(original, draft, options)
            except ExistsError:
                draft.abandon()
                raise


def _bring(original: CopySource, draft: CopyDraft, options: CopyOptions) -> Copied:
    """Copy the files, read them back, and make the copy visible. Raises: as `copy_checkpoint`."""
    facts = original.facts
    begun = time.monotonic()
    try:
        there = _look(draft, options)
        looked = time.monotonic()
        moved = move(original, draft, there, meter=options.meter, limit=options.limit, threads=options.threads)
        copied = time.monotonic()
        # What was put in place was read a moment ago where it was right then.
        names = [name for name in facts.sizes if not draft.in_place or name in moved.written]
        cached = draft.uncache(final=False)
        problems = _wrong(draft, names, _manifest_of(facts, moved.digests), options)
        if problems:
            raise NotReadBackError(draft.draft, problems)
        # Without digests, what was read may be some of what was there and some of what was saved over it since.
        if facts.manifest is None and (lost := original.lost()) is not None:
            raise lost
    except (CkptmanError, OSError) as error:
        # What can never be finished would only take up room.
        lost = original.lost()
        if lost is not None or isinstance(error, CorruptError):
            draft.abandon()
        if lost is not None:
            raise lost from error
        raise
    verified = time.monotonic()
    path = draft.publish(options.overwrite)
    return replace(
        _report(facts, path, already=False),
        written_bytes=moved.written_bytes,
        copy_seconds=copied - looked if draft.in_place else copied - begun,
        verify_seconds=verified - copied + (looked - begun if draft.in_place else 0.0),  # each file was read in one
        buffered_because=moved.buffered_because,
        from_memory="this file system keeps what was written in memory" if cached else "",
    )


def _already(original: CopySource, draft: CopyDraft, options: CopyOptions) -> Copied | None:
    """The same checkpoint at the destination, proved now if that was not noted. None: nothing is in the way.

    Raises: ExistsError.
    """
    facts = original.facts
    begun = time.monotonic()
    problem = draft.difference()
    if problem is None:
        return None
    if not problem and facts.manifest is None:
        problem = _difference_in_bytes(original, draft, options)
    elif not problem and not draft.is_verified():
        draft.uncache(final=True)
        wrong = _wrong(draft, list(facts.sizes), _manifest_of(facts, {}), options, final=True)
        problem = "is damaged there: " + "; ".join(wrong) if wrong else ""
        if not wrong:
            draft.note_verified_copy()
    if problem:
        if options.overwrite and not draft.may_replace():
            raise ExistsError(f"{draft.where} {problem}, and is no checkpoint: move it away, or copy to another root")
        if options.overwrite or draft.target_is_abandoned():
            return None
        raise ExistsError(f"{draft.where} {problem}: copy to another root, or say --overwrite to replace it")
    remarks = (*facts.remarks, *draft.settle())
    return replace(_report(facts, draft.where, already=True), verify_seconds=time.monotonic() - begun, remarks=remarks)


def _report(facts: SourceInfo, path: str, *, already: bool) -> Copied:
    step = facts.manifest.step if facts.manifest else None
    return Copied(facts.where, path, step, len(facts.sizes), facts.bytes, already, remarks=facts.remarks)


def _look(draft: CopyDraft, options: CopyOptions) -> dict[str, bytes]:
    """Digest what an attempt before left of files."""
    there: dict[str, bytes] = {}

    def finish(found: Scanned) -> None:
        if found.refused is None and not found.unreadable:
            there[found.name] = bytes(found.blocks)

    if sizes := draft.tidy():
        _scan(draft, sizes, "looking", finish, options)
    return there


def _wrong(
    draft: CopyDraft, names: Iterable[str], proof: Manifest, options: CopyOptions, final: bool = False
) -> tuple[str, ...]:
    """Read files, of the draft or of what has its name, and say what of them is not what was saved."""
    flaws = _Flaws(Path(draft.where if final else draft.draft), proof)
    sizes = {name: proof.files[name].bytes for name in names}
    changed = _scan(draft, sizes, "verifying", flaws.judge, options, final=final)
    return (*flaws.in_words(), *changed)


class _Flaws:
    """What of some files is not what was saved, and what of them cannot be read."""

    def __init__(self, folder: Path, proof: Manifest) -> None:
        self._folder, self._proof = folder, proof
        self.damage: list[Damage] = []
        self._unread: list[str] = []

    def judge(self, found: Scanned) -> None:
        if found.refused is not None:
            self._unread.append(f"{found.name} cannot be read: {found.refused.strerror or found.refused}")
        elif found.unreadable or digest_of_blocks([bytes(found.blocks)]) != self._proof.files[found.name].digest:
            self.damage += of_bytes(found, self._folder, self._proof)

    def in_words(self) -> list[str]:
        in_order = sorted(self.damage, key=lambda each: each.file)
        return [*map(str, located(in_order, self._folder, self._proof) if in_order else ()), *sorted(self._unread)]


def _scan(
    draft: CopyDraft,
    sizes: Mapping[str, int],
    phase: Phase,
    finish: Finish,
    options: CopyOptions,
    *,
    final: bool = False,
) -> Iterable[str]:
    options.meter.begin(phase, sum(sizes.values()), 0)
    return draft.scan(sizes, final=final, finish=finish, threads=options.threads, done=options.passed)


def _check_original(original: CopySource, options: CopyOptions) -> None:
    """Another checkpoint goes before what takes its place is there, so that has to be whole before it goes.

    Raises: CorruptError, SourceError.
    """
    facts, folder = original.facts, Path(original.facts.where)
    flaws = _Flaws(folder, _manifest_of(facts, {}))
    options.meter.begin("verifying", facts.bytes, 0)
    with blaming_source(facts.where):
        for name in facts.sizes:
            try:
                original.open(name).close()  # which looks at its size
            except FileNotFoundError as error:
                if not os.path.lexists(folder):
                    raise
                raise CorruptError(f"{folder / name} is missing, so it replaces nothing: copy another one") from error
        original.scan(finish=flaws.judge, threads=options.threads, done=options.passed)
    if (lost := original.lost()) is not None:
        raise lost
    if not (words := flaws.in_words()):
        return
    why = f"{facts.where} is not what was saved ({'; '.join(words[:3])})"
    text = f"{why}, so it replaces nothing: copy another checkpoint"
    raise CorruptError(text) if flaws.damage else SourceError(errno.EIO, text)


def _difference_in_bytes(original: CopySource, draft: CopyDraft, options: CopyOptions) -> str:
    """Why files of these sizes are no copy of what has no digests; "" where they are."""
    draft.uncache(final=True)
    here, there = list[Scanned](), list[Scanned]()
    threads, done = options.threads, options.passed
    original.scan(finish=here.append, threads=threads, done=done)
    draft.scan(original.facts.sizes, final=True, finish=there.append, threads=threads, done=done)
    same = {each.name: each.blocks for each in here} == {each.name: each.blocks for each in there}
    all_read = not any(each.unreadable or each.refused for each in (*here, *there))
    return "" if same and all_read else "is there, with other bytes in its files"


def _manifest_of(facts: SourceInfo, digests: dict[str, str]) -> Manifest:
    """The manifest; of files of others one as it would be, to hold what is read back against what was read."""
    return facts.manifest or Manifest(
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
