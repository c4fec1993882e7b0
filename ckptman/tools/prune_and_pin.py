"""`prune`, `pin` and `unpin`: what the verbs of the same name do to the checkpoints of a root."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from ckptman._tracebacks import short_traceback
from ckptman.errors import ConfigError, CorruptError, NotFoundError, RootError
from ckptman.policies.parameters import check_positive
from ckptman.policies.retention_plan import KeepLast, RetentionPolicy, Verdict, policy_mistake
from ckptman.policies.retention_rules import in_bytes, needs_capacity
from ckptman.run import checkpoint_at
from ckptman.storage.catalog import pins
from ckptman.storage.catalog.catalog import Entry, look_at_folder
from ckptman.storage.catalog.prune import Pruned, PrunePlan, execute, one_at_a_time, plan_prune, read_policy
from ckptman.storage.catalog.reader_lease import lease
from ckptman.storage.catalog.root_checks import check_is_folder, check_is_root
from ckptman.storage.catalog.verified import read_verified
from ckptman.storage.io.durable_files import ThrottledDelete

Progress = Callable[[str, int], AbstractContextManager[Callable[[float], None] | None]]


@dataclass(frozen=True)
class Deletion:
    """A checkpoint that a prune deletes. `bytes`: its size on disk."""

    step: int
    path: Path
    reason: str
    bytes: int


@dataclass(frozen=True)
class PruneReport:
    """The result of a prune, or of a dry run.

    Attributes:
        deleted: The checkpoints that were deleted (`dry_run`: would be), oldest commit first.
        kept: The reason why each of the others stays, by step.
        leftovers: Files that crashes left over, and were cleared.
        freed_bytes: The space that was freed.
        dry_run: Whether nothing was deleted.
    """

    deleted: tuple[Deletion, ...]
    kept: dict[int, str]
    leftovers: tuple[Path, ...]
    freed_bytes: int
    dry_run: bool


@short_traceback
def prune(
    root: str | os.PathLike[str],
    keep: RetentionPolicy | int | None = None,
    *,
    dry_run: bool = False,
    files_per_second: float | None = None,
) -> PruneReport:
    """Delete the checkpoints of a root that no rule keeps, and clear what crashes left over.

    The newest checkpoint, the newest that is verified, the newest that is finite, what is pinned and what is being read
    stay whatever the rules say.

    Args:
        root: The directory of the checkpoints.
        keep: What to keep, such as `KeepLast(3) | KeepBest("loss")`; a number: the last so many; None: what the run
            stored with its checkpoints.
        dry_run: Delete nothing.
        files_per_second: Delete no faster, so that the file system has time for others.

    Returns:
        What was deleted and what was kept, with the reasons.

    Raises:
        NotFoundError: There is no such root.
        ConfigError: It is no root of checkpoints, or the rules make no sense.
        RootError: Something cannot be read or removed.
        CkptmanError: Another prune is running.
    """
    folder = _root(root)
    if files_per_second is not None:
        check_positive("prune", "files_per_second", files_per_second)
    rules = KeepLast(keep) if type(keep) is int else keep
    if rules is not None and not isinstance(rules, RetentionPolicy):
        raise ConfigError(f"keep is a policy such as KeepLast(3), a number of checkpoints, or None, not {keep!r}")
    policy = policy_for(folder, rules)
    remedy = "say what to keep, such as KeepLast(3)"
    with planned(folder, policy, dry_run=dry_run, stored=keep is None, remedy=remedy) as plan:
        pruned = Pruned()
        if not dry_run and (failed := carry_out(folder, plan, pruned, files_per_second=files_per_second)) is not None:
            raise failed
    gone = [each for each in plan.deletions if dry_run or each.record.sequence in pruned.deleted]
    spared = {each.record.step: pruned.spared.get(each.record.sequence, "") for each in plan.deletions}
    kept = {each.record.step: ", ".join(each.reasons) for each in plan.verdicts if each.keep}
    return PruneReport(
        deleted=tuple(_deletion(plan, each) for each in gone),
        kept=kept | {step: why for step, why in spared.items() if why},
        leftovers=tuple(each.path for each in plan.leftovers),
        freed_bytes=plan.freed_bytes if dry_run else pruned.freed_bytes,
        dry_run=dry_run,
    )


@contextmanager
def planned(
    root: Path, policy: RetentionPolicy | None, *, dry_run: bool, stored: bool, remedy: str
) -> Iterator[PrunePlan]:
    """Yield the plan of a prune, and keep other prunes out of the root. `stored`: the rules are those of the run.

    Raises: ConfigError, with the remedy, if the rules cannot be meant.
    """
    with nullcontext() if dry_run else one_at_a_time(root):
        plan = plan_prune(root, policy)
        if cause := policy_mistake(policy, [each.record for each in plan.verdicts], time.time(), goes_on=stored):
            whose = "by the rules that the run stored, " if stored else ""
            raise ConfigError(f"{root}: {whose}{cause}. Nothing is deleted: {remedy}")
        yield plan


def _root(root: str | os.PathLike[str]) -> Path:
    if not isinstance(root, str | os.PathLike) or not os.fspath(root):
        raise ConfigError(f"root is the path of a directory of checkpoints, not {root!r}")
    check_is_folder(os.fspath(root))
    check_is_root(Path(root))
    return Path(root)


def _deletion(plan: PrunePlan, verdict: Verdict) -> Deletion:
    record = verdict.record
    return Deletion(record.step, plan.entries[record.sequence].path, ", ".join(verdict.reasons), record.bytes)


def policy_for(root: Path, policy: RetentionPolicy | None) -> RetentionPolicy | None:
    """Return the rules, or else those of the run; with a limit in percent as one in bytes."""
    rules = policy if policy is not None else read_policy(root)
    if not needs_capacity(rules):
        return rules
    from ckptman.runtime.deadline import run_command
    from ckptman.storage.io.mount import capacity_bytes

    return in_bytes(rules, capacity_bytes(root, run_command))


def carry_out(
    root: Path,
    plan: PrunePlan,
    pruned: Pruned,
    *,
    jobs: int = 4,
    files_per_second: float | None = None,
    progress: Progress = lambda what, total: nullcontext(),
) -> RootError | None:
    """Delete, and note in `pruned` what is gone. Returns what could not be removed."""
    remove = None if files_per_second is None else ThrottledDelete(files_per_second)
    try:
        with lease(root, [], what="prune") as nonce, progress(f"pruning {root}", plan.freed_bytes) as done:
            tag = nonce or f"cli{os.urandom(4).hex()}"
            execute(root, plan, tag, jobs=jobs, remove=remove, done=done, pruned=pruned)
    except OSError as error:
        why = f"{error.filename or root} cannot be removed ({error.strerror}): check permissions and prune again"
        return RootError(error.errno or errno.EIO, why)
    return None


@short_traceback
def pin(path: str | os.PathLike[str], why: str) -> None:
    """Keep a checkpoint, whatever the rules of a prune say.

    The pin is a file beside the manifest, and goes with every copy. Pinned again, it gets the new reason.

    Args:
        path: A checkpoint, the path of one, or a root (then its newest checkpoint).
        why: Why it is to stay.

    Raises:
        NotFoundError: There is no such checkpoint.
        CorruptError: It is damaged.
        ConfigError: There is no reason.
        RootError: The pin cannot be written.
    """
    entry = entry_at(path)
    note = read_verified(entry.path, entry.require_manifest())
    if note is not None and note.damaged:  # no rule deletes it, but whoever pins it counts on it
        raise CorruptError(f"{entry.path} is damaged ({note.damaged}): pin another step")
    try:
        pins.pin(entry.path, why, by=pins.user_at_host(), time_seconds=time.time())
    except OSError as error:
        raise _refused(entry, error, "pinned") from error


@short_traceback
def unpin(path: str | os.PathLike[str]) -> bool:
    """Let the rules of a prune decide about a checkpoint again. Return whether it was pinned.

    Args:
        path: A checkpoint, the path of one, or a root (then its newest checkpoint).

    Raises:
        NotFoundError: There is no such checkpoint.
        RootError: The pin cannot be removed.
    """
    entry = entry_at(path)
    try:
        return pins.unpin(entry.path)
    except OSError as error:
        raise _refused(entry, error, "unpinned") from error


def entry_at(path: str | os.PathLike[str]) -> Entry:
    """Return the checkpoint that is meant. Raises: NotFoundError, RootError, CorruptError (it does not count)."""
    entry = look_at_folder(checkpoint_at(path))
    entry.require_manifest()
    if not entry.complete:
        raise CorruptError(f"{entry.path} does not count: {entry.problem}. Name another checkpoint")
    return entry


def _refused(entry: Entry, error: OSError, done: str) -> Exception:
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"{entry.path} was deleted meanwhile, so it cannot be {done}: ckptman list shows the rest")
    return RootError(
        error.errno or errno.EIO,
        f"{entry.path} cannot be {done} ({error.strerror}): check the permissions of its folder, and the quota",
    )
