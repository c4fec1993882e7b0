"""A place that holds checkpoints, and how a save becomes visible in it: the commit."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from ckptman.errors import CkptmanError, ConfigError, ExistsError, NotFoundError, RootError, warn
from ckptman.policies.retention_rules import Record, RetentionPolicy
from ckptman.storage.catalog.catalog import Catalog, Entry, Until
from ckptman.storage.catalog.overwrite import may_be_replaced, strangers_in
from ckptman.storage.catalog.pins import read_pin
from ckptman.storage.catalog.reader_lease import lease, look, reading
from ckptman.storage.catalog.rollback_records import Rollback, copy_rollbacks, read_abandoned, read_rollbacks
from ckptman.storage.format.manifest import Manifest, read_manifest
from ckptman.storage.format.paths import DOT, MANIFEST, run_folder
from ckptman.storage.io.durable_files import DISK, check_held
from ckptman.storage.io.safe_open import read_regular

if TYPE_CHECKING:
    from ckptman.storage.catalog.backends.copy_draft import CopyDraft
    from ckptman.storage.catalog.backends.copy_source import CopySource, SourceInfo

ANSWER_SECONDS = 60.0
"""How long a folder may take to say whether it is there."""
_SILENT_SECONDS = 600.0
_END_SECONDS = 1.0
_ASK = ("test", "-e")
_silent: dict[str, float] = {}
"""Folders that did not answer, and when that was: for a while they are not asked again, or each look would wait."""
_MOST_NOTE_BYTES = 64 * 1024


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
        ended = select.poll()  # not wait(), which looks again and again
        ended.register(child.stdout, select.POLLIN)
        if ended.poll(1000 * ANSWER_SECONDS):  # its output ends when it does
            child.wait()
            return True
    _silent[str(folder)] = time.monotonic()
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_END_SECONDS)
    return False


def check_expanded(path: Path) -> None:
    """Refuse a `~` or `$NAME` that no shell expanded: a folder of that name invites `rm -r ~`. And bytes that are no
    UTF-8, which have no place in a manifest. Raises: ConfigError."""
    if not os.fsencode(path).isascii() and str(path).encode(errors="replace").decode() != str(path):
        raise ConfigError(f"the path {str(path)!r} is not valid UTF-8: name another one, or rename its folders")
    if not re.search(r"[~$]", str(path)) or os.path.lexists(path):
        return
    given = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path  # made absolute meanwhile
    part = next((each for each in given.parts if re.search(r"\$(\w|\{)", each)), None)
    function = "expandvars"
    if given.parts[0].startswith("~"):
        part, function = given.parts[0], "expanduser"
    if part is not None:
        raise ConfigError(
            f"{given} would be a folder named {part}: write the path out, or give it to os.path.{function} first"
        )


class LocalBackend:
    """Checkpoints in a folder of a local or parallel file system."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.where = str(self.root)
        self.catalogue = Catalog(self.root, remember=True)
        """What is there. It remembers what it has read, for who holds this place and saves to it."""

    def make(self, *, is_there: bool = False) -> None:
        """Create the root if it is missing. `is_there`: the run created it before, so it is only checked.

        Raises: RootError (a file is in the way, or it is not ours to write), ConfigError (a `~` not expanded).
        """
        check_expanded(self.root)
        what = "made"
        try:
            if not is_there:
                DISK.make_folders(self.root)
            what = "flushed"
            # Who made it may have been killed before its name was durable: then all that is in it would go with it.
            with contextlib.suppress(PermissionError):  # where not even its names may be read, nobody could do it
                DISK.sync_folder(self.root.parent)
        except OSError as error:
            raise RootError(
                error.errno or errno.EIO,
                f"the checkpoint root {self.root} cannot be {what} ({error.strerror}): check the mount, or name "
                f"another root",
            ) from error
        if not os.path.lexists(self.root):
            raise RootError(errno.ENOENT, f"{self.root} is gone: see whether it is still mounted, or who removed it")
        if not self.root.is_dir():
            raise RootError(
                errno.ENOTDIR, f"the checkpoint root {self.root} is a file, not a folder: name another root"
            )

    def begin(self, name: str, tag: str) -> str:
        """Make the folder of a save, which nobody sees yet. `tag`: tells it from every other. Raises: OSError."""
        draft = self.root / f"{name}.tmp-{tag}"
        try:
            DISK.make_folder(draft)
        except FileExistsError:
            raise
        except OSError:  # a server may have made it all the same
            with contextlib.suppress(OSError):
                DISK.remove_empty_folder(draft)
            raise
        return str(draft)

    def commit(self, draft: str, manifest: Manifest) -> Entry:
        """Make a draft whose files are all durable the checkpoint of its name: all of it at once, durably.

        Raises: ExistsError (what has the name is no checkpoint), OSError.
        """
        source = Path(draft)
        name, _, tag = source.name.rpartition(".tmp-")
        DISK.write_file(source / MANIFEST, manifest.to_json())
        DISK.sync_folder(source)
        return Entry(manifest.step, self.publish(source, name, tag), manifest)

    def publish(self, source: Path, name: str, tag: str, *, replace: bool = True, nonce: str = "") -> Path:
        """Give a folder under this root, in which all is durable, its final name. `tag`: never used before.

        What has that name goes, unless a rollback left it behind: that takes another name. Called by the leader of a
        save, and by a copy. `nonce`: of the caller's own lease, which keeps nothing from going.
        Raises: ExistsError where something else has the name: without `replace`, or a folder that is no checkpoint;
        OSError.
        """
        final = self.root / name
        aside, stays = None, False
        if os.path.lexists(final):
            stays = self.is_abandoned(final)
            if not stays and not replace:
                raise _taken(final)
            if not stays and final.is_dir() and not final.is_symlink() and not may_be_replaced(final):
                raise ExistsError(f"{final} is no checkpoint, and is not replaced by one: move it away")
            aside = self.root / f"{name}.{'abandoned' if stays else 'old'}-{tag}"
        check_held(source)
        try:
            if aside is not None:
                # An earlier save of this step stands aside under a name that still counts until the new one is there.
                DISK.rename(final, aside)
            DISK.rename(source, final)
        except BaseException as error:  # Ctrl-C too
            # A folder with something in it is never replaced by a rename: somebody made it this very moment.
            is_taken = isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST)
            if aside is None and is_taken and not replace:
                raise _taken(final) from error
            if aside is not None:
                # Where it cannot go back it still counts. What failed first is what has to be told.
                with contextlib.suppress(OSError):
                    DISK.rename(aside, final)
            raise
        finally:
            self.catalogue.forget(name)
        DISK.sync_folder(self.root)
        if aside is not None and not stays:
            self._discard(aside, name, tag, nonce)
        return final

    def abandon(self, draft: str) -> None:
        """Remove a draft. Never raises: what cannot be removed is a leftover."""
        try:
            DISK.remove_tree(Path(draft))
        except OSError as error:
            _warn_of_left(draft, error)

    def list(self, *, abandoned: bool = False, step: int | None = None, until: Until | None = None) -> list[Entry]:
        return self.catalogue.scan(abandoned=abandoned, step=step, until=until)

    def last_sequence(self) -> int:
        """Return the highest commit sequence that is known, which the next commit has to exceed; 0 where none is."""
        return self.catalogue.last_sequence()

    def open(self, entry: Entry) -> CopySource:
        from ckptman.storage.catalog.backends.copy_source import FolderSource  # numpy, which a prune can do without

        return FolderSource(entry.path, entry.require_manifest())

    def reading(self, entry: Entry, what: str) -> AbstractContextManager[None]:
        return reading(entry.path, what=what)

    def receive(self, facts: SourceInfo) -> AbstractContextManager[CopyDraft]:
        from ckptman.storage.catalog.backends.local_draft import receive_in_folder

        return receive_in_folder(self, facts)

    def read_note(self, name: str) -> bytes | None:
        path = run_folder(self.root) / name
        if path.parent.is_symlink():  # what lies elsewhere is none of this root's
            return None
        try:
            return read_regular(
                path, _MOST_NOTE_BYTES, remedy="remove it, and the next start of the run writes it anew"
            )
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise RootError(
                error.errno or 0, f"{path} cannot be read ({error.strerror}): check its permissions and the mount"
            ) from error

    def create_note(self, name: str, data: bytes) -> bool:
        folder = run_folder(self.root)
        try:
            DISK.create_whole_file(folder / name, data)
        except FileExistsError:
            return False
        DISK.sync_folder(folder)
        return True

    def write_note(self, name: str, data: bytes) -> None:
        DISK.replace_file(run_folder(self.root) / name, data)

    def rollbacks(self) -> Sequence[Rollback]:
        return list(read_rollbacks(self.root).values())

    def copy_rollbacks(self, rollbacks: Sequence[Rollback]) -> None:
        copy_rollbacks(rollbacks, self.root)

    def make_tier(self) -> None:
        self._check_answers()
        if not self.root.parent.is_dir():
            raise RootError(
                errno.ENOENT,
                f"the tier {self.root} cannot be made, because there is no folder {self.root.parent}: is it mounted? "
                f"If so, make that folder by hand",
            )
        self.make()
        DISK.make_folder_if_missing(run_folder(self.root))

    def check_there(self) -> None:
        self._check_answers()
        # A copy would be made below where the mount was.
        if not os.path.lexists(run_folder(self.root)):
            raise NotFoundError(
                f"{self.root} is not there, or is not the tier that was made there (it has no {DOT}): check the mount"
            )

    def settle(self) -> None:
        DISK.sync_folder(self.root)

    def prune(self, policy: RetentionPolicy | None, is_meant: Callable[[Sequence[Record]], bool]) -> None:
        from ckptman.storage.catalog.prune import execute, plan_prune  # they carry out what they plan with this class

        with lease(self.root, [], what="prune") as nonce:
            found = plan_prune(self.root, policy)
            if is_meant([each.record for each in found.verdicts]):
                execute(self.root, found, tag=nonce or f"drain{os.urandom(4).hex()}")

    def remove(self, path: Path, name: str, tag: str) -> None:
        """Rename what lies under this root to a trash name of `name`, then remove it. Gone already: no error."""
        if (trash := self.hide(path, name, tag)) is not None:
            DISK.remove_tree(trash)

    def hide(self, path: Path, name: str, tag: str) -> Path | None:
        """Rename what lies under this root to a trash name of `name`, which nobody sees. None: it is gone already."""
        trash = self.root / f"{name}.trash-{tag}"
        try:
            DISK.rename(path, trash)
        except FileNotFoundError:
            return None
        # Durable before a byte goes: a power cut must not bring back the name without its files.
        DISK.sync_folder(self.root)
        return trash

    def put_back(self, trash: Path, path: Path) -> bool:
        """Take a `hide` back, as long as nothing else has the name. False where that cannot be."""
        if os.path.lexists(path):
            return False
        try:
            DISK.rename(trash, path)
        except OSError:
            return False
        DISK.sync_folder(self.root)
        return True

    def _check_answers(self) -> None:
        if not answers(self.root):
            raise RootError(
                errno.ETIMEDOUT, f"{self.root} does not answer within {ANSWER_SECONDS:g} s: check the mount"
            )

    def is_abandoned(self, final: Path) -> bool:
        """Whether a rollback of this root left behind what lies there. Raises: as `read_abandoned`."""
        left = read_abandoned(self.root)
        try:
            return bool(left) and read_manifest(final).identity in left
        except (CkptmanError, OSError):  # no whole checkpoint
            return False

    def _discard(self, aside: Path, name: str, tag: str, nonce: str) -> None:
        # Pinned, it stays under its other name: whoever wanted it kept did not mean what is saved there now.
        if read_pin(aside) is not None:
            return
        # Read by somebody, it stays until that ends; then it is a leftover.
        with contextlib.suppress(CkptmanError):
            if look(self.root, wait=False, but=nonce).holder(name):
                return
        # The new checkpoint is committed: trouble with the old one must not fail the save.
        try:
            if strangers_in(aside):  # somebody put it there, and prunes tell of it
                return
            self.remove(aside, name, tag)
        except OSError as error:
            _warn_of_left(aside, error)


def _warn_of_left(path: object, error: OSError) -> None:
    # A warning that is an error must not keep the leader from the other ranks, nor fail a save that is committed.
    with contextlib.suppress(Warning):
        warn(f"{path} could not be removed ({error}); ckptman prune will")


def _taken(final: Path) -> ExistsError:
    return ExistsError(
        f"{final} came to be there meanwhile, and is another checkpoint: copy to another root, or say --overwrite to "
        f"replace it"
    )
