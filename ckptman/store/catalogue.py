"""What a root holds: looked up on disk each time, never remembered, never read from a pointer or a date."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from ckptman.errors import CorruptError, FormatVersionError, NotFoundError, RootError
from ckptman.policy.retention import Record
from ckptman.store.manifest import Manifest, missing_file, read_manifest
from ckptman.store.names import StepName, parse_step


@dataclass(frozen=True)
class Entry:
    """A folder that has a checkpoint's name. Complete if `problem` is None; otherwise it does not count.

    `newer_format`: it does not count here, but a newer ckptman wrote it, so nobody may conclude that it is damaged.
    """

    step: int
    path: Path
    manifest: Manifest | None
    problem: str | None = None
    newer_format: FormatVersionError | None = None

    @property
    def complete(self) -> bool:
        return self.problem is None

    @property
    def sequence(self) -> int:
        """Commit sequence; 0 if there is no manifest to tell."""
        return self.manifest.sequence if self.manifest else 0

    def record(self) -> Record:
        """The facts that retention rules look at. Only for complete entries."""
        manifest = self.require_manifest()
        return Record(self.step, manifest.sequence, manifest.time_seconds, manifest.total_bytes, manifest.metrics)

    def require_manifest(self) -> Manifest:
        """The manifest. Raises: FormatVersionError, CorruptError if this is no complete checkpoint."""
        if self.newer_format is not None:
            raise self.newer_format
        if self.manifest is None or self.problem is not None:
            raise CorruptError(
                f"{self.path} is not a complete checkpoint: {self.problem}. "
                f"ckptman list shows the complete ones; ckptman prune clears what is left over"
            )
        return self.manifest


class Catalogue:
    """The checkpoints under one root.

    Only the leader of a run looks; the others are told what it saw, because ranks can see different files on NFS.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def scan(self) -> list[Entry]:
        """All entries, in order of commit; those with no readable manifest first, by step.

        Raises: NotFoundError (no such root), RootError (not a folder, or it cannot be read: that is never "none yet").
        """
        names = self._names()
        entries: dict[int, Entry] = {}
        for wanted in ("step", "old"):
            for name, parsed in names:
                # A crash between the two renames of a commit leaves the previous save of this step as "old" only.
                if parsed.kind == wanted and parsed.step not in entries and (entry := self._look(name, parsed)):
                    entries[parsed.step] = entry
        return sorted(entries.values(), key=lambda entry: (entry.sequence, entry.step))

    def complete(self) -> list[Entry]:
        """The complete entries, oldest commit first."""
        return [entry for entry in self.scan() if entry.complete]

    def entry(self, step: int) -> Entry:
        """The entry of a step, complete or not. Raises: NotFoundError, which names the steps there are."""
        entries = {entry.step: entry for entry in self.scan()}
        if step not in entries:
            known = ", ".join(str(each) for each in sorted(entries)[-10:]) or "none"
            raise NotFoundError(f"{self.root} has no checkpoint of step {step}; the latest there are: {known}")
        return entries[step]

    def leftovers(self) -> list[tuple[Path, StepName]]:
        """Folders that a crash or an unfinished deletion left: `tmp`, `trash`, and `old` whose step is there."""
        names = self._names()
        steps = {parsed.step for _, parsed in names if parsed.kind == "step"}
        return [
            (self.root / name, parsed)
            for name, parsed in names
            if parsed.kind in ("tmp", "trash") or (parsed.kind == "old" and parsed.step in steps)
        ]

    def _names(self) -> list[tuple[str, StepName]]:
        try:
            names = os.listdir(self.root)  # noqa: PTH208 names alone are wanted
        except FileNotFoundError as error:
            raise NotFoundError(f"there is no checkpoint root {self.root}") from error
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
        return [(name, parsed) for name in sorted(names) if (parsed := parse_step(name))]

    def _look(self, name: str, parsed: StepName) -> Entry | None:
        path = self.root / name
        try:
            if path.is_symlink():
                return Entry(parsed.step, path, None, "it is a link, not a folder")
            manifest = read_manifest(path)
            if manifest.step != parsed.step:
                return Entry(parsed.step, path, manifest, f"its manifest is of step {manifest.step}")
            return Entry(parsed.step, path, manifest, missing_file(path, manifest))
        except FileNotFoundError:
            # Deleted while we looked, or never finished: only what is still there is worth a line.
            return Entry(parsed.step, path, None, "it has no manifest.json") if path.exists() else None
        except NotADirectoryError:
            return Entry(parsed.step, path, None, "it is a file, not a folder")
        except FormatVersionError as error:
            return Entry(parsed.step, path, None, f"format version {error.found} is newer than this ckptman", error)
        except CorruptError as error:
            return Entry(parsed.step, path, None, str(error))
        except OSError as error:
            raise RootError(
                error.errno or errno.EIO, f"{path} cannot be read ({error.strerror}): check the mount"
            ) from error
