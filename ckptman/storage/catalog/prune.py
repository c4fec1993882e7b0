"""Deleting by plan: the pure rules of `ckptman.policies.retention_plan` decide what to keep; here it is carried out.

Safe beside a run that saves, readers, copies and other prunes, on this host and on others: a folder is renamed before a
byte of it is removed, and is put back where a reader or a pin came in between (see `lease`).

A prune goes by the policy that the run has stored beside its checkpoints, in `.ckptman/retention.json`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptman.errors import CkptmanError, ConfigError, CorruptError
from ckptman.policies.retention_plan import Record, Verdict, over_limit, plan, relied_on
from ckptman.policies.retention_rules import RetentionPolicy, newest_finite
from ckptman.policies.stored_retention import from_data, to_data
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.catalog import Catalog, Entry, any_will_do
from ckptman.storage.catalog.orphans import Leftover, find_leftovers, find_strays
from ckptman.storage.catalog.pins import pin, read_pin
from ckptman.storage.catalog.reader_lease import lease, look, run_names
from ckptman.storage.catalog.rollback_records import rollback_numbers
from ckptman.storage.catalog.tiers import steps_awaiting_drain
from ckptman.storage.format.manifest import parse_versioned
from ckptman.storage.format.paths import MANIFEST, METADATA, retention_path, run_folder, step_folder
from ckptman.storage.format.sealed_json import seal, unseal
from ckptman.storage.io.durable_files import DISK, holding, is_super_user, owner_of, stat_of, through
from ckptman.storage.io.safe_open import read_regular

LOCK_SECONDS = 300.0
_TAKEN_AT_ONCE = 50
_CONFIRMED = 3
"""So many of the newest that stay, and the newest finite ones, are looked at in full, where what is known of them was
remembered."""
_ROUNDS = 3
_OF_ANOTHER = "it belongs to another user than its root"
Progress = Callable[[int], None]
"""Told the bytes that were freed."""


@dataclass(frozen=True)
class PrunePlan:
    """What a prune would do. `verdicts` oldest commit first; `entries` by sequence.

    `ignored`: what counts for nothing and is not touched, with the reason: a human has to look at it. `over_bytes`: by
    how much what is kept is more than the limit allows, where nothing more of it may go.
    """

    verdicts: list[Verdict]
    entries: dict[int, Entry]
    leftovers: list[Leftover]
    ignored: list[tuple[Entry, str]]
    over_bytes: int = 0
    rollbacks: frozenset[int] = frozenset()
    """Those that the root had: after another one, what was to go may be what is needed."""
    strays: list[Leftover] = field(default_factory=list)
    """What gets its name back, because a prune that was killed took it although it was wanted."""
    folder: tuple[int, int] | None = None
    """Device and inode of the root: what has its name by the time that this is carried out may be another one."""

    @property
    def deletions(self) -> list[Verdict]:
        """What goes, oldest commit first."""
        return [verdict for verdict in self.verdicts if not verdict.keep]

    @property
    def freed_bytes(self) -> int:
        return sum(v.record.bytes for v in self.deletions) + sum(each.bytes for each in self.leftovers)


@dataclass
class Pruned:
    """What became of a plan: what is gone now, by sequence, and what was spared after all, with the reason."""

    deleted: set[int] = field(default_factory=set)
    spared: dict[int, str] = field(default_factory=dict)
    cleared: int = 0
    """How many leftovers are gone."""
    freed_bytes: int = 0


def plan_prune(
    root: Path,
    policy: RetentionPolicy | None,
    damaged: Collection[int] = (),
    *,
    now_seconds: float | None = None,
    wait: bool = True,
    coming: Record | None = None,
    catalogue: Catalog | None = None,
    rounds: int = _ROUNDS,
) -> PrunePlan:
    """What to delete under a root, which is listed once. Incomplete entries never count and are not touched.

    Nor do those that were found damaged, by a verify or by the run that has their sequences in `damaged`: what no
    restore takes must not push out a good one. `wait`: watch readers of other hosts until it is clear whether they
    live, instead of taking it for granted; and look at the tiers, instead of believing the last drain, where a policy
    may delete something. `coming`: the save for which there is no room (see `retention.plan`). `catalogue`: of this
    root, where one remembers it; then only those folders are looked into that are to go, and those that a deletion
    relies on. `rounds`: how often to plan again if they differ from what was remembered; then all are looked into.

    Raises: as `Catalog.scan`.
    """
    folder = _identity(root)
    is_known = catalogue is not None and rounds > 0
    catalogue = catalogue or Catalog(root)
    now_seconds = time.time() if now_seconds is None else now_seconds
    # The names first: who has made a folder since then may have a lease that was not seen.
    names = catalogue.names()
    of_run = run_names(root)
    leases, before = look(root, wait=wait, names=of_run), frozenset(rollback_numbers(root, of_run))
    there = catalogue.leftovers(names)
    entries: dict[int, Entry] = {}
    records: list[Record] = []
    numbers: list[int] = []
    ignored: list[tuple[Entry, str]] = []
    number = 0
    found = catalogue.scan(abandoned=True, names=names, until=any_will_do if is_known else None)
    for entry in [*catalogue.unrecognized_entries(names), *found]:
        if not entry.complete:
            ignored.append((entry, entry.problem or ""))
            continue
        record = entry.record()
        if record.damaged or entry.sequence in damaged:
            ignored.append((entry, f"damaged: {record.damaged or 'a restore refused it'}"))
            continue
        # Folders that were copied from another root can share a sequence: their order stays, and each gets a verdict.
        number = max(entry.sequence, number + 1)
        entries[number] = entry
        holder = leases.holder(entry.path.name)
        records.append(replace(record, in_use=holder) if holder else record)
        numbers.append(number)
    if coming is not None:
        coming = replace(coming, sequence=number + 1)
    waiting = steps_awaiting_drain(root, records, now_seconds, look=wait) if policy is not None else {}
    for place, each in enumerate(records):
        if place in waiting or numbers[place] != each.sequence:
            in_use = each.in_use or waiting.get(place, "")
            records[place] = replace(each, sequence=numbers[place], in_use=in_use)
    verdicts = plan(records, policy, now_seconds=now_seconds, coming=coming)
    if is_known and not all(each.keep for each in verdicts):
        staying = [each.record for each in verdicts if each.keep]
        newest = {each.sequence for each in staying[-_CONFIRMED:]}
        newest |= newest_finite([each for each in staying if not each.abandoned]).keys()
        needed = newest | relied_on(verdicts, policy, now_seconds)
        if not catalogue.confirm(
            [entries[each] for each in sorted(needed)], wholly={entries[each].path for each in newest}
        ):
            return plan_prune(
                root,
                policy,
                damaged,
                now_seconds=now_seconds,
                wait=wait,
                coming=coming,
                catalogue=catalogue,
                rounds=rounds - 1,
            )
    leftovers, owners = [], _owners(root)
    for left in find_leftovers(root, leases, there):
        why = _OF_ANOTHER if _is_of_another(left.path, owners) else left.of_others()
        if not why:
            leftovers.append(left)
        elif left.step is not None:
            ignored.append((Entry(left.step, left.path, None, why), why))
    return PrunePlan(
        verdicts,
        entries,
        leftovers,
        ignored,
        over_limit(verdicts, policy),
        before,
        find_strays(root, leases, there),
        folder,
    )


def _identity(root: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = root.stat()
        return found.st_dev, found.st_ino
    return None


def _owners(root: Path) -> set[int | None]:
    """Return the users whose files under a root the super-user deletes: its owner, who has run in it, and himself."""
    return {stat_of(root).st_uid, owner_of(run_folder(root)), os.geteuid()}


def _is_of_another(path: Path, owners: Collection[int | None]) -> bool:
    """Return whether something belongs to none of these, for who may remove what is anybody's."""
    return is_super_user() and owner_of(path) not in (None, *owners)


