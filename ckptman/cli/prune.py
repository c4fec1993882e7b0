"""`ckptman prune ROOT`: delete by plan, with the reason for each, and clear what crashes left over."""

from __future__ import annotations

import errno
import math
import os
from contextlib import nullcontext
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptman.cli import text
from ckptman.cli.list import AsJson, Root, short_problem
from ckptman.errors import ConfigError, RootError

if TYPE_CHECKING:
    from ckptman.policy.retention import KeepBest, RetentionPolicy, Verdict
    from ckptman.store.catalogue import Entry
    from ckptman.store.prune import Leftover, PrunePlan

KeepLastOption = Annotated[
    int | None, typer.Option("--keep-last", metavar="N", show_default=False, help="Keep the N committed last.")
]
KeepEveryOption = Annotated[
    int | None, typer.Option("--keep-every", metavar="N", show_default=False, help="Keep one at each multiple of N.")
]
KeepBestOption = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-best",
        metavar="METRIC[:COUNT[:min|max]]",
        show_default=False,
        help="Keep the COUNT best by a metric (1, the lowest, unless said). May be given several times.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted, and why.")]


def prune(
    root: Root,
    keep_last: KeepLastOption = None,
    keep_every: KeepEveryOption = None,
    keep_best: KeepBestOption = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Delete by plan, and clear leftovers.

    What no --keep rule keeps is deleted, with its reason; what crashes left over is cleared. The newest checkpoint is
    always kept. Without a --keep rule no checkpoint is deleted, only leftovers are cleared.
    """
    from ckptman.store.prune import execute, one_at_a_time, plan_prune

    policy = _policy(keep_last, keep_every, keep_best or [])
    _check_metrics(root, policy)
    with nullcontext() if dry_run else one_at_a_time(root):
        plan = plan_prune(root, policy)
        if not as_json and (lines := _lines(plan, with_checkpoints=policy is not None)):
            text.say("\n".join(lines))
        if not dry_run:
            try:
                execute(root, plan, tag=f"cli{os.urandom(4).hex()}")
            except OSError as error:
                raise RootError(
                    error.errno or errno.EIO,
                    f"{error.filename or root} cannot be removed ({error.strerror}): check permissions and prune again",
                ) from error
    if as_json:
        text.say_json(_as_dict(root, plan, dry_run))
    else:
        text.say(_summary(plan, dry_run))


def parse_keep_best(written: str) -> KeepBest:
    """`loss`, `loss:2`, `accuracy:2:max`; a metric may have colons in its name. Raises: ConfigError."""
    from ckptman.policy.retention import KeepBest

    parts = written.split(":")
    mode = parts.pop() if len(parts) > 1 and parts[-1] in ("min", "max") else "min"
    count = 1
    if len(parts) > 1:
        try:
            count = int(parts[-1])
            parts.pop()
        except ValueError:
            pass  # part of the metric's name; a slip shows when no checkpoint has that metric
    return KeepBest(":".join(parts), count, "max" if mode == "max" else "min")


def _policy(keep_last: int | None, keep_every: int | None, keep_best: list[str]) -> RetentionPolicy | None:
    from ckptman.policy.retention import KeepEvery, KeepLast

    rules: list[RetentionPolicy] = []
    if keep_last is not None:
        rules.append(KeepLast(keep_last))
    if keep_every is not None:
        rules.append(KeepEvery(keep_every))
    rules += [parse_keep_best(each) for each in keep_best]
    return reduce(or_, rules) if rules else None


def _check_metrics(root: Path, policy: RetentionPolicy | None) -> None:
    """A slip in the name of a metric must not delete what it was to keep. Raises: ConfigError."""
    from ckptman.policy.retention import KeepAny, KeepBest
    from ckptman.store.catalogue import Catalogue

    rules = policy.policies if isinstance(policy, KeepAny) else (policy,)
    wanted = {rule.metric for rule in rules if isinstance(rule, KeepBest)}
    if not wanted:
        return
    records = [entry.record() for entry in Catalogue(root).complete()]
    known = {name for record in records for name, value in record.metrics.items() if math.isfinite(value)}
    unknown = sorted(wanted - known)
    if records and unknown:
        there = f"they have {', '.join(sorted(known))}" if known else "they have no metrics"
        raise ConfigError(f"--keep-best: no checkpoint under {root} has the metric {unknown[0]!r}; {there}")


def _lines(plan: PrunePlan, with_checkpoints: bool) -> list[str]:
    verdicts = plan.verdicts if with_checkpoints else []
    rows = [_verdict_row(verdict) for verdict in verdicts] + [_leftover_row(each) for each in plan.leftovers]
    if with_checkpoints:
        rows += [_ignored_row(entry, why) for entry, why in plan.ignored]
    return [*text.table(("action", "what", "size", "why"), rows, right="size"), ""] if rows else []


def _verdict_row(verdict: Verdict) -> tuple[str, ...]:
    record = verdict.record
    reasons = text.plain("; ".join(verdict.reasons))
    return ("keep" if verdict.keep else "delete", f"step {record.step}", text.size(record.bytes), reasons)


def _ignored_row(entry: Entry, why: str) -> tuple[str, ...]:
    size = text.size(entry.manifest.total_bytes) if entry.manifest else "-"
    return ("ignore", f"step {entry.step}", size, f"it does not count: {text.plain(short_problem(entry, why))}")


def _leftover_row(leftover: Leftover) -> tuple[str, ...]:
    return ("clear", text.plain(leftover.path.name), text.size(leftover.bytes), leftover.reason)


def _summary(plan: PrunePlan, dry_run: bool) -> str:
    deleted = sum(not verdict.keep for verdict in plan.verdicts)
    what = [f"{deleted:,} of {text.count(len(plan.verdicts), 'checkpoint')}"] if deleted else []
    what += [text.count(len(plan.leftovers), "leftover")] if plan.leftovers else []
    if not what:
        return f"Nothing to delete: {text.count(len(plan.verdicts), 'checkpoint')}, no leftovers."
    if dry_run:
        return f"Would delete {' and '.join(what)}, {text.size(plan.freed_bytes)}. Nothing was deleted (--dry-run)."
    return f"Deleted {' and '.join(what)}: {text.size(plan.freed_bytes)} freed."


def _as_dict(root: Path, plan: PrunePlan, dry_run: bool) -> dict[str, Any]:
    return {
        "root": str(root),
        "dry_run": dry_run,
        "checkpoints": [
            {
                "step": verdict.record.step,
                "path": str(plan.entries[verdict.record.sequence].path),
                "keep": verdict.keep,
                "reasons": list(verdict.reasons),
                "bytes": verdict.record.bytes,
            }
            for verdict in plan.verdicts
        ],
        "ignored": [{"step": entry.step, "path": str(entry.path), "why": why} for entry, why in plan.ignored],
        "leftovers": [
            {"path": str(each.path), "step": each.step, "reason": each.reason, "bytes": each.bytes}
            for each in plan.leftovers
        ],
        "freed_bytes": plan.freed_bytes,
    }
