"""The tiers of a run: what is in each of them, and the file in the root that says which there are.

`.ckptman/tiers.json` is written by the run when it starts, so that a drain in another job, and every prune, go by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ckptman.errors import ConfigError, CorruptError, NotFoundError, RootError, plain
from ckptman.policy.rules import Record
from ckptman.policy.stored import from_data, to_data
from ckptman.policy.tiers import Tier, due
from ckptman.store.catalogue import Catalogue, Entry
from ckptman.store.durable import DISK, Disk
from ckptman.store.manifest import FORMAT_VERSION, parse_versioned
from ckptman.store.names import run_folder, tiers_path
from ckptman.store.objects import ObjectEntry, ObjectPlace, find_url
from ckptman.store.place import FolderPlace
from ckptman.store.regular import read_regular

_MOST_BYTES = 1024 * 1024


class _StoredTier(BaseModel):
    model_config = ConfigDict(extra="forbid")
    path: str
    every: int
    retention: dict[str, Any]
    bytes_per_second: float | None


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid")
    format_version: int = FORMAT_VERSION
    tiers: list[_StoredTier]


@dataclass(frozen=True)
class Holding:
    """What a tier holds. `trouble`: why nobody can say; "" where it could be looked at."""

    tier: Tier
    records: tuple[Record, ...] = ()
    trouble: str = ""


def write_tiers(root: Path, tiers: Sequence[Tier], disk: Disk = DISK) -> None:
    """Store the tiers of a run, and make those that are new folders. Called by the leader when a run starts.

    Raises: ConfigError (a tier is the root or lies in it, two are one, or a rule cannot be stored), RootError (a new
    one cannot be made), OSError.
    """
    tiers = [absolute(tier) for tier in tiers]
    check_tiers(root, tiers)
    make_tiers(root, tiers, disk)
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
        disk.make_folders(run_folder(root))
        disk.replace_file(path, _Stored(tiers=stored).model_dump_json(indent=1).encode() + b"\n")


def make_tiers(root: Path, tiers: Sequence[Tier], disk: Disk = DISK) -> None:
    """Make the folders of new tiers. Raises: RootError."""
    before = {str(tier) for tier in _known(root)}
    for tier in tiers:
        place = open_tier(tier, disk)
        # One that was made before, and is gone, may be a mount that is away: it is not made anew below where it was.
        if isinstance(place, FolderPlace) and str(tier) not in before:
            place.make()


def read_tiers(root: Path) -> tuple[Tier, ...]:
    """The tiers of a root; none where no run stored any. Raises: CorruptError, FormatVersionError, RootError."""
    path = tiers_path(root)
    try:
        data = read_regular(path, _MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise RootError(
            error.errno or 0, f"{path} cannot be read ({error.strerror}): check its permissions and the mount"
        ) from error
    try:
        stored = _Stored.model_validate(parse_versioned(path, data))
        return tuple(
            Tier(each.path, each.every, from_data(each.retention), each.bytes_per_second) for each in stored.tiers
        )
    except (ValidationError, ConfigError) as error:
        raise CorruptError(
            f"{path} is not what ckptman writes there ({plain(error)}), so nobody can tell what has still to be "
            f"copied: start the run again, which writes it anew, or remove it"
        ) from None


def check_tiers(root: Path, tiers: Sequence[Tier]) -> None:
    """Raises: ConfigError where tiers cannot be those of a root."""
    places = [root.absolute()]
    for tier in tiers:
        from_data(to_data(tier.retention))  # a rule of the user's own cannot be stored
        where = Path(str(tier)).absolute()
        if find_url(str(tier)) is None and any(
            where == each or where in each.parents or each in where.parents for each in places
        ):
            raise ConfigError(f"{tier} cannot be a tier of {root}: it is the root or another tier, in it, or around it")
        places.append(where)
    addresses = [str(tier).rstrip("/") for tier in tiers]
    twice = next((each for each in addresses if addresses.count(each) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice} is named as a tier twice: combine what it keeps with |")


def absolute(tier: Tier) -> Tier:
    """The same tier for a process that works in another folder."""
    return tier if find_url(str(tier)) else replace(tier, path=Path(tier.path).absolute())


def open_tier(tier: Tier, disk: Disk = DISK) -> FolderPlace | ObjectPlace:
    """Where a tier is. Raises: ConfigError (what reads that kind of object store is not installed)."""
    url = find_url(str(tier))
    return ObjectPlace(url) if url is not None else FolderPlace(str(tier), disk)


def entries_of(place: FolderPlace | ObjectPlace) -> list[Entry | ObjectEntry]:
    """The complete checkpoints of a tier, oldest commit first. Raises: CkptmanError: it cannot be looked at."""
    if isinstance(place, FolderPlace):
        return [entry for entry in Catalogue(place.root).scan(abandoned=True) if entry.complete]
    try:
        return [entry for entry in place.look() if entry.complete]
    except NotFoundError:  # nothing below a prefix: it is made by what is put there
        return []


def holding_of(tier: Tier) -> Holding:
    """What a tier holds, as retention rules see it. Never raises for trouble with the tier."""
    try:
        return Holding(tier, tuple(record_of(entry) for entry in entries_of(open_tier(tier))))
    except (OSError, ConfigError, CorruptError) as error:
        return Holding(tier, trouble=getattr(error, "strerror", None) or str(error))


def record_of(entry: Entry | ObjectEntry) -> Record:
    """The facts that rules look at."""
    if isinstance(entry, Entry):
        return entry.record()
    manifest = entry.require_manifest()
    return Record(
        entry.step, manifest.sequence, manifest.time_seconds, manifest.total_bytes, manifest.metrics, verified=True
    )


def awaited(root: Path, records: Sequence[Record], now_seconds: float) -> dict[int, str]:
    """What of a root has to go to a tier before it may be deleted: the sequence of each, with the reason.

    Where a tier cannot be looked at, that is all it may take. Called by prunes. Raises: as `read_tiers`.
    """
    found: dict[int, str] = {}
    for tier in read_tiers(root):
        holding = holding_of(tier)
        away = f", which cannot be looked at ({holding.trouble})" if holding.trouble else ""
        for sequence in due(records, holding.records, tier, now_seconds):
            found.setdefault(sequence, plain(f"has still to be copied to {tier}{away}"))
    return found


def _known(root: Path) -> tuple[Tier, ...]:
    try:
        return read_tiers(root)
    except CorruptError:
        return ()
