"""Reading a checkpoint, or a part of it, as nested dicts on the CPU, with no state to fill and in one process."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckptman._tracebacks import short_traceback
from ckptman.engine.loading.allowed_mismatches import matches, matches_any, told
from ckptman.engine.loading.checkpoint_reader import SavedState, read_to_load, resolve
from ckptman.engine.loading.read_tensors import check_container, fills_for_all, read_fills
from ckptman.engine.loading.restricted_unpickler import load_plain
from ckptman.engine.state.local_shards import QUANTIZED
from ckptman.engine.state.named_state import refs_in, replace_refs
from ckptman.errors import ConfigError, CorruptError, plain
from ckptman.run import at_newest, meant_by
from ckptman.storage.catalog.reader_lease import reading
from ckptman.storage.format.value_codec import Keys, leaves_in, without


@short_traceback
def read(
    path: str | os.PathLike[str], only: str | Sequence[str] | None = None, *, verify: bool = True
) -> dict[str, Any]:
    """Read the tensors and values of a checkpoint, without a model or anything else to fill: what `torch.load` is for.

        weights = ckptman.read("runs/italia-9b/checkpoints", only="model.*")["model"]

    One process reads by itself. Only the bytes that are asked for are read, and each tensor is in memory once, whole
    and on the CPU, however it was sharded.

    Args:
        path: a checkpoint of ckptman, of `dcp.save` or of torchtitan; or a root, and then its newest checkpoint.
        only: a pattern of flat names as `fnmatch` has them, or several: "model", "optimizer.state.*.exp_avg". It names
            an entry and all that is under it, as in `restore(missing=)`. None: everything.
        verify: check every block that is read against its digest. What others wrote has no digests.

    Returns:
        What was saved by name, nested as it was, with tensors and plain values. In a list of which some entries are
        not wanted, None takes their place.

    Raises:
        NotFoundError: there is no checkpoint at `path`, or it was deleted.
        ConfigError: a pattern matches nothing.
        CorruptError: the bytes are not what was saved, or hold what only the program that saved it can load.
        FormatVersionError: a newer ckptman wrote it.
    """
    return at_newest(partial(meant_by, path), partial(_read, only=only, verify=verify))


def _read(folder: Path, *, only: str | Sequence[str] | None, verify: bool) -> dict[str, Any]:
    with reading(folder, what="read"):
        saved = read_to_load(folder)
        tree = saved.tree(verify=verify)
        if only is not None:
            tree = _chosen(tree, [only] if isinstance(only, str) else list(only), folder)
        tensors = _read_tensors(saved, [ref.name for ref in refs_in(tree)], verify)
        found: dict[str, Any] = replace_refs(resolve(tree), lambda ref: tensors[ref.name])
        return found


def _chosen(tree: dict[str, Any], patterns: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the part of a state that the patterns name. Raises: ConfigError where one of them names nothing."""
    names = [".".join(map(str, path)) for path, _ in leaves_in(tree)]
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            there = ", ".join(map(plain, told(names))) or "nothing"
            raise ConfigError(f"only={pattern!r} matches nothing in {folder}, which holds {there}")

    def is_excluded(path: Keys) -> bool:
        return not matches_any(patterns, ".".join(map(str, path)))

    chosen: dict[str, Any] = without(tree, is_excluded)
    return chosen


def _read_tensors(saved: SavedState, names: Sequence[str], verify: bool) -> dict[str, torch.Tensor]:
    """Return tensors by their flat names. Raises: CorruptError, OSError."""
    saved.check(names)
    tensors: dict[str, torch.Tensor] = {}
    targets: dict[str, torch.Tensor] = {}
    for name in names:
        saved.check_size(name)
        dtype = saved.dtype(name)
        if dtype in QUANTIZED:
            tensors[name] = _quantized(saved, name, verify)
        else:
            targets[name] = torch.empty(saved.tensor(name).shape, dtype=dtype, device="cpu")
    try:
        read_fills(saved, fills_for_all(saved, targets), verify=verify)
    except CorruptError as error:
        # What it says besides is for those who have a model that is half filled now.
        raise error.__cause__ if isinstance(error.__cause__, CorruptError) else error from None
    return tensors | targets


def _quantized(saved: SavedState, name: str, verify: bool) -> torch.Tensor:
    """Return a quantized tensor, which is saved whole, with its scales. Raises: CorruptError, OSError."""
    (chunk,) = saved.all_chunks(name)
    data = saved.read_range(chunk.file, chunk.offset, chunk.bytes, name, verify=verify)
    where = f"{saved.folder / chunk.file}: {name}"
    tensor = load_plain(io.BytesIO(data), where)
    check_container(tensor, chunk, where)
    assert isinstance(tensor, torch.Tensor)
    return tensor
