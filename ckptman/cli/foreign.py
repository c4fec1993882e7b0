"""What plain DCP or torchtitan wrote, shown. Its description is a pickle, so this needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptman.cli import console as text
from ckptman.cli.tensors import TensorFacts, tensor_facts


def show_foreign(path: Path, as_json: bool) -> None:
    """Show the tensors and the names of the plain values of a checkpoint without a manifest. Raises: CorruptError."""
    from ckptman.cli.show import tensor_lines

    tensors, values, changed = _read(path)
    if as_json:
        facts: dict[str, Any] = {"path": str(path), "manifest": None, "tensors": [each.as_dict() for each in tensors]}
        text.say_json({**facts, "values": values, "transforms": changed})
        return
    text.say(f"{text.plain(path)}: written by plain DCP; no manifest, so no step, no digests, no lineage")
    if changed:
        names = text.plain("; ".join(changed))
        text.say(f"compressed, or transformed otherwise ({names}): load it by dcp.load with these extensions")
    text.say(*tensor_lines(tensors))
    if values:
        text.say(f"\n{text.count(len(values), 'plain value')}: {', '.join(map(text.plain, values))}")


def _read(path: Path) -> tuple[list[TensorFacts], list[str], list[str]]:
    """Its tensors, the names of its plain values, and what it was transformed by. Raises: CorruptError."""
    from ckptman.format.paths import METADATA
    from ckptman.loading.restricted_unpickler import read_foreign_metadata, transforms_in

    tensors, values = [], []
    metadata = read_foreign_metadata(path / METADATA)
    found: dict[str, Any] = dict(metadata.state_dict_metadata)
    for name, described in sorted(found.items()):
        if hasattr(described, "chunks"):
            dtype = str(described.properties.dtype).removeprefix("torch.")
            boxes = [(chunk.offsets, chunk.sizes) for chunk in described.chunks]
            tensors.append(tensor_facts(name, described.size, dtype, boxes))
        else:
            values.append(name)
    return tensors, values, sorted({*transforms_in(metadata).values()})
