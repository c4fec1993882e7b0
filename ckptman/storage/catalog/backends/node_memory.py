"""What one node holds of a run's checkpoints in memory: folders of ordinary checkpoints, each with some of its files.

    /dev/shm/ckptman-1000/4f1c...-nid001234/   one run on one node; nobody but its owner may enter
        owner.json                             whose it is
        alive                                  locked by every rank of the run, as long as it lives
        slots/                                 what ranks stage in, and what peers send; checkpoints are links to it
        step-0000000120/                       of its data files those of this node and of its peers; all others

Such a folder is a checkpoint as soon as it has its manifest, which ranks write when they have heard that every part is
on as many nodes as it should be. What lies beside the manifest's names is checked by size when it is offered, and block
by block when it is read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ckptman.errors import CkptmanError, ConfigError, CorruptError, plain
from ckptman.storage.format.manifest import FORMAT_VERSION, Manifest, parse_manifest, parse_versioned
from ckptman.storage.format.paths import MANIFEST, parse_data, parse_step, step_folder, user_folder
from ckptman.storage.format.sealed_json import SealError, seal, unseal
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.safe_open import read_regular

SLOTS = "slots"
TORCHRUN_ENV = "TORCHELASTIC_RUN_ID"
_OWNER, _ALIVE = "owner.json", "alive"
_MOST_OWNER_BYTES = 64 * 1024
_MOST_MANIFEST_BYTES = 64 * 1024 * 1024
_MODE = 0o700
_NAME = re.compile(r"[0-9a-f]{32}-.+", re.ASCII | re.DOTALL)


class Owner(BaseModel):
    """Whose a folder is. `pid`, `started`: of a torchrun that has started the ranks, and may start them anew; 0: there
    is none."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)
    format_version: int = FORMAT_VERSION
    root_id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    root: Annotated[str, Field(max_length=8192)]
    node: Annotated[str, Field(max_length=512)]
    run_id: Annotated[str, Field(max_length=8192)] = ""
    job_id: str | None = None
    pid: int = 0
    started: float = 0.0

    @classmethod
    def of_this_process(cls, root_id: str, root: Path, node: str, run_id: str, job_id: str | None) -> Owner:
        """Return the owner that a rank of a run writes down."""
        whose = cls(root_id=root_id, root=str(root.absolute()), node=node, run_id=run_id, job_id=job_id)
        if TORCHRUN_ENV not in os.environ:
            return whose
        import psutil

        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(os.getppid())
            return whose.model_copy(update={"pid": parent.pid, "started": parent.create_time()})
        return whose

    @property
    def is_supervised(self) -> bool:
        """Whether a torchrun is still there that may start the ranks anew."""
        import psutil

        with contextlib.suppress(psutil.Error):
            return self.pid > 1 and abs(psutil.Process(self.pid).create_time() - self.started) < 1.0
        return False


@dataclass(frozen=True)
class Part:
    """What a node has of one checkpoint: its manifest, None where only others may have it, and files with their
    sizes. `damage`: why a manifest that is there cannot be read."""

    step: int
    manifest: Manifest | None
    sizes: Mapping[str, int]
    damage: str = ""

    @property
    def order(self) -> tuple[int, int]:
        """Attempt and step: the newest is the highest, on disk and in memory. (0, step) where there is no manifest."""
        return (self.manifest.attempt if self.manifest is not None else 0), self.step

    @property
    def data_files(self) -> tuple[int, int | None]:
        """How many of the ranks' data files are here, and of how many; None: only others may know."""
        files = {name: record.bytes for name, record in self.manifest.files.items()} if self.manifest else self.sizes
        names = [name for name in files if parse_data(name) is not None]
        here = sum(self.sizes.get(name) == files[name] for name in names)
        return here, len(names) if self.manifest else None


@dataclass(frozen=True)
class InMemory:
    """A checkpoint in memory. `holders`: of each of its files the nodes that have it."""

    manifest: Manifest
    data: bytes
    holders: Mapping[str, tuple[str, ...]]

    @property
    def order(self) -> tuple[int, int]:
        """Attempt and step: the newest is the highest, on disk and in memory."""
        return self.manifest.attempt, self.manifest.step

    @property
    def missing(self) -> list[str]:
        """Files that no node has."""
        return [name for name in self.manifest.files if not self.holders.get(name)]


