"""Processes, devices and sharding: the process group, the 2-D mesh, and the model laid out on it."""

from __future__ import annotations

import os
import platform
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ckptman.errors import ConfigError
from ckptman.train.config import ModelConfig, ParallelConfig
from ckptman.train.launch import Launch, mesh_shape
from ckptman.train.model import Decoder, init_weights
from ckptman.train.rendezvous import meet


@dataclass(frozen=True, slots=True)
class World:
    """Rank and world size, the device of this process, and the mesh ("replicate", "shard") of all ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def leads(self) -> bool:
        return self.rank == 0


def choose_device(config: ParallelConfig, launch: Launch) -> torch.device:
    """Return the device of this process. ROCm devices are called "cuda" too. Raises ConfigError."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and not gpus:
        raise ConfigError('parallel.device is "cuda" and torch sees no GPU here; use "auto" or "cpu", or ask for GPUs')
    if config.device == "cpu" or not gpus:
        return torch.device("cpu")
    # With one GPU bound to each task every process sees its own as number 0.
    return torch.device("cuda", launch.local_rank if gpus > 1 else 0)


@contextmanager
def process_group(
    config: ParallelConfig, launch: Launch, device: torch.device, timeout_seconds: float
) -> Iterator[World]:
    """Make the default process group and the mesh, for the duration of the block. Every rank calls it.

    NCCL (RCCL on ROCm) between GPUs and gloo between CPUs, both at once on GPUs: ckptman talks over gloo. A process
    without a launcher is a world of one, with a group of one, so that nothing after this needs to ask.

    Raises: ConfigError, RankLostError (see `meet`).
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    store = dist.HashStore() if launch.alone else meet(launch, os.environ, timeout_seconds)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)
    try:
        ranks: list[tuple[int, str, str]] = [(0, "", "")] * launch.world_size
        dist.all_gather_object(ranks, (launch.local_world_size, device.type, platform.node()))
        if len({kind for _, kind, _ in ranks}) > 1:
            lacking = sorted({host for _, kind, host in ranks if kind == "cpu"})
            raise ConfigError(
                f"some ranks have a GPU and those on {', '.join(lacking)} see none; leave those nodes out"
            )
        # Nodes may differ in size, and all ranks must build the same mesh.
        shape = mesh_shape(launch.world_size, [size for size, _, _ in ranks], config.shard_ranks)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        yield World(launch.rank, launch.world_size, device, mesh)
    finally:
        dist.destroy_process_group()


def build_model(config: ModelConfig, parallel: ParallelConfig, vocab_size: int, seed: int, world: World) -> Decoder:
    """Return the sharded, initialised model: FP32 parameters and reductions, computing in `compute_dtype`.

    Each block is gathered by itself, the rest with the root. No rank ever holds the whole model.
    """
    with torch.device("meta"):
        model = Decoder(config, vocab_size, recompute=parallel.activation_checkpointing)
    dtype = torch.bfloat16 if parallel.compute_dtype == "bfloat16" else torch.float32
    # Inputs are not cast: the rotary table stays in float32, and activations have the type of the embedding anyway.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=world.mesh, mp_policy=precision)
    fully_shard(model, mesh=world.mesh, mp_policy=precision)
    model.to_empty(device=world.device)
    init_weights(model, seed)
    return model


def seed_generators(seed: int, rank: int) -> None:
    """Seed the generators of this rank, unlike those of other ranks: dropout has to differ. Weights do not use them."""
    own = seed + 1_000_003 * rank
    random.seed(own)
    numpy.random.seed(own % 2**32)
    torch.manual_seed(own)


def make_deterministic() -> None:
    """Let torch choose deterministic kernels, so that a resumed run repeats the same bits on the same world size.

    The number of CPU threads is part of the arithmetic too: OMP_NUM_THREADS has to stay the same.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it is first used
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
