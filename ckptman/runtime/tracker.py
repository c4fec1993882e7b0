"""What a tracker is: it hears of each step and each event of a run, and hands that on to a program that draws it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run when an attempt of it starts to train.

    Attributes:
        run_id: The name of the run, the same in all its attempts.
        root: The folder of its checkpoints.
        attempt: Which attempt it is, counted from 1.
        step: The step that it goes on from, 0 on a fresh start. What an attempt before did after this step is lost, and
            its steps are done again.
        world_size: How many ranks there are.
    """

    run_id: str
    root: Path
    attempt: int
    step: int
    world_size: int


class Tracker:
    """Base class of what is given to `Checkpointer(trackers=[...])`. Each method does nothing unless it is overridden.

        class Printer(ckptman.Tracker):
            def log(self, step, metrics):
                print(step, metrics)

    Only rank 0 calls them, in a thread for each tracker, one call after the other and some seconds behind the training.
    A tracker that raises is told of once and not called any more, but for `close`; one that hangs is left behind.
    Neither holds up the training. Every rank makes its trackers: what only one may do belongs into `start`.
    """

    def start(self, run: TrackedRun) -> None:
        """Begin: called first, and again where the program restores once more."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step that has ended. Not called for a step without any."""

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Take an event of the journal (`docs/journal.md`) as it is written there, with `time` (unix seconds)."""

    def close(self) -> None:
        """Write what is left, and end. After some seconds the program ends without waiting for it any longer."""
