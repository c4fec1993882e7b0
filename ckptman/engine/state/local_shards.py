"""Which part of a tensor a rank holds, and which other ranks hold the very same part.

A part is a box: offsets and sizes in elements of the global tensor. For a DTensor all of it follows from mesh and
placements, so that no rank has to ask another one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate
from torch.nn.parameter import is_lazy
from xxhash import xxh3_64_intdigest

from ckptman._torch_compat import (
    LocalShardsWrapper,
    ShardedTensor,
    is_overlapping,
    local_shape_and_offset,
    local_tensor,
)
from ckptman.errors import ConfigError

QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
"""dtypes whose elements mean something only with the scales of their tensor."""
PLAIN: tuple[type[torch.Tensor], ...] = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Classes of tensors that add nothing to what a tensor is."""

_DESCRIPTION = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""What a tensor that describes its own shards says of them: DCP's `CheckpointableTensor`, from torch 2.14 on."""


@dataclass(frozen=True)
class Box:
    """Offsets and sizes; `holders` are the ranks that hold it, ascending, or None: all that have the tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    holders: tuple[int, ...] | None = None

    @property
    def is_empty(self) -> bool:
        return 0 in self.sizes


@dataclass(frozen=True)
class Shared:
    """A box that other ranks have too, or whose tensor they have on other meshes: it is written once, for all.

    `part`: its number among this rank's local parts. This rank is number `holder` of the `holders` of the box, and its
    mesh number `mesh` of the `meshes` that have a tensor of that name.
    """

    name: str
    box: Box
    part: int
    holder: int
    holders: int
    mesh: int
    meshes: int


def local_parts(tensor: torch.Tensor, name: str = "a tensor") -> list[tuple[Box, torch.Tensor]]:
    """The boxes of a tensor that this rank holds, with their memory, detached. Raises: ConfigError."""
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise ConfigError(
                f"{name} is a sum that was not taken (placements {tensor.placements}): call redistribute() first"
            )
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            return []
        box = _dtensor_box(tuple(tensor.shape), tensor.device_mesh, tensor.placements, tuple(coordinate))
        if isinstance(local := local_tensor(tensor), LocalShardsWrapper):
            return _parts_in_wrapper(tensor, local, box.holders, name)
        local = tensor.to_local().detach()
        if is_plain(local) and tuple(local.shape) != box.sizes:
            raise ConfigError(
                f"{name}: this rank holds {list(local.shape)} of {list(tensor.shape)}, and by its placements "
                f"{tensor.placements} it should be {list(box.sizes)}: shard it as torch.chunk does"
            )
        return [(box, local)]
    if isinstance(tensor, ShardedTensor):
        return [
            (Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes), ()), shard.tensor.detach())
            for shard in tensor.local_shards()
        ]
    if describes_shards(tensor):
        return _described_parts(tensor, name)
    return [(Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor.detach())]


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain memory, all of which this rank has."""
    return type(tensor) in PLAIN and _DESCRIPTION[0] not in tensor.__dict__


def _parts_in_wrapper(
    tensor: DTensor, wrapper: LocalShardsWrapper, holders: tuple[int, ...] | None, name: str
) -> list[tuple[Box, torch.Tensor]]:
    """A DTensor whose part on this rank is several shards, as torchrec has them."""
    found = [
        (Box(tuple(offsets), tuple(shard.shape), holders), shard.detach())
        for offsets, shard in zip(wrapper.local_offsets(), wrapper.local_shards())
    ]
    for _, shard in found:
        if shard.dtype != tensor.dtype:
            raise ConfigError(
                f"{name} says that it is {tensor.dtype}, and its shards are {shard.dtype}: torch's wrapper of several "
                f"shards knows no other dtype. Save and load it by dcp, with StorageWriter and StorageReader"
            )
    return found