def found_in(parts: Mapping[str, Sequence[Part]]) -> list[InMemory]:
    """Return the checkpoints that nodes have between them, newest first, complete or not. `parts`: of each node."""
    # Nodes often share one object, and an identity is a digest of all of it.
    distinct = {id(part.manifest): part.manifest for each in parts.values() for part in each if part.manifest}
    identities = {key: manifest.identity for key, manifest in distinct.items()}
    found = []
    for identity, manifest in {identities[key]: manifest for key, manifest in distinct.items()}.items():
        holders: dict[str, tuple[str, ...]] = {}
        # Of a node that was killed before it had the manifest, the files count all the same, last: each block of them
        # is checked when it is read.
        held = [(node, part) for node, each in parts.items() for part in each if part.step == manifest.step]
        for node, part in sorted(held, key=lambda each: each[1].manifest is None):
            if part.manifest is not None and identities[id(part.manifest)] != identity:
                continue
            for name, record in manifest.files.items():
                if part.sizes.get(name) == record.bytes and (part.manifest is not None or name not in holders):
                    holders[name] = (*holders.get(name, ()), node)
        found.append(InMemory(manifest, manifest.to_json(), holders))
    return sorted(found, key=lambda each: each.order, reverse=True)


class NodeMemory:
    """The folder of one run in the memory of this node.

    Args:
        base: a folder in memory that all users of the node have, such as /dev/shm.
        root_id: identity of the run's root.
        node: name of this node: nodes that share a disk keep apart.
    """

    def __init__(self, base: Path, root_id: str, node: str) -> None:
        self.base, self.root_id, self.node = base, root_id, node
        self.folder = user_folder(base) / f"{root_id}-{node.replace('/', '_')}"
        self.slots = self.folder / SLOTS
        self._alive: int | None = None

    @classmethod
    def at(cls, folder: Path) -> NodeMemory:
        """Return what lies in a folder that `found_on` gave."""
        root_id, _, node = folder.name.partition("-")
        return cls(folder.parent.parent, root_id, node)

    def open(self, owner: Owner) -> None:
        """Make the folder where it is missing, and hold it as long as this process lives.

        Raises: ConfigError: it cannot be used, and why.
        """
        check_base(self.base)
        try:
            for folder in (self.folder.parent, self.folder, self.slots):
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(_MODE)
                    DISK.sync_folder(folder.parent)
                check_private(folder)
            DISK.replace_file(self.folder / _OWNER, seal(owner.model_dump_json(indent=1).encode()))
            self._alive = os.open(self.folder / _ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._alive, fcntl.LOCK_SH)
            _held.add(self._alive)
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be made ({error.strerror or error})") from error

    def close(self) -> None:
        """Let go of the folder, which stays as it is."""
        fd, self._alive = self._alive, None
        if fd is not None and fd in _held:
            _held.discard(fd)
            os.close(fd)

    def owner(self) -> Owner:
        """Return whose it is. Raises: CorruptError, OSError."""
        path = self.folder / _OWNER
        try:
            return Owner.model_validate(parse_versioned(path, unseal(path, read_regular(path, _MOST_OWNER_BYTES))))
        except (ValidationError, SealError) as error:
            raise CorruptError(f"{path} is not what ckptman writes there ({plain(error)})") from None

    def is_there(self) -> bool:
        """Return whether a run has, or has left, something here. Raises: ConfigError where others may have made it."""
        try:
            for folder in (self.folder.parent, self.folder):
                check_private(folder)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _unusable(self.folder, error) from error
        return True

    def is_alive(self) -> bool:
        """Return whether a rank of the run lives on this node. Raises: OSError."""
        try:
            fd = os.open(self.folder / _ALIVE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def path_of(self, step: int) -> Path:
        """Return the folder of a step."""
        return self.path_of_name(step_folder(step))

    def path_of_name(self, name: str) -> Path:
        """Return the same by its name, as on any other node."""
        return self.folder / name

    def parts(self) -> list[Part]:
        """Return what is here, by step. What cannot be read is left out: others may have it."""
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as items:
            folders = [item for item in items if item.is_dir(follow_symlinks=False)]
            names = [(parse_step(item.name), Path(item.path)) for item in folders]
            for name, folder in names:
                if name is None or name.kind != "step":
                    continue
                with contextlib.suppress(OSError):
                    manifest, damage = _manifest_in(folder)
                    found.append(Part(name.step, manifest, _sizes_in(folder), damage))
        return sorted(found, key=lambda part: part.step)

    def begin(self, step: int) -> Path:
        """Return a new folder for a step; what had its name goes. Raises: OSError."""
        self.drop(step)
        folder = self.path_of(step)
        folder.mkdir(_MODE)
        return folder

    def commit(self, step: int, manifest: bytes) -> None:
        """Make it a checkpoint. Raises: OSError."""
        DISK.replace_file(self.path_of(step) / MANIFEST, manifest)
        DISK.sync_folder(self.folder)

    def drop(self, step: int) -> None:
        """Remove a checkpoint, its manifest first: what is left is none at any moment. Raises: OSError."""
        folder = self.path_of(step)
        DISK.remove_file(folder / MANIFEST)
        DISK.remove_tree(folder)

    def clear(self) -> None:
        """Remove the folder and all that is in it. Raises: OSError."""
        self.close()
        for part in self.parts():
            self.drop(part.step)
        DISK.remove_tree(self.folder)
        DISK.remove_empty_folder(self.folder.parent)

    @property
    def age_seconds(self) -> float:
        """How long ago a rank has opened it, or a checkpoint was made. Raises: OSError."""
        newest = max(each.stat().st_mtime for each in (self.folder, self.folder / _OWNER))
        return time.time() - newest

    @property
    def size_bytes(self) -> int:
        """Memory that all of it takes: files that have several names count once."""
        inodes = {}
        for top, _, names in os.walk(self.folder):
            for name in names:
                with contextlib.suppress(OSError):
                    found = os.lstat(Path(top) / name)
                    inodes[found.st_ino] = found.st_blocks * 512
        return sum(inodes.values())


_held: set[int] = set()
"""Descriptors whose locks say that this process lives."""


def _let_go_in_child() -> None:
    # A fork has the same locks, and may outlive who made them.
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go_in_child)


