"""The tiers of a run: the file in the root that says which there are, and what is in each of them.

`.ckptman/tiers.json` is written by the run when it starts, so that a drain in another job, and every prune, go by it.
`.ckptman/drained.json` is written by drains: what each tier held when it was looked at last. A run that is at work goes
by that, because a tier that hangs must not hold it up.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ckptman.errors import CkptmanError, ConfigError, CorruptError, NotFoundError, RootError, plain
from ckptman.policies.retention_rules import Record
from ckptman.policies.serialization import from_data, to_data
from ckptman.policies.tiers import Tier, due
from ckptman.storage.catalog.backends.backend import Backend, find_url, open_backend
from ckptman.storage.catalog.backends.local import answers, check_expanded
from ckptman.storage.catalog.catalog import Entry, mark
from ckptman.storage.catalog.rollback_records import Rollback, abandoned_by
from ckptman.storage.catalog.tier_identity import check_tier, make_identity, mark_tier
from ckptman.storage.catalog.writer_lock import root_error
from ckptman.storage.format.manifest import FORMAT_VERSION, parse_versioned
from ckptman.storage.format.paths import drained_path, run_folder, tiers_path
from ckptman.storage.format.sealed_json import SealError, seal, unseal
from ckptman.storage.io.durable_files import DISK
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
