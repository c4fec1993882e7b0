"""Whether what ranks have as a whole, under one name, is the same on all of them: it is saved once, for all.

Small tensors are digested and compared, once in the life of a process: a counter or an average that each rank keeps for
itself would come back as another rank's, and nobody would know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from ckptman._torch_compat import ShardedTensor
from ckptman.comm.control_group import AllRanks, Channel, failing_as_one
from ckptman.errors import ConfigError
from ckptman.state.file_layout import put, view_of
from ckptman.state.local_shards import describes_shards, is_plain
from ckptman.state.named_state import Snapshot
from ckptman.state.trainable import module_of

SMALL_BYTES = 64 * 1024
"""Larger tensors are not compared."""
TOTAL_BYTES = 16 * 1024 * 1024
"""Nor are more than so many bytes. A tensor counts as `LEAST_BYTES` at least: each costs a copy from its device."""
LEAST_BYTES = 1024
SENDERS = 64
"""So many ranks whose tensors differ send the others their digests, name by name."""
_OF_BATCH_NORM = ("running_mean", "running_var")

Digests = dict[str, int]


def compare_replicas(control: Channel, snapshot: Snapshot, state: Mapping[str, Any]) -> str | None:
    """Compare the small tensors that ranks have as a whole. Every rank calls it, over `control`.

    Returns what to warn of: buffers of modules that differ, as those of batch norm do between the ranks of
    DistributedDataParallel, which takes those of rank 0 itself. Raises on every rank alike: ConfigError, for all else.
    """
    if control.world_size == 1:
        return None
    with failing_as_one(), AllRanks[tuple[str, ...]](control) as ranks:
        strict, buffers = _digests(snapshot, state)
        ranks.mine = tuple(xxh3_128_hexdigest(repr(each).encode()) for each in (strict, buffers))
    if text := _difference(control, strict, [each[0] for each in ranks.all]):
        raise ConfigError(
            f"{text}, and one is saved for all: make it a DTensor, or put it into ckptman.PerRank(...) to save it for "
            f"each rank, or into ckptman.FromRank0(...)"
        )
    if text := _difference(control, buffers, [each[1] for each in ranks.all]):
        return (
            f"{text}: after a restore all ranks have those of the lowest rank. That changes nothing in a module under "
            f"DistributedDataParallel, which takes those of rank 0 itself. In any other, such as an average of the "
            f"weights, broadcast its buffers from rank 0 before you use it"
        )
    return None


def _digests(snapshot: Snapshot, state: Mapping[str, Any]) -> tuple[Digests, Digests]:
    """Return those that have to be the same, and those of buffers."""
    strict: Digests = {}
    buffers: Digests = {}
    left = TOTAL_BYTES
    for name, tensor in sorted(snapshot.tensors.items()):
        if (
            isinstance(tensor, DTensor | ShardedTensor)
            or describes_shards(tensor)
            or not is_plain(tensor)
            or tensor.is_meta
            or snapshot.is_own(name)
        ):
            continue
        if tensor.nbytes > SMALL_BYTES or (left := left - max(tensor.nbytes, LEAST_BYTES)) < 0:
            continue
        is_buffer = name in snapshot.from_lowest and module_of(state[str(snapshot.paths[name][0])]) is not None
        is_buffer = is_buffer or name.endswith(_OF_BATCH_NORM)  # also in a state dict that was handed over
        (buffers if is_buffer else strict)[name] = _digest(tensor)
    return strict, buffers


def _digest(tensor: torch.Tensor) -> int:
    held = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    put(held, tensor.detach())
    return int(xxh3_64_intdigest(view_of(held)))


def _difference(control: Channel, mine: Digests, sent: Sequence[str]) -> str | None:
    """Return which tensors differ between which two ranks; None: no rank has another one than those before it."""
    first_of = {digest: rank for rank, digest in reversed(list(enumerate(sent)))}
    if len(first_of) == 1:
        return None
    # Ranks may have other names, such as those of another stage of a pipeline.
    senders = sorted(first_of.values())[:SENDERS]
    known: dict[str, tuple[int, int]] = {}
    differing: dict[str, tuple[int, int]] = {}
    for rank, digests in enumerate(control.gather(mine if control.rank in senders else {})):
        for name, digest in digests.items():
            first, other = known.setdefault(name, (rank, digest))
            if other != digest:
                differing.setdefault(name, (first, rank))
    if not differing:
        return None
    name, (first, second) = min(differing.items())
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return f"{name}{more} differs between ranks {first} and {second}"
