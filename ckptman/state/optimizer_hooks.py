"""Optimizer steps: counted, to know whether the state still is that of the step whose name it would get, and held back
while what they change is being copied."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckptman.state.local_shards import local_parts
from ckptman.state.named_state import Snapshot


class OptimizerHooks:
    """Counts the steps that the optimizers of a state make, and calls `before` ahead of each.

    `others`: what other optimizers of this process have made a step since this was cleared. One may be within another
    object of the state, and what the fused kind changes is not counted by torch.
    """

    def __init__(self, state: Mapping[str, Any], before: Callable[[], None]) -> None:
        self._before = before
        self.count = 0
        """Steps so far of the optimizers of the state."""
        self.others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._own = {id(each) for each in state.values() if isinstance(each, torch.optim.Optimizer)}
        optimizers = [each for each in state.values() if isinstance(each, torch.optim.Optimizer)]
        self._hooks = [each.register_step_pre_hook(self._about_to_step) for each in optimizers]
        self._hooks.append(register_optimizer_step_post_hook(_calling(weakref.WeakMethod(self._stepped))))

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Inside, steps do not count: torch makes one on zero gradients to learn what state an optimizer has."""
        count = self.count
        try:
            yield
        finally:
            self.count = count

    def close(self) -> None:
        """Take the hooks off again."""
        for hook in self._hooks:
            hook.remove()

    def _about_to_step(self, *_: object) -> None:
        self._before()

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._own:
            self.count += 1
        else:
            self.others.add(optimizer)


def _calling(method: weakref.WeakMethod[Callable[..., None]]) -> Callable[..., None]:
    """Return what calls a method of an object that it does not keep alive: a hook of the process may outlive it."""

    def call(optimizer: object, *_: object) -> None:
        if (stepped := method()) is not None:
            stepped(optimizer)

    return call


def updated_tensors(state: Mapping[str, Any], snapshot: Snapshot) -> set[str]:
    """Flat names of the tensors that change in optimizer steps alone: the parameters the optimizers of the state have,
    and the optimizers' own state. A forward pass may change anything else, buffers above all."""
    optimizers = {name: each for name, each in state.items() if isinstance(each, torch.optim.Optimizer)}
    parameters = [
        each for optimizer in optimizers.values() for group in optimizer.param_groups for each in group["params"]
    ]
    memory = {part.data_ptr() for each in parameters for _, part in local_parts(each)}
    # Not its groups: a learning rate that is a tensor changes when a schedule says so.
    states = tuple(f"{name}.state." for name in optimizers)
    names = set()
    for name, tensor in snapshot.tensors.items():
        if name.startswith(states) or any(part.data_ptr() in memory for _, part in local_parts(tensor)):
            names.add(name)
    return names
