"""Imported once by the server that processes are forked from. One thread only: a fork takes no other thread along."""

import os
import pkgutil
from contextlib import suppress
from importlib import import_module

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._dynamo  # at the first step of an optimizer
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.run  # torchrun
import torch.distributed.tensor

import ckptman

FRAMEWORKS = (
    "accelerate",
    "lightning",
    "lightning.pytorch.loops",
    "torchdata.stateful_dataloader",
    "transformers.trainer",
)
for each in FRAMEWORKS:
    with suppress(ImportError):
        import_module(each)
LATER = ("ckptman.integrations.", "ckptman._moved")
"""Modules whose import is that of another framework, or a warning."""
for module in pkgutil.walk_packages(ckptman.__path__, "ckptman."):
    if not module.name.startswith(LATER) and not module.name.endswith("__main__"):
        import_module(module.name)
torch.set_num_threads(1)
FIRST_SEED = 67280421310721
"""With what torch begins in a new process: imports have drawn from its generator."""
torch.manual_seed(FIRST_SEED)
