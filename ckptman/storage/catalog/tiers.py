"""The tiers of a run: the file in the root that says which there are, and what is in each of them.

`.ckptman/tiers.json` is written by the run when it starts, so that a drain in another job, and every prune, go by it.
`.ckptman/drained.json` is written by drains: what each tier held when it was looked at last. A run that is at work goes
by that, because a tier that hangs must not hold it up.

`.ckptman/root.json` in a root holds a random id, made once by the first run there. `.ckptman/tier-of.json` in a tier
holds the id of the root whose copies it takes. Both are created exclusively: of two roots that want the same tier at
the same moment one gets it. An object store that knows no condition of a put gives it to the last one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ckptman.errors import CkptmanError, ConfigError, CorruptError, NotFoundError, RootError, plain
from ckptman.policies.retention_rules import Record
from ckptman.policies.stored_retention import from_data, to_data
from ckptman.policies.tiers import Tier, due
from ckptman.storage.catalog.backends.backend import Backend, find_url, open_backend
from ckptman.storage.catalog.backends.local import LocalBackend, answers, check_expanded
from ckptman.storage.catalog.catalog import Catalog, Entry, mark
from ckptman.storage.catalog.rollback_records import Rollback, abandoned_by
from ckptman.storage.catalog.writer_lock import root_error
from ckptman.storage.format.manifest import FORMAT_VERSION, parse_versioned
from ckptman.storage.format.paths import DOT, ROOT_ID, TIER_OF, drained_path, outcome_path, run_folder, tiers_path
from ckptman.storage.format.sealed_json import SealError, seal, unseal
from ckptman.storage.io.durable_files import DISK, holding, is_super_user, owner_of, stat_of
from ckptman.storage.io.safe_open import read_regular

_MOST_BYTES = 64 * 1024 * 1024


class _StoredTier(BaseModel):
    model_config = ConfigDict(extra="forbid", defer_build=True)
    path: str
    every: int
    retention: dict[str, Any]
    bytes_per_second: float | None


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", defer_build=True)
    format_version: int = FORMAT_VERSION
    tiers: list[_StoredTier]


class _Drained(BaseModel):
    model_config = ConfigDict(extra="forbid", defer_build=True)
    format_version: int = FORMAT_VERSION
    held: dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class TierContents:
    """What a tier holds, and the rollbacks that are written down there. `trouble`: why nobody can say; "": all is
    well. `entries` and `records` go together. `taken`: the steps whose name something has that may be replaced.
    """

    tier: Tier
    entries: tuple[Entry, ...] = ()
    records: tuple[Record, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()
    trouble: str = ""
    taken: frozenset[int] = frozenset()


def write_tiers(root: Path, tiers: Sequence[Tier]) -> None:
    """Store the tiers of a run, and make those that are new folders. Called by the leader when a run starts.

    Raises: ConfigError (a tier is the root or lies in it, two are one, or a rule cannot be stored), RootError (a new
    one cannot be made), OSError.
    """
    tiers = [absolute(tier) for tier in tiers]
    check_tiers(root, tiers)
    make_tiers(root, tiers)
    path = tiers_path(root)
    if tiers or path.exists():
        stored = [
            _StoredTier(
                path=str(tier),
                every=tier.every,
                retention=to_data(tier.retention),
                bytes_per_second=tier.bytes_per_second,
            )
            for tier in tiers
        ]
        DISK.make_folder_if_missing(run_folder(root))
        DISK.replace_file(path, seal(_Stored(tiers=stored).model_dump_json(indent=1).encode()))


def make_tiers(root: Path, tiers: Sequence[Tier]) -> None:
    """Make the folders of new tiers. Raises: RootError."""
    try:
        before = {str(tier) for tier in read_tiers(root)}
    except CorruptError:
        before = set()
    for tier in tiers:
        # One that was made before, and is gone, may be a mount that is away: it is not made anew below where it was.
        if str(tier) not in before:
            open_tier(tier).make_tier()


def claim_tiers(
    root: Path,
    tiers: Sequence[Tier],
    run_id: str,
    run_ids: Collection[str] = (),
) -> None:
    """Give a root an identity where it has none, and mark its tiers with it. Called by the leader when a run starts.

    A root that has lost everything takes over the identity that its tiers have. What cannot be looked at, or written
    to, is marked by a drain.

    Raises: ConfigError (a tier is of another root), CorruptError, FormatVersionError, RootError (it cannot be written).
    """
    found: list[tuple[Backend, str | None]] = []
    for tier in tiers:
        with contextlib.suppress(NotFoundError, RootError):
            place = open_tier(tier)
            found.append((place, check_tier(root, place, run_ids)))
    try:
        make_identity(root, run_id, next((id for _, id in found if id is not None), None))
    except OSError as error:
        if isinstance(error, CkptmanError):
            raise
        raise root_error(root, "written", error) from error
    for place, _ in found:
        with contextlib.suppress(OSError):
            check_tier(root, place, run_ids)  # of two tiers that were allowed, one may be of another root
            mark_tier(root, place, run_id, renew=True)


def read_tiers(root: Path) -> tuple[Tier, ...]:
    """The tiers of a root; none where no run stored any. Raises: CorruptError, FormatVersionError, RootError."""
    path = tiers_path(root)
    data = _read(path)
    if data is None:
        return ()
    try:
        stored = _Stored.model_validate(parse_versioned(path, unseal(path, data)))
        for each in stored.tiers:
            find_url(each.path)  # no address with a secret in it, which would be shown
        return tuple(
            Tier(each.path, each.every, from_data(each.retention), each.bytes_per_second) for each in stored.tiers
        )
    except (ValidationError, ConfigError, SealError) as error:
        raise CorruptError(
            f"{path} is not what ckptman writes there ({plain(error)}), so nobody can tell what has still to be "
            f"copied: start the run again, which writes it anew, or remove it"
        ) from None


def check_tiers(root: Path, tiers: Sequence[Tier]) -> None:
    """Raises: ConfigError where tiers cannot be those of a root."""
    places = [Path(os.path.realpath(root))]
    for tier in tiers:
        from_data(to_data(tier.retention))  # a rule of the user's own cannot be stored
        if find_url(str(tier)) is not None:
            continue
        where = Path(os.path.realpath(str(tier)) if answers(Path(str(tier))) else str(absolute(tier)))
        if any(where == each or where in each.parents or each in where.parents for each in places):
            raise ConfigError(f"{tier} cannot be a tier of {root}: it is the root or another tier, in it, or around it")
        places.append(where)
    addresses = [str(tier).rstrip("/") for tier in tiers]
    twice = next((each for each in addresses if addresses.count(each) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice} is named as a tier twice: combine what it keeps with |")


def absolute(tier: Tier) -> Tier:
    """The same tier for a process that works in another folder. Raises: ConfigError (a `~` not expanded)."""
    if find_url(str(tier)):
        return tier
    check_expanded(Path(str(tier)))
    return replace(tier, path=Path(str(tier)).absolute())


def open_tier(tier: Tier) -> Backend:
    """Where a tier is. Raises: ConfigError (what reads that kind of object store is not installed)."""
    return open_backend(str(tier))


def contents_of_tier(root: Path, tier: Tier, left: Mapping[str, str] | None = None) -> TierContents:
    """What a tier of a root holds, as retention rules see it. `left`: what was abandoned elsewhere. Never raises for
    trouble, such as that it is a tier of another root."""
    try:
        place = open_tier(tier)
        check_tier(root, place)
        found = place.list(abandoned=True)
        entries = [entry for entry in found if entry.complete]
        if entries:  # what is there may go elsewhere now
            place.settle()
        rollbacks = place.rollbacks()
    except (CkptmanError, OSError) as error:
        return TierContents(tier, trouble=trouble_of(error))
    left = {**(left or {}), **abandoned_by(rollbacks)}
    records = [mark(entry, left).record() for entry in entries]
    taken = frozenset(entry.step for entry in found if entry.may_go)
    return TierContents(tier, tuple(entries), tuple(records), tuple(rollbacks), taken=taken)


def trouble_of(error: Exception) -> str:
    """What is wrong with a tier, in words."""
    return getattr(error, "strerror", None) or str(error)


def steps_awaiting_drain(
    root: Path, records: Sequence[Record], now_seconds: float, *, look: bool = True
) -> dict[int, str]:
    """What of a root has to go to a tier before it may be deleted: the place of each in `records`, with the reason.

    `look`: at the tiers themselves; otherwise what the last drain has seen there counts. Where a tier cannot be looked
    at, that is all it may take. Called by prunes. Raises: as `read_tiers`.
    """
    tiers = read_tiers(root)
    told = read_drained(root) if tiers and not look else {}
    found: dict[int, str] = {}
    for tier in tiers:
        holding = contents_of_tier(root, tier) if look else TierContents(tier, records=tuple(told.get(str(tier), ())))
        away = f", which cannot be looked at ({holding.trouble})" if holding.trouble else ""
        for place in due(records, holding.records, tier, now_seconds):
            found.setdefault(place, plain(f"has still to be copied to {tier}{away}"))
    return found


def write_drained(root: Path, held: Mapping[str, Sequence[Record]]) -> None:
    """Note what the tiers hold. Called by drains. Raises: OSError."""
    stored = {
        tier: [{**vars(record), "metrics": dict(record.metrics)} for record in records]
        for tier, records in held.items()
    }
    DISK.make_folder_if_missing(run_folder(root))
    # By Python's JSON: a metric may be NaN.
    DISK.replace_file(drained_path(root), seal(json.dumps(_Drained(held=stored).model_dump()).encode()))


def read_drained(root: Path) -> dict[str, list[Record]]:
    """What the tiers held when a drain looked last; nothing where that cannot be told."""
    try:
        data = _read(drained_path(root))
        if data is None:
            return {}
        held = _Drained.model_validate(parse_versioned(drained_path(root), unseal(drained_path(root), data))).held
        return {tier: [Record(**each) for each in records] for tier, records in held.items()}
    except (CkptmanError, ValidationError, TypeError):
        return {}


def _read(path: Path) -> bytes | None:
    if path.parent.is_symlink():
        why = "is a link, and what lies elsewhere is none of this root's, so nobody can tell which tiers it has"
        raise RootError(errno.ELOOP, f"{path.parent} {why}: remove it, or put the folder there")
    try:
        return read_regular(path, _MOST_BYTES, remedy="remove it: the next start of the run writes it anew")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RootError(
            error.errno or errno.EIO, f"{path} cannot be read ({error.strerror}): check its permissions and the mount"
        ) from error


_MOST_TEXT = 8192
_OUTCOME = outcome_path(Path()).name


class TierOwner(BaseModel):
    """A root: its `id`, and, to tell people which it is, its absolute path and its run id when this was written."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)
    format_version: int = FORMAT_VERSION
    id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    root: Annotated[str, Field(max_length=_MOST_TEXT)] = ""
    run_id: Annotated[str, Field(max_length=_MOST_TEXT)] = ""

    def to_json(self) -> bytes:
        """The bytes of its file."""
        return seal(self.model_dump_json(indent=1).encode())


