"""What a root holds: looked up on disk each time, never read from a pointer or a date.

The order of checkpoints is in their manifests. Whether all files of one are there is only looked up for those that
somebody wants: on a parallel file system each look is a message to a server, and a root may hold thousands.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path

from ckptman.errors import CkptmanError, CorruptError, FormatVersionError, NotFoundError, RootError
from ckptman.policies.retention_rules import Record
from ckptman.storage.catalog.pins import PINNED, read_pin
from ckptman.storage.catalog.reader_lease import refuse_gone
from ckptman.storage.catalog.rollback_records import read_abandoned
from ckptman.storage.catalog.verified import VERIFIED, read_verified
from ckptman.storage.format.manifest import Manifest, compare_names, facts_of, read_facts, read_manifest
from ckptman.storage.format.paths import MANIFEST, StepName, like_step, parse_step

_LONG_AGO = "by an earlier rollback"
_LOOKS = 10
"""A commit renames folders while others look: after so many looks what was gone each time is taken to be gone."""
_SETTLED_SECONDS = 2.0
"""A folder that was written to less than that before it was looked at is looked at again the next time: by the clock of
its file system, what is written now may have the same time."""
_COUNTING = ("step", "old", "abandoned")
"""Kinds of folders that may hold a checkpoint that counts."""
_INODE = 2
_Stamp = tuple[int, ...]
"""Device, inode, size and times of a folder."""
Names = Mapping[str, int]
"""The names in a root, each with its inode: 0 if the file system does not report one, -1 for a symbolic link."""
_LINK, _UNTOLD = -1, (0, 2**32 - 1, 2**64 - 1)
Until = Callable[["Entry"], bool]
"""Whether a checkpoint will do, so that older ones need not be looked into."""


@dataclass(frozen=True)
class Entry:
    """A folder that has a checkpoint's name. Complete if `problem` is None; otherwise it does not count.

    `newer_format`: it does not count here, but a newer ckptman wrote it, so nobody may conclude that it is damaged.
    `unreadable`: nobody can say what it is, because it could not be looked at.
    `abandoned`: which rollback left it behind; then it is whole, and no restore takes it that is not asked for it.
    """

    step: int
    path: Path
    manifest: Manifest | None
    problem: str | None = None
    newer_format: FormatVersionError | None = None
    unreadable: RootError | None = None
    abandoned: str = ""
    beside: frozenset[str] = frozenset({VERIFIED, PINNED})
    """Names in the folder that are not the manifest's, where somebody has looked: what is not there is not opened."""

    @property
    def where(self) -> str:
        """Its path or address, as messages name it."""
        return str(self.path)

    @property
    def in_folder(self) -> bool:
        """Whether its files can be read at `path` now; if not, they have to be copied there first."""
        return True

    @property
    def complete(self) -> bool:
        return self.problem is None

    @property
    def was_committed(self) -> bool:
        """Whether it was a checkpoint once, and is missed where it does not count. A save that never ended is not."""
        return not self.path.is_symlink() and (self.unreadable is not None or (self.path / MANIFEST).is_file())

    @property
    def may_go(self) -> bool:
        """Whether another checkpoint of its step may take its place in a tier. A pinned folder is set aside."""
        return self.newer_format is None

    @cached_property
    def facts(self) -> Record | None:
        """What its manifest says that rules look at; None if there is no manifest to tell."""
        return facts_of(self.manifest) if self.manifest is not None else None

    @property
    def attempt(self) -> int:
        """The attempt that saved it; 0 if there is no manifest to tell."""
        return self.facts.attempt if self.facts is not None else 0

    @property
    def sequence(self) -> int:
        """Commit sequence; 0 if there is no manifest to tell."""
        return self.facts.sequence if self.facts is not None else 0

    @property
    def time_seconds(self) -> float:
        """When it was saved, in unix seconds; 0 if there is no manifest to tell."""
        return self.facts.time_seconds if self.facts is not None else 0.0

    @property
    def identity(self) -> str:
        """See `Manifest.identity`. Only for complete entries."""
        return self.require_manifest().identity

    def is_in(self, folder: Path) -> bool:
        """Whether a folder holds this very checkpoint. Raises: as `read_manifest`."""
        # As bytes: a metric that is NaN is not equal to itself.
        return read_manifest(folder).to_json() == self.require_manifest().to_json()

    @property
    def pinned(self) -> str:
        """Why it is pinned, as its folder says now; "" where it is not, or had no pin when it was looked at."""
        note = read_pin(self.path) if PINNED in self.beside else None
        return note.why if note is not None else ""

    @property
    def nonfinite(self) -> str:
        """What in it is NaN or infinite; "" where nothing is, or nobody looked."""
        return self.facts.nonfinite if self.facts is not None else ""

    @property
    def nonfinite_reason(self) -> str:
        """What of that a restore goes back for (see `Record.nonfinite_reason`)."""
        return self.facts.nonfinite_reason if self.facts is not None else ""

    def record(self) -> Record:
        """The facts that retention rules look at. Only for complete entries."""
        manifest = self.require_manifest()
        note = read_verified(self.path, manifest) if VERIFIED in self.beside else None
        return replace(
            facts_of(manifest),
            verified=note is not None and note.every_byte,
            damaged=note.damaged if note is not None else "",
            pinned=self.pinned,
            abandoned=f"abandoned {self.abandoned}" if self.abandoned else "",
        )

    def require_manifest(self) -> Manifest:
        """The manifest. Raises: FormatVersionError, RootError, CorruptError if this is no complete checkpoint."""
        if self.newer_format is not None:
            raise self.newer_format
        if self.unreadable is not None:
            raise self.unreadable
        if self.manifest is None or self.problem is not None:
            raise CorruptError(
                f"{self.where} is not a complete checkpoint: {self.problem}. "
                f"ckptman list shows the complete ones; no command touches this one, so move it away by hand"
            )
        return self.manifest


