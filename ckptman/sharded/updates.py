"""Counting optimizer steps, to know whether the state still is that of the step whose name it would get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


class Updates:
    """Counts the steps that the optimizers of a state make."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.count = 0
        """Optimizer steps so far."""
        self._hooks = [
            each.register_step_post_hook(self._stepped)
            for each in state.values()
            if isinstance(each, torch.optim.Optimizer)
        ]

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Inside, steps do not count: torch makes one on zero gradients to learn what state an optimizer has."""
        count = self.count
        yield
        self.count = count

    def close(self) -> None:
        """Take the hooks off the optimizers again."""
        for hook in self._hooks:
            hook.remove()

    def _stepped(self, *_: object) -> None:
        self.count += 1
