"""A copy on its way into a folder: a draft that the next attempt finds again, claimed by one process at a time.

It is `NAME.tmp-copy-<tag of the original>`, beside what it becomes, so a copy that was interrupted anywhere is taken up
where it was, and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ckptman.errors import BusyError, CkptmanError, RootError
from ckptman.storage.catalog.backends.drafts import BusyCopyingError, NotReadBackError, Writing
from ckptman.storage.catalog.backends.page_cache import drop_all
from ckptman.storage.catalog.backends.source import AGAIN, Done, Finish, SourceInfo, refused
from ckptman.storage.catalog.liveness import Owner, is_this_process, process_lives
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
from ckptman.storage.io.file_scan import Scanned, Stamp, scan, stamp_of
from ckptman.storage.io.file_writer import FileWriter
from ckptman.storage.io.safe_open import read_regular
from ckptman.storage.io.threads import ALIGN_BYTES, stride_of

if TYPE_CHECKING:
    from ckptman.storage.catalog.backends.local import LocalBackend

_ATTEMPTS = 3
_LITTLE_BYTES = 1024 * 1024
"""A draft with less than this in it is not worth keeping."""
# With a letter: what people add, such as `.old-copy-20261122`, is none of ours.
_LEFT = re.compile(
    r"(?P<name>.+)\.(?P<kind>tmp|old|trash)-copy-(?=[0-9]*[a-f])([0-9a-f]{8}|[0-9a-f]{16})", re.ASCII | re.DOTALL
)
_known_dead: set[str] = set()
"""Runs that were watched once and found to be gone: of another host that takes half a minute."""


class FolderDraft:
    """See `CopyDraft`."""

    in_place, in_order, writers = False, False, 0

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
        if manifest is None:
            with os.scandir(final) as items:
                sizes = {item.name: item.stat(follow_symlinks=False).st_size for item in items if item.name != DOT}
            return "" if sizes == self._facts.sizes else "is there, with other files"
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
        manifest = self._facts.manifest
        noted = read_verified(self._final, manifest) if manifest is not None else None
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
        self._clear_others()
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
            self._clear_others()  # to make room
            yield

    def tidy(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        with os.scandir(self._folder) as items:
            for item in list(items):
                status = item.stat(follow_symlinks=False)
                # A file with another name elsewhere cannot be written to without changing that.
                if item.name in self._facts.sizes and stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                    sizes[item.name] = min(status.st_size, self._facts.sizes[item.name])
                elif item.is_dir(follow_symlinks=False):
                    if item.name != DOT:
                        DISK.remove_tree(Path(item.path))
                else:
                    DISK.remove_file(Path(item.path))
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

    def piece_bytes(self) -> int:
        return stride_of(self._facts.block_bytes)

    def writer(self, name: str, size: int) -> Writing:
        is_large = self.piece_bytes() % ALIGN_BYTES == 0 and size >= ALIGN_BYTES
        return _FolderWriting(self._folder / name, size, is_large)

    def put_in_order(self, name: str, pieces: Callable[[], Iterator[memoryview]]) -> None:
        raise NotImplementedError  # see `in_order`

    def scan(
        self, sizes: Mapping[str, int], *, final: bool, finish: Finish, threads: int | None, done: Done
    ) -> Sequence[str]:
        folder, stamps = self._final if final else self._folder, dict[str, Stamp | None]()

        def end(found: Scanned) -> None:
            stamps[found.name] = found.stamp
            finish(found)

        def changed(name: str) -> bool:
            try:
                return stamps[name] not in (None, stamp_of(os.lstat(folder / name)))
            except OSError:
                return stamps[name] is not None

        in_order = sorted(sizes.items(), key=lambda each: -each[1])  # small ones fill the gaps at the end
        scan(folder, in_order, self._facts.block_bytes, finish=end, threads=threads, done=done)
        return [f"{name} was written to or removed while it was verified" for name in filter(changed, stamps)]

    def uncache(self, *, final: bool) -> bool:
        # Who brought what is there already may not have flushed it.
        return drop_all(self._final if final else self._folder, self._facts.sizes, flush=final)

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
        self._clear_others()
        return str(final)

    def abandon(self) -> None:
        self._place.abandon(self.draft)

    def _clear_others(self) -> None:
        """Of a checkpoint of others what other copies left is cleared; of ours prunes know the names."""
        if self._facts.manifest is not None:
            return
        for other in self._place.root.iterdir():
            found = _LEFT.fullmatch(other.name)
            if other == self._folder or found is None or found["name"] != self._facts.name:
                continue
            with contextlib.suppress(OSError, CkptmanError):  # what cannot be removed fails no copy
                if found["kind"] == "tmp":  # what the same folder held before it was saved over
                    owner = read_owner(other)
                    if owner is None or process_lives(owner) is False:
                        with _claimed(other, self._place):
                            DISK.remove_tree(other)
                elif os.path.lexists(self._final):  # what was replaced by that
                    DISK.remove_tree(other)

    def _seal(self) -> None:
        """What is beside the files, the manifest, and the note of what was proved: the last things that are written."""
        written = {}
        if self._facts.pinned is not None:
            written[PINNED] = self._facts.pinned
        if self._facts.manifest is not None:
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
        if self._facts.manifest is None:
            return
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


class _FolderWriting:
    def __init__(self, path: Path, size: int, is_large: bool) -> None:
        self._size, self._is_large, self.buffered_because = size, is_large, ""
        self._writer = FileWriter(
            path,
            size,
            flags=os.O_NOFOLLOW | os.O_NONBLOCK,
            buffered_because=None if is_large else "it is not in whole pages",
        )

    def write(self, data: memoryview, offset: int, scratch: memoryview) -> None:
        size = len(data)
        if self._writer.is_direct and size % ALIGN_BYTES:  # the end of the file: cut off again when it is whole
            padded = scratch[: size + -size % ALIGN_BYTES]
            padded[size:] = bytes(len(padded) - size)
            data = padded
        self._writer.write(data, offset)

    def finish(self) -> None:
        self._writer.flush(self._size)
        self.buffered_because = (self._is_large and self._writer.buffered_because) or ""
        # What lies in the page cache would be compared with itself.
        with contextlib.suppress(OSError, AttributeError):
            os.posix_fadvise(self._writer.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._writer.close()


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
            f"{AGAIN} ({'ckptman prune --leftovers clears it' if facts.manifest else 'or remove it by hand'})",
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
