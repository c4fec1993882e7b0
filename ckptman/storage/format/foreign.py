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

from ckptman.errors import NotFoundError
from ckptman.storage.format.paths import MANIFEST, METADATA, parse_step, run_folder

TRAINER_STATE = "trainer_state.json"
RANDOM_STATES = "random_states_0.pkl"
"""What Accelerate writes after models and optimizers, also where diffusers saves by it."""
Writer = Literal["plain DCP", "torchtitan", "the HF Trainer", "Accelerate", "Lightning"]

_STEP_AT_END = re.compile(
    r"(?:.*[^a-z])?(?:(?:global_?)?step|iter|iteration|checkpoint|ckpt)[-_]?([0-9]{1,10})", re.ASCII
)
_OF_TITAN = re.compile(r"step-[0-9]+", re.ASCII)
_OF_TRAINER = re.compile(r"checkpoint-[0-9]+", re.ASCII)
_WITH_TRAINER_STATE = re.compile(r"(?:.*_)?(?:model|weights)|optimizer|global_step")
"""How names begin that are in a checkpoint of the Trainer, and not where it only put its state."""
_OF_LIGHTNING = re.compile(r"(?:.*[^a-z_])?step=([0-9]{1,10})(?![0-9]).*\.ckpt", re.ASCII)
_BY_A_LIGHTNING_RUN = re.compile(
    r"(?:(?:.*[^a-z])?(?:epoch|step)=[0-9].*|(?:last|on_exception)(?:-v[0-9]+)?|hpc_ckpt_[0-9]+)\.ckpt", re.ASCII
)


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

    @property
    def is_of_a_run(self) -> bool:
        """Whether a run goes on from it, by its name: another `.ckpt` may be weights that somebody put there."""
        return self.writer != "Lightning" or _BY_A_LIGHTNING_RUN.fullmatch(self.path.name) is not None

    def refuse(self) -> None:
        """Refuse it where torch alone cannot load it by its names. Raises: NotFoundError."""
        if not self.is_dcp:
            raise NotFoundError(
                f"{self.path} is a checkpoint of {self.writer}, which no other program knows its way in: load it "
                f"by {self.writer}, and save what you loaded with ckptman.save"
            )

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
    if not is_dcp and _is_root(path):
        return None
    if name.endswith(".ckpt") and os.path.lexists(path):
        writer = "Lightning"
    elif is_dcp:
        writer = "torchtitan" if _OF_TITAN.fullmatch(name) else "plain DCP"
    elif _OF_TRAINER.fullmatch(name) and os.path.isdir(path):  # noqa: PTH112
        is_accelerate = os.path.lexists(path / RANDOM_STATES) and not os.path.lexists(path / TRAINER_STATE)
        writer = "Accelerate" if is_accelerate else "the HF Trainer"
    elif (found := _writer_by_files(path)) is not None:
        writer = found
    else:
        return None
    return ForeignCheckpoint(path, writer, step_in(name), is_dcp)


def _writer_by_files(folder: Path) -> Writer | None:
    """Return who wrote a checkpoint under a name that tells nothing; None where a folder is none, or holds several: the
    Trainer writes its state and its final model beside them, too."""
    marks = [mark for mark in (TRAINER_STATE, RANDOM_STATES) if os.path.lexists(folder / mark)]
    names = _names_in(folder) if marks else []
    if any(map(_OF_TRAINER.fullmatch, names)):
        return None
    if RANDOM_STATES in marks:
        return "Accelerate"
    return "the HF Trainer" if any(map(_WITH_TRAINER_STATE.match, names)) else None


def _is_root(folder: Path) -> bool:
    """Return whether a folder, whatever its name, is a root of ckptman."""
    is_run = os.path.isdir(run_folder(folder))  # noqa: PTH112 False where it may not be seen
    return is_run or any(parse_step(name) is not None for name in _names_in(folder))


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 names alone are wanted
    except OSError:
        return []


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
