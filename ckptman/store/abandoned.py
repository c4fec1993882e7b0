"""What a rollback left behind: files `.ckptman/rollback-000001.json`, each made once and never changed.

Checkpoints are named by their identity, the digest of their manifest, and not by where they are in the order: so what
is saved later, under a number that was used before, is never taken for them, and a copy elsewhere always is.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ckptman.errors import CorruptError, RootError, plain
from ckptman.store.manifest import FORMAT_VERSION, parse_versioned
from ckptman.store.names import parse_rollback, rollback_path, run_folder
from ckptman.store.regular import read_regular

_MOST_BYTES = 64 * 1024 * 1024


class Left(BaseModel):
    """A checkpoint that was left behind. `identity`: see `Manifest.identity`."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    step: int
    sequence: int
    identity: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class Rollback(BaseModel):
    """One rollback to `to_step`, or, where `undoes` is the number of an earlier one, its end."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    format_version: int = FORMAT_VERSION
    to_step: int
    time_seconds: float
    why: str = ""
    by: str = ""
    abandoned: list[Left] = []
    undoes: int | None = None

    def __str__(self) -> str:
        return f"by the rollback to step {self.to_step}" + (f" ({plain(self.why)})" if self.why else "")


def read_rollbacks(root: Path) -> dict[int, Rollback]:
    """The rollbacks of a root by number, oldest first; those that were undone, and what undid them, are among them.

    Raises: RootError (they cannot be read), CorruptError, FormatVersionError: nobody can tell what counts then.
    """
    found: dict[int, Rollback] = {}
    for number in rollback_numbers(root):
        path = rollback_path(root, number)
        try:
            found[number] = Rollback.model_validate(parse_versioned(path, read_regular(path, _MOST_BYTES)))
        except ValidationError:
            raise CorruptError(
                f"{path} is not what ckptman writes there, so nobody can tell which checkpoints were abandoned: bring "
                f"it back from a copy, or remove it and roll back again"
            ) from None
        except OSError as error:
            raise _unreadable(path, error) from error
    return found


def standing(rollbacks: dict[int, Rollback]) -> dict[int, Rollback]:
    """Those that hold: not undone, and no undoing."""
    undone = {each.undoes for each in rollbacks.values()}
    return {number: each for number, each in rollbacks.items() if each.undoes is None and number not in undone}


def read_abandoned(root: Path) -> dict[str, str]:
    """The identities of the checkpoints that were abandoned, with which rollback left each. Raises: as above."""
    return {left.identity: str(each) for each in standing(read_rollbacks(root)).values() for left in each.abandoned}


def rollback_numbers(root: Path) -> list[int]:
    """The numbers of the rollbacks of a root, oldest first. Raises: RootError."""
    try:
        names = os.listdir(run_folder(root))  # noqa: PTH208 names alone are wanted
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
