"""`ckptman show PATH`: one checkpoint in full: where it comes from, its tensors, its plain values."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptman.cli import console as text
from ckptman.cli.list import describe, verified
from ckptman.cli.options import AsJson
from ckptman.cli.select import PathOrRoot, Step, choose, is_foreign
from ckptman.cli.tensors import TensorFacts, foreign_tensors, tensors_of
from ckptman.errors import CorruptError
from ckptman.policies.retention_rules import is_known_time

if TYPE_CHECKING:
    from ckptman.catalog.catalog import Entry
    from ckptman.catalog.verified import Verified
    from ckptman.format.index import Unit

VALUES_SHOWN = 12
"""Plain values shown of one object: an optimizer has a dozen for each parameter."""


def show(path: PathOrRoot, step: Step = None, as_json: AsJson = False) -> None:
    """Show what one checkpoint holds.

    Its origin, each tensor with shape, dtype and sharding, and its plain values.
    """
    if step is None and is_foreign(path):
        _show_foreign(path, as_json)
        return
    from ckptman.catalog.verified import read_verified
    from ckptman.format.index import open_table, read_index

    (entry,) = choose(path, step)
    manifest = entry.require_manifest()
    index = read_index(entry.path, manifest)
    tensors = tensors_of(index, open_table(entry.path, manifest, index))
    values = [unit for unit in index.units if not _is_tensor(unit.value)]
    note = read_verified(entry.path, manifest)
    read = [_decoded(unit, entry.path) for unit in values]
    if as_json:
        text.say_json(
            {
                **describe(entry, note),
                "files": {name: record.model_dump() for name, record in sorted(manifest.files.items())},
                "tensors": [asdict(tensor) for tensor in tensors],
                "values": [{"state": unit.state, "key": unit.key, "value": unit.value} for unit in values],
            }
        )
        return
    text.say(*_origin(entry, note, time.time()))
    text.say(*_tensor_lines(tensors))
    text.say(*_value_lines(values, read))


def _show_foreign(path: Path, as_json: bool) -> None:
    """Show the tensors and the names of the plain values of a checkpoint without a manifest. Raises: CorruptError."""
    tensors, values, changed = foreign_tensors(path)
    if as_json:
        facts: dict[str, Any] = {"path": str(path), "manifest": None, "tensors": [asdict(each) for each in tensors]}
        text.say_json({**facts, "values": values, "transforms": changed})
        return
    text.say(f"{text.plain(path)}: written by plain DCP; no manifest, so no step, no digests, no lineage")
    if changed:
        names = text.plain("; ".join(changed))
        text.say(f"compressed, or transformed otherwise ({names}): load it by dcp.load with these extensions")
    text.say(*_tensor_lines(tensors))
    if values:
        text.say(f"\n{text.count(len(values), 'plain value')}: {', '.join(map(text.plain, values))}")


def _tensor_lines(tensors: list[TensorFacts]) -> list[str]:
    """The section about tensors, for people."""
    title = f"{text.count(len(tensors), 'tensor')}, {text.size(sum(tensor.bytes for tensor in tensors))}"
    rows = [
        (
            text.plain(tensor.name),
            str(list(tensor.shape)),
            text.plain(tensor.dtype),
            tensor.sharding,
            text.size(tensor.bytes),
        )
        for tensor in tensors
    ]
    return ["", title, *_indented(text.table(("name", "shape", "dtype", "sharding", "size"), rows))] if rows else []


def short(value: object, limit: int = 88) -> str:
    """A plain value on one line, cut where it gets long."""
    try:
        written = text.plain(repr(value))
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "(a number too long to show)"
    return written if len(written) <= limit else f"{written[: limit - 3]}..."


def _when(seconds: float, now: float) -> str:
    if not is_known_time(seconds):
        return "at an unknown time: the clock of that host was not set"
    ago = text.age_of(seconds, now)
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return clock if ago == "unknown" else f"{clock}, {ago} ago"


def _origin(entry: Entry, note: Verified | None, now: float) -> list[str]:
    manifest = entry.require_manifest()
    run = f"{text.plain(manifest.run_id) or '(no id)'}, attempt {manifest.attempt}"
    came_from = "nothing: a fresh start" if manifest.restored_from is None else f"step {manifest.restored_from}"
    rows = [
        ("saved", f"{_when(manifest.time_seconds, now)} ({text.plain(manifest.reason)})"),
        ("commit", f"number {manifest.sequence} of its root"),
        ("size", f"{text.size(manifest.total_bytes)} in {text.count(len(manifest.files), 'file')}"),
        ("verified", verified(note, now)),
        *([("damaged", text.paint(text.plain(note.damaged), "red"))] if note is not None and note.damaged else []),
        *([("abandoned", text.plain(entry.abandoned))] if entry.abandoned else []),
        ("ranks", f"{manifest.world_size}, mesh {text.mesh(manifest.mesh)}"),
        ("metrics", text.metrics(manifest.metrics) or "-"),
        ("run", run + (f", job {text.plain(manifest.job_id)}" if manifest.job_id else "")),
        ("restored from", came_from),
        (
            "written by",
            f"torch {text.plain(manifest.torch_version)}, ckptman {text.plain(manifest.ckptman_version)}, "
            f"format {manifest.format_version}",
        ),
    ]
    return [f"Step {entry.step}: {text.plain(entry.path)}", *_indented(text.table(("", ""), rows)[1:])]


def _decoded(unit: Unit, folder: Path) -> tuple[Any, Any]:
    """Key and value of a unit. Raises: CorruptError, naming it."""
    from ckptman.format.value_codec import decode

    try:
        return decode(unit.key), decode(unit.value)
    except CorruptError as error:
        raise CorruptError(
            f"{folder}: the value {unit.state} cannot be read: {error}; restore an older checkpoint"
        ) from error


def _value_lines(units: list[Unit], decoded: list[tuple[Any, Any]]) -> list[str]:
    by_state: dict[str, list[tuple[Unit, Any, Any]]] = {}
    for unit, (key, value) in zip(units, decoded):
        by_state.setdefault(unit.state, []).append((unit, key, value))
    rows = []
    for state, group in by_state.items():
        for unit, key, value in group[:VALUES_SHOWN]:
            name = state if unit.whole else f"{state}.{key if isinstance(key, str) else short(key)}"
            rows.append((text.plain(name), short(value)))
        if len(group) > VALUES_SHOWN:
            rows.append((f"{text.plain(state)}.*", f"... {len(group) - VALUES_SHOWN:,} more: --json shows all"))
    if not rows:
        return []
    return ["", text.count(len(units), "plain value"), *_indented(text.table(("", ""), rows)[1:])]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and value.get("~") == "tensor"


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
