"""What the comparison of replicas costs at the first save, on 2 ranks that hold the same state.

    python benchmarks/replicas.py [--gib 0.5] [--rounds 9] [--many 20000] [--device cpu]

Each round takes, in turn, the comparison alone and a save that blocks until it is durable. The second state has as many
bytes in small tensors.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckptman
from ckptman.engine.comm.control_group import Channel
from ckptman.engine.comm.replicas import compare_replicas
from ckptman.engine.saving.write_plan import plan_save
from ckptman.engine.state.snapshot import snapshot

RANKS = 2
LIMIT_SECONDS = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--many", type=int, default=20_000)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        ranks = [
            context.Process(target=measure, args=(rank, options, folder, results), daemon=True) for rank in range(RANKS)
        ]
        for each in ranks:
            each.start()
        rows = results.get(timeout=LIMIT_SECONDS)
        for each in ranks:
            each.join()
    print(f"{RANKS} ranks with {options.gib:g} GiB each on {options.device}, {options.rounds} rounds")
    print(f"{'':44}{'min':>9}{'median':>9}{'max':>9}")
    for name, values in rows.items():
        print(f"{name:44}{min(values):9.3f}{statistics.median(values):9.3f}{max(values):9.3f}")


def measure(rank: int, options: argparse.Namespace, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    elements = int(options.gib * 2**30) // 4
    rows: dict[str, list[float]] = {}
    for kind, count in (("large tensors", 8), (f"{options.many:,} tensors", options.many)):
        torch.manual_seed(0)
        shape = (max(1, elements // count // 128), 128)
        state = {f"x{number}": torch.randn(shape, device=options.device) for number in range(count)}
        control = Channel(600)
        shot = snapshot(state, rank)
        shared = plan_save(shot, control).plan.shared
        compared: list[float] = []
        saved: list[float] = []
        for _ in range(options.rounds + 1):
            begun = time.perf_counter()
            compare_replicas(control, shot, shared, state)
            compared.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            ckptman.save(state, Path(folder, "x"), overwrite=True)
            saved.append(time.perf_counter() - begun)
            dist.barrier()
        control.close()
        # The first round compares in the save, too, and warms up.
        rows[f"{kind}: compared, seconds"] = compared[1:]
        rows[f"{kind}: saved, seconds"] = saved[1:]
        rows[f"{kind}: compared / saved"] = [one / other for one, other in zip(compared[1:], saved[1:])]
    dist.destroy_process_group()
    if rank == 0:
        results.put(rows)


if __name__ == "__main__":
    main()
