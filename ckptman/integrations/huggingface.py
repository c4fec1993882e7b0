"""The Trainer of Hugging Face's transformers, saved by ckptman and resumed exactly, in the middle of an epoch too."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler, get_sampler
from accelerate.utils import DistributedType, synchronize_rng_states
from transformers import TrainerCallback, TrainingArguments
from transformers import __version__ as _installed
from transformers.trainer_callback import ExportableState, TrainerControl

from ckptman.api import load
from ckptman.checkpointer import Checkpointer
from ckptman.data.persistent_workers import draw_apart
from ckptman.data.resumable_loader import ResumableLoader
from ckptman.engine.comm.control_group import Channel
from ckptman.engine.state.generators import RNGState
from ckptman.engine.state.modules import Trainable
from ckptman.engine.state.unsaved_values import UnsavedValues
from ckptman.errors import CommitError, ConfigError, MismatchError
from ckptman.integrations.epoch_start import BeforeEpochStart
from ckptman.policies.retention_plan import KeepBest, KeepLast, RetentionPolicy
from ckptman.policies.save_policies import BeforeDeadline, OnStop
from ckptman.run import Run

_Trainer: Any = object
"""What the mixin is mixed with, and finds behind `super()`."""
_STATE = ("epoch", "global_step", "num_input_tokens_seen", "total_flos", "best_metric", "best_global_step")
"""What of a TrainerState is not told by the arguments of the run."""
_NOT_METRICS = ("step", "epoch", "learning_rate", "grad_norm", "total_flos")
"""What is in the log and tells nothing of the model. A norm of gradients is infinite at times, as with fp16."""
_TIMES = ("_runtime", "_per_second")
_TIMEOUT_SECONDS = 1800.0


class CkptmanTrainerMixin(_Trainer):  # type: ignore[misc]
    """Let ckptman save and resume a `transformers.Trainer`, in place of its own checkpoints.

        class ResumableTrainer(CkptmanTrainerMixin, Trainer):
            pass

        trainer = ResumableTrainer(model, args, train_dataset=data, checkpointer=dict(root="runs/first"))
        trainer.train()  # goes on from the newest good checkpoint of the root
        sys.exit(trainer.checkpointer.exit_code)  # 0: finished; 75: saved, run me again

    The arguments of the run say when to save (`save_strategy`, `save_steps`) and what to keep (`save_total_limit`,
    `metric_for_best_model`, `greater_is_better`), unless `checkpointer` does. A run saves at a signal and before its
    deadline, too. `load_best_model_at_end` takes the best of the checkpoints that are there.

    Args:
        *args: As for the Trainer, and so all else.
        checkpointer: The arguments of the `ckptman.Checkpointer` by name, and of its `restore`; `root` has to be there.
            A `state` is saved besides that of the Trainer.

    Attributes:
        checkpointer: The Checkpointer, once `train` has begun.

    Raises:
        ConfigError: `checkpointer` has no root or an argument that there is not; or the Trainer is one that cannot be
            resumed exactly, such as one of DeepSpeed.
    """

    checkpointer: Checkpointer

    def __init__(self, *args: Any, checkpointer: Mapping[str, Any], **kwargs: Any) -> None:
        self._settings, self._restore_settings = _checked(checkpointer)
        if not hasattr(super(), "_run_epoch"):
            raise ConfigError(
                f"transformers {_installed} is too old for CkptmanTrainerMixin: install transformers>=5.4"
            )
        if getattr(kwargs.get("args", args[1] if len(args) > 1 else None), "enable_jit_checkpoint", False):
            raise _refusal("enable_jit_checkpoint and ckptman would both act on a signal", "leave it out")
        super().__init__(*args, **kwargs)
        _refuse_unsupported(self)
        self.callback_handler.callbacks.insert(0, _Watch(self))
        self._unsaved_values = UnsavedValues(self._without_state)
        self._block = contextlib.ExitStack()
        self._generators: dict[str, Any] | None = None
        self._before_epoch: BeforeEpochStart | None = None
        self._ended_step, self._is_saved, self._save_asked, self._epoch_batches = 0, True, False, 0

    # ---- what a program calls ----------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: bool | None = None, **kwargs: Any) -> Any:
        """Train, from the newest good checkpoint of the root on, and return what the Trainer returns.

        Args:
            resume_from_checkpoint: True goes on also with a run that a callback has ended, such as one that stops
                early: without it, that run is over.
            **kwargs: As for the Trainer.

        Raises:
            ConfigError: a folder to resume from, a trial, a root of another program, or a loader without a position.
            SystemExit: with code 75, a signal asked to stop before the first step.
            CkptmanError: what a Checkpointer raises.
        """
        if not isinstance(resume_from_checkpoint, bool | None):
            raise ConfigError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: train() goes on from the newest checkpoint in "
                f"{self._settings['root']} by itself. Leave it out, and give the weights of another run to the model "
                f"(from_pretrained)"
            )
        if kwargs.get("trial") is not None:
            raise ConfigError("a search over hyperparameters makes many runs: give each its own root and Trainer")
        self._goes_on = bool(resume_from_checkpoint)
        with self._block:
            return super().train(**kwargs)

    def get_train_dataloader(self) -> ResumableLoader[Any]:
        """Return the loader of the Trainer with its position: one that overrides this returns a ResumableLoader."""
        loader = super().get_train_dataloader()
        if isinstance(loader, ResumableLoader):
            return loader
        if not hasattr(loader, "base_dataloader"):
            return ResumableLoader(loader)
        if type(loader) is DataLoaderDispatcher and self.args.world_size > 1:
            raise ConfigError(
                "batches that rank 0 reads for all have no position on the others: "
                "set TrainingArguments(accelerator_config={'dispatch_batches': False})"
            )
        # The loader of Accelerate looks one batch ahead, the one in it does not; the Trainer moves the batches.
        sampler = get_sampler(loader)
        if isinstance(sampler, SeedableRandomSampler) and sampler.generator is None:
            sampler.generator = torch.Generator()  # which it would make, and seed, at the start of an epoch
        if (shared := getattr(loader, "synchronized_generator", None)) is not None:
            synchronize_rng_states(loader.rng_types, shared)
        return ResumableLoader(loader.base_dataloader)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loader of the Trainer. Persistent workers do not change what the training draws."""
        return draw_apart(super().get_eval_dataloader(*args, **kwargs))

    # ---- what the loop of the Trainer calls --------------------------------------------------------------------

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        _, steps = super()._init_training_state(*args, **kwargs)
        return _FirstEpoch(self), steps

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        model, loader = super()._prepare_for_training(*args, **kwargs)
        if not isinstance(loader, ResumableLoader):
            raise ConfigError(
                f"get_train_dataloader() of {type(self).__name__} returned a {type(loader).__name__}, whose position "
                f"is not saved: return ckptman.ResumableLoader(DataLoader(...))"
            )
        self._loader = loader
        self._begin()
        return model, loader

    def _run_epoch(self, **kwargs: Any) -> None:
        """Run what is left of an epoch: all, or that behind the batches which a run before consumed."""
        if self._generators is not None:
            self._resume()
        loader, epoch = self._loader, kwargs["epoch"]
        if self.control.should_training_stop:
            return
        if callable(set_epoch := getattr(getattr(loader.loader, "dataset", None), "set_epoch", None)):
            set_epoch(epoch)
        batches: Iterator[Any] = iter(loader)
        self._epoch_batches = _length(loader) or kwargs["steps_in_epoch"]
        left = self._epoch_batches - loader.batch
        if loader.batch and _length(loader) is None:
            first = list(itertools.islice(batches, 1))
            batches, left = itertools.chain(first, batches), left if first else 0
        updates = math.ceil(left / self.args.gradient_accumulation_steps)
        if left:
            kwargs |= {"train_dataloader": batches, "steps_in_epoch": left, "num_update_steps_per_epoch": updates}
            try:
                super()._run_epoch(**kwargs)
            except _Stopped:  # the epoch is not over, and nobody is told that it is
                self.control.should_training_stop = True
                return
        if self.control.should_epoch_stop or (
            not self.control.should_training_stop and next(batches, None) is not None
        ):
            loader.end_epoch()
        self._end_step()
        if self.checkpointer.should_stop():
            self.control.should_training_stop = True

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """End the step before, with all that was logged and evaluated in it; then as the Trainer."""
        self._end_step()
        if self.checkpointer.should_stop():
            raise _Stopped
        return super().get_batch_samples(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if not self.checkpointer.should_stop():  # there may be seconds left, and nothing of it would be saved
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, *_: Any, **__: Any) -> None:
        self._save_asked = "save_policy" not in self._settings

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._generators is not None:  # nothing was left to train
            self._resume()
        if not self._is_saved and not self.checkpointer.should_stop():
            with contextlib.suppress(CommitError):  # of a save before: this one makes up for it, or fails as well
                self.checkpointer.wait()
            self._save_step("the run ended")
        self.checkpointer.close()
        self.state.best_model_checkpoint = None
        if self.args.load_best_model_at_end and not self.checkpointer.should_stop():
            self.state.best_model_checkpoint = self._best_checkpoint()
        return super()._finalize_training(*args, **kwargs)

    def _load_best_model(self) -> None:
        load({"model": self._saved_model()}, self.state.best_model_checkpoint)

    # ---- the run -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Open the Checkpointer, and restore."""
        self._progress = _Progress(self)
        state = {
            "model": self._saved_model(),
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "data": self._loader,
            "rng": RNGState(),
            "trainer": self._progress,
            "accumulated": _Accumulated(self),
        }
        if self.accelerator.scaler is not None:
            state["scaler"] = self.accelerator.scaler
        more = self._settings.get("state", {})
        if taken := state.keys() & more.keys():
            raise ConfigError(f"checkpointer: the state of the Trainer has {', '.join(sorted(taken))}: rename yours")
        settings = {
            "save_policy": OnStop() | BeforeDeadline(),
            "retention": _retention(self.args),
            "signals": True,
            "total_steps": self.state.max_steps if self.state.max_steps > 0 else None,
            **self._settings,
            "state": {**state, **more},
        }
        self.checkpointer = self._block.enter_context(Checkpointer(**settings))
        try:
            restored = self.checkpointer.restore(**self._restore_settings)
        except MismatchError as error:
            if "trainer" not in error.missing:
                raise
            raise ConfigError(
                f"{error.where} was not saved by a Trainer, but by another program: give this run a root of its own, "
                f"and the weights to its model (ckptman export, from_pretrained)"
            ) from None
        self._ended_step, self._is_saved, self._save_asked = self.state.global_step, True, False
        if restored:
            self._generators = RNGState().state_dict()
            self._progress.fit_to_epochs()

    def _resume(self) -> None:
        """Put back what the Trainer has begun anew since the restore, or used."""
        assert self._generators is not None
        RNGState().load_state_dict(self._generators)
        self._generators = None
        self.checkpointer.state["accumulated"].put_back()
        if self._before_epoch is not None:
            warns = self.is_world_process_zero()
            self._before_epoch.put_back(hook="on_epoch_begin", earlier="on_epoch_end", warns=warns)
            self._before_epoch = None

    def _begin_epoch(self) -> None:
        """Note what the callbacks that follow may change, if they were told of this epoch before it was saved."""
        if self._generators is not None and self._loader.batch:
            holders = [(self._progress.of_callbacks, self._progress.load_callbacks)]
            module, schedulers = self.accelerator.unwrap_model(self.model), [self.lr_scheduler]
            self._before_epoch = BeforeEpochStart(module, [self.optimizer], schedulers, holders)

    def _end_step(self) -> None:
        """End the last step, if it is not ended, and save if it was asked for."""
        step, reason = self.state.global_step, None
        if step != self._ended_step:
            self._ended_step = step
            reason = self.checkpointer.step(step, _metrics(self.state.log_history, step))
            self._is_saved = reason is not None
            if self.is_world_process_zero():
                self._unsaved_values.end_step(is_saved=self._is_saved)
        if self._save_asked and reason is None:
            self._save_step("asked for by the Trainer")
        self._save_asked = False

    def _save_step(self, reason: str) -> None:
        step = self.state.global_step
        self.checkpointer.save(step, _metrics(self.state.log_history, step), reason=reason)
        self._is_saved = True

    def _without_state(self) -> dict[Any, str]:
        """Return the callbacks of the user that transformers asks for no state, and the Trainer, with how they would
        save what they keep."""
        remedy = "inherit from transformers.trainer_callback.ExportableState and return such values from state()"
        found: dict[Any, str] = {
            each: remedy
            for each in self.callback_handler.callbacks
            if not isinstance(each, ExportableState | _Watch) and not type(each).__module__.startswith("transformers.")
        }
        found[self] = (
            "keep such values in an object with state_dict() and load_state_dict(), and that in checkpointer['state']"
        )
        return found

    def _saved_model(self) -> torch.nn.Module | Trainable:
        """Return the model; of adapters on a base, what is trained of it."""
        is_adapter = hasattr(self.accelerator.unwrap_model(self.model), "peft_config")
        return Trainable(self.model_wrapped) if is_adapter else self.model_wrapped

    def _best_checkpoint(self) -> str | None:
        rule = _keep_best(self.args)
        channel = Channel(self._settings.get("timeout_seconds", _TIMEOUT_SECONDS))
        try:
            best = channel.run_on_leader(lambda: Run(self.checkpointer.root).best(rule.metric, rule.mode))
        finally:
            channel.close()
        return None if best is None else str(best.path)


