"""How large a checkpoint is: by the practitioners' rule, and by the tensors that are in it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckptman.policies.checks import check_positive

RULE_FACTOR = 5
"""Size of a checkpoint = parameters x 5 x bytes per element: the practitioners' rule (a 7B model at 16 bit: 70 GB)."""
RULE_SOURCE = "the rule of thumb of teams on Leonardo, LUMI and SuperPOD, 2024: 7B at 16 bit is 70 GB"
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
MOMENTS = 2
"""AdamW keeps two for each parameter, of its dtype."""
STEP_BYTES = 4
"""And counts its steps for each, in a float32 of its own."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of the state by its flat name. `sharded`: each rank of a shard group has some of its rows."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int = 4
    sharded: bool = True
    parameter: bool = True
    """It is trained, so the optimizer has a state for it; else it is frozen, or a buffer."""
    tied: bool = False
    """It is one of those before it by another name."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.item_bytes


def rule_bytes(parameters: float, item_bytes: int) -> int:
    """The practitioners' rule. Raises IntervalError for no parameters."""
    check_positive("plan", "parameters", parameters)
    return round(parameters * RULE_FACTOR * item_bytes)


def state_bytes(parameters: float, item_bytes: int, moments: int = MOMENTS, moment_bytes: int | None = None) -> int:
    """Bytes of parameters and optimizer moments, where nothing is known but their number."""
    check_positive("plan", "parameters", parameters)
    return round(parameters * (item_bytes + moments * (item_bytes if moment_bytes is None else moment_bytes)))


def with_optimizer(tensors: Iterable[Tensor], moments: int = MOMENTS) -> list[Tensor]:
    """The tensors of the state `{"model": ..., "optimizer": AdamW}`, sorted by name as they are written.

    `tensors` are those of the model by their names in it. A moment has the dtype and the shape of its parameter.
    """
    found = []
    for each in tensors:
        found.append(replace(each, name=f"model.{each.name}"))
        if not each.parameter or not moments:
            continue
        own = f"optimizer.state.{each.name}"
        names = ("exp_avg", "exp_avg_sq")[:moments] + tuple(f"moment_{number}" for number in range(2, moments))
        found += [Tensor(f"{own}.{name}", each.shape, each.item_bytes, each.sharded) for name in names]
        found.append(Tensor(f"{own}.step", (), STEP_BYTES, sharded=False))
    return sorted(found, key=lambda each: each.name)


def parameter_count(tensors: Sequence[Tensor]) -> int:
    """Elements that are trained."""
    return sum(each.elements for each in tensors if each.parameter)


def frozen(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Parameters that are not trained: they are sharded, but have neither gradients nor moments."""
    return [each for each in tensors if each.sharded and not each.parameter and not each.tied]
