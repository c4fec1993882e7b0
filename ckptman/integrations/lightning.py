"""A callback for the Trainer of Lightning: ckptman saves, and `fit()` resumes exactly, in the middle of an epoch too.

The Trainer is saved, and put back, at one point of its loop: before it fetches a batch. By then all that belongs to the
batch before is over (validation, schedules, hooks, the end of an epoch), and nothing of the next one has begun.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import operator
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ckptman.checkpointer import Checkpointer
from ckptman.data.persistent_workers import draw_apart
from ckptman.data.resumable_loader import ResumableLoader
from ckptman.engine.state.generators import RNGState
from ckptman.engine.state.unsaved_values import UnsavedValues
from ckptman.errors import CommitError, ConfigError, MismatchError
from ckptman.integrations.epoch_start import BeforeEpochStart
from ckptman.integrations.lightning_metrics import EpochMetrics
from ckptman.policies.retention_plan import KeepBest, KeepLast
from ckptman.policies.save_policies import BeforeDeadline, EverySteps, OnStop

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

_REFUSED = {
    "BatchSizeFinder": "search with another Trainer",
    "LearningRateFinder": "search with another Trainer",
    "FSDPStrategy": "use ModelParallelStrategy, with fully_shard in configure_model()",
    "DeepSpeedStrategy": "use DDPStrategy or ModelParallelStrategy",
}
"""Callbacks that train on the way to the run, strategies whose state has no names of parameters, and what to do."""
_HOOKS_OF_LIGHTNING = ("Callback.on_save_checkpoint", "CheckpointHooks.on_save_checkpoint")
"""They do nothing."""


class CkptmanCallback(Callback):
    """Save a run of `lightning.Trainer`, and let `fit()` go on where the run before ended.

        callback = CkptmanCallback("runs/first", monitor="val_loss")
        trainer = Trainer(max_epochs=10, callbacks=[callback], enable_checkpointing=False)
        trainer.fit(model, train_loader, val_loader)  # from the newest good checkpoint of the root on
        sys.exit(callback.exit_code)  # 0: finished; 75: saved, run me again

    Saved are the module under its own names, optimizers, schedules, the position in the training data, the generators
    of each rank, the progress of the loops, and what callbacks, the datamodule and `on_save_checkpoint` hooks save. A
    training DataLoader gets its position by itself, with the sampler that Lightning gives it.

    Args:
        root: Folder of the checkpoints of one run.
        monitor: A metric that is logged. A checkpoint is saved after each validation, and those best in it are kept.
        mode: "min" keeps the lowest values of `monitor`, "max" the highest.
        save_top_k: How many of the best to keep, besides the newest.
        every_n_train_steps: Save each time that so many optimizer steps are done. Default: as a Checkpointer does.
        **settings: Further arguments of `ckptman.Checkpointer`, such as `retention` or `tiers`, and of its `restore`. A
            `state` is saved besides that of the Trainer.

    Attributes:
        checkpointer: The Checkpointer, once `fit` has begun.

    Raises:
        ConfigError: An argument that a Checkpointer does not have, or two that say the same thing.
    """

    checkpointer: Checkpointer

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        every_n_train_steps: int | None = None,
        **settings: Any,
    ) -> None:
        self._root, self._monitor = root, monitor
        for argument, given, setting in (
            ("monitor", monitor, "retention"),
            ("every_n_train_steps", every_n_train_steps, "save_policy"),
        ):
            if given is not None and setting in settings:
                raise ConfigError(f"CkptmanCallback: {argument}= and {setting}= say the same thing: give one of them")
        if monitor is not None:
            settings["retention"] = KeepLast(1) | KeepBest(monitor, save_top_k, mode)
        if every_n_train_steps is not None:
            settings["save_policy"] = EverySteps(every_n_train_steps) | OnStop() | BeforeDeadline()
        self._more_state = settings.pop("state", {})
        of_restore = inspect.signature(Checkpointer.restore).parameters
        self._restore = {name: settings.pop(name) for name in [*settings] if name in of_restore}
        try:
            inspect.signature(Checkpointer).bind(root, {}, **settings)
        except TypeError as error:
            raise ConfigError(f"CkptmanCallback: {error}: see the arguments of ckptman.Checkpointer") from None
        self._settings = settings
        self._block: contextlib.ExitStack | None = None
        self._ended_step = 0
        self._put_back: dict[str, Any] | None = None
        self._before_epoch: BeforeEpochStart | None = None
        self._metrics_before: dict[str, Any] = {}
        self._of_validation: set[str] = set()
        self._is_validated = False
        self._unsaved: dict[str, Any] | None = None
        """The metrics of the last step, if it is not saved."""
        self._unsaved_values = UnsavedValues(lambda: self._progress.without_state())

    @property
    def exit_code(self) -> int:
        """The code to exit with after `fit`: 0, the run is finished; 75, it saved and wants to be started again."""
        if not hasattr(self, "checkpointer"):
            raise ConfigError("exit_code: fit() did not run in this process, as with strategy='ddp_spawn': use 'ddp'")
        return self.checkpointer.exit_code

    # ---- hooks of the Trainer ----------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot be resumed."""
        if stage != "fit" or trainer.fast_dev_run or not trainer.limit_train_batches:  # type: ignore[attr-defined]
            return
        kinds = [kind for each in (trainer.strategy, *trainer.callbacks) for kind in type(each).__mro__]  # type: ignore[attr-defined]
        for name in [kind.__name__ for kind in kinds if kind.__name__ in _REFUSED]:
            raise ConfigError(f"CkptmanCallback cannot save a run with {name}: {_REFUSED[name]}")
        trainer.callbacks = [self, *(each for each in trainer.callbacks if each is not self)]  # type: ignore[attr-defined]
        self._block = contextlib.ExitStack()
        self._loaders = self._block.enter_context(_TrainLoaders(trainer, self._between_batches))
        if threading.current_thread() is threading.main_thread():
            self._settings.setdefault("signals", True)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the Checkpointer, and restore."""
        if self._block is None:
            return
        if trainer.ckpt_path is not None:
            raise ConfigError(
                f"fit(ckpt_path={str(trainer.ckpt_path)!r}): with a CkptmanCallback, fit() goes on from the newest "
                f"checkpoint in {self._root} by itself. Leave ckpt_path out, and load the weights of another run into "
                f"the module"
            )
        self._trainer = trainer
        self._loaders.make()
        self._loaders.is_training = True
        self._progress, self._epoch_metrics = _TrainerState(trainer), EpochMetrics(trainer)
        state: dict[str, Any] = {
            "model": pl_module,
            **_numbered("optimizer", trainer.optimizers),
            **_numbered("lr_scheduler", [each.scheduler for each in trainer.lr_scheduler_configs]),
            "data": self._loaders,
            "rng": RNGState(),
            "epoch_metrics": self._epoch_metrics,
        }
        if taken := self._more_state.keys() & {*state, "trainer"}:
            raise ConfigError(f"CkptmanCallback: the Trainer has {', '.join(sorted(taken))} in its state: rename yours")
        state |= {**self._more_state, "trainer": self._progress}
        settings = {"total_steps": trainer.max_steps if trainer.max_steps > 0 else None, **self._settings}
        self.checkpointer = self._block.enter_context(Checkpointer(self._root, state, **settings))
        try:
            self._ended_step = self.checkpointer.restore(**self._restore)
        except MismatchError as error:
            if {"trainer", "epoch_metrics"}.isdisjoint(error.missing):
                raise
            raise ConfigError(
                f"{error.where} was not saved by a Trainer of Lightning, but by another program: give this run a root "
                f"of its own, and the weights to its model (ckptman.load)"
            ) from None
        self._put_back = self._before_epoch = self._unsaved = None
        if self._progress.is_restored:
            self._put_back = RNGState().state_dict()
            trainer.num_sanity_val_steps = 0  # as Lightning does: it would change what was restored

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the handlers of Lightning off."""
        self._own_signals(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the handlers of Lightning off."""
        self._own_signals(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note what the hooks that follow may change, if they were called for this epoch before it was saved."""
        if self._put_back is not None and self._progress.is_within_epoch:
            self._before_epoch = self._progress.before_epoch_start()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note what was logged before."""
        self._metrics_before = dict(trainer.callback_metrics)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Show the watchdog a sign of life."""
        if self._block is not None:
            self.checkpointer.beat()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note what validation has logged: it is true of this step alone."""
        if self._block is None or trainer.sanity_checking:
            return
        before, self._metrics_before = self._metrics_before, {}
        logged = trainer.callback_metrics
        self._of_validation |= {name for name, value in logged.items() if before.get(name) is not value}
        self._is_validated = True
        if self._monitor is not None and self._monitor not in logged:
            raise ConfigError(
                f"CkptmanCallback(monitor={self._monitor!r}): validation has logged no such metric, but "
                f"{', '.join(sorted(logged)) or 'none'}: self.log({self._monitor!r}, ...) in validation_step()"
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the last step of an epoch that ends early, as by `max_steps`, as one in its middle."""
        if self._block is not None and not self._progress.is_epoch_over:
            self._end_last_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the last step, and the run."""
        if self._block is not None:
            self._end_last_step()
            self._close(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the run as failed."""
        self._close(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End a run that was stopped, or had nothing left to do."""
        self._close(None)

    def state_dict(self) -> dict[str, Any]:
        """Return which metrics are of validation."""
        return {"of_validation": sorted(self._of_validation)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take which metrics are of validation."""
        self._of_validation = set(state_dict["of_validation"])

    # ---- the run -----------------------------------------------------------------------------------------------

    def _between_batches(self) -> None:
        """Save if it is time, and end `fit()` if it has to, before a batch is fetched."""
        trainer = self._trainer
        if self._put_back is not None:
            RNGState().load_state_dict(self._put_back)
            self._put_back = None
            if self._before_epoch is not None:
                self._before_epoch.put_back(
                    hook="on_train_epoch_start", earlier="on_train_epoch_end", warns=trainer.is_global_zero
                )
                self._before_epoch = None
            if self._progress.is_within_epoch:
                self._progress.put_back()
                self._loaders.epoch = self._progress.epoch
            self._epoch_metrics.put_back()
        self._loaders.begin(self._progress.epoch)
        self._end_step()
        if self.checkpointer.should_stop():
            trainer.should_stop = True
            # With this one alone fit() returns at once: not by way of a validation and the hooks of the end of an
            # epoch, which is not over. EarlyStopping, for one, fails where nothing was measured yet.
            package = type(trainer.fit_loop).__module__.rpartition(".loops")[0]
            raise importlib.import_module(f"{package}.utilities.exceptions")._TunerExitException

    def _end_step(self) -> None:
        step = self._trainer.global_step
        if step == self._ended_step:
            return
        self._ended_step = step
        logged = self._trainer.callback_metrics
        stale = set() if self._is_validated else self._of_validation
        metrics = {name: value for name, value in logged.items() if name not in stale}
        reason = self.checkpointer.step(step, metrics)
        if self._is_validated and self._monitor is not None and reason is None:
            reason = f"{self._monitor} was measured"
            self.checkpointer.save(step, metrics, reason=reason)
        self._is_validated = False
        self._unsaved = metrics if reason is None else None
        if self._trainer.is_global_zero:
            self._unsaved_values.end_step(is_saved=reason is not None)

    def _end_last_step(self) -> None:
        """End the last step of a run, and save it, if it is not saved: not each state can be noted at each step."""
        self._end_step()
        if self._unsaved is not None and not self.checkpointer.should_stop():
            with contextlib.suppress(CommitError):  # of a save before: this one makes up for it, or fails as well
                self.checkpointer.wait()
            self.checkpointer.save(self._ended_step, self._unsaved, reason="the run ended")
            self._unsaved = None

    def _own_signals(self, trainer: Trainer) -> None:
        if self._block is not None and self._settings.get("signals"):
            # They end the process at a signal, or wait in it for other ranks. This puts back those from before.
            trainer._signal_connector.teardown()

    def _close(self, error: BaseException | None) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(type(error) if error is not None else None, error, error.__traceback__ if error else None)


class _TrainerState:
    """What the Trainer knows besides the tensors: the progress of its loops, and what its parts save of themselves."""

    from_rank0 = True
    """Tells the Checkpointer to save this object on rank 0 alone, as Lightning does."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loops: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}

    @property
    def is_restored(self) -> bool:
        """Whether it was loaded from a checkpoint."""
        return bool(self._loops)

    @property
    def is_within_epoch(self) -> bool:
        """Whether that was saved within an epoch, and not at the end of a run."""
        progress = self._loops["epoch_progress"]["current"]
        return bool(progress["ready"] != progress["completed"])

    @property
    def epoch(self) -> int:
        """The number of epochs begun."""
        return int(self._trainer.fit_loop.epoch_progress.current.ready)

    @property
    def is_epoch_over(self) -> bool:
        """Whether the last batch that was trained on is the last of its epoch."""
        batches = self._trainer.fit_loop.epoch_loop.batch_progress
        return bool(batches.is_last_batch or batches.current.ready >= self._trainer.num_training_batches)

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as plain values and small tensors."""
        trainer = self._trainer
        loops = trainer.fit_loop.state_dict()
        for progress in loops["epoch_progress"].values():  # an epoch that ends early is one to be gone on with
            progress["processed"] = progress["completed"]
        state = {
            "fit_loop": loops,
            "reload_epoch": trainer.fit_loop._last_train_dl_reload_epoch,
            "should_stop": bool(trainer.should_stop),
            "callbacks": {each.state_key: saved for each in trainer.callbacks if (saved := each.state_dict())},
            "precision": trainer.precision_plugin.state_dict(),
            "metrics": dict(trainer.callback_metrics),
            "hooks": self._from_hooks(self._hooked()),
        }
        return state | ({} if trainer.datamodule is None else {"datamodule": trainer.datamodule.state_dict()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the Trainer and its parts what was saved of them. Raises: ConfigError: no Trainer of Lightning has."""
        trainer = self._trainer
        if not isinstance(state, Mapping) or "fit_loop" not in state:
            raise ConfigError(
                "the checkpoint was saved by the trainer of another framework: give this run a root of its own, and "
                "the weights to its model (ckptman.load)"
            )
        self._loops, self._metrics = state["fit_loop"], state["metrics"]
        self.put_back()
        trainer.fit_loop._last_train_dl_reload_epoch = state["reload_epoch"]
        trainer.should_stop = state["should_stop"]
        trainer.precision_plugin.load_state_dict(state["precision"])
        for each in trainer.callbacks:
            if each.state_key in state["callbacks"]:
                each.load_state_dict(state["callbacks"][each.state_key])
        if trainer.datamodule is not None and "datamodule" in state:
            trainer.datamodule.load_state_dict(state["datamodule"])
        self._load_into_hooks(self._hooked(), state["hooks"], state["callbacks"])

    def put_back(self) -> None:
        """Let the loops be where they were, and have measured what they had. They do not know of it: what Lightning
        does when it restarts is another way to resume, which is not exact."""
        fit_loop = self._trainer.fit_loop
        self._trainer.callback_metrics.update(self._metrics)
        fit_loop.load_state_dict(self._loops)
        epoch_loop = fit_loop.epoch_loop
        children = (epoch_loop.val_loop, epoch_loop.automatic_optimization, epoch_loop.manual_optimization)
        for loop in (fit_loop, epoch_loop, *children):
            loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
        if fit_loop._data_fetcher is not None:
            fit_loop._data_fetcher.fetched = epoch_loop.batch_progress.current.ready

    def before_epoch_start(self) -> BeforeEpochStart:
        """Note what the hooks `on_train_epoch_start` of the user may change."""
        trainer = self._trainer
        callbacks = [each for each in trainer.callbacks if _is_of_user(each) and _begins_epochs(each)]
        holders: list[tuple[Any, Any]] = [(each.state_dict, each.load_state_dict) for each in callbacks]
        for each in self._hooked():
            if each in callbacks or (each is trainer.lightning_module and _begins_epochs(each)):
                get, put = partial(self._from_hooks, [each]), partial(self._load_into_hooks, [each], callbacks={})
                holders.append((get, put))
        schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
        return BeforeEpochStart(trainer.lightning_module, trainer.optimizers, schedulers, holders)

    def _hooked(self) -> list[Any]:
        """Return the callbacks that add something to a checkpoint, and the module if it does."""
        holders = (*self._trainer.callbacks, self._trainer.lightning_module)
        return [each for each in holders if type(each).on_save_checkpoint.__qualname__ not in _HOOKS_OF_LIGHTNING]

    def without_state(self) -> dict[Any, str]:
        """Return the module and the callbacks of the user that save nothing of themselves, and how they would."""
        remedy = "return such values from state_dict(), and take them in load_state_dict()"
        found = dict.fromkeys(self._callbacks(), remedy)
        found[self._trainer.lightning_module] = (
            "use on_save_checkpoint() and on_load_checkpoint(), or register_buffer()"
        )
        for each in self._hooked():
            found.pop(each, None)
        return found

    def _callbacks(self) -> list[Any]:
        """Return the callbacks that are not Lightning's, or ours, and have no state."""
        return [
            each
            for each in self._trainer.callbacks
            if _is_of_user(each) and type(each).state_dict.__qualname__ == "Callback.state_dict"
        ]

    def _from_hooks(self, hooked: list[Any]) -> dict[str, Any]:
        given = self._for_hooks() if hooked else {}
        checkpoint = dict(given)
        for each in hooked:
            each.on_save_checkpoint(*self._arguments(each), checkpoint)
        return {name: value for name, value in checkpoint.items() if value is not given.get(name)}

    def _load_into_hooks(self, hooked: list[Any], saved: Mapping[str, Any], callbacks: Mapping[str, Any]) -> None:
        if hooked:
            checkpoint = {**self._for_hooks(), "callbacks": callbacks, **saved}
            for each in hooked:
                each.on_load_checkpoint(*self._arguments(each), checkpoint)

    def _for_hooks(self) -> dict[str, Any]:
        """Return what hooks find in a checkpoint of Lightning's: they may take the weights from it."""
        trainer = self._trainer
        weights = trainer.lightning_module.state_dict()
        return {"epoch": trainer.current_epoch, "global_step": trainer.global_step, "state_dict": weights}

    def _arguments(self, hooked: object) -> tuple[Any, ...]:
        module = self._trainer.lightning_module
        return () if hooked is module else (self._trainer, module)


class _TrainLoaders:
    """The training loaders that the Trainer has made: each is wrapped, and the position of all is one entry of the
    state, which for a single one is that of a ResumableLoader.

    From its block on, whatever makes loaders makes wrapped ones: `trainer.estimated_stepping_batches` does so while the
    optimizers are made.
    """

    def __init__(self, trainer: Any, between_batches: Callable[[], None]) -> None:
        self._trainer, self.between_batches = trainer, between_batches
        self.epoch = 0
        """The number of epochs begun when batches were fetched last."""
        self.is_training = False

    def __enter__(self) -> _TrainLoaders:
        vars(self._trainer.strategy)["process_dataloader"] = self._wrap
        return self

    def __exit__(self, *_: object) -> None:
        """Let the Trainer make its loaders as ever."""
        vars(self._trainer.strategy).pop("process_dataloader", None)

    def make(self) -> None:
        """Have the Trainer make its loaders, unless it has. Raises: ConfigError: it has others than those wrapped."""
        fit_loop = self._trainer.fit_loop
        if fit_loop._combined_loader is not None and not self._are_wrapped():
            fit_loop._combined_loader = None  # made before this block began
        fit_loop.setup_data()
        if not self._are_wrapped():
            raise ConfigError(
                "CkptmanCallback: something makes the training loaders past the strategy of the Trainer, so they have "
                "no position to go on from: leave it out, or write the loop with a ckptman.Checkpointer"
            )
        if self._trainer.limit_train_batches == 1.0:
            fit_loop._combined_loader.limits = None  # of an ElasticSampler not all epochs have as many batches

    @property
    def dataloaders(self) -> list[Any]:
        """What is inside of them."""
        return [inside for each in self._loaders() for inside in each.loader.dataloaders]

    def _are_wrapped(self) -> bool:
        return all(isinstance(each, _TrainLoader) for each in self._loaders())

    @property
    def per_rank(self) -> bool:
        """Tell the Checkpointer whether each rank has a position of its own."""
        return any(each.loader.per_rank for each in self._loaders())

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader; of several, by their numbers."""
        states = {str(number): each.loader.state_dict() for number, each in enumerate(self._loaders())}
        return states["0"] if len(states) == 1 else states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let each loader go on from its position. Raises: ConfigError: other loaders were saved."""
        loaders = self._loaders()
        states = {"0": state} if "begun" in state else state
        if len(states) != len(loaders):
            raise ConfigError(
                f"the checkpoint has the positions of {len(states)} training loaders, and there are {len(loaders)}: "
                f"train with those that it was saved with"
            )
        for number, each in enumerate(loaders):
            each.loader.load_state_dict(states[str(number)])
        iter(self._trainer.fit_loop._data_fetcher)  # finds how many batches are left
        self._count_batches()

    def load_from_other_rank(self, state: Mapping[str, Any], rank: int) -> None:
        """As `load_state_dict`, on a rank that there was none of: between two epochs."""
        self.load_state_dict(state)

    def begin(self, epoch: int) -> None:
        """Begin an epoch, if it has not begun, and tell the Trainer how many batches it has."""
        if epoch == self.epoch:
            return
        self.epoch = epoch
        for each in self._loaders():
            if each.loader.batch:  # it was cut short, as by limit_train_batches or beside a longer loader
                each.loader.end_epoch()
        self._count_batches()

    def _count_batches(self) -> None:
        trainer = self._trainer
        length = trainer.fit_loop._data_fetcher.length
        if trainer.fit_loop.max_batches != length:
            trainer.fit_loop.max_batches = length
            if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
                trainer.val_check_batch = max(1, int(length * trainer.val_check_interval))

    def _loaders(self) -> list[_TrainLoader]:
        loaders: list[_TrainLoader] = self._trainer.fit_loop._combined_loader.flattened
        return loaders

    def _wrap(self, loader: Any) -> Any:
        trainer = self._trainer
        loader = type(trainer.strategy).process_dataloader(trainer.strategy, loader)
        if not trainer.training:
            return draw_apart(loader)
        if isinstance(loader, ResumableLoader):
            resumable = loader
            if not loader.batch:  # Lightning has made an iterator, to see whether there is one: no pass has begun
                loader.load_state_dict({**loader.state_dict(), "begun": False})
        else:
            resumable = ResumableLoader(loader)
            resumable.epoch = trainer.current_epoch
        if operator.length_hint(resumable, -1) < 0 and isinstance(trainer.limit_train_batches, float):
            raise ConfigError(
                "the training loader does not know how many batches it has, so Lightning looks one batch ahead: give "
                "its dataset a __len__, or say how many with Trainer(limit_train_batches=1000)"
            )
        return _TrainLoader(resumable, self)


class _TrainLoader:
    """A ResumableLoader that calls back before each batch. Its pass begins when the first is wanted: until then the
    Trainer may make as many iterators as it likes."""

    def __init__(self, loader: ResumableLoader[Any], owner: _TrainLoaders) -> None:
        self.loader, self._owner = loader, owner

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "state_dict", "load_state_dict"):  # or Lightning asks for the position, too
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        if not self._owner.is_training:  # a module that looks at the data while it is set up
            yield from self.loader.loader
            return
        self._owner.between_batches()
        batches, length = iter(self.loader), operator.length_hint(self.loader, -1)
        for batch in batches:
            if self.loader.batch == length:
                next(batches, None)  # the Trainer does not ask whether there is another: by its next epoch it is over
            yield batch
            self._owner.between_batches()


def _is_of_user(callback: Any) -> bool:
    return not type(callback).__module__.startswith(("lightning", "pytorch_lightning", "ckptman"))


def _begins_epochs(holder: Any) -> bool:
    """Return whether a callback or module does anything at the start of an epoch."""
    return not type(holder).on_train_epoch_start.__module__.startswith(("lightning", "pytorch_lightning"))


def _numbered(name: str, found: list[Any]) -> dict[str, Any]:
    """Return one object under a name, several with their numbers."""
    return {name: found[0]} if len(found) == 1 else {f"{name}_{number}": each for number, each in enumerate(found)}
