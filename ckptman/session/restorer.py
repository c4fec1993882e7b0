"""Find the checkpoint that a run goes on from, and load it on any number of ranks."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptman.engine.comm.control_group import Channel, RankFailed, failing_as_one
from ckptman.engine.loading.allowed_mismatches import AllowedMismatches, Skipped, told
from ckptman.engine.loading.fit import State
from ckptman.engine.loading.loader import load
from ckptman.engine.loading.other_weights import OtherWeights
from ckptman.errors import (
    CkptmanError,
    CorruptError,
    NotFoundError,
    RootError,
    SuspectError,
    plain,
    warn,
)
from ckptman.policies.restore_choice import Choice, choose
from ckptman.runtime.stopwatch import Stopwatch
from ckptman.session.memory_restore import MemoryRestore
from ckptman.session.run_session import RunSession, refuse_other_checkpoints
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.backends.node_memory import InMemory
from ckptman.storage.catalog.backends.run_store import RunStore
from ckptman.storage.catalog.catalog import Entry, Listed, any_will_do, look_at
from ckptman.storage.catalog.reader_lease import held, is_gone, refuse_gone
from ckptman.storage.catalog.rollback_records import left_by
from ckptman.storage.catalog.verified import remember_damage
from ckptman.storage.format.manifest import read_manifest
from ckptman.storage.format.paths import MANIFEST
from ckptman.storage.io.threads import Worker
from ckptman.storage.transfer.copy import CopyOptions, copy_checkpoint
from ckptman.storage.transfer.progress import Meter

_FETCH_LOOK_SECONDS = 1.0
_LOOKS = 10
"""After so many a root whose checkpoints vanish while they are read is no longer looked at anew."""


def require_complete(entries: list[Entry]) -> None:
    """Refuse to choose where the best checkpoint may be among those that cannot be used.

    Raises: FormatVersionError if a newer ckptman wrote one of them: it may well be the newest good one, and going back
    behind it would lose its steps silently. CorruptError if there are entries and none is complete.
    """
    for entry in entries:
        if entry.newer_format is not None:
            raise entry.newer_format
    if entries and not any(entry.complete for entry in entries):
        raise CorruptError(
            f"{entries[-1].path.parent} holds {len(entries)} checkpoints and none of them is complete: "
            + "; ".join(f"step {entry.step}: {entry.problem}" for entry in entries[-3:])
            + ". Nothing is started over them: bring one back from a copy, or move them away to begin afresh"
        )


class Restorer:
    """Finds the checkpoint to start from and loads it. Every rank has one and calls it alike."""

    def __init__(
        self,
        control: Channel,
        store: RunStore,
        attempt: RunSession,
        beat: Callable[[], None],
        accepted: AllowedMismatches,
        prefer_finite: bool,
        watch: Stopwatch,
        memory: MemoryRestore | None = None,
    ) -> None:
        self._accepted, self._prefer_finite = accepted, prefer_finite
        self._memory, self._watch = memory, watch
        self.restored: dict[str, Any] = {}
        """What the journal is to be told of what was loaded."""
        self._in_memory: list[InMemory] | None = None
        self.from_memory = False
        """Whether what was loaded is in memory."""
        self.on_disk: Entry | None = None
        """Of what was on disk beside it the newest."""
        self.asked: Mapping[str, str] = {}
        """What the run of what was loaded asked of optimizers and schedules when it began."""
        self._control, self._store, self._attempt, self._beat = control, store, attempt, beat
        self.damaged: set[int] = set()
        """Commit sequences of the checkpoints that were skipped although they look complete."""
        self.held = contextlib.ExitStack()
        """Holds what was loaded until it is closed: no prune takes it from a run that went on from it."""

    def best(self, state: State, step: int | None, *, allow_suspect: bool = False) -> int | None:
        """Load the newest good checkpoint of the root, or that of `step`, and return its step; None: there is none."""
        refused: list[str] = []
        self._scan_memory()
        on_disk, trouble = self._control.run_on_leader(lambda: self._candidates_beside_memory(step, allow_suspect))
        self._watch.ends("find")
        if (found := self._best_in_memory(state, step, on_disk, allow_suspect, refused)) is not None:
            return found
        if trouble is not None:
            raise trouble
        left, looks = on_disk.all, 1
        unreachable: CkptmanError | None = None
        while left:
            if len(left) == len(on_disk.last_resort):
                if unreachable is not None:
                    raise unreachable
                self._tell_last_resort(left[0])
            entry = left.pop(0)
            if not entry.in_folder and (trouble := self._fetch(entry)) is not None:
                if not left:
                    raise trouble
                if not isinstance(trouble, CorruptError):
                    unreachable = trouble
                self._skip(entry, trouble)
                continue
            try:
                if isinstance(entry, Listed):
                    entry = self._control.run_on_leader(partial(look_at, entry.path, entry.step))
                entry.require_manifest()
                skipped = self._load(state, entry.path)
            except (CorruptError, NotFoundError) as error:
                if looks < _LOOKS and self._control.run_on_leader(partial(is_gone, entry.path)):
                    # Pruned since it was listed. Whoever did that left the newest: what there is now is looked at anew.
                    on_disk = self._control.run_on_leader(lambda: self._candidates(step, allow_suspect))
                    left, looks = on_disk.all, looks + 1
                    continue
                if not entry.complete:
                    self._skip(entry, CorruptError(entry.problem))
                    continue
                if self._control.is_leader:
                    remember_damage(entry.path, entry.require_manifest(), str(error))
                if step is not None and not left:
                    raise
                refused.append(str(error))
                if entry.path.parent == self._store.root:
                    self.damaged.add(entry.sequence)
                self._skip(entry, error)
                continue
            self._note_restored(entry.step, entry.path, skipped)
            self.asked = entry.require_manifest().asked
            return entry.step
        if refused:
            raise CorruptError(f"{self._store.root}: no checkpoint is good. " + " ".join(refused))
        if looks > 1 or self._attempt.finds_checkpoints:  # a mount that went meanwhile left an empty folder
            raise RootError(
                errno.ENOENT,
                f"{self._store.root} held checkpoints when this run began, and holds none now: nothing is started at 0 "
                f"over them. See whether it is still mounted, or who removed them, and start again",
            )
        return None

    def finds_in_memory(self) -> bool:
        """Return whether the nodes hold anything of this run, complete or not. Every rank calls it."""
        return bool(self._scan_memory()) or (self._memory is not None and bool(self._memory.damage))

    def _scan_memory(self) -> list[InMemory]:
        if self._in_memory is None:
            self._in_memory = self._memory.look() if self._memory is not None else []
        return self._in_memory

    def _candidates_beside_memory(
        self, step: int | None, allow_suspect: bool
    ) -> tuple[Choice[Entry], CkptmanError | None]:
        """Return what is on disk to try, and what is to be raised where nothing in memory will do."""
        try:
            return self._candidates(step, allow_suspect), None
        except (NotFoundError, CorruptError) as error:
            if not self.finds_in_memory():
                raise
            return choose([], {}), error

    def _best_in_memory(
        self, state: State, step: int | None, on_disk: Choice[Entry], allow_suspect: bool, refused: list[str]
    ) -> int | None:
        """Load what is in memory where that is newer than what is on disk, or the same, and say why where it is not.
        `refused`: gets what could not be loaded, over which nothing is started afresh."""
        if self._memory is None:
            return None
        found, left = self._scan_memory(), on_disk.all
        for number, damage in self._memory.damage.items():
            if step in (None, number):
                refused.append(f"step {number} in memory: {damage}")
                self._reject(number, damage)
        why_not = self._control.run_on_leader(
            lambda: [self._rejection(each, step, left, allow_suspect) for each in found]
        )
        for each, why in zip(found, why_not):
            if why is None:
                try:
                    self._memory.bring_shared(each)
                    folder, memory = self._memory.folder_of(each), self._memory
                    with failing_as_one():
                        skipped = load(
                            self._control,
                            state,
                            folder,
                            self._accepted,
                            bring=partial(memory.bring, each),
                            watch=self._watch,
                        )
                except (CorruptError, NotFoundError, RankFailed) as error:
                    why = f"it cannot be loaded: {error}"
                    refused.append(f"step {each.manifest.step} in memory: {error}")
                else:
                    self.from_memory, self.on_disk = True, left[0] if left else None
                    self.asked = each.manifest.asked
                    self._note_restored(each.manifest.step, folder, skipped, _why_memory(each, left))
                    try:
                        memory.copy(each)
                    except RankFailed as error:
                        if self._control.is_leader:
                            warn(
                                f"some of its parts are on one node alone until the next save to memory: {plain(error)}"
                            )
                    return each.manifest.step
            if why:
                self._reject(each.manifest.step, why)
        return None

    def _reject(self, step: int, why: str) -> None:
        self._attempt.note("memory_refused", step=step, reason=why)
        if self._control.is_leader:
            warn(f"step {step} in memory is not what the run goes on from: {plain(why)}")

    def _rejection(self, found: InMemory, step: int | None, left: list[Entry], allow_suspect: bool) -> str | None:
        """Return why a checkpoint in memory is not loaded; "": because there is a newer one, which is no news."""
        manifest = found.manifest
        if step is not None and manifest.step != step:
            return ""
        if left and found.order < (left[0].require_manifest().attempt, left[0].step):
            return ""
        if missing := found.missing:
            lost = sorted({name for name in missing if name.startswith("__")}) or missing
            return f"{len(lost)} of its parts are on no node that is left ({', '.join(lost[:3])})"
        if (rollback := left_by(self._store.rollbacks(), manifest)) is not None:
            return f"it is older than the rollback to step {rollback.to_step}"
        nonfinite_reason = Entry(manifest.step, self._store.root, manifest).nonfinite_reason
        if self._prefer_finite and nonfinite_reason and any(not each.nonfinite_reason for each in left):
            return f"NaN or infinity in {nonfinite_reason}"
        suspects = {} if allow_suspect else self._attempt.suspects()
        return suspects.get(manifest.step)

    def at(self, state: State, folder: Path, others: OtherWeights) -> int:
        """Load the checkpoint in `folder`, whoever wrote it, and return its step; 0 if it does not say, or if only a
        part of the state is loaded."""

        def look() -> Entry | None:
            return Entry(0, folder, read_manifest(folder)) if (folder / MANIFEST).exists() else None

        entry = self._control.run_on_leader(look)
        self._watch.ends("find")
        part = others.part_of(state)
        before = dict(part)
        try:
            skipped = self._load(part, folder, others)
        except (CorruptError, NotFoundError):
            with failing_as_one():
                self._control.run_on_leader(partial(refuse_gone, folder))
            raise
        state.update({name: value for name, value in part.items() if value is not before[name]})
        if entry is not None:
            of_entries = entry.require_manifest().asked
            self.asked = {name: text for name, text in of_entries.items() if name.rpartition(".")[0] in part}
        step = entry.require_manifest().step if entry is not None and not others.only else 0
        self._note_restored(step, folder, skipped, only=others.only)
        return step

    def _fetch(self, entry: Entry) -> CkptmanError | None:
        """Have the leader copy into the root what is elsewhere. Returns what went wrong, the same on every rank."""
        store, meter, before = self._store, Meter(), [("", 0)]

        def fetch() -> None:
            source, may_replace = store.source_of(entry)
            root, options = LocalBackend(store.root), CopyOptions(meter=meter, overwrite=may_replace)
            copy_checkpoint(entry, root, options, source=source)

        with Worker("ckptman-fetch") as pool:
            work = [pool.submit(fetch)] if self._control.is_leader else []

            def look() -> tuple[bool, bool]:
                done = [each for each in work if each.wait(_FETCH_LOOK_SECONDS)]
                for each in done:
                    each.result()
                now = meter.phase, meter.done_bytes
                goes_on, before[0] = now != before[0], now
                return bool(done), goes_on

            try:
                with failing_as_one():
                    # In short exchanges: it may take hours, and nobody hears of the leader meanwhile.
                    while not (told := self._control.run_on_leader(look))[0]:
                        if told[1]:
                            self._beat()
            except CkptmanError as error:
                return error
        return None

    def _load(self, state: State, folder: Path, others: OtherWeights | None = None) -> Skipped:
        """Load a checkpoint that no prune may take meanwhile: what the leader holds is held for all ranks."""
        with contextlib.ExitStack() as stack:
            if self._control.is_leader:
                stack.enter_context(held(folder, what="a run that goes on from it"))
            self._watch.ends("find")
            skipped = load(self._control, state, folder, self._accepted, others=others, watch=self._watch)
            self.held = stack.pop_all()
            return skipped

    def _note_restored(
        self, step: int, folder: Path, skipped: Skipped, memory: str = "", only: Sequence[str] = ()
    ) -> None:
        """`memory`: why it was loaded from there; "": it was not. `only`: what of it was loaded; (): all."""
        more: dict[str, Any] = {name: told(names) for name, names in skipped._asdict().items() if names}
        if memory:
            more["memory"] = memory
        if only:
            more["only"] = list(only)
        self.restored = {"step": step, "path": str(folder), **more}

    def _candidates(self, step: int | None, allow_suspect: bool) -> Choice[Entry]:
        if step is not None:
            return self._of_step(step)
        suspects = {} if allow_suspect else self._attempt.suspects()

        def will_do(entry: Entry) -> bool:
            return entry.step not in suspects and not (self._prefer_finite and entry.nonfinite_reason)

        entries = self._store.list(until=will_do)
        if not any(entry.complete for entry in entries) and self._store.list(abandoned=True, until=any_will_do):
            require_complete(entries)
            raise CorruptError(
                f"{self._store.root}: all that is left was abandoned by a rollback, and nothing is started over it: "
                f"ckptman rollback --undo brings it back, and restore(step=...) takes one of it"
            )
        if not entries:
            refuse_other_checkpoints(self._store.root, below=True)
        for entry in entries:
            if not entry.complete and entry.newer_format is None:
                self._skip(entry, CorruptError(entry.problem))
        require_complete(entries)
        choice = choose(reversed(entries), suspects, prefer_finite=self._prefer_finite)
        self._tell_passed_over(choice, suspects)
        # A tier that is away may hold a finite one.
        return choice if self._store.away is None else replace(choice, last_resort=[])

    def _of_step(self, step: int) -> Choice[Entry]:
        """Return what there is of a step: what a rollback left behind only if the step was not saved again."""
        named = [each for each in reversed(self._store.list(abandoned=True, step=step)) if each.step == step]
        if not named:
            there = self._store.list(abandoned=True, until=any_will_do)
            if not there:
                refuse_other_checkpoints(self._store.root, below=True)
            known = ", ".join(str(entry.step) for entry in there[-10:]) or "none"
            raise NotFoundError(f"{self._store.root} has no checkpoint of step {step}; the latest there are: {known}")
        named = [each for each in named if not each.abandoned] or named
        whole = [each for each in named if each.complete]
        if not whole:
            named[0].require_manifest()
        return choose((each for each in whole if each.identity == whole[0].identity), {}, prefer_finite=False)

    def _tell_passed_over(self, choice: Choice[Entry], suspects: Mapping[int, str]) -> None:
        """Note and warn of the checkpoints that the run goes back behind.

        Raises: SuspectError if nothing else is left: a run never falls back to step 0 over checkpoints. What is wrong
        with a tier that is away, if no checkpoint here is finite.
        """
        if choice.only_nonfinite:
            if self._store.away is not None:
                raise self._store.away
            newest = [*choice.suspects, *choice.tried][0]
            warn(
                f"{self._store.root}: no checkpoint is finite (step {newest.step}: NaN or infinity in "
                f"{newest.nonfinite_reason}). The run goes on from the newest; give it another root to begin afresh"
            )
        elif choice.nonfinite:
            each_once = {each.sequence: each for each in choice.nonfinite}  # a tier has the same one
            self._tell_nonfinite([*each_once.values()], [*choice.suspects, *choice.tried][0])
        if choice.only_suspects:
            step = choice.suspects[0].step
            raise SuspectError(f"{self._store.root}: step {step} is all there is to go on from, and {suspects[step]}")
        for entry in choice.suspects:
            self._skip(entry, SuspectError(suspects[entry.step]))

    def _tell_nonfinite(self, skipped: list[Entry], taken: Entry) -> None:
        for entry in skipped:
            self._attempt.note("restore_refused", step=entry.step, reason=f"not finite: {entry.nonfinite_reason}")
        newest = skipped[0]
        more = f" and {len(skipped) - 1} before it" if len(skipped) > 1 else ""
        again = ""
        if newest.require_manifest().restored_from == taken.step:
            again = f" It had gone on from step {taken.step} before: expect the same unless something is changed."
        warn(
            f"skipping the checkpoint of step {newest.step}{more}: NaN or infinity in {newest.nonfinite_reason}. The "
            f"run goes back to step {taken.step}, the newest that is finite.{again} restore(step={newest.step}) loads "
            f'the newest all the same, and nonfinite="ignore" always does'
        )

    def _skip(self, entry: Entry, why: Exception) -> None:
        self._attempt.note("restore_refused", step=entry.step, reason=str(why))
        if self._control.is_leader:
            warn(f"skipping the checkpoint of step {entry.step}: {plain(why)}")

    def _tell_last_resort(self, entry: Entry) -> None:
        """Say that all that is finite turned out to be damaged."""
        if self._control.is_leader:
            warn(
                f"{self._store.root}: no other checkpoint is finite, so the run goes on from step {entry.step} all the "
                f"same (NaN or infinity in {entry.nonfinite_reason}). Stop it to bring a finite one back from a copy, "
                f"or to begin afresh in another root"
            )


def _why_memory(found: InMemory, left: list[Entry]) -> str:
    if not left:
        return "nothing is on disk yet"
    newest = left[0].require_manifest().attempt, left[0].step
    return f"step {newest[1]} is the newest on disk" if newest != found.order else "the same is on disk"