def found_on(base: Path) -> list[NodeMemory]:
    """Return what runs of this user have, or have left, in the memory of this node. Raises: ConfigError, where the
    folder is not this user's."""
    folder = user_folder(base)
    try:
        check_private(folder)
        with os.scandir(folder) as items:
            names = sorted(item.name for item in items if item.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unusable(folder, error) from error
    found = []
    for name in filter(_NAME.fullmatch, names):
        with contextlib.suppress(ConfigError):  # others may write to it
            memory = NodeMemory.at(folder / name)
            if memory.is_there():
                found.append(memory)
    return found


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{folder} cannot be used ({error.strerror or error})")


def job_ids(base: Path) -> set[str]:
    """Return the jobs whose runs have something in the memory of this node, and of which no rank lives there. Raises:
    ConfigError."""
    ids = set()
    for memory in found_on(base):
        with contextlib.suppress(CkptmanError, OSError):
            owner = memory.owner()
            if owner.job_id is not None and not memory.is_alive():
                ids.add(owner.job_id)
    return ids


def left_behind(base: Path, is_over: Mapping[str, bool], but: Path | None = None) -> Iterator[NodeMemory]:
    """Yield what nobody will go on from any more: no rank lives, nor what started them, nor their job.

    `is_over`: of jobs, by id, whether they are known to have ended; one that is not in there may live. `but`: a folder
    to leave out.
    """
    for memory in found_on(base):
        if memory.folder == but:
            continue
        try:
            if memory.is_alive():
                continue
            owner = memory.owner()
            if owner.is_supervised:
                continue
        except FileNotFoundError:
            continue  # it is being made
        except (CkptmanError, OSError):
            yield memory
            continue
        if owner.job_id is None or is_over.get(owner.job_id, False):
            yield memory


def check_base(base: Path) -> None:
    """Raises: ConfigError where a folder cannot hold checkpoints in memory."""
    if not base.is_dir():
        raise ConfigError(f"{base} is not there, or is no folder: name one that is in memory on each node")
    mode = base.stat().st_mode
    if mode & 0o022 and not mode & stat.S_ISVTX:
        raise ConfigError(f"{base} is others' to write to, and not sticky: they could put something in place of ours")
    if not os.access(base, os.W_OK | os.X_OK):
        raise ConfigError(f"{base} is not this user's to write to")


def check_private(folder: Path) -> None:
    """Raises: OSError where others have made a folder, or may put something into it, which is never read."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is no folder", str(folder))
    if found.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, f"user {found.st_uid} has made it", str(folder))
    if found.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "others may write to it: remove it", str(folder))
    if found.st_mode & 0o077:
        folder.chmod(_MODE)


def _manifest_in(folder: Path) -> tuple[Manifest | None, str]:
    """Return it, or why one that is there cannot be read."""
    path = folder / MANIFEST
    try:
        return parse_manifest(path, read_regular(path, _MOST_MANIFEST_BYTES)), ""
    except FileNotFoundError:
        return None, ""
    except (CkptmanError, OSError) as error:
        return None, str(error)


def _sizes_in(folder: Path) -> dict[str, int]:
    with os.scandir(folder) as items:
        files = [item for item in items if item.is_file(follow_symlinks=False) and item.name != MANIFEST]
        return {item.name: item.stat(follow_symlinks=False).st_size for item in files}
