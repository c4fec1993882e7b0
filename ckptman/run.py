"""What a program asks about a run: its checkpoints, the newest, the best, its events. Nothing is written or locked."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from ckptman.errors import ConfigError, CorruptError, NotFoundError, RootError, plain
from ckptman.policies.restore_choice import choose
from ckptman.policies.retention_rules import KeepBest
from ckptman.runtime.journal import events_of, suspects_of
from ckptman.runtime.metrics_log import metric_names, read_metric
from ckptman.runtime.outcome import read_outcome
from ckptman.storage.catalog.catalog import Catalog, Entry, Until, any_will_do
from ckptman.storage.catalog.reader_lease import GoneError
from ckptman.storage.catalog.root_checks import check_is_folder
from ckptman.storage.format.foreign import recognize
from ckptman.storage.format.paths import (
    METADATA,
    check_is_no_checkpoint,
    is_checkpoint,
    metrics_path,
    outcome_path,
)

T = TypeVar("T")
_LOOKS = 10
"""After so many a root from which each checkpoint vanishes before it is read is no longer looked at anew."""


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
        metadata: what `Checkpointer(metadata=)` was given.
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
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def counts(self) -> bool:
        """Whether it is whole as far as is known, and no rollback left it behind."""
        return not self.problem and not self.abandoned


def checkpoint_at(path: str | os.PathLike[str]) -> Path:
    """Return the folder of the checkpoint that is meant: `path` itself, or the newest that counts of a root.

    Raises:
        NotFoundError: there is none.
        RootError: the root cannot be read.
        ConfigError: `path` is neither a path nor a Checkpoint.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(f"path is a checkpoint, the path of one, or a root, not {path!r}")
    check_is_folder(os.fspath(path))
    folder = Path(path)
    if is_checkpoint(folder) or os.path.lexists(folder / METADATA):
        return folder
    if (other := recognize(folder)) is not None:
        other.refuse()
    latest = Run(folder).latest
    if latest is None:
        raise NotFoundError(f"{folder} is not a checkpoint, and holds none that counts: name the folder of one step")
    return latest.path


def meant_by(path: str | os.PathLike[str]) -> tuple[Path, bool]:
    """Return as `checkpoint_at`, and whether that very checkpoint was named, and not its root. Raises: the same."""
    folder = checkpoint_at(path)
    return folder, folder == Path(path)


def at_newest(find: Callable[[], tuple[Path, bool]], use: Callable[[Path], T]) -> T:
    """Use the checkpoint that is meant, and return what comes of it. Of a root from which that was deleted meanwhile it
    is the one that is the newest then.

    Args:
        find: Returns what `meant_by` does, the same on each rank.
        use: Reads it. GoneError: it was deleted.

    Raises: GoneError, and what `find` and `use` raise.
    """
    looks = 0
    while True:
        folder, is_named = find()
        looks += 1
        try:
            return use(folder)
        except GoneError:
            if looks == _LOOKS or is_named:
                raise


