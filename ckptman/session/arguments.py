"""What users hand to a Checkpointer, checked at once and with a remedy."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, TypeGuard

from ckptman.data.resumable_loader import ResumableLoader
from ckptman.engine.state.generators import RNGState
from ckptman.engine.state.named_state import is_stateful
from ckptman.errors import ConfigError, warn
from ckptman.policies.retention_plan import KeepLast, RetentionPolicy
from ckptman.policies.save_policies import EverySteps, InitTimeInterval, SavePolicy, with_stops
from ckptman.runtime.signals import SignalHandler
from ckptman.runtime.tracker import Tracker
from ckptman.session.watchdog_actions import Setting, hang_timeout_of
from ckptman.storage.catalog.backends.backend import check_folder
from ckptman.storage.format.paths import step_number

MOST_METADATA_BYTES = 64 * 1024
_DETACHED = {"an optimizer": {"state", "param_groups"}, "a schedule": {"last_epoch", "_step_count"}}
"""By what a state dict is known that is a copy. That of a module holds its very tensors."""


def check_arguments(
    root: object,
    state: object,
    retention: object,
    on_full: object,
    nonfinite: object,
    deadline: object,
    timeout_seconds: float,
    watchdog: Setting,
    signals: object,
) -> None:
    """Check what a Checkpointer is made with. Raises: ConfigError."""
    if not isinstance(root, str | os.PathLike) or not str(root):
        raise ConfigError(f"root is the path of a folder, not {root!r}")
    check_folder(root)
    if not isinstance(state, MutableMapping) or not state:
        raise ConfigError("state is a dict of what to save by name, such as {'model': model, 'optimizer': optimizer}")
    for name, value in state.items():
        _warn_of_detached(name, value)
    kinds = set(map(type, state.values()))
    if ResumableLoader in kinds and RNGState not in kinds:
        warn(
            "the state has a ResumableLoader and no RNGState: after a restore, dropout and augmentation would draw "
            "other numbers than the run that nobody stopped. Add ckptman.RNGState() to the state"
        )
    if on_full not in ("fail", "prune"):
        raise ConfigError(f'on_full is "fail" or "prune", not {on_full!r}')
    if on_full == "prune" and retention is None:
        raise ConfigError('on_full="prune" needs a retention policy: without one, nothing may be deleted')
    if nonfinite not in ("keep", "refuse", "ignore"):
        raise ConfigError(f'nonfinite is "keep", "refuse" or "ignore", not {nonfinite!r}')
    if not timeout_seconds > 0:
        raise ConfigError(f"timeout_seconds is a positive number of seconds, not {timeout_seconds!r}")
    if deadline is not None and deadline != "auto" and not isinstance(deadline, int | float):
        raise ConfigError(f"deadline is when the job ends, in unix seconds, or 'auto', or None, not {deadline!r}")
    hang_timeout_of(watchdog, 1, {})
    if not (signals is None or signals == "auto" or isinstance(signals, bool | SignalHandler)):
        raise ConfigError(f'signals is "auto", True, a SignalHandler, or False to listen to none, not {signals!r}')
    if signals is True and threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "signals=True sets signal handlers, and only the main thread can: make the Checkpointer there, or enter a "
            "SignalHandler there and pass it"
        )
    if isinstance(signals, SignalHandler) and not signals.entered:
        raise ConfigError(
            "signals: this SignalHandler was never entered, or its block has ended, so it would note no signal. Say "
            "signals=True, or make the Checkpointer inside `with SignalHandler() as signals:`"
        )


def policies_of(
    save_policy: object, save_on_stop: bool, retention: object
) -> tuple[SavePolicy, RetentionPolicy | None]:
    """Return what decides about saves and deletions; a whole number stands for a policy. Raises: ConfigError."""
    if save_policy is None:
        save_policy = InitTimeInterval()
    elif _is_number(save_policy):
        save_policy = EverySteps(save_policy)
    if not isinstance(save_policy, SavePolicy):
        raise ConfigError(f"save_policy is a policy such as EverySteps(100), or a number of steps, not {save_policy!r}")
    if _is_number(retention):
        retention = KeepLast(retention)
    if retention is not None and not isinstance(retention, RetentionPolicy):
        raise ConfigError(
            f"retention is a policy such as KeepLast(3), a number of checkpoints, or None for all, not {retention!r}"
        )
    return with_stops(save_policy) if save_on_stop else save_policy, retention


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def check_metrics(metrics: object) -> None:
    """Check that metrics have names. Raises: ConfigError."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics are numbers by name, such as {{'loss': loss}}, not a {type(metrics).__name__}")


def metadata_of(metadata: object) -> dict[str, Any]:
    """Return a copy of what is to be noted in each manifest. Raises: ConfigError: JSON cannot hold it."""
    if metadata is None:
        return {}
    remedy = "give a dict of plain values, such as {'config': vars(args), 'commit': '1a2b3c'}"
    if not isinstance(metadata, Mapping):
        raise ConfigError(f"metadata is not a {type(metadata).__name__}: {remedy}")
    try:
        text = json.dumps(dict(metadata))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"metadata cannot be written as JSON ({error}): {remedy}") from None
    if len(text) > MOST_METADATA_BYTES:
        raise ConfigError(
            f"metadata is {len(text):,} bytes of JSON, of at most {MOST_METADATA_BYTES:,}: every look at the root "
            f"reads it. Put what is large into the state"
        )
    copied: dict[str, Any] = json.loads(text)
    return copied


def check_trackers(trackers: object) -> None:
    """Check that these are trackers. Raises: ConfigError."""
    if not isinstance(trackers, Sequence) or not all(isinstance(each, Tracker) for each in trackers):
        raise ConfigError(
            f"trackers is a list of objects of classes that are derived from ckptman.Tracker, not {trackers!r}"
        )
    for number, each in enumerate(trackers):
        if any(each is other for other in trackers[:number]):
            raise ConfigError(
                f"trackers has the same {type(each).__name__} twice: each needs its own object, as each has its thread"
            )


def _warn_of_detached(name: object, value: object) -> None:
    """Warn of what an optimizer or a schedule gave: that neither changes with it, nor loads into it."""
    if not isinstance(value, Mapping) or is_stateful(value):
        return
    for kind, keys in _DETACHED.items():
        if keys <= value.keys():
            warn(
                f"state[{name!r}] is the state_dict() of {kind}: it does not change as that does, and what is restored "
                f"into it does not get there by itself. Put the object itself into the state"
            )


def total_step_number(total_steps: Any) -> int | None:
    """Return the last step of a run as a plain int; None where it is not known. Raises: ConfigError."""
    if total_steps is None:
        return None
    try:
        return step_number(total_steps)
    except ConfigError:
        raise ConfigError(f"total_steps is the last step of the run, or None, not {total_steps!r}") from None
