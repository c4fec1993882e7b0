"""The state of an optimizer by the names of its parameters, so that it reshards.

It is what `state_dict()` of the optimizer gives, with names in place of numbers: `state.<parameter>.<key>`,
`param_groups.<parameter>.<setting>`, and any entry besides those two under its own name. What would not come back from
such names as it was is saved as a whole, and is not resharded.

A restore gives all of it to `load_state_dict()`, and compares what the optimizer has then. No step is made for it.

Beside it: what a script asks of its optimizers and schedules, and a restore replaces by what was saved.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim.lr_scheduler import LRScheduler
from xxhash import xxh3_128_hexdigest

from ckptman.engine.state.exact_load import load_exactly, optimizers_in
from ckptman.engine.state.local_shards import empty_in_order
from ckptman.engine.state.modules import module_of, named_in_full
from ckptman.errors import ConfigError
from ckptman.storage.format.value_codec import SEQUENCES, TensorRef

GROUPS = "param_groups."
WHOLE = "state_dict"
"""The entry of an optimizer that is saved as a whole."""
PLAIN_STATE = "ckptman.plain_tensors"
"""The entry that names the state of sharded parameters that is no DTensor. No optimizer has an entry with a point."""
ORDER = "ckptman.parameters"
"""The entry beside `WHOLE` that names the parameters in their order."""
STATE = "state."
NO_SETTINGS = ("params", "param_names")
"""What a group of an optimizer has besides its settings."""
OF_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""What schedules of torch add to the groups of an optimizer."""
_REMEDY = (
    "put ckptman.PerRank(optimizer) in its place: it is saved as it is then, for each rank, and goes on with as many "
    "ranks as before"
)


_REMEDY_FOR_SHARDS = (
    "put it into the state without ckptman.PerRank, or, in its place, each optimizer that it is made of. "
    "Sharded tensors are saved as state.<parameter>.<key>, and need a state dict in the form of torch's"
)


