"""`ckptman show PATH`: one checkpoint in full: where it comes from, its tensors, its plain values."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptman.cli import console
from ckptman.cli.list import describe, verified
from ckptman.cli.options import AsJson
from ckptman.cli.select import PathOrRoot, Step, choose, is_foreign
from ckptman.cli.tensors import TensorFacts, foreign_tensors, tensors_of
from ckptman.errors import CorruptError
from ckptman.policies.retention_rules import is_known_time

if TYPE_CHECKING:
    from ckptman.storage.catalog.catalog import Entry
    from ckptman.storage.catalog.verified import Verified
    from ckptman.storage.format.index import Unit

VALUES_SHOWN = 12
"""Plain values shown of one object: an optimizer has a dozen for each parameter."""


def show(path: PathOrRoot, step: Step = None, as_json: AsJson = False) -> None:
    """Show what one checkpoint holds.

    Its origin, each tensor with shape, dtype and sharding, and its plain values.
    """
    if step is None and is_foreign(path):
        _show_foreign(path, as_json)
        return
    from ckptman.storage.catalog.reader_lease import reading
    from ckptman.storage.catalog.verified import read_verified
    from ckptman.storage.format.index import open_table, read_index

    (entry,) = choose(path, step, allow_nonfinite=True)
    with reading(entry.path, what="show"):
        manifest = entry.require_manifest()
        index = read_index(entry.path, manifest)
        tensors = tensors_of(index, open_table(entry.path, manifest, index))
        units = [each for each in index.units if not (isinstance(each.value, dict) and each.value.get("~") == "tensor")]
        note = read_verified(entry.path, manifest)
        values = [(unit, *_decoded(unit, entry.path)) for unit in units]
    if as_json:
        console.say_json(
            {
                **describe(entry, note),
                "files": {name: record.model_dump() for name, record in sorted(manifest.files.items())},
                "tensors": [asdict(tensor) for tensor in tensors],
                "values": [{"state": unit.state, "key": unit.key, "value": unit.value} for unit in units],
            }
        )
        return
    console.say(*_origin(entry, note, time.time()))
    console.say(*_tensor_lines(tensors))
    console.say(*_value_lines(values))


def _show_foreign(path: Path, as_json: bool) -> None:
    """Show the tensors and the names of the plain values of a checkpoint without a manifest. Raises: CorruptError."""
    tensors, values, changed = foreign_tensors(path)
    if as_json:
        facts: dict[str, Any] = {"path": str(path), "manifest": None, "tensors": [asdict(each) for each in tensors]}
        console.say_json({**facts, "values": values, "transforms": changed})
        return
    console.say(f"{console.plain(path)}: written by plain DCP; no manifest, so no step, no digests, no lineage")
    if changed:
        names = console.plain("; ".join(changed))
        console.say(f"compressed, or transformed otherwise ({names}): load it by dcp.load with these extensions")
    console.say(*_tensor_lines(tensors))
    if values:
        console.say(f"\n{console.count(len(values), 'plain value')}: {', '.join(map(console.plain, values))}")


def _tensor_lines(tensors: list[TensorFacts]) -> list[str]:
    """The section about tensors, for people."""
    title = f"{console.count(len(tensors), 'tensor')}, {console.size(sum(tensor.bytes for tensor in tensors))}"
    rows = [
        (
            console.plain(tensor.name),
            str(list(tensor.shape)),
            console.plain(tensor.dtype),
            tensor.sharding,
            console.size(tensor.bytes),
        )
        for tensor in tensors
    ]
    return ["", title, *console.table(("name", "shape", "dtype", "sharding", "size"), rows, indent=2)] if rows else []


def short(value: object, limit: int = 88) -> str:
    """A plain value on one line, cut where it gets long."""
    try:
        written = console.plain(repr(value))
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "(a number too long to show)"
    return written if len(written) <= limit else f"{written[: limit - 3]}..."


def _when(seconds: float, now: float) -> str:
    if not is_known_time(seconds):
        return "at an unknown time: the clock of that host was not set"
    ago = console.age_of(seconds, now)
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return clock if ago == "unknown" else f"{clock}, {ago} ago"


def _origin(entry: Entry, note: Verified | None, now: float) -> list[str]:
    manifest = entry.require_manifest()
    run = f"{console.plain(manifest.run_id) or '(no id)'}, attempt {manifest.attempt}"
    came_from = "nothing: a fresh start" if manifest.restored_from is None else f"step {manifest.restored_from}"
    rows = [
        ("saved", f"{_when(manifest.time_seconds, now)} ({console.plain(manifest.reason)})"),
        ("commit", f"number {manifest.sequence} of its root"),
        ("size", f"{console.size(manifest.total_bytes)} in {console.count(len(manifest.files), 'file')}"),
        ("verified", verified(note, now)),
        *([("damaged", console.paint(console.plain(note.damaged), "red"))] if note and note.damaged else []),
        *([("abandoned", console.plain(entry.abandoned))] if entry.abandoned else []),
        ("ranks", f"{manifest.world_size}, mesh {console.mesh(manifest.mesh)}"),
        ("metrics", console.metrics(manifest.metrics) or "-"),
        *([("not finite", console.paint(console.plain(entry.nonfinite), "yellow"))] if entry.nonfinite else []),
        *((f"metadata {console.plain(name)}", short(value)) for name, value in manifest.metadata.items()),
        ("run", run + (f", job {console.plain(manifest.job_id)}" if manifest.job_id else "")),
        ("restored from", came_from),
        (
            "written by",
            f"torch {console.plain(manifest.torch_version)}, ckptman {console.plain(manifest.ckptman_version)}, "
            f"format {manifest.format_version}",
        ),
    ]
    return [f"Step {entry.step}: {console.plain(entry.path)}", *console.table((), rows, indent=2)]


def _decoded(unit: Unit, folder: Path) -> tuple[Any, Any]:
    """Key and value of a unit. Raises: CorruptError, naming it."""
    from ckptman.storage.format.value_codec import decode

    try:
        return decode(unit.key), decode(unit.value)
    except CorruptError as error:
        raise CorruptError(
            f"{folder}: the value {unit.state} cannot be read: {error}; restore an older checkpoint"
        ) from error


def _value_lines(values: list[tuple[Unit, Any, Any]]) -> list[str]:
    by_state: dict[str, list[tuple[Unit, Any, Any]]] = {}
    for each in values:
        by_state.setdefault(each[0].state, []).append(each)
    rows = []
    for state, group in by_state.items():
        for unit, key, value in group[:VALUES_SHOWN]:
            name = state if unit.whole else f"{state}.{key if isinstance(key, str) else short(key)}"
            rows.append((console.plain(name), short(value)))
        if len(group) > VALUES_SHOWN:
            rows.append((f"{console.plain(state)}.*", f"... {len(group) - VALUES_SHOWN:,} more: --json shows all"))
    if not rows:
        return []
    return ["", console.count(len(values), "plain value"), *console.table((), rows, indent=2)]
