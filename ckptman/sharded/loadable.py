"""Whether what has to be pickled will be loaded again: tensors of classes of their own, and values with no plain form.

A load unpickles nothing but what torch calls safe, or the process does (`torch.serialization.add_safe_globals`). What
it would refuse is better known at the save than when it is needed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from ckptman.errors import ConfigError, CorruptError, warn
from ckptman.sharded import proof
from ckptman.sharded.container import QUANTIZED, is_plain
from ckptman.sharded.foreign import load_plain
from ckptman.sharded.image import pickled
from ckptman.sharded.reading import read_bytes
from ckptman.sharded.saved import SavedState
from ckptman.store.pickles import NotAllowed
from ckptman.store.plain import paths_in
from ckptman.store.regular import open_regular

_NAMES_TOLD = 3


def refusal_of(data: bytes, what: str) -> CorruptError | None:
    """The error of a load of what torch.save has made; None: it will be loaded."""
    try:
        load_plain(io.BytesIO(data), what)
    except CorruptError as error:
        return error
    return None


def refused_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
    """Why no restore will make some of these tensors, with their names and a remedy: a line for each class of them."""
    kinds: dict[tuple[type, torch.dtype], list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        if not is_plain(tensor):
            kinds.setdefault((type(tensor), tensor.dtype), []).append((name, tensor))
    for (kind, dtype), group in kinds.items():
        told = ", ".join(name for name, _ in group[:_NAMES_TOLD])
        told += f" and {len(group) - _NAMES_TOLD} more" if len(group) > _NAMES_TOLD else ""
        if dtype in QUANTIZED:
            yield (
                f"{told}: a tensor that torch has quantized ({str(dtype).removeprefix('torch.')}) is loaded only into "
                f"one of the same scales, and a restore makes none: save its int_repr(), and its scales beside it"
            )
        elif why := _refusal_of_class(min(group, key=lambda each: each[1].numel())[1]):
            yield (
                f"{told}: a {kind.__module__}.{kind.__qualname__} is no tensor that a load makes ({why}): call "
                f"torch.serialization.add_safe_globals for it when the script begins, or save plain tensors "
                f"(as_subclass(torch.Tensor), or those that it is made of)"
            )


def _refusal_of_class(tensor: torch.Tensor) -> str | None:
    """Why a load would refuse a tensor of a class of its own."""
    try:
        data = pickled(tensor)
    except Exception as error:  # noqa: BLE001 of a class that nobody here knows
        return f"it cannot be pickled: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    refused = refusal_of(data, "it")
    return f"it asks for {refused.asked}" if isinstance(refused, NotAllowed) else str(refused) if refused else None


def warn_of_refused(
    tensors: Iterable[tuple[str, torch.Tensor]], values: Iterable[tuple[str, Callable[[], bytes]]]
) -> None:
    """Tell of what is pickled for a save, and a load refuses. `values`: names, and what makes their pickles."""
    with contextlib.suppress(Exception):  # also a warning that is an error; what cannot be pickled fails the save
        for line in refused_tensors(tensors):
            warn(f"what is saved now will not be loaded: {line}")
    for name, make in values:
        with contextlib.suppress(Exception):
            if refused := refusal_of(make(), f"the value {name}"):
                warn(f"what is saved now will not be loaded: {refused}")


def allow(classes: Iterable[str]) -> None:
    """Let loads of this process make objects of these classes, written as `module.Class`. Imports their modules, also
    from the current folder. Raises: ConfigError."""
    for written in classes:
        here = str(Path.cwd())
        sys.path.append(here)
        try:
            torch.serialization.add_safe_globals([_named(written)])
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"--allow: {written} is not there ({type(error).__name__}: {error}): name a class as module.Class, of "
                f"an installed package or of a module in this folder"
            ) from error
        finally:
            sys.path.remove(here)


def _named(written: str) -> type:
    module, _, name = written.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        outer, _, inner = module.rpartition(".")  # a class in a class
        if not outer:
            raise
        found = getattr(getattr(importlib.import_module(outer), inner), name)
    return found  # type: ignore[no-any-return]


def check(folder: Path) -> tuple[list[str], list[str]]:
    """What in a checkpoint a load would refuse, and which tensors are quantized, by name.

    Raises: CorruptError, NotFoundError, FormatVersionError; OSError.
    """
    saved = SavedState.read(folder)
    refused = [str(error) for error in _refusals(saved) if saved.manifest or isinstance(error, NotAllowed)]
    return refused, [name for name in saved.index.tensors if saved.dtype(name) in QUANTIZED]


def _refusals(saved: SavedState) -> Iterator[CorruptError]:
    plain = {name for name, _ in paths_in(saved.values)} if saved.manifest else set()
    for name in saved.index.objects.keys() - plain:
        if error := refusal_of(read_bytes(saved, name, verify=False), f"the value {name}"):
            yield error
    for name in saved.index.tensors:
        for chunk in saved.all_chunks(name):
            if saved.payload(name, chunk) is not None:
                continue
            with open(open_regular(saved.folder / chunk.file, follow=saved.manifest is None), "rb") as file:
                file.seek(chunk.offset)
                if error := refusal_of(file.read(chunk.bytes), f"the tensor {name}"):
                    yield error
                    break


def main(arguments: Sequence[str]) -> int:
    """Check the checkpoint of a request (JSON). Prints a JSON object with what was found, or with an error."""
    request = json.loads(arguments[0])

    def found() -> Iterator[dict[str, list[str]]]:
        allow(request["allow"])
        refused, quantized = check(Path(request["folder"]))
        yield {"refused": sorted(refused), "quantized": quantized}

    return proof.answer(found())
