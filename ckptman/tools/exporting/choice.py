"""What of a checkpoint is exported, and under which names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ckptman.engine.loading.checkpoint_reader import SavedState, resolve
from ckptman.errors import ConfigError, plain
from ckptman.storage.format.value_codec import Keys, TensorRef, leaves_in, without
from ckptman.tools.exporting.target import Format

MODEL = "model"
"""The entry of a state that is exported where nothing else is asked for."""
CASTS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What tensors can be cast to, by name."""


@dataclass(frozen=True)
class Item:
    """A tensor to export. `source`: its flat name in the checkpoint; `shape`: global; `dtype`: as saved; `as_dtype`:
    as exported."""

    source: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    as_dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of its elements as exported."""
        return prod(self.shape) * self.as_dtype.itemsize


@dataclass(frozen=True)
class Choice:
    """What to export.

    `tree`: nested as it was saved, from `prefix` of the state on, with each tensor as a `TensorRef`. `items`: its
    tensors. `values`: its plain values by name, not read for safetensors. `renamed`: whether names differ from those of
    the tree.
    """

    tree: Any
    prefix: Keys
    items: list[Item]
    values: dict[str, Any]
    renamed: bool


def choose(
    saved: SavedState,
    only: str | None,
    everything: bool,
    exclude: Sequence[re.Pattern[str]],
    rename: Callable[[str], str],
    dtype: torch.dtype | None,
    format: Format,
) -> Choice:
    """Return the wanted part of a checkpoint: `everything`, the entry `only`, or the model, without names that
    `exclude` finds.

    For plain DCP names begin at the top of the state, for the other formats below the entry.

    Raises: ConfigError (no such entry, two tensors of one name, a dtype that cannot be exported), CorruptError.
    """
    state = saved.tree()
    tree, prefix = _part(saved, state, only, everything)

    def named(path: Keys) -> str:
        return ".".join(map(str, (*prefix, *path) if format == "dcp" or not path else path))

    if exclude:
        tree = without(tree, lambda path: any(pattern.search(named(path)) for pattern in exclude))
    if format != "safetensors":  # which has no place for plain values: then it does not matter if they can be read
        tree = resolve(tree)
    items: list[Item] = []
    values: dict[str, Any] = {}
    seen: dict[str, str] = {}
    renamed = False
    for path, leaf in leaves(tree):
        whole = ".".join(map(str, (*prefix, *path)))
        given = named(path)
        name = rename(given)
        renamed |= name != given
        if not name or name in seen:
            what = f"{seen[name]} and {whole} would both be {name}" if name else f"{whole} would have no name"
            raise ConfigError(f"{what}: choose another --strip or --rename")
        seen[name] = whole
        if isinstance(leaf, TensorRef):
            items.append(_item(saved, leaf.name, name, dtype))
        else:
            values[name] = leaf
    if not items:
        what = plain(".".join(map(str, prefix))) or "the state"
        raise ConfigError(
            f"{saved.folder}: there is no tensor to export in {what}: name another part (--only), or all of it (--all)"
        )
    return Choice(tree, prefix, items, values, renamed)


def excluding(patterns: Sequence[str]) -> list[re.Pattern[str]]:
    """Compile the patterns of --exclude. Raises: ConfigError."""
    found = []
    for pattern in patterns:
        try:
            found.append(re.compile(pattern))
        except re.error as error:
            raise ConfigError(f"--exclude {pattern} is not a regular expression of Python's re: {error}") from None
    return found


def leaves(tree: Any) -> Iterator[tuple[Keys, Any]]:
    """Yield the tensors and plain values below a tree, each with its path."""
    return ((path, leaf) for path, leaf in leaves_in(tree) if not isinstance(leaf, dict))


def _part(saved: SavedState, state: dict[str, Any], only: str | None, everything: bool) -> tuple[Any, Keys]:
    if everything:
        return state, ()
    if only is not None:
        found = _entry(state, only, ())
        if found is None:
            raise ConfigError(f"{saved.folder} has no entry {plain(only)!r}: --only takes {_named(state)}")
        return found
    if isinstance(state.get(MODEL), (dict, list)):
        return state[MODEL], (MODEL,)
    # Of torchtitan, and of whoever saves the state dict of a model and nothing else.
    bare = {key: value for key, value in state.items() if isinstance(value, TensorRef)}
    if not bare:
        raise ConfigError(
            f"{saved.folder} has no entry {MODEL!r}: say which is to be exported, --only with {_named(state)}; or --all"
        )
    return bare, ()


def _entry(value: Any, only: str, path: Keys) -> tuple[Any, Keys] | None:
    if isinstance(value, dict):
        for key, each in value.items():
            if str(key) == only:
                return each, (*path, str(key))
        for key, each in value.items():
            if only.startswith(f"{key}.") and (found := _entry(each, only.removeprefix(f"{key}."), (*path, str(key)))):
                return found
    return None


def _named(state: dict[str, Any]) -> str:
    names = sorted(plain(key) for key, value in state.items() if any(True for _ in leaves(value)))
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def _item(saved: SavedState, source: str, name: str, dtype: torch.dtype | None) -> Item:
    record, own = saved.tensor(source), saved.dtype(source)
    if str(own).startswith(("torch.qint", "torch.quint")):
        raise ConfigError(f"{source} is quantized ({record.dtype}), and is not exported: dequantize it before a save")
    saved.check_size(source)
    # Numbers of 8 bits and less mean nothing without their scales: they stay what they are.
    is_cast = dtype is not None and own.is_floating_point and own.itemsize > 1
    return Item(source, name, record.shape, own, dtype if is_cast and dtype is not None else own)
