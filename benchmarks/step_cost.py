"""What `Checkpointer.step` costs on a step that does not save, on 4 ranks.

    python benchmarks/step_cost.py [--ranks 4] [--steps 300] [--json FILE]

Each round does one idle "training step", then either `Checkpointer.step` or the bare exchange that it contains (one
asynchronous all-reduce of six integers over gloo, launched a step earlier and collected now), in turn. `own` is what
the step costs beyond that exchange: the difference of the two medians, in wall time and in CPU time of the thread.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ckptman
from ckptman.engine.comm.control_group import Channel, Contribution, Meeting

IDLE_SECONDS = 0.004
LIMIT_SECONDS = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        ranks = [
            context.Process(target=measure, args=(rank, options.ranks, options.steps, folder, results), daemon=True)
            for rank in range(options.ranks)
        ]
        for each in ranks:
            each.start()
        rows = results.get(timeout=LIMIT_SECONDS)
        for each in ranks:
            each.join()
    print(f"{options.ranks} ranks, {options.steps} steps of each kind, rank 0, microseconds")
    print(f"{'':34}{'min':>8}{'median':>8}{'max':>9}")
    for name, values in rows.items():
        print(f"{name:34}{min(values):8.1f}{statistics.median(values):8.1f}{max(values):9.1f}")
    own = {
        kind: statistics.median(rows[f"Checkpointer.step, {kind}"]) - statistics.median(rows[f"exchange alone, {kind}"])
        for kind in ("wall", "CPU")
    }
    print(f"own cost beyond the exchange: {own['wall']:.1f} wall, {own['CPU']:.1f} CPU (bar: 50)")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "own": own}, indent=1))


def _seven() -> Contribution:
    return Contribution(maxima=(0,) * 7)


def measure(rank: int, world: int, steps: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    model = nn.Linear(64, 64)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "rng": ckptman.RNGState()}
    # At least ten minutes, so that no save falls into the measurement however slow the machine is.
    policy = ckptman.InitTimeInterval(factor=4, min_seconds=600) | ckptman.OnStop() | ckptman.BeforeDeadline()
    rows: dict[str, list[float]] = {
        f"{what}, {kind}": [] for what in ("Checkpointer.step", "exchange alone") for kind in ("wall", "CPU")
    }
    with (
        ckptman.SignalHandler() as signals,
        ckptman.Checkpointer(
            f"{folder}/run", state, save_policy=policy, signals=signals, deadline=time.time() + 86_400
        ) as checkpointer,
    ):
        checkpointer.restore()
        bare = Meeting(Channel(60), "step()")
        bare.begin(_seven)
        for step in range(1, steps + 1):
            for what in ("Checkpointer.step", "exchange alone"):
                time.sleep(IDLE_SECONDS)
                dist.barrier()  # as the collectives of a training step do: all ranks come here at about the same time
                time.sleep(IDLE_SECONDS)
                wall, cpu = time.perf_counter(), time.thread_time()
                if what == "Checkpointer.step":
                    assert checkpointer.step(step, {"loss": 1.0}) is None
                else:
                    bare.end()
                    bare.begin(_seven)
                if step > 20:
                    rows[f"{what}, wall"].append(1e6 * (time.perf_counter() - wall))
                    rows[f"{what}, CPU"].append(1e6 * (time.thread_time() - cpu))
        bare.end()
    if rank == 0:
        results.put(rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
