"""Proof that a checkpoint loads on a number of ranks: processes load it, and each compares its shard bit for bit.

`main` runs in a process of its own, because ranks are forked from it. Called by `ckptman verify --world-size`.

What is loaded goes the way of a restore: DTensors on a mesh, the chunk table, ranges of bytes with their digests,
replicas that read once and send each other the rest. It is compared with what another reader finds: see `witness`.

Where the ranks do not fit into memory together, or are too many for this machine, they load in waves: a few processes
take the place of one rank after the other. Then each rank's own part is proved as before. Not proved is what takes all
ranks at once: that so many processes find each other, that their shards are in memory together, and the exchange by
which replicas read a byte only once (in a wave each replica reads all of its part).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ckptman._torch_compat import make_dtensor
from ckptman.engine.comm.control_group import Channel, RankFailed
from ckptman.engine.loading.checkpoint_reader import SavedState, resolve
from ckptman.engine.loading.exchange import read_together
from ckptman.engine.loading.read_tensors import fills_for_all, read_fills
from ckptman.engine.state.local_shards import QUANTIZED
from ckptman.errors import CkptmanError, RankLostError
from ckptman.runtime.host_memory import available_bytes
from ckptman.storage.io.threads import THREADS_ENV, cores, io_threads
from ckptman.tools.verify import reports
from ckptman.tools.verify.pickle_check import allow
from ckptman.tools.verify.rank_processes import Done, Tell, run_forked
from ckptman.tools.verify.reports import LoadReport
from ckptman.tools.verify.saved_tensors import Saved, saved_tensors
from ckptman.tools.verify.witness import Witness, contradictions

BATCH_BYTES = 16 * 1024 * 1024
"""A rank holds this much of its shards at a time, or one shard that is larger: a checkpoint may exceed the memory."""
PROCESS_BYTES = 192 * 1024 * 1024
"""What a rank needs besides its shards: scratch memory of its reads, and pages that it no longer shares."""
TOGETHER = 16
"""The most ranks that are processes of their own at a time, on a machine with no more than half as many cores."""
POISON = 0xA5
"""What a tensor is filled with before it is loaded, so that a part nobody wrote is found."""


@dataclass(frozen=True)
class RankJob:
    """What each rank has to do. `metadata`: what `witness` goes by. `silence_seconds`: how long one step may take."""

    state: SavedState
    metadata: Metadata | None
    batches: list[list[Saved]]
    layout: tuple[int, ...]
    threads: int
    silence_seconds: float


def check(
    folder: Path,
    world_sizes: Sequence[int],
    mesh: Sequence[int] | None = None,
    silence_seconds: float = 300.0,
    done: Done | None = None,
) -> Iterator[LoadReport]:
    """Load a checkpoint on each of these numbers of ranks and compare. Problems name tensor, rank and world size.

    The world size of `mesh` is loaded as that mesh, (S,) or (R, S): R replicas of S shards of rows; all others as
    shards. A rank that dies, or makes no progress for `silence_seconds`, is a problem too. `done` is called about once
    a second with the finished part of a world size, from 0 to 1. Forks: the calling process must have no other thread.

    Raises: NotFoundError, CorruptError, FormatVersionError if it cannot be read at all; ConfigError (no such mesh).
    """
    world_sizes = reports.world_sizes_with(world_sizes, mesh)
    state = SavedState.read(folder)
    state.refuse_transformed()
    tensors = saved_tensors(state)
    left_out = [saved.name for saved in tensors if saved.dtype in QUANTIZED]
    tensors = [saved for saved in tensors if saved.dtype not in QUANTIZED]
    contradicted, unseen, metadata = contradictions(state)
    for world_size in world_sizes:
        begun = time.monotonic()
        layout = reports.layout_for(world_size, mesh)
        found = _check_on(state, metadata, tensors, layout, silence_seconds, done)
        yield replace(
            found,
            problems=reports.shown([*contradicted, *found.problems]),
            left_out=left_out,
            notes=[*unseen, *found.notes],
            seconds=time.monotonic() - begun,
        )


def _largest_whole_bytes(state: SavedState, tensors: Sequence[Saved]) -> int:
    """Return the bytes of the largest container that only torch can read, so that every rank reads it whole; 0 if
    small."""
    small = largest = PROCESS_BYTES // 8
    for saved in tensors:
        for chunk in state.all_chunks(saved.name) if (state.table.chunks(saved.name).bytes > small).any() else ():
            if chunk.bytes > largest and state.payload(saved.name, chunk) is None:
                largest = chunk.bytes
    return largest if largest > small else 0


def processes_for(world_size: int, shard_bytes: int, free_bytes: int, cores: int) -> int:
    """Return how many processes load at a time: as many as ranks, if they fit into memory together."""
    room = int(free_bytes * 0.8) // (shard_bytes + PROCESS_BYTES)
    if world_size <= min(room, max(TOGETHER, 2 * cores)):
        return world_size
    return min(world_size, max(1, min(room, cores)))


def _check_on(
    state: SavedState,
    metadata: Metadata | None,
    tensors: Sequence[Saved],
    layout: tuple[int, ...],
    silence_seconds: float,
    done: Done | None,
) -> LoadReport:
    world_size, free_cores = math.prod(layout), cores()
    batches = list(_batches(tensors, layout[-1]))
    shard_bytes = max((sum(saved.shard_bytes(layout[-1]) for saved in batch) for batch in batches), default=0)
    shard_bytes += 2 * _largest_whole_bytes(state, tensors)
    free_bytes = available_bytes()
    if shard_bytes + PROCESS_BYTES > free_bytes:
        need = f"each rank needs {shard_bytes + PROCESS_BYTES:,} bytes of memory, and {free_bytes:,} are free"
        return LoadReport(world_size, not_tried=f"{need}: take more ranks, or a machine with more memory")
    processes = processes_for(world_size, shard_bytes, free_bytes, free_cores)
    job = RankJob(state, metadata, batches, layout, max(1, free_cores // processes), silence_seconds)
    # Without replicas no rank needs what another one reads: a restore would only compare notes.
    joined = len(layout) > 1 and layout[0] > 1
    work = partial(check_rank, job)
    problems = run_forked(work, world_size, silence_seconds, processes, joined=joined, done=done)
    if processes == world_size:
        return LoadReport(world_size, problems)
    exchange = ", and the exchange between replicas" if len(layout) > 1 else ""
    fit = processes_for(world_size, shard_bytes, free_bytes, world_size) == world_size
    cause = f"as there are {free_cores} cores" if fit else "as more do not fit"
    waves = f"that the ranks fit into memory together{exchange}: they loaded {processes} at a time, {cause}"
    return LoadReport(world_size, problems, notes=[waves])


def check_rank(job: RankJob, rank: int, tell: Tell) -> list[str]:
    """Return what one rank finds. Runs in a forked process, inside a process group if replicas run together."""
    os.environ.setdefault(THREADS_ENV, str(min(io_threads(), job.threads)))  # the ranks share the cores
    # The watching parent is to be the first to lose patience: it knows which ranks are silent.
    channel = Channel(2 * job.silence_seconds + 60) if dist.is_initialized() else None
    ranks = torch.arange(math.prod(job.layout), device="cpu").view(job.layout)
    mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
    witness = Witness(job.state, job.metadata)
    problems: list[str] = []
    most = max((sum(saved.shard_bytes(job.layout[-1]) for saved in batch) for batch in job.batches), default=0)
    arena = _arena(most)
    torch.set_grad_enabled(False)
    for number, batch in enumerate(job.batches):
        targets = _targets(batch, mesh, arena)
        tell(batch[0].name, number / len(job.batches))
        lost = _load(job.state, targets, channel)
        tell(f"{batch[0].name}, loaded", (number + 0.5) / len(job.batches))
        problems += [f"{name}: {why}" for name, why in lost.items() if why]
        problems += witness.problems({name: target for name, target in targets.items() if name not in lost})
    if rank == 0:
        tell("plain values", 1.0)
        for name, value in job.state.values.items():
            try:
                resolve(value)
            except CkptmanError as error:
                problems.append(f"{name}: {error}")
    return reports.shown(problems)


@lru_cache(maxsize=1)
def _arena(size_bytes: int) -> torch.Tensor:
    """Return the memory that one batch after the other is loaded into, by all ranks that a process takes the place of:
    fresh memory is slower by far."""
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")


def _targets(batch: Sequence[Saved], mesh: DeviceMesh, arena: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return tensors as a rank loads them, each with its rows as `torch.chunk` cuts them, filled with `POISON`."""
    placements: tuple[Placement, ...] = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
    number, begin = (mesh.get_coordinate() or [0])[-1], 0
    found: dict[str, torch.Tensor] = {}
    for saved in batch:
        share = saved.shard_rows(mesh.shape[-1])
        rows = min((number + 1) * share, saved.rows) - min(number * share, saved.rows)
        shape: tuple[int, ...] = (rows, *saved.shape[1:])
        if not saved.shape:  # whole on every rank
            rows, shape = 1, ()
        local = arena[begin : begin + rows * saved.row_bytes].fill_(POISON).view(saved.dtype).view(shape)
        begin += saved.shard_bytes(mesh.shape[-1])
        if saved.shape:
            stride = tuple(math.prod(max(size, 1) for size in saved.shape[dim:]) for dim in range(1, 1 + local.dim()))
            local = make_dtensor(local, mesh, placements, torch.Size(saved.shape), stride, saved.dtype)
        found[saved.name] = local
    return found


