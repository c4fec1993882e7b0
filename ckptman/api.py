"""`save` and `load` of a state dict, for those who have a training loop of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

from ckptman.catalog.reader_lease import reading
from ckptman.comm.control import Channel, RankFailed
from ckptman.comm.replicas import compare_replicas
from ckptman.errors import CommitError, warn
from ckptman.format.paths import parse_step
from ckptman.io.filesystem import DISK
from ckptman.loading.loader import load as load_checkpoint
from ckptman.saving.draft import Draft, SaveInfo
from ckptman.saving.loadable import warn_of_refused
from ckptman.saving.rank_file import RankFile, make_rank_file
from ckptman.saving.write_plan import make_plan, signature_of
from ckptman.saving.writer import CheckpointWriter, Content
from ckptman.state.file_layout import pickled
from ckptman.state.named_state import Snapshot, snapshot

TIMEOUT_SECONDS = 1800.0
_COMPARED: set[int] = set()
"""Signatures of the states whose replicas were compared: the first save of each does that."""


def save(state_dict: Mapping[str, Any], path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Save a state dict as the checkpoint `path`, and return when it is durable.

    Args:
        state_dict: tensors, DTensors, nested dicts and plain values by name, as for `dcp.save`; modules, optimizers and
            other objects with `state_dict` are asked for theirs.
        path: the folder that appears when, and only when, the save is complete.
        overwrite: replace the checkpoint that `path` is; it stays until the new one takes its place.

    Every rank calls it. A value that `load` will refuse is told by a RuntimeWarning.

    Raises on every rank alike: ExistsError, ConfigError (a value that cannot be saved, or a small tensor that differs
    between ranks), CommitError (disk full, quota, an I/O error on any rank: nothing is left of the save, and older ones
    are untouched).
    """
    final = Path(path)
    channel = Channel(TIMEOUT_SECONDS)
    shots: list[Snapshot] = []
    files: list[RankFile] = []
    name = parse_step(final.name)
    step = name.step if name else 0
    info = SaveInfo(step=step, reason="saved by ckptman.save", world_size=channel.world_size)
    draft = Draft(final, info, overwrite=overwrite)

    def look() -> bool:
        shots.append(snapshot(state_dict, channel.rank, strict=False))
        return signature_of(shots[0]) not in _COMPARED

    try:
        if any(channel.run_on_all(look)):
            warning = compare_replicas(channel, shots[0], state_dict)
            _COMPARED.add(signature_of(shots[0]))
            if warning and channel.is_leader:
                with contextlib.suppress(Warning):  # one that is an error must not keep the leader from the others
                    warn(warning)
        plan = make_plan(shots[0], channel)
        channel.run_on_all(lambda: files.append(make_rank_file(shots[0], plan)))
        _warn_of_refused(shots[0], files[0])
        CheckpointWriter(DISK).save(channel, draft, Content.of(shots[0], files[0], files[0].memory(shots[0])))
    except RankFailed as failed:
        if failed.failure.error is not None:
            raise failed.failure.error from failed
        raise CommitError(step, failed.failure.rank, failed.failure.text) from failed
    finally:
        draft.abandon()
        channel.close()


def _warn_of_refused(shot: Snapshot, file: RankFile) -> None:
    """Tell of what this rank pickles because it is no plain value or tensor, and `load` refuses for the same reason."""
    encoded = {name for unit in shot.units for name in unit.names}
    values = [(name, partial(pickled, shot.objects[name])) for name in file.plan.objects if name not in encoded]
    warn_of_refused(file.special(shot), values)


def load(state_dict: MutableMapping[str, Any], path: str | os.PathLike[str], *, verify: bool = True) -> None:
    """Load the checkpoint `path` into a state dict, in place, on any number of ranks.

    Tensors and DTensors are filled where they are, in any sharding; plain values are replaced; modules, optimizers and
    other objects with `load_state_dict` are given their state. What the checkpoint holds besides is left there. `path`
    may also be what `dcp.save` or torchtitan wrote. With `verify`, every block that is read is checked.

    Every rank calls it. Raises on every rank alike: NotFoundError; MismatchError (something is missing in the
    checkpoint, or has another shape or dtype there) before anything is filled; CorruptError, after which what was to be
    filled is not usable; FormatVersionError.
    """
    folder = Path(path)
    channel = Channel(TIMEOUT_SECONDS)
    try:
        with reading(folder, what="load") if channel.is_leader else contextlib.nullcontext():
            load_checkpoint(channel, state_dict, folder, strict=False, verify=verify)
    finally:
        channel.close()
