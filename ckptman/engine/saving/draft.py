"""Where a save goes until it is a checkpoint: a draft, which nobody sees, and what its manifest will say."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

import ckptman
from ckptman.engine.saving.save_checks import MOST_NAMES
from ckptman.errors import ConfigError, ExistsError
from ckptman.policies.retention_rules import time_to_store
from ckptman.storage.catalog.backends.backend import check_folder
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.overwrite import may_be_replaced
from ckptman.storage.catalog.reader_lease import lease
from ckptman.storage.catalog.writer_lock import Claim
from ckptman.storage.format.manifest import FileRecord, Manifest, Mesh, Nonfinite, Replicas
from ckptman.storage.format.paths import new_nonce, parse_step, step_folder
from ckptman.storage.io.checksums import BLOCK_BYTES
from ckptman.storage.io.durable_files import holding


@dataclass(frozen=True)
class SaveInfo:
    """What the manifest says besides sizes and digests."""

    step: int = 0
    reason: str = "saved by dcp.save"
    mesh: Mesh | None = None
    run_id: str = ""
    job_id: str | None = None
    attempt: int = 1
    restored_from: int | None = None
    metrics: Mapping[str, float] | None = None
    metadata: Mapping[str, Any] | None = None
    asked: Mapping[str, str] | None = None
    replicas: Replicas | None = None

    @property
    def nonfinite_metrics(self) -> tuple[str, ...]:
        """The first of the metrics that are NaN or infinite."""
        return tuple(name for name, value in (self.metrics or {}).items() if not math.isfinite(value))[:MOST_NAMES]

    @classmethod
    def for_path(cls, final: Path, reason: str, step: int | None = None) -> SaveInfo:
        """Return what is known of a save that no run makes; `step` None: that of its name, or 0 where it tells none.

        Raises: ConfigError where its name is that of another step.
        """
        name = parse_step(final.name)
        if step is not None and name is not None and name.step != step:
            raise ConfigError(f"{final} is the name of step {name.step}, not of step={step}: save under another name")
        return cls(step if step is not None else name.step if name else 0, reason)


class SaveTarget(Protocol):
    """What a save is written to. Every rank has one; all but `here` is for the leader.

    Attributes:
        info: What the manifest says besides sizes and digests.
        final: The checkpoint that it becomes.
        in_memory: What is staged becomes the data file where it is, instead of being written.
        size_bytes: Of all files but the manifest, once it is committed.
    """

    info: SaveInfo
    final: Path
    in_memory: bool
    size_bytes: int

    def begin(self) -> str:
        """Make the folder that the ranks write to, and return its path. Raises: CkptmanError, OSError."""

    def here(self, folder: str) -> Path:
        """Return the folder that `begin` made on the leader, as this rank sees it."""

    @property
    def folder(self) -> Path:
        """Where `begin` made it."""

    def commit(self, files: dict[str, FileRecord], world_size: int, nonfinite: Nonfinite | None = None) -> None:
        """Make it a checkpoint. Raises: CkptmanError, OSError."""

    def abandon(self) -> None:
        """Remove what was written, after a failed save. Never raises."""


class CheckpointStore(Protocol):
    """Where checkpoints become visible."""

    root: Path

    def make(self, *, is_there: bool = False) -> None:
        """Create it if it is missing. `is_there`: it was created before, so it is only checked. Raises: RootError."""

    def begin(self, name: str, tag: str) -> str:
        """Make the folder of a save, which nobody sees yet. `tag`: tells it from every other. Raises: OSError."""

    def commit(self, draft: str, manifest: Manifest) -> object:
        """Make a draft whose files are durable the checkpoint of its name, all of it at once. Raises: OSError."""

    def abandon(self, draft: str) -> None:
        """Remove a draft. Never raises."""

    def last_sequence(self) -> int:
        """Return the highest commit sequence that is known, which the next commit has to exceed; 0 where none is."""


class Draft:
    """A save that nobody sees yet, in a folder beside its final name.

    Args:
        store: of the root of a run; None: of the folder that `final` is in.
        claim: the run's, on its root; None where whoever saves has none.
    """

    def __init__(
        self,
        final: Path,
        info: SaveInfo,
        *,
        overwrite: bool,
        store: CheckpointStore | None = None,
        claim: Claim | None = None,
    ) -> None:
        self.final, self.info = final, info
        self.in_memory = False
        self._overwrite, self._claim = overwrite, claim
        self._store: CheckpointStore = store or LocalBackend(final.parent.absolute())
        self.size_bytes = 0
        """Of all files but the manifest, once it is committed."""
        self._folder: str | None = None
        self._held = contextlib.ExitStack()

    @classmethod
    def of_run(cls, store: CheckpointStore, info: SaveInfo, claim: Claim | None) -> Draft:
        """Return a draft of the step of `info` in the root of a run, which replaces what was saved of that step."""
        final = store.root / step_folder(info.step)
        return cls(final, info, overwrite=True, store=store, claim=claim)

    def begin(self) -> str:
        """Make the folder that all ranks write to, and return its path.

        Raises: ConfigError (an address), ExistsError, RootError, OSError.
        """
        if self._claim is not None:
            self._claim.check()
        else:
            check_folder(self.final)
        if os.path.lexists(self.final):
            if not self._overwrite:
                raise ExistsError(f"{self.final} exists already: save under another name, or say overwrite=True")
            if not may_be_replaced(self.final):
                raise ExistsError(f"{self.final} is no checkpoint, and is not replaced by one: name another path")
        self._store.make(is_there=self._claim is not None)
        tag = self._claim.next_tag() if self._claim is not None else new_nonce()
        if self._claim is None and parse_step(self.final.name) is not None:
            # A run's claim on its root says that it is alive; whoever saves without one says so of this save.
            self._held.enter_context(lease(self.final.parent, [f"{self.final.name}.tmp-{tag}"], what="save"))
        self._folder = self._store.begin(self.final.name, tag)
        self._held.enter_context(holding(self.folder))
        return self._folder

    def here(self, folder: str) -> Path:
        """Return the folder that `begin` made on the leader, as this rank sees it."""
        return Path(folder)

    @property
    def folder(self) -> Path:
        """Where `begin` made it. Leader only."""
        assert self._folder is not None
        return Path(self._folder)

    def commit(self, files: dict[str, FileRecord], world_size: int, nonfinite: Nonfinite | None = None) -> None:
        """Make it a checkpoint. Raises: OSError, BusyError."""
        folder = str(self.folder)
        if self._claim is not None:
            self._claim.check()
        # Outside a root, under a name that is not a step's, there are no others to come after.
        sequence = 1 + (self._store.last_sequence() if parse_step(self.final.name) else 0)
        manifest = manifest_of(self.info, sequence, files, world_size, nonfinite)
        self._store.commit(folder, manifest)
        self._folder, self.size_bytes = None, manifest.total_bytes
        self._held.close()

    def abandon(self) -> None:
        """Remove what was written, after a failed save. Never raises."""
        folder, self._folder = self._folder, None
        if folder is not None:
            self._store.abandon(folder)
        self._held.close()


def manifest_of(
    info: SaveInfo, sequence: int, files: dict[str, FileRecord], world_size: int, nonfinite: Nonfinite | None
) -> Manifest:
    """Return the manifest of a save that happens now."""
    return Manifest(
        step=info.step,
        sequence=sequence,
        time_seconds=time_to_store(time.time()),
        reason=info.reason,
        world_size=world_size,
        mesh=info.mesh,
        torch_version=torch.__version__,
        ckptman_version=ckptman.__version__,
        run_id=info.run_id,
        job_id=info.job_id,
        attempt=info.attempt,
        restored_from=info.restored_from,
        metrics=dict(info.metrics or {}),
        metadata=dict(info.metadata or {}),
        asked=dict(info.asked or {}),
        nonfinite=nonfinite,
        replicas=info.replicas if world_size > 1 else None,
        block_bytes=BLOCK_BYTES,
        files=files,
    )
