"""`ckptman list ROOT`: what is there, and whether each of it counts."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptman.cli import console
from ckptman.cli.memory import describe_parts, in_memory, parts_text
from ckptman.cli.options import AsJson, path_argument
from ckptman.cli.select import known_suspects, roots_near, roots_of
from ckptman.errors import CkptmanError, NotFoundError
from ckptman.policies.restore_choice import choose
from ckptman.storage.format.foreign import ForeignCheckpoint, foreign_in
from ckptman.storage.format.paths import check_is_no_checkpoint

if TYPE_CHECKING:
    from ckptman.storage.catalog.backends.node_memory import NodeMemory, Part
    from ckptman.storage.catalog.catalog import Entry
    from ckptman.storage.catalog.verified import Verified
    from ckptman.storage.format.paths import StepName

SIZES_SHOWN = 4
DROPPED = ("mesh", "ranks", "verified", "metrics")
"""Columns that a narrow terminal has no room for."""


def list_checkpoints(
    root: Annotated[
        list[str], path_argument("ROOT", "The folder that holds checkpoints, or s3://bucket/prefix. May be several.")
    ],
    as_json: AsJson = False,
) -> None:
    """List the checkpoints under ROOT.

    Oldest commit first: the last that is complete and finite is what a run restores. Of several roots, a line for each;
    one that cannot be read keeps no other from being listed, and the exit code is that of the first such.
    """
    from ckptman.storage.catalog.backends.backend import find_url

    found: dict[str | Path, None] = {}
    several = len(root) > 1
    for each in root:
        if not os.path.lexists(each) and (url := find_url(each)) is not None:
            found[url] = None
            continue
        try:
            folders, many = roots_of([each])
        except NotFoundError:  # a pattern that matches nothing
            if not several:
                raise
            folders, many = [Path(each)], True
        found |= dict.fromkeys(folders)
        several = several or many
    if several:
        _list_many(list(found), as_json)
        return
    listing = _look(next(iter(found)))
    if as_json:
        console.say_json(_as_dict(listing))
        return
    entries, notes, held = listing.entries, listing.notes, listing.held
    if entries:
        now = time.time()
        # A column that would be empty from top to bottom is left out.
        shown = any(note is not None and not note.damaged for note in notes.values())
        headers = ("step", "age", "size", "ranks", "mesh", "metrics", *["verified"] * shown, "state")
        rows = []
        for entry in entries:
            facts: tuple[object, ...] = (None,) * 5
            if (manifest := entry.manifest) is not None:
                age, size = console.age_of(manifest.time_seconds, now), console.size(manifest.total_bytes)
                mesh, metrics = console.mesh(manifest.mesh), console.metrics(manifest.metrics) or None
                facts = (age, size, manifest.world_size, mesh, metrics)
            note = notes.get(entry.path)
            rows.append((entry.step, *facts, *[verified(note, now)] * shown, _state(entry, note)))
        console.say(*console.table(headers, rows, right="step age size ranks", drop=DROPPED), "")
    console.say(_summary(listing))
    if held:
        parts = "; ".join(f"step {part.step}, {parts_text(part)} parts" for _, part in held)
        console.say(f"In the memory of this node: {parts}. Other nodes may hold more; ckptman memory list says whose.")
    if listing.others:
        console.say("", *_foreign_lines(listing.others))
    if not entries and not listing.others and (near := roots_near(Path(listing.where))):
        console.say(f"Did you mean {' or '.join(map(str, near))}?")


@dataclass
class _Listing:
    """What is under a root. `damaged`: the folders that a verification found so."""

    where: str
    entries: Sequence[Entry]
    notes: dict[Path, Verified | None] = field(default_factory=dict)
    leftovers: list[tuple[Path, StepName]] = field(default_factory=list)
    others: list[ForeignCheckpoint] = field(default_factory=list)
    held: list[tuple[NodeMemory, Part]] = field(default_factory=list)
    suspects: Mapping[int, str] = field(default_factory=dict)

    @cached_property
    def damaged(self) -> set[Path]:
        return {path for path, note in self.notes.items() if note is not None and note.damaged}

    @property
    def counting(self) -> list[Entry]:
        """What was not abandoned, whether it is complete or not."""
        return [entry for entry in self.entries if not (entry.complete and entry.abandoned)]

    @property
    def good(self) -> list[Entry]:
        """What counts, oldest commit first."""
        return [entry for entry in self.counting if entry.complete and entry.path not in self.damaged]

    @property
    def broken(self) -> int:
        """How many were not abandoned, and do not count."""
        return len(self.counting) - len(self.good)

    @property
    def abandoned(self) -> int:
        return len(self.entries) - len(self.counting)

    @cached_property
    def concern(self) -> str:
        """Why a restore does not take the newest, or takes one that is not finite; "" if neither."""
        if not self.good or (choice := choose(reversed(self.good), self.suspects)).tried[:1] == self.good[-1:]:
            return "not finite: none is" if self.good and choice.only_nonfinite else ""
        why = "not finite" if choice.nonfinite else "a suspect"
        return f"{why}: a restore {f'goes back to step {choice.tried[0].step}' if choice.tried else 'refuses it'}"


def _look(root: str | Path) -> _Listing:
    """Look under a root, or an address. Raises: NotFoundError, RootError, ConfigError."""
    from ckptman.storage.catalog.catalog import Catalog
    from ckptman.storage.catalog.verified import VERIFIED, read_verified

    if isinstance(root, str):  # where there are no notes and no leftovers
        from ckptman.storage.catalog.backends.object_store import ObjectBackend

        return _Listing(root, ObjectBackend(root).look(abandoned=True))
    check_is_no_checkpoint(root)
    catalogue = Catalog(root)
    entries, leftovers = catalogue.look(abandoned=True), catalogue.leftovers()
    noted = (each for each in entries if each.complete and VERIFIED in each.beside)
    notes = {each.path: read_verified(each.path, each.require_manifest()) for each in noted}
    others = foreign_in(root, catalogue.names())
    return _Listing(str(root), entries, notes, leftovers, others, in_memory(root), known_suspects(root))


def _as_dict(listing: _Listing) -> dict[str, Any]:
    return {
        "root": listing.where,
        "checkpoints": [describe(entry, listing.notes.get(entry.path)) for entry in listing.entries],
        "leftovers": [{"path": path, "step": name.step, "kind": name.kind} for path, name in listing.leftovers],
        "foreign": list(map(_describe_foreign, listing.others)),
        "memory": describe_parts(listing.held),
    }


def _list_many(roots: Sequence[str | Path], as_json: bool) -> None:
    """List several roots, one per line. Ends with the exit code of the first that could not be read."""
    now, rows, described, failed = time.time(), list[Sequence[object]](), list[dict[str, Any]](), list[Exception]()
    for root in roots:
        try:
            listing = _look(root)
        except (CkptmanError, OSError) as error:
            failed.append(error)
            why = console.message(error)
            rows.append((root, None, None, None, None, console.paint(why, "red")))
            described.append({"root": root, "error": why, "exit_code": console.exit_code(error)})
            continue
        described.append(_as_dict(listing))
        good = [each.require_manifest() for each in listing.good]
        newest = (good[-1].step, console.age_of(good[-1].time_seconds, now)) if good else (None, None)
        total = console.size(sum(each.total_bytes for each in good))
        rows.append((root, *newest, f"{len(good):,}", total, _state_of_root(listing)))
    if as_json:
        console.say_json(described)
    else:
        headers = ("root", "newest", "age", "count", "size", "state")
        console.say(*console.table(headers, rows, right="newest age count size", drop=("count", "size")))
    if failed:
        console.complain(f"{len(failed):,} of {console.count(len(roots), 'root')} could not be listed: see above")
        raise typer.Exit(console.exit_code(failed[0]))


def _state_of_root(listing: _Listing) -> str:
    said = []
    if not listing.good:
        said.append("no complete checkpoint")
    elif listing.concern:
        said.append(f"the newest is {listing.concern.partition(':')[0]}")
    if broken := listing.broken:
        said.append(f"{broken:,} {'does' if broken == 1 else 'do'} not count")
    if listing.abandoned:
        said.append(f"{listing.abandoned:,} abandoned")
    if listing.leftovers:
        said.append(console.count(len(listing.leftovers), "leftover"))
    if listing.others:
        said.append(f"{len(listing.others):,} of other programs")
    text = ", ".join(said) or "complete"
    return console.paint(text, "yellow") if not listing.good or listing.concern or broken else text


def _describe_foreign(found: ForeignCheckpoint) -> dict[str, Any]:
    """A checkpoint of another program, for programs; sizes and times are those of its files."""
    size, written = None, None
    with contextlib.suppress(OSError):  # deleted since, or not readable for us
        size, written = found.size_and_time()
    return {"path": found.path, "writer": found.writer, "step": found.step, "bytes": size, "time_seconds": written}


def _foreign_lines(others: Sequence[ForeignCheckpoint]) -> list[str]:
    """The checkpoints of other programs, and how far ckptman supports them."""
    now, rows = time.time(), []
    for found in others:
        facts = _describe_foreign(found)
        is_there = facts["bytes"] is not None
        size = console.size(facts["bytes"]) if is_there else None
        age = console.age_of(facts["time_seconds"], now) if is_there else None
        rows.append((found.step, age, size, found.path.name, f"{found.writer}, no digests"))
    number = console.count(len(others), "checkpoint")
    text = f"{number} of other programs, which no restore takes from here and no prune deletes."
    if any(each.is_dcp for each in others):
        text += " ckptman adopt makes those of plain DCP count."
    return [*console.table(("step", "age", "size", "name", "written by"), rows, right="step age size"), text]


def describe(entry: Entry, note: Verified | None) -> dict[str, Any]:
    """Describe a checkpoint for --json. Without a readable manifest: only its path, and why it is not valid."""
    facts: dict[str, Any] = {}
    if entry.manifest is not None:
        facts = {"bytes": entry.manifest.total_bytes}
        facts |= entry.manifest.model_dump(mode="python", exclude={"step", "files", "block_bytes"})
    damaged, internal = note.damaged if note else "", {"manifest_digest", "files_digest", "damaged"}
    return {
        "step": entry.step,
        "path": entry.where,
        "complete": entry.complete,
        "problem": entry.problem,
        **facts,
        "abandoned": entry.abandoned or None,
        "pinned": entry.pinned or None,
        "verified": note.model_dump(mode="json", exclude=internal) if note and not damaged else None,
        "damaged": damaged or None,
    }


def verified(note: Verified | None, now: float) -> str | None:
    """When a checkpoint was verified, and for which world sizes: `5 min ago`, `3 h ago, on 1 2 8`, `plan only`."""
    if note is None or note.damaged:
        return None
    when = f"{console.age(now - note.time_seconds)} ago" if note.every_byte else "plan only"
    loaded = [*map(str, note.world_sizes), *("x".join(map(str, mesh)) for mesh in note.meshes)]
    return f"{when}, on {' '.join(loaded[:SIZES_SHOWN])}{' ...' * (len(loaded) > SIZES_SHOWN)}" if loaded else when


def short_problem(entry: Entry, problem: str) -> str:
    """What is wrong with a checkpoint, for a line that says which one it is: without its path, and without a remedy."""
    for folder in (os.path.abspath(entry.where), entry.where):  # noqa: PTH100 it may be an address
        # Only where the path begins: whoever found it may have named the folder otherwise.
        problem = re.sub(rf"(?<![^\s('\"]){re.escape(folder + os.sep)}", "", problem)
    return problem.partition("; ")[0]


def _state(entry: Entry, note: Verified | None) -> str:
    if note is not None and note.damaged:
        return console.paint(f"damaged: {short_problem(entry, note.damaged)}", "red")
    if entry.problem is None:
        state = f"abandoned {entry.abandoned}" if entry.abandoned else "complete"
        if entry.nonfinite:
            state += console.paint(f", not finite: {entry.nonfinite}", "yellow")
        return f"{state}, pinned: {entry.pinned}" if entry.pinned else state
    return console.paint(f"does not count: {short_problem(entry, entry.problem)}", "red")


def _summary(listing: _Listing) -> str:
    complete, left = listing.good, listing.abandoned
    sentences = [f"{listing.where}: no complete checkpoint."]
    if complete:
        total = console.size(sum(entry.require_manifest().total_bytes for entry in complete))
        number = console.count(len(complete), "complete checkpoint")
        sentences = [f"{number}, {total}; the newest is of step {complete[-1].step}."]
        if listing.concern:
            sentences.append(f"The newest is {listing.concern}.")
    if broken := listing.broken:
        sentences.append(f"{broken:,} {'does' if broken == 1 else 'do'} not count.")
    if left:
        sentences.append(f"{left:,} {'was' if left == 1 else 'were'} abandoned.")
    if listing.leftovers:
        folders = console.count(len(listing.leftovers), "folder")
        sentences.append(f"{folders} besides, unfinished or left over by a crash: ckptman prune clears what is dead.")
    return " ".join(sentences)
