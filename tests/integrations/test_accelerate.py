"""The example with Accelerate is killed at random steps, and computes what the run computed that nobody killed."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ckptman
from ckptman.errors import ConfigError

accelerate = pytest.importorskip("accelerate")
EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_loop.py"
LAST = {1: 45, 2: 24}
"""The last step of the example, by ranks."""


def run(root: Path, ranks: int, stop_after: int | None, how: signal.Signals) -> tuple[dict[int, str], int]:
    """Run the example, and send its ranks a signal after a step. Return the losses by step, and the exit code."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        variables = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
            "WORLD_SIZE": ranks,
            "RANK": rank,
            "LOCAL_RANK": rank,
        }
        environment = os.environ | {name: str(each) for name, each in variables.items() if ranks > 1}
        command = [sys.executable, str(EXAMPLE), str(root)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    losses = {}
    assert processes[0].stdout
    try:
        for line in processes[0].stdout:
            if found := re.match(r"step (\d+): loss (\S+)", line):
                losses[int(found[1])] = found[2]
                if int(found[1]) == stop_after:
                    for each in processes:
                        each.send_signal(how)
        codes = {each.wait(60) for each in processes}
    finally:
        for each in processes:
            each.kill()
            each.communicate()
    assert codes <= {0, 75, -signal.SIGKILL}
    return losses, max(codes, key=abs)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_random_steps(ranks: int, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    whole, code = run(tmp_path / "whole", ranks, None, signal.SIGTERM)
    assert (max(whole), code) == (LAST[ranks], 0)
    losses: dict[int, str] = {}
    for attempt in range(100):
        stop_after = max(losses, default=0) + draw.randrange(1, 8)
        found, code = run(tmp_path / "run", ranks, stop_after, draw.choice([signal.SIGKILL, signal.SIGTERM]))
        assert all(losses.get(step, loss) == loss for step, loss in found.items()), f"attempt {attempt}"
        losses |= found
        if code == 0:
            break
    assert attempt
    assert losses == whole
    last = [sorted((tmp_path / each).glob("step-*"))[-1] for each in ("whole", "run")]
    compared = subprocess.run([sys.executable, "-m", "ckptman", "diff", *last], capture_output=True, text=True)
    assert compared.returncode == 0, compared.stdout + compared.stderr


def test_the_last_batch_is_told_apart(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    inputs = accelerator.prepare(DataLoader(TensorDataset(torch.arange(20.0)), 2, shuffle=True))
    loader = ckptman.ResumableLoader(inputs)
    synchronised = []
    for _ in loader:
        with accelerator.accumulate():
            synchronised.append(accelerator.sync_gradients)
    assert [number for number, each in enumerate(synchronised, 1) if each] == [4, 8, 10]
    assert not accelerator.gradient_state.in_dataloader


@pytest.mark.filterwarnings("ignore")  # of what torch deprecates, and torchdata calls
def test_a_prepared_loader_is_refused_in_the_state_itself(tmp_path: Path) -> None:
    samples = TensorDataset(torch.arange(20.0))
    for config in (None, accelerate.DataLoaderConfiguration(use_stateful_dataloader=True)):
        loader = accelerate.Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(samples))
        refused = pytest.raises(ConfigError, match=r"data is a DataLoaderShard.*put ckptman.ResumableLoader")
        with ckptman.Checkpointer(tmp_path, {"data": loader}) as checkpointer, refused:
            checkpointer.step(1)


def test_another_seed_of_the_order_is_refused() -> None:
    config = accelerate.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1)
    samples = TensorDataset(torch.arange(20.0))
    loaders = []
    for seed in (1, 2):
        config.data_seed = seed
        prepared = accelerate.Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(samples, shuffle=True))
        loaders.append(ckptman.ResumableLoader(prepared))
    next(iter(loaders[0]))
    with pytest.raises(ConfigError, match=r"seeds \[1\], and this one has \[2\]"):
        loaders[1].load_state_dict(loaders[0].state_dict())


def test_an_elastic_sampler_is_not_shared_out_twice() -> None:
    samples = TensorDataset(torch.arange(20.0))
    loader = DataLoader(samples, 2, sampler=ckptman.ElasticSampler(20, rank=0, world_size=2))
    split = accelerate.data_loader.prepare_data_loader(loader, num_processes=2, process_index=0)
    with pytest.raises(ConfigError, match=r"leave it out of Accelerate's prepare\(\)"):
        ckptman.ResumableLoader(split)
