"""Which roots a command is about: folders by name, or by patterns that the shell left to us."""

from __future__ import annotations

import glob
import os
from contextlib import suppress
from pathlib import Path

from ckptman.cli.objects import check_is_folder
from ckptman.cli.select import is_checkpoint
from ckptman.errors import ConfigError, NotFoundError


def roots_of(written: list[str]) -> tuple[list[Path], bool]:
    """The folders that are meant, each once, and whether there may be several: more than one is named, or a pattern.

    Raises: NotFoundError where a pattern matches no folder, ConfigError for an empty one.
    """
    found: dict[str, Path] = {}
    several = len(written) > 1
    for each in written:
        if not each.strip():  # a variable that is not set: the folder we are in is not what was meant
            raise ConfigError("the path of a root is empty: is a variable not set?")
        check_is_folder(each)
        paths = [each]
        # A folder may well have a bracket in its name.
        if glob.has_magic(each) and not os.path.lexists(each):
            several = True
            paths = sorted(path for path in glob.glob(each, recursive=True) if os.path.isdir(path))  # noqa: PTH207, PTH112
            if not paths:
                raise NotFoundError(f"no folder matches {each!r}: check the pattern, and the folder you are in")
        for path in paths:
            found.setdefault(os.path.realpath(path), Path(path))
    return list(found.values()), several


def check_is_no_checkpoint(root: Path) -> None:
    """Raises: ConfigError where a root is meant and one checkpoint is named, which would look like an empty root."""
    with suppress(PermissionError):  # whoever reads the root says more
        if is_checkpoint(root):
            raise ConfigError(f"{root} is one checkpoint, and no root of several: name the folder that it is in")


def check_is_root(root: Path) -> None:
    """A mistyped path is never emptied: a root holds a run's own files, or a checkpoint at least.

    Raises: NotFoundError, RootError (it cannot be read, or is no folder), ConfigError.
    """
    from ckptman.catalog.catalog import Catalog
    from ckptman.format.paths import MANIFEST, METADATA, parse_step, run_folder

    check_is_no_checkpoint(root)
    catalogue = Catalog(root)
    names = catalogue.names()
    if any(parse_step(name) is not None for name in names) or run_folder(root).is_dir():
        return
    if not any((root / name / mark).exists() for name in names for mark in (MANIFEST, METADATA)):
        raise ConfigError(
            f"{root} is no root of checkpoints: there is none of ckptman in it, nor one of plain DCP. Nothing is "
            f"deleted there: check the path"
        )
