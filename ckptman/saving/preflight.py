"""Taking stock before a save: what this rank has to save, and what the ranks know of each other."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptman.comm.control import Call, Channel, RankFailed, refuse_other_calls
from ckptman.comm.replicas import compare_replicas
from ckptman.errors import ConfigError
from ckptman.loading.read import refuse_unfillable
from ckptman.saving.saver import Saver
from ckptman.state.named_state import Snapshot, is_named, is_stateful, snapshot, unlike_on_ranks, value_digests
from ckptman.state.optimizer_hooks import OptimizerHooks


class Look(NamedTuple):
    """What a rank knows when a save is about to begin: digests of its plain values; the number of a save that failed
    and was not told; whether its channel lost a rank; whether its plan fits."""

    values: dict[str, str]
    failed: int
    lost: bool
    planned: bool


@dataclass(frozen=True)
class Preflight:
    """A snapshot of this rank's state, and over all ranks: the largest number of a save that failed and was not told,
    whether any channel lost a rank, whether the plan of every rank fits."""

    snapshot: Snapshot
    failed: int
    lost: bool
    planned: bool


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python looks for garbage after so many new objects, and in a large program for longer than all of this takes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def preflight(control: Channel, state: Mapping[str, Any], updates: OptimizerHooks, saver: Saver) -> Preflight:
    """Every rank calls it, before anything is written: a value that one rank cannot save must not leave the others
    waiting. Raises on every rank alike: ConfigError."""
    shots: list[Snapshot] = []

    def look() -> Call:
        with updates.ignored(), _no_collection():
            shots.append(snapshot(state, control.rank))
        _refuse_what_no_load_fills(state, shots[0])
        knows = Look(value_digests(shots[0], state), saver.failed, saver.channel.lost, saver.knows(shots[0]))
        return Call("step() or save()", knows)

    try:
        told = control.run_on_all(look)
    except RankFailed as failed:
        raise failed.as_ckptman_error() from failed
    refuse_other_calls(told)
    looks: list[Look] = [each.arguments for each in told]
    if difference := unlike_on_ranks([each.values for each in looks]):
        raise ConfigError(difference)
    if not saver.has_begun and (warning := compare_replicas(control, shots[0], state)) and control.is_leader:
        saver.warn_once("replicas", warning)
    return Preflight(
        shots[0],
        max(each.failed for each in looks),
        any(each.lost for each in looks),
        all(each.planned for each in looks),
    )


def _refuse_what_no_load_fills(state: Mapping[str, Any], shot: Snapshot) -> None:
    """Raises: ConfigError. Not of objects that load themselves."""
    filled = {name for name, value in state.items() if is_named(value) or not is_stateful(value)}
    for name, tensor in shot.tensors.items():
        if shot.paths[name][0] in filled:
            refuse_unfillable(name, tensor)
