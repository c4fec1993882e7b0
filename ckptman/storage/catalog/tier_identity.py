"""Whose a tier is: the identity of a root, in the root itself and in each of its tiers.

`.ckptman/root.json` in a root holds a random id, made once by the first run there. `.ckptman/tier-of.json` in a tier
holds the id of the root whose copies it takes. Both are created exclusively: of two roots that want the same tier at
the same moment one gets it. An object store that knows no condition of a put gives it to the last one.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ckptman.errors import CkptmanError, ConfigError, CorruptError, plain
from ckptman.storage.catalog.backends.backend import Backend
from ckptman.storage.catalog.backends.local import LocalBackend, answers
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.format.manifest import FORMAT_VERSION, parse_versioned
from ckptman.storage.format.paths import DOT, ROOT_ID, TIER_OF, outcome_path, run_folder, tiers_path
from ckptman.storage.format.sealed_json import SealError, seal, unseal
from ckptman.storage.io.durable_files import DISK, holding, is_super_user, owner_of, stat_of

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
    found = _read(LocalBackend(root), ROOT_ID) or read_mark(LocalBackend(root))
    return found.id if found is not None else None


def make_identity(root: Path, run_id: str, id: str | None = None) -> str:
    """The id of a root, made now where it has none. `id`: to take over. Called by the leader, and by drains.

    Raises: as `read_identity`, OSError.
    """
    place = LocalBackend(root)
    if (found := _read(place, ROOT_ID)) is not None:
        return found.id
    # A tier in which a run is started stays what it is.
    mine = TierOwner(id=id or read_identity(root) or os.urandom(16).hex(), root=str(root.absolute()), run_id=run_id)
    DISK.make_folder_if_missing(run_folder(root))
    return mine.id if place.create_note(ROOT_ID, mine.to_json()) else make_identity(root, run_id, id)


def read_mark(place: Backend) -> TierOwner | None:
    """Whose tier a place is; None: nobody's. Raises: CorruptError, FormatVersionError, RootError."""
    return _read(place, TIER_OF)


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
    if (its := _read(place, ROOT_ID)) is not None:
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
        found = _read(LocalBackend(other), ROOT_ID) if answers(other) else None
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


def _read(place: Backend, name: str) -> TierOwner | None:
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
