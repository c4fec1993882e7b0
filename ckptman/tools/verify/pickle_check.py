"""What of a checkpoint a load would refuse to unpickle: said by `ckptman verify` before a restore has to."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ckptman.engine.loading.checkpoint_reader import SavedState
from ckptman.engine.saving.refused_values import refusal_of
from ckptman.engine.state.local_shards import QUANTIZED
from ckptman.errors import ConfigError, CorruptError
from ckptman.storage.format.pickle_guard import NotAllowed
from ckptman.storage.format.value_codec import paths_in
from ckptman.storage.io.safe_open import open_regular
from ckptman.tools.verify import reports


def allow(classes: Iterable[str]) -> None:
    """Allow loads of this process to unpickle these classes, written as `module.Class`.

    Imports their modules, also from the current folder. Raises: ConfigError.
    """
    here = str(Path.cwd())
    is_new = here not in sys.path
    if is_new:
        sys.path.append(here)
    try:
        for written in classes:
            try:
                torch.serialization.add_safe_globals([_named(written)])
            except (Exception, SystemExit) as error:
                raise ConfigError(
                    f"--allow: {written} is not there ({type(error).__name__}: {error}): name a class as module.Class, "
                    f"of an installed package or of a module in this folder"
                ) from error
    finally:
        if is_new:
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
    """Return what a load would refuse to unpickle, and the names of quantized tensors.

    Raises: CorruptError, NotFoundError, FormatVersionError, OSError.
    """
    saved = SavedState.read(folder)
    refused = [str(error) for error in _refusals(saved) if saved.manifest or isinstance(error, NotAllowed)]
    return refused, [name for name in saved.index.tensors if saved.dtype(name) in QUANTIZED]


def _refusals(saved: SavedState) -> Iterator[CorruptError]:
    plain = {name for name, _ in paths_in(saved.values)} if saved.manifest else set()
    for name in saved.index.objects.keys() - plain:
        if error := refusal_of(saved.pickle_of(name, verify=False), f"the value {name}"):
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
    """Answer a request: what is refused, and what is quantized."""

    def found(request: dict[str, Any]) -> Iterator[dict[str, list[str]]]:
        allow(request["allow"])
        refused, quantized = check(Path(request["folder"]))
        yield {"refused": sorted(refused), "quantized": quantized}

    return reports.serve(arguments, found)
