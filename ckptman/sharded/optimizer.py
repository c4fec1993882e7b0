"""The state of an optimizer by the names of its parameters, so that it reshards.

torch's functions do the naming. What they do besides is undone here: they let an optimizer that has no state yet make
one by a step on zero gradients, which counts as a step afterwards; and they stumble over empty parameter groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _get_fqns,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ckptman.errors import ConfigError

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def model_of(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> torch.nn.Module:
    """The module in `state` whose parameters an optimizer updates. Raises: ConfigError if there is none."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for value in state.values():
        if isinstance(value, torch.nn.Module) and wanted <= {id(each) for each in value.parameters()}:
            return value
    raise ConfigError(
        "the state holds an optimizer but not the module whose parameters it updates: add the module beside it "
        "(one module that holds all of them), because an optimizer is saved by its parameters' names"
    )


def get_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, create: bool = False) -> dict[str, Any]:
    """`state.<parameter>.<name>` and `param_groups.<parameter>.<name>`, with the live tensors.

    An optimizer that has not stepped yet has no `state`, and stays so, unless `create`.
    """
    untouched = not optimizer.state
    with _without_empty_groups(optimizer):
        values: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=_FLAT))
    if untouched and not create:
        optimizer.state.clear()
        return {name: value for name, value in values.items() if not name.startswith("state.")}
    return values


def set_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Any], not_started: set[str]
) -> None:
    """Give an optimizer what was saved; `not_started` names parameters that had no state when it was saved."""
    with _without_empty_groups(optimizer):
        set_optimizer_state_dict(model, optimizer, values, options=_FLAT)
    if not_started:
        for name, parameter in model.named_parameters():
            if not_started & _get_fqns(model, name):
                optimizer.state.pop(parameter, None)


def parameter_of(entry: str) -> str | None:
    """The parameter that an entry `state.<parameter>.<name>` belongs to; None for other entries."""
    return entry.removeprefix("state.").rpartition(".")[0] if entry.startswith("state.") else None


@contextmanager
def _without_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        # Loading puts new groups in place of those it was given.
        others = iter(optimizer.param_groups)
        optimizer.param_groups = [next(others) if group["params"] else group for group in groups]
