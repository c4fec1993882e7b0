"""What checkpoints in memory cost and give: `python benchmarks/memory_tier.py`.

Each rank plays a node of its own, so that parts travel over gloo as between nodes, through this machine's loopback. All
that is compared takes turns in the same processes:

- stall: what a save to memory takes from the training thread, over a copy of the same tensors into memory that was
  written before, on one thread;
- exchange: the rate at which parts arrive on peers, digested, over that of the same bytes sent and received by the same
  ranks in the same pieces, which nobody looks at;
- restore: a load from memory, each block checked, over reads of as many bytes of the same files into the same tensors;
- memory: what the checkpoints take on a node, over what is counted for them.

Where `lm-resiliency` is installed, its checkpoints in memory of the same tensors take part in the first two.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor, Shard

BARS = {"stall": (1.15, False), "exchange": (0.8, True), "restore": (0.6, True)}
PIECE_BYTES = 16 * 1024 * 1024
TENSORS = 32


def timed(work: Callable[..., Any], *arguments: Any) -> float:
    dist.barrier()
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def slowest(seconds: float) -> float:
    """The time of the slowest rank."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def stream(size: int, sent: torch.Tensor, received: torch.Tensor) -> None:
    """Send what this rank has to the next one, piece by piece, and receive as much."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for begin in range(0, size, PIECE_BYTES):
        end = begin + PIECE_BYTES
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent[begin:end], (rank + 1) % world),
                dist.P2POp(dist.irecv, received[begin:end], (rank - 1) % world),
            ]
        ):
            work.wait()


def read_raw(path: Path, targets: list[torch.Tensor], threads: int) -> None:
    """Read as many bytes as the targets have, and look at none. To a GPU they go through pinned memory, each thread its
    own."""
    fd = os.open(path, os.O_RDONLY)
    step = 4 * 1024 * 1024
    pieces = []
    for target in targets:
        pieces += target.flatten().view(torch.uint8).split(step)
    offsets = [0]
    for piece in pieces:
        offsets.append(offsets[-1] + len(piece))
    own = threading.local()

    def read(piece: torch.Tensor, offset: int) -> None:
        if not piece.is_cuda:
            os.preadv(fd, [piece.numpy()], offset)
            return
        if not hasattr(own, "buffer"):
            own.buffer, own.stream = torch.zeros(step, dtype=torch.uint8).pin_memory(), torch.cuda.Stream()
        os.preadv(fd, [own.buffer[: len(piece)].numpy()], offset)
        with torch.cuda.stream(own.stream):
            piece.copy_(own.buffer[: len(piece)], non_blocking=True)
        own.stream.synchronize()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, pieces, offsets))
    os.close(fd)


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def warm_like(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Host memory that was written before, pinned where the tensors are on a GPU."""
    return [torch.randn(each.shape).pin_memory() if each.is_cuda else torch.randn(each.shape) for each in tensors]


