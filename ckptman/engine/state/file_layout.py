"""The layout of a data file: laid out first, filled from the tensors' own memory or from a staged copy.

A data file is containers one after the other: large payloads first, on pages, so that they can go to storage without
another copy; then small ones; then what has to be pickled, plain values above all.

A container is what `torch.save` puts around a tensor, as plain `dcp.load` wants each tensor to be a file of its own.
Everything in it but the payload depends on dtype and shape alone: it is made once for each, before a byte of a tensor
is copied, and the payload goes straight from the tensor's memory to its place in the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import math
import zipfile
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, BinaryIO

import torch

from ckptman.engine.state.accelerators import buffer_if_any, give_buffer, on_device, record
from ckptman.storage.format.torch_zip import data_at, data_start, records
from ckptman.storage.io.threads import ALIGN_BYTES
from ckptman.storage.io.writer_process import Shared

LARGE_BYTES = 1024 * 1024
"""Payloads of this size and more start on a page, and tensors of this size are cut so that replicas can share them."""
SMALL_ALIGN_BYTES = 64
_SMALL_BYTES = 64 * 1024
_MOST_BESIDES_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Frame:
    """The bytes of a container before and after its payload, `payload_bytes` long.

    `described`: the pickle in it that says what the payload means.
    """

    head: bytes
    tail: bytes
    payload_bytes: int
    described: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.head) + self.payload_bytes + len(self.tail)


@lru_cache(maxsize=16384)
def frame_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    """Return the frame of a contiguous tensor: `torch.load` reads its bytes with the payload put in between."""
    payload_bytes = dtype.itemsize * math.prod(shape)
    # Never written to, so it takes addresses and no pages. On the CPU whatever the default device is, and not filled,
    # as torch.empty is where deterministic algorithms are asked for.
    storage = torch.UntypedStorage(payload_bytes, device="cpu")  # type: ignore[no-untyped-call]
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage).view(shape)
    recorder = WriteRecorder()
    with torch.serialization.skip_data():
        torch.save(tensor, recorder)  # type: ignore[arg-type]
    return recorder.frame(payload_bytes)


def payload_of(container: BinaryIO, dtype: torch.dtype, shape: tuple[int, ...]) -> int | None:
    """Return where the payload of a contiguous tensor begins in a container that somebody else wrote.

    None where the container holds anything but exactly that tensor: then only `torch.load` can tell what it means.
    """
    try:
        names = {info.orig_filename.partition("/")[2]: info for info in records(container)}
        payload = names["data/0"]
        described, order = _small(container, names["data.pkl"]), b"little"
        if "byteorder" in names:
            order = _small(container, names["byteorder"])
        ours = frame_of(dtype, shape)
        if (
            described != ours.described
            or order != b"little"
            or payload.compress_type != zipfile.ZIP_STORED
            or payload.file_size != ours.payload_bytes
            or "data/1" in names
        ):
            return None
        start = data_at(container, payload)
        # A damaged header may point behind the payload, and even behind the container.
        return start if start + ours.payload_bytes <= container.seek(0, io.SEEK_END) else None
    except (KeyError, ValueError, OSError, OverflowError, RuntimeError):  # it is not as torch writes it
        return None


def _small(container: BinaryIO, info: zipfile.ZipInfo) -> bytes:
    """A record that torch writes as it is and that is never large."""
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > _SMALL_BYTES:
        raise ValueError(f"{info.filename} is not what torch.save writes")
    container.seek(data_at(container, info))
    return container.read(info.file_size)


class WriteRecorder(io.RawIOBase):
    """A file that remembers what was written where, and has no room for payloads: those are left out."""

    def __init__(self) -> None:
        self._written: dict[int, bytes] = {}
        self._position = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence in (io.SEEK_SET, io.SEEK_CUR)
        self._position = offset + (self._position if whence == io.SEEK_CUR else 0)
        return self._position

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self._written[self._position] = bytes(data)
        self._position += len(data)
        return len(data)

    @property
    def literals(self) -> list[tuple[int, bytes]]:
        """What was written, in the order of the places."""
        return sorted(self._written.items())

    @property
    def size_bytes(self) -> int:
        """Where the last of it ends."""
        return max((place + len(data) for place, data in self._written.items()), default=0)

    def holes(self) -> list[tuple[int, int]]:
        """Return place and bytes of each payload that was left out."""
        found, end = [], 0
        for place, data in self.literals:
            if place > end:
                found.append((end, place - end))
            end = place + len(data)
        return found

    def frame(self, payload_bytes: int) -> Frame:
        head, tail, end = bytearray(), bytearray(), 0
        for position, data in self.literals:
            if position > end:
                assert not tail
                assert position == end + payload_bytes
                tail += data
            elif tail:
                tail += data
            else:
                assert position == end
                head += data
            end = position + len(data)
        # The first record is the pickle, and is written in one piece.
        return Frame(bytes(head), bytes(tail), payload_bytes, self._written[data_start(head)])


_CPU = torch.device("cpu")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class PlacedBytes:
    """Where a container lies in its file. `payload`: where its payload begins; -1: only torch.load can tell."""

    offset: int
    bytes: int
    payload: int = -1


@dataclass
class Layout:
    """What lies where in a file. `literals`: bytes that are known, by their place."""

    end: int = 0
    literals: list[tuple[int, bytes]] = field(default_factory=list)

    def add_tensor(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> PlacedBytes:
        """Make room for a contiguous tensor."""
        frame = frame_of(dtype, sizes)
        align = ALIGN_BYTES if frame.payload_bytes >= LARGE_BYTES else SMALL_ALIGN_BYTES
        payload = _up(self.end + len(frame.head), align)
        offset = payload - len(frame.head)
        self.literals.append((offset, frame.head))
        self.literals.append((payload + frame.payload_bytes, frame.tail))
        self.end = offset + frame.size_bytes
        return PlacedBytes(offset, frame.size_bytes, payload)

    def add_bytes(self, data: bytes) -> PlacedBytes:
        """Make room for bytes that are known."""
        offset = _up(self.end, SMALL_ALIGN_BYTES)
        self.literals.append((offset, data))
        self.end = offset + len(data)
        return PlacedBytes(offset, len(data))

    def page_end(self) -> int:
        """Return the end of the last page that something lies in."""
        return _up(self.end, ALIGN_BYTES)


def in_order(sizes: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[int]:
    """Return the order in which tensors of these dtypes and shapes are laid out: large ones first."""
    return sorted(range(len(sizes)), key=lambda i: sizes[i][0].itemsize * math.prod(sizes[i][1]) < LARGE_BYTES)


class Image:
    """A file as it will be, composed piece by piece: what `ckptman.storage.io.file_writer` writes.

    Made of bytes and of tensors by their places; what is between them is zero. Bytes that lie in `memory`, which
    begins where the file does, are handed out without a copy; `fd` is its descriptor, where it can be shared.
    """

    def __init__(
        self,
        parts: Iterable[tuple[int, bytes | memoryview | torch.Tensor]],
        memory: memoryview | None = None,
        fd: int | None = None,
    ) -> None:
        sized = ((place, part, _bytes_of(part)) for place, part in parts)
        self._parts = sorted((each for each in sized if each[2]), key=lambda each: each[0])
        self._places = [place for place, _, _ in self._parts]
        self._memory, self._fd = memory if memory is not None else memoryview(b""), fd
        for device in {part.device for _, part, _ in self._parts if isinstance(part, torch.Tensor)} - {_CPU}:
            # What the caller's stream still does to them has to be over before other threads read them.
            torch.accelerator.synchronize(device)
        ends = [place + size for place, _, size in self._parts]
        self.size_bytes = _up(max([len(self._memory), *ends]), ALIGN_BYTES)

    def shared(self) -> Shared | None:
        """Return the same for another process; None where its memory cannot be shared, or much of it is not in there:
        what is handed over besides is copied several times."""
        begin = len(self._memory)
        if self._fd is None or self.size_bytes - begin > _MOST_BESIDES_BYTES:
            return None
        return Shared(self._fd, begin, bytes(self.view(begin, memoryview(bytearray(self.size_bytes - begin)))))

    def view(self, offset: int, scratch: memoryview) -> memoryview:
        """Return the bytes from `offset` on, as many as `scratch` has room for."""
        end = offset + len(scratch)
        if end <= len(self._memory):
            return self._memory[offset:end]
        known = max(len(self._memory) - offset, 0)
        scratch[:known] = self._memory[offset : offset + known]
        filled = offset + known
        first = max(bisect_right(self._places, offset) - 1, 0)
        for place, part, size in self._parts[first:]:
            if place >= end:
                break
            low, high = max(place, filled), min(place + size, end)
            if low >= high:
                continue
            _clear(scratch[filled - offset : low - offset])
            filled = high
            out = scratch[low - offset : high - offset]
            if isinstance(part, torch.Tensor):
                copy_to_host(part, (low - place) // part.dtype.itemsize, flat(out, part.dtype))
            else:
                out[:] = memoryview(part)[low - place : high - place]
        _clear(scratch[filled - offset :])
        return scratch


def copy_to_host(tensor: torch.Tensor, start: int, out: torch.Tensor) -> None:
    """As `copy_range`, from a device by way of pinned memory. In any thread; complete when it returns."""
    if tensor.device.type == "cpu":
        copy_range(tensor, start, out)
        return
    module = torch.get_device_module(tensor.device)
    with on_device(tensor.device):
        if not hasattr(module, "Stream") or (buffer := buffer_if_any(out.nbytes)) is None:
            copy_range(tensor, start, out)
            return
        pinned = buffer[: out.nbytes].view(out.dtype)
        copy_range(tensor, start, pinned, non_blocking=True)
        record(module.current_stream(tensor.device)).synchronize()
        as_bytes(out).copy_(buffer[: out.nbytes])
        give_buffer(buffer)


def copy_range(tensor: torch.Tensor, start: int, out: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy elements of a tensor, in row-major order from number `start` on, into a flat one, and nothing else."""
    count = out.numel()
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        item = tensor.dtype.itemsize
        as_bytes(out).copy_(as_bytes(tensor)[start * item : (start + count) * item], non_blocking=non_blocking)
        return
    if tensor.dim() < 2:
        put(out, tensor.reshape(-1)[start : start + count], non_blocking=non_blocking)
        return
    row = math.prod(tensor.shape[1:])
    done = 0
    while done < count:
        number, inside = divmod(start + done, row)
        whole = (count - done) // row if inside == 0 else 0
        if whole:
            size = whole * row
            target = out[done : done + size].view(whole, *tensor.shape[1:])
            put(target, tensor[number : number + whole], non_blocking=non_blocking)
        else:
            size = min(row - inside, count - done)
            copy_range(tensor[number], inside, out[done : done + size], non_blocking=non_blocking)
        done += size


