"""The state of an optimizer by the names of its parameters, so that it reshards.

torch's functions do the naming. What they do besides is prevented or undone here: they let an optimizer that has no
state yet make one by a step on zero gradients, which counts as a step afterwards, and leaves learning rates at 0 where
it fails; they load none for a parameter that is frozen at the time; they cast what they load to the dtype of its
parameter; they turn keys of nested state into texts; and they stumble over empty parameter groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ckptman._torch_compat import full_names
from ckptman.errors import ConfigError
from ckptman.state.trainable import module_of

GROUPS = "param_groups."
_NAMES = "param_names"
"""What a group of an optimizer has besides that was made of named parameters."""
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def model_of(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> torch.nn.Module:
    """The module in `state` whose parameters an optimizer updates. Raises: ConfigError if there is none."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for value in state.values():
        module = module_of(value)
        if module is not None and wanted <= {id(each) for each in module.parameters()}:
            return module
    raise ConfigError(
        "the state holds an optimizer but not the module whose parameters it updates: add the module beside it "
        "(one module that holds all of them), because an optimizer is saved by its parameters' names"
    )


def get_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`state.<parameter>.<name>` and `param_groups.<parameter>.<name>`, with the live tensors.

    An optimizer that has not stepped yet has no `state`, and stays so.
    """
    with _without_empty_groups(optimizer):
        return _by_name(model, optimizer)


def get_state_to_fill(model: torch.nn.Module, optimizer: torch.optim.Optimizer, saved: Iterable[str]) -> dict[str, Any]:
    """As `get_state`, of an optimizer that has made its state for every parameter of which `saved` names an entry."""
    parameters = _with_state(model, optimizer, saved)
    with _without_empty_groups(optimizer), _training_only(optimizer, parameters):
        _make_state(optimizer, [each for each in parameters if not optimizer.state.get(each)])
        return _by_name(model, optimizer)


def set_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
    """Give an optimizer what was saved. Parameters that had no state then have none again."""
    group_of = {id(each): group for group in optimizer.param_groups for each in group["params"]}
    parameters = _parameters_of(model, optimizer)
    for entry, value in values.items():
        if entry.startswith(GROUPS):  # torch gives a group the settings that it has already, and no others
            name, _, key = entry.removeprefix(GROUPS).rpartition(".")
            group_of.get(id(parameters.get(name)), {}).setdefault(key, value)
    chosen = _with_state(model, optimizer, values)
    made = {each: optimizer.state[each] for each in parameters.values() if each in optimizer.state}
    with _without_empty_groups(optimizer), _training_only(optimizer, chosen), _without_first_step(optimizer):
        set_optimizer_state_dict(model, optimizer, values, options=_FLAT)
    for name, parameter in parameters.items():
        if parameter in optimizer.state:
            loaded = optimizer.state[parameter]
            optimizer.state[parameter] = _as_made(loaded, made.get(parameter, {}), f"state.{name}", values)


def groups_by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The number of the group of each parameter that an optimizer updates, by the parameter's names."""
    numbers = {id(each): number for number, group in enumerate(optimizer.param_groups) for each in group["params"]}
    return {name: numbers[id(each)] for name, each in _parameters_of(model, optimizer).items()}


def parameters_with_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    """The names of the parameters that an optimizer has state of."""
    return {name for name, each in _parameters_of(model, optimizer).items() if optimizer.state.get(each)}


@contextmanager
def as_before_on_error(values: Iterable[object]) -> Iterator[None]:
    """Whatever fails inside, the optimizers among `values` have the state and settings of before, and no others."""
    optimizers = [each for each in values if isinstance(each, torch.optim.Optimizer)]
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
    return entry.removeprefix("state.").rpartition(".")[0] if entry.startswith("state.") else None


def _by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    try:
        with _without_first_step(optimizer):
            return dict(get_optimizer_state_dict(model, optimizer, options=_FLAT))
    except (NotImplementedError, KeyError) as error:
        raise ConfigError(
            f"the state of {type(optimizer).__name__} cannot be saved by the names of its parameters ({error!r}): put "
            f"an object into the state whose state_dict and load_state_dict are those of the optimizer. It is saved as "
            f"it is then, and does not reshard"
        ) from error


