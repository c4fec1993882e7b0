"""A second reader of a checkpoint, which shares nothing with a load: an error of one cannot hide itself in the other.

A load by ckptman goes by the index and the chunk table. The witness goes by `.metadata`, torch's own load plan, and
torch's own reader of the containers that `torch.save` writes. It reads little at a time, however large a tensor is.
"""

from __future__ import annotations

import io
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ckptman._torch_compat import local_tensor, read_zip
from ckptman.engine.loading.checkpoint_reader import ChunkPlace, SavedState
from ckptman.engine.loading.restricted_unpickler import load_plain, read_foreign_metadata
from ckptman.engine.state.file_layout import Frame, as_bytes, frame_of
from ckptman.errors import CorruptError
from ckptman.storage.format.paths import METADATA
from ckptman.storage.format.torch_zip import PartOfFile
from ckptman.storage.io.safe_open import open_regular

MOST_CHUNKS = 2**18
"""`.metadata` of more chunks is not read: it takes some KB of memory for each."""
PIECE_BYTES = 256 * 1024
"""What is read and compared at a time: it stays in the cache of the core."""
_OPEN_FILES = 64


class _File:
    """An open file, closed when it is no longer referenced."""

    def __init__(self, path: Path, follow: bool) -> None:
        self.name, self.fd = path.name, open_regular(path, follow=follow)
        weakref.finalize(self, os.close, self.fd)