def rank_main(rank: int, world: int, size: int, rounds: int, folder: str, port: int, device: str, results: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["SLURMD_NODENAME"] = f"node{rank}"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import ckptman
    from ckptman.engine.saving import part_exchange
    from ckptman.policies import EverySteps

    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh(device, (world,))
    rows = size // TENSORS // 4 // 1024
    local = [torch.randn(rows, 1024, device=device) for _ in range(TENSORS)]
    state = {f"w{number}": DTensor.from_local(each, mesh, [Shard(0)]) for number, each in enumerate(local)}
    warm = warm_like(local)
    found: dict[str, list[float]] = {}

    def note(what: str, value: float) -> None:
        found.setdefault(what, []).append(value)

    def copy() -> None:
        for target, source in zip(warm, local):
            target.copy_(source, non_blocking=True)
        settle(device)

    exchanged: list[float] = []
    run = part_exchange.PartExchange.run

    def timed_run(*args: Any) -> None:
        began = time.perf_counter()
        run(*args)
        exchanged.append(time.perf_counter() - began)

    part_exchange.PartExchange.run = timed_run  # type: ignore[method-assign]
    sent, received = torch.empty(size, dtype=torch.uint8).zero_(), torch.empty(size, dtype=torch.uint8).zero_()
    with ckptman.Checkpointer(
        Path(folder) / "root",
        {"weights": state},
        save_policy=EverySteps(10**6),
        memory=ckptman.MemoryTier(EverySteps(1), path=Path(folder) / "memory"),
    ) as checkpointer:
        checkpointer.restore()
        memory = checkpointer._memory
        assert memory is not None

        def save(step: int) -> None:
            checkpointer.step(step)

        for step in range(1, rounds + 3):
            memcpy = slowest(timed(copy))
            seconds = slowest(timed(save, step))
            memory.saves.wait()
            memory.account(checkpointer._timings.memory_saves)
            raw = slowest(timed(stream, size, sent, received))
            exchange = slowest(exchanged[-1]) if exchanged else 0.0
            if step > 2 and exchanged:
                note("stall", seconds / memcpy)
                note("stall, s", seconds)
                note("memcpy, s", memcpy)
                note("exchange", raw / exchange)
                note("exchange, GB/s", size / exchange / 1e9)
                note("raw stream, GB/s", size / raw / 1e9)
        dist.barrier()
        memory.account(checkpointer._timings.memory_saves)
        note("until it counts, s", checkpointer._timings.memory_saves.durable_seconds or 0.0)
        note("memory of a node over a part", memory._node.size_bytes / size)
        path = next(memory._node.folder.glob(f"step-*/__{rank}_0.distcp"))
        for _ in range(rounds):
            for threads in (1, 2, 4):
                note(f"raw read, {threads} threads, s", slowest(timed(read_raw, path, local, threads)))
            raw = min(found[f"raw read, {threads} threads, s"][-1] for threads in (1, 2, 4))
            seconds = slowest(timed(lambda: (checkpointer.restore(), settle(device))))
            assert checkpointer.restored_from
            note("restore", raw / seconds)
            note("restore, s", seconds)
    beside(local, rounds, folder, note)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def beside(local: list[torch.Tensor], rounds: int, folder: str, note: Callable[[str, float], None]) -> None:
    """The same by lm-resiliency, where it is installed."""
    try:
        from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig
    except ImportError:
        return
    config = InMemoryCkptConfig(
        interval=1, replication_jump=1, disk_flush_interval=0, disk_folder=f"{folder}/lm", run_id="bench"
    )
    manager = InMemoryCheckpointManager(config)
    warm = warm_like(local)

    def copy() -> None:
        for target, source in zip(warm, local):
            target.copy_(source, non_blocking=True)
        settle(local[0].device.type)

    for step in range(1, rounds + 3):
        memcpy = slowest(timed(copy))
        began = time.perf_counter()
        seconds = slowest(timed(manager.save_tensors, local, step))
        manager.maybe_wait()
        manager.finalize_replication()
        whole = slowest(time.perf_counter() - began)
        if step > 2:
            note("lm-resiliency: stall", seconds / memcpy)
            note("lm-resiliency: until it counts, s", whole)
    for _ in range(rounds):
        note("lm-resiliency: restore, s", slowest(timed(manager.load_tensors)))
    manager.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of each rank's part")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at", type=Path, default=Path("/dev/shm"), help="a folder in memory")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: all ranks share the first GPU")
    parser.add_argument("--port", type=int, default=29555)
    given = parser.parse_args()
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    folder = tempfile.mkdtemp(prefix="ckptman-bench-", dir=given.at)
    (Path(folder) / "memory").mkdir()
    try:
        size = given.mib * 2**20
        arguments = [
            (rank, given.ranks, size, given.rounds, folder, given.port, given.device, results)
            for rank in range(given.ranks)
        ]
        processes = [context.Process(target=rank_main, args=each) for each in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a rank failed")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{given.ranks} ranks with {given.mib} MiB each, {given.rounds} rounds: min, median, max")
    for what, values in results.get().items():
        low, middle, high = min(values), statistics.median(values), max(values)
        bar, at_least = BARS.get(what, (None, False))
        held = "" if bar is None else "met" if (middle >= bar if at_least else middle <= bar) else "MISSED"
        bound = "" if bar is None else f"at {'least' if at_least else 'most'} {bar:g}: {held}"
        print(f"  {what:36} {low:8.3g} {middle:8.3g} {high:8.3g}  {bound}")


if __name__ == "__main__":
    main()
