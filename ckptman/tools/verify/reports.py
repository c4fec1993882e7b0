"""What a proof of loading is about and what it says: layouts of ranks, and reports.

A layout is the shape of a mesh of ranks: (8,) are 8 shards (FSDP), (2, 4) are 2 replicas of 4 shards each (HSDP).
"""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptman.errors import CkptmanError, ConfigError, CorruptError

PROBLEMS_SHOWN = 20
"""Problems of one world size that are told one by one; the others are counted."""


@dataclass(frozen=True)
class LoadReport:
    """The result of loading on `world_size` ranks. `problems`: what kept it from loading bit for bit.

    `not_tried`: why it was not loaded at all, which says nothing about the checkpoint. `left_out`: tensors that were
    not loaded. `notes`: what else is not proved, such as that all ranks fit into memory together.
    """

    world_size: int
    problems: list[str] = field(default_factory=list)
    not_tried: str = ""
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_proof(self) -> bool:
        """Whether each rank loaded all of its part, bit for bit."""
        return not (self.problems or self.not_tried or self.left_out)


@dataclass(frozen=True)
class PlanReport:
    """What it takes to load on `world_size` ranks, by arithmetic alone: no rank is started and no tensor is read.

    `bytes_*`: what is read from storage, with whole blocks and small gaps; `wanted_bytes`: what the ranks ask for.
    `ranges_total`: parts of saved chunks, over all ranks. `seconds`: duration of the planning. `load_seconds`: None if
    no bandwidth is given. `unproved`: what the table cannot tell.
    """

    world_size: int
    problems: list[str]
    bytes_total: int
    bytes_per_rank_max: int
    bytes_per_rank_mean: float
    files_per_rank_max: int
    ranges_total: int
    seconds: float
    load_seconds: float | None
    wanted_bytes: int = 0
    unproved: list[str] = field(default_factory=list)


def layout_for(world_size: int, mesh: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the layout of that many ranks: the mesh if it has as many, else shards without replicas."""
    return tuple(mesh) if mesh is not None and math.prod(mesh) == world_size else (world_size,)


def world_sizes_with(world_sizes: Sequence[int], mesh: Sequence[int] | None = None) -> list[int]:
    """Return the world sizes, with that of the mesh added. Raises: ConfigError (not a mesh of one or two axes)."""
    sizes = list(world_sizes)
    if mesh is not None:
        if len(mesh) not in (1, 2) or min(mesh) < 1:
            found = "x".join(map(str, mesh)) or "nothing"
            raise ConfigError(f"a mesh is S shards, or R replicas of S shards each, such as 2x4, not {found}")
        if math.prod(mesh) not in sizes:
            sizes.append(math.prod(mesh))
    return sizes


def serve(arguments: Sequence[str], check: Callable[[dict[str, Any]], Iterable[Mapping[str, Any]]]) -> int:
    """Answer a request of `cli.verify_process` (JSON): print a JSON object for each report, or one with the error."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an exit ends what was forked, too
    try:
        for report in check(json.loads(arguments[0])):
            print(json.dumps(report), flush=True)
    except (CkptmanError, OSError) as error:
        kind = next((each.__name__ for each in (CorruptError, ConfigError) if isinstance(error, each)), "")
        print(json.dumps({"error": str(error), "kind": kind}), flush=True)
        return 1
    return 0


def text_of(layout: Sequence[int]) -> str:
    """Return a layout in words, such as `8 ranks (2 replicas x 4 shards)`."""
    ranks = math.prod(layout)
    name = f"{ranks} rank{'' if ranks == 1 else 's'}"
    return name if len(layout) == 1 else f"{name} ({layout[0]} replicas x {layout[1]} shards)"


def shown(problems: Iterable[str], limit: int = PROBLEMS_SHOWN) -> list[str]:
    """Return the first problems, and how many more there are."""
    found = list(problems)
    return found if len(found) <= limit else [*found[:limit], f"and {len(found) - limit} more"]