class Container:
    """A range of a data file that should be a file of `torch.save` with one tensor in it."""

    def __init__(self, file: _File, offset: int, size: int) -> None:
        self._file, self._offset, self._size = file, offset, size
        self._where = f"what begins at byte {offset} of {file.name}"

    def payload(self, dtype: torch.dtype, shape: tuple[int, ...]) -> int | None:
        """Return where torch's own reader finds the elements in the file; None if only `torch.load` can read them.

        Raises: CorruptError (not a container), OSError.
        """
        try:
            reader = read_zip(PartOfFile(self._file.fd, self._offset, self._size))
            records = set(reader.get_all_records())
        except (RuntimeError, ValueError) as error:
            raise CorruptError(f"{self._where} is not a container that torch can read") from error
        if not {"data.pkl", "data/0"} <= records or "data/1" in records:
            return None
        if "byteorder" in records and reader.get_record("byteorder") != b"little":
            return None
        frame = frame_if_any(dtype, shape)
        if frame is not None and reader.get_record("data.pkl") != frame.described:
            return None
        return self._offset + int(reader.get_record_offset("data/0"))

    def load(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor as `torch.load` reads it, contiguous. Raises: CorruptError (another one), OSError."""
        tensor = load_plain(io.BytesIO(self.read(self._offset, self._size).numpy().tobytes()), self._where)
        if not isinstance(tensor, torch.Tensor):
            raise CorruptError(f"{self._where} holds no tensor")
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise CorruptError(f"{self._where} holds {found} instead of {dtype} {list(shape)}")
        return tensor.resolve_conj().resolve_neg().contiguous()

    def elements(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Callable[[int, int], torch.Tensor]:
        """Return a function that returns bytes [begin, begin + size) of the elements. Raises: CorruptError, OSError."""
        payload = self.payload(dtype, shape)
        if payload is not None:
            return lambda begin, size: self.read(payload + begin, size)
        loaded = as_bytes(self.load(dtype, shape))
        return lambda begin, size: loaded[begin : begin + size]

    def read(self, at: int, size: int) -> torch.Tensor:
        """Return bytes of the file. A piece is valid until the next one is read.

        Raises: CorruptError (it ends before), OSError.
        """
        data = (
            _scratch(PIECE_BYTES)[:size] if size <= PIECE_BYTES else torch.empty(size, dtype=torch.uint8, device="cpu")
        )
        view, done = memoryview(data.numpy()), 0  # type: ignore[arg-type]
        while done < size:
            count = os.preadv(self._file.fd, [view[done:]], at + done)
            if not count:
                raise CorruptError(f"{self._file.name} ends at byte {at + done}, within a tensor")
            done += count
        return data


class Witness:
    """Compares loaded tensors with what plain DCP would load. `metadata`: None if it is too large (see `MOST_CHUNKS`):
    then the chunk table says which container holds what."""

    def __init__(self, state: SavedState, metadata: Metadata | None) -> None:
        self._state, self._metadata = state, metadata
        self._open = lru_cache(_OPEN_FILES)(_File)

    def problems(self, loaded: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """Yield how loaded tensors differ from the files. Of a DTensor the local part is compared."""
        for name, tensor in loaded.items():
            try:
                yield from self._differences(name, tensor)
            except (CorruptError, OSError, KeyError, ValueError, RuntimeError) as error:
                yield f"{name}: {str(error).partition(chr(10))[0][:300]}"

    def container(self, file: str, offset: int, size: int) -> Container:
        """Return a container. Raises: CorruptError (not a regular file), OSError."""
        return Container(self._open(self._state.folder / file, self._state.manifest is None), offset, size)

    def misplaced(self, dtype: torch.dtype, chunk: ChunkPlace, payload: int | None) -> str | None:
        """Return why the elements of a chunk are not at byte `payload` of its file, as the chunk table says; None if
        they are, or if only `torch.load` can tell.

        Raises: CorruptError (not a container, or of another tensor), OSError.
        """
        if payload is None or 0 in chunk.sizes:
            return None
        container = self.container(chunk.file, chunk.offset, chunk.bytes)
        found = container.payload(dtype, chunk.sizes)
        if found is None:
            loaded = as_bytes(container.load(dtype, chunk.sizes))
            same = torch.equal(loaded, container.read(payload, len(loaded)))
            return None if same else f"has other elements in its container in {chunk.file} than ckptman reads"
        if found == payload:
            return None
        by_table = f"at byte {payload} of {chunk.file} by the chunk table"
        return f"has its payload {by_table}, and at byte {found} by its container"

    def _differences(self, name: str, tensor: torch.Tensor) -> Iterator[str]:
        metadata = self._metadata or self._state.describe((name,))
        local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        described = metadata.state_dict_metadata.get(name)
        if not isinstance(described, TensorStorageMetadata):
            return  # `contradictions` tells
        found = 0
        for item in create_default_local_load_plan({name: tensor}, metadata).items:
            here = local
            for dim, (begin, size) in enumerate(zip(item.dest_offsets, item.lengths)):
                here = here.narrow(dim, begin, size)
            found += here.numel()
            assert item.storage_index.index is not None
            chunk = described.chunks[item.storage_index.index]
            place: Any = metadata.storage_data[item.storage_index]
            elements = self.container(place.relative_path, place.offset, place.length).elements(
                here.dtype, tuple(chunk.sizes)
            )
            # A rank holds whole rows: of a chunk it reads neither less nor more than some of them.
            first, rows = (item.storage_offsets[0], len(here)) if local.dim() else (0, 1)
            pieces = _pieces(here, first * here.nbytes // rows)
            wrong = sum(_count_wrong(piece, elements(at, piece.nbytes)) for at, piece in pieces)
            if wrong:
                low = chunk.offsets[0] + first if local.dim() else 0
                yield (
                    f"{name}: rows {low} to {low + rows - 1} differ from what is in {place.relative_path}: {wrong} of "
                    f"{here.numel()} elements"
                )
        if found != local.numel():
            yield f"{name}: {METADATA} describes {found} of the {local.numel()} elements that a rank loads"


def contradictions(state: SavedState) -> tuple[list[str], list[str], Metadata | None]:
    """Return how `.metadata`, by which plain DCP loads, contradicts the index of a checkpoint; what of that is not
    proved; and `.metadata`, unless it is too large.

    Raises: CorruptError (it cannot be read), OSError.
    """
    if state.manifest is None:
        return [], [], state.described
    if sum(record.count for record in state.index.tensors.values()) > MOST_CHUNKS:
        return [], [f"that {METADATA}, which plain DCP reads, names the same places: there are too many chunks"], None
    metadata = read_foreign_metadata(state.folder / METADATA)
    try:
        plain = SavedState.by_metadata(state.folder, metadata)  # which checks that chunks fill each tensor
    except CorruptError as error:
        return [str(error)], [], None
    ours, theirs = _described(state), _described(plain)
    problems = [
        f"{name}: {METADATA} describes {theirs.get(name, 'nothing of that name')}, and the index "
        f"{ours.get(name, 'nothing of that name')}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    return problems, [], metadata


def _described(state: SavedState) -> dict[str, str]:
    tensors = {name: f"{each.dtype} {list(each.shape)}" for name, each in state.index.tensors.items()}
    values = {
        name: f"a plain value in {at.file}, bytes {at.offset} to {at.offset + at.bytes}"
        for name, at in state.index.objects.items()
    }
    return {**tensors, **values}


def frame_if_any(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame | None:
    """Return what `torch.save` writes around such a tensor; None if it is larger than the memory of this machine."""
    try:
        return frame_of(dtype, shape)
    except (RuntimeError, MemoryError):
        return None


@lru_cache(maxsize=1)
def _scratch(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _pieces(tensor: torch.Tensor, at: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Cut a tensor, which begins at byte `at` of a file, into pieces that are compared at a time."""
    if tensor.nbytes <= PIECE_BYTES:
        yield at, tensor
        return
    rows = PIECE_BYTES * len(tensor) // tensor.nbytes
    for part in torch.split(tensor, rows) if rows else tensor:
        yield from [(at, part)] if rows else _pieces(part, at)
        at += part.nbytes


def _count_wrong(here: torch.Tensor, there: torch.Tensor) -> int:
    """Return how many elements differ from some bytes, bit for bit: NaN equals NaN, and 0.0 is not -0.0."""
    data = as_bytes(here.contiguous())
    if np.array_equal(data.numpy(), there.numpy()):  # torch.equal takes several times as long
        return 0
    return int((data != there).view(-1, here.dtype.itemsize).any(dim=1).sum())
