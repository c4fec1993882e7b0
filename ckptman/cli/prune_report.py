"""What `ckptman prune` says: a line for each checkpoint and leftover with its reason, and what it came to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptman.cli import console
from ckptman.cli.list import short_problem

if TYPE_CHECKING:
    from ckptman.policies.retention import Verdict
    from ckptman.storage.catalog.catalog import Entry
    from ckptman.storage.catalog.orphans import Leftover
    from ckptman.storage.catalog.prune import Pruned, PrunePlan
    from ckptman.storage.format.foreign import ForeignCheckpoint


def lines(plan: PrunePlan, with_checkpoints: bool) -> list[str]:
    """A table of what goes, what stays and why, with an empty line after it; nothing where there is nothing."""
    verdicts = plan.verdicts if with_checkpoints else []
    rows = [_verdict_row(verdict) for verdict in verdicts]
    rows += [_leftover_row("clear", each) for each in plan.leftovers]
    rows += [_leftover_row("put back", each) for each in plan.strays]
    rows += [_ignored_row(each, why) for each, why in plan.ignored if with_checkpoints or _is_stranger(each)]
    return [*console.table(("action", "what", "size", "why"), rows, right="size"), ""] if rows else []


def _verdict_row(verdict: Verdict) -> tuple[str, ...]:
    record = verdict.record
    reasons = console.plain("; ".join(verdict.reasons))
    return ("keep" if verdict.keep else "delete", f"step {record.step}", console.size(record.bytes), reasons)


def _ignored_row(entry: Entry, why: str) -> tuple[str, ...]:
    size = console.size(entry.manifest.total_bytes) if entry.manifest else "-"
    what = console.plain(entry.path.name) if _is_stranger(entry) else f"step {entry.step}"
    return ("ignore", what, size, f"it does not count: {console.plain(short_problem(entry, why))}")


def _is_stranger(entry: Entry) -> bool:
    from ckptman.storage.format.paths import parse_step

    parsed = parse_step(entry.path.name)
    return parsed is None or parsed.kind in ("tmp", "old", "trash")


def _leftover_row(action: str, leftover: Leftover) -> tuple[str, ...]:
    return (action, console.plain(leftover.path.name), console.size(leftover.bytes), leftover.reason)


def summary(plan: PrunePlan, pruned: Pruned | None, others: Sequence[ForeignCheckpoint]) -> list[str]:
    """What it came to, or (`pruned` is None) would; and that checkpoints of other programs stay."""
    said = [_outcome(plan, pruned)]
    steps = {verdict.record.sequence: verdict.record.step for verdict in plan.verdicts}
    for sequence, reason in sorted(pruned.spared.items() if pruned is not None else ()):
        said.append(f"Spared after all: step {steps[sequence]}, {console.plain(reason)}.")
    if plan.over_bytes:
        said.append(
            f"Still {console.size(plan.over_bytes)} over the limit: what is left is the newest, verified, pinned or in "
            f"use, and no limit removes that."
        )
    if others:
        number, one = console.count(len(others), "checkpoint"), others[-1]
        adopt = "; ckptman adopt hands those of plain DCP to the rules" if any(each.is_dcp for each in others) else ""
        said.append(
            f"{number} of other programs, such as {console.plain(one.path.name)} of {one.writer}: no rule deletes "
            f"{'it' if len(others) == 1 else 'them'}{adopt}."
        )
    return said


def _outcome(plan: PrunePlan, pruned: Pruned | None) -> str:
    deleted = len(plan.deletions if pruned is None else pruned.deleted)
    what = [f"{deleted:,} of {console.count(len(plan.verdicts), 'checkpoint')}"] if deleted else []
    cleared = len(plan.leftovers) if pruned is None else pruned.cleared
    what += [console.count(cleared, "leftover")] if cleared else []
    if not what and (plan.deletions or plan.leftovers):
        return "Nothing was deleted."
    if not what:
        return f"Nothing to delete: {console.count(len(plan.verdicts), 'checkpoint')}, no leftovers."
    if pruned is None:
        return f"Would delete {' and '.join(what)}, {console.size(plan.freed_bytes)}. Nothing was deleted (--dry-run)."
    return f"Deleted {' and '.join(what)}: {console.size(pruned.freed_bytes)} freed."


def as_dict(root: Path, plan: PrunePlan, pruned: Pruned | None, others: Sequence[ForeignCheckpoint]) -> dict[str, Any]:
    """The same for programs."""
    spared = pruned.spared if pruned is not None else {}
    return {
        "root": str(root),
        "dry_run": pruned is None,
        "checkpoints": [
            {
                "step": verdict.record.step,
                "path": str(plan.entries[verdict.record.sequence].path),
                "keep": verdict.keep or verdict.record.sequence in spared,
                "reasons": [*verdict.reasons, *filter(None, [spared.get(verdict.record.sequence)])],
                "bytes": verdict.record.bytes,
            }
            for verdict in plan.verdicts
        ],
        "ignored": [{"step": entry.step, "path": str(entry.path), "why": why} for entry, why in plan.ignored],
        "foreign": [{"path": str(each.path), "writer": each.writer, "step": each.step} for each in others],
        "leftovers": [
            {"path": str(each.path), "step": each.step, "reason": each.reason, "bytes": each.bytes}
            for each in plan.leftovers
        ],
        "put_back": [{"path": str(each.path), "step": each.step, "reason": each.reason} for each in plan.strays],
        "freed_bytes": plan.freed_bytes if pruned is None else pruned.freed_bytes,
        "over_bytes": plan.over_bytes,
    }
