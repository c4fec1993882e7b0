"""`ckptman show PATH`: one checkpoint in full: where it comes from, its tensors, its plain values."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptman.cli import console
from ckptman.cli.list import describe, verified
from ckptman.cli.options import AsJson
from ckptman.cli.select import PathOrRoot, Step, choose, is_foreign
from ckptman.errors import CorruptError
from ckptman.policies.retention_rules import is_known_time

if TYPE_CHECKING:
    from ckptman.storage.catalog.catalog import Entry
    from ckptman.storage.catalog.verified import Verified
    from ckptman.storage.format.index import Unit

Box = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes of a chunk, in elements."""

VALUE_WIDTH, VALUES_SHOWN = 88, 12
"""Columns of a plain value, and values shown of one object: an optimizer has a dozen for each parameter."""


@dataclass(frozen=True)
class TensorFacts:
    """A tensor as saved. `shape`: global; `sharding`: in words; `bytes`: of its elements, without their containers."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: int
    sharding: str
    bytes: int


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
        table = open_table(entry.path, manifest, index)
        tensors = [
            tensor_facts(name, each.shape, each.dtype, table.chunks(name).boxes())
            for name, each in sorted(index.tensors.items())
        ]
        units = [each for each in index.units if not (isinstance(each.value, dict) and each.value.get("~") == "tensor")]
        note = read_verified(entry.path, manifest)
        values = [(unit, *_decoded(unit, entry.path)) for unit in units]
    if as_json:
        console.say_json(
            {
                **describe(entry, note),
                "files": {name: record.model_dump() for name, record in sorted(manifest.files.items())},
                "tensors": tensors,
                "values": [{"state": unit.state, "key": unit.key, "value": unit.value} for unit in units],
            }
        )
        return
    console.say(*_origin(entry, note, time.time()))
    console.say(*_tensor_lines(tensors))
    console.say(*_value_lines(values))


def _show_foreign(path: Path, as_json: bool) -> None:
    """Show the tensors of a checkpoint of plain DCP or torchtitan, the names of its plain values, and its transforms.

    Its description is a pickle, so this needs torch. Raises: CorruptError.
    """
    from ckptman.engine.loading.restricted_unpickler import read_foreign_metadata, transforms_in
    from ckptman.storage.format.paths import METADATA

    tensors, values = [], []
    metadata = read_foreign_metadata(path / METADATA)
    described: dict[str, Any] = dict(metadata.state_dict_metadata)
    for name, each in sorted(described.items()):
        if hasattr(each, "chunks"):
            boxes = [(chunk.offsets, chunk.sizes) for chunk in each.chunks]
            tensors.append(tensor_facts(name, each.size, str(each.properties.dtype).removeprefix("torch."), boxes))
        else:
            values.append(name)
    changed = sorted({*transforms_in(metadata).values()})
    if as_json:
        facts = {"path": path, "manifest": None, "tensors": tensors, "values": values, "transforms": changed}
        console.say_json(facts)
        return
    console.say(f"{path}: written by plain DCP; no manifest, so no step, no digests, no lineage")
    if changed:
        console.say(
            f"compressed, or transformed otherwise ({'; '.join(changed)}): load it by dcp.load with these extensions"
        )
    console.say(*_tensor_lines(tensors))
    if values:
        console.say("", f"{console.count(len(values), 'plain value')}: {', '.join(values)}")


def _tensor_lines(tensors: list[TensorFacts]) -> list[str]:
    """The section about tensors, for people."""
    title = f"{console.count(len(tensors), 'tensor')}, {console.size(sum(tensor.bytes for tensor in tensors))}"
    rows = [(each.name, list(each.shape), each.dtype, each.sharding, console.size(each.bytes)) for each in tensors]
    return ["", title, *console.table(("name", "shape", "dtype", "sharding", "size"), rows, indent=2)] if rows else []


def short(value: object) -> str:
    """A plain value on one line, cut where it gets long."""
    try:
        return console.cut(repr(value), VALUE_WIDTH)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "(a number too long to show)"


def _when(seconds: float, now: float) -> str:
    if not is_known_time(seconds):
        return "at an unknown time: the clock of that host was not set"
    ago = console.age_of(seconds, now)
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return clock if ago == "unknown" else f"{clock}, {ago} ago"


def _origin(entry: Entry, note: Verified | None, now: float) -> list[str]:
    manifest = entry.require_manifest()
    run = f"{manifest.run_id or '(no id)'}, attempt {manifest.attempt}"
    came_from = "nothing: a fresh start" if manifest.restored_from is None else f"step {manifest.restored_from}"
    rows = [
        ("saved", f"{_when(manifest.time_seconds, now)} ({manifest.reason})"),
        ("commit", f"number {manifest.sequence} of its root"),
        ("size", f"{console.size(manifest.total_bytes)} in {console.count(len(manifest.files), 'file')}"),
        ("verified", verified(note, now)),
        *([("damaged", console.paint(note.damaged, "red"))] if note and note.damaged else []),
        *([("abandoned", entry.abandoned)] if entry.abandoned else []),
        ("ranks", f"{manifest.world_size}, mesh {console.mesh(manifest.mesh)}"),
        ("metrics", console.metrics(manifest.metrics) or None),
        *([("not finite", console.paint(entry.nonfinite, "yellow"))] if entry.nonfinite else []),
        *((f"metadata {name}", short(value)) for name, value in manifest.metadata.items()),
        ("run", run + (f", job {manifest.job_id}" if manifest.job_id else "")),
        ("restored from", came_from),
        (
            "written by",
            f"torch {manifest.torch_version}, ckptman {manifest.ckptman_version}, format {manifest.format_version}",
        ),
    ]
    return [f"Step {entry.step}: {entry.path}", *console.table((), rows, indent=2)]


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
            rows.append((name, short(value)))
        if len(group) > VALUES_SHOWN:
            rows.append((f"{state}.*", f"... {len(group) - VALUES_SHOWN:,} more: --json shows all"))
    if not rows:
        return []
    return ["", console.count(len(values), "plain value"), *console.table((), rows, indent=2)]


def tensor_facts(name: str, shape: Sequence[int], dtype: str, boxes: Sequence[Box]) -> TensorFacts:
    """Describe a tensor that was saved in these chunks."""
    from ckptman.storage.format.chunk_table import item_bytes

    # What nobody knows the size of is one of the many one-byte floats.
    total = prod(shape) * (item_bytes(dtype) or 1)
    return TensorFacts(name, tuple(shape), dtype, len(boxes), sharding(shape, boxes), total)


def sharding(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Return how a tensor was cut, in words: `whole`, `4 shards along dim 0`, `2 x 2 shards along dims 0, 1`, `5
    chunks`."""
    if len(boxes) == 1:
        return "whole"
    cuts = [len({tuple(offsets)[dim] for offsets, _ in boxes}) for dim in range(len(shape))]
    dims = [dim for dim, parts in enumerate(cuts) if parts > 1]
    if not dims or prod(cuts) != len(boxes):
        return f"{len(boxes)} chunks"
    if len(dims) == 1:
        return f"{len(boxes)} shards along dim {dims[0]}"
    return f"{' x '.join(str(cuts[dim]) for dim in dims)} shards along dims {', '.join(map(str, dims))}"
