"""The tiers of a run: the file in the root that says which there are, and what is in each of them.

`.ckptman/tiers.json` is written by the run when it starts, so that a drain in another job, and every prune, go by it.
`.ckptman/drained.json` is written by drains: what each tier held when it was looked at last. A run that is at work goes
by that, because a tier that hangs must not hold it up.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import select
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ckptman.catalog.backends.local import LocalBackend, check_expanded
from ckptman.catalog.backends.object_store import ObjectBackend, ObjectEntry, find_url
from ckptman.catalog.catalog import Catalog, Entry
from ckptman.catalog.pins import PINNED
from ckptman.catalog.rollback_records import Rollback, abandoned_by, hand_on, read_rollbacks
from ckptman.catalog.tier_identity import check_tier, make_identity, mark_tier
from ckptman.errors import CkptmanError, ConfigError, CorruptError, NotFoundError, RootError, plain
from ckptman.format.manifest import FORMAT_VERSION, parse_versioned
from ckptman.format.paths import DOT, drained_path, run_folder, tiers_path
from ckptman.format.sealed_json import SealError, seal, unseal
from ckptman.io.filesystem import DISK, Disk
from ckptman.io.safe_open import read_regular
from ckptman.policies.rules import Record
from ckptman.policies.serialization import from_data, to_data
from ckptman.policies.tiers import Tier, due

_MOST_BYTES = 64 * 1024 * 1024
ANSWER_SECONDS = 60.0
"""How long a folder may take to say whether it is there."""
_SILENT_SECONDS = 600.0
_END_SECONDS = 1.0
_ASK = ("test", "-e")
_silent: dict[str, float] = {}
"""Folders that did not answer, and when that was: for a while they are not asked again, or each look would wait."""


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
class Holding:
    """What a tier holds, and the rollbacks that are written down there. `trouble`: why nobody can say; "": all is
    well. `entries` and `records` go together. `taken`: the steps whose name something has that may be replaced.
    """

    tier: Tier
    entries: tuple[Entry | ObjectEntry, ...] = ()
    records: tuple[Record, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()
    trouble: str = ""
    taken: frozenset[int] = frozenset()


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
        disk.replace_file(path, seal(_Stored(tiers=stored).model_dump_json(indent=1).encode()))


def make_tiers(root: Path, tiers: Sequence[Tier], disk: Disk = DISK) -> None:
    """Make the folders of new tiers. Raises: RootError."""
    before = {str(tier) for tier in _known(root)}
    for tier in tiers:
        place = open_tier(tier, disk)
        # One that was made before, and is gone, may be a mount that is away: it is not made anew below where it was.
        if isinstance(place, ObjectBackend) or str(tier) in before:
            continue
        if not answers(place.root):
            raise _silence(place.root)
        if not place.root.parent.is_dir():
            raise RootError(
                errno.ENOENT,
                f"the tier {tier} cannot be made, because there is no folder {place.root.parent}: is it mounted? If "
                f"so, make that folder by hand",
            )
        place.make()
        disk.make_folders(run_folder(place.root))


def claim_tiers(
    root: Path,
    tiers: Sequence[Tier],
    run_id: str,
    run_ids: Collection[str] = (),
    disk: Disk = DISK,
) -> None:
    """Give a root an identity where it has none, and mark its tiers with it. Called by the leader when a run starts.

    A root that has lost everything takes over the identity that its tiers have. What cannot be looked at, or written
    to, is marked by a drain.

    Raises: ConfigError (a tier is of another root), CorruptError, FormatVersionError, RootError (it cannot be written).
    """
    found: list[tuple[LocalBackend | ObjectBackend, str | None]] = []
    for tier in tiers:
        with contextlib.suppress(NotFoundError, RootError):
            place = open_tier(tier, disk)
            found.append((place, look_whose(root, place, run_ids)))
    try:
        make_identity(root, run_id, next((id for _, id in found if id is not None), None), disk)
    except OSError as error:
        if isinstance(error, CkptmanError):
            raise
        raise RootError(
            error.errno or errno.EIO,
            f"the checkpoint root {root} cannot be written ({error.strerror}): check permissions, quota and the mount",
        ) from error
    for place, _ in found:
        with contextlib.suppress(OSError):
            look_whose(root, place, run_ids)  # of two tiers that were allowed, one may be of another root
            mark_tier(root, place, run_id, renew=True, disk=disk)


def look_whose(root: Path, place: LocalBackend | ObjectBackend, run_ids: Collection[str] = ()) -> str | None:
    """The identity that a tier is marked with, as long as a root may use it; None: it is not marked.

    Raises: ConfigError (it may not), and as `entries_of`.
    """
    if isinstance(place, LocalBackend):
        if not answers(place.root):
            raise _silence(place.root)
        check_there(place)
    mark = check_tier(root, place, lambda: entries_of(place), run_ids=run_ids, answers=answers)
    return mark.id if mark is not None else None


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


def open_tier(tier: Tier, disk: Disk = DISK) -> LocalBackend | ObjectBackend:
    """Where a tier is. Raises: ConfigError (what reads that kind of object store is not installed)."""
    url = find_url(str(tier))
    return ObjectBackend(url) if url is not None else LocalBackend(str(tier), disk)


def answers(folder: Path) -> bool:
    """Whether a folder can be asked for, be it there or not. A mount that hangs must not hold up who can do without.

    Asked by a process of its own: who waits for such a mount cannot always be killed.
    """
    if time.monotonic() - _silent.get(str(folder), -math.inf) < _SILENT_SECONDS:
        return False
    quiet, pipe = subprocess.DEVNULL, subprocess.PIPE
    try:
        child = subprocess.Popen([*_ASK, str(folder)], stdin=quiet, stdout=pipe, stderr=quiet)
    except OSError:  # there is nobody to send
        return True
    assert child.stdout is not None
    with child.stdout:
        ended = select.poll()
        ended.register(child.stdout, select.POLLIN)
        if ended.poll(1000 * ANSWER_SECONDS):  # its output ends when it does
            child.wait()
            return True
    _silent[str(folder)] = time.monotonic()
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_END_SECONDS)
    return False


def entries_of(place: LocalBackend | ObjectBackend) -> list[Entry | ObjectEntry]:
    """All that has a checkpoint's name in a tier, oldest commit first. Raises: CkptmanError: it cannot be looked at."""
    if isinstance(place, LocalBackend):
        if not answers(place.root):
            raise _silence(place.root)
        check_there(place)
        return list(Catalog(place.root).scan(abandoned=True))
    try:
        return list(place.look(abandoned=True))
    except NotFoundError:  # nothing below a prefix: it is made by what is put there
        return []


