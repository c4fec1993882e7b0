"""A copy on its way into a folder: a draft that the next attempt finds again, claimed by one process at a time.

It is `NAME.tmp-copy-<tag of the original>`, beside what it becomes: the next copy of the same checkpoint finds there
what is whole already, and no other one does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ckptman.errors import BusyError, CkptmanError, RootError
from ckptman.storage.catalog.backends.copy_draft import BusyCopyingError, Incoming, NotReadBackError
from ckptman.storage.catalog.backends.copy_source import AGAIN, FolderReading, Reading, SourceInfo, refused
from ckptman.storage.catalog.backends.page_cache import drop_all
from ckptman.storage.catalog.liveness import Owner, is_this_process
from ckptman.storage.catalog.overwrite import may_be_replaced
from ckptman.storage.catalog.pins import PINNED
from ckptman.storage.catalog.reader_lease import lease
from ckptman.storage.catalog.rollback_records import copy_rollbacks, read_rollbacks
from ckptman.storage.catalog.verified import identify, note_verified, read_verified
from ckptman.storage.catalog.writer_lock import Claim, claim, owner_lives, read_owner
from ckptman.storage.format.manifest import missing_file, read_manifest
from ckptman.storage.format.paths import DOT, MANIFEST, new_nonce
from ckptman.storage.io.durable_files import DISK, holding
from ckptman.storage.io.failure_cause import FULL
from ckptman.storage.io.file_writer import FileWriter
from ckptman.storage.io.safe_open import read_regular
from ckptman.storage.io.threads import STRIDE_BYTES

if TYPE_CHECKING:
    from ckptman.storage.catalog.backends.local import LocalBackend

_ATTEMPTS = 3
_LITTLE_BYTES = 1024 * 1024
"""A draft with less than this in it is not worth keeping."""
_known_dead: set[str] = set()
"""Runs that were watched once and found to be gone: of another host that takes half a minute."""


class FolderDraft:
    """See `CopyDraft`."""

    in_place, is_remote = False, False

    def __init__(self, place: LocalBackend, facts: SourceInfo, nonce: str) -> None:
        self._place, self._facts, self._nonce = place, facts, nonce
        self._folder = place.root / f"{facts.name}.tmp-copy-{facts.tag}"
        self._final = place.root / facts.name
        self._claim: Claim | None = None
        self.where, self.draft = str(self._final), str(self._folder)

    def difference(self) -> str | None:
        final, manifest = self._final, self._facts.manifest
        if not os.path.lexists(final):
            return None
        if final.is_symlink() or not final.is_dir():
            return "is there, and is no folder"
        try:
            if read_manifest(final).to_json() != manifest.to_json():
                return "is there, and is another checkpoint"
            problem = missing_file(final, manifest)
        except (CkptmanError, FileNotFoundError) as error:
            return f"is there, and is no complete checkpoint ({error})"
        return f"is there, and is not complete: {problem}" if problem else ""

    def may_replace(self) -> bool:
        return may_be_replaced(self._final)

    def target_is_abandoned(self) -> bool:
        return self._place.is_abandoned(self._final)

    def is_verified(self) -> bool:
        noted = read_verified(self._final, self._facts.manifest)
        return noted is not None and noted.every_byte

    def note_verified_copy(self) -> None:
        self._note(self._final)

    def settle(self) -> Sequence[str]:
        # Who made it visible may have been killed before that was durable, and now the original may go.
        for folder in (self._final, self._place.root):
            DISK.sync_folder(folder)
        if (self._final / DOT).is_dir():  # a copy was killed when it had nothing left to do but this
            DISK.remove_tree(self._final / DOT)
        if self._facts.pinned is not None and not os.path.lexists(self._final / PINNED):
            DISK.replace_file(self._final / PINNED, self._facts.pinned)
        root = self._place.root
        known = {each.id for each in read_rollbacks(root).values()}
        later = [each for each in self._facts.rollbacks if each.id not in known]  # since it was copied
        if later and (owner := _live_run(root)) is not None:
            who = f"a run is at work (host {owner.host}, pid {owner.pid})"
            return [f"what was abandoned {later[-1]} still counts in {root}, where {who}: copy again once it has ended"]
        if later:
            copy_rollbacks(later, root)
        return []

    def _check_free(self) -> None:
        """What is copied into the root of a run that is alive would become its newest checkpoint behind its back."""
        if (owner := _live_run(self._place.root)) is not None:
            raise BusyError(str(self._place.root), owner.host, owner.pid, owner.job_id)

    @contextmanager
    def claimed(self, replace: bool) -> Iterator[None]:
        self._check_free()
        with _claimed(self._folder, self._place) as self._claim, holding(self._folder):
            yield

    def tidy(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        with os.scandir(self._folder) as items:
            for item in list(items):
                status = item.stat(follow_symlinks=False)
                # A file with another name elsewhere cannot be written to without changing that.
                is_file = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
                if is_file and self._facts.sizes.get(item.name) == status.st_size:
                    sizes[item.name] = status.st_size
                elif item.name != DOT:
                    DISK.remove_tree(Path(item.path))
        self._check_room()
        return sizes

    def _check_room(self) -> None:
        """A disk that would be full half way is left as it is, for whoever saves to it."""
        with os.scandir(self._folder) as items:
            taken = sum(item.stat(follow_symlinks=False).st_blocks * 512 for item in items)
        system = os.statvfs(self._folder)
        if self._facts.bytes - taken <= system.f_bavail * system.f_frsize:
            return
        if taken < _LITTLE_BYTES:
            self.abandon()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.draft)

    def put(self, file: Incoming, threads: int) -> None:
        path, size = self._folder / file.name, file.size_bytes
        why = "it is small" if size < STRIDE_BYTES else None
        flags = os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        with FileWriter(path, size, flags=flags, buffered_because=why) as writer:
            file.pass_to(writer, threads)

    def uncache(self, names: Iterable[str], *, final: bool, flush: bool) -> bool:
        folder = self._final if final else self._folder
        return drop_all(folder, {name: self._facts.sizes[name] for name in names}, flush=flush)

    def open(self, name: str, *, final: bool) -> Reading:
        folder = self._final if final else self._folder
        return FolderReading(folder / name, self._facts.sizes[name])

    def publish(self, replace: bool) -> str:
        assert self._claim is not None
        self._seal()
        # Asked again: all this may have taken hours.
        self._check_free()
        # Before it can be the newest there.
        copy_rollbacks(self._facts.rollbacks, self._place.root)
        # Who was stopped for long is taken for dead, and what it has sealed is opened again by who takes it over.
        with _telling_who_copies(self._place.root):
            self._claim.check()
        tag = f"copy-{new_nonce()}"
        final = self._place.publish(self._folder, self._facts.name, tag, replace=replace, nonce=self._nonce)
        DISK.remove_tree(final / DOT)
        return str(final)

    def abandon(self) -> None:
        self._place.abandon(self.draft)

    def _seal(self) -> None:
        """What is beside the files, the manifest, and the note of what was proved: the last things that are written."""
        written = {}
        if self._facts.pinned is not None:
            written[PINNED] = self._facts.pinned
        written[MANIFEST] = self._facts.data
        for name, data in written.items():
            DISK.write_file(self._folder / name, data)
        drop_all(self._folder, {name: len(data) for name, data in written.items()})
        for name, data in written.items():
            if read_regular(self._folder / name, len(data) + 1) != data:
                raise NotReadBackError(self._folder, (f"{name} has other bytes",))
        self._note(self._folder)
        DISK.sync_folder(self._folder)

    def _note(self, folder: Path) -> None:
        """Note that every byte was read back. What was proved of the original holds of the very same bytes."""
        proved = self._facts.proved
        with contextlib.suppress(PermissionError):
            note_verified(
                folder,
                identify(folder, self._facts.manifest),
                levels=("digests", *(proved.levels if proved else ())),
                world_sizes=proved.world_sizes if proved else (),
                meshes=proved.meshes if proved else (),
                plan_world_sizes=proved.plan_world_sizes if proved else (),
            )


@contextmanager
def receive_in_folder(place: LocalBackend, facts: SourceInfo) -> Iterator[FolderDraft]:
    """Hold the root for a copy. Raises: RootError, which says what is left there; SourceError."""
    try:
        place.make()
        names = [f"{facts.name}.tmp-copy-{facts.tag}", facts.name]
        held = holding(place.root, through_link=True)
        with held, lease(place.root, names, what="copy") as nonce:
            yield FolderDraft(place, facts, nonce)
    except CkptmanError:
        raise
    except OSError as error:
        if error.errno not in FULL:
            raise refused(RootError, error, place.root) from error
        raise RootError(
            error.errno,
            f"{place.root} has no room for {facts.name} ({error.strerror or error}; it needs {facts.bytes:,} "
            f"bytes{_free(place.root, error.errno)}): free some with ckptman prune, or raise the quota. Until then "
            f"{AGAIN} (ckptman prune --leftovers clears it)",
        ) from error


@contextmanager
def _claimed(draft: Path, place: LocalBackend) -> Iterator[Claim]:
    """The draft is ours alone: made if there is none. Raises: BusyError."""
    if draft.is_symlink():  # through it, what lies elsewhere would be tidied up
        DISK.remove_file(draft)
    for attempt in range(_ATTEMPTS):
        with contextlib.suppress(FileExistsError):
            place.begin(*draft.name.split(".tmp-", 1))
        try:
            with _telling_who_copies(place.root):
                held = claim(draft, "copy", os.environ.get("SLURM_JOB_ID"))
            break
        except RootError as error:
            # The draft was made visible, or cleared, this very moment?
            if draft.exists() or attempt == _ATTEMPTS - 1:
                raise error.__cause__ or error from None
    try:
        yield held
    finally:
        held.release()


@contextmanager
def _telling_who_copies(root: Path) -> Iterator[None]:
    try:
        yield
    except BusyError as error:
        raise BusyCopyingError(str(root), error.host, error.pid, error.job_id) from None


def _free(root: Path, code: int | None) -> str:
    """What is left there, in words: of a quota nobody knows."""
    if code != errno.ENOSPC or not root.is_dir():
        return ""
    system = os.statvfs(root)
    files = ", and no more files can be made" if system.f_files and not system.f_favail else ""
    return f", {system.f_bavail * system.f_frsize:,} bytes are free{files}"


def _live_run(root: Path) -> Owner | None:
    """The run that owns a root, unless it is this process, or gone."""
    owner = read_owner(root)
    if owner is None or is_this_process(owner) or owner.nonce in _known_dead:
        return None
    if owner_lives(root, owner):
        return owner
    _known_dead.add(owner.nonce)
    return None
