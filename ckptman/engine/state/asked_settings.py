"""What a script asks of its optimizers and schedules, and a restore replaces by what was saved."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from xxhash import xxh3_128_hexdigest

_Setting = tuple[str, int, str]
"""Entry of the state, number of the group, and name."""
_SHOWN = 8
"""So many changes are named."""
_LONG = 200
_DRIVEN = ("lr", "momentum", "betas")


def asked_settings(state: Mapping[str, Any]) -> dict[_Setting, Any]:
    """Return the arguments that optimizers and schedules were made with, as they hold them, by entry, group and name. A
    learning rate under a schedule is the one that the schedule began with."""
    found: dict[_Setting, Any] = {}
    for entry, value in state.items():
        if isinstance(value, torch.optim.Optimizer):
            holders = [
                {**group, "lr": group.get("initial_lr", group.get("lr"))}
                if "base_momentum" not in group
                else {name: each for name, each in group.items() if name not in ("lr", "momentum", "betas")}
                for group in value.param_groups
            ]
        elif isinstance(value, LRScheduler):
            holders = [{name: each for name, each in vars(value).items() if name != "last_epoch"}]
        else:
            continue
        arguments = inspect.signature(type(value).__init__).parameters
        for number, holder in enumerate(holders):
            for name in arguments.keys() & holder.keys():
                held = holder[name].item() if _is_number(holder[name]) else holder[name]
                if isinstance(held, int | float | str | tuple):
                    found[entry, number, name] = held
    return found


def texts_of(asked: Mapping[_Setting, Any]) -> dict[str, str]:
    """Return what was asked for, by entry and name, as text, to compare it with what is asked for later. Text that is
    long, as of many groups, is a digest."""
    by_name: dict[str, list[str]] = {}
    for (entry, _, name), value in sorted(asked.items()):
        by_name.setdefault(f"{entry}.{name}", []).append(repr(value))
    texts = {name: each[0] if len({*each}) == 1 else ", ".join(each) for name, each in by_name.items()}
    return {name: each if len(each) <= _LONG else xxh3_128_hexdigest(each.encode()) for name, each in texts.items()}


def replaced(asked: Mapping[_Setting, Any], now: Mapping[_Setting, Any], at_the_start: Mapping[str, str]) -> str:
    """Return which of the settings that were asked for are others now, in words; "": none is. What the script asks for
    as it did when the run began, training has changed. Where that is not known, what a schedule drives is left out."""
    texts_asked = texts_of(asked)
    texts = dict.fromkeys(
        f"{name} {_text(asked[entry, number, name])} -> {_text(value)}"
        for (entry, number, name), value in sorted(now.items())
        if (entry, number, name) in asked
        and asked[entry, number, name] != value
        and (full := f"{entry}.{name}")
        and (at_the_start[full] != texts_asked[full] if full in at_the_start else name not in _DRIVEN)
    )
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join([*texts][:_SHOWN]) + more


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