@contextmanager
def one_at_a_time(root: Path) -> Iterator[None]:
    """Keep other prunes of this host waiting: two of them would report the same bytes as freed.

    A root in which no run ever was, or a file system without locks, is no obstacle: `execute` is safe alone.
    Raises: CkptmanError after `LOCK_SECONDS`.
    """
    from filelock import FileLock, Timeout

    lock_path = run_folder(root) / "prune.lock"
    # FileLock would make the folder, and the root too; and through a link it would write to what is none of ours.
    if not run_folder(root).is_dir() or run_folder(root).is_symlink() or lock_path.is_symlink():
        yield
        return
    lock = FileLock(lock_path, timeout=LOCK_SECONDS)
    try:
        lock.acquire()
    except Timeout:
        raise CkptmanError(
            f"another ckptman prune has been at work on {root} for {LOCK_SECONDS:.0f} s: let it end, or stop it"
        ) from None
    except (NotImplementedError, OSError):
        yield
        return
    try:
        yield
    finally:
        lock.release()


def execute(
    root: Path,
    plan: PrunePlan,
    tag: str,
    *,
    jobs: int = 1,
    remove: Callable[[Path], None] | None = None,
    done: Progress | None = None,
    pruned: Pruned | None = None,
    later: bool = False,
) -> Pruned:
    """Carry out a plan: what goes is made invisible at once, and then removed. Can be run again at any point.

    What cannot be removed does not keep the rest from being removed. Whatever has the path of the root meanwhile, only
    what is in the folder that was looked at is touched; and by the super-user only what belongs to its owner.

    Args:
        jobs: threads that remove.
        remove: what removes a folder that nobody sees any more, such as `ThrottledDelete`.
        later: it does so after this has returned, so it needs a path that holds then.
        pruned: where to tell what became of it, for who wants to know that also of one that failed.

    Raises: OSError in the end, if there was such.
    """
    work = _Work(root, plan, remove, later, done, pruned if pruned is not None else Pruned())
    with holding(root, through_link=True) as held, _first_error_last() as attempt:
        if plan.folder not in (None, (held.st_dev, held.st_ino)):
            raise OSError(errno.ESTALE, "something else was put in its place since it was looked at", str(root))
        work.owners = _owners(root)
        for stray in plan.strays:
            assert stray.step is not None
            attempt(partial(LocalBackend(root).put_back, stray.path, root / step_folder(stray.step)))
        # Leftovers first: an earlier save of a step must not come back when the later one goes.
        for count, leftover in enumerate(plan.leftovers):
            attempt(partial(work.clear, leftover, f"{tag}-left{count}"))
        stuck = {leftover.step for leftover in plan.leftovers if os.path.lexists(leftover.path)}
        going = [
            (count, verdict.record, entry)
            for count, verdict in enumerate(plan.deletions)
            if (entry := plan.entries[verdict.record.sequence]).step not in stuck
        ]
        taken: list[tuple[Path, Path, Record]] = []
        # A few at a time: readers of those wait, and each look for readers reads all their names.
        for few in (going[start : start + _TAKEN_AT_ONCE] for start in range(0, len(going), _TAKEN_AT_ONCE)):
            with lease(root, [entry.path.name for _, _, entry in few], what="prune", takes=True):
                for count, record, entry in few:
                    attempt(partial(work.take, entry, record, f"{tag}-{count}", taken))
        steps = [partial(work.remove, *each) for each in taken]
        if jobs == 1:
            for step in steps:
                attempt(step)
        else:
            with ThreadPoolExecutor(jobs, thread_name_prefix="ckptman-prune") as pool:
                try:
                    for future in [pool.submit(step) for step in steps]:
                        attempt(future.result)
                except BaseException:  # Ctrl-C: what is being removed is, and the rest is for the next prune
                    pool.shutdown(cancel_futures=True)
                    raise
    return work.pruned


