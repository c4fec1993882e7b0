"""Refusals of paths that are no roots of checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

from ckptman.errors import ConfigError
from ckptman.storage.format.foreign import foreign_in
from ckptman.storage.format.paths import MANIFEST, check_is_no_checkpoint, parse_step, run_folder


def check_is_folder(path: Path | str) -> None:
    """Refuse the address of an object store. Raises: ConfigError."""
    from ckptman.storage.catalog.backends.backend import find_url

    if os.path.lexists(path):  # whatever its name is
        return
    if (url := find_url(str(path))) is not None:
        raise ConfigError(
            f"{url} is in an object store, and this command is not for those: copy it to a folder first, with "
            f"ckptman copy {url} FOLDER"
        )


def check_is_root(root: Path) -> None:
    """Check that a folder is a root, with a checkpoint or files of a run: nothing is deleted below a mistyped path.

    Raises: NotFoundError, RootError (it cannot be read, or is not a folder), ConfigError.
    """
    from ckptman.storage.catalog.catalog import Catalog

    check_is_no_checkpoint(root)
    catalogue = Catalog(root)
    names = catalogue.names()
    if any(parse_step(name) is not None for name in names) or run_folder(root).is_dir():
        return
    if not foreign_in(root, names) and not any((root / name / MANIFEST).exists() for name in names):
        raise ConfigError(
            f"{root} is not a root of checkpoints: it contains none, neither of ckptman nor of plain DCP. Nothing is "
            f"deleted there: check the path"
        )