class Curve(NamedTuple):
    """A metric by step.

    Attributes:
        steps: Optimizer steps, ascending.
        values: The value at each of them.
    """

    steps: list[int]
    values: list[float]


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
        suspects = suspects_of(self.root)

        def will_do(entry: Entry) -> bool:
            return not (entry.nonfinite_reason or entry.step in suspects or entry.record().damaged)

        choice = choose(reversed(self._counting(until=will_do)), suspects)
        return _checkpoint(choice.best) if choice.best is not None else None

    def best(self, metric: str, mode: Literal["min", "max"] = "min") -> Checkpoint | None:
        """Return the checkpoint that counts with the lowest value of a metric, or the highest.

        Those without the metric, or in which it or a parameter is NaN or infinite, are left out. Of equals the newest
        is best.

        Args:
            metric: its name, as given to `Checkpointer.step(metrics=)`.
            mode: "min" takes the lowest value, "max" the highest.

        Returns:
            The best one, or None if no checkpoint has a metric yet.

        Raises:
            NotFoundError: checkpoints have other metrics, and not this one; the message lists them.
            ConfigError: the metric has no name, or the mode is another one.
            FormatVersionError, RootError: one cannot be read that may be the best.
        """
        rule, found = KeepBest(metric, 1, mode), self._counting()
        # A copy (cp -r) has the sequence of its original: each is known by its place among those found.
        kept = rule.keeps([replace(each.record(), sequence=place) for place, each in enumerate(found)])
        best = next((_checkpoint(found[place]) for place in kept), None)
        known = {name for each in found for name in each.require_manifest().metrics}
        if known and metric not in known:
            raise NotFoundError(f"no checkpoint in {self.root} has the metric {metric!r}: they have {_listed(known)}")
        return best

    def metrics(self, name: str) -> Curve:
        """Return the values of a metric by step, over all attempts. Steps that were lost and done again count once.

        Args:
            name: The metric, as given to `Checkpointer.step(metrics=)`.

        Returns:
            `steps` and `values`, two lists of equal length; up to 200 steps of each half minute.

        Raises:
            NotFoundError: there is no root, or steps have other metrics, and not this one; the message lists them.
            RootError: it cannot be read.
        """
        self._catalog().names()
        try:
            found = read_metric(self.root, name)
            others = [] if found is not None else metric_names(self.root)
        except OSError as error:
            raise RootError(error.errno, f"{metrics_path(self.root)} cannot be read: {error.strerror}") from error
        if others:
            raise NotFoundError(f"no step of {self.root} has the metric {name!r}: there are {_listed(others)}")
        return Curve(*found) if found is not None else Curve([], [])

    def wait_for_new(
        self, after: Checkpoint | None = None, *, timeout_seconds: float | None = None, poll_seconds: float = 10.0
    ) -> Checkpoint | None:
        """Wait for a checkpoint that is newer than `after`, as an evaluation beside the run does. Nothing is locked.

            checkpoint = None
            while checkpoint := run.wait_for_new(checkpoint):
                evaluate(checkpoint)

        The root may be missing when it is called first.

        Args:
            after: The checkpoint that was returned last; None: any will do.
            timeout_seconds: How long to wait at most; None: until the run is finished.
            poll_seconds: How often to look.

        Returns:
            `latest`, as soon as it was committed later than `after`; or None, at the timeout, or if the run is finished
            and has none.

        Raises:
            ConfigError: the root is one checkpoint.
            FormatVersionError, RootError: as for `latest`.
        """
        end = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            is_finished = self._is_finished()  # before the look: a finished run has saved its last checkpoint
            with contextlib.suppress(NotFoundError):
                latest = self.latest
                if latest is not None and (after is None or latest.sequence > after.sequence):
                    return latest
            left = end - time.monotonic()
            if is_finished or left <= 0:
                return None
            time.sleep(min(poll_seconds, left))

    def events(self) -> list[dict[str, Any]]:
        """Return the events of the run's journal, oldest first; empty where no run was started in the root.

        Each is a dict with at least `time` (unix seconds) and `event`; `docs/journal.md` names the others.
        """
        self._catalog().names()
        return events_of(self.root)

    @property
    def run_id(self) -> str | None:
        """The name of the run: of its newest checkpoint, or before the first one of its last attempt; None: none."""
        entries = self._catalog().look(abandoned=True, until=any_will_do)
        manifests = [each.manifest for each in entries if each.manifest is not None]
        if manifests:
            return manifests[-1].run_id or None
        return next((str(each["run_id"]) for each in reversed(self.events()) if each.get("run_id")), None)

    def _is_finished(self) -> bool:
        try:
            outcome = read_outcome(outcome_path(self.root))
        except (CorruptError, OSError):
            return False
        return outcome is not None and outcome.state == "finished"

    def _catalog(self) -> Catalog:
        check_is_no_checkpoint(self.root)
        return Catalog(self.root)

    def _counting(self, until: Until | None = None) -> list[Entry]:
        """The checkpoints that count, oldest commit first; `until` as for `Catalog.scan`.

        Raises: FormatVersionError, RootError.
        """
        entries = self._catalog().scan(until=until)
        for entry in entries:
            if entry.newer_format is not None:  # it may well be the newest, or the best
                raise entry.newer_format
        return [entry for entry in entries if entry.complete and not entry.record().damaged]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(plain, sorted(names)))


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
        metadata=manifest.metadata if manifest is not None else {},
    )
