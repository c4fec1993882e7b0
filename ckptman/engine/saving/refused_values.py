"""What a save would pickle and no load unpickles, known before anything is written.

A load unpickles nothing but what torch calls safe, or the process does (`torch.serialization.add_safe_globals`). What
it would refuse is better known at the save than when it is needed.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator

import torch

from ckptman.engine.loading.restricted_unpickler import load_plain
from ckptman.engine.state.file_layout import pickled
from ckptman.engine.state.local_shards import QUANTIZED, is_plain
from ckptman.errors import CorruptError, warn
from ckptman.storage.format.pickle_guard import NotAllowed

_NAMED = 3


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
