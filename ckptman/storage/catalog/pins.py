"""Pins: `pinned.json` beside the manifest of a checkpoint says that it is to stay, why, and who said so.

The manifest does not name it, so a checkpoint is what it was, and the pin travels with a copy of the folder.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from ckptman.errors import ConfigError, CorruptError, plain
from ckptman.storage.format.sealed_json import seal, unseal
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.safe_open import read_regular

PINNED = "pinned.json"
FORMAT_VERSION = 1
MOST_TEXT = 1000
_MOST_BYTES = 64 * 1024


class Pin(BaseModel):
    """`why` it is to stay; `by` whom it was pinned, as `user@host`; when (unix time)."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    format_version: int = FORMAT_VERSION
    why: Annotated[str, Field(min_length=1, max_length=MOST_TEXT)]
    by: Annotated[str, Field(max_length=MOST_TEXT)] = ""
    time_seconds: FiniteFloat = 0.0


def read_pin(folder: Path) -> Pin | None:
    """The pin of a checkpoint; None where it has none. What cannot be read pins all the same: it was meant to."""
    try:
        path = os.path.join(folder, PINNED)
        return Pin.model_validate_json(unseal(path, read_regular(path, _MOST_BYTES)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (CorruptError, OSError, ValidationError, RecursionError):
        return Pin(why=f"{PINNED} is there and cannot be read")


def pin(folder: Path, why: str, *, by: str, time_seconds: float) -> None:
    """Pin a checkpoint, durably, or say another reason why it is pinned. Raises: ConfigError (no reason), OSError."""
    if not why.strip():
        raise ConfigError(
            'a pin needs a reason that others can read a year later, such as --why "Table 2 of the paper"'
        )
    why = plain(why.strip())  # bytes that are no text have no form in JSON
    if len(why) > MOST_TEXT:
        raise ConfigError(f"the reason of a pin has at most {MOST_TEXT} characters, not {len(why)}")
    note = Pin(why=why, by=plain(by)[:MOST_TEXT], time_seconds=time_seconds)
    DISK.replace_file(folder / PINNED, seal(json.dumps(note.model_dump(mode="json"), indent=1).encode()))


def unpin(folder: Path) -> bool:
    """Take the pin off, durably. False where there was none. Raises: OSError."""
    if not os.path.lexists(folder / PINNED):
        return False
    DISK.remove_file(folder / PINNED)
    DISK.sync_folder(folder)
    return True


def user_at_host() -> str:
    """Return who runs this program, as `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container that knows no name for the uid
        user = str(os.getuid())
    return plain(f"{user}@{socket.gethostname()}")
