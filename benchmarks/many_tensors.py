"""What a save and a restore cost for each tensor, where tensors are many and small, with plain DCP beside them.

    python benchmarks/many_tensors.py [--tensors 10000] [--rounds 5] [--folder DIR] [--json FILE]

Layers of 16 x 16 with AdamW, fp32, one thread: half of the tensors are state of the optimizer. Once plain, and once as
DTensors of FSDP2 on one rank. Each round is a fresh process that does everything once with ckptman and once with DCP
(`get_state_dict`, `async_save` or `load`, `set_state_dict`), in turns; between the saves only bytes change. Clocks are
around the calls. The folder is in memory by default: what is measured is the work for names, not the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import ckptman

STALL, BEHIND, FIRST, RESTORE = "stall of a save", "behind the training", "first save", "restore"
BARS = {STALL: (5.0, 0.1), BEHIND: (40.0, 0.1), FIRST: (150.0, None), RESTORE: (150.0, 0.25)}
"""Microseconds for each tensor at most, and the share of what DCP takes."""
NAMES = {"_ckptman": "ckptman", "_dcp": "DCP"}
LIMIT_SECONDS = 600
Times = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: dict[str, dict[str, list[float]]] = {}
    for number in range(options.rounds):
        for kind in ("plain", "FSDP2"):
            found = in_fresh_process(measure, kind, options.tensors, options.folder, number)
            for name, seconds in found.items():
                rows.setdefault(kind, {}).setdefault(name, []).append(seconds)
    for kind, table in rows.items():
        print(f"\n{options.tensors:,} small tensors, {kind}; microseconds for each tensor, {options.rounds} rounds")
        print(f"{'':24}{'min':>8}{'median':>8}{'max':>8}{'':4}{'DCP':>8}{'of DCP':>8}   bars")
        for name, (most, share) in BARS.items():
            own, other = table[f"ckptman, {name}"], table.get(f"DCP, {name}", [])
            ratio = statistics.median(a / b for a, b in zip(own, other)) if other else float("nan")
            missed = statistics.median(own) > most or (share is not None and ratio > share)
            print(
                f"{name:24}{min(own):8.1f}{statistics.median(own):8.1f}{max(own):8.1f}{'':4}"
                f"{statistics.median(other) if other else float('nan'):8.1f}{ratio:8.3f}"
                f"   {most:g} us{f', {share:g} of DCP' if share else ''}{': missed' if missed else ''}"
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def in_fresh_process(work: Callable[..., Times], *arguments: object) -> Times:
    """Do `work` in a fork of this process, which has done nothing yet."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=lambda: results.put(work(*arguments)))
    child.start()
    found: Times = results.get(timeout=LIMIT_SECONDS)
    child.join()
    return found


def measure(kind: str, tensors: int, folder: Path, number: int) -> Times:
    """Return microseconds for each tensor."""
    torch.set_num_threads(1)
    logging.disable()
    warnings.simplefilter("ignore")
    home = Path(tempfile.mkdtemp(dir=folder))
    try:
        dist.init_process_group("gloo", store=dist.FileStore(f"{home}/store", 1), rank=0, world_size=1)
        contestants = [_ckptman, _dcp] if number % 2 else [_dcp, _ckptman]
        found: Times = {}
        for each in contestants:
            model, optimizer = _program(kind, tensors)
            count = sum(1 for _ in model.parameters()) + sum(len(held) for held in optimizer.state.values())
            seconds = each(model, optimizer, kind, home / each.__name__)
            found |= {f"{NAMES[each.__name__]}, {name}": 1e6 * took / count for name, took in seconds.items()}
        return found
    finally:
        dist.destroy_process_group()
        shutil.rmtree(home)


def _program(kind: str, tensors: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.ModuleList([nn.Linear(16, 16) for _ in range(tensors // 8)])  # with two moments and a step each
    if kind == "FSDP2":
        for layer in model:
            fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    return model, optimizer


def _ckptman(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str, root: Path) -> Times:
    state = {"model": model, "optimizer": optimizer}
    found: Times = {}
    options: dict[str, Any] = {"save_policy": ckptman.EverySteps(10**9), "deadline": None, "watchdog": None}
    begun = time.perf_counter()
    with ckptman.Checkpointer(root, state, **options) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1)
        checkpointer.wait()
        found[FIRST] = time.perf_counter() - begun
        for step in (2, 3, 4):
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.9
            gc.collect()
            begun = time.perf_counter()
            checkpointer.save(step)
            found[STALL] = time.perf_counter() - begun
            checkpointer.wait()
            found[BEHIND] = time.perf_counter() - begun - found[STALL]
    model, optimizer = _program(kind, _count(state))
    with ckptman.Checkpointer(root, {"model": model, "optimizer": optimizer}, **options) as checkpointer:
        begun = time.perf_counter()
        checkpointer.restore()
        found[RESTORE] = time.perf_counter() - begun
    return found


def _dcp(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str, root: Path) -> Times:
    found: Times = {}
    begun = time.perf_counter()
    for step in (1, 2, 3, 4):
        optimizer.step()
        gc.collect()
        begun = time.perf_counter()
        values, settings = get_state_dict(model, optimizer)
        future: Any = dcp.async_save({"model": values, "optimizer": settings}, checkpoint_id=root / str(step))
        found[STALL] = time.perf_counter() - begun
        future.result()
        found[BEHIND] = time.perf_counter() - begun - found[STALL]
        if step == 1:
            found[FIRST] = time.perf_counter() - begun
    model, optimizer = _program(kind, _count({"model": model}))
    begun = time.perf_counter()
    values, settings = get_state_dict(model, optimizer)
    target = {"model": values, "optimizer": settings}
    dcp.load(target, checkpoint_id=root / "4")
    set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=settings)
    found[RESTORE] = time.perf_counter() - begun
    return found


def _count(state: dict[str, Any]) -> int:
    return 8 * len(state["model"])


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        main()