class _Stopped(Exception):
    """Leaves an epoch where a run was asked to stop."""


class _FirstEpoch:
    """The number of the first epoch of a Trainer that has one left, known when it has restored."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __index__(self) -> int:
        state = self._trainer.state
        is_over = self._trainer._progress.is_over or state.global_step >= state.max_steps
        return sys.maxsize if is_over else int(self._trainer._loader.epoch)


class _Progress:
    """What the Trainer and its callbacks know, besides the arguments of the run; that of rank 0 is saved."""

    from_rank0 = True
    """Tells the Checkpointer to save this object on rank 0 alone: times in the log differ between ranks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.is_over = False
        """Whether a callback has ended the run before its last step."""
        length = _length(trainer._loader)
        self._epoch_steps = None if length is None else math.ceil(length / trainer.args.gradient_accumulation_steps)
        self._saved_epoch_steps = self._epoch_steps
        self._log, self._logged = "", 0

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        state, control = self._trainer.state, self._trainer.control
        return {
            **{name: _plain(getattr(state, name)) for name in _STATE},
            "log_history": self._log_lines(state.log_history),
            "callbacks": self.of_callbacks(),
            "epoch_steps": self._epoch_steps,
            "is_over": control.should_training_stop and state.global_step < state.max_steps,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take what was saved; of callbacks, for those of the same class."""
        state = self._trainer.state
        for name in _STATE:
            setattr(state, name, saved[name])
        state.log_history = [json.loads(line) for line in saved["log_history"].splitlines()]
        self.load_callbacks(saved["callbacks"])
        self.is_over = saved["is_over"] and not self._trainer._goes_on
        self._saved_epoch_steps = saved["epoch_steps"]

    def of_callbacks(self) -> dict[str, list[Any]]:
        """Return what the callbacks save of themselves, by their classes."""
        return {name: [each.state()["attributes"] for each in found] for name, found in self._callbacks()}

    def load_callbacks(self, saved: Mapping[str, Any]) -> None:
        """Give it back to those of the same class."""
        for name, found in self._callbacks():
            for callback, attributes in zip(found, saved.get(name, [])):
                vars(callback).update(attributes)

    def fit_to_epochs(self) -> None:
        """Let the last step be that of the last epoch, also where epochs had another number of steps before."""
        args, state = self._trainer.args, self._trainer.state
        if args.max_steps <= 0 and self._epoch_steps and self._saved_epoch_steps != self._epoch_steps:
            left = round((args.num_train_epochs - state.epoch) * self._epoch_steps, 6)
            state.max_steps = state.global_step + math.ceil(left)

    def _callbacks(self) -> list[tuple[str, list[Any]]]:
        found: dict[str, list[Any]] = {}
        for each in self._trainer.callback_handler.callbacks:
            if isinstance(each, ExportableState) and not isinstance(each, TrainerControl):
                found.setdefault(type(each).__name__, []).append(each)
        return list(found.items())

    def _log_lines(self, history: list[dict[str, Any]]) -> str:
        """Return a line of JSON for each entry. As one text: it is asked for at each step, and grows."""
        if len(history) < self._logged:
            self._log, self._logged = "", 0
        for entry in history[self._logged :]:
            self._log += json.dumps(entry, default=float) + "\n"
        self._logged = len(history)
        return self._log


class _Accumulated:
    """What each rank adds up until it is logged."""

    per_rank = True
    """Tells the Checkpointer to save this object once for each rank."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._saved: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums. The loss stays on its device."""
        trainer = self._trainer
        loss = getattr(trainer, "_tr_loss", torch.zeros((), device=trainer.args.device))
        logged = getattr(trainer, "_globalstep_last_logged", 0)
        return {"loss": loss.detach().clone(), "flos": trainer.current_flos, "logged_step": logged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep them for `put_back`."""
        self._saved = dict(state)

    def load_from_other_rank(self, state: Mapping[str, Any], rank: int) -> None:
        """As `load_state_dict`, on a rank that there was none of: losses are averaged over the ranks, flos added up."""
        self._saved = {**state, "flos": 0}

    def put_back(self) -> None:
        """Go on with the sums, now that the Trainer has set its own to 0."""
        if not self._saved:
            return
        trainer, loss = self._trainer, self._saved["loss"].to(self._trainer.args.device)
        trainer._tr_loss, trainer.current_flos = loss, self._saved["flos"]
        trainer._globalstep_last_logged = self._saved["logged_step"]
        trainer._total_loss_scalar -= loss.item()  # the mean that train() returns is one of its own steps


class _Watch(TrainerCallback):  # type: ignore[misc]
    """The first callback of a Trainer: what the others see is that of the run that nobody stopped."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let an epoch that goes on begin once."""
        self._trainer._begin_epoch()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the epoch by all of its batches, and not by those that were left of it."""
        loader = self._trainer._loader
        state.epoch = loader.epoch + loader.batch / self._trainer._epoch_batches

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell the watchdog that an evaluation goes on."""
        if self._trainer.is_in_train:
            self._trainer.checkpointer.beat()


def _checked(settings: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the Checkpointer, and those of its `restore`. Raises: ConfigError."""
    if not isinstance(settings, Mapping) or "root" not in settings:
        raise ConfigError(
            f'checkpointer holds the arguments of a Checkpointer, dict(root="runs/first", ...), not {settings!r}'
        )
    making, restoring = (inspect.signature(each).parameters for each in (Checkpointer, Checkpointer.restore))
    if unknown := [str(name) for name in settings if name not in {*making, *restoring}]:
        raise ConfigError(
            f"checkpointer has {', '.join(unknown)}, which no Checkpointer takes: it takes {', '.join(making)}"
        )
    return (
        {name: value for name, value in settings.items() if name in making},
        {name: value for name, value in settings.items() if name in restoring},
    )


def _refuse_unsupported(trainer: Any) -> None:
    """Refuse what cannot be resumed exactly. Raises: ConfigError."""
    args, plugin = trainer.args, getattr(trainer.accelerator.state, "fsdp_plugin", None)
    of_others = trainer.is_deepspeed_enabled or trainer.accelerator.distributed_type == DistributedType.MEGATRON_LM
    for is_so, what, remedy in (
        (of_others, "DeepSpeed and Megatron-LM keep a state of their own", "use FSDP2, or their own checkpoints"),
        (
            plugin is not None and plugin.fsdp_version == 1,
            "FSDP1 has flat parameters",
            "set fsdp_config={'fsdp_version': 2}",
        ),
        (args.n_gpu > 1, "one process for several GPUs has no generators of its own", "start with torchrun"),
        (args.auto_find_batch_size, "auto_find_batch_size changes what a position means", "set the batch size"),
        (args.save_only_model, "save_only_model saves what no run can go on from", "leave it out"),
    ):
        if is_so:
            raise _refusal(what, remedy)


def _refusal(what: str, remedy: str) -> ConfigError:
    return ConfigError(f"CkptmanTrainerMixin cannot train this: {what}. Remedy: {remedy}")


def _retention(args: TrainingArguments) -> RetentionPolicy | None:
    limit = args.save_total_limit
    if limit is None or limit <= 0:
        return None
    if args.metric_for_best_model is None:
        return KeepLast(limit)
    return KeepLast(max(1, limit - 1)) | _keep_best(args)


def _keep_best(args: TrainingArguments) -> KeepBest:
    metric = args.metric_for_best_model or "loss"
    metric = metric if metric.startswith("eval_") else f"eval_{metric}"
    return KeepBest(metric, mode="max" if args.greater_is_better else "min")


def _metrics(log: list[dict[str, Any]], step: int) -> dict[str, Any]:
    """Return what was logged and evaluated in this step, by name."""
    entries = list(itertools.takewhile(lambda entry: entry.get("step") == step, reversed(log)))
    return {
        name: value
        for entry in reversed(entries)
        for name, value in entry.items()
        if name not in _NOT_METRICS and not name.endswith(_TIMES)
    }


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _length(loader: ResumableLoader[Any]) -> int | None:
    try:
        return len(loader)
    except TypeError:  # of an iterable dataset
        return None
