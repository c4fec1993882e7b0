"""Planning of a save and of a reshard, simulated in one process: no ranks, no tensors, only their plans.

Every rank's part is computed by the functions that a save and a restore call; what ranks do at the same time counts
once, by the slowest of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TypedDict

import torch

from ckptman.engine.saving.index_writer import write_metadata
from ckptman.engine.saving.write_plan import LocalShard, divide, lay_out, make_rows
from ckptman.engine.state.local_shards import Box
from ckptman.storage.format.chunk_table import ChunkTable, assemble, pack, unpack
from ckptman.storage.format.paths import data_name

WORLDS = (256, 1024, 4096)
QUICK_WORLDS = (64, 256)
TENSORS = 1000
COLUMNS = 4096
REPLICAS = 2
READERS_MEASURED = 32
DTYPE = torch.bfloat16


class Planned(TypedDict):
    """One simulated world: seconds of the leader and of one rank, and the bytes of the exchange in all."""

    world: int
    tensors: int
    save_seconds: float
    reshard_seconds: float
    reshard_to: int
    exchange_bytes: int


def measure(quick: bool) -> list[Planned]:
    """Plan a save of 1,000 tensors on each of `WORLDS` ranks and a reshard to about 3/4 as many."""
    return [_simulate(world) for world in (QUICK_WORLDS if quick else WORLDS)]


def _simulate(world: int) -> Planned:
    # Rows that no number of ranks divides.
    tensors = [(f"layers.{number}.weight", 4099 + 7 * number) for number in range(TENSORS)]
    files, rank_seconds = [], 0.0
    for rank in range(world):
        begun = time.perf_counter()
        held = list(_held(tensors, rank, world))
        pieces = sorted(divide(held, rank), key=lambda piece: piece.name)
        order, places, _, _ = lay_out([(DTYPE, piece.sizes) for piece in pieces])
        numbers = {name: number for number, (name, _) in enumerate(tensors)}
        chosen = [pieces[number] for number in order]
        files.append(
            pack(make_rows((numbers[each.name], each.offsets, each.sizes, at) for each, at in zip(chosen, places)))
        )
        rank_seconds = max(rank_seconds, time.perf_counter() - begun)
    begun = time.perf_counter()
    described = [(name, "bfloat16", (rows, COLUMNS)) for name, rows in tensors]
    records, table = assemble(described, [unpack(each) for each in files])
    names = [data_name(rank) for rank in range(world)]
    paths = {name: ("model", name) for name, _ in tensors}
    write_metadata(_Nothing(), records, ChunkTable(records, table), names, {}, paths)  # type: ignore[arg-type]
    save_seconds = rank_seconds + time.perf_counter() - begun

    readers = world * 3000 // 4096
    reader_seconds = []
    for reader in range(0, readers, max(1, readers // READERS_MEASURED)):
        begun = time.perf_counter()
        fresh = ChunkTable(records, table)
        fresh.check([(each, 1 << 60) for each in names])
        for name, rows in tensors:
            low, size = _share(rows, reader, readers)
            fresh.chunks(name).overlapping((low, 0), (size, COLUMNS))
        reader_seconds.append(time.perf_counter() - begun)
    return Planned(
        world=world,
        tensors=TENSORS,
        save_seconds=save_seconds,
        reshard_seconds=max(reader_seconds),
        reshard_to=readers,
        exchange_bytes=sum(map(len, files)),
    )


def _held(tensors: list[tuple[str, int]], rank: int, world: int) -> Iterator[LocalShard]:
    """What a rank holds: rows over half the ranks, and the other half the same."""
    shards = world // REPLICAS
    shard = rank % shards
    holders = tuple(range(shard, world, shards))
    for name, rows in tensors:
        low, size = _share(rows, shard, shards)
        yield LocalShard(name, Box((low, 0), (size, COLUMNS), holders), DTYPE.itemsize)


def _share(rows: int, number: int, parts: int) -> tuple[int, int]:
    """First row and number of rows, as torch.chunk cuts."""
    share = -(-rows // parts)
    low = min(number * share, rows)
    return low, min(share, rows - low)


class _Nothing:
    """A file that takes everything and keeps nothing."""

    def write(self, data: bytes | memoryview) -> int:
        return len(data)


if __name__ == "__main__":
    for planned in measure(quick=False):
        print(planned)