def parameters_of(key: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The parameters that an optimizer updates, by all of their names: those in the one module of the state that has
    all of them; or `<entry>.<name>`, where they are in several, or are tensors of the state themselves.

    Args:
        key: the entry of the optimizer, for messages.

    Raises: ConfigError, a parameter is in no entry of the state.
    """
    found = _known_parameters(optimizer, state)
    known = {id(each) for each in found.values()}
    for number, group in enumerate(_inner(optimizer).param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ConfigError(
                    f"the optimizer {key!r} updates a parameter that is in no module of the state, so it has no name "
                    f"to be saved by: number {place} of group {number}, {list(parameter.shape)} {parameter.dtype}. Add "
                    f"the module that has it (a tensor of its own: as torch.nn.ParameterDict), or {_REMEDY}"
                )
    return found


def names_in_order(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> list[str]:
    """The first name of each parameter, in the order of the groups; "" for one that is in no entry of the state."""
    names: dict[int, str] = {}
    for name, parameter in _known_parameters(optimizer, state).items():
        names.setdefault(id(parameter), name)
    return [names.get(id(each), "") for group in _inner(optimizer).param_groups for each in group["params"]]


def get_state(key: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state and the settings of an optimizer under names, with the live tensors; or all of it as `WHOLE`.

    An optimizer that has not stepped yet has no `state`, and stays so.
    """
    parameters = parameters_of(key, optimizer, state)
    inner = _inner(optimizer)
    whole = inner.state_dict()
    if inner is not optimizer:  # which gets the settings at its next step
        pairs = zip(whole["param_groups"], optimizer.param_groups)
        whole["param_groups"] = [{**group, **outer, "params": group["params"]} for group, outer in pairs]
    _refuse_lost_optimizers(key, inner, whole, state)
    named = _by_name(inner, parameters, whole)
    held = {WHOLE: whole} if named is None else {entry: each for entry, each in named.items() if _is_nested(each)}
    for entry, value in held.items():
        refuse_sharded("the state" if named is None else entry, key, optimizer, value)
    if named is None:
        return {WHOLE: whole, ORDER: names_in_order(optimizer, state)}
    if plain := [entry for entry, each in named.items() if _is_plain_beside_shards(entry, each, parameters)]:
        named[PLAIN_STATE] = plain
    return named


def refuse_sharded(what: str, key: str, holder: object, value: Any) -> None:
    """Refuse DTensors in a value that is saved as it is. Raises: ConfigError."""
    if any(isinstance(each, DTensor) for each in _tensors_in(value)):
        raise ConfigError(
            f"{what} of {type(holder).__name__} ({key!r}) holds sharded tensors in a form that has no names for them, "
            f"so they would not come back: {_REMEDY_FOR_SHARDS}"
        )


def get_state_to_fill(
    key: str,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    saved: Mapping[str, Any],
    form: Callable[[str], tuple[torch.Size, torch.dtype]],
) -> dict[str, Any]:
    """As `get_state`, with a tensor for each that was saved of its parameters: the live one, or a new one.

    Args:
        saved: the entries in the checkpoint.
        form: gives shape and dtype of a saved tensor, by its flat name.
    """
    live = get_state(key, optimizer, state)
    if WHOLE in live:
        live = {}
    if _is_of_another_kind(live, saved):  # it could not use such state
        return live
    parameters = parameters_of(key, optimizer, state)
    live.pop(PLAIN_STATE, None)
    plain = saved.get(PLAIN_STATE, ())
    if plain:
        live[PLAIN_STATE] = plain
    for entry, value in saved.items():
        is_setting = entry.startswith(GROUPS)
        parameter = parameters.get(entry.removeprefix(GROUPS if is_setting else STATE).rpartition(".")[0])
        if parameter is None or isinstance(live.get(entry), torch.Tensor) or (is_setting and entry in live):
            continue
        if isinstance(value, TensorRef):
            is_sharded = entry not in plain
            live[entry] = _empty_for(parameter, entry, value.order, *form(value.name), is_sharded=is_sharded)
        else:
            live[entry] = value
    return live


def set_state(key: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Give an optimizer what was saved. Parameters that had no state then have none again.

    Raises: ConfigError, the optimizer has not taken it.
    """
    inner = _inner(optimizer)
    given = values[WHOLE] if WHOLE in values else _by_number(inner, parameters_of(key, optimizer, state), values)
    load_exactly(inner, given)
    if inner is not optimizer:  # gives its own settings to the inner one at each step
        for outer, group in zip(optimizer.param_groups, inner.param_groups):
            outer.update({name: value for name, value in group.items() if name != "params"} if group["params"] else {})


def groups_by_name(key: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, int]:
    """The number of the group of each parameter that an optimizer updates, by the parameter's names."""
    groups = _inner(optimizer).param_groups
    numbers = {id(each): number for number, group in enumerate(groups) for each in group["params"]}
    return {name: numbers[id(each)] for name, each in parameters_of(key, optimizer, state).items()}


def parameters_with_state(key: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> set[str]:
    """The names of the parameters that an optimizer has state of."""
    has = _inner(optimizer).state
    return {name for name, each in parameters_of(key, optimizer, state).items() if has.get(each)}


@contextmanager
def as_before_on_error(values: Iterable[object]) -> Iterator[None]:
    """Whatever fails inside, the optimizers among `values` have the state and settings of before, and no others."""
    optimizers = [_inner(each) for each in values if isinstance(each, torch.optim.Optimizer)]
    before = [(each.state, {id(parameter) for parameter, had in each.state.items() if had}) for each in optimizers]
    settings = [(group, dict(group)) for each in optimizers for group in each.param_groups]
    try:
        yield
    except BaseException:
        for state, known in before:
            for parameter in [each for each in state if id(each) not in known]:
                del state[parameter]
        for group, had in settings:
            group.clear()
            group.update(had)
        raise


def parameter_of(entry: str) -> str | None:
    """The parameter that an entry `state.<parameter>.<name>` belongs to; None for other entries."""
    return entry.removeprefix(STATE).rpartition(".")[0] if entry.startswith(STATE) else None


def _is_of_another_kind(live: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Return whether each of two optimizers has settings that the other one lacks, but for those of schedules."""
    here, there = ({each.rpartition(".")[2] for each in side if each.startswith(GROUPS)} for side in (live, saved))
    return bool(there - here - {*OF_SCHEDULES}) and bool(here - there)


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that has the state: of a ZeroRedundancyOptimizer, that of the parameters of this rank."""
    inner = getattr(optimizer, "optim", None) if type(optimizer).__name__ == "ZeroRedundancyOptimizer" else None
    return optimizer if inner is None else inner


def _known_parameters(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the parameters of an optimizer that are in the state, by all of their names."""
    wanted = {id(parameter) for group in _inner(optimizer).param_groups for parameter in group["params"]}
    modules = {name: module for name, value in state.items() if (module := module_of(value)) is not None}
    for module in modules.values():
        if wanted <= {id(each) for each in module.parameters()}:
            return dict(_named(module, wanted))
    found: dict[str, torch.Tensor] = {}
    for entry, value in state.items():
        if entry in modules:
            found |= {f"{entry}.{name}": each for name, each in _named(modules[entry], wanted)}
        elif isinstance(value, torch.Tensor) and id(value) in wanted:
            found[entry] = value
    return found


def _named(module: torch.nn.Module, wanted: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the wanted parameters of a module by all of their names, as its state dict has them."""
    for names, each in named_in_full(module):
        if id(each) in wanted:
            for name in names:
                yield name, each


def _refuse_lost_optimizers(
    key: str, outer: torch.optim.Optimizer, whole: Mapping[str, Any], state: Mapping[str, Any]
) -> None:
    """Refuse an optimizer that holds another one whose state is neither in its state dict nor in the state of the run.

    A state dict of its own may hold copies: then tensors of these shapes are enough. Raises: ConfigError.
    """
    saved_apart = {id(each) for value in state.values() for each in (value, getattr(value, "value", None))}
    others = [each for each in optimizers_in(outer)[1:] if id(each) not in saved_apart]
    if not others:
        return
    saved = [*_tensors_in(whole)]
    known, shapes = {id(each) for each in saved}, Counter(each.shape for each in saved)
    has_own_form = type(outer).state_dict is not torch.optim.Optimizer.state_dict
    for each in others:
        held = [*_tensors_in({**each.state})]
        is_copied = has_own_form and not Counter(tensor.shape for tensor in held) - shapes
        if not is_copied and any(id(tensor) not in known for tensor in held):
            raise ConfigError(
                f"the state_dict() of {type(outer).__name__} ({key!r}) lacks the state of its {type(each).__name__}: "
                f"put each optimizer that it holds into the state as well, under a name of its own"
            )


def _by_name(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], whole: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return a state dict under names; None for one that could not be put together again from them."""
    names: dict[int, str] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), name)
    groups, states = whole.get("param_groups"), whole.get("state")
    if not isinstance(groups, list) or not isinstance(states, dict) or len(groups) != len(optimizer.param_groups):
        return None
    found: dict[str, Any] = {}
    name_of: dict[Any, str] = {}
    for group, live in zip(groups, optimizer.param_groups):
        if len(group.get("params", ())) != len(live["params"]):
            return None
        name_of |= {number: names[id(each)] for number, each in zip(group["params"], live["params"])}
    for number, held in states.items():
        if number not in name_of or not isinstance(held, dict) or not all(map(_is_name, held)):
            return None
        found |= {f"{STATE}{name_of[number]}.{name}": value for name, value in held.items()}
    for group in groups:
        settings = {name: value for name, value in group.items() if name not in NO_SETTINGS}
        if not all(map(_is_name, settings)):
            return None
        for number in group["params"]:
            found |= {f"{GROUPS}{name_of[number]}.{name}": value for name, value in settings.items()}
    besides = {name: value for name, value in whole.items() if name not in ("param_groups", "state")}
    return found | besides if all(map(_is_name, besides)) and WHOLE not in besides else None


def _by_number(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state dict that was saved under names, with the numbers and the empty groups of this optimizer."""
    now = optimizer.state_dict()
    states: dict[int, dict[str, Any]] = {}
    settings: dict[int, dict[str, Any]] = {}
    besides: dict[str, Any] = {}
    for entry, value in values.items():
        prefix = next((each for each in (STATE, GROUPS) if entry.startswith(each)), None)
        if prefix is None:
            besides |= {} if entry == PLAIN_STATE else {entry: value}
            continue
        name, _, key = entry.removeprefix(prefix).rpartition(".")
        if name in parameters:
            (states if prefix == STATE else settings).setdefault(id(parameters[name]), {})[key] = value
    state: dict[Any, dict[str, Any]] = {}
    groups = []
    for group, live in zip(now["param_groups"], optimizer.param_groups):
        made = dict(group)
        for parameter in reversed(live["params"]):
            made |= settings.get(id(parameter), {})
        groups.append(made)
        numbered = zip(group["params"], live["params"])
        state |= {number: states[id(each)] for number, each in numbered if id(each) in states}
    return {**now, **besides, "state": state, "param_groups": groups}


def _is_name(key: object) -> bool:
    """Return whether a key comes back from the end of an entry."""
    return type(key) is str and "." not in key


def _empty_for(
    parameter: torch.Tensor,
    entry: str,
    order: tuple[int, ...],
    shape: torch.Size,
    dtype: torch.dtype,
    *,
    is_sharded: bool,
) -> torch.Tensor:
    """Return a new tensor for state of a parameter, sharded as it is along the dimensions in which they are alike."""
    if not (isinstance(parameter, DTensor) and is_sharded and shape):
        is_step = entry.endswith(".step") and not shape  # which optimizers keep on the CPU, or move there
        return empty_in_order(shape, order, dtype, torch.device("cpu") if is_step else parameter.device)
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    placements = [
        each if isinstance(each, Shard) and _is_alike(shape, parameter.shape, each.dim) else Replicate()
        for each in parameter.placements
    ]
    return empty_dtensor(shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=placements)


def _is_plain_beside_shards(entry: str, value: Any, parameters: Mapping[str, torch.Tensor]) -> bool:
    """Return whether state is a tensor with dimensions, and of another kind than its parameter, a DTensor."""
    is_plain = isinstance(value, torch.Tensor) and value.dim() > 0 and not isinstance(value, DTensor)
    return is_plain and isinstance(parameters.get(parameter_of(entry) or ""), DTensor)


def _is_alike(one: torch.Size, other: torch.Size, axis: int) -> bool:
    return len(one) == len(other) and one[axis] == other[axis]


def _is_nested(value: Any) -> bool:
    return isinstance(value, (dict, *SEQUENCES))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif _is_nested(value):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each)


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