def read_identity(root: Path) -> str | None:
    """The id of a root; of a tier that nobody has run in, the id of its root. None: it has none yet.

    Raises: CorruptError, FormatVersionError, RootError.
    """
    found = _read_mark(LocalBackend(root), ROOT_ID) or read_mark(LocalBackend(root))
    return found.id if found is not None else None


def make_identity(root: Path, run_id: str, id: str | None = None) -> str:
    """The id of a root, made now where it has none. `id`: to take over. Called by the leader, and by drains.

    Raises: as `read_identity`, OSError.
    """
    place = LocalBackend(root)
    if (found := _read_mark(place, ROOT_ID)) is not None:
        return found.id
    # A tier in which a run is started stays what it is.
    mine = TierOwner(id=id or read_identity(root) or os.urandom(16).hex(), root=str(root.absolute()), run_id=run_id)
    DISK.make_folder_if_missing(run_folder(root))
    return mine.id if place.create_note(ROOT_ID, mine.to_json()) else make_identity(root, run_id, id)


def read_mark(place: Backend) -> TierOwner | None:
    """Whose tier a place is; None: nobody's. Raises: CorruptError, FormatVersionError, RootError."""
    return _read_mark(place, TIER_OF)


def _refuse_other_owner(root: Path, place: Backend) -> None:
    """Refuse, for the super-user, who may do anything to anybody, a tier of another owner than that of its root, or a
    root whose files are not its owner's: whoever wrote them could have a third person's checkpoints deleted.

    Raises: ConfigError.
    """
    if not is_super_user():
        return
    owner = stat_of(root).st_uid
    said_by = {uid for path in (tiers_path(root), run_folder(root) / ROOT_ID) if (uid := owner_of(path)) is not None}
    # He himself, where he has run it, as in a container.
    if len(said_by) > 1 or not said_by <= {owner, 0}:
        raise ConfigError(
            f"{tiers_path(root)} and {ROOT_ID} beside it do not both belong to the owner of {root}, so root does not "
            f"trust them: chown them to that owner, or do this as that user"
        )
    if (folder := folder_of(place)) is not None and stat_of(folder).st_uid not in {owner, *(said_by or {0})}:
        raise ConfigError(
            f"the tier {folder} and the root {root} belong to different users, so root copies and deletes nothing "
            f"there: chown both to one user, or do this as the user of the root"
        )


