"""From a folder that nobody sees to a checkpoint: what the leader does before and after all ranks have written."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

import ckptman
from ckptman.catalog.backends.backend import Backend
from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.backends.object_store import check_folder
from ckptman.catalog.reader_lease import lease
from ckptman.catalog.replaceable import may_be_replaced
from ckptman.errors import ExistsError
from ckptman.format.manifest import FileRecord, Manifest, Mesh
from ckptman.format.paths import new_nonce, parse_step
from ckptman.io.checksums import BLOCK_BYTES
from ckptman.io.filesystem import DISK, Disk, holding
from ckptman.policies.calendar import time_to_store


@dataclass(frozen=True)
class SaveInfo:
    """What the manifest says besides sizes and digests."""

    step: int = 0
    reason: str = "saved by dcp.save"
    world_size: int = 1
    mesh: Mesh | None = None
    run_id: str = ""
    job_id: str | None = None
    attempt: int = 1
    restored_from: int | None = None
    metrics: Mapping[str, float] | None = None


def is_replaceable(path: Path) -> bool:
    """Whether a save may take the place of what is there: nothing, an empty folder, a checkpoint of any kind."""
    if not os.path.lexists(path):
        return True
    return may_be_replaced(path)


class Draft:
    """A save that nobody sees yet, in a folder beside its final name. Leader only, but for `folder`."""

    def __init__(
        self,
        final: Path,
        info: SaveInfo | None,
        *,
        overwrite: bool,
        place: Backend | None = None,
        tag: str | None = None,
        disk: Disk = DISK,
        on_commit: Callable[[], None] | None = None,
    ) -> None:
        self.final = final
        self._info, self._overwrite, self._on_commit = info, overwrite, on_commit
        self._place = place or LocalBackend(final.parent.absolute(), disk)
        self._tag = tag or new_nonce()
        self._folder: str | None = None
        # A run's claim on its root says that it is alive; whoever saves without one says so of this save.
        self._is_claimed = tag is not None or parse_step(final.name) is None
        self._held = contextlib.ExitStack()

    def begin(self) -> str:
        """Make the folder that all ranks write to, and return its path.

        Raises: ConfigError (an address), ExistsError, RootError, OSError.
        """
        check_folder(self.final)
        if not self._overwrite and os.path.lexists(self.final):
            raise ExistsError(f"{self.final} exists already: save under another name, or say overwrite=True")
        if self._overwrite and not is_replaceable(self.final):
            raise ExistsError(f"{self.final} is no checkpoint, and is not replaced by one: name another path")
        self._place.make()
        if not self._is_claimed:
            self._held.enter_context(lease(self.final.parent, [f"{self.final.name}.tmp-{self._tag}"], what="save"))
        self._folder = self._place.begin(self.final.name, self._tag)
        self._held.enter_context(holding(self.folder))
        return self._folder

    @property
    def folder(self) -> Path:
        """Where `begin` made it."""
        assert self._folder is not None
        return Path(self._folder)

    def commit(self, files: dict[str, FileRecord], world_size: int) -> None:
        """Make it a checkpoint. Raises: OSError, BusyError."""
        assert self._folder is not None
        if self._on_commit is not None:
            self._on_commit()
        self._place.commit(self._folder, self._manifest(files, world_size))
        self._folder = None
        self._held.close()

    def abandon(self) -> None:
        """After a failed save: remove what was written. Never raises."""
        folder, self._folder = self._folder, None
        if folder is not None:
            self._place.abandon(folder)
        self._held.close()

    def _manifest(self, files: dict[str, FileRecord], world_size: int) -> Manifest:
        name = parse_step(self.final.name)
        info = self._info or SaveInfo(step=name.step if name else 0, world_size=world_size)
        # Outside a root, under a name that is not a step's, there are no others to come after.
        sequence = 1 + (self._place.last_sequence() if name else 0)
        return Manifest(
            step=info.step,
            sequence=sequence,
            time_seconds=time_to_store(time.time()),
            reason=info.reason,
            world_size=info.world_size,
            mesh=info.mesh,
            torch_version=torch.__version__,
            ckptman_version=ckptman.__version__,
            run_id=info.run_id,
            job_id=info.job_id,
            attempt=info.attempt,
            restored_from=info.restored_from,
            metrics=dict(info.metrics or {}),
            block_bytes=BLOCK_BYTES,
            files=files,
        )
