"""TensorBoard: one curve for each metric, over all attempts. Steps that are done again replace those of before."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptman.integrations.append_only import require
from ckptman.runtime.log import tell
from ckptman.runtime.tracker import TrackedRun, Tracker

_SECOND = re.compile(r"events\.out\.tfevents\.([0-9]{1,12})\.")
_MOST_SECONDS = 10.0
"""How much clocks of nodes may differ: so long a new file waits."""


class TensorBoardTracker(Tracker):
    """Write metrics where TensorBoard reads them: `tensorboard --logdir ROOT/tensorboard`.

    Args:
        log_dir: The folder; None: `tensorboard` in the root of the run. No other run may write there.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None = None) -> None:
        require("tensorboard", "tensorboard")
        self._log_dir = log_dir
        self._writer: Any = None
        self._durable = -1

    def start(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        folder = Path(self._log_dir) if self._log_dir is not None else run.root / "tensorboard"
        _await_later_name(folder)
        # Readers drop what the files before have from this step on.
        self._writer = SummaryWriter(folder, purge_step=run.step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, number in metrics.items():
            self._writer.add_scalar(name, number, step)
        if step <= self._durable:
            self._writer.flush()

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        if name == "save_durable":  # what a kill takes from here on is done again
            self._durable = fields["step"]
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _await_later_name(folder: Path) -> None:
    """Wait until a new file comes after those there: readers take them by the second in their names."""
    seconds = [int(found[1]) for each in folder.glob("events.out.*") if (found := _SECOND.match(each.name))]
    wait_seconds = max(seconds, default=0) + 1 - time.time()
    if wait_seconds > _MOST_SECONDS:
        tell(
            f"TensorBoardTracker: a file in {folder} is named {wait_seconds:.0f} s after the clock of this node: until "
            f"that has gone by, what an attempt writes is read before it. Have the clocks of the nodes set (NTP)",
            logging.WARNING,
        )
    elif wait_seconds > 0:
        time.sleep(wait_seconds)
