"""Imported once by the server that ranks are forked from. One thread only: a fork takes no other thread along."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor

import ckptman.checkpointer  # noqa: F401

torch.set_num_threads(1)
