"""`ckptman list ROOT`: what is there, and whether each of it counts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptman.cli import text

if TYPE_CHECKING:
    from ckptman.store.catalogue import Entry

Root = Annotated[Path, typer.Argument(metavar="ROOT", show_default=False, help="The folder that holds checkpoints.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def list_checkpoints(root: Root, as_json: AsJson = False) -> None:
    """List the checkpoints under ROOT.

    Oldest commit first: the last complete one is what a run restores.
    """
    from ckptman.store.catalogue import Catalogue

    catalogue = Catalogue(root)
    entries, leftovers = catalogue.scan(), catalogue.leftovers()
    if as_json:
        unfinished = [{"path": str(path), "step": parsed.step, "kind": parsed.kind} for path, parsed in leftovers]
        text.say_json(
            {"root": str(root), "checkpoints": [describe(entry) for entry in entries], "leftovers": unfinished}
        )
        return
    if entries:
        now = time.time()
        headers = ("step", "age", "size", "ranks", "mesh", "metrics", "state")
        lines = text.table(headers, [_row(entry, now) for entry in entries], right="step age size ranks")
        text.say("\n".join(lines))
        text.say()
    text.say(_summary(root, entries, len(leftovers)))


def describe(entry: Entry) -> dict[str, Any]:
    """A checkpoint for programs. Without a readable manifest, only where it is and what is wrong with it."""
    facts: dict[str, Any] = {
        "step": entry.step,
        "path": str(entry.path),
        "complete": entry.complete,
        "problem": entry.problem,
    }
    if entry.manifest is not None:
        facts |= {"bytes": entry.manifest.total_bytes}
        facts |= entry.manifest.model_dump(mode="python", exclude={"step", "files", "block_bytes"})
    return facts


def _row(entry: Entry, now: float) -> tuple[str, ...]:
    manifest = entry.manifest
    if manifest is None:
        return (str(entry.step), "-", "-", "-", "-", "-", _state(entry))
    return (
        str(entry.step),
        text.age(now - manifest.time_seconds),
        text.size(manifest.total_bytes),
        str(manifest.world_size),
        text.mesh(manifest.mesh),
        text.metrics(manifest.metrics) or "-",
        _state(entry),
    )


def _state(entry: Entry) -> str:
    if entry.problem is None:
        return "complete"
    return text.paint(f"does not count: {text.plain(entry.problem)}", "red")


def _summary(root: Path, entries: list[Entry], leftovers: int) -> str:
    complete = [entry.require_manifest() for entry in entries if entry.complete]
    sentences = [f"{text.plain(root)}: no complete checkpoint."]
    if complete:
        total = text.size(sum(manifest.total_bytes for manifest in complete))
        sentences = [
            f"{text.count(len(complete), 'complete checkpoint')}, {total}; the newest is of step {complete[-1].step}."
        ]
    if broken := len(entries) - len(complete):
        sentences.append(f"{broken:,} {'does' if broken == 1 else 'do'} not count.")
    if leftovers:
        folders = text.count(leftovers, "folder")
        sentences.append(f"{folders} besides, unfinished or left over by a crash: ckptman prune clears what is dead.")
    return " ".join(sentences)