def _with_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, entries: Iterable[str]
) -> list[torch.nn.Parameter]:
    """The parameters of an optimizer that have state among these entries."""
    names = set()
    for entry in entries:
        parameter = parameter_of(entry)
        while parameter and parameter not in names:  # of nested state, `<parameter>.<key>` is a name too
            names.add(parameter)
            parameter = parameter.rpartition(".")[0]
    return list({each: None for name, each in _parameters_of(model, optimizer).items() if name in names})


def _parameters_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """Those that an optimizer updates, by all of their names."""
    own = {id(each) for group in optimizer.param_groups for each in group["params"]}
    found = [(name, each) for name, each in model.named_parameters(remove_duplicate=False) if id(each) in own]
    return {fqn: each for name, each in found for fqn in full_names(model, name)}


def _make_state(optimizer: torch.optim.Optimizer, parameters: Collection[torch.nn.Parameter]) -> None:
    """Make the state of parameters, to be filled: by a step on zero gradients, at a learning rate of 0."""
    if not parameters:
        return
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    for parameter in parameters:
        zeros = torch.zeros_like(parameter)
        parameter.grad = zeros.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else zeros
    try:
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        _step(optimizer)
    finally:
        for group, rate in rates:
            group["lr"] = rate
        for parameter in parameters:
            parameter.grad = None


def _step(optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.step()
    except Exception as error:  # noqa: BLE001 whatever it is, it may want a closure
        try:
            optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type,return-value]
        except Exception:  # noqa: BLE001
            raise error from None


def _as_made(loaded: dict[Any, Any], made: dict[Any, Any], path: str, saved: Mapping[str, Any]) -> dict[Any, Any]:
    """What torch has loaded, with the keys that the optimizer has `made`, which torch turns into texts, and with the
    dtypes that were saved, which torch casts to that of the parameter."""
    keys = {str(key): key for key in made}
    state: dict[Any, Any] = {}
    for name, value in loaded.items():
        key, exact = keys.get(str(name), name), saved.get(f"{path}.{name}")
        if isinstance(value, dict):
            inner = made.get(key)
            value = _as_made(value, inner if isinstance(inner, dict) else {}, f"{path}.{name}", saved)
        elif key != "step" and isinstance(exact, torch.Tensor) and type(value) is type(exact):  # steps are not cast
            cast = value.shape == exact.shape and value.dtype != exact.dtype
            value = exact.to(value.device) if cast else value
        state[key] = value
    return state


@contextmanager
def _without_first_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, torch takes it that an optimizer that has no state has made it, and makes no step of its own."""
    untouched = not optimizer.state
    for parameter in [each for group in optimizer.param_groups for each in group["params"]] if untouched else ():
        optimizer.state[parameter] = {}
    try:
        yield
    finally:
        for parameter in [each for each, state in optimizer.state.items() if untouched and not state]:
            del optimizer.state[parameter]


@contextmanager
def _training_only(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Inside, the other parameters of an optimizer are frozen, these are not, and none has a gradient."""
    chosen = {id(each) for each in parameters}
    before = [(each, each.requires_grad, each.grad) for group in optimizer.param_groups for each in group["params"]]
    try:
        for each, requires_grad, _ in before:
            each.grad = None
            if requires_grad != (id(each) in chosen):
                each.requires_grad_(not requires_grad)
        yield
    finally:
        for each, requires_grad, gradient in before:
            if each.requires_grad != requires_grad:
                each.requires_grad_(requires_grad)
            each.grad = gradient


@contextmanager
def _without_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, an optimizer has no empty groups, and no `param_names`: torch would take them for a setting."""
    groups = optimizer.param_groups
    names = [group.pop(_NAMES, None) for group in groups]
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        # Loading puts new groups in place of those it was given.
        others = iter(optimizer.param_groups)
        optimizer.param_groups = [next(others) if group["params"] else group for group in groups]
        for group, named in zip(optimizer.param_groups, names):
            if named is not None:
                group[_NAMES] = named
