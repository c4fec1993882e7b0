"""`ckptman prune ROOT...`: delete by plan, with the reason for each, and clear what crashes left over."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptman.cli import console
from ckptman.cli.console import progress
from ckptman.cli.list import short_problem
from ckptman.cli.memory import clear, superseded
from ckptman.cli.options import OTHERS, AsJson, flag, option, path_argument, with_retention
from ckptman.cli.select import roots_of
from ckptman.errors import CkptmanError, ConfigError, RootError
from ckptman.policies.retention_rules import AtMost, RetentionPolicy
from ckptman.storage.catalog.root_checks import check_is_root
from ckptman.storage.format.foreign import ForeignCheckpoint, foreign_in
from ckptman.storage.format.paths import parse_step

if TYPE_CHECKING:
    from ckptman.storage.catalog.prune import Pruned, PrunePlan

MOST_JOBS = 256


@dataclass(frozen=True)
class _Wishes:
    """How to prune. `policy`: by options; None: each root's own. `leftovers_only`: no checkpoint goes."""

    policy: RetentionPolicy | None
    leftovers_only: bool
    dry_run: bool
    as_json: bool
    jobs: int
    files_per_second: float | None


@with_retention
def prune(
    roots: Annotated[
        list[str],
        path_argument("ROOT", "Folders that hold checkpoints, or patterns in quotes such as 'runs/*/checkpoints'."),
    ],
    keep: RetentionPolicy | None = None,
    max_percent: Annotated[
        float | None, option("--max-percent", "P", "Keep no more than P percent of the file system, or of the quota.")
    ] = None,
    leftovers: Annotated[
        bool,
        flag("--leftovers", "Delete no checkpoint: only clear what crashes left.", panel=OTHERS),
    ] = False,
    dry_run: Annotated[bool, flag("--dry-run", "Only say what would be deleted, and why.")] = False,
    jobs: Annotated[
        int, typer.Option("--jobs", metavar="N", min=1, max=MOST_JOBS, help="Delete so many checkpoints at a time.")
    ] = 4,
    files_per_second: Annotated[
        float | None,
        option("--files-per-second", "N", "Delete no faster, so that the file system has time for who saves."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Delete by plan, and clear leftovers.

    What no --keep rule keeps is deleted, with its reason; what crashes left over is cleared. Without rules, those count
    that the run stored with its checkpoints. The newest checkpoint, the newest that was verified, the newest that is
    finite, what is pinned and what is being read stay whatever the rules say.

    Of several roots each is pruned for itself, also where another one cannot be; the exit code is that of the first
    that could not. Exit code 2: no rules, or a folder that holds no checkpoints. 10: something cannot be removed.
    """
    from ckptman.policies.parameters import check_positive

    # Thousands of small things are made, and none of them is thrown away before the end.
    gc.disable()
    if files_per_second is not None:
        check_positive("prune", "--files-per-second", files_per_second)
    if max_percent is not None:
        limit = AtMost(percent=max_percent)
        keep = limit if keep is None else keep & limit
    if leftovers and keep is not None:
        raise ConfigError("--leftovers deletes no checkpoint, so rules for them contradict it: leave one of them away")
    wishes = _Wishes(keep, leftovers, dry_run, as_json, jobs, files_per_second)
    paths, several = roots_of(roots)
    if not several:
        data, failed = _prune_one(paths[0], wishes)
        if as_json:
            error = {"error": console.message(failed), "exit_code": failed.exit_code} if failed is not None else {}
            console.say_json(data | error)
        if failed is not None:
            raise failed
        return
    _prune_many(paths, wishes)


def _prune_many(paths: list[Path], wishes: _Wishes) -> None:
    """Prune each root, whatever becomes of the others. Ends with the exit code of the first that failed."""
    from ckptman.storage.catalog.reader_lease import look

    for path in paths:
        # From now on all their readers are being watched, and not those of one root after the other.
        with suppress(OSError):
            look(path, wait=False)
    told: list[dict[str, Any]] = []
    codes: list[int] = []
    for path in paths:
        if not wishes.as_json:
            console.say(f"{path}:")
        data: dict[str, Any] = {"root": path}
        failed: Exception | None = None
        try:
            data, failed = _prune_one(path, wishes)
        except (CkptmanError, OSError) as error:
            failed = error
        if failed is not None:
            codes.append(console.exit_code(failed))
            data |= {"error": console.message(failed), "exit_code": codes[-1]}
            said = console.message(failed)
            console.complain(said if str(path) in said else f"{path}: {said}")
        told.append(data)
        if not wishes.as_json:
            console.say()
    if wishes.as_json:
        console.say_json(told)
    else:
        freed = sum(each.get("freed_bytes", 0) for each in told)
        bad = f"; {len(codes):,} could not be pruned, see above" if codes else ""
        verb = "would be freed" if wishes.dry_run else "freed"
        console.say(f"{console.count(len(paths), 'root')}: {console.size(freed)} {verb}{bad}.")
    if codes:
        raise typer.Exit(codes[0])


def _prune_one(root: Path, wishes: _Wishes) -> tuple[dict[str, Any], RootError | None]:
    """Prune one root, say what was done, and return it as data; and what could not be removed. Raises: CkptmanError."""
    from ckptman.storage.catalog.orphans import Leftover
    from ckptman.storage.catalog.prune import Pruned
    from ckptman.tools.prune_and_pin import carry_out, planned, policy_for

    check_is_root(root)
    policy = None if wishes.leftovers_only else policy_for(root, wishes.policy)
    stored = wishes.policy is None
    remedy = "say what to keep, with options such as --keep-last 3" if stored else "check the options"
    with planned(root, policy, dry_run=wishes.dry_run, stored=stored, remedy=remedy) as plan:
        memory = superseded(root)
        left = [Leftover(each.folder, None, "in memory, of a run that is over", each.size_bytes) for each in memory]
        shown = replace(plan, leftovers=[*plan.leftovers, *left])
        if not wishes.as_json and (said := _lines(shown, with_checkpoints=not wishes.leftovers_only)):
            console.say(*said)
        pruned = None if wishes.dry_run else Pruned()
        failed = None
        if pruned is not None:
            speed = wishes.files_per_second
            failed = carry_out(root, plan, pruned, jobs=wishes.jobs, files_per_second=speed, progress=progress)
            pruned.freed_bytes += sum(map(clear, memory))
            pruned.cleared += len(memory)
    others = foreign_in(root, os.listdir(root))  # noqa: PTH208 names alone are wanted
    if not wishes.as_json:
        console.say(*_summary(shown, pruned, others))
    return _as_dict(root, shown, pruned, others), failed


def _lines(plan: PrunePlan, with_checkpoints: bool) -> list[str]:
    """A table of what is deleted and kept, with reasons, and an empty line after it; no lines if there is nothing."""
    rows: list[Sequence[object]] = []
    for verdict in plan.verdicts if with_checkpoints else []:
        action, reasons = "keep" if verdict.keep else "delete", "; ".join(verdict.reasons)
        rows.append((action, f"step {verdict.record.step}", console.size(verdict.record.bytes), reasons))
    for action, leftovers in (("clear", plan.leftovers), ("put back", plan.strays)):
        rows += [(action, each.path.name, console.size(each.bytes), each.reason) for each in leftovers]
    for entry, why in plan.ignored:
        name = parse_step(entry.path.name)
        is_stranger = name is None or name.kind in ("tmp", "old", "trash")
        if with_checkpoints or is_stranger:
            what = entry.path.name if is_stranger else f"step {entry.step}"
            size = console.size(entry.manifest.total_bytes) if entry.manifest else None
            rows.append(("ignore", what, size, f"it does not count: {short_problem(entry, why)}"))
    return [*console.table(("action", "what", "size", "why"), rows, right="size"), ""] if rows else []


def _summary(plan: PrunePlan, pruned: Pruned | None, others: Sequence[ForeignCheckpoint]) -> list[str]:
    """What it came to, or (`pruned` is None) would; and that checkpoints of other programs stay."""
    said = [_outcome(plan, pruned)]
    steps = {verdict.record.sequence: verdict.record.step for verdict in plan.verdicts}
    for sequence, reason in sorted(pruned.spared.items() if pruned is not None else ()):
        said.append(f"Spared after all: step {steps[sequence]}, {reason}.")
    if plan.over_bytes:
        said.append(
            f"Still {console.size(plan.over_bytes)} over the limit: what is left is the newest, verified, pinned or in "
            f"use, and no limit removes that."
        )
    if others:
        number, one = console.count(len(others), "checkpoint"), others[-1]
        adopt = "; ckptman adopt hands those of plain DCP to the rules" if any(each.is_dcp for each in others) else ""
        said.append(
            f"{number} of other programs, such as {one.path.name} of {one.writer}: no rule deletes "
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


def _as_dict(root: Path, plan: PrunePlan, pruned: Pruned | None, others: Sequence[ForeignCheckpoint]) -> dict[str, Any]:
    spared = pruned.spared if pruned is not None else {}
    checkpoints = []
    for record, keep, reasons in ((each.record, each.keep, each.reasons) for each in plan.verdicts):
        rescue = spared.get(record.sequence)
        checkpoints.append(
            {
                "step": record.step,
                "path": plan.entries[record.sequence].path,
                "keep": keep or record.sequence in spared,
                "reasons": [*reasons, rescue] if rescue else reasons,
                "bytes": record.bytes,
            }
        )
    return {
        "root": root,
        "dry_run": pruned is None,
        "checkpoints": checkpoints,
        "ignored": [{"step": entry.step, "path": entry.path, "why": why} for entry, why in plan.ignored],
        "foreign": [{"path": each.path, "writer": each.writer, "step": each.step} for each in others],
        "leftovers": plan.leftovers,
        "put_back": [{"path": each.path, "step": each.step, "reason": each.reason} for each in plan.strays],
        "freed_bytes": plan.freed_bytes if pruned is None else pruned.freed_bytes,
        "over_bytes": plan.over_bytes,
    }
