"""Processes, devices and sharding: the process group, the 2-D mesh, and the model laid out on it."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ckptman._torch_compat import abort_default_group
from ckptman.errors import ConfigError
from ckptman.runtime.outcome import this_node
from ckptman.runtime.watchdog import within
from ckptman.train.config import ModelConfig, ParallelConfig
from ckptman.train.launch import ErrorReport, Launch, mesh_shape
from ckptman.train.model import Decoder, init_weights
from ckptman.train.rendezvous import meet

ABORT_SECONDS = 20.0
"""How long the end of the process groups may take after an error. A collective that other ranks never join has none."""
_FLUSH_SECONDS = 5.0
_BF16_CAPABILITY = (8, 0)
_GPU_IDS = ("uuid", "pci_domain_id", "pci_bus_id", "pci_device_id")


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


class Place(NamedTuple):
    """Where a rank is: what the others have to know before they build anything together."""

    local_world_size: int
    device_type: str
    node: str
    gpu: tuple[str, ...]
    """What tells its GPU from all others of the node; empty: it has none."""


def choose_device(config: ParallelConfig, launch: Launch) -> torch.device:
    """Return the device of this process. ROCm devices are called "cuda" too.

    Raises: ConfigError (no GPU, more ranks than GPUs, a GPU that does not compute in the type that is asked for).
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and not gpus:
        raise ConfigError('parallel.device is "cuda" and torch sees no GPU here; use "auto" or "cpu", or ask for GPUs')
    if config.device == "cpu" or not gpus:
        return torch.device("cpu")
    if max(launch.local_rank + 1, launch.local_world_size) > gpus > 1:
        raise ConfigError(
            f"rank {launch.rank} is number {launch.local_rank} of {launch.local_world_size} on its node, which has "
            f"{gpus} GPUs for them: start one rank per GPU (torchrun --nproc-per-node={gpus}, "
            f"srun --ntasks-per-node={gpus}), or ask for more GPUs"
        )
    # With one GPU bound to each task every process sees its own as number 0.
    device = torch.device("cuda", launch.local_rank if gpus > 1 else 0)
    # torch.cuda.is_bf16_supported() asks the current device, which is not this one yet. AMD's GPUs all have bfloat16.
    needs_check = config.compute_dtype == "bfloat16" and torch.version.hip is None
    if needs_check and torch.cuda.get_device_capability(device) < _BF16_CAPABILITY:
        raise ConfigError(
            f"parallel.compute_dtype: {torch.cuda.get_device_name(device)} does not compute in bfloat16, as GPUs of "
            f'NVIDIA do from A100 on: set it to "float32", or ask for other GPUs'
        )
    return device


@contextmanager
def process_group(
    config: ParallelConfig, launch: Launch, device: torch.device, timeout_seconds: float, errors: ErrorReport
) -> Iterator[World]:
    """Make the default process group and the mesh, for the duration of the block. Every rank calls it.

    NCCL (RCCL on ROCm) between GPUs and gloo between CPUs, both at once on GPUs: ckptman talks over gloo. A process
    without a launcher is a world of one, with a group of one, so that nothing after this needs to ask.

    After an error, which is told first, the groups are aborted: to destroy them in order would wait for collectives
    that other ranks may never join. Where that takes more than `ABORT_SECONDS` the process is ended here.

    Raises: ConfigError, RankLostError (see `meet`).
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    store = dist.HashStore() if launch.alone else meet(launch, os.environ, timeout_seconds)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)
    try:
        places = [Place(0, "", "", ())] * launch.world_size
        own = Place(launch.local_world_size, device.type, this_node(os.environ), _ids_of_gpu(device))
        dist.all_gather_object(places, own)
        check_places(places)
        # Nodes may differ in size, and all ranks must build the same mesh.
        shape = mesh_shape(launch.world_size, [each.local_world_size for each in places], config.shard_ranks)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        yield World(launch.rank, launch.world_size, device, mesh)
    except BaseException as error:
        code = errors.tell(error)
        if not within(ABORT_SECONDS, dist.destroy_process_group if device.type == "cpu" else abort_default_group):
            within(_FLUSH_SECONDS, sys.stdout.flush)
            os._exit(code)
        raise
    dist.destroy_process_group()


def check_places(places: Sequence[Place]) -> None:
    """Refuse ranks that cannot train together. Raises, on every rank alike: ConfigError."""
    if len({each.device_type for each in places}) > 1:
        lacking = sorted({each.node for each in places if each.device_type == "cpu"})
        raise ConfigError(f"some ranks have a GPU and those on {', '.join(lacking)} see none; leave those nodes out")
    first: dict[tuple[str, tuple[str, ...]], int] = {}
    for rank, each in enumerate(places):
        other = first.setdefault((each.node, each.gpu), rank)
        if each.gpu and other != rank:
            raise ConfigError(
                f"ranks {other} and {rank} have the same GPU of {each.node}: start one rank per GPU there, or let each "
                f"task have a GPU of its own (srun --gpus-per-task=1)"
            )


def _ids_of_gpu(device: torch.device) -> tuple[str, ...]:
    if device.type == "cpu":
        return ()
    properties = torch.cuda.get_device_properties(device)
    return tuple(str(getattr(properties, name)) for name in _GPU_IDS if hasattr(properties, name))


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
