"""`save` and `load` of a state dict, without a run around them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptman._tracebacks import short_traceback
from ckptman.engine.comm.control_group import AllRanks, Channel, Contribution, RankFailed, failing_as_one
from ckptman.engine.comm.replicas import agree_on_frozen, compare_replicas
from ckptman.engine.loading.allowed_mismatches import EVERYTHING, AllowedMismatches, Skipped
from ckptman.engine.loading.loader import load as load_checkpoint
from ckptman.engine.saving.draft import Draft, SaveInfo
from ckptman.engine.saving.refused_values import warn_of_refused
from ckptman.engine.saving.write_plan import RankFile, plan_save
from ckptman.engine.saving.writer import CheckpointWriter, Content
from ckptman.engine.state.file_layout import pickled
from ckptman.engine.state.modules import UnwrappedState, unwrap
from ckptman.engine.state.snapshot import Snapshot, snapshot
from ckptman.errors import CommitError, CorruptError, NotFoundError, warn_only
from ckptman.run import at_newest, meant_by
from ckptman.storage.catalog.reader_lease import held, refuse_gone
from ckptman.storage.format.manifest import Replicas
from ckptman.storage.format.paths import step_number

TIMEOUT_SECONDS = 1800.0
_COMPARED: dict[int, Replicas | None] = {}
"""What the first save of each state found that compared its replicas, by the signature of the state."""


@short_traceback
def save(
    state_dict: Mapping[str, Any], path: str | os.PathLike[str], *, step: int | None = None, overwrite: bool = False
) -> None:
    """Save a state dict as the checkpoint `path`, and return when it is durable.

    Every rank calls it. A RuntimeWarning names the values that `load` will refuse.

    Args:
        state_dict: tensors, DTensors, nested dicts and plain values by name, as for `dcp.save`; of modules, optimizers
            and other objects with `state_dict`, what that returns is saved.
        path: the folder, which appears when the save is complete, and not before.
        step: optimizer steps completed, for `ckptman list`, `restore(path=)` and whoever else asks; rank 0's counts.
            None: that of a name such as step-0000000100, or 0.
        overwrite: replace an existing checkpoint at `path`; it stays until the new one takes its place.

    Raises:
        ExistsError: `path` exists, and `overwrite` is False or it is not a checkpoint.
        ConfigError: a value cannot be saved, ranks have other tensors under one name, or `path` is the name of another
            step.
        CommitError: disk full, quota or an I/O error on any rank. Nothing is left of the save, and older checkpoints
            are untouched.

        Every rank raises the same error.
    """
    final = Path(path)
    channel = Channel(TIMEOUT_SECONDS)
    draft: Draft | None = None
    try:
        with failing_as_one():
            info = channel.run_on_leader(partial(_save_info, final, step))
        draft = Draft(final, info, overwrite=overwrite)
        state = {name: unwrap(value) for name, value in state_dict.items()}
        agree_on_frozen(channel, state)
        with AllRanks[bool](channel) as is_new:
            shot = snapshot(state, channel.rank, strict=False)
            is_new.mine = shot.signature not in _COMPARED
        file = plan_save(shot, channel)
        if any(is_new.all):
            compared = compare_replicas(channel, shot, file.plan.shared, state)
            _COMPARED[shot.signature] = compared.replicas
            for text in compared.warnings if channel.is_leader else ():
                warn_only(text)
        draft.info = replace(draft.info, replicas=_COMPARED[shot.signature])
        _warn_of_refused(shot, file)
        CheckpointWriter().save(channel, draft, Content.of(shot, file, file.memory(shot)))
    except RankFailed as failed:
        if failed.failure.error is not None:
            raise failed.failure.error from failed.failure.error.__cause__
        raise CommitError(info.step, failed.failure.rank, failed.failure.text) from failed
    finally:
        if draft is not None:
            draft.abandon()
        channel.close()


def _save_info(final: Path, step: int | None) -> SaveInfo:
    return SaveInfo.for_path(final, "saved by ckptman.save", None if step is None else step_number(step))


def _warn_of_refused(shot: Snapshot, file: RankFile) -> None:
    """Warn of what this rank pickles because it is neither a plain value nor a tensor: `load` refuses it."""
    encoded = {name for unit in shot.units for name in unit.names}
    values = [(name, partial(pickled, shot.objects[name])) for name in file.plan.objects if name not in encoded]
    warn_of_refused(file.special(shot), values)


@short_traceback
def load(
    state_dict: MutableMapping[str, Any],
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    missing: Sequence[str] = (),
    unexpected: Sequence[str] = EVERYTHING,
) -> Skipped:
    """Load the checkpoint `path` into a state dict, in place, on any number of ranks.

    Every rank calls it.

    Args:
        state_dict: what to fill. Tensors and DTensors are filled where they are, in any sharding; plain values are
            replaced; modules, optimizers and other objects with `load_state_dict` are given their state.
        path: a checkpoint of ckptman, of `dcp.save` or of torchtitan; or a root, and then its newest checkpoint.
        verify: check every block that is read against its digest.
        missing: patterns of what the checkpoint may lack, such as `["model.head", "*.lora_A.*"]`. A pattern names an
            entry of the state and all that is under it. What is missing stays as it is.
        unexpected: patterns of what the checkpoint may hold besides, which is not loaded. The default is all; `()` is
            nothing.

    Returns:
        What was skipped: `.missing` and `.unexpected`, by flat names or whole keys. It is false where that is nothing.

    Raises:
        NotFoundError: there is no checkpoint at `path`, or it was deleted.
        MismatchError: a name is missing in the checkpoint, or has another shape or dtype there. Nothing was filled.
        ConfigError: a pattern of `missing` names nothing, or ranks differ in the patterns. Nothing was filled.
        CorruptError: the bytes are not what was saved. What was to be filled is not usable.
        FormatVersionError: a newer ckptman wrote it.

        Every rank raises the same error.
    """
    channel = Channel(TIMEOUT_SECONDS)
    try:
        with failing_as_one():
            given = channel.agree("load()", lambda: Contribution(AllowedMismatches.of(missing, unexpected)))
        AllowedMismatches.refuse_unlike(given.unlike or ())
        accepted = AllowedMismatches.of(missing, unexpected)

        def find() -> tuple[Path, bool]:
            with failing_as_one():
                return channel.run_on_leader(partial(meant_by, path))

        def fill(folder: Path) -> Skipped:
            state = UnwrappedState(state_dict)
            with held(folder, what="load") if channel.is_leader else contextlib.nullcontext(), failing_as_one():
                channel.run_on_leader(partial(refuse_gone, folder))
                try:
                    return load_checkpoint(channel, state, folder, accepted, strict=False, verify=verify)
                except (CorruptError, NotFoundError):
                    channel.run_on_leader(partial(refuse_gone, folder))
                    raise

        return at_newest(find, fill)
    finally:
        channel.close()