def folder_of(place: Backend) -> Path | None:
    """The folder that a place is, if it is one, and is there."""
    folder = getattr(place, "root", None)
    return folder if isinstance(folder, Path) and folder.exists() else None


@contextmanager
def keeping(place: Backend) -> Iterator[None]:
    """While this lasts, what is done in a place is done in the one that was looked at. Raises: OSError."""
    folder = folder_of(place)
    with holding(folder, through_link=True) if folder is not None else nullcontext():
        yield


def check_tier(root: Path, place: Backend, run_ids: Collection[str] = ()) -> str | None:
    """Refuse a place that is the tier of another root, or a root itself. The identity that it is marked with, if any.

    A root without an id, lost or of an earlier version, may use a tier that was marked by a root at the same path, or
    by a run of the same id (`run_ids`, and those of what the root holds) whose root is gone. In a tier without a mark
    all checkpoints have to be of such a run.

    Raises: ConfigError (a root may not use it), CkptmanError (it cannot be looked at).
    """
    place.check_there()
    _refuse_other_owner(root, place)
    if (its := _read_mark(place, ROOT_ID)) is not None:
        raise ConfigError(
            f"the tier {place.where} is the root of a run itself ({_run(its.run_id)}), and not filled from {root}: "
            f"name another folder. Where no run is to go on there, remove {_file(place, ROOT_ID)}"
        )
    mark, mine = read_mark(place), read_identity(root)
    if mark is not None:
        twin = _is_elsewhere(root, mark)
        if mine is None:
            may = not twin and (_same_path(root, mark.root) or mark.run_id in _known(root, run_ids))
        else:
            may = mark.id == mine
        if not may:
            _refuse(place, root, mark)
        if twin:
            raise ConfigError(
                f"{root} and {plain(mark.root)} have the same {DOT}/{ROOT_ID}, so one of them is a copy of the other: "
                f"remove it in the copy, and give that tiers of its own"
            )
    else:
        # What a run writes in its root, and nobody writes in a tier. A journal is begun by a rollback, too.
        if place.read_note(_OUTCOME) is not None:
            trace = _file(place, _OUTCOME)
            raise ConfigError(
                f"the tier {place.where} has no mark of a tier, and a run has been started in it ({trace}): name "
                f"another folder for copies of {root}. Where no run is to go on there, remove {trace}"
            )
        entries = place.list(abandoned=True)
        manifests = [each.manifest for each in entries if each.complete and each.manifest is not None]
        known = _known(root, run_ids) if manifests else set()
        if (other := next((each for each in manifests if each.run_id not in known), None)) is not None:
            how = f"start it with run_id={other.run_id!r}" if other.run_id else f"ckptman copy the newest to {root}"
            raise ConfigError(
                f"the tier {place.where} has no mark of a root, and holds checkpoints of another run "
                f"({_run(other.run_id)}): give this run a tier of its own. Where it is to go on from them, {how}"
            )
    return mark.id if mark is not None else None


