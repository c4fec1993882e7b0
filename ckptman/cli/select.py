"""Which checkpoint a command is about: PATH is the folder of one checkpoint, or a root that holds many."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptman.cli.objects import check_is_folder
from ckptman.errors import ConfigError, CorruptError, FormatVersionError, NotFoundError

if TYPE_CHECKING:
    from ckptman.catalog.catalog import Entry

PathOrRoot = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        show_default=False,
        readable=False,  # that is for the command to find out, whose error says more
        help="A checkpoint, or a root (then of its newest checkpoint).",
    ),
]
Step = Annotated[
    int | None, typer.Option("--step", metavar="N", show_default=False, help="Of a root: the checkpoint of this step.")
]


def is_foreign(path: Path) -> bool:
    """Whether plain DCP, or what builds on it, wrote this folder: torch's metadata, no manifest, no name of ours."""
    from ckptman.format.paths import MANIFEST, METADATA, parse_step

    if parse_step(path.name) is not None or os.path.lexists(path / MANIFEST):  # False where it may not be looked at
        return False
    return os.path.lexists(path / METADATA)


def is_checkpoint(path: Path) -> bool:
    """Whether a path is one checkpoint of ours, complete or not, and no root."""
    from ckptman.format.paths import MANIFEST, parse_step

    return path.is_dir() and (parse_step(path.resolve().name) is not None or (path / MANIFEST).exists())


def choose(path: Path, step: int | None = None, every: bool = False, passed_over: bool = False) -> list[Entry]:
    """The entries a command is about: of a root the newest commit, that of `step`, or all.

    `passed_over`: also those that may have been newer and do not count, before it.

    Raises: NotFoundError (no such root, step or checkpoint), RootError, ConfigError (--step of a single checkpoint).
    """
    from ckptman.catalog.catalog import Catalog

    check_is_folder(path)
    if step is not None and every:
        raise ConfigError("--step and --all exclude each other: name one of them")
    if is_checkpoint(path):
        if step is not None or every:
            option = "--all" if every else "--step"
            raise ConfigError(f"{option} chooses among the checkpoints of a root, and {path} is one checkpoint")
        return [_look(path)]
    catalogue = Catalog(path)
    if step is not None:
        return [catalogue.entry(step)]
    entries = catalogue.look() if every or passed_over else catalogue.scan()
    if not entries:
        others = next((name for name in reversed(catalogue.names()) if is_foreign(path / name)), "")
        raise NotFoundError(
            f"{path} holds no checkpoint (a folder such as step-0000000100, or one with a manifest.json or .metadata)"
            + (f", but {path / others} is one of plain DCP: name that folder" if others else "")
        )
    if every:
        return entries
    # One that only a newer ckptman can read may well be the newest: a restore refuses to go back behind it, too.
    newest = next((entry for entry in entries if entry.newer_format), entries[-1])
    if not passed_over:
        return [newest]
    if newest.newer_format is None:
        newest = next((entry for entry in reversed(entries) if entry.complete), newest)
    return [*(each for each in entries if each is not newest and _may_be_newer(each, newest)), newest]


def _may_be_newer(entry: Entry, newest: Entry) -> bool:
    """Whether one that does not count may have been saved after the newest that does."""
    if entry.complete or entry.newer_format is not None:
        return False
    return entry.unreadable is not None or entry.step > newest.step or entry.sequence > newest.sequence


def _look(path: Path) -> Entry:
    """One folder, with the same rules by which the catalogue judges those of a root."""
    from ckptman.catalog.catalog import Entry, mark
    from ckptman.catalog.rollback_records import read_abandoned
    from ckptman.format.manifest import missing_file, read_manifest
    from ckptman.format.paths import parse_step

    named = parse_step(path.resolve().name)
    step = named.step if named else 0
    try:
        manifest = read_manifest(path)
    except FileNotFoundError:
        return Entry(step, path, None, "it has no manifest.json")
    except FormatVersionError as error:
        return Entry(step, path, None, f"format version {error.found} is newer than this ckptman", error)
    except CorruptError as error:
        return Entry(step, path, None, str(error))
    problem = missing_file(path, manifest)
    if named is not None and named.step != manifest.step:
        problem = f"its manifest is of step {manifest.step}"
    elif named is not None and named.kind in ("tmp", "trash"):
        problem = "it was never committed" if named.kind == "tmp" else "it was deleted"
    return mark(Entry(manifest.step, path, manifest, problem), read_abandoned(path.resolve().parent))
