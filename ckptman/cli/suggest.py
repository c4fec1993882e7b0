"""What somebody may have meant who named a path that is not there, or is one level off."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from ckptman.errors import plain
from ckptman.storage.format.paths import DOT, parse_step

MOST_NAMES, MOST_FOLDERS, SHOWN = 5_000, 100, 3
"""So many names of a folder are looked at, into so many folders in it, and so many are suggested."""


def suggestion(arguments: Sequence[str], said: str, *, is_missing: bool = True) -> str:
    """Return what to add to an error for the first of the arguments that it names; "" where nothing can be said.

    `is_missing`: the error is that something is not there; else that what is there is not what was wanted.
    """
    for each in arguments[1:]:  # after the verb
        written = each.partition("=")[2] if each.startswith("--") else each
        if (
            not written
            or written.isdigit()
            or not re.search(rf"(?<![\w/.-]){re.escape(plain(written))}(?![\w/-])", said)
        ):
            continue
        try:
            os.lstat(written)
        except (FileNotFoundError, NotADirectoryError):
            found = nearest(Path(written)) if is_missing else []
        except (OSError, ValueError):
            continue
        else:
            found = roots_near(Path(written))
        if found:
            return f". Did you mean {' or '.join(plain(path) for path in found)}?"
    return ""


def nearest(path: Path) -> list[Path]:
    """Return paths that are there and are written nearly like one that is not."""
    from difflib import get_close_matches

    there, missing = path, list[str]()
    while not os.path.isdir(there) or missing == []:  # noqa: PTH112 never raises
        if there == there.parent:
            return []
        missing.insert(0, there.name)
        there = there.parent
    similar = [there / name for name in get_close_matches(missing[0], _names(there), SHOWN)]
    whole = [each.joinpath(*missing[1:]) for each in similar]
    return [each for each in whole if os.path.lexists(each)] or similar


def roots_near(path: Path) -> list[Path]:
    """Return the roots right below a folder that is not one, or the root that it lies in."""
    if _is_root(path):
        return []
    if _is_root(path.absolute().parent):
        return [path.parent if path.name else Path("..")]
    return [path / name for name in _names(path)[:MOST_FOLDERS] if _is_root(path / name)][:SHOWN]


def _is_root(folder: Path) -> bool:
    return any(name == DOT or parse_step(name) is not None for name in _names(folder))


def _names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as found:
            return sorted(each.name for each in islice(found, MOST_NAMES))
    except OSError:  # a file, or not for us to see
        return []
