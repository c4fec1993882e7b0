"""Rendezvous of the ranks of a run, with one clear error for each way it fails, on every rank that can be reached."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ckptman.errors import CkptmanError, ConfigError, RankLostError
from ckptman.train.launch import Launch

Store = Any
"""torch.distributed.Store, which torch does not tell type checkers of."""
LONGEST_SECONDS = 600.0
"""Nobody waits longer for a node, whatever the timeout of collectives is."""
_LOOK_SECONDS = 0.1
_SPARE_SECONDS = 5.0
_NAMED = 16


def meet(launch: Launch, environ: Mapping[str, str], timeout_seconds: float) -> Store:
    """Wait until all ranks of `launch` are there, and return their common store. Every rank calls it.

    Raises: ConfigError (the port is in use; ranks that were told of different worlds, or that have the same number),
    RankLostError (rank 0 cannot be reached, or ranks are missing, which are named).
    """
    seconds = min(timeout_seconds, LONGEST_SECONDS)
    store = _connect(launch, environ, seconds)
    try:
        _check_in(dist.PrefixStore("ckptman/meeting", store), launch, seconds)  # type: ignore[attr-defined]
    except RuntimeError as error:  # torch's errors have no closer class in common
        if isinstance(error, CkptmanError):
            raise
        first_line = str(error).strip().partition("\n")[0]
        raise RankLostError(f"the store at {_where(environ)} is gone: {first_line}") from error
    return store


def _connect(launch: Launch, environ: Mapping[str, str], seconds: float) -> Store:
    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"MASTER_PORT is {port!r}, not the number of a port: take a free one from 1024 to 65535")
    of_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own process keeps the store
    leads = launch.rank == 0 and not of_agent
    timeout = timedelta(seconds=seconds)
    try:
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=leads, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        if leads and "EADDRINUSE" in str(error):
            raise ConfigError(
                f"MASTER_PORT {port} is in use on {socket.gethostname()}: another job of this node has it. Take one "
                f"that depends on the job, such as MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))"
            ) from error
        raise RankLostError(
            f"rank {launch.rank} on {socket.gethostname()} reached nobody at {_where(environ)} in {seconds:,.0f} s. "
            f"Has rank 0 started, is it on that host, does every node know that name, is the port open between them?"
        ) from error
    if of_agent:
        restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"/worker/attempt_{restarts}", store)  # type: ignore[attr-defined]
    return store


def _check_in(store: Store, launch: Launch, seconds: float) -> None:
    """Register this rank, and wait for a verdict: all are there (no text), or what is wrong. The first one counts."""
    host = socket.gethostname()

    def decide(text: str, kind: str = "config") -> None:
        store.compare_set("verdict", "", json.dumps([kind, text]))

    world = str(launch.world_size)
    if (others := store.compare_set("world", "", world).decode()) != world:
        decide(
            f"the ranks see different worlds: rank {launch.rank} on {host} was told of {world} ranks, another one of "
            f"{others}. Start all with one srun, or with one torchrun per node with the same --nnodes"
        )
    me = f"{host} {time.time_ns()}"
    if (there := store.compare_set(f"rank/{launch.rank}", "", me).decode()) != me:
        decide(
            f"two processes are rank {launch.rank}, on {there.split()[0]} and on {host}: do not set RANK by hand, and "
            f"give every torchrun its own --node-rank"
        )
    store.add("count", 1)
    until = time.monotonic() + seconds + (0.0 if launch.rank == 0 else _SPARE_SECONDS)
    while not store.check(["verdict"]):
        if launch.rank == 0 and store.add("count", 0) == launch.world_size:
            decide("")
        elif time.monotonic() > until:
            decide(_missing(store, launch.world_size, seconds), "lost")
        else:
            time.sleep(_LOOK_SECONDS)
    kind, text = json.loads(store.get("verdict"))
    if not text:
        return
    # Rank 0 may be the one that has the store, and the others have to read there what is wrong.
    heard, until = store.add("heard", 1), time.monotonic() + _SPARE_SECONDS
    while launch.rank == 0 and heard < store.add("count", 0) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
        heard = store.add("heard", 0)
    raise ConfigError(text) if kind == "config" else RankLostError(text)


def _missing(store: Store, world_size: int, seconds: float) -> str:
    there = [rank for rank in range(world_size) if store.check([f"rank/{rank}"])]
    hosts = list(dict.fromkeys(store.get(f"rank/{rank}").decode().split()[0] for rank in there))
    missing = [rank for rank in range(world_size) if rank not in set(there)]
    return (
        f"{len(there)} of {world_size} ranks came within {seconds:,.0f} s, on {_some(hosts)}; missing: "
        f"{_some(missing)}. A node that is not there, or a rank that died before it could say why"
    )


def _some(values: Sequence[str | int]) -> str:
    more = f" and {len(values) - _NAMED} more" if len(values) > _NAMED else ""
    return ", ".join(map(str, values[:_NAMED])) + more


def _where(environ: Mapping[str, str]) -> str:
    return f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']} (MASTER_ADDR, MASTER_PORT)"