def check_there(place: LocalBackend | ObjectBackend) -> None:
    """Raises: NotFoundError where a mount is away, and a copy would be made below where it was."""
    if isinstance(place, LocalBackend) and not os.path.lexists(run_folder(place.root)):
        raise NotFoundError(
            f"{place.root} is not there, or is not the tier that was made there (it has no {DOT}): check the mount"
        )


def rollbacks_of(place: LocalBackend | ObjectBackend) -> list[Rollback]:
    """The rollbacks that are written down in a tier. Raises: CkptmanError."""
    if isinstance(place, LocalBackend):
        return list(read_rollbacks(place.root).values())
    return place.rollbacks()


def hand_on_to(place: LocalBackend | ObjectBackend, rollbacks: Sequence[Rollback], known: Sequence[Rollback]) -> None:
    """Write down in a tier those rollbacks that are not among its `known` ones. Raises: CkptmanError, OSError."""
    new = [each for each in rollbacks if each.id not in {other.id for other in known}]
    if isinstance(place, LocalBackend):
        hand_on(new, place.root)
        return
    for each in new:
        place.write(f"{DOT}/rollback-{each.id}.json", each.to_json())


def holding_of(root: Path, tier: Tier, left: Mapping[str, str] | None = None) -> Holding:
    """What a tier of a root holds, as retention rules see it. `left`: what was abandoned elsewhere. Never raises for
    trouble, such as that it is a tier of another root."""
    try:
        place = open_tier(tier)
        look_whose(root, place)
        found = entries_of(place)
        entries = [entry for entry in found if entry.complete]
        if entries and isinstance(place, LocalBackend):
            # Who made one visible may have been killed before that was flushed, and what is there may go elsewhere.
            DISK.sync_folder(place.root)
        rollbacks = rollbacks_of(place)
    except (CkptmanError, OSError) as error:
        return Holding(tier, trouble=trouble_of(error))
    left = {**(left or {}), **abandoned_by(rollbacks)}
    records = [record_of(entry, left) for entry in entries]
    taken = frozenset(entry.step for entry in found if _may_go(entry))
    return Holding(tier, tuple(entries), tuple(records), tuple(rollbacks), taken=taken)


