"""Bytes that ranks really read and wrote, as the kernel counts them, against the bytes that they had to.

Each rank reads its own /proc/self/io around the call. Those counts take in sockets where gloo uses `write` on them, so
what went through TCP is taken off wherever a trial broadcast shows up in the count. Files that are mapped do not count.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import ckptman
from benchmarks.engine.contestants import CKPTMAN, DCP
from benchmarks.engine.section import Plan, Section, last_line, say
from benchmarks.engine.state import State
from benchmarks.engine.team import MeasureError, ranks

ROWS = 1003
TENSORS = 16
TRIAL_BYTES = 4 << 20
_RECEIVED, _ACKED, _TCP_INFO_BYTES = 128, 120, 192

Move = Callable[[State, Path], None]
LIBRARIES: dict[str, tuple[Move, Move]] = {
    CKPTMAN: (ckptman.save, ckptman.load),
    DCP: (
        lambda state, folder: dcp.save(state, checkpoint_id=folder),
        lambda state, folder: dcp.load(state, checkpoint_id=folder),
    ),
}
LAYOUTS: dict[str, tuple[Placement, ...]] = {
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "hsdp": (Replicate(), Shard(0)),
}


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Counter:
    """Bytes of files that this process reads or writes from now on."""

    def __init__(self, sockets_count: tuple[bool, bool]) -> None:
        self._sockets_count = sockets_count
        self._begun = self._now()

    def moved(self) -> tuple[int, int]:
        read, written = self._now()
        return read - self._begun[0], written - self._begun[1]

    def _now(self) -> tuple[int, int]:
        pairs = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        received, sent = _tcp_bytes() if any(self._sockets_count) else (0, 0)
        read_sockets, write_sockets = self._sockets_count
        return int(pairs["rchar"]) - received * read_sockets, int(pairs["wchar"]) - sent * write_sockets


def _tcp_bytes() -> tuple[int, int]:
    """Received and sent over all TCP connections of this process (struct tcp_info)."""
    received = sent = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not str(fd.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(fd.name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            received += struct.unpack_from("Q", info, _RECEIVED)[0]
            sent += struct.unpack_from("Q", info, _ACKED)[0]
    return received, sent


def _do_sockets_count() -> tuple[bool, bool]:
    counter = Counter((False, False))
    dist.broadcast(torch.zeros(TRIAL_BYTES, dtype=torch.uint8), 0)
    dist.barrier()
    found: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(found, counter.moved())
    return max(read for read, _ in found) > TRIAL_BYTES / 2, max(written for _, written in found) > TRIAL_BYTES / 2


def _state(layout: str, replicas: int, total_bytes: int) -> State:
    """Tensors of 1,003 rows, which no world divides, spread over all ranks."""
    world = dist.get_world_size()
    shape = (replicas, world // replicas) if layout == "hsdp" else (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")[-len(shape) :])
    columns = total_bytes // (4 * ROWS * TENSORS)
    axis = 1 if layout == "columns" else 0
    length = (ROWS, columns)[axis]
    part = -(-length // shape[-1])
    number = mesh.get_local_rank("shard")
    own = max(0, min(length, (number + 1) * part) - number * part)
    local = (own, columns) if axis == 0 else (ROWS, own)
    return {
        f"layers.{i}.weight": DTensor.from_local(
            torch.full(local, float(i)),
            mesh,
            LAYOUTS[layout],
            run_check=False,
            shape=torch.Size((ROWS, columns)),
            stride=(columns, 1),
        )
        for i in range(TENSORS)
    }


def _move(
    rank: int, what: str, library: str, layout: str, replicas: int, total_bytes: int, folder: Path
) -> tuple[int, ...]:
    """Save or load on this rank: bytes read, written, and held."""
    save, load = LIBRARIES[library]
    tiny = _state("rows", 1, 64 << 10)
    save(tiny, folder.with_name("tiny"))  # what is imported at the first call is read from files, too
    load(tiny, folder.with_name("tiny"))
    state = _state(layout, replicas, total_bytes)
    sockets_count = _do_sockets_count()
    dist.barrier()
    counter = Counter(sockets_count)
    (save if what == "save" else load)(state, folder)
    read, written = counter.moved()
    dist.barrier()
    if what == "load":
        wrong = [name for i, (name, t) in enumerate(state.items()) if not bool((local_of(t) == float(i)).all())]
        assert not wrong, wrong
    return read, written, sum(local_of(tensor).nbytes for tensor in state.values())


def measure(plan: Plan) -> list[Section]:
    """One section of ratios. Call in a process of its own: it forks ranks."""
    section = Section("bytes", "Bytes moved, against the bytes that had to be", "x")
    total = (32 if plan.quick else 1024) << 20
    for name in LIBRARIES:
        for row, measured in (
            ("read by a rank / owned, saved by 1, loaded by 8, rows", lambda run: _reshard(run, 1, 8, "rows")),
            ("read by a rank / owned, saved by 8, loaded by 3, rows", lambda run: _reshard(run, 8, 3, "rows")),
            ("read by a rank / owned, saved by 1, loaded by 2, columns", lambda run: _reshard(run, 1, 2, "columns")),
            ("read by all / checkpoint, HSDP with 2 replicas", lambda run: _replicas(run, 2)),
            ("read by all / checkpoint, HSDP with 4 replicas", lambda run: _replicas(run, 4)),
        ):
            _try(section, f"{name}, {row}", lambda measured=measured, name=name: measured(_Run(plan, name, total)))  # type: ignore[misc]
        try:
            written, largest = _written(_Run(plan, name, total))
            section.add(f"{name}, written by all / unique, HSDP with 2 replicas", written)
            section.add(f"{name}, largest share / even share, HSDP with 2 replicas", largest)
        except MeasureError as error:
            section.missing[f"{name}, written"] = last_line(str(error))
        say(f"bytes: {name}")
    return [section]


class _Run:
    """Saves and loads of one library in a folder of its own."""

    def __init__(self, plan: Plan, library: str, total_bytes: int) -> None:
        self._library, self._total = library, total_bytes
        self.folder = plan.folder("bytes") / "checkpoint"

    def __call__(self, what: str, world: int, layout: str, replicas: int = 1) -> list[tuple[int, ...]]:
        shutil.rmtree(self.folder.with_name("tiny"), ignore_errors=True)
        return ranks(world, _move, what, self._library, layout, replicas, self._total, self.folder)


def _reshard(run: _Run, saved_by: int, loaded_by: int, layout: str) -> float:
    """Of the rank that reads the most for what it owns."""
    run("save", saved_by, "rows")
    return max(read / held for read, _, held in run("load", loaded_by, layout))


def _replicas(run: _Run, replicas: int) -> float:
    run("save", 2, "rows")
    size = sum(path.stat().st_size for path in run.folder.rglob("*") if path.is_file())
    return sum(read for read, _, _ in run("load", 2 * replicas, "hsdp", replicas)) / size


def _written(run: _Run) -> tuple[float, float]:
    moved = run("save", 4, "hsdp", 2)
    unique = sum(held for _, _, held in moved) / 2
    written = [each for _, each, _ in moved]
    return sum(written) / unique, max(written) * len(written) / sum(written)


def _try(section: Section, row: str, measured: Callable[[], float]) -> None:
    try:
        section.add(row, measured())
    except MeasureError as error:
        section.missing[row] = last_line(str(error))
