"""Copying checkpoints from backend to backend: one function for the command, and for whoever drains a root.

A copy counts only after every byte of it was read back and found to be what was saved. It keeps step and sequence, so
what is newest stays newest.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptman.errors import CkptmanError, ConfigError, CorruptError, ExistsError, plain
from ckptman.storage.catalog.backends.backend import Backend
from ckptman.storage.catalog.backends.copy_draft import CopyDraft, NotReadBackError
from ckptman.storage.catalog.backends.copy_source import (
    CopySource,
    Reading,
    SourceInfo,
    blaming_source,
)
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.catalog import Entry
from ckptman.storage.format.paths import MANIFEST, digests_name, parse_step
from ckptman.storage.io.checksums import DIGEST_BYTES, digest_of_blocks
from ckptman.storage.io.file_scan import default_threads
from ckptman.storage.io.file_writer import InPlace, Sink, write_all
from ckptman.storage.io.threads import STRIDE_BYTES, io_threads, share_out
from ckptman.storage.transfer.progress import Limit, Meter, Phase

REMOTE_THREADS = 8
"""As many wait for a network at a time, where nobody says otherwise."""


@dataclass(frozen=True)
class CopyOptions:
    """How a copy is made. `threads` None: as many as a save and a verify have, or 8 where a network is waited for.

    `limit`: to what is copied, and to what is read back after it. `overwrite`: another checkpoint of its name goes.
    """

    threads: int | None = None
    limit: Limit | None = None
    meter: Meter = field(default_factory=Meter)
    overwrite: bool = False


@dataclass(frozen=True)
class Copied:
    """What became of one checkpoint. Bytes without the manifest; times in seconds.

    `already`: it was there, and is what it is here. `written_bytes`: other files were there from an attempt before.
    `from_memory`: why what was read back may not have come from storage; "" where it did. `remarks`: what did not
    travel, or could not be noted.
    """

    source: str
    path: str
    step: int
    files: int
    bytes: int
    already: bool
    written_bytes: int = 0
    copy_seconds: float = 0.0
    verify_seconds: float = 0.0
    from_memory: str = ""
    remarks: tuple[str, ...] = ()


def copy_checkpoint(
    entry: Entry, place: Backend, options: CopyOptions | None = None, *, source: Backend | None = None
) -> Copied:
    """Copy one complete checkpoint to another place, verified there, and then visible as a whole.

    One that is there already is not copied again. Interrupted anywhere, it can be called again, and copies the files
    that are not there yet. Both sides are leased meanwhile, so no prune takes anything away. Called by `ckptman copy`,
    and by a drain, which may remove the source once this returns.

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
        there = draft.tidy()
        cached = draft.uncache(there, final=False, flush=True)
        wrong = _check(original, draft, there, "looking", options, final=False)
        looked = time.monotonic()
        missing = {name: size for name, size in facts.sizes.items() if name not in there or name in wrong}
        _put(original, draft, missing, options)
        copied = time.monotonic()
        # What lies in memory would be compared with itself.
        cached = draft.uncache(missing, final=False, flush=False) or cached
        wrong = _check(original, draft, missing, "verifying", options, final=False)
        if wrong:
            raise NotReadBackError(draft.draft, tuple(wrong.values()))
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
        written_bytes=sum(missing.values()),
        copy_seconds=copied - looked,
        verify_seconds=verified - copied + looked - begun,  # each file was read in one of the two
        from_memory="this file system keeps what was written in memory" if cached else "",
    )


def _put(original: CopySource, draft: CopyDraft, sizes: Mapping[str, int], options: CopyOptions) -> None:
    """Copy files, each from its beginning. Raises: CorruptError (the original is damaged), SourceError, OSError."""
    run = _Pass(original, "copying", sizes, options)

    def put(name: str, threads: int) -> None:
        with closing(_Incoming(original, name, run)) as file:
            draft.put(file, threads)

    is_remote = original.is_remote or draft.is_remote
    run.each(put, options.threads or (REMOTE_THREADS if is_remote else io_threads()), apart=draft.is_remote)


def _check(
    original: CopySource, draft: CopyDraft, sizes: Mapping[str, int], phase: Phase, options: CopyOptions, *, final: bool
) -> dict[str, str]:
    """Read files of a draft, or of what has its name, and say what of them is not what was saved, by name.

    Raises: RootError: a store cannot be asked.
    """
    run, wrong = _Pass(original, phase, sizes, options), dict[str, str]()

    def check(name: str, threads: int) -> None:
        try:
            with closing(_File(name, sizes[name], draft.open(name, final=final), run)) as file:
                blocks = file.write_to(InPlace(), threads)
        except CorruptError:
            wrong[name] = f"{plain(name)} is cut short, or no file"
        except CkptmanError:
            raise
        except OSError as error:
            wrong[name] = f"{plain(name)} cannot be read: {error.strerror or error}"
        else:
            if not _is_right(original, name, blocks):
                wrong[name] = f"{plain(name)} is not what was saved{_which_block(original, name, blocks)}"

    run.each(check, options.threads or (REMOTE_THREADS if draft.is_remote else 2 * default_threads()))
    return dict(sorted(wrong.items()))


class _Stopped(BaseException):
    """Another piece or another file has failed. Nobody tries this one again."""


