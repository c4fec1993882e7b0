"""`ckptman diff A B`: what changed between two checkpoints: tensors, and plain values side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptman.cli import console
from ckptman.cli.diff_report import Side, as_dict, lines
from ckptman.cli.options import AsJson, option, path_argument
from ckptman.cli.progress import progress
from ckptman.cli.select import choose, is_foreign
from ckptman.errors import ConfigError, NotFoundError
from ckptman.policies.parameters import check_count
from ckptman.storage.format.paths import is_checkpoint

DIFFERENT = 1
"""The exit code of a diff that found something, as of the diff that everybody knows."""


def diff(
    a: Annotated[
        Path, path_argument("A", "A checkpoint, or a root (then its newest finite one; alone: its two newest).")
    ],
    b: Annotated[Path | None, path_argument("B", "The one it is compared with.")] = None,
    steps: Annotated[str | None, option("--steps", "N,N", "Of a root: the checkpoints of these two steps.")] = None,
    only: Annotated[
        list[str] | None,
        option("--only", "PATTERN", "Only names that match, such as 'model.*.bias'. May be given several times."),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", metavar="N", help="Show that many lines of tensors, and of values.")
    ] = 20,
    everything: Annotated[
        bool, typer.Option("--all", help="Show each tensor and value on a line of its own, however many.")
    ] = False,
    read: Annotated[
        bool, typer.Option("--read", help="Read every tensor, also where the digests say it did not change.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what changed between two checkpoints.

    Layers that differ in the same way are one line, with their number and the largest change.

    Exit code 0: nothing. 1: something. 2: wrong usage. 3: not found. 4: one of them is damaged. 9: a newer ckptman
    wrote one of them. 10: one of them could not be read.
    """
    check_count("diff", "--top", top)
    before, after = _sides(a, b, steps)
    from ckptman.tools.diff.compare import compare

    found = compare(before.path, after.path, only or ["*"], read, progress)
    if as_json:
        console.say_json(as_dict(before, after, found))
    else:
        console.say(*lines(before, after, found, None if everything else top))
    if not found.same:
        raise typer.Exit(DIFFERENT)


def _sides(a: Path, b: Path | None, steps: str | None) -> tuple[Side, Side]:
    if steps is not None:
        try:
            first, second = map(int, steps.split(","))
        except ValueError:
            raise ConfigError(f"--steps: two steps with a comma between them, such as 100,200, not {steps!r}") from None
        if b is not None:
            raise ConfigError(f"--steps names two checkpoints of one root, and {b} is a second path: give one of them")
        return _side(a, first), _side(a, second)
    if b is not None:
        return _side(a), _side(b)
    if is_checkpoint(a) or is_foreign(a):
        raise ConfigError(f"{a} is one checkpoint: name the one it is to be compared with, too")
    entries = choose(a, every=True)
    for entry in entries:
        if (reason := entry.newer_format or entry.unreadable) is not None:
            raise reason
    complete = [entry for entry in entries if entry.complete]
    if len(complete) < 2:
        raise NotFoundError(
            f"{a} holds {console.count(len(complete), 'complete checkpoint')}: there is nothing to compare"
        )
    older, newer = complete[-2:]
    return Side(older.path, older.require_manifest()), Side(newer.path, newer.require_manifest())


def _side(path: Path, step: int | None = None) -> Side:
    if step is None and is_foreign(path):
        return Side(path)
    (entry,) = choose(path, step)
    return Side(entry.path, entry.require_manifest())
