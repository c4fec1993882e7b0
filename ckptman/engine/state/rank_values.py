"""State that is not the same on every rank: each rank's own, or that of rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from ckptman.engine.state.exact_load import load_exactly
from ckptman.errors import ConfigError

T = TypeVar("T")


class PerRank(Generic[T]):
    """Save a value, or an object with `state_dict`, once for each rank, and give each rank its own back.

        state = {"model": model, "seen": ckptman.PerRank(samples_of_this_rank)}

    Read `state["seen"].value` after a restore: dicts, lists and tensors of the same shape are filled where they are,
    all else is replaced. It is refused on another number of ranks, as nobody can know to whom it would belong there.

    Args:
        value: A plain value, a tensor, a container of them, or an object with `state_dict` and `load_state_dict`.
    """

    per_rank = True
    """Tells the Checkpointer to save this object once for each rank."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"

    def state_dict(self) -> dict[str, Any]:
        """Return the value, and how many ranks there are."""
        return {"value": _state_of(self.value), "world_size": _world_size()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the value that this rank had. Raises: ConfigError: it was saved on another number of ranks."""
        if state["world_size"] != _world_size():
            raise ConfigError(
                f"a value that each of {state['world_size']} ranks has for itself (PerRank) cannot be given to "
                f"{_world_size()}: restore on as many ranks as saved, or leave the entry out of the state and name it "
                f"in restore(unexpected=[...])"
            )
        self.value = _loaded(self.value, state["value"])

    def load_from_other_rank(self, state: Mapping[str, Any], rank: int) -> None:
        """As `load_state_dict`, which refuses it."""
        self.load_state_dict(state)


class FromRank0(Generic[T]):
    """Save the value that rank 0 has, whatever the others have, and give it to all of them.

        state = {"model": model, "log": ckptman.FromRank0({"best": best, "name": name})}

    Read `state["log"].value` after a restore.

    Args:
        value: A plain value, a tensor, a container of them, or an object with `state_dict` and `load_state_dict`.
    """

    from_rank0 = True
    """Tells the Checkpointer to save this object on rank 0 alone."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"FromRank0({self.value!r})"

    def state_dict(self) -> dict[str, Any]:
        """Return the value."""
        return {"value": _state_of(self.value)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the value that rank 0 had, or that was saved without this wrapper."""
        is_wrapped = isinstance(state, Mapping) and set(state) == {"value"}
        self.value = _loaded(self.value, state["value"] if is_wrapped else state)


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _loaded(value: Any, saved: Any) -> Any:
    """Return what was saved, in the object, dict, list or tensor that is there, as far as it fits into it."""
    if isinstance(value, torch.optim.Optimizer):
        load_exactly(value, saved)
    elif hasattr(value, "load_state_dict"):
        value.load_state_dict(saved)
    elif type(value) is dict and type(saved) is dict:
        found = {key: _loaded(value.get(key), each) for key, each in saved.items()}
        value.clear()
        value.update(found)
    elif type(value) is list and type(saved) is list:
        value[:] = [_loaded(value[at] if at < len(value) else None, each) for at, each in enumerate(saved)]
    elif not _is_filled(value, saved):
        return saved
    return value


def _is_filled(value: Any, saved: Any) -> bool:
    if not (isinstance(value, torch.Tensor) and isinstance(saved, torch.Tensor)):
        return False
    if (value.shape, value.dtype) != (saved.shape, saved.dtype):
        return False
    try:
        with torch.no_grad():
            value.copy_(saved)
    except RuntimeError:  # elements of it share memory, or it was made in inference mode
        return False
    return True


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
