"""Reading byte ranges of a checkpoint into tensors: only what is needed, in parallel, each block checked."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ckptman.engine.loading.checkpoint_reader import ChunkPlace, SavedState
from ckptman.engine.loading.restricted_unpickler import load_plain
from ckptman.engine.state.accelerators import buffer_if_any, give_buffer, on_device, record
from ckptman.engine.state.file_layout import address_of, as_bytes, flat, put, view_of
from ckptman.engine.state.local_shards import is_plain, local_parts
from ckptman.engine.state.program_faults import naming
from ckptman.errors import ConfigError, CorruptError
from ckptman.storage.format.pickle_guard import NotAllowed
from ckptman.storage.io.checked_reader import Wanted
from ckptman.storage.io.checksums import BLOCK_BYTES
from ckptman.storage.io.threads import ALIGN_BYTES, SCRATCH, Scratch

PIECE_BYTES = 4 * 1024 * 1024
"""What cannot go straight to its place passes through memory of this size."""
_STRAIGHT_BYTES = 256 * 1024
"""Less than this is copied on the host rather than waited for."""
CONTAINERS_BYTES = 32 * 1024 * 1024
"""Containers that only torch can read are in memory as a whole: so much of them at a time, or one that is larger."""
NOT_USABLE = "What was to be filled is not usable: it may hold old and new bytes. Load something else into it"


@dataclass(frozen=True)
class Fill:
    """A part of a saved chunk that is wanted: it begins at `start` in the chunk, and `target` has its shape."""

    name: str
    chunk: ChunkPlace
    start: tuple[int, ...]
    target: torch.Tensor


def fills_for_all(saved: SavedState, targets: Mapping[str, torch.Tensor]) -> list[Fill]:
    """Return what this rank needs to fill tensors of its own, whole or sharded in any way. Raises: CorruptError."""
    saved.check(targets)  # together: that is faster
    fills: list[Fill] = []
    for name, target in targets.items():
        with naming(name):
            parts = local_parts(target, name)
        for box, memory in parts:
            if not box.is_empty:
                fills += fills_for_box(saved, name, box.offsets, memory)
    return fills


def fills_for_box(saved: SavedState, name: str, offsets: Sequence[int], memory: torch.Tensor) -> Iterator[Fill]:
    """Yield what is needed to fill `memory`, the box of a tensor that begins at `offsets`. Raises: CorruptError."""
    sizes = tuple(memory.shape)
    found = 0
    for chunk in saved.chunks_in(name, offsets, sizes):
        region, start = memory, []
        for dim, (low, size) in enumerate(zip(offsets, sizes)):
            begin = max(low, chunk.offsets[dim])
            end = min(low + size, chunk.offsets[dim] + chunk.sizes[dim])
            if end - begin != size:
                region = region.narrow(dim, begin - low, end - begin)
            start.append(begin - chunk.offsets[dim])
        found += region.numel()
        yield Fill(name, chunk, tuple(start), region)
    if found != memory.numel():
        raise CorruptError(
            f"{saved.folder}: of {memory.numel()} elements of {name} that are needed, {found} were saved: restore an "
            f"older checkpoint"
        )


def read_fills(saved: SavedState, fills: Iterable[Fill], *, verify: bool = True) -> int:
    """Read into the targets. Returns the bytes that were read from storage.

    Raises: CorruptError; the targets may be partly filled then, and its text says so.
    """
    uploads = Uploads()
    wanted: list[Wanted] = []
    special: list[list[Fill]] = []
    room = 0
    for fill in fills:
        if not fill.target.numel():
            continue
        dtype = saved.dtype(fill.name)
        # A tensor of a class of its own has memory that only its own copy_ knows.
        payload = saved.payload(fill.name, fill.chunk) if is_plain(fill.target) else None
        if payload is not None:
            wanted += Cut(fill, dtype, uploads.to(fill.target.device)).from_payload(payload)
            continue
        if fill.chunk.bytes > room:
            special.append([])
            room = CONTAINERS_BYTES
        special[-1].append(fill)
        room -= fill.chunk.bytes
    try:
        try:
            read_bytes = saved.read_wanted(wanted, verify=verify, scratch=uploads.scratch)
        finally:
            uploads.finish()
        for batch in special:
            containers = [memoryview(bytearray(fill.chunk.bytes)) for fill in batch]
            whole = [
                Wanted(fill.chunk.file, fill.chunk.offset, len(container), into=container, label=fill.name)
                for fill, container in zip(batch, containers)
            ]
            read_bytes += saved.read_wanted(whole, verify=verify)
            for fill, container in zip(batch, containers):
                _unpack(saved, fill, container)
    except CorruptError as error:
        raise CorruptError(f"{error}. {NOT_USABLE}") from error
    return read_bytes


class Cut:
    """Cuts a part of a chunk into ranges of bytes: straight into the target where both are one run of bytes."""

    def __init__(self, fill: Fill, dtype: torch.dtype, put: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        self._fill, self._dtype, self._put = fill, dtype, put
        self._strides = [math.prod(fill.chunk.sizes[dim + 1 :]) for dim in range(len(fill.chunk.sizes))]

    def from_payload(self, payload: int) -> Iterator[Wanted]:
        """Yield the ranges, given where the chunk's payload begins in its file."""
        first = sum(start * stride for start, stride in zip(self._fill.start, self._strides))
        yield from self._cut(self._fill.target, payload + first * self._dtype.itemsize)

    def _cut(self, target: torch.Tensor, offset: int) -> Iterator[Wanted]:
        item, fill = self._dtype.itemsize, self._fill
        span = item * (1 + sum((size - 1) * stride for size, stride in zip(target.shape, self._strides)))
        in_one_run = span == item * target.numel()
        if in_one_run and target.dtype == self._dtype and _is_flat_memory(target):
            if target.device.type == "cpu":
                yield Wanted(fill.chunk.file, offset, span, into=view_of(target), label=fill.name)
            else:
                deliver = partial(self._deliver_bytes, as_bytes(target))
                yield Wanted(fill.chunk.file, offset, span, deliver=deliver, label=fill.name)
            return
        dim = next((dim for dim, size in enumerate(target.shape) if size > 1), None)
        step = self._strides[dim] * item if dim is not None else 0
        if dim is None or (span <= PIECE_BYTES and (in_one_run or not self._has_wide_gaps(target, dim))):
            deliver = partial(self._deliver, target)
            yield Wanted(fill.chunk.file, offset, span, deliver=deliver, whole=True, label=fill.name)
            return
        rows = 1 if self._has_wide_gaps(target, dim) else max(1, PIECE_BYTES // step)
        for row in range(0, target.shape[dim], rows):
            yield from self._cut(target.narrow(dim, row, min(rows, target.shape[dim] - row)), offset + row * step)

    def _has_wide_gaps(self, target: torch.Tensor, dim: int) -> bool:
        """Return whether what lies between two rows along `dim` is better left unread."""
        inner = 1 + sum((size - 1) * stride for size, stride in zip(target.shape[dim + 1 :], self._strides[dim + 1 :]))
        return (self._strides[dim] - inner) * self._dtype.itemsize >= BLOCK_BYTES

    def _deliver_bytes(self, target: torch.Tensor, data: memoryview, position: int) -> None:
        self._put(target[position : position + len(data)], flat(data))

    def _deliver(self, target: torch.Tensor, data: memoryview, _: int) -> None:
        # Plain DCP puts elements anywhere; torch takes it that they begin at a multiple of their size.
        if address_of(data) % self._dtype.itemsize:
            data = memoryview(bytearray(data))
        self._put(target, flat(data, self._dtype).as_strided(target.shape, self._strides))


def _is_flat_memory(tensor: torch.Tensor) -> bool:
    """Return whether the bytes in a tensor's memory are its elements one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _unpack(saved: SavedState, fill: Fill, container: memoryview) -> None:
    where = f"{saved.folder / fill.chunk.file}: {fill.name}"
    try:
        tensor = load_plain(io.BytesIO(container), where)
    except NotAllowed as error:
        if saved.manifest is None:
            raise
        # Digests say that it is what was saved: an older checkpoint would be no better.
        raise ConfigError(f"{error}. {NOT_USABLE}") from error
    check_container(tensor, fill.chunk, where)
    tensor = part_wanted(tensor, fill)
    if fill.target.is_quantized and _scales(fill.target) != _scales(tensor):
        raise ConfigError(
            f"{where} was saved with other scales than those of the tensor that it is loaded into: quantize that one "
            f"as the one that was saved. {NOT_USABLE}"
        )
    with naming(fill.name):
        put(fill.target, tensor)


def check_container(loaded: object, chunk: ChunkPlace, where: str) -> None:
    """Check that what a container held is the chunk. Raises: CorruptError."""
    if not isinstance(loaded, torch.Tensor) or tuple(loaded.shape) != chunk.sizes:
        raise CorruptError(f"{where} is not a tensor of the shape {list(chunk.sizes)}, as it should be")


def part_wanted(tensor: torch.Tensor, fill: Fill) -> torch.Tensor:
    """Return what of a whole chunk `fill` wants."""
    for dim, (start, size) in enumerate(zip(fill.start, fill.target.shape)):
        if size != tensor.shape[dim]:  # not every class of tensors can be cut
            tensor = tensor.narrow(dim, start, size)
    return tensor


def _scales(tensor: torch.Tensor) -> tuple[object, ...]:
    if not tensor.is_quantized or tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return (tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point()) if tensor.is_quantized else ()
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return tensor.qscheme(), scales.tolist(), zeros.tolist(), tensor.q_per_channel_axis()


class PinnedScratch(Scratch):
    """Scratch that is pinned, as far as that is to be had: a device copies straight from it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[int, torch.Tensor] = {}
        """By address of what was borrowed of each."""

    def borrow(self, size_bytes: int) -> memoryview:
        with on_device(self._device):
            buffer = buffer_if_any(size_bytes) if size_bytes else None
        inside = -buffer.data_ptr() % ALIGN_BYTES if buffer is not None else 0
        if buffer is None or len(buffer) < inside + size_bytes:
            return super().borrow(size_bytes)
        self._buffers[buffer.data_ptr() + inside] = buffer
        return view_of(buffer)[inside : inside + size_bytes]

    def give_back(self, buffer: memoryview) -> None:
        pinned = self._buffers.pop(address_of(buffer), None) if len(buffer) else None
        if pinned is None:
            super().give_back(buffer)
        else:
            give_buffer(pinned)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of a tensor is pinned scratch of this."""
        address = tensor.data_ptr()
        return any(0 <= address - low < len(buffer) for low, buffer in list(self._buffers.items()))


class Uploader:
    """Copies host memory into tensors of one device, from several threads at a time, on a stream of its own."""

    def __init__(self, device: torch.device, scratch: PinnedScratch) -> None:
        self._device, self._module, self._scratch = device, torch.get_device_module(device), scratch
        self._stream = self._module.Stream(device)
        # What was done to the targets before must be over before they are written.
        self._stream.wait_stream(self._module.current_stream(device))

    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source`, whose memory may change when this returns. It is there after `finish`."""
        size = math.prod(source.shape) * source.dtype.itemsize
        with on_device(self._device):
            if size >= _STRAIGHT_BYTES and self._scratch.holds(source):  # others read their pieces meanwhile
                with self._module.stream(self._stream):
                    put(target, source, non_blocking=True)
                    event = record(self._stream)
                event.synchronize()
                return
            if (buffer := buffer_if_any(size)) is None:
                with self._module.stream(self._stream):
                    put(target, source)
                return
            pinned = buffer[:size].view(source.dtype).view(source.shape)
            put(pinned, source)
            with self._module.stream(self._stream):
                put(target, pinned, non_blocking=True)
                event = record(self._stream)
            give_buffer(buffer, event)

    def finish(self) -> None:
        """Wait until everything is on the device."""
        self._stream.synchronize()


class Uploads:
    """Puts host memory into tensors wherever they are; those of a device are there after `finish`."""

    def __init__(self) -> None:
        self._uploaders: dict[torch.device, Uploader] = {}
        self.scratch: Scratch = SCRATCH
        """Memory to read into before `put`: pinned if a device is involved."""

    def to(self, device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """Return what puts memory into a tensor of a device, from any thread. The memory may change when it returns."""
        if device.type == "cpu":
            return put
        if not isinstance(self.scratch, PinnedScratch):
            self.scratch = PinnedScratch(device)
        if device not in self._uploaders:
            self._uploaders[device] = Uploader(device, self.scratch)
        return self._uploaders[device].put

    def finish(self) -> None:
        """Wait until everything is where it belongs."""
        for uploader in self._uploaders.values():
            uploader.finish()
