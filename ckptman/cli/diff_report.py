"""What `ckptman diff` found: for people, and as JSON."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptman.cli import console
from ckptman.errors import ConfigError

if TYPE_CHECKING:
    from ckptman.diff.diff import TensorDiff
    from ckptman.diff.values import ValueDiff
    from ckptman.format.manifest import Manifest

VALUE_WIDTH = 36
NOTE_WIDTH = 60
KINDS = {
    "removed": "only in A",
    "added": "only in B",
    "reshaped": "reshaped",
    "retyped": "retyped",
    "changed": "changed",
}
"""Kinds of differences in words, in the order in which they are shown."""


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints. `manifest`: None for a foreign one."""

    path: Path
    manifest: Manifest | None = None


@dataclass
class Group:
    """Names that begin with the same part: how many tensors and plain values of each kind."""

    tensors: Counter[str] = field(default_factory=Counter)
    values: Counter[str] = field(default_factory=Counter)


@dataclass
class Findings:
    """What differs, and how much was compared. `unread`: tensors that are equal by their digests."""

    groups: dict[str, Group] = field(default_factory=dict)
    tensors: list[TensorDiff] = field(default_factory=list)
    values: list[ValueDiff] = field(default_factory=list)
    unread: int = 0

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.tensors and not self.values

    def group(self, name: str) -> Group:
        """Return the group of a flat name."""
        return self.groups.setdefault(name.partition(".")[0], Group())


def weight(tensor: TensorDiff) -> tuple[int, float, str]:
    """Sort key: what only one has or what changed its form first, then the largest changes. What cannot be measured
    counts as large."""
    found = tensor.difference
    relative = found.relative if found is not None and found.nan[0] == found.nan[1] else None
    return list(KINDS).index(tensor.kind), -math.inf if relative is None else -relative, tensor.name


def as_dict(before: Side, after: Side, found: Findings) -> dict[str, Any]:
    """Return all that differs, for JSON."""
    return {
        "a": _side_dict(before),
        "b": _side_dict(after),
        "same": found.same,
        "unread_tensors": found.unread,
        "groups": {
            name: {"tensors": dict(group.tensors), "values": dict(group.values)}
            for name, group in sorted(found.groups.items())
        },
        "tensors": [_tensor_dict(tensor) for tensor in found.tensors],
        "values": [_value_dict(value) for value in found.values],
    }


def lines(before: Side, after: Side, found: Findings, top: int) -> list[str]:
    """Return the same for people, on one screen: `top` tensors and `top` values."""
    shown = [_side_line("A", before), _side_line("B", after)]
    tensors = sum(group.tensors.total() for group in found.groups.values())
    values = sum(group.values.total() for group in found.groups.values())
    known = f" ({console.count(found.unread, 'tensor')} by digest: --read reads them)" if found.unread else ""
    compared = f"{console.count(tensors, 'tensor')} and {console.count(values, 'plain value')}"
    if found.same:
        return [*shown, f"no difference in {compared}{known}"]
    differ = f"{console.count(len(found.tensors), 'tensor')} and {console.count(len(found.values), 'plain value')}"
    shown += [f"{differ} differ, of {compared}{known}", ""]
    tables = _group_table(found.groups)
    tensor_headers = ("tensor", "", "shape", "dtype", "relative", "max abs", "elements", "")
    for count, headers, rows in (
        (len(found.tensors), tensor_headers, [_tensor_row(each) for each in found.tensors[:top]]),
        (len(found.values), ("value", "A", "B"), [_value_row(each) for each in found.values[:top]]),
    ):
        if count:
            tables += ["", *console.table(headers, rows)]
        if count > top:
            tables.append(f"... {count - top:,} more: --top {count} or --json shows all")
    return [*shown, *textwrap.indent("\n".join(tables), "  ").split("\n")]


def _side_dict(side: Side) -> dict[str, Any]:
    known = side.manifest
    return {
        "path": str(side.path),
        "step": known.step if known else None,
        "world_size": known.world_size if known else None,
    }


