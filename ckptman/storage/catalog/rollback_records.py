"""What a rollback left behind: files `.ckptman/rollback-000001.json`, each made once and never changed.

Checkpoints are named by their identity, the digest of their manifest, and not by where they are in the order: so what
is saved later, under a number that was used before, is never taken for them, and a copy elsewhere always is. Rollbacks
are handed on to the tiers of a root and to what is copied from it; each has an id, so none counts twice.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ckptman.errors import CorruptError, RootError, plain
from ckptman.storage.format.manifest import FORMAT_VERSION, Manifest, parse_versioned
from ckptman.storage.format.paths import parse_rollback, rollback_path, run_folder
from ckptman.storage.format.sealed_json import SealError, seal, unseal
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.safe_open import read_regular

_MOST_BYTES = 64 * 1024 * 1024
_ATTEMPTS = 100


class Left(BaseModel):
    """A checkpoint that was left behind. `identity`: see `Manifest.identity`."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    step: int
    sequence: int
    identity: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class Rollback(BaseModel):
    """One rollback to `to_step`, or, where `undoes` is the id of an earlier one, its end."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    format_version: int = FORMAT_VERSION
    id: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    to_step: int
    time_seconds: float
    why: str = ""
    by: str = ""
    abandoned: list[Left] = []
    attempt: int | None = None
    """The highest that had begun by then: what it or an earlier one has in memory is left behind, too. None: the
    journal, which knows it, is gone, and the time has to do."""
    undoes: str | None = None

    def __str__(self) -> str:
        return f"by the rollback to step {self.to_step}" + (f" ({plain(self.why)})" if self.why else "")

    def to_json(self) -> bytes:
        """The bytes of its file."""
        return seal(self.model_dump_json(indent=1).encode())


def read_rollbacks(root: Path) -> dict[int, Rollback]:
    """The rollbacks of a root by number, oldest first; those that were undone, and what undid them, are among them.

    Raises: RootError (they cannot be read), CorruptError, FormatVersionError: nobody can tell what counts then.
    """
    found: dict[int, Rollback] = {}
    for number in rollback_numbers(root):
        path = rollback_path(root, number)
        try:
            found[number] = parse_rollback_file(path, read_regular(path, _MOST_BYTES))
        except OSError as error:
            raise _unreadable(path, error) from error
    return found


def parse_rollback_file(path: Path | str, data: bytes) -> Rollback:
    """The rollback in the bytes of a file; `path` is for messages. Raises: CorruptError, FormatVersionError."""
    try:
        return Rollback.model_validate(parse_versioned(Path(path), unseal(path, data)))
    except (ValidationError, SealError):
        raise CorruptError(
            f"{path} is not what ckptman writes there, so nobody can tell which checkpoints were abandoned: bring "
            f"it back from a copy, or remove it and roll back again"
        ) from None


def standing(rollbacks: Iterable[Rollback]) -> list[Rollback]:
    """Those that hold: not undone, and no undoing."""
    each_once = list({each.id: each for each in rollbacks}.values())
    undone = {each.undoes for each in each_once}
    return [each for each in each_once if each.undoes is None and each.id not in undone]


def abandoned_by(rollbacks: Iterable[Rollback]) -> dict[str, str]:
    """The identities of the checkpoints that rollbacks left behind, with which one did."""
    return {left.identity: str(each) for each in standing(rollbacks) for left in each.abandoned}


def left_by(rollbacks: Iterable[Rollback], manifest: Manifest) -> Rollback | None:
    """The rollback that a checkpoint in memory is older than; None: there is none. Clocks of hosts differ, so they are
    asked only of a rollback that does not say which attempts had begun."""
    for each in standing(rollbacks):
        if manifest.attempt <= each.attempt if each.attempt is not None else each.time_seconds > manifest.time_seconds:
            return each
    return None


def read_abandoned(root: Path) -> dict[str, str]:
    """The same of a root. Raises: as `read_rollbacks`."""
    return abandoned_by(read_rollbacks(root).values()) if rollback_numbers(root) else {}


def copy_rollbacks(rollbacks: Iterable[Rollback], root: Path) -> None:
    """Write down in a root those rollbacks that it does not know, durably. Raises: as `read_rollbacks`, OSError."""
    for each in rollbacks:
        known = read_rollbacks(root)
        if any(each.id == other.id for other in known.values()):
            continue
        DISK.make_folder_if_missing(run_folder(root))
        number = max(known, default=0) + 1
        for _ in range(_ATTEMPTS):
            try:
                DISK.create_whole_file(rollback_path(root, number), each.to_json())
                break
            except FileExistsError:  # somebody else wrote one this very moment
                number += 1
        DISK.sync_folder(run_folder(root))


def rollback_numbers(root: Path, names: Sequence[str] | None = None) -> list[int]:
    """The numbers of the rollbacks of a root, oldest first. `names`: of its run folder, where they were listed just
    now. Raises: RootError."""
    try:
        names = os.listdir(run_folder(root)) if names is None else names  # noqa: PTH208 names alone are wanted
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(run_folder(root), error) from error
    return sorted(number for name in names if (number := parse_rollback(name)) is not None)


def _unreadable(path: Path, error: OSError) -> RootError:
    return RootError(
        error.errno or errno.EIO,
        f"{path} cannot be read ({error.strerror}), so nobody can tell which checkpoints were abandoned: check its "
        f"permissions and the mount",
    )
