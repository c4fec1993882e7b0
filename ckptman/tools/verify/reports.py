"""What a proof of loading is about and what it says: layouts of ranks, and reports.

A layout is the shape of a mesh of ranks: (8,) are 8 shards (FSDP), (2, 4) are 2 replicas of 4 shards each (HSDP).
"""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptman.errors import CkptmanError, ConfigError, CorruptError

if TYPE_CHECKING:
    from ckptman.errors import FormatVersionError
    from ckptman.storage.catalog.verified import Identity, Level
    from ckptman.storage.format.manifest import Manifest
    from ckptman.storage.integrity.damage_report import Damage

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
    """Answer a request of `verify_process` (JSON): print a JSON object for each report, or one with the error."""
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


@dataclass
class VerifyReport:
    """The result of verifying one checkpoint.

    Attributes:
        step: Its step; None if another program wrote it.
        path: Its folder.
        written_by: The program that wrote it, without digests; "" is ckptman.
        files, bytes, tensors: What it consists of.
        seconds: How long reading it took.
        levels: What was proved of its bytes: "digests", "coverage".
        damage, problems: Differences from what was saved.
        unread: What could not be read, so that nothing is proved.
        gone: Why it is not judged: deleted, or saved again meanwhile.
        newer_format: The error, if a newer ckptman wrote it.
        mesh: The mesh that it was loaded on.
        loads: The result of loading, by world size.
        plans: The result of planning a load.
        not_tried: What was asked for and could not be tried, which says nothing about the checkpoint.
        refused: What a load would not unpickle.
        remarks: Things to know that prove nothing.
        manifest: Its manifest.
        identity: The files that were read, of those that the manifest names.
        checked_bytes: How much of a foreign one has a correct checksum.
    """

    step: int | None
    path: Path
    written_by: str = ""
    files: int = 0
    bytes: int = 0
    tensors: int = 0
    seconds: float = 0.0
    levels: list[Level] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    gone: str | None = None
    newer_format: FormatVersionError | None = None
    mesh: tuple[int, ...] | None = None
    loads: dict[int, LoadReport] = field(default_factory=dict)
    plans: list[PlanReport] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    manifest: Manifest | None = None
    identity: Identity | None = None
    not_tried: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    checked_bytes: int = 0

    @property
    def good(self) -> bool:
        """Whether all that was asked for is proved."""
        return self.is_verified and not self.not_tried

    @property
    def name(self) -> str:
        return f"step {self.step}" if self.step is not None else str(self.path)

    @property
    def digests(self) -> bool:
        """Whether it has any: what others write has none."""
        return not self.written_by

    @property
    def is_damaged(self) -> bool:
        return bool(self.damage or self.problems)

    @property
    def is_checked(self) -> bool:
        """Whether it could be read, and nothing was wrong."""
        return not self.is_damaged and not self.unread and self.gone is None and self.newer_format is None

    def mesh_of(self, world_size: int) -> tuple[int, ...] | None:
        """Return the mesh for that many processes; None: shards without replicas."""
        return self.mesh if self.mesh is not None and math.prod(self.mesh) == world_size else None

    @property
    def problems_of_fit(self) -> list[str]:
        """Return what keeps it from loading, or from being planned."""
        loads = [problem for found in self.loads.values() for problem in found.problems]
        return self.refused + loads + [problem for plan in self.plans for problem in plan.problems]

    @property
    def is_verified(self) -> bool:
        """Whether it was read and nothing speaks against it."""
        return self.is_checked and not self.problems_of_fit

    def as_dict(self) -> dict[str, Any]:
        """Return the same, for JSON."""
        problems = [*map(str, self.damage), *self.problems]
        found = self.manifest.nonfinite if self.manifest is not None else None
        replicas = self.manifest.replicas if self.manifest is not None else None
        return {
            "step": self.step,
            "path": str(self.path),
            "good": self.good,
            "digests": self.digests,
            "levels": list(self.levels),
            "files": self.files,
            "bytes": self.bytes,
            "checked_bytes": self.bytes if "digests" in self.levels else self.checked_bytes,
            "tensors": self.tensors,
            "seconds": self.seconds,
            "problems": problems or ([str(self.newer_format)] if self.newer_format else []),
            "damage": [asdict(each) for each in self.damage],
            "not_checked": [self.gone] if self.gone else [*self.unread, *self.not_tried],
            "mesh": None if self.mesh is None else list(self.mesh),
            "world_sizes": {str(size): found.problems for size, found in self.loads.items()},
            "refused": self.refused,
            "plans": [asdict(plan) for plan in self.plans],
            "remarks": self.remarks,
            "nonfinite": found.model_dump(mode="json") if found is not None else None,
            "replicas": replicas,
        }