def _tensor_dict(tensor: TensorDiff) -> dict[str, Any]:
    found = tensor.difference
    fields: dict[str, Any] = {"name": tensor.name, "kind": tensor.kind}
    fields |= {side: form._asdict() for side, form in (("a", tensor.before), ("b", tensor.after)) if form is not None}
    if found is not None:
        fields |= {"elements": found.elements, "changed": found.changed}
        if found.measured:
            fields |= {"relative_norm": found.relative, "max_abs": found.largest, "not_finite": found.unmeasured}
            fields |= {"nan": found.nan, "inf": found.inf}
    return fields | ({"note": tensor.note} if tensor.note else {})


def _value_dict(value: ValueDiff) -> dict[str, Any]:
    from ckptman.diff.values import MISSING
    from ckptman.format.value_codec import encode

    fields: dict[str, Any] = {"name": value.name, "kind": value.kind}
    for side, each in (("a", value.before), ("b", value.after)):
        if each is not MISSING:
            try:
                fields[side] = encode(each, value.name)
            except ConfigError:
                fields[side] = repr(each)
    return fields


def _side_line(name: str, side: Side) -> str:
    known = side.manifest
    if known is None:
        return f"{name}: {console.plain(side.path)}, written by plain DCP"
    metrics = f", {console.metrics(known.metrics)}" if known.metrics else ""
    return f"{name}: step {known.step}, {console.plain(side.path)}, {console.count(known.world_size, 'rank')}{metrics}"


def _group_table(groups: dict[str, Group]) -> list[str]:
    kinds = ["same", *(kind for kind in reversed(KINDS) if any(group.tensors[kind] for group in groups.values()))]
    headers = ("", "tensors", *(KINDS.get(kind, kind) for kind in kinds), "values", "differ")
    rows = []
    for name, group in sorted(groups.items()):
        counts = [group.tensors.total(), *(group.tensors[kind] for kind in kinds)]
        counts += [group.values.total(), group.values.total() - group.values["same"]]
        rows.append((console.plain(name), *(f"{count:,}" if count else "-" for count in counts)))
    return console.table(headers, rows)


def _tensor_row(tensor: TensorDiff) -> Sequence[str]:
    forms = [form for form in (tensor.before, tensor.after) if form is not None]
    return (
        console.plain(tensor.name),
        KINDS[tensor.kind],
        " -> ".join(dict.fromkeys(str(list(form.shape)) for form in forms)),
        console.plain(" -> ".join(dict.fromkeys(form.dtype for form in forms))),
        *_numbers(tensor),
        _remark(tensor),
    )


def _numbers(tensor: TensorDiff) -> tuple[str, str, str]:
    found = tensor.difference
    if found is None:
        return "-", "-", "-"
    changed = f"{found.changed:,} of {found.elements:,}"
    if not found.measured or found.relative is None:
        return "-", "-", changed
    largest = f"{found.largest:,}" if isinstance(found.largest, int) else f"{found.largest:.3g}"
    return f"{found.relative:.3g}", largest, changed


def _remark(tensor: TensorDiff) -> str:
    found, remarks = tensor.difference, []
    if found is not None:
        for what, (before, after) in (("NaN", found.nan), ("Inf", found.inf)):
            if before != after:
                remarks.append(f"{what}: {before:,} -> {after:,}")
        if found.unmeasured:
            remarks.append(f"{found.unmeasured:,} not finite")
    if tensor.note:
        remarks.append(f"only its bytes were compared: {_cut(console.plain(tensor.note), NOTE_WIDTH)}")
    return "; ".join(remarks)


def _value_row(value: ValueDiff) -> Sequence[str]:
    return (console.plain(value.name), *_beside(console.plain(repr(value.before)), console.plain(repr(value.after))))


def _beside(before: str, after: str) -> tuple[str, str]:
    """Cut two texts that differ to a width, both from a little before the place where they do."""
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after)))
    if max(len(before), len(after)) > VALUE_WIDTH < shared + VALUE_WIDTH // 2:
        start = max(shared - VALUE_WIDTH // 3, 0)
        before, after = (f"...{each[start:]}" if start else each for each in (before, after))
    return _cut(before, VALUE_WIDTH), _cut(after, VALUE_WIDTH)


def _cut(written: str, width: int) -> str:
    return written if len(written) <= width else f"{written[: width - 3]}..."
