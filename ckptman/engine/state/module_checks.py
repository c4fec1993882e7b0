"""What a module cannot take back: a state dict may have names that no load knows, and buffers may have another form.

A new module has its buffers as it makes them, and a restore fills what is there. A module that loads itself may make
room for another shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parameter import is_lazy

from ckptman._torch_compat import buffers_of, full_names, loads_itself, takes_more
from ckptman.engine.state.modules import loads_as_a_whole, module_of
from ckptman.engine.state.named_state import added_entries
from ckptman.errors import ConfigError, warn_only

_EXTRA = "_extra_state"


def refuse_one_way_modules(state: Mapping[str, Any], names: Collection[str]) -> None:
    """Refuse modules that give entries which are neither parameters nor buffers, and have no code that could take them.
    Nothing is loaded for it: a load may change more than what it is given. A module with a load of its own is believed.

    Args:
        names: the flat names of what is saved.

    Raises: ConfigError.
    """
    for key, module in state.items():
        if not isinstance(module, torch.nn.Module):
            continue
        unknown = [each for each in added_entries(key, module, names) if _EXTRA not in each.split(".")]
        if not unknown or loads_as_a_whole(module):
            continue
        modules = [(prefix, each) for name, each in module.named_modules() for prefix in _prefixes(module, name)]
        for entry in unknown:
            above = [(prefix, each) for prefix, each in modules if entry.startswith(prefix)]
            if not any(takes_more(each) for _, each in above):
                prefix, owner = max(above, key=lambda pair: len(pair[0]))
                is_frozen = not any(each.requires_grad for each in owner.parameters())
                frozen = ", or put ckptman.Trainable(module) into the state, which leaves out what is frozen"
                kind = type(owner).__name__
                raise ConfigError(
                    f"{f'{key}.{prefix}'.rstrip('.')} ({kind}) saves {entry.removeprefix(prefix)!r}, which is neither "
                    f"a parameter nor a buffer of it, and cannot load it, so no restore would work: give {kind} a "
                    f"_load_from_state_dict() that takes it{frozen if is_frozen else ''}"
                )


def _prefixes(root: torch.nn.Module, name: str) -> list[str]:
    """Return how the entries of a submodule begin in a state dict, in which wrappers have no names."""
    return [each.removesuffix(_EXTRA) for each in full_names(root, f"{name}.{_EXTRA}" if name else _EXTRA)]


_SHOWN = 4
"""So many tensors are named in a warning."""


class _Form(NamedTuple):
    """What a restore compares."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


_NO_FORM = _Form((-1,), torch.uint8)
"""That of a lazy parameter or buffer, which has none yet."""


def prefixes_that_load(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the beginnings of the names that submodules take in a load by code of their own."""
    return tuple(f"{name}." if name else "" for name, each in module.named_modules() if loads_itself(each))


class GrownBuffers:
    """Warns of parameters and buffers whose shape or dtype is not that of a new module, once for each."""

    def __init__(self, state: Mapping[str, object]) -> None:
        self._modules = {key: each for key, value in state.items() if (each := module_of(value)) is not None}
        self._before = self._forms()
        self._told = set[str]()

    def look(self, names: Collection[str], *, warns: bool) -> None:
        """Compare what is to be saved under these names. `warns`: whether this rank does."""
        changes = {name: each for name, *each in self._changes() if name in names and name not in self._told}
        self._told |= changes.keys()
        if changes and warns:
            texts, fixed = zip(*changes.values())
            more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
            it = "it" if len(texts) == 1 else "them"
            room = "" if any(fixed) else f", or give the module a _load_from_state_dict() that makes room for {it}"
            warn_only(
                f"{', '.join(texts[:_SHOWN])}{more}; a new module cannot load {it}, so a restore will refuse "
                f"the checkpoint: create {it} with the final shape and dtype before restore(){room}"
            )

    def _changes(self) -> Iterator[tuple[str, str, bool]]:
        """Yield the name of what has another form, what to say of it, and whether no module could make room for it."""
        for (key, place), now in self._forms().items():
            before = self._before.get((key, place))
            if now == before or _NO_FORM in (now, before):
                continue
            module = self._modules[key]
            for name in full_names(module, place):
                full = f"{key}.{name}"
                if before is None:
                    was = "None" if (key, place) in self._before else "not there"
                    yield full, f"{full} was {was} at the start and is {now} now", True
                elif now is not None and now.dtype != before.dtype:
                    yield full, f"{full} has changed from {before} to {now}", True
                elif now is not None and not name.startswith(prefixes_that_load(module)):
                    is_larger = len(now.shape) == len(before.shape) and all(map(int.__ge__, now.shape, before.shape))
                    told = "grown" if is_larger else "changed"
                    yield full, f"{full} has {told} from {list(before.shape)} to {list(now.shape)}", False

    def _forms(self) -> dict[tuple[str, str], _Form | None]:
        """Return the forms of all parameters and buffers, by key of the state and place; None: it is None."""
        return {
            (key, place): None if tensor is None else _NO_FORM if is_lazy(tensor) else _form_of(tensor)
            for key, module in self._modules.items()
            for place, tensor in _tensors_of(module)
        }


def _form_of(tensor: torch.Tensor) -> _Form:
    return _Form(tuple(tensor.shape), tensor.dtype)


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the parameters and buffers of a module, and the buffers that are None. The parameters of FSDP1 are flat, or
    not, as it needs them."""
    if not any(isinstance(each, FullyShardedDataParallel) for each in module.modules()):
        yield from module.named_parameters(remove_duplicate=False)
    for path, each in module.named_modules(remove_duplicate=False):
        for name, buffer in buffers_of(each).items():
            yield f"{path}.{name}" if path else name, buffer
