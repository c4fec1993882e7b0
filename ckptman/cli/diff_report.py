"""What `ckptman diff` found: for people, and as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckptman.cli import console
from ckptman.errors import ConfigError

if TYPE_CHECKING:
    from ckptman.storage.format.manifest import Manifest
    from ckptman.tools.diff.compare import Diff, Group
    from ckptman.tools.diff.diff import TensorDiff
    from ckptman.tools.diff.difference import Difference
    from ckptman.tools.diff.values import ValueDiff

VALUE_WIDTH = 36
MOST_RANGES = 4
_NUMBER = re.compile(r"(?<![^.])[0-9]{1,9}(?![^.])")
NOTE_WIDTH = 60
T = TypeVar("T", "TensorDiff", "ValueDiff")
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


def as_dict(before: Side, after: Side, found: Diff) -> dict[str, Any]:
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


def lines(before: Side, after: Side, found: Diff, top: int | None) -> list[str]:
    """Return the same for people, on one screen: `top` lines of tensors and of values, each of all that differ in the
    same way but for numbers in their names. `top` None: each on a line of its own, and all of them."""
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
    for headers, rows in (
        (tensor_headers, [_tensor_row(each) for each in _folded(found.tensors, _alike, top is not None)]),
        (("value", "A", "B"), [_value_row(each) for each in _folded(found.values, _equal, top is not None)]),
    ):
        count, rows = len(rows), rows[:top]
        if rows:
            tables += ["", *console.table(headers, rows, drop=("elements", "dtype"), indent=2)]
        if count > len(rows):
            tables.append(f"  ... {count - len(rows):,} more: --top {count}, --all or --json shows all")
    return [*shown, *tables]


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
    from ckptman.storage.format.value_codec import encode
    from ckptman.tools.diff.values import MISSING

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
    return console.table(headers, rows, indent=2)


def _folded(items: Sequence[T], alike: Callable[[T], Hashable], wanted: bool) -> list[list[T]]:
    """Put together what is alike and has the same name but for its numbers; in the order of the first of each."""
    if not wanted:
        return [[each] for each in items]
    groups: dict[Hashable, list[T]] = {}
    for each in items:
        groups.setdefault((_NUMBER.sub("*", each.name), alike(each)), []).append(each)
    return list(groups.values())


def _alike(tensor: TensorDiff) -> Hashable:
    measured = tensor.difference is not None and tensor.difference.relative is not None
    # What is remarkable of one tensor is not said of others.
    return tensor.kind, tensor.before, tensor.after, measured, tensor.name if _remark(tensor) else ""


def _equal(value: ValueDiff) -> Hashable:
    return value.kind, repr(value.before), repr(value.after)


def _name(names: Sequence[str]) -> str:
    """Return one name for names that differ in numbers: `layers.0-31.weight`."""
    parts = []
    for part in zip(*(name.split(".") for name in names)):
        known = set(part)
        parts.append(part[0] if len(known) == 1 else _ranges(sorted(map(int, known))))
    return console.plain(".".join(parts))


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as ranges: `0-3,7`; with more than four of them, only from where to where."""
    ends: list[tuple[int, int]] = []
    for each in numbers:
        if ends and each == ends[-1][1] + 1:
            ends[-1] = (ends[-1][0], each)
        else:
            ends.append((each, each))
    if len(ends) > MOST_RANGES:
        return f"{numbers[0]}..{numbers[-1]}"
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ends)


def _tensor_row(alike: Sequence[TensorDiff]) -> Sequence[str]:
    tensor = alike[0]
    forms = [form for form in (tensor.before, tensor.after) if form is not None]
    return (
        _name([each.name for each in alike]),
        KINDS[tensor.kind],
        " -> ".join(dict.fromkeys(str(list(form.shape)) for form in forms)),
        console.plain(" -> ".join(dict.fromkeys(form.dtype for form in forms))),
        *_numbers([each.difference for each in alike if each.difference is not None]),
        _remark(tensor) if len(alike) == 1 else f"{len(alike):,} tensors, the largest changes",
    )


def _numbers(found: Sequence[Difference]) -> tuple[str, str, str]:
    if not found:
        return "-", "-", "-"
    changed = f"{sum(each.changed for each in found):,} of {sum(each.elements for each in found):,}"
    relative = [each.relative for each in found if each.relative is not None]
    if not relative:
        return "-", "-", changed
    most = max(each.largest for each in found)
    largest = f"{most:,}" if isinstance(most, int) else f"{most:.3g}"
    return f"{max(relative):.3g}", largest, changed


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


def _value_row(alike: Sequence[ValueDiff]) -> Sequence[str]:
    value = alike[0]
    return (
        _name([each.name for each in alike]),
        *_beside(console.plain(repr(value.before)), console.plain(repr(value.after))),
    )


def _beside(before: str, after: str) -> tuple[str, str]:
    """Cut two texts that differ to a width, both from a little before the place where they do."""
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after)))
    if max(len(before), len(after)) > VALUE_WIDTH < shared + VALUE_WIDTH // 2:
        start = max(shared - VALUE_WIDTH // 3, 0)
        before, after = (f"...{each[start:]}" if start else each for each in (before, after))
    return _cut(before, VALUE_WIDTH), _cut(after, VALUE_WIDTH)


def _cut(written: str, width: int) -> str:
    return written if len(written) <= width else f"{written[: width - 3]}..."
