"""A root with tiers behind it: saves go to the root, and what is there to go on from is wherever it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptman.errors import CkptmanError, ConfigError, CorruptError, NotFoundError, RootError, plain, warn
from ckptman.policy.tiers import Tier
from ckptman.store.abandoned import read_abandoned
from ckptman.store.catalogue import Entry, commit_order, mark
from ckptman.store.copy import copy_objects
from ckptman.store.durable import DISK, Disk
from ckptman.store.objects import ObjectEntry, ObjectPlace
from ckptman.store.place import FolderPlace
from ckptman.store.tiers import absolute, check_tiers, entries_of, make_tiers, open_tier


class TieredPlace(FolderPlace):
    """The root of a run, with the folders that are its tiers behind it. Only the leader looks.

    Of several copies of a checkpoint the nearest is the last in a list: the root's, then those of the tiers in the
    order in which they were named. Raises: ConfigError where tiers cannot be those of the root.
    """

    def __init__(self, root: Path, tiers: Sequence[Tier], disk: Disk = DISK) -> None:
        super().__init__(root, disk)
        self.tiers = tuple(absolute(tier) for tier in tiers)
        check_tiers(self.root, self.tiers)
        places = [open_tier(tier, disk) for tier in self.tiers]
        self._folders = [place for place in places if isinstance(place, FolderPlace)]
        self._stores = [place for place in places if isinstance(place, ObjectPlace)]
        self._highest = 0

    def make(self) -> None:
        super().make()
        make_tiers(self.root, self.tiers, self._disk)

    def list(self, *, abandoned: bool = False) -> list[Entry]:
        """What is in the root and in the tiers. Those that a rollback of the root left behind are so everywhere.

        Raises: RootError where a tier cannot be looked at and the root has nothing: it may be all there is.
        """
        own = super().list(abandoned=True)
        left = {entry.identity: entry.abandoned for entry in own if entry.complete and entry.abandoned}
        left |= read_abandoned(self.root)
        found = list(own)
        for place in self._folders:
            try:
                there = [entry for entry in place.list(abandoned=True) if entry.complete]
            except CkptmanError as error:
                self._tolerate(place.root, error, bool(own))
                continue
            found = [*(mark(entry, left) for entry in there), *found]
        counting = [entry for entry in found if abandoned or not entry.abandoned]
        self._highest = max([self._highest, *(entry.sequence for entry in found)])
        return sorted(counting, key=commit_order)

    def last_sequence(self) -> int:
        return max(super().last_sequence(), self._highest)

    def fetch_newer(self, step: int | None = None) -> None:
        """Bring into the root what an object store has and nobody else: the newest, or that of a step. Leader only.

        Raises: RootError where a store cannot be looked at and there is nothing else.
        """
        for store in self._stores:
            here = [entry for entry in self.list(abandoned=step is not None) if entry.complete]
            try:
                there = [entry for entry in entries_of(store) if isinstance(entry, ObjectEntry)]
            except CkptmanError as error:
                self._tolerate(store.url, error, bool(here))
                continue
            self._highest = max([self._highest, *(each.require_manifest().sequence for each in there)])
            self._fetch(store, _missing(there, here, step, read_abandoned(self.root)))

    def _fetch(self, store: ObjectPlace, wanted: Sequence[ObjectEntry]) -> None:
        for entry in wanted:
            try:
                copy_objects(entry, store, FolderPlace(self.root, self._disk))
            except (CorruptError, NotFoundError) as error:
                warn(f"the checkpoint of step {entry.step} in {plain(store.url)} is passed over: {plain(error)}")
                continue
            return

    def _tolerate(self, where: object, error: CkptmanError, has_others: bool) -> None:
        if isinstance(error, ConfigError) or not has_others:
            raise error
        if not isinstance(error, RootError | NotFoundError):
            raise error
        warn(f"the tier {plain(where)} cannot be looked at, and what it has is not restored: {plain(error)}")


def place_of(root: Path, tiers: Sequence[Tier], disk: Disk) -> FolderPlace:
    """Where a run saves. Raises: ConfigError."""
    if isinstance(tiers, str | Tier) or not all(isinstance(tier, Tier) for tier in tiers):
        raise ConfigError(f"tiers: give a list of ckptman.Tier(...), not {tiers!r}")
    return TieredPlace(root, tiers, disk) if tiers else FolderPlace(root, disk)


def _missing(
    there: Sequence[ObjectEntry], here: Sequence[Entry], step: int | None, left: Mapping[str, str]
) -> list[ObjectEntry]:
    """What only the store has of what a restore would take, best first."""
    if step is not None:
        known = any(each.step == step for each in here)
        return [] if known else [each for each in reversed(there) if each.step == step]
    newest = max((entry.sequence for entry in here), default=0)
    return [
        each
        for each in reversed(there)
        if each.require_manifest().sequence > newest and each.require_manifest().identity not in left
    ]
