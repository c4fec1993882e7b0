"""`diff`: what changed between two checkpoints."""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from ckptman._tracebacks import short_traceback
from ckptman.engine.loading.box_reader import BoundedState
from ckptman.errors import ConfigError
from ckptman.run import checkpoint_at
from ckptman.storage.catalog.reader_lease import reading
from ckptman.storage.format.chunk_table import item_bytes
from ckptman.tools.diff.diff import TensorDiff, diff_tensors
from ckptman.tools.diff.values import ValueDiff, diff_values

KINDS = ("removed", "added", "reshaped", "retyped", "changed")
"""Kinds of differences, in the order in which they are shown."""
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None] | None]]


@dataclass
class Group:
    """Names that begin with the same part: how many tensors and plain values of each kind."""

    tensors: Counter[str] = field(default_factory=Counter)
    values: Counter[str] = field(default_factory=Counter)


@dataclass
class Diff:
    """What differs between two checkpoints A and B.

    Attributes:
        tensors: Each tensor that differs, with its `kind`: "removed" (only in A), "added", "reshaped", "retyped" or
            "changed"; what only one has first, then the largest changes.
        values: Each plain value that differs, `before` (in A) and `after`.
        groups: How many of each kind were compared, by the first part of their names.
        unread: Tensors that are equal by their digests, and were not read.
    """

    tensors: list[TensorDiff] = field(default_factory=list)
    values: list[ValueDiff] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)
    unread: int = 0

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.tensors and not self.values

    def group(self, name: str) -> Group:
        """Return the group of a flat name."""
        return self.groups.setdefault(name.partition(".")[0], Group())


@short_traceback
def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    only: str | Sequence[str] = "*",
    read: bool = False,
) -> Diff:
    """Return what changed from checkpoint `a` to checkpoint `b`. Of a root, its newest checkpoint is meant.

    Args:
        a: A checkpoint, the path of one, or a root.
        b: The one it is compared with.
        only: A pattern of flat names as `fnmatch` has them, such as "model.*.bias", or several.
        read: Read every tensor, also if the digests say that it did not change.

    Returns:
        The differences; `same` if there are none.

    Raises:
        NotFoundError: There is no such checkpoint.
        ConfigError: The patterns match nothing.
        CorruptError: One of them is damaged.
        FormatVersionError: A newer ckptman wrote one of them.
    """
    return compare(checkpoint_at(a), checkpoint_at(b), [only] if isinstance(only, str) else list(only), read)


def compare(
    a: Path, b: Path, patterns: Sequence[str], read: bool, progress: Progress = lambda what, total: nullcontext()
) -> Diff:
    """Compare what has a name that matches one of the patterns. Raises: ConfigError, CorruptError,
    FormatVersionError."""

    def wanted(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    found = Diff()
    with reading(a, what="diff"), reading(b, what="diff"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of dtypes that are experimental wherever they are touched
        before, after = BoundedState.read(a), BoundedState.read(b)
        for each in (before, after) if read else ():
            each.refuse_transformed()
        sizes = {
            name: math.prod(each.shape) * (item_bytes(each.dtype) or 1)
            for name, each in before.index.tensors.items()
            if wanted(name)
        }
        tensors = diff_tensors(before, after, wanted, read_all=read)
        with progress("comparing", sum(sizes.values())) as done:
            for tensor in tensors:
                if done is not None:
                    done(sizes.get(tensor.name, 0))
                found.group(tensor.name).tensors[tensor.kind] += 1
                if tensor.kind != "same":
                    found.tensors.append(tensor)
                elif tensor.difference is None:
                    found.unread += 1
        for value in diff_values(before, after, wanted):
            found.group(value.name).values[value.kind] += 1
            if value.kind != "same":
                found.values.append(value)
    if not found.groups and list(patterns) != ["*"]:
        raise ConfigError(f"only={', '.join(patterns)} matches nothing in {a} or {b}: `ckptman show` lists the names")
    found.tensors.sort(key=_weight)
    return found


def _weight(tensor: TensorDiff) -> tuple[int, float, str]:
    """What only one has or what changed its form first, then the largest changes. What cannot be measured counts as
    large."""
    found = tensor.difference
    relative = found.relative if found is not None and found.nan[0] == found.nan[1] else None
    return KINDS.index(tensor.kind), -math.inf if relative is None else -relative, tensor.name