def trouble_of(error: Exception) -> str:
    """What is wrong with a tier, in words."""
    return getattr(error, "strerror", None) or str(error)


def _may_go(entry: Entry | ObjectEntry) -> bool:
    """Whether what counts for nothing in a tier may be replaced by what has its name: it is or was a checkpoint."""
    if entry.newer_format is not None:
        return False
    if isinstance(entry, Entry):  # by a crash or a person; what is pinned stays under another name
        return True
    # Objects without a manifest may be of anybody.
    return bool(entry.data) and not (entry.complete and PINNED in entry.sizes)


def record_of(entry: Entry | ObjectEntry, left: Mapping[str, str]) -> Record:
    """The facts that rules look at. `left`: the identities of what was abandoned."""
    manifest = entry.require_manifest()
    why = left.get(manifest.identity, "") if left else ""
    if isinstance(entry, Entry):
        record = entry.record()
        return replace(record, abandoned=f"abandoned {why}") if why else record
    return Record(
        entry.step,
        manifest.sequence,
        manifest.time_seconds,
        manifest.total_bytes,
        manifest.metrics,
        verified=True,  # no copy is there that was not read back
        pinned="pinned when it was copied" if PINNED in entry.sizes else "",
        abandoned=f"abandoned {why}" if why else "",
    )


def awaited(root: Path, records: Sequence[Record], now_seconds: float, *, look: bool = True) -> dict[int, str]:
    """What of a root has to go to a tier before it may be deleted: the place of each in `records`, with the reason.

    `look`: at the tiers themselves; otherwise what the last drain has seen there counts. Where a tier cannot be looked
    at, that is all it may take. Called by prunes. Raises: as `read_tiers`.
    """
    tiers = read_tiers(root)
    told = read_drained(root) if tiers and not look else {}
    found: dict[int, str] = {}
    for tier in tiers:
        holding = holding_of(root, tier) if look else Holding(tier, records=tuple(told.get(str(tier), ())))
        away = f", which cannot be looked at ({holding.trouble})" if holding.trouble else ""
        for place in due(records, holding.records, tier, now_seconds):
            found.setdefault(place, plain(f"has still to be copied to {tier}{away}"))
    return found


def write_drained(root: Path, held: Mapping[str, Sequence[Record]], disk: Disk = DISK) -> None:
    """Note what the tiers hold. Called by drains. Raises: OSError."""
    stored = {tier: [_as_data(record) for record in records] for tier, records in held.items()}
    disk.make_folders(run_folder(root))
    # By Python's JSON: a metric may be NaN.
    disk.replace_file(drained_path(root), seal(json.dumps(_Drained(held=stored).model_dump()).encode()))


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


def _as_data(record: Record) -> dict[str, Any]:
    return {**vars(record), "metrics": dict(record.metrics)}


def _silence(folder: Path) -> RootError:
    return RootError(errno.ETIMEDOUT, f"{folder} does not answer within {ANSWER_SECONDS:g} s: check the mount")


def _known(root: Path) -> tuple[Tier, ...]:
    try:
        return read_tiers(root)
    except CorruptError:
        return ()


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
