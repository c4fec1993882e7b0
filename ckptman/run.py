"""What a program asks about a run: its checkpoints, the newest, the best, its events. Nothing is written or locked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ckptman.catalog.catalog import Catalog, Entry
from ckptman.format.paths import check_is_no_checkpoint, journal_path
from ckptman.policies.crash_loop import crashes_of, suspects
from ckptman.policies.retention_rules import KeepBest
from ckptman.runtime.journal import read_journal


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a run, as it was found. The names are those of `ckptman list --json`.

    Args:
        step: optimizer steps completed.
        path: its folder.
        sequence: number of its commit in the root, counted from 1; 0 where it has no manifest.
        time_seconds: when it was saved, in unix seconds; 0 where it has no manifest.
        metrics: numbers by name, as `Checkpointer.step(metrics=)` was given them.
        world_size: ranks that saved it; 0 where it has no manifest.
        bytes: size of all its files; 0 where it has no manifest.
        verified: whether every byte was read back and found to be what was saved.
        nonfinite: what in it is NaN or infinite; "" where nothing is, or nobody looked.
        pinned: why it is pinned; "" where it is not.
        abandoned: which rollback left it behind; "" where none did.
        problem: why it is no good: incomplete, damaged, of a newer format; "" where nothing is known to be wrong.
    """

    step: int
    path: Path
    sequence: int
    time_seconds: float
    metrics: Mapping[str, float]
    world_size: int
    bytes: int
    verified: bool
    nonfinite: str
    pinned: str
    abandoned: str
    problem: str

    @property
    def counts(self) -> bool:
        """Whether it is whole as far as is known, and no rollback left it behind."""
        return not self.problem and not self.abandoned


class Run:
    """A run as its root tells it, looked up anew at each question: the run may be going on.

    Needs no torch, writes nothing and takes no lock.

        run = ckptman.Run("runs/italia-9b/checkpoints")
        print(run.run_id, [each.step for each in run.checkpoints])
        best = run.best("loss")

    Args:
        root: folder of the checkpoints of the run.

    Raises, by each question:
        NotFoundError: there is no such folder.
        RootError: it cannot be read: that is never "no checkpoints".
        ConfigError: it is one checkpoint, not a root.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def __repr__(self) -> str:
        return f"Run({str(self.root)!r})"

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """All checkpoints in the order of their commits, the newest last; those with no manifest come first.

        Those that do not count (`Checkpoint.counts`) are among them, each with its `problem` or the rollback.
        """
        return [_checkpoint(entry) for entry in self._catalog().look(abandoned=True)]

    @property
    def latest(self) -> Checkpoint | None:
        """The checkpoint that a restore takes: the newest that counts, is finite and not suspect, or None.

        Where none is finite, or all are suspect (attempts crashed after they loaded them), the newest.

        Raises: FormatVersionError, RootError (one cannot be read that may be the newest).
        """
        found = self._counting()
        finite = [entry for entry in found if not entry.spoilt] or found
        suspect = suspects(crashes_of(self.events()))
        taken = [entry for entry in finite if entry.step not in suspect] or finite
        return _checkpoint(taken[-1]) if taken else None

    def best(self, metric: str, mode: Literal["min", "max"] = "min") -> Checkpoint | None:
        """Return the checkpoint that counts with the lowest value of a metric, or the highest.

        Those without the metric, or in which it or a parameter is NaN or infinite, are left out. Of equals the newest
        is best.

        Args:
            metric: its name, as given to `Checkpointer.step(metrics=)`.
            mode: "min" takes the lowest value, "max" the highest.

        Returns:
            The best one, or None where none has the metric.

        Raises:
            ConfigError: the metric has no name, or the mode is another one.
            FormatVersionError, RootError: one cannot be read that may be the best.
        """
        rule, found = KeepBest(metric, 1, mode), self._counting()
        # A copy (cp -r) has the sequence of its original: each is known by its place among those found.
        kept = rule.keeps([replace(each.record(), sequence=place) for place, each in enumerate(found)])
        return next((_checkpoint(found[place]) for place in kept), None)

    def events(self) -> list[dict[str, Any]]:
        """Return the events of the run's journal, oldest first; empty where no run was started in the root.

        Each is a dict with at least `time` (unix seconds) and `event`; `docs/journal.md` names the others.
        """
        self._catalog().names()
        path = journal_path(self.root)
        return read_journal(path)[0] if os.path.lexists(path) else []

    @property
    def run_id(self) -> str | None:
        """The name of the run: of its newest checkpoint, or before the first one of its last attempt; None: none."""
        manifests = [each.manifest for each in self._catalog().look(abandoned=True) if each.manifest is not None]
        if manifests:
            return manifests[-1].run_id or None
        return next((str(each["run_id"]) for each in reversed(self.events()) if each.get("run_id")), None)

    def _catalog(self) -> Catalog:
        check_is_no_checkpoint(self.root)
        return Catalog(self.root)

    def _counting(self) -> list[Entry]:
        """The checkpoints that count, oldest commit first. Raises: FormatVersionError, RootError."""
        entries = self._catalog().scan()
        for entry in entries:
            if entry.newer_format is not None:  # it may well be the newest, or the best
                raise entry.newer_format
        return [entry for entry in entries if entry.complete and not entry.record().damaged]


def _checkpoint(entry: Entry) -> Checkpoint:
    manifest, record = entry.manifest, entry.record() if entry.complete else None
    return Checkpoint(
        step=entry.step,
        path=entry.path,
        sequence=entry.sequence,
        time_seconds=entry.time_seconds,
        metrics=manifest.metrics if manifest is not None else {},
        world_size=manifest.world_size if manifest is not None else 0,
        bytes=manifest.total_bytes if manifest is not None else 0,
        verified=record is not None and record.verified,
        nonfinite=entry.nonfinite,
        pinned=entry.pinned,
        abandoned=entry.abandoned,
        problem=record.damaged if record is not None else entry.problem or "",
    )