@dataclass(frozen=True)
class Listed(Entry):
    """An entry by what its manifest says of it. Nobody has looked into its folder, or not since it was remembered.

    The manifest is not kept, as it grows with the ranks: whoever asks for it has it read.
    """

    facts: Record = field(kw_only=True)
    """What its manifest says."""
    inode: int = field(kw_only=True, repr=False)
    """As the listing of the root tells it, which need not be that of `lstat`."""
    noted: Record | None = field(default=None, kw_only=True)
    """With the notes beside the manifest, where somebody has looked into the folder."""
    stamp: _Stamp | None = field(default=None, kw_only=True, repr=False)
    """Of the folder when somebody looked into it; None: nobody did, or it may have changed in that moment."""

    @cached_property
    def identity(self) -> str:
        try:
            return self.require_manifest().identity
        except (FileNotFoundError, NotADirectoryError, CorruptError):  # gone since, or damaged: no rollback names it
            return ""
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def is_in(self, folder: Path) -> bool:
        # Renamed, it is the same folder; nobody else has its inode while it is there.
        if self.stamp is not None and _stamp_of(os.lstat(folder))[:_INODE] != self.stamp[:_INODE]:
            return False
        found, facts = read_manifest(folder), self.facts
        return (found.step, found.sequence, found.time_seconds) == (facts.step, facts.sequence, facts.time_seconds)

    def record(self) -> Record:
        record = self.noted or self.facts
        return replace(record, abandoned=f"abandoned {self.abandoned}") if self.abandoned else record

    def require_manifest(self) -> Manifest:
        return read_manifest(self.path)