def _load(state: SavedState, targets: Mapping[str, torch.Tensor], channel: Channel | None) -> dict[str, str]:
    """Fill the targets as a restore does. Return the names that failed, with the reason, "" if another rank gives
    it."""
    try:
        _read_into(state, targets, channel)
    except RankLostError:
        raise
    except Exception as error:  # noqa: BLE001 whatever it is, it is found again and named below
        why = _reason(error, channel)
        if len(targets) == 1:
            return dict.fromkeys(targets, f"it does not load: {why}" if why else "")
        found: dict[str, str] = {}
        for name, target in targets.items():
            found |= _load(state, {name: target}, channel)
        # Each alone loads: then all of them together do not, and the first stands for them.
        first = next(iter(targets))
        return found or {first: f"together with {len(targets) - 1} others it does not load: {why}" if why else ""}
    return {}


def _read_into(state: SavedState, tensors: Mapping[str, torch.Tensor], channel: Channel | None) -> None:
    if channel is not None:
        read_together(channel, state, tensors, verify=True)
    else:
        read_fills(state, fills_for_all(state, tensors))


def _reason(error: Exception, channel: Channel | None) -> str:
    """Return what to say of an error of a read; nothing if it is another rank's."""
    cause: BaseException = error
    if isinstance(error, RankFailed):
        if channel is not None and error.failure.rank != channel.rank:
            return ""
        if error.failure.error is None:
            return error.failure.text.partition("\n")[0][:300]
        cause = error.failure.error
    first_line = str(cause).partition("\n")[0]
    return f"{type(cause).__name__}: {first_line[:300]}"


def _batches(tensors: Iterable[Saved], shards: int) -> Iterator[list[Saved]]:
    """Yield tensors that are loaded together, the same on all ranks."""
    batch: list[Saved] = []
    held_bytes = 0
    for saved in tensors:
        share = saved.shard_bytes(shards)
        if batch and held_bytes + share > BATCH_BYTES:
            yield batch
            batch, held_bytes = [], 0
        batch.append(saved)
        held_bytes += share
    if batch:
        yield batch


def main(arguments: Sequence[str]) -> int:
    """Answer a request: a report for each world size, and how much of it is done."""

    def done(part: float) -> None:
        print(json.dumps({"done": part}), flush=True)

    def answer(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        allow(request.pop("allow"))
        told = done if request.pop("progress") else None
        yield from map(asdict, check(Path(request.pop("folder")), **request, done=told))

    return reports.serve(arguments, answer)
