"""What frameworks put around the objects of a state. It is saved without them, so that each loads what others saved."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import lru_cache
from typing import Any

_INSIDE = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "lightning.fabric.wrappers._FabricModule": "_forward_module",
    "lightning.fabric.wrappers._FabricOptimizer": "optimizer",
    "lightning_fabric.wrappers._FabricModule": "_forward_module",
    "lightning_fabric.wrappers._FabricOptimizer": "optimizer",
    "lightning.fabric.wrappers._FabricDataLoader": "_dataloader",
    "lightning_fabric.wrappers._FabricDataLoader": "_dataloader",
    "lightning.pytorch.core.optimizer.LightningOptimizer": "optimizer",
    "pytorch_lightning.core.optimizer.LightningOptimizer": "optimizer",
    "accelerate.optimizer.AcceleratedOptimizer": "optimizer",
    "accelerate.scheduler.AcceleratedScheduler": "scheduler",
}
"""Wrapper classes, and the attribute under which each has what it was put around."""


def unwrap(value: object) -> Any:
    """Return the object that frameworks have put wrappers around, such as the module in a compiled DDP module.

    Wrappers within a module are left: torch leaves their names out itself.
    """
    while (name := _inside(type(value))) is not None:  # type: ignore[arg-type]  # mypy: a class has no hash
        value = getattr(value, name)
    return value


def is_prepared_loader(value: object) -> bool:
    """Return whether Accelerate has prepared this loader. It passes for a DataLoader that has a state dict."""
    return any(_class_name(base) == "accelerate.data_loader.DataLoaderAdapter" for base in type(value).__mro__)


class UnwrappedState(MutableMapping[str, Any]):
    """View of a state that has each object without its wrappers. What is set or deleted, is so in the state itself."""

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Any:
        return unwrap(self._state[name])

    def __setitem__(self, name: str, value: Any) -> None:
        self._state[name] = value

    def __delitem__(self, name: str) -> None:
        del self._state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


@lru_cache(maxsize=256)
def _inside(kind: type) -> str | None:
    """Return the attribute under which objects of a class have what they are put around; None: it is no wrapper."""
    return next(filter(None, (_INSIDE.get(_class_name(base)) for base in kind.__mro__)), None)


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