class Catalog:
    """The checkpoints under one root.

    Only the leader of a run looks; the others are told what it saw, because ranks can see different files on NFS.

    Args:
        root: The checkpoint root.
        remember: Keep what was read of a folder for as long as its name has the same inode. Before something is
            deleted because of it, it has to be confirmed (`confirm`). Thread-safe: a run may restore while a save of
            it is in the background.
    """

    def __init__(self, root: str | os.PathLike[str], *, remember: bool = False) -> None:
        self.root = Path(root)
        self._remembers = remember
        self._known: dict[str, Listed] = {}
        self._flawed: set[str] = set()
        """Names of what has a manifest and is not complete."""

    def scan(
        self,
        *,
        abandoned: bool = False,
        names: Names | None = None,
        step: int | None = None,
        until: Until | None = None,
    ) -> list[Entry]:
        """All entries, in order of commit; those with no readable manifest first, by step.

        Args:
            abandoned: Also those that a rollback left behind. Of one step there can then be several.
            names: Of the root, where they have been listed just now.
            step: Only those of this step.
            until: Look into the folders from the newest back, until this is true of a complete one. Older ones are
                `Listed`: what looks complete may still lack a file.

        Raises: NotFoundError (no such root), RootError (not a folder, or it or a checkpoint cannot be read: that is
        never "none yet"), CorruptError (what was abandoned cannot be told).
        """
        entries = self.look(abandoned=abandoned, names=names, step=step, until=until)
        for entry in entries:
            if entry.unreadable is not None:
                raise entry.unreadable
        return entries

    def look(
        self,
        *,
        abandoned: bool = False,
        names: Names | None = None,
        step: int | None = None,
        until: Until | None = None,
    ) -> list[Entry]:
        """The same, including entries that cannot be read. For reports, not for decisions.

        Raises: NotFoundError, RootError and CorruptError of the root itself.
        """
        for _ in range(_LOOKS):
            listed = self.names() if names is None else names
            ours = [(name, parsed) for name, parsed in _ours(listed) if step in (None, parsed.step)]
            entries, settled = self._look_at(ours, listed, brief=until is not None)
            left = read_abandoned(self.root)
            marked = [mark(entry, left) for entry in entries.values()]
            found = sorted((entry for entry in marked if abandoned or not entry.abandoned), key=commit_order)
            if until is not None and settled:
                settled = self._look_into(found, until, left)
            if settled:
                break
            names = None
        for gone in set(self._known).difference(listed):  # a copy: another thread may add to it
            self.forget(gone)
        return found

    def complete(self, until: Until | None = None) -> list[Entry]:
        """The complete entries, oldest commit first. `until`: as for `scan`."""
        return [entry for entry in self.scan(until=until) if entry.complete]

    def entry(self, step: int) -> Entry:
        """The entry of a step, complete or not; one that was abandoned, where there is no other.

        Raises: NotFoundError, which names the steps there are.
        """
        found = self.look(abandoned=True, step=step)
        if not found:
            raise NotFoundError(f"{self.root} has no checkpoint of step {step}; the latest there are: {self.steps()}")
        return max(found, key=lambda entry: (not entry.abandoned, commit_order(entry)))

    def steps(self) -> str:
        """The steps that were committed last, for a message. Raises: as `look`."""
        found = dict.fromkeys(entry.step for entry in self.look(abandoned=True, until=any_will_do))
        return ", ".join(map(str, list(found)[-10:])) or "none"

    def last_sequence(self) -> int:
        """Return the highest commit sequence in the root, of abandoned checkpoints too; 0 if there is none.

        For directories that are remembered it trusts the memory, so a commit waits for one listing of the root and not
        for a look into each checkpoint.

        Raises: NotFoundError, RootError.
        """
        for _ in range(_LOOKS):
            highest, settled = self._highest()
            if settled:
                break
        return highest

    def _highest(self) -> tuple[int, bool]:
        """The same by one look, and whether everything stayed where it was meanwhile."""
        names = self.names()
        highest, settled = 0, True
        for name, parsed in _ours(names):
            if parsed.kind not in _COUNTING:
                continue
            entry = self._list(name, parsed.step, names[name])
            if entry is not None and entry.unreadable is not None:
                raise entry.unreadable
            settled = settled and entry is not None
            highest = max(highest, entry.sequence if entry is not None else 0)
        return highest, settled

    def confirm(self, entries: Iterable[Entry], *, wholly: Container[Path] = ()) -> bool:
        """Check that entries that are only `Listed` are still complete and have the same notes. Call it before
        something is deleted; if it returns False, list again.

        A directory with the same inode, size and times as at the last look is not looked into again, unless it is in
        `wholly`: a file that was cut short in place changes none of them. Raises: RootError.
        """
        is_so = True
        for entry in entries:
            if not isinstance(entry, Listed):
                continue
            if entry.stamp is not None and entry.path not in wholly and _stamp(entry.path) == entry.stamp:
                continue
            name = entry.path.name
            found = self._read(name, entry.step, entry.inode)
            if found is None:
                self._flawed.add(name)
                is_so = False
            elif not found.complete or found.sequence != entry.sequence or _notes(found) != _notes(entry):
                is_so = False
        return is_so

    def forget(self, name: str) -> None:
        """Forget a name, so that it is read again: another checkpoint has it now."""
        self._known.pop(name, None)
        self._flawed.discard(name)

    def leftovers(self, names: Names | None = None) -> list[tuple[Path, StepName]]:
        """Folders that a crash or an unfinished deletion left: `tmp`, `trash`, and `old` that stands in for nothing.

        `names`: as for `scan`.
        """
        names = self.names() if names is None else names
        ours = _ours(names)
        olds = {parsed.step for _, parsed in ours if parsed.kind == "old"}
        entries, _ = self._look_at([(name, parsed) for name, parsed in ours if parsed.step in olds], names)
        counting = {entry.path.name for entry in entries.values()}
        unsure = {step for (step, _), entry in entries.items() if entry.unreadable is not None}
        return [
            (self.root / name, parsed)
            for name, parsed in ours
            if parsed.kind not in ("step", "abandoned")
            and name not in counting
            and not (parsed.kind == "old" and parsed.step in unsure)
        ]

    def unrecognized_entries(self, names: Names | None = None) -> list[Entry]:
        """What has a name that looks like one of ours and is none: somebody made it, such as a `.old-best`.

        `names`: as for `scan`.
        """
        names = self.names() if names is None else names
        found = [(name, step) for name in names if (step := like_step(name)) is not None]
        return [Entry(step, self.root / name, None, "its name is none that ckptman gives") for name, step in found]

    def names(self) -> dict[str, int]:
        """All names under the root, ours or not, in order. Raises: NotFoundError, RootError."""
        with self._listing(), os.scandir(self.root) as items:
            return dict(sorted((item.name, _LINK if item.is_symlink() else _told(item.inode())) for item in items))

    @contextlib.contextmanager
    def _listing(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotFoundError(
                f"there is no checkpoint root {self.root}: name another one, or check the mount"
            ) from error
        except NotADirectoryError as error:
            raise RootError(
                errno.ENOTDIR, f"the checkpoint root {self.root} is a file, not a folder: name another root"
            ) from error
        except OSError as error:
            raise RootError(
                error.errno or errno.EIO,
                f"the checkpoint root {self.root} cannot be read ({error.strerror}): "
                f"nothing is started over what may be there; check the mount and its permissions",
            ) from error

    def _look_at(
        self, names: list[tuple[str, StepName]], inodes: Names, *, brief: bool = False
    ) -> tuple[dict[tuple[int, str], Entry], bool]:
        """The entry of each step, with those that stood aside for it for good, by their tags; and whether everything
        stayed where it was while we looked. `brief`: read the manifests only."""
        found: dict[tuple[int, str], list[tuple[tuple[bool, bool, int], Entry]]] = {}
        settled = True
        # Which of two counts depends on whether their files are there.
        twice = {parsed.step for _, parsed in names if parsed.kind == "old"}
        for name, parsed in names:
            if parsed.kind not in _COUNTING:
                continue
            look = self._list if brief and parsed.step not in twice else self._read
            entry = look(name, parsed.step, inodes[name])
            if entry is None:
                settled = False
                continue
            # A crash between the two renames of a commit leaves the previous save of this step as "old" only. It also
            # stands in for one that was damaged since: nothing good is passed over for something bad.
            counts = entry.complete or entry.newer_format is not None or entry.unreadable is not None
            merit = (counts, parsed.kind == "step", entry.sequence)
            aside = parsed.tag if parsed.kind == "abandoned" else ""
            if aside:
                entry = replace(entry, abandoned=_LONG_AGO)
            found.setdefault((parsed.step, aside), []).append((merit, entry))
        return {key: max(each, key=itemgetter(0))[1] for key, each in found.items()}, settled

    def _look_into(self, entries: list[Entry], until: Until, left: Mapping[str, str]) -> bool:
        """Look into entries from the last one back, until one will do. False: not everything stayed what it was."""
        for place, entry in reversed(list(enumerate(entries))):
            if isinstance(entry, Listed):
                found = self._read(entry.path.name, entry.step, entry.inode)
                if found is None or found.sequence != entry.sequence:
                    return False
                entries[place] = replace(found, abandoned=entry.abandoned) if entry.abandoned else mark(found, left)
                if entries[place].abandoned != entry.abandoned:
                    return False
            if entries[place].complete and until(entries[place]):
                break
        return True

    def _list(self, name: str, step: int, inode: int) -> Entry | None:
        """Return the entry of a name from its manifest alone, or as `_read` does if the manifest is not good."""
        path = self.root / name
        known = self._known.get(name)
        if known is not None and inode == known.inode and (inode or (known.stamp and known.stamp == _stamp(path))):
            return known
        self._known.pop(name, None)
        if inode != _LINK and name not in self._flawed:
            with contextlib.suppress(CkptmanError, OSError):
                told = read_facts(path)
                if told is not None and told.step == step:
                    listed = Listed(step, path, None, facts=told, inode=inode)
                    if self._remembers:
                        self._known[name] = listed
                    return listed
        return self._read(name, step, inode)

    def _read(self, name: str, step: int, inode: int) -> Entry | None:
        """What lies under a name; None: it did not stay there while it was looked at. `inode`: as it was listed."""
        path = self.root / name
        before = _lstat(path)
        entry = look_at(path, step, before)
        after = _lstat(path)
        self.forget(name)
        # Two saves later a folder may have the inode of one that was deleted: what is incomplete may not have changed.
        if (
            before is None
            or after is None
            or not os.path.samestat(before, after)
            or not (entry.complete or before.st_ctime_ns == after.st_ctime_ns)
        ):
            return None
        if not entry.complete:
            self._flawed.add(name)
        elif self._remembers:
            is_settled = 0 <= before.st_mtime + _SETTLED_SECONDS <= time.time() and _stamp_of(before) == _stamp_of(
                after
            )
            self._known[name] = Listed(
                step,
                path,
                None,
                beside=entry.beside,
                facts=facts_of(entry.require_manifest()),
                inode=inode,
                noted=entry.record(),
                stamp=_stamp_of(before) if is_settled else None,
            )
        return entry


def mark(entry: Entry, left: Mapping[str, str]) -> Entry:
    """An entry, with the rollback that left it behind, of those that `read_abandoned` gave."""
    why = left.get(entry.identity) if left and entry.complete else None
    return replace(entry, abandoned=why) if why else entry


def _ours(names: Iterable[str]) -> list[tuple[str, StepName]]:
    return [(name, parsed) for name in names if (parsed := parse_step(name))]


def _stamp(folder: str | Path) -> _Stamp | None:
    """What tells whether a folder is as it was; None where that cannot be told."""
    try:
        return _stamp_of(os.lstat(folder))
    except OSError:
        return None


def _stamp_of(found: os.stat_result) -> _Stamp:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def look_at_folder(path: Path) -> Entry:
    """Judge one folder as the catalog of its root does. Raises: GoneError."""
    named = parse_step(path.resolve().name)
    entry = look_at(path, named.step if named else None)
    refuse_gone(path)
    if entry.manifest is not None and named is not None and named.kind in ("tmp", "trash"):
        entry = replace(entry, problem="it was never committed" if named.kind == "tmp" else "it was deleted")
    return mark(entry, read_abandoned(path.resolve().parent))


def look_at(path: Path, step: int | None, before: os.stat_result | None = None) -> Entry:
    """Judge one folder by itself. `step`: that of its name; None where its name tells none.

    `before`: what `lstat` says of it, where a link is none of ours.
    """
    named = step or 0
    try:
        if before is not None and stat.S_ISLNK(before.st_mode):
            return Entry(named, path, None, "it is a link, not a folder", beside=frozenset())
        manifest = read_manifest(path)
        if step is not None and manifest.step != step:
            return Entry(step, path, manifest, f"its manifest is of step {manifest.step}")
        problem, beside = compare_names(path, manifest)
        return Entry(manifest.step, path, manifest, problem, beside=beside)
    except FileNotFoundError:
        return Entry(named, path, None, "it has no manifest.json")
    except NotADirectoryError:
        return Entry(named, path, None, "it is a file, not a folder")
    except FormatVersionError as error:
        return Entry(named, path, None, f"format version {error.found} is newer than this ckptman", error)
    except CorruptError as error:
        return Entry(named, path, None, str(error))
    except OSError as error:
        return Entry(named, path, None, f"it cannot be read ({error.strerror})", unreadable=_unreadable(path, error))


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> RootError:
    remedy = "check its permissions" if isinstance(error, PermissionError) else "check the mount"
    return RootError(error.errno or errno.EIO, f"{path} cannot be read ({error.strerror}): {remedy}")


def _told(inode: int) -> int:
    return 0 if inode in _UNTOLD else inode


def any_will_do(entry: Entry) -> bool:
    """For `Catalog.scan`: the newest complete one is all that is wanted."""
    return True


def _notes(entry: Entry) -> tuple[bool, str, str]:
    """What is noted beside a manifest."""
    record = entry.record()
    return record.verified, record.damaged, record.pinned


def attempt_and_step(entries: Iterable[Entry]) -> tuple[int, int]:
    """Return the highest attempt and step among the complete entries, or (0, -1). A checkpoint in memory with a higher
    pair is newer."""
    return max(((entry.attempt, entry.step) for entry in entries if entry.complete), default=(0, -1))


def commit_order(entry: Entry) -> tuple[int, float, int]:
    """What entries are sorted by."""
    # Time and step decide only between folders that were copied from several roots and share a sequence.
    return entry.sequence, entry.time_seconds, entry.step
