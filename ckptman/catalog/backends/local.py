"""A place that holds checkpoints, and how a save becomes visible in it: the commit."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import BinaryIO, Protocol

from ckptman.catalog.catalog import Catalog, Entry, Memory
from ckptman.catalog.pins import read_pin
from ckptman.catalog.reader_lease import look
from ckptman.catalog.replaceable import may_be_replaced
from ckptman.catalog.rollback_records import read_abandoned
from ckptman.errors import CkptmanError, ConfigError, ExistsError, RootError, warn
from ckptman.format.manifest import Manifest, read_manifest
from ckptman.format.paths import MANIFEST, step_folder
from ckptman.io.filesystem import DISK, Disk, check_held
from ckptman.io.safe_open import open_regular


class Backend(Protocol):
    """Somewhere checkpoints live. No wider than a save, a restore and a prune need.

    The file system is the first; object stores and the memory of other nodes can follow, so nothing above asks for
    more than this. Only the leader of a run calls `begin`, `commit`, `abandon` and `delete`; every rank may `open`.
    """

    def begin(self, name: str, tag: str) -> str:
        """Make room for a save that nobody sees yet, and say where the ranks write it. `tag`: never used before."""

    def commit(self, draft: str, manifest: Manifest) -> Entry:
        """Make a draft whose files are all durable the checkpoint of its name: all of it at once, durably."""

    def abandon(self, draft: str) -> None:
        """Give up a draft. Never raises: what cannot be removed is a leftover."""

    def list(self, *, abandoned: bool = False) -> list[Entry]:
        """All entries, oldest commit first; also those that a rollback left behind, where they are asked for."""

    def last_sequence(self) -> int:
        """The highest commit sequence that is known: the next commit has to be after it. 0 where there is none."""

    def open(self, entry: Entry, name: str) -> BinaryIO:
        """Read one file of an entry."""

    def delete(self, entry: Entry, tag: str) -> None:
        """Make an entry invisible at once, then remove it."""


def check_expanded(path: Path) -> None:
    """Refuse a `~` that no shell expanded: a folder of that name invites `rm -r ~`. Raises: ConfigError."""
    if not any(part.startswith("~") for part in path.parts) or os.path.lexists(path):
        return
    given = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path  # made absolute meanwhile
    if given.parts[0].startswith("~"):
        raise ConfigError(
            f"{given} would be a folder named {given.parts[0]} in this one: write the path out, or give it to "
            f"os.path.expanduser first"
        )


class LocalBackend:
    """Checkpoints in a folder of a local or parallel file system."""

    def __init__(self, root: str | os.PathLike[str], disk: Disk = DISK) -> None:
        self.root = Path(root)
        self._disk = disk
        self.catalogue = Catalog(self.root, Memory())
        """What is there. It remembers what it has read, for who holds this place and saves to it."""

    def make(self) -> None:
        """Make the root where it is missing.

        Raises: RootError (a file is in the way, or it is not ours to write), ConfigError (a `~` not expanded).
        """
        check_expanded(self.root)
        what = "made"
        try:
            self._disk.make_folders(self.root)
            what = "flushed"
            # Who made it may have been killed before its name was durable: then all that is in it would go with it.
            with contextlib.suppress(PermissionError):  # where not even its names may be read, nobody could do it
                self._disk.sync_folder(self.root.parent)
        except OSError as error:
            raise RootError(
                error.errno or errno.EIO,
                f"the checkpoint root {self.root} cannot be {what} ({error.strerror}): check the mount, or name "
                f"another root",
            ) from error
        if not self.root.is_dir():
            raise RootError(
                errno.ENOTDIR, f"the checkpoint root {self.root} is a file, not a folder: name another root"
            )

    def begin(self, name: str, tag: str) -> str:
        draft = self.root / f"{name}.tmp-{tag}"
        try:
            self._disk.make_folder(draft)
        except FileExistsError:
            raise
        except OSError:  # a server may have made it all the same
            with contextlib.suppress(OSError):
                self._disk.remove_empty_folder(draft)
            raise
        return str(draft)

    def commit(self, draft: str, manifest: Manifest) -> Entry:
        source = Path(draft)
        name, _, tag = source.name.rpartition(".tmp-")
        self._disk.write_file(source / MANIFEST, manifest.to_json())
        self._disk.sync_folder(source)
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
                self._disk.rename(final, aside)
            self._disk.rename(source, final)
        except BaseException as error:  # Ctrl-C too
            # A folder with something in it is never replaced by a rename: somebody made it this very moment.
            is_taken = isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST)
            if aside is None and is_taken and not replace:
                raise _taken(final) from error
            if aside is not None:
                # Where it cannot go back it still counts. What failed first is what has to be told.
                with contextlib.suppress(OSError):
                    self._disk.rename(aside, final)
            raise
        finally:
            self.catalogue.forget(name)
        self._disk.sync_folder(self.root)
        if aside is not None and not stays:
            self._discard(aside, name, tag, nonce)
        return final

    def abandon(self, draft: str) -> None:
        try:
            self._disk.remove_tree(Path(draft))
        except OSError as error:
            _warn_of_left(draft, error)

    def list(self, *, abandoned: bool = False) -> list[Entry]:
        return self.catalogue.scan(abandoned=abandoned)

    def last_sequence(self) -> int:
        return self.catalogue.last_sequence()

    def open(self, entry: Entry, name: str) -> BinaryIO:
        return open(open_regular(entry.path / name), "rb")

    def delete(self, entry: Entry, tag: str) -> None:
        self.remove(entry.path, step_folder(entry.step), tag)

    def remove(self, path: Path, name: str, tag: str) -> None:
        """Rename what lies under this root to a trash name of `name`, then remove it. Gone already: no error."""
        trash = self.hide(path, name, tag)
        if trash is not None:
            self._disk.remove_tree(trash)

    def hide(self, path: Path, name: str, tag: str) -> Path | None:
        """Rename what lies under this root to a trash name of `name`, which nobody sees. None: it is gone already."""
        trash = self.root / f"{name}.trash-{tag}"
        try:
            self._disk.rename(path, trash)
        except FileNotFoundError:
            return None
        # Durable before a byte goes: a power cut must not bring back the name without its files.
        self._disk.sync_folder(self.root)
        return trash

    def put_back(self, trash: Path, path: Path) -> bool:
        """Take a `hide` back, as long as nothing else has the name. False where that cannot be."""
        if os.path.lexists(path):
            return False
        try:
            self._disk.rename(trash, path)
        except OSError:
            return False
        self._disk.sync_folder(self.root)
        return True

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


FolderPlace = LocalBackend
"""Its name of before."""
