"""Whether the containers of a checkpoint hold what the chunk table says, as torch itself sees it.

A load goes by the table: dtype, shape, and where the elements begin. Whoever opens a container by `torch.load` goes by
what is written around them. Both are to be the same tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from ckptman._torch_compat import read_zip
from ckptman.engine.loading.checkpoint_reader import ChunkPlace
from ckptman.engine.state.file_layout import Frame, frame_of
from ckptman.errors import CorruptError
from ckptman.storage.format.torch_zip import PartOfFile
from ckptman.tools.verify.chunk_files import File, Saved, Tensors, rows_of

SAMPLE_BYTES = 4 * 1024 * 1024
"""Of each dtype, one container of no more than this is loaded by `torch.load` as a whole."""


class Containers:
    """Checks containers, in one process."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._sampled: set[torch.dtype] = set()

    def begin_in(self, saved: Saved, first: int, last: int, *, with_empty: bool) -> list[int]:
        """Return the numbers of the chunks that begin in rows [first, last); `with_empty`: also of those without
        elements."""
        chunks = self._tensors.chunks(saved)
        begins, _ = rows_of(chunks)
        full = chunks.sizes.all(axis=1)
        chosen = (begins >= first) & (begins < last) & full
        found: list[int] = np.flatnonzero(chosen | ~full if with_empty else chosen).tolist()
        return found

    def problems(self, saved: Saved, rows: Iterable[int]) -> Iterator[str]:
        """Yield what is wrong with the containers of these chunks."""
        chunks = self._tensors.chunks(saved)
        for row in rows:
            try:
                why = self._problem(saved, row, self._tensors.chunk(chunks, row))
            except (CorruptError, OSError) as error:
                why = str(error).partition("\n")[0]
            if why:
                yield f"{saved.name}: {why}"

    def _problem(self, saved: Saved, row: int, chunk: ChunkPlace) -> str | None:
        payload, file = self._tensors.payload(saved, chunk), self._tensors.file(chunk.file)
        if payload is None:
            return None  # what only torch can read is loaded by torch where it is compared
        sample = chunk.bytes <= SAMPLE_BYTES and saved.dtype not in self._sampled
        frame = frame_if_any(saved.dtype, chunk.sizes)
        if frame is None or not _is_around(file, chunk, payload, frame):
            found = _place_by_torch(file.part(chunk.offset, chunk.bytes), frame)
            if found is None:
                sample = True
            elif chunk.offset + found != payload:
                return (
                    f"chunk {row} has its payload at byte {payload} of {chunk.file} by the chunk table, and at byte "
                    f"{chunk.offset + found} by its container"
                )
        if not sample:
            return None
        self._sampled.add(saved.dtype)
        loaded = self._tensors.torch_load(saved, chunk).reshape(-1)
        if not np.array_equal(loaded, np.frombuffer(file.bytes(payload, loaded.nbytes), np.uint8)):
            return f"chunk {row}: torch.load finds other values in its container in {chunk.file} than ckptman reads"
        return None


def frame_if_any(dtype: torch.dtype, sizes: tuple[int, ...]) -> Frame | None:
    """Return what `torch.save` writes around such a tensor; None if it is larger than the memory of this machine."""
    try:
        return frame_of(dtype, sizes)
    except (RuntimeError, MemoryError):
        return None


def _is_around(file: File, chunk: ChunkPlace, payload: int, frame: Frame) -> bool:
    """Whether all of a container but its payload is, byte for byte, what `torch.save` of this torch writes."""
    if (payload, chunk.bytes) != (chunk.offset + len(frame.head), frame.size_bytes):
        return False
    tail = payload + frame.payload_bytes
    return file.bytes(chunk.offset, len(frame.head)) == frame.head and file.bytes(tail, len(frame.tail)) == frame.tail


def _place_by_torch(container: PartOfFile, frame: Frame | None) -> int | None:
    """Return where torch's own reader finds the payload in a container; None if it may hold something else.

    Raises: CorruptError (not a container).
    """
    try:
        reader = read_zip(container)
        records = set(reader.get_all_records())
    except (RuntimeError, ValueError) as error:
        raise CorruptError(f"{container.where} is not a container that torch can read") from error
    if not {"data.pkl", "data/0"} <= records or "data/1" in records:
        return None
    if frame is not None and reader.get_record("data.pkl") != frame.described:
        return None
    if "byteorder" in records and reader.get_record("byteorder") != b"little":
        return None
    return int(reader.get_record_offset("data/0"))
