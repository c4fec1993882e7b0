"""What a run saves to and goes on from: saves go to its root, and what is there to go on from may be in a tier, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckptman.errors import CkptmanError, ConfigError, NotFoundError, RootError, plain, warn
from ckptman.policies.tiers import Tier
from ckptman.storage.catalog.backends.backend import Backend
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.catalog import Entry, Until, commit_order, mark
from ckptman.storage.catalog.rollback_records import Rollback, abandoned_by
from ckptman.storage.catalog.tiers import absolute, check_tier, check_tiers, make_tiers, open_tier, read_drained
from ckptman.storage.format.manifest import Manifest


class RunStore:
    """The root of a run, with its tiers behind it, if it has any. Only the leader looks.

    Of several copies of a checkpoint the nearest is the last in a list: the root's, then those of the tiers in the
    order in which they were named. `strict`: a tier that cannot be looked at is an error, whatever else there is.
    Raises: ConfigError where tiers cannot be those of the root.
    """

    def __init__(self, root: Path, tiers: Sequence[Tier] = (), *, strict: bool = False) -> None:
        if isinstance(tiers, str | Tier) or not all(isinstance(tier, Tier) for tier in tiers):
            raise ConfigError(f"tiers: give a list of ckptman.Tier(...), not {tiers!r}")
        self.root, self.local = root, LocalBackend(root)
        self.tiers = tuple(absolute(tier) for tier in tiers)
        check_tiers(self.root, self.tiers)
        self._places = [open_tier(tier) for tier in self.tiers]
        self._strict = strict
        self._highest = 0
        self._elsewhere: dict[str, Backend] = {}
        self.away: CkptmanError | None = None
        """Why one of the tiers could not be looked at when this was listed last."""
        self.run_ids: frozenset[str] = frozenset()
        """Of the run, by which a root that was lost knows its tiers."""

    def make(self, *, is_there: bool = False) -> None:
        """Create the root and the tiers if they are missing. Raises: as `LocalBackend.make`."""
        self.local.make(is_there=is_there)
        if self.tiers:
            make_tiers(self.root, self.tiers)

    def begin(self, name: str, tag: str) -> str:
        """Make the folder of a save in the root. Raises: OSError."""
        return self.local.begin(name, tag)

    def commit(self, draft: str, manifest: Manifest) -> Entry:
        """Make it the checkpoint of its name. Raises: ExistsError, OSError."""
        return self.local.commit(draft, manifest)

    def abandon(self, draft: str) -> None:
        """Remove it. Never raises."""
        self.local.abandon(draft)

    def list(self, *, abandoned: bool = False, step: int | None = None, until: Until | None = None) -> list[Entry]:
        """What is in the root and in the tiers. What a rollback left behind in one of them is so everywhere.

        What does not count in a tier is among it only where no other copy does, or where a newer ckptman wrote it.
        Raises: CkptmanError where a tier cannot be looked at and there is nothing else: it may be all there is.
        """
        if not self.tiers:
            return self.local.list(abandoned=abandoned, step=step, until=until)
        rollbacks = [*self.rollbacks()]

        def will_do(entry: Entry) -> bool:
            return until is not None and until(entry) and not mark(entry, abandoned_by(rollbacks)).abandoned

        wanted = will_do if until is not None else None
        found = self.local.list(abandoned=True, step=step, until=wanted)
        troubles: list[tuple[object, CkptmanError]] = []
        for place in self._places:
            try:
                check_tier(self.root, place, self.run_ids)
                rollbacks += place.rollbacks()
                there = place.list(abandoned=True, step=step, until=wanted)
            except CkptmanError as error:
                troubles.append((place.where, error))
                continue
            self._elsewhere |= {entry.where: place for entry in there if not entry.in_folder}
            placed = [each if each.in_folder else replace(each, path=self.root / each.path.name) for each in there]
            found = [*placed, *found]
        left = abandoned_by(rollbacks)
        found = sorted((mark(entry, left) for entry in found), key=commit_order)
        self._highest = max([self._highest, *(entry.sequence for entry in found)])
        counting = [entry for entry in found if entry.complete and not entry.abandoned]
        self.away = troubles[0][1] if troubles else None
        for where, trouble in troubles:
            if self._strict or not counting or not isinstance(trouble, RootError | NotFoundError):
                raise trouble
            why = getattr(trouble, "strerror", None) or trouble
            warn(f"the tier {plain(where)} cannot be looked at, and what it has is not restored: {plain(why)}")
        whole, own = {entry.step for entry in counting}, self.root
        found = [
            each
            for each in found
            if each.complete
            or each.newer_format is not None
            or (each.path.parent == own and each.in_folder)
            or each.step not in whole
        ]
        return [entry for entry in found if abandoned or not entry.abandoned]

    def last_sequence(self) -> int:
        """Return the highest commit sequence that is known, which the next commit has to exceed; 0 where none is."""
        drained = read_drained(self.root) if self.tiers else {}
        told = (record.sequence for records in drained.values() for record in records)
        return max([self.local.last_sequence(), self._highest, *told])

    def rollbacks(self) -> Sequence[Rollback]:
        """Return the rollbacks of the root."""
        return self.local.rollbacks()

    def copy_all_rollbacks(self) -> None:
        """Write down in the root and in all tiers what rollbacks there are anywhere. Raises: CkptmanError, OSError."""
        places: list[Backend] = [self.local, *self._places]
        every = [rollback for place in places for rollback in place.rollbacks()]
        for place in places:
            place.copy_rollbacks(every)

    def source_of(self, entry: Entry) -> tuple[Backend, bool]:
        """Where what is not in a folder is copied from, and whether that may replace what has its name in the root: a
        damaged copy of it, and no other checkpoint."""
        here = next(
            (each for each in self.local.list(abandoned=True, step=entry.step) if each.path == entry.path), None
        )
        another = here is not None and (
            here.newer_format is not None or (here.manifest is not None and here.manifest.identity != entry.identity)
        )
        return self._elsewhere[entry.where], not another