@contextmanager
def _first_error_last() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Hands out a function that tries a step and goes on after an OSError; the first of those is raised at the end."""
    errors: list[OSError] = []

    def attempt(step: Callable[[], object]) -> None:
        try:
            step()
        except OSError as error:
            errors.append(error)

    yield attempt
    if errors:
        raise errors[0]


class _Work:
    """One prune at work, in several threads."""

    def __init__(
        self,
        root: Path,
        plan: PrunePlan,
        remove: Callable[[Path], None] | None,
        later: bool,
        done: Progress | None,
        pruned: Pruned,
    ) -> None:
        self._root, self._place, self._done = root, LocalBackend(root), done
        self._how, self._is_later = remove or DISK.remove_tree, later
        self._rollbacks = plan.rollbacks
        self._turn = threading.Lock()
        self.owners: set[int | None] = set()
        self.pruned = pruned

    def clear(self, leftover: Leftover, tag: str) -> None:
        if _is_of_another(leftover.path, self.owners) or leftover.of_others():
            return
        if leftover.step is None:
            DISK.remove_file(leftover.path)
        elif look(self._root, wait=False).holder(leftover.path.name):
            return  # a copy has taken up what another one left
        elif (trash := self._place.hide(leftover.path, step_folder(leftover.step), tag)) is not None:
            self._remove(trash)
        self._count(leftover.bytes)

    def take(self, entry: Entry, record: Record, tag: str, taken: list[tuple[Path, Path, Record]]) -> None:
        """Make one checkpoint invisible, unless it is another by now or somebody wants it."""
        if not _is_as_planned(entry, entry.path):
            return
        if _is_of_another(entry.path, self.owners):
            self.pruned.spared[record.sequence] = _OF_ANOTHER
            return
        if reason := self._rejection(entry.path, entry.path.name):
            self.pruned.spared[record.sequence] = reason
            return
        trash = self._place.hide(entry.path, step_folder(entry.step), tag)
        if trash is None:
            return
        # Who came between the look and the rename is seen now; who comes later finds nothing there.
        other = "" if _is_as_planned(entry, trash) else "the step was saved again since the plan was made"
        if reason := other or self._rejection(trash, entry.path.name):
            if not self._place.put_back(trash, entry.path):
                self._mark(trash, entry.path, reason)
                raise OSError(errno.EBUSY, f"it stays under this name, as it cannot be put back: {reason}", str(trash))
            self.pruned.spared[record.sequence] = reason
            return
        taken.append((trash, entry.path, record))

    def _mark(self, trash: Path, path: Path, reason: str) -> None:
        """Pin what nobody holds, unless it was saved again: else the next prune would clear what it is to put back."""
        with contextlib.suppress(OSError, CkptmanError):
            held = read_pin(trash) is not None or look(self._root, wait=False).holder(path.name)
            if not held and not os.path.lexists(path):
                why = f"a prune could not put it back: {reason}"
                pin(trash, why, by="ckptman prune", time_seconds=time.time())

    def remove(self, trash: Path, path: Path, record: Record) -> None:
        """Remove one that was taken."""
        # Its descriptions first: who finds the rest of it, by this name or for a while still by the one before, must
        # not take that for a checkpoint. `.metadata` before the manifest, as with it alone plain DCP loads the rest.
        try:
            with holding(trash):
                for name in (METADATA, MANIFEST):
                    DISK.remove_file(trash / name)
        except OSError as error:
            # It is somebody else's: whole as it is, nobody would find it under that name, and no prune could remove it.
            is_whole = os.path.lexists(trash / METADATA) and os.path.lexists(trash / MANIFEST)
            if is_whole and self._place.put_back(trash, path):
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise
        self._remove(trash)
        self._count(record.bytes, record.sequence)

    def _remove(self, trash: Path) -> None:
        if self._is_later:
            self._how(trash)
            return
        there = through(trash)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), holding(there) as found:
            # Somebody may have put another folder in its place.
            if is_super_user() and found.st_uid not in self.owners:
                raise OSError(errno.EPERM, _OF_ANOTHER, str(trash))
            self._how(there)
            return
        self._how(there)

    def _rejection(self, folder: Path, name: str) -> str:
        names = run_names(self._root)
        if frozenset(rollback_numbers(self._root, names)) != self._rollbacks:
            return "the root was rolled back since the plan was made"
        note = read_pin(folder)
        return f"pinned: {note.why}" if note is not None else look(self._root, wait=False, names=names).holder(name)

    def _count(self, freed_bytes: int, sequence: int | None = None) -> None:
        with self._turn:
            self.pruned.freed_bytes += freed_bytes
            if sequence is None:
                self.pruned.cleared += 1
            else:
                self.pruned.deleted.add(sequence)
            if self._done is not None:
                self._done(freed_bytes)


def _is_as_planned(entry: Entry, folder: Path) -> bool:
    """Whether a folder holds what the plan was made for: a run may have saved this step again meanwhile."""
    try:
        return entry.is_in(folder)
    except (OSError, CkptmanError):
        return False


AGAIN_SECONDS = 1.0
FORMAT_VERSION = 1
_MOST_BYTES = 1024 * 1024
_REMEDY = "say what to keep, with options such as --keep-last 3"


def write_policy(root: Path, policy: RetentionPolicy | None) -> None:
    """Store the policy of a run, where it is not the one that is stored. Raises: OSError. Called by the leader."""
    data = seal(json.dumps({"format_version": FORMAT_VERSION, **to_data(policy)}, indent=1).encode())
    path = retention_path(root)
    try:
        if read_regular(path, _MOST_BYTES) == data:
            return
    except (OSError, CorruptError):
        pass
    DISK.replace_file(path, data)


def read_policy(root: Path) -> RetentionPolicy | None:
    """The policy that a run stored; None: it keeps everything.

    Raises: ConfigError where none is stored, or none that can be applied without the run's own program.
    """
    path = retention_path(root)
    try:
        try:
            data = read_regular(path, _MOST_BYTES, remedy="remove it")
        except FileNotFoundError:  # a client may find none while another one replaces it
            if not run_folder(root).is_dir():
                raise
            time.sleep(AGAIN_SECONDS)
            data = read_regular(path, _MOST_BYTES, remedy="remove it")
        raw: dict[str, Any] = parse_versioned(path, unseal(path, data))
        return from_data(raw)
    except FileNotFoundError:
        raise ConfigError(f"no run stored with {root} what it keeps, so there are no rules: {_REMEDY}") from None
    except (ConfigError, CorruptError) as error:
        raise ConfigError(f"the rules that are stored in {path} cannot be used ({error}): {_REMEDY}") from None
