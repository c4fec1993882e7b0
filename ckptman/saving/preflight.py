"""What is looked at before anything is written: can the state of every rank be saved, and will it be loaded again.

A load unpickles nothing but what torch calls safe, or the process does (`torch.serialization.add_safe_globals`). What
it would refuse is better known at the save than when it is needed.
"""

from __future__ import annotations

import contextlib
import gc
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ckptman.comm.control_group import AllRanks, Call, Channel, failing_as_one, refuse_other_calls
from ckptman.errors import ConfigError, CorruptError, warn
from ckptman.format.pickle_guard import NotAllowed
from ckptman.loading.restricted_unpickler import load_plain
from ckptman.saving.write_plan import signature_of
from ckptman.state.file_layout import QUANTIZED, is_plain, pickled
from ckptman.state.local_shards import refuse_unfillable
from ckptman.state.named_state import Snapshot, is_named, is_stateful, snapshot, unlike_on_ranks, value_digests
from ckptman.state.step_record import OptimizerHooks

_NAMED = 3


class _Look(NamedTuple):
    """What a rank tells the others: digests of its plain values, and what it knows of its saves."""

    values: dict[str, str]
    failed: int
    lost: bool
    fits: bool


@dataclass(frozen=True)
class Preflight:
    """A snapshot of this rank's state, and over all ranks: the largest number of a save that failed and was not
    reported, whether any channel lost a rank, whether the plan of every rank fits."""

    snapshot: Snapshot
    failed: int
    lost: bool
    fits: bool


def preflight(
    control: Channel,
    state: Mapping[str, Any],
    hooks: OptimizerHooks,
    *,
    failed: int,
    lost: bool,
    signature: int | None,
) -> Preflight:
    """Look at the state, before anything is written: a value that one rank cannot save must not leave the others
    waiting. Every rank calls it.

    Args:
        failed: number of a save of this rank that failed and was not reported; 0: none.
        lost: whether the channel of this rank's saves lost another one.
        signature: of the plan that this rank has; None: it has none.

    Raises: ConfigError, on every rank alike.
    """
    with failing_as_one(), AllRanks[Call](control) as ranks:
        with hooks.ignored(), _no_collection():
            shot = snapshot(state, control.rank)
        _refuse_what_no_load_fills(state, shot)
        look = _Look(value_digests(shot, state), failed, lost, signature == signature_of(shot))
        ranks.mine = Call("step() or save()", look)
    refuse_other_calls(ranks.all)
    looks: list[_Look] = [each.arguments for each in ranks.all]
    if difference := unlike_on_ranks([each.values for each in looks]):
        raise ConfigError(difference)
    return Preflight(
        shot,
        max(each.failed for each in looks),
        any(each.lost for each in looks),
        all(each.fits for each in looks),
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Hold off garbage collection, which in a large program takes longer than all that is done inside."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _refuse_what_no_load_fills(state: Mapping[str, Any], shot: Snapshot) -> None:
    """Refuse tensors that no load could fill, but those of objects that load themselves. Raises: ConfigError."""
    filled = {name for name, value in state.items() if is_named(value) or not is_stateful(value)}
    for name, tensor in shot.tensors.items():
        if shot.paths[name][0] in filled:
            refuse_unfillable(name, tensor)


def refusal_of(data: bytes, what: str) -> CorruptError | None:
    """Return the error of a load of what torch.save has made; None: it will be loaded."""
    try:
        load_plain(io.BytesIO(data), what)
    except CorruptError as error:
        return error
    return None


def refused_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
    """Return why no restore will make some of these tensors, with their names and a remedy: a line for each class of
    them."""
    kinds: dict[tuple[type, torch.dtype], list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        if not is_plain(tensor):
            kinds.setdefault((type(tensor), tensor.dtype), []).append((name, tensor))
    for (kind, dtype), group in kinds.items():
        named = ", ".join(name for name, _ in group[:_NAMED])
        named += f" and {len(group) - _NAMED} more" if len(group) > _NAMED else ""
        if dtype in QUANTIZED:
            yield (
                f"{named}: a tensor that torch has quantized ({str(dtype).removeprefix('torch.')}) is loaded only into "
                f"one of the same scales, and a restore makes none: save its int_repr(), and its scales beside it"
            )
        elif why := _refusal_of_class(min(group, key=lambda each: each[1].numel())[1]):
            yield (
                f"{named}: a {kind.__module__}.{kind.__qualname__} is no tensor that a load makes ({why}): call "
                f"torch.serialization.add_safe_globals for it when the script begins, or save plain tensors "
                f"(as_subclass(torch.Tensor), or those that it is made of)"
            )


def _refusal_of_class(tensor: torch.Tensor) -> str | None:
    """Return why a load would refuse a tensor of a class of its own."""
    try:
        data = pickled(tensor)
    except Exception as error:  # noqa: BLE001 of a class that nobody here knows
        return f"it cannot be pickled: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    refused = refusal_of(data, "it")
    return f"it asks for {refused.asked}" if isinstance(refused, NotAllowed) else str(refused) if refused else None


def warn_of_refused(
    tensors: Iterable[tuple[str, torch.Tensor]], values: Iterable[tuple[str, Callable[[], bytes]]]
) -> None:
    """Warn of what is pickled for a save, and a load refuses. `values`: names, and what makes their pickles."""
    with contextlib.suppress(Exception):  # also a warning that is an error; what cannot be pickled fails the save
        for line in refused_tensors(tensors):
            warn(f"what is saved now will not be loaded: {line}")
    for name, make in values:
        with contextlib.suppress(Exception):
            if refused := refusal_of(make(), f"the value {name}"):
                warn(f"what is saved now will not be loaded: {refused}")
