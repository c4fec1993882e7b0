"""A training by DeepSpeed's engine: `deepspeed_engine.py --save DIR --steps N`."""

import argparse
import os
import time
from pathlib import Path

import torch

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--save", required=True)
parser.add_argument("--steps", type=int, required=True)
options = parser.parse_args()
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes; gloo does it too

model = torch.nn.Linear(8, 1)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.Adam(model.parameters()),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    },
)
engine.load_checkpoint(options.save)
if engine.global_rank == 0:
    print(f"starts at {engine.global_steps}", flush=True)
while engine.global_steps < options.steps:
    engine.backward(engine(torch.randn(1, 8, dtype=torch.bfloat16)).square().mean())
    engine.step()
    time.sleep(0.2 * Path("slow").exists())
    if engine.global_steps % 25 == 0:
        engine.save_checkpoint(options.save)
