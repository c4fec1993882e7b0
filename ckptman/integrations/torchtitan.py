"""torchtitan's trainer, whose checkpoints ckptman saves and loads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

try:
    from torchtitan.components.checkpointer import BaseCheckpointManager
except ImportError as error:
    raise ImportError(
        f"ckptman.integrations.torchtitan needs torchtitan 0.3 or newer ({error}): pip install 'ckptman[torchtitan]'"
    ) from error

from ckptman.api import load
from ckptman.checkpointer import Checkpointer
from ckptman.engine.loading.checkpoint_reader import SavedState
from ckptman.engine.state.generators import RNGState
from ckptman.engine.state.rank_values import FromRank0, PerRank
from ckptman.errors import ConfigError
from ckptman.policies.retention_plan import KeepLast
from ckptman.policies.save_policies import BeforeDeadline, EverySteps, OnStop

_EXPORTS = "ckptman export makes weights of any checkpoint, for safetensors too"
_NOT_TAKEN = {
    "last_save_model_only": f"the last checkpoint can be trained on like any other: {_EXPORTS}",
    "last_save_in_hf": f"the last checkpoint can be trained on like any other: {_EXPORTS}",
    "initial_load_in_hf": "weights of Hugging Face are not read: convert them by torchtitan's convert_from_hf.py, and "
    "name the result as initial_load_path",
}
"""Settings of torchtitan's that have no place here, and why."""


class CkptmanCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Save and resume torchtitan's trainer by a `ckptman.Checkpointer`: the `checkpoint` of a `Trainer.Config`.

        config = llama3_8b()
        config.checkpoint = CkptmanCheckpointManager.Config(enable=True, interval=500, keep_latest_k=3)
        trainer = config.build()
        trainer.train()

    A run resumes from the newest good checkpoint, and goes on as if nobody had stopped it. It saves every `interval`
    steps, at a signal, and before the deadline of its job; in the latter two cases the process exits with code 75,
    which asks for another attempt. The last step is always saved.

    Args:
        config: What to do. It is that of torchtitan's own manager; see `Config`.
        dataloader: Whose position each rank saves for itself.
        model_parts: The model of this rank: one part.
        optimizers: torchtitan's container of optimizers.
        lr_schedulers: torchtitan's container of schedules.
        states: What else to save, by name: the trainer itself.
        sd_adapter: Not used.
        base_folder: Where `config.folder` is.

    Raises:
        ConfigError: The rank has several parts of a model, or the folder is not one of a file system.
        CkptmanError: What `ckptman.Checkpointer` raises.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's settings: `enable`, `folder`, `interval`, `keep_latest_k`, `load_step`, `load_only`,
        `enable_first_step_checkpoint`, `exclude_from_loading`, `initial_load_path` and `initial_load_model_only`.

        Raises: ConfigError: one is set that has no place here.
        """

        last_save_model_only: bool = False
        """Not taken: the last checkpoint is a whole one."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            for name, why in _NOT_TAKEN.items():
                if getattr(self, name):
                    raise ConfigError(f"checkpoint.{name} is not for CkptmanCheckpointManager: {why}")

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        self.save_future = None
        self._config = config
        if len(model_parts) != 1:
            raise ConfigError(
                f"this rank has {len(model_parts)} parts of a model, and ckptman saves one: choose a pipeline schedule "
                f"of one stage a rank, such as 1F1B"
            )
        if "://" in f"{base_folder}/{config.folder}":
            raise ConfigError(
                f"checkpoint.folder {base_folder}/{config.folder} is not in a file system: name a folder, and copy "
                f"checkpoints from there (ckptman copy)"
            )
        self._model = model_parts[0]
        own = list(optimizers)
        state: dict[str, Any] = {
            "model": self._model,
            **({"optimizer": own[0]} if len(own) == 1 else {f"optimizer_{type(each).__name__}": each for each in own}),
            "lr_scheduler": lr_schedulers,
            **{name: FromRank0(each) for name, each in states.items()},
            "rng": RNGState(),
        }
        if dataloader is not None:
            state["dataloader"] = PerRank(dataloader)
        self._checkpointer = Checkpointer(
            Path(base_folder) / config.folder,
            state,
            save_policy=EverySteps(config.interval) | OnStop() | BeforeDeadline(),
            retention=KeepLast(config.keep_latest_k) if config.keep_latest_k else None,
            signals=not config.load_only,
        )

    def _load(self, step: int = -1) -> bool:
        path, wanted = self._config.initial_load_path, None if step == -1 else step
        state = self._checkpointer.state
        if unknown := set(self._config.exclude_from_loading) - set(state):
            raise ConfigError(f"checkpoint.exclude_from_loading names {min(unknown)}: there are {', '.join(state)}")
        excluded = {name: state.pop(name) for name in self._config.exclude_from_loading}
        with self._closed_on_exit():
            if path is None or self._config.initial_load_model_only:
                found = self._checkpointer.restore(wanted, unexpected=[*excluded])
            else:
                found = self._checkpointer.restore(wanted, path=path, missing=["rng"], unexpected=[*excluded])
        state.update(excluded)
        if not found and path is not None and self._config.initial_load_model_only:
            self._load_weights(Path(path))
        return found > 0 or path is not None

    def _load_weights(self, path: Path) -> None:
        """Load the model alone, from a checkpoint of ckptman or of torchtitan, which has its tensors at the top."""
        weights = self._model.state_dict()
        is_below = any(name.startswith("model.") for name in SavedState.read(path).index.tensors)
        load({"model": weights} if is_below else weights, path)
        self._model.load_state_dict(weights)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._config.load_only:
            return False
        with self._closed_on_exit():
            reason = self._checkpointer.step(curr_step)
            if reason is None and (last_step or (curr_step == 1 and self._config.enable_first_step_checkpoint)):
                reason = "the last step" if last_step else "the first step"
                self._checkpointer.save(curr_step, reason=reason)
            if self._checkpointer.should_stop():
                raise SystemExit(self._checkpointer.exit_code)
        return reason is not None

    @contextmanager
    def _closed_on_exit(self) -> Iterator[None]:
        """Close when the process is about to exit with a code: the trainer closes after errors and at its end only."""
        try:
            yield
        except SystemExit:
            self._close()
            raise

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: what a save copies is copied when `save` returns."""

    def _wait_for_saving(self) -> None:
        self._checkpointer.wait()

    def _close(self) -> None:
        # The trainer closes its parts while it handles the error that ends it: nothing is saved then.
        self._checkpointer.__exit__(*sys.exc_info())
