"""`ckptman diff A B`: what changed between two checkpoints: tensors, and plain values side by side."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptman.cli import console
from ckptman.cli.console import progress
from ckptman.cli.options import AsJson, flag, option, path_argument
from ckptman.cli.select import choose, is_foreign
from ckptman.errors import ConfigError, NotFoundError
from ckptman.storage.format.paths import is_checkpoint

if TYPE_CHECKING:
    from ckptman.storage.format.manifest import Manifest
    from ckptman.tools.diff.diff import Diff, TensorDiff
    from ckptman.tools.diff.values import ValueDiff

DIFFERENT = 1
"""The exit code if something differs, as that of diff(1)."""
VALUE_WIDTH, NOTE_WIDTH = 36, 60
WORDS = {"removed": "only in A", "added": "only in B"}


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints. `manifest`: None for a foreign one."""

    path: Path
    manifest: Manifest | None = None


def diff(
    a: Annotated[
        Path, path_argument("A", "A checkpoint, or a root (then its newest finite one; alone: its two newest).")
    ],
    b: Annotated[Path | None, path_argument("B", "The checkpoint it is compared with.")] = None,
    steps: Annotated[str | None, option("--steps", "N,N", "The checkpoints of these two steps of a root.")] = None,
    only: Annotated[
        list[str] | None,
        option("--only", "PATTERN", "Only names that match, such as 'model.*.bias'. May be given several times."),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", metavar="N", min=1, help="Show that many lines of tensors, and of values.")
    ] = 20,
    everything: Annotated[bool, flag("--all", "Show all tensors and values, however many.")] = False,
    read: Annotated[bool, flag("--read", "Read every tensor, even if the digests say it did not change.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what changed between two checkpoints.

    Exit code 0: nothing. 1: something. 2: wrong usage. 3: not found. 4: one of them is damaged. 9: a newer ckptman
    wrote one of them. 10: one of them could not be read.
    """
    before, after = _sides(a, b, steps)
    from ckptman.tools.diff.diff import compare

    found = compare(before.path, after.path, only or ["*"], read, progress)
    if as_json:
        console.say_json(_as_dict(before, after, found))
    else:
        console.say(*_lines(before, after, found, None if everything else top))
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


def _as_dict(before: Side, after: Side, found: Diff) -> dict[str, Any]:
    def side(each: Side) -> dict[str, Any]:
        known = each.manifest
        step, world_size = (known.step, known.world_size) if known else (None, None)
        return {"path": str(each.path), "step": step, "world_size": world_size}

    groups = {
        name: {"tensors": dict(group.tensors), "values": dict(group.values)}
        for name, group in sorted(found.groups.items())
    }
    return {
        "a": side(before),
        "b": side(after),
        "same": found.same,
        "unread_tensors": found.unread,
        "groups": groups,
        "tensors": [_tensor_dict(each) for each in found.tensors],
        "values": [_value_dict(each) for each in found.values],
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


def _lines(before: Side, after: Side, found: Diff, top: int | None) -> list[str]:
    """Return the report for people. `top`: the most lines of tensors, and of values; None: all of them."""
    shown = [_side_line("A", before), _side_line("B", after)]
    tensors = sum(group.tensors.total() for group in found.groups.values())
    values = sum(group.values.total() for group in found.groups.values())
    known = f" ({console.count(found.unread, 'tensor')} by digest: --read reads them)" if found.unread else ""
    compared = f"{console.count(tensors, 'tensor')} and {console.count(values, 'plain value')}"
    if found.same:
        return [*shown, f"no difference in {compared}{known}"]
    differ = f"{console.count(len(found.tensors), 'tensor')} and {console.count(len(found.values), 'plain value')}"
    shown += [f"{differ} differ, of {compared}{known}", "", *_group_table(found)]
    tensor_headers = ("tensor", "", "shape", "dtype", "relative", "max abs", "elements", "")
    for headers, rows in (
        (tensor_headers, [_tensor_row(each) for each in found.tensors[:top]]),
        (("value", "A", "B"), [_value_row(each) for each in found.values[:top]]),
    ):
        if rows:
            shown += ["", *console.table(headers, rows, drop=("elements", "dtype"), indent=2)]
        count = len(found.values if headers[0] == "value" else found.tensors)
        if count > len(rows):
            shown.append(f"  ... {count - len(rows):,} more: --top {count}, --all or --json shows all")
    return shown


def _side_line(name: str, side: Side) -> str:
    known = side.manifest
    if known is None:
        return f"{name}: {side.path}, written by plain DCP"
    metrics = f", {console.metrics(known.metrics)}" if known.metrics else ""
    return f"{name}: step {known.step}, {side.path}, {console.count(known.world_size, 'rank')}{metrics}"


def _group_table(found: Diff) -> list[str]:
    order = ("changed", "retyped", "reshaped", "added", "removed")
    kinds = ["same", *(kind for kind in order if any(group.tensors[kind] for group in found.groups.values()))]
    headers = ("", "tensors", *(WORDS.get(kind, kind) for kind in kinds), "values", "differ")
    rows = []
    for name, group in sorted(found.groups.items()):
        counts = [group.tensors.total(), *(group.tensors[kind] for kind in kinds)]
        counts += [group.values.total(), group.values.total() - group.values["same"]]
        rows.append((name, *(f"{count:,}" if count else "-" for count in counts)))
    return console.table(headers, rows, indent=2)


def _tensor_row(tensor: TensorDiff) -> tuple[str, ...]:
    forms = [form for form in (tensor.before, tensor.after) if form is not None]
    found = tensor.difference
    relative = largest = changed = "-"
    remarks = []
    if found is not None:
        changed = f"{found.changed:,} of {found.elements:,}"
        if found.relative is not None:
            relative = f"{found.relative:.3g}"
            largest = f"{found.largest:,}" if isinstance(found.largest, int) else f"{found.largest:.3g}"
        for what, (before, after) in (("NaN", found.nan), ("Inf", found.inf)):
            if before != after:
                remarks.append(f"{what}: {before:,} -> {after:,}")
        if found.unmeasured:
            remarks.append(f"{found.unmeasured:,} not finite")
    if tensor.note:
        remarks.append(f"only its bytes were compared: {console.cut(tensor.note, NOTE_WIDTH)}")
    return (
        tensor.name,
        WORDS.get(tensor.kind, tensor.kind),
        " -> ".join(dict.fromkeys(str(list(form.shape)) for form in forms)),
        " -> ".join(dict.fromkeys(form.dtype for form in forms)),
        relative,
        largest,
        changed,
        "; ".join(remarks),
    )


def _value_row(value: ValueDiff) -> tuple[str, ...]:
    """Show both values, both cut from a little before the place where they differ."""
    before, after = repr(value.before), repr(value.after)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after)))
    if max(len(before), len(after)) > VALUE_WIDTH < shared + VALUE_WIDTH // 2:
        start = max(shared - VALUE_WIDTH // 3, 0)
        before, after = (f"...{each[start:]}" if start else each for each in (before, after))
    return value.name, console.cut(before, VALUE_WIDTH), console.cut(after, VALUE_WIDTH)
