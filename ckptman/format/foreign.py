"""Checkpoints that others wrote into a root, known by their names and by what is in them. Nothing in them is read.

What they keep has no digests, and no restore takes one of them by itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckptman.format.paths import MANIFEST, METADATA, parse_step

TRAINER_STATE = "trainer_state.json"
Writer = Literal["plain DCP", "torchtitan", "the HF Trainer", "Lightning"]

_STEP_AT_END = re.compile(
    r"(?:.*[^a-z])?(?:(?:global_?)?step|iter|iteration|checkpoint|ckpt)[-_]?([0-9]{1,10})", re.ASCII
)
_OF_TITAN = re.compile(r"step-[0-9]+", re.ASCII)
_OF_TRAINER = re.compile(r"checkpoint-[0-9]+", re.ASCII)
_OF_LIGHTNING = re.compile(r"(?:.*[^a-z_])?step=([0-9]{1,10})(?![0-9]).*\.ckpt", re.ASCII)


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint of another program: a folder, or for Lightning also a file.

    `step`: by its name; None where that tells none. `is_dcp`: the folder is one of plain DCP, with whatever besides:
    that ckptman loads and adopts.
    """

    path: Path
    writer: Writer
    step: int | None
    is_dcp: bool

    def files(self) -> list[Path]:
        """Return its files, those of folders in it too, by name. Raises: OSError."""
        if not self.path.is_dir():
            return [self.path]
        found = []
        for folder, _, names in os.walk(self.path, onerror=_raise):
            found += [Path(folder, name) for name in names]
        return sorted(found)

    def size_and_time(self) -> tuple[int, float]:
        """Return the bytes of its files, and when the last of them was written, in unix seconds. Raises: OSError."""
        found = [each.lstat() for each in self.files()]
        return sum(each.st_size for each in found), max((each.st_mtime for each in found), default=0.0)


def recognize(path: Path) -> ForeignCheckpoint | None:
    """Return the checkpoint of another program that lies at a path; None where there is none, or one of ckptman.

    A folder that may not be looked into is known by its name alone.
    """
    name = path.name
    if parse_step(name) is not None or os.path.lexists(path / MANIFEST):  # False where it may not be seen
        return None
    is_dcp = os.path.lexists(path / METADATA)
    writer: Writer
    if name.endswith(".ckpt") and os.path.lexists(path):
        writer = "Lightning"
    elif is_dcp:
        writer = "torchtitan" if _OF_TITAN.fullmatch(name) else "plain DCP"
    elif os.path.lexists(path / TRAINER_STATE) or (_OF_TRAINER.fullmatch(name) and os.path.isdir(path)):  # noqa: PTH112
        writer = "the HF Trainer"
    else:
        return None
    return ForeignCheckpoint(path, writer, step_in(name), is_dcp)


def foreign_in(root: Path, names: Iterable[str]) -> list[ForeignCheckpoint]:
    """Return those among the names of a root, by step; those whose names tell none come first. Links are left out."""
    found = [each for name in names if (each := recognize(root / name)) is not None and not each.path.is_symlink()]
    return sorted(found, key=lambda each: (-1 if each.step is None else each.step, each.path.name))


def step_in(name: str) -> int | None:
    """Return the step that a name tells, as `step-1000`, `iter_0001000`, `checkpoint-500`, `global_step7` or
    `epoch=0-step=5.ckpt` do; or None."""
    ours = parse_step(name)
    if ours is not None:
        return ours.step if ours.kind == "step" else None
    match = _STEP_AT_END.fullmatch(name) or _OF_LIGHTNING.fullmatch(name)
    return int(match[1]) if match else None


def _raise(error: OSError) -> None:
    raise error
