"""What hooks at the start of an epoch change of a restored run. They were called for its epoch before it was saved, and
are called again for what they set besides: what they change of what was restored is put back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ckptman.engine.state.step_record import ChangeCounters
from ckptman.errors import warn_only


class BeforeEpochStart:
    """What was restored, noted before those hooks are called.

    Noted are buffers, the settings of optimizers and schedules, and what `holders` give. Parameters are not, which may
    be large: it is said if a hook changes them.

    Args:
        holders: what gives the own state of a callback or a module, and what takes it.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Iterable[Any],
        schedulers: Iterable[Any],
        holders: Iterable[tuple[Callable[[], Any], Callable[[Any], object]]],
    ) -> None:
        self._parameters = ChangeCounters(module.parameters())
        self._buffers = [(each, each.detach().clone()) for each in module.buffers()]
        self._groups = [
            (group, {name: copy.deepcopy(value) for name, value in group.items() if name != "params"})
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
        self._schedulers = [(each, copy.deepcopy(each.state_dict())) for each in schedulers]
        self._held = [(put, copy.deepcopy(get())) for get, put in holders]

    def put_back(self, *, hook: str, earlier: str, warns: bool) -> None:
        """Put back what was noted, and warn of parameters that were changed.

        Args:
            hook: the name of the hook.
            earlier: that of one that is called once, before the epoch is saved for the first time.
            warns: whether this rank does.
        """
        if warns and not self._parameters.unchanged():
            warn_only(
                f"{hook}() changes parameters, and a run that goes on within an epoch calls it again, after they were "
                f"restored: change them in {earlier}(), of the epoch before"
            )
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
            for group, settings in self._groups:
                for name, value in settings.items():
                    if isinstance(value, torch.Tensor) and isinstance(group[name], torch.Tensor):
                        group[name].copy_(value)  # a captured graph reads it where it is
                    else:
                        group[name] = value
        for scheduler, state in self._schedulers:
            scheduler.load_state_dict(state)
        for put, state in self._held:
            if state:
                put(state)
