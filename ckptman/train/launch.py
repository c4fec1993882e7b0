"""This process among the others: rank and world size from its launcher, the mesh, and the report of its errors."""

from __future__ import annotations

import re
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd

from ckptman.errors import CkptmanError, ConfigError


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among all, and among those of its node. `alone`: no launcher, so the process is the whole world."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    alone: bool = True


def launch_from_environment(environ: Mapping[str, str]) -> Launch:
    """Read the environment of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE) or srun (SLURM_PROCID, ...).

    Raises ConfigError if it is incomplete: a rank that believes to be alone would train a second model.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        local_rank = _number(environ, "LOCAL_RANK", default=rank if world_size == 1 else None)
        local_size = _number(environ, "LOCAL_WORLD_SIZE", default=1 if world_size == 1 else None)
        tasks = _number(environ, "SLURM_STEP_NUM_TASKS", default=1)
        if tasks > 1 and (world_size == 1 or environ.get("GROUP_WORLD_SIZE") == "1"):
            raise ConfigError(
                f"srun started {tasks} tasks, and this one takes itself for a world of its own, of {world_size}: each "
                f"would train its own model. Give torchrun --nnodes, --node-rank and a common --rdzv-endpoint (and not "
                f"--standalone), or leave torchrun and RANK out and let srun start every rank. If they are meant to be "
                f"{tasks} runs, unset SLURM_STEP_NUM_TASKS"
            )
    elif _number(environ, "SLURM_STEP_NUM_TASKS", default=1) > 1:  # srun sets it, the batch script does not have it
        rank, world_size = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")
        local_rank = _number(environ, "SLURM_LOCALID")
        counts = re.findall(r"(?:^|,)(\d+)", environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))  # such as "4(x2),3"
        local_size = min(map(int, counts), default=1)
    else:
        return Launch()
    if not (0 <= rank < world_size and 0 <= local_rank < world_size and 1 <= local_size <= world_size):
        raise ConfigError(
            f"the launcher says rank {rank} of {world_size}, local rank {local_rank} of {local_size}, which cannot be; "
            f"start the run with torchrun or srun, and do not set these variables by hand"
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environ:
            raise ConfigError(
                f"{name} is not set, and {world_size} processes cannot find each other without it; start the run with "
                f"torchrun, or export MASTER_ADDR (the first host) and MASTER_PORT (a free port) before srun"
            )
    return Launch(rank, world_size, local_rank, local_size, alone=False)


def mesh_shape(world_size: int, local_world_sizes: Sequence[int], shard_ranks: int | None = None) -> tuple[int, int]:
    """Return (replicate, shard) for hybrid sharding: neighbours shard, and the rest replicates.

    `shard_ranks` neighbours shard, a node's worth unless given; where that does not divide the world, or would let a
    shard group straddle two nodes, it is the largest number below that does neither.
    """
    node = gcd(world_size, *local_world_sizes)
    wanted = min(shard_ranks or node, world_size)
    shard = max(
        size for size in range(1, wanted + 1) if world_size % size == 0 and (node % size == 0 or size % node == 0)
    )
    return world_size // shard, shard


class ErrorReport:
    """Prints the error that ends this rank, once: a `CkptmanError` as one message per node, others with a traceback."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._told: BaseException | None = None

    def tell(self, error: BaseException) -> int:
        """Print an error, unless it was printed before, and return its exit code."""
        if isinstance(error, SystemExit):
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error, KeyboardInterrupt):  # the interpreter prints it
            return 128 + signal.SIGINT
        if error is not self._told:
            self._told = error
            sys.stderr.write(self._text(error))
            sys.stderr.flush()
        return error.exit_code if isinstance(error, CkptmanError) else 1

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Print an error of the block before it propagates: the code around might wait for other ranks."""
        try:
            yield
        except BaseException as error:
            self.tell(error)
            raise

    def _text(self, error: BaseException) -> str:
        launch = self._launch
        if not isinstance(error, CkptmanError):
            who = f"rank {launch.rank} of {launch.world_size} on {socket.gethostname()}"
            return f"{who} failed:\n{''.join(traceback.format_exception(error))}"
        # All ranks of a node have the same error, except perhaps a rank beyond the number that every node has.
        tells = launch.local_rank == 0 or launch.local_rank >= launch.local_world_size
        return f"error: {error}\n" if tells else ""


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        state = "not set" if text is None else f"{text!r}, not a number"
        raise ConfigError(
            f"the environment variable {name} is {state}; start the run with torchrun (or srun), or unset RANK and "
            f"WORLD_SIZE to run a single process"
        ) from None