def mark_tier(root: Path, place: Backend, run_id: str, *, renew: bool) -> None:
    """Mark a place that was checked as a tier of a root, which has an id. `renew`: where the root is by now.

    Raises: as `check_tier`, OSError.
    """
    mine = read_identity(root)
    assert mine is not None
    mark = TierOwner(id=mine, root=str(root.absolute()), run_id=run_id)
    found = read_mark(place)
    if found is None:
        place.create_note(TIER_OF, mark.to_json())
        found = read_mark(place)  # of two at once one has won
    if found is None or found.id != mine:
        _refuse(place, root, found or mark)
    if renew and found != mark:
        place.write_note(TIER_OF, mark.to_json())


def _known(root: Path, run_ids: Collection[str]) -> set[str]:
    entries = Catalog(root).look(abandoned=True)
    return {*run_ids, *(each.manifest.run_id for each in entries if each.manifest is not None)}


def _refuse(place: Backend, root: Path, mark: TierOwner) -> NoReturn:
    raise ConfigError(
        f"the tier {place.where} is of another root, {plain(mark.root) or 'which is not named'} "
        f"({_run(mark.run_id)}), and not of {root}: give each run a tier of its own. Where this run is to go on from "
        f"it, remove {_file(place, TIER_OF)} and start the run with run_id={mark.run_id!r}"
    )


def _is_elsewhere(root: Path, mark: TierOwner) -> bool:
    """Whether the root that a mark is of is still there, and another folder than this one."""
    if not mark.root or _same_path(root, mark.root):
        return False
    other = Path(mark.root)
    try:
        found = _read_mark(LocalBackend(other), ROOT_ID) if answers(other) else None
        return found is not None and found.id == mark.id and not other.samefile(root)
    except (CkptmanError, OSError):  # it cannot be looked at from here
        return False


def _same_path(root: Path, other: str) -> bool:
    # By its text first: what the other one was may be on a mount that is away.
    return bool(other) and (str(root.absolute()) == other or os.path.realpath(root) == other)


def _file(place: Backend, name: str) -> str:
    return f"{place.where}/{DOT}/{name}"


def _run(run_id: str) -> str:
    return f"run {plain(run_id)}" if run_id else "no run id"


def _read_mark(place: Backend, name: str) -> TierOwner | None:
    data, path = place.read_note(name), _file(place, name)
    if data is None:
        return None
    try:
        return TierOwner.model_validate(parse_versioned(path, unseal(path, data)))
    except (ValidationError, SealError, CorruptError):
        raise CorruptError(
            f"{path} is not what ckptman wrote there, so nobody can tell whose copies belong there: remove it, and the "
            f"next start of the run writes it anew"
        ) from None
