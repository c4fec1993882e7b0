"""Proof that a checkpoint loads on a number of ranks: real processes load it, and each compares its shard bit for bit.

`main` runs in a process of its own, because ranks are forked from it. Called by `ckptman verify --world-size`.

What is loaded goes the way of a restore: DTensors, the chunk table, ranges of bytes. What it is compared with does not:
each saved chunk is read from its place in its file, and cut to this rank's rows by the arithmetic in this file.
"""

from __future__ import annotations

import io
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckptman.errors import CkptmanError, CorruptError
from ckptman.sharded.forked import run_forked
from ckptman.sharded.reading import fills_for, read_fills
from ckptman.sharded.saved import SavedState, resolve
from ckptman.sharded.state import refs_in

BATCH_BYTES = 512 * 1024 * 1024
"""A rank holds this much of its shards at a time, and one saved chunk: a checkpoint may be larger than the memory."""
POISON = 0xA5
"""What a tensor is filled with before it is loaded, so that a part nobody wrote is found."""
PROBLEMS_SHOWN = 20


@dataclass(frozen=True)
class Box:
    """A saved chunk: its place in a file in bytes, and in its tensor in elements."""

    file: str
    offset: int
    bytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Saved:
    """A tensor as the checkpoint describes it. `shape` is global."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]


def check(folder: Path, world_size: int, silence_seconds: float = 300.0) -> list[str]:
    """Load a checkpoint with that many processes and compare. Every problem names tensor, rank and world size.

    A rank that dies, or makes no progress for `silence_seconds`, is a problem too. Forks: call it from a process that
    has no other thread. Raises: NotFoundError, CorruptError, FormatVersionError if it cannot be read at all.
    """
    state = SavedState.read(folder)
    tensors = saved_tensors(state)
    return run_forked(partial(check_rank, state, tensors), world_size, silence_seconds)


def saved_tensors(state: SavedState) -> list[Saved]:
    """All tensors, in the order of their place on disk."""
    found = []
    for name, record in state.index.tensors.items():
        boxes = (Box(*chunk[:3], chunk.offsets, chunk.sizes) for chunk in state.all_chunks(name))
        found.append(Saved(name, record.shape, state.dtype(name), tuple(boxes)))
    return sorted(found, key=lambda each: min(((box.file, box.offset) for box in each.boxes), default=("", 0)))


def check_rank(
    state: SavedState, tensors: Sequence[Saved], rank: int, world_size: int, tell: Callable[[str], None]
) -> list[str]:
    """What one rank finds. Called in a forked process, inside a process group. `tell` hears what it is about to do."""
    mesh = init_device_mesh("cpu", (world_size,))
    problems: list[str] = []
    for batch in _batches(tensors, world_size):
        targets = {saved.name: _Target(saved, rank, world_size, mesh) for saved in batch}
        tell(batch[0].name)
        lost = _load(state, targets)
        problems += [f"{name}: {why}" for name, why in lost.items()]
        for name, target in targets.items():
            tell(name)
            if name not in lost:
                problems += [f"{name}: {why}" for why in _compare(state.folder, target)]
    if rank == 0:
        tell("plain values")
        problems += _check_values(state)
    shown = problems[:PROBLEMS_SHOWN]
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    return shown


class _Target:
    """The part of a tensor that a rank loads: `rows`, its share of dim 0 (all of it where there is no dim 0)."""

    def __init__(self, saved: Saved, rank: int, world_size: int, mesh: DeviceMesh) -> None:
        self.saved = saved
        self.tensor: torch.Tensor
        if not saved.shape:
            self.rows = (0, 1)
            self.local = self.tensor = torch.empty((), dtype=saved.dtype)
        else:
            share = -(-saved.shape[0] // world_size)
            self.rows = (min(rank * share, saved.shape[0]), min((rank + 1) * share, saved.shape[0]))
            self.local = torch.empty((self.rows[1] - self.rows[0], *saved.shape[1:]), dtype=saved.dtype)
            self.tensor = DTensor.from_local(
                self.local,
                mesh,
                [Shard(0)],
                run_check=False,
                shape=torch.Size(saved.shape),
                stride=torch.empty(saved.shape, device="meta").stride(),
            )
        _bytes_of(self.local).fill_(POISON)


def _load(state: SavedState, targets: dict[str, _Target]) -> dict[str, str]:
    """Fill the targets as a restore does. The names that failed, with the reason."""
    try:
        _read_into(state, targets)
    except Exception as error:  # noqa: BLE001 whatever it is, it is found again and named below
        if len(targets) == 1:
            return {name: f"it does not load: {_text(error)}" for name in targets}
        found: dict[str, str] = {}
        for name, target in targets.items():
            found |= _load(state, {name: target})
        # Each alone loads: then all of them together do not, and the first stands for them.
        return found or {
            next(iter(targets)): f"together with {len(targets) - 1} others it does not load: {_text(error)}"
        }
    return {}


def _read_into(state: SavedState, targets: dict[str, _Target]) -> None:
    # The digests of all files were checked by `ckptman verify` before; here they would be checked once per rank.
    fills = [each for name, target in targets.items() for each in fills_for(state, name, target.tensor)]
    read_fills(state, fills, verify=False)


def _compare(folder: Path, target: _Target) -> Iterator[str]:
    """How the loaded rows differ from the saved chunks, each read on its own."""
    saved, (first, last) = target.saved, target.rows
    covered = torch.zeros(target.local.shape, dtype=torch.bool)
    for box in saved.boxes:
        begin = box.offsets[0] if saved.shape else 0
        end = begin + box.sizes[0] if saved.shape else 1
        low, high = max(first, begin), min(last, end)
        if low >= high or 0 in box.sizes:
            continue
        chunk = _read_chunk(folder, box)
        if (chunk.dtype, tuple(chunk.shape)) != (saved.dtype, box.sizes):
            yield f"{box.file} holds {chunk.dtype} {list(chunk.shape)} instead of {saved.dtype} {list(box.sizes)}"
            continue
        if not saved.shape:
            here: Any = ...
            there: Any = ...
        else:
            beyond = tuple(slice(at, at + length) for at, length in zip(box.offsets[1:], box.sizes[1:]))
            here = (slice(low - first, high - first), *beyond)
            there = slice(low - begin, high - begin)
        covered[here] = True
        if difference := _difference(target.local[here], chunk[there]):
            yield f"rows {low} to {high - 1} differ from what is in {box.file}: {difference}"
    missing = covered.numel() - int(covered.sum())
    if missing:
        yield f"{missing} of {covered.numel()} elements were never saved"


def _difference(loaded: torch.Tensor, saved: torch.Tensor) -> str:
    # Bytes, not values: NaN equals NaN, and 0.0 is not -0.0.
    mine, theirs = _bytes_of(loaded), _bytes_of(saved)
    if torch.equal(mine, theirs):
        return ""
    wrong = (mine != theirs).reshape(loaded.numel(), -1).any(dim=1)
    return f"{int(wrong.sum())} of {loaded.numel()} elements"


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements, in order: a view where it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _read_chunk(folder: Path, box: Box) -> torch.Tensor:
    with (folder / box.file).open("rb") as file:
        file.seek(box.offset)
        data = file.read(box.bytes)
    chunk = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(chunk, torch.Tensor):
        raise CorruptError(f"{box.file} holds no tensor at byte {box.offset}")
    return chunk


def _check_values(state: SavedState) -> list[str]:
    """Whether the plain values can be read, and refer only to tensors that are there."""
    problems = []
    for name, value in state.values.items():
        try:
            resolve(value)
        except CkptmanError as error:
            problems.append(f"{name}: {error}")
        problems += [
            f"{name}: it refers to the tensor {ref.name}, which was not saved"
            for ref in refs_in(value)
            if ref.name not in state.index.tensors
        ]
    return problems


def _batches(tensors: Iterable[Saved], world_size: int) -> Iterator[list[Saved]]:
    batch: list[Saved] = []
    held_bytes = 0
    for saved in tensors:
        share = torch.Size(saved.shape).numel() * saved.dtype.itemsize // (world_size if saved.shape else 1)
        if batch and held_bytes + share > BATCH_BYTES:
            yield batch
            batch, held_bytes = [], 0
        batch.append(saved)
        held_bytes += share
    if batch:
        yield batch


def _text(error: BaseException) -> str:
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line[:300]}"


def main(arguments: Sequence[str]) -> int:
    """Check FOLDER on world sizes such as `1,2,4`. Prints a JSON object for each, or one with an error."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an exit ends the ranks too
    folder, world_sizes = Path(arguments[0]), [int(each) for each in arguments[1].split(",")]
    for world_size in world_sizes:
        begun = time.monotonic()
        try:
            problems = check(folder, world_size)
        except (CkptmanError, OSError) as error:
            print(json.dumps({"error": str(error)}), flush=True)
            return 1
        found = {"world_size": world_size, "seconds": time.monotonic() - begun, "problems": problems}
        print(json.dumps(found), flush=True)
    return 0