class _Pass:
    """One pass over files: which threads work on which, and what they have in common."""

    def __init__(self, original: CopySource, phase: Phase, sizes: Mapping[str, int], options: CopyOptions) -> None:
        self.block_bytes = original.facts.manifest.block_bytes
        self.options, self._sizes = options, sizes
        self._over = False
        self._at_work: set[_File] = set()
        options.meter.begin(phase, sum(sizes.values()))

    def each(self, work: Callable[[str, int], None], threads: int, *, apart: bool = False) -> None:
        """Call `work(name, threads)` for each file. Large ones are taken two at a time, so that one is written while
        the other is flushed, and several threads work on each. On a small one, or with `apart`, one does."""
        names = sorted(self._sizes, key=lambda name: -self._sizes[name])
        large = 0 if apart else sum(size > STRIDE_BYTES for size in self._sizes.values())
        at_once = max(1, min(large, threads, 2))
        self._share(names[:large], at_once, lambda name: work(name, threads // at_once))
        self._share(names[large:], threads, lambda name: work(name, 1))

    @contextmanager
    def working(self, file: _File) -> Iterator[None]:
        """While this lasts, the file is stopped where another one fails. Raises: _Stopped: one has."""
        self._at_work.add(file)
        try:
            if self._over:
                raise _Stopped
            yield
        finally:
            self._at_work.discard(file)

    def _share(self, names: Sequence[str], at_once: int, work: Callable[[str], None]) -> None:
        def one(number: int, scratch: memoryview) -> None:
            try:
                work(names[number])
            except _Stopped:
                if not self._over:  # else who has failed says why
                    raise

        share_out(len(names), one, threads=at_once, scratch_bytes=0, on_error=self._stop)

    def _stop(self) -> None:
        self._over = True
        for file in list(self._at_work):
            file.stopped.set()


class _File:
    """The bytes of a file as they are read. They are counted once where it has to be begun again."""

    def __init__(self, name: str, size: int, reading: Reading, run: _Pass) -> None:
        self.name, self.size_bytes = name, size
        self.stopped = threading.Event()
        self._reading, self._run = reading, run
        self._lock = threading.Lock()
        self._most = 0

    def view(self, offset: int, scratch: memoryview) -> memoryview:
        options = self._run.options
        if options.limit is not None:
            options.limit.take(len(scratch), self.stopped)
        if self.stopped.is_set():
            raise _Stopped
        data = self._reading.read(offset, scratch)
        with self._lock:
            more = max(0, offset + len(data) - self._most)
            self._most += more
        options.meter.moved(more)
        return data

    def write_to(self, sink: Sink, threads: int) -> bytes:
        """Write all of it to a sink, and return the digests of its blocks. Raises: OSError, CkptmanError."""
        block, piece, stop = self._run.block_bytes, self._reading.piece_bytes, self.stopped.set
        self.stopped.clear()
        with self._run.working(self):
            return write_all(
                sink, self, threads, block_bytes=block, piece_bytes=piece, with_large=False, on_error=stop
            ).blocks

    def close(self) -> None:
        self._reading.close()


class _Incoming(_File):
    """See `Incoming`. What goes wrong here is the original's."""

    def __init__(self, original: CopySource, name: str, run: _Pass) -> None:
        with blaming_source(original.facts.where):
            super().__init__(name, original.facts.sizes[name], original.open(name), run)
        self.is_remote, self._original = original.is_remote, original

    def view(self, offset: int, scratch: memoryview) -> memoryview:
        with blaming_source(self._original.facts.where):
            return super().view(offset, scratch)

    def pass_to(self, sink: Sink, threads: int) -> None:
        blocks = self.write_to(sink, threads)
        if _is_right(self._original, self.name, blocks):
            return
        where, which = self._original.facts.where, _which_block(self._original, self.name, blocks)
        see = "" if self.is_remote else f", or run `ckptman verify {where}` to see all that is damaged"
        raise CorruptError(
            f"{where}: {plain(self.name)} is not what was saved{which}. It was not copied: copy another checkpoint{see}"
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
    if not problem and not draft.is_verified():
        draft.uncache(facts.sizes, final=True, flush=True)  # who brought it there may not have flushed it
        wrong = _check(original, draft, facts.sizes, "verifying", options, final=True)
        problem = "is damaged there: " + "; ".join(wrong.values()) if wrong else ""
        if not problem:
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
    return Copied(facts.where, path, facts.manifest.step, len(facts.sizes), facts.bytes, already, remarks=facts.remarks)


def _is_right(original: CopySource, name: str, blocks: bytes) -> bool:
    return digest_of_blocks([blocks]) == original.facts.manifest.files[name].digest


def _which_block(original: CopySource, name: str, blocks: bytes) -> str:
    """The first block of a file that is not what was saved, in words; "" where its digests are not at hand."""
    beside, facts = digests_name(name), original.facts
    if beside is None or beside not in facts.sizes:
        return ""
    try:
        with closing(original.open(beside)) as file:
            known = bytes(file.read(0, memoryview(bytearray(facts.sizes[beside]))))[: len(blocks)]
    except (CkptmanError, OSError):
        return ""
    if not _is_right(original, name, known):  # damaged, too
        return ""
    each = range(0, len(known), DIGEST_BYTES)
    first = next(at for at in each if known[at : at + DIGEST_BYTES] != blocks[at : at + DIGEST_BYTES]) // DIGEST_BYTES
    return f": block {first:,} (from byte {first * facts.manifest.block_bytes:,} on) has changed"


def _check_original(original: CopySource, options: CopyOptions) -> None:
    """Another checkpoint goes before what takes its place is there, so that has to be whole before it goes.

    Raises: CorruptError, NotFoundError, SourceError.
    """
    sizes = original.facts.sizes
    run = _Pass(original, "verifying", sizes, options)

    def check(name: str, threads: int) -> None:
        with closing(_Incoming(original, name, run)) as file:
            file.pass_to(InPlace(), threads)

    try:
        run.each(check, options.threads or (REMOTE_THREADS if original.is_remote else 2 * default_threads()))
    except (CkptmanError, OSError) as error:
        raise original.lost() or error from None
    if (lost := original.lost()) is not None:
        raise lost
