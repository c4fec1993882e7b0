"""Weights & Biases: one run over all attempts, written offline, and uploaded from where there is a network."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptman.integrations.append_only import AppendOnlyTracker, Step, require
from ckptman.runtime.log import tell
from ckptman.runtime.tracker import TrackedRun
from ckptman.storage.io.durable_files import DISK

_INIT_SECONDS = 30.0
"""How long a server is waited for. When the program ends, wandb waits for what is left of it."""
_NOT_IN_IDS = re.compile(r"[^\w.-]")


class WandbTracker(AppendOnlyTracker):
    """Show a run in Weights & Biases, as one run with one curve for each metric, over all attempts and rollbacks.

        trackers=[WandbTracker(project="italia", name="9b", config={"lr": 3e-4})]

    Offline unless `mode=`, or the variable WANDB_MODE, says otherwise: each attempt writes a folder below `wandb` in
    the root, and `wandb sync ROOT/wandb`, called between attempts or at the end, uploads them as one run.

    Args:
        project: The project of the run in Weights & Biases.
        live: Hand on each step at once, not only when a checkpoint that has it is durable; steps that are done again
            after a crash then stay as they were the first time. None: where the mode is not "offline".
        rewind: After a rollback of a run that has been uploaded, have Weights & Biases rewind it
            (`resume_from`), which has to be enabled there. Otherwise the steps that it has stay as they are.
        **init: What else `wandb.init` takes. `id`, `resume` and `reinit` are given to it here.

    Raises:
        ConfigError: wandb is not installed.
    """

    _name = "wandb"

    def __init__(self, project: str, *, live: bool | None = None, rewind: bool = False, **init: Any) -> None:
        require("wandb", "wandb")
        self._mode: Any = init.pop("mode", None) or os.environ.get("WANDB_MODE") or "offline"
        super().__init__(self._mode != "offline" if live is None else live)
        self._rewind, self._init = rewind, {"project": project, **init}
        self.run: Any = None
        """The run of wandb, once the first step has ended; on rank 0 alone."""

    def _open(self, run: TrackedRun, went_back: bool) -> bool:
        import wandb

        identity = _NOT_IN_IDS.sub("-", run.run_id)
        folder = Path(self._init.get("dir") or os.environ.get("WANDB_DIR") or run.root)
        how: dict[str, Any] = {"resume": "allow"}
        is_new = went_back and self._mode == "offline" and _set_aside(folder / "wandb", identity)
        if went_back and not is_new:
            if self._rewind:
                how = {"resume_from": f"{identity}?_step={run.step}"}
                self._handed_on = run.step
            else:
                tell(
                    f"WandbTracker: W&B has steps up to {self._handed_on}, and the run went back to {run.step}: they "
                    f"stay as they are there. WandbTracker(rewind=True) takes them back, where W&B offers rewinding",
                    logging.WARNING,
                )
        folder.mkdir(parents=True, exist_ok=True)
        wait: dict[str, Any] = {} if "WANDB_INIT_TIMEOUT" in os.environ else {"init_timeout": _INIT_SECONDS}
        own = {"dir": str(folder), "settings": wandb.Settings(console="off", silent=True, **wait), **self._init}
        self.run = wandb.init(id=identity, mode=self._mode, reinit="create_new", **how, **own)
        self.run.summary["ckptman/attempt"] = run.attempt
        return is_new

    def _hand_on(self, steps: Sequence[Step]) -> None:
        for each in steps:
            self.run.log({**each.metrics, "_timestamp": each.time}, step=each.step)

    def _saved(self, step: int) -> None:
        self.run.summary["ckptman/durable_step"] = step

    def _close(self, end: str) -> None:
        if self.run is not None:  # else it could not begin, and said so
            self.run.finish(exit_code=1 if end == "failed" else 0)


def _set_aside(folder: Path, identity: str) -> bool:
    """Move what earlier attempts wrote offline to where no upload looks; False where one of them was uploaded."""
    folders = [each.parent for each in folder.glob(f"offline-run-*/run-{identity}.wandb")]
    if not folders or any(True for each in folders for _ in each.glob("*.synced")):
        return False
    aside = folder / "before-rollback"
    aside.mkdir(exist_ok=True)
    for each in folders:
        DISK.rename(each, aside / each.name)
    return True