def put(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy, also between dtypes, also for dtypes that can be stored and not copied, and on any thread."""
    if non_blocking and source.device.type != "cpu":
        # A lazy conjugation would be made up for on the host, before a copy that is not waited for has arrived.
        source = source.resolve_conj().resolve_neg()
    # Whether tensors may be changed that were made in inference mode is for each thread to say.
    with torch.inference_mode() if target.is_inference() else contextlib.nullcontext():
        try:
            target.copy_(source, non_blocking=non_blocking)
        except NotImplementedError:
            if target.dtype != source.dtype or target.dtype.itemsize not in _INTEGERS:
                raise
            integers = _INTEGERS[target.dtype.itemsize]
            target.view(integers).copy_(source.view(integers), non_blocking=non_blocking)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as flat bytes: there are dtypes that can be stored and not copied."""
    # A single element is contiguous whatever its strides are, and flattened it would keep them.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def flat(memory: memoryview, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Memory as a flat tensor, not copied."""
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


def view_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU as flat, writable bytes. The tensor must outlive it."""
    size = tensor.numel() * tensor.dtype.itemsize
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")


def address_of(memory: memoryview) -> int:
    """Return where writable memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


_PLAIN = (int, float, str, bool, type(None))
_SHORT = 64
"""The most bits of a number, characters of a text, or parts of a tuple, of which the pickle is kept."""


def pickled(value: Any) -> bytes:
    """Return what `torch.save` makes of a value, for readers other than ckptman. The same few come again and again."""
    parts = value if type(value) is tuple else (value,)
    if len(parts) <= _SHORT and all(map(_is_short, parts)):
        return _pickled_plain(type(value).__name__, repr(value), value)
    return _pickled(value)


def _is_short(value: Any) -> bool:
    if type(value) is str:
        return len(value) <= _SHORT
    return type(value) in _PLAIN and (type(value) is not int or value.bit_length() <= _SHORT)


@lru_cache(maxsize=4096)
def _pickled_plain(kind: str, text: str, value: Any) -> bytes:
    # 1, 1.0 and True are equal, and so are 0.0 and -0.0: kind and text keep them apart.
    return _pickled(value)


def _pickled(value: Any) -> bytes:
    # Of a view, torch.save writes all that lies in its storage.
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        value = value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _clear(memory: memoryview) -> None:
    if memory:
        ctypes.memset(address_of(memory), 0, len(memory))


def _bytes_of(part: bytes | memoryview | torch.Tensor) -> int:
    return part.numel() * part.dtype.itemsize if isinstance(part, torch.Tensor) else len(part)


def _up(number: int, align: int) -> int:
    return -(-number // align) * align
