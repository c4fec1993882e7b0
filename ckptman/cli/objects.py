"""Checkpoints in an object store, for commands that take `s3://bucket/prefix` in place of a root."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ckptman.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from ckptman.catalog.backends.object_store import ObjectBackend, ObjectEntry


def check_is_folder(path: Path | str) -> None:
    """Raises: ConfigError where this is the address of an object store, or is meant for one."""
    from ckptman.catalog.backends.object_store import find_url

    if os.path.lexists(path):  # whatever its name is
        return
    if (url := find_url(str(path))) is not None:
        raise ConfigError(
            f"{url} is in an object store, and this command is not for those: copy it to a folder first, with "
            f"ckptman copy {url} FOLDER"
        )


def choose_objects(url: str, step: int | None, every: bool) -> tuple[ObjectBackend, list[ObjectEntry]]:
    """The entries a command is about, as `target.choose` says, and where they are.

    Without a choice: the newest that counts, after those that do not and may be newer.
    Raises: ConfigError, NotFoundError, RootError.
    """
    from ckptman.catalog.backends.object_store import ObjectBackend
    from ckptman.format.paths import parse_step

    if step is not None and every:
        raise ConfigError("--step and --all exclude each other: name one of them")
    above, _, last = url.rpartition("/")
    if (named := parse_step(last)) is not None and named.kind == "step":
        if step is not None or every:
            raise ConfigError(f"--step and --all choose among the checkpoints of a root, and {url} is one checkpoint")
        url, step = above, named.step
    place = ObjectBackend(url)
    entries = place.look(abandoned=True)
    if step is not None:
        found = [entry for entry in entries if entry.step == step]
        if not found:
            known = ", ".join(str(entry.step) for entry in entries[-10:]) or "none"
            raise NotFoundError(f"{url} has no checkpoint of step {step}; the latest there are: {known}")
        return place, found
    entries = [entry for entry in entries if not entry.abandoned]
    if every or not entries:
        return place, entries
    newest = next((entry for entry in reversed(entries) if entry.complete), entries[-1])
    return place, [*(each for each in entries if not each.complete and each.step > newest.step), newest]
