"""The container that `torch.save` puts around a tensor: known before a byte of the tensor is copied.

Plain `dcp.load` wants each tensor of a data file to be a file of `torch.save`. Everything in such a file but the
payload depends on dtype and shape alone, so it is made once for each, without the payload, and the payload goes
straight from the tensor's memory to its place in the file.
"""

from __future__ import annotations

import io
import math
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO

import torch

from ckptman.format.torch_zip import data_at, data_start, records

QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
"""dtypes whose elements mean something only with the scales of their tensor."""
_SMALL_BYTES = 64 * 1024


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
    recorder = Recorder()
    with torch.serialization.skip_data():
        torch.save(tensor, recorder)  # type: ignore[arg-type]
    return recorder.frame(payload_bytes)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is nothing but its dtype, its shape and its bytes, so that `frame_of` describes it."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
    )


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


class Recorder(io.RawIOBase):
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
