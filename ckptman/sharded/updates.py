"""Counting optimizer steps, to know whether the state still is that of the step whose name it would get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


class Updates:
    """Notices whether an optimizer of the state has stepped since the last mark."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._count = self._marked = 0
        self._hooks = [
            each.register_step_post_hook(self._stepped)
            for each in state.values()
            if isinstance(each, torch.optim.Optimizer)
        ]

    def mark(self) -> None:
        """The state now is that of a step that has ended."""
        self._marked = self._count

    def since_mark(self) -> bool:
        """Whether an optimizer has stepped since."""
        return self._count != self._marked

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Inside, steps do not count: torch makes one on zero gradients to learn what state an optimizer has."""
        count = self._count
        yield
        self._count = count

    def close(self) -> None:
        """Take the hooks off the optimizers again."""
        for hook in self._hooks:
            hook.remove()

    def _stepped(self, *_: object) -> None:
        self._count += 1
