"""What a root holds: looked up on disk each time, never remembered, never read from a pointer or a date."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

from ckptman.errors import CorruptError, FormatVersionError, NotFoundError, RootError
from ckptman.policy.rules import Record
from ckptman.store.abandoned import read_abandoned
from ckptman.store.manifest import Manifest, compare_names, read_manifest
from ckptman.store.names import StepName, like_step, parse_step
from ckptman.store.pins import PINNED, read_pin
from ckptman.store.verified import VERIFIED, read_verified

_LONG_AGO = "by an earlier rollback"
_LOOKS = 10
"""A commit renames folders while others look: after so many looks what was gone each time is taken to be gone."""


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
    def complete(self) -> bool:
        return self.problem is None

    @property
    def sequence(self) -> int:
        """Commit sequence; 0 if there is no manifest to tell."""
        return self.manifest.sequence if self.manifest else 0

    @property
    def identity(self) -> str:
        """See `Manifest.identity`. Only for complete entries."""
        return self.require_manifest().identity

    @property
    def pinned(self) -> str:
        """Why it is pinned, as its folder says now; "" where it is not, or had no pin when it was looked at."""
        note = read_pin(self.path) if PINNED in self.beside else None
        return note.why if note is not None else ""

    def record(self) -> Record:
        """The facts that retention rules look at. Only for complete entries."""
        manifest = self.require_manifest()
        note = read_verified(self.path, manifest) if VERIFIED in self.beside else None
        return Record(
            self.step,
            manifest.sequence,
            manifest.time_seconds,
            manifest.total_bytes,
            manifest.metrics,
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
                f"{self.path} is not a complete checkpoint: {self.problem}. "
                f"ckptman list shows the complete ones; no command touches this one, so move it away by hand"
            )
        return self.manifest


class Catalogue:
    """The checkpoints under one root.

    Only the leader of a run looks; the others are told what it saw, because ranks can see different files on NFS.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def scan(self, *, abandoned: bool = False) -> list[Entry]:
        """All entries, in order of commit; those with no readable manifest first, by step.

        `abandoned`: also those that a rollback left behind. Of one step there can then be several.

        Raises: NotFoundError (no such root), RootError (not a folder, or it or a checkpoint cannot be read: that is
        never "none yet"), CorruptError (what was abandoned cannot be told).
        """
        entries = self.look(abandoned=abandoned)
        for entry in entries:
            if entry.unreadable is not None:
                raise entry.unreadable
        return entries

    def look(self, *, abandoned: bool = False) -> list[Entry]:
        """The same, with those that cannot be read: for who says what is there, not for who acts on it.

        Raises: NotFoundError, RootError and CorruptError of the root itself.
        """
        for _ in range(_LOOKS):
            entries, settled = self._look_at(self._names())
            if settled:
                break
        left = read_abandoned(self.root)
        found = [mark(entry, left) for entry in entries.values()]
        return sorted((entry for entry in found if abandoned or not entry.abandoned), key=commit_order)

    def complete(self) -> list[Entry]:
        """The complete entries, oldest commit first."""
        return [entry for entry in self.scan() if entry.complete]

    def entry(self, step: int) -> Entry:
        """The entry of a step, complete or not; one that was abandoned, where there is no other.

        Raises: NotFoundError, which names the steps there are.
        """
        found = sorted(self.look(abandoned=True), key=lambda entry: not entry.abandoned)
        entries = {entry.step: entry for entry in found}
        if step not in entries:
            known = ", ".join(str(each) for each in list(entries)[-10:]) or "none"
            raise NotFoundError(f"{self.root} has no checkpoint of step {step}; the latest there are: {known}")
        return entries[step]

    def leftovers(self) -> list[tuple[Path, StepName]]:
        """Folders that a crash or an unfinished deletion left: `tmp`, `trash`, and `old` that stands in for nothing."""
        names = self._names()
        olds = {parsed.step for _, parsed in names if parsed.kind == "old"}
        entries, _ = self._look_at([(name, parsed) for name, parsed in names if parsed.step in olds])
        counting = {entry.path.name for entry in entries.values()}
        unsure = {step for (step, _), entry in entries.items() if entry.unreadable is not None}
        return [
            (self.root / name, parsed)
            for name, parsed in names
            if parsed.kind not in ("step", "abandoned")
            and name not in counting
            and not (parsed.kind == "old" and parsed.step in unsure)
        ]

    def strangers(self) -> list[Entry]:
        """What has a name that looks like one of ours and is none: somebody made it, such as a `.old-best`."""
        found = [(name, step) for name in self.names() if (step := like_step(name)) is not None]
        return [Entry(step, self.root / name, None, "its name is none that ckptman gives") for name, step in found]

    def names(self) -> list[str]:
        """All names under the root, ours or not. Raises: NotFoundError, RootError."""
        try:
            return sorted(os.listdir(self.root))  # noqa: PTH208 names alone are wanted
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

    def _names(self) -> list[tuple[str, StepName]]:
        return [(name, parsed) for name in self.names() if (parsed := parse_step(name))]

    def _look_at(self, names: list[tuple[str, StepName]]) -> tuple[dict[tuple[int, str], Entry], bool]:
        """The entry of each step, with those that stood aside for it for good, by their tags; and whether everything
        stayed where it was while we looked."""
        found: dict[tuple[int, str], list[tuple[tuple[bool, bool, int], Entry]]] = {}
        settled = True
        for name, parsed in names:
            if parsed.kind not in ("step", "old", "abandoned"):
                continue
            path = self.root / name
            before = _lstat(path)
            entry = _look(path, parsed.step, before)
            after = _lstat(path)
            if before is None or after is None or not _stayed(before, after, entry.complete):
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


def mark(entry: Entry, left: Mapping[str, str]) -> Entry:
    """An entry, with the rollback that left it behind, of those that `read_abandoned` gave."""
    why = left.get(entry.identity) if left and entry.complete else None
    return replace(entry, abandoned=why) if why else entry


def _stayed(before: os.stat_result, after: os.stat_result, complete: bool) -> bool:
    # Two saves later a folder may have the inode of one that was deleted: what is incomplete may not have changed.
    return os.path.samestat(before, after) and (complete or before.st_ctime_ns == after.st_ctime_ns)


def _look(path: Path, step: int, before: os.stat_result | None) -> Entry:
    try:
        if before is not None and stat.S_ISLNK(before.st_mode):
            return Entry(step, path, None, "it is a link, not a folder", beside=frozenset())
        manifest = read_manifest(path)
        if manifest.step != step:
            return Entry(step, path, manifest, f"its manifest is of step {manifest.step}")
        problem, beside = compare_names(path, manifest)
        return Entry(step, path, manifest, problem, beside=beside)
    except FileNotFoundError:
        return Entry(step, path, None, "it has no manifest.json")
    except NotADirectoryError:
        return Entry(step, path, None, "it is a file, not a folder")
    except FormatVersionError as error:
        return Entry(step, path, None, f"format version {error.found} is newer than this ckptman", error)
    except CorruptError as error:
        return Entry(step, path, None, str(error))
    except OSError as error:
        return Entry(step, path, None, f"it cannot be read ({error.strerror})", unreadable=_unreadable(path, error))


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


def commit_order(entry: Entry) -> tuple[int, float, int]:
    """What entries are sorted by."""
    # Time and step decide only between folders that were copied from several roots and share a sequence.
    return entry.sequence, entry.manifest.time_seconds if entry.manifest else 0.0, entry.step