def describes_shards(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is the memory of shards of a larger one, and says which: plain tensors may, too."""
    if type(tensor) in PLAIN and _DESCRIPTION[0] not in tensor.__dict__:  # hasattr() is slow to find nothing
        return False
    return all(hasattr(tensor, each) for each in _DESCRIPTION)


def global_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor of which this rank may hold a part."""
    described: Any = tensor
    return tuple(described.global_shape if describes_shards(tensor) else tensor.shape)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return new memory for a tensor, sharded alike. What of it is in no shard is as it was."""
    if not describes_shards(tensor):
        return torch.empty_like(tensor)
    made = tensor.detach().clone()
    for each in _DESCRIPTION:
        setattr(made, each, getattr(tensor, each))
    return made


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a plain tensor as they lie in its memory, from the widest stride on; () where that is
    their own order, or there is none. Sums over them are taken in another order in a transposed tensor."""
    if not is_plain(tensor) or tensor.is_contiguous():
        return ()
    order = tuple(sorted(range(tensor.dim()), key=lambda axis: (-tensor.stride()[axis], axis)))
    return order if tensor.permute(order).is_contiguous() else ()


def empty_in_order(
    shape: Sequence[int], order: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Return a new tensor whose dimensions lie in this order in memory."""
    if len(order) != len(shape):
        return torch.empty(torch.Size(shape), dtype=dtype, device=device)
    places = sorted(range(len(order)), key=lambda place: order[place])
    return torch.empty([shape[axis] for axis in order], dtype=dtype, device=device).permute(places)


def _described_parts(tensor: Any, name: str) -> list[tuple[Box, torch.Tensor]]:
    """The shards that a tensor describes. Which ranks hold the same, it does not say."""
    memory, shape = tensor.detach(), tuple(tensor.global_shape)
    found = []
    parts = (tensor.global_offsets, tensor.local_offsets, tensor.local_sizes)
    if len({*map(len, parts)}) > 1:
        raise ConfigError(
            f"{name} describes its shards by lists of {[*map(len, parts)]} entries: give each as many as it has shards"
        )
    for offsets, starts, sizes in zip(*parts):
        if not (_is_inside(offsets, sizes, shape) and _is_inside(starts, sizes, tuple(memory.shape))):
            raise ConfigError(
                f"{name} describes a shard {list(sizes)} that lies at {list(starts)} of {list(memory.shape)} here, and "
                f"at {list(offsets)} of {list(shape)}: that is outside. Correct its offsets and sizes"
            )
        part = memory[tuple(slice(start, start + size) for start, size in zip(starts, sizes))]
        found.append((Box(tuple(offsets), tuple(sizes), ()), part))
    return found


def _is_inside(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    return len(offsets) == len(sizes) == len(shape) and all(
        0 <= offset <= offset + size <= end for offset, size, end in zip(offsets, sizes, shape)
    )


def layout_of(tensor: torch.Tensor) -> Hashable:
    """Changes where this rank's parts of a tensor would be others, or of another class."""
    if isinstance(tensor, DTensor):
        mesh, local = tensor.device_mesh, local_tensor(tensor)
        parts = map(tuple, local.local_offsets() + local.local_sizes()) if isinstance(local, LocalShardsWrapper) else ()
        return type(tensor), tensor.placements, mesh, tuple(mesh.get_coordinate() or ()), type(local), *parts
    if isinstance(tensor, ShardedTensor):
        shards = [each.metadata for each in tensor.local_shards()]
        return type(tensor), *((tuple(each.shard_offsets), tuple(each.shard_sizes)) for each in shards)
    if describes_shards(tensor):
        return type(tensor), repr([getattr(tensor, each) for each in _DESCRIPTION])
    return type(tensor)


def mesh_of(tensor: torch.Tensor) -> int | None:
    """What identifies the mesh that a tensor is sharded over, on every rank alike; None: it belongs to none."""
    return _identity(tensor.device_mesh) if isinstance(tensor, DTensor) else None


@lru_cache(maxsize=1024)
def _identity(mesh: DeviceMesh) -> int:
    return int(xxh3_64_intdigest(repr(mesh.mesh.tolist()).encode()))


@lru_cache(maxsize=8192)
def _dtensor_box(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...], coordinate: tuple[int, ...]
) -> Box:
    sizes, offsets = local_shape_and_offset(shape, mesh.shape, list(coordinate), placements)
    same = mesh.mesh
    for axis in reversed(range(mesh.ndim)):
        if not isinstance(placements[axis], Replicate):
            same = same.select(axis, coordinate[axis])
    return Box(tuple(offsets), tuple(sizes), tuple(sorted(same.flatten().tolist())))


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is nothing but its dtype, its shape and its bytes."""
    return type(tensor) in PLAIN and tensor.layout == torch.strided and not tensor.is_quantized


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is elements in rows and columns, so that a box of it is a tensor too."""
    return isinstance(tensor, ShardedTensor) or (tensor.layout == torch.strided and not tensor.is_nested)


def refuse_lazy(name: str, tensor: torch.Tensor) -> None:
    """Refuse a parameter that has no shape yet. Raises: ConfigError."""
    if is_lazy(tensor):
        raise ConfigError(
            f"{name} has no shape yet: a lazy module gets it in its first forward pass. Make one before restore() and "
            f"before the first save, such as model(example) under torch.no_grad()"
        )


def refuse_unfillable(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor into which nothing can be loaded. Raises: ConfigError."""
    for _, part in local_parts(tensor, name):
        if is_plain(part) and not part.is_meta and is_overlapping(part):
            raise ConfigError(
                f"{name} is expanded: elements of it share memory, and nothing can be loaded into it. Make it one "
                f"of its own (clone())"
            )
        if part.is_meta:
            raise ConfigError(
                f"{name} is on the meta device, where nothing can be loaded: materialise it first (to_empty())"
            )
