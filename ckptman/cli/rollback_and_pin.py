"""`ckptman rollback`, `pin` and `unpin`: marks that say which checkpoints count, and which stay."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated

from ckptman.cli import console
from ckptman.cli.options import AsJson, flag, option
from ckptman.cli.select import PathOrRoot, Root, Step, choose
from ckptman.errors import ConfigError, plain

if TYPE_CHECKING:
    from ckptman.storage.catalog.rollback import Change


def rollback(
    root: Root,
    to_step: Annotated[int | None, option("--to-step", "N", "The checkpoint to go on from.")] = None,
    why: Annotated[str, option("--why", "TEXT", "The reason, for those who look.")] = "",
    undo: Annotated[bool, flag("--undo", "Take back the last rollback instead.")] = False,
    dry_run: Annotated[bool, flag("--dry-run", "Only say what would be abandoned.")] = False,
    as_json: AsJson = False,
) -> None:
    """Go back to an earlier checkpoint.

    All that were committed after it are abandoned: the next run goes on from step N, and none of them is restored
    unless it is asked for by its step. They stay on disk until ckptman prune takes them. Refused while a run is alive.
    """
    from ckptman.runtime.journal import note
    from ckptman.runtime.outcome import highest_attempt
    from ckptman.storage.catalog.rollback import execute, plan_rollback, plan_undo

    def make() -> Change:
        return plan_undo(root) if to_step is None else plan_rollback(root, to_step)

    if (to_step is None) != undo:
        raise ConfigError("say --to-step N, the step to go back to, or --undo")
    now, why = time.time(), plain(why)  # bytes that are no text have no form in JSON
    if dry_run:
        change = make()
    else:
        make()  # what cannot be is refused before anything is written
        from ckptman.storage.catalog.pins import user_at_host

        job = os.environ.get("SLURM_JOB_ID")
        change = execute(root, make, why=why, by=user_at_host(), time_seconds=now, highest=highest_attempt, job_id=job)
        if change.entries:
            event = "rolled_back" if change.undoes is None else "rollback_undone"
            note(root, event, step=change.target.step, steps=[entry.step for entry in change.entries], why=why)
    if as_json:
        entries = [
            {"step": entry.step, "path": entry.path, "bytes": entry.require_manifest().total_bytes}
            for entry in change.entries
        ]
        facts = {"root": root, "dry_run": dry_run, "step": change.target.step, "undoes": change.undoes}
        console.say_json(facts | {"abandoned" if change.undoes is None else "brought_back": entries})
    else:
        console.say(*_lines(change, dry_run, now))


def _lines(change: Change, dry_run: bool, now: float) -> list[str]:
    action = "abandon" if change.undoes is None else "bring back"
    if not change.entries:
        return [
            f"Nothing on disk to abandon: step {change.target.step} is the newest checkpoint there. What nodes have in "
            f"memory is {'brought back' if change.undoes else 'abandoned'}, whatever its step."
        ]
    rows = []
    for each in (entry.require_manifest() for entry in change.entries):
        size, age = console.size(each.total_bytes), console.age_of(each.time_seconds, now)
        rows.append((action, f"step {each.step}", size, age, console.metrics(each.metrics) or None))
    lines = console.table(("action", "what", "size", "age", "metrics"), rows, right="size age")
    goes = "Nothing was changed (--dry-run): the next restore would go" if dry_run else "The next restore goes"
    told = f"{goes} on from step {change.target.step}."
    if nonfinite_reason := change.target.nonfinite_reason:
        newest = f"step {change.target.step} is then the newest, and not finite ({nonfinite_reason})"
        told = f"{goes} on from the newest finite one, if there is any: {newest}."
    return [*lines, "", told]


def pin(
    path: PathOrRoot, why: Annotated[str, option("--why", "TEXT", "Why it is to stay. Required.")], step: Step = None
) -> None:
    """Keep a checkpoint, whatever the rules of a prune say.

    PATH is one checkpoint, or a root: then it is that of --step, or the newest finite one. The pin is a file beside the
    manifest, and goes with every copy of the checkpoint. Pinned again, it gets the new reason.
    """
    from ckptman.tools import prune_and_pin

    (entry,) = choose(path, step)
    prune_and_pin.pin(entry.path, why)
    console.say(f"Pinned step {entry.step}: {why.strip()}")


def unpin(path: PathOrRoot, step: Step = None) -> None:
    """Let the rules of a prune decide about a checkpoint again."""
    from ckptman.tools import prune_and_pin

    (entry,) = choose(path, step)
    was = prune_and_pin.unpin(entry.path)
    console.say(f"Step {entry.step} is no longer pinned." if was else f"Step {entry.step} was not pinned.")
