"""How the ranks of a run meet: one clear error each for what goes wrong there, on every rank that can be told."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
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
_PREFIX = "ckptman/meeting"
_NAMED = 16


def meet(launch: Launch, environ: Mapping[str, str], timeout_seconds: float) -> Store:
    """The store in which all ranks of `launch` have met. Every rank calls it.

    Raises: ConfigError (the port is in use; ranks that were told of different worlds, or that have the same number),
    RankLostError (rank 0 cannot be reached, or ranks are missing, which are named).
    """
    seconds = min(timeout_seconds, LONGEST_SECONDS)
    store = _connect(launch, environ, seconds)
    try:
        _check_in(store, launch, seconds)
    except RuntimeError as error:  # torch's errors have no closer class in common
        if isinstance(error, CkptmanError):
            raise
        raise RankLostError(f"the store at {_where(environ)} is gone: {_first_line(error)}") from error
    return store


def _connect(launch: Launch, environ: Mapping[str, str], seconds: float) -> Store:
    host, port = environ["MASTER_ADDR"], _port(environ["MASTER_PORT"])
    of_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own process keeps the store
    leads = launch.rank == 0 and not of_agent
    try:
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=leads,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
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
    """Say that this rank is there, and wait until all are, or until somebody says what is wrong."""
    told = str(launch.world_size)
    others = store.compare_set(f"{_PREFIX}/world", "", told).decode()
    if others != told:
        _refuse(
            store,
            f"the ranks see different worlds: rank {launch.rank} on {socket.gethostname()} was told of {told} ranks, "
            f"another one of {others}. Start all with one srun, or with one torchrun per node with the same --nnodes",
        )
    me = f"{socket.gethostname()} {time.time_ns()}"
    there = store.compare_set(f"{_PREFIX}/rank/{launch.rank}", "", me).decode()
    if there != me:
        _refuse(
            store,
            f"two processes are rank {launch.rank}, on {there.split()[0]} and on {socket.gethostname()}: do not set "
            f"RANK by hand, and give every torchrun its own --node-rank",
        )
    store.add(f"{_PREFIX}/count", 1)
    until = time.monotonic() + seconds + (0.0 if launch.rank == 0 else _SPARE_SECONDS)
    while not store.check([f"{_PREFIX}/verdict"]):
        if launch.rank == 0 and store.add(f"{_PREFIX}/count", 0) == launch.world_size:
            _decide(store, [])
        elif time.monotonic() > until:
            _tell_missing(store, launch, seconds)
        else:
            time.sleep(_LOOK_SECONDS)
    verdict = json.loads(store.get(f"{_PREFIX}/verdict"))
    if verdict:
        _await_the_others(store, launch)
        kind, text = verdict
        raise ConfigError(text) if kind == "config" else RankLostError(text)


def _await_the_others(store: Store, launch: Launch) -> None:
    """Rank 0 may be the one that has the store, and the others have to read there what is wrong."""
    heard, until = store.add(f"{_PREFIX}/heard", 1), time.monotonic() + _SPARE_SECONDS
    while launch.rank == 0 and heard < store.add(f"{_PREFIX}/count", 0) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
        heard = store.add(f"{_PREFIX}/heard", 0)


def _decide(store: Store, verdict: list[str]) -> None:
    """The first word counts: all well, or what is wrong."""
    store.compare_set(f"{_PREFIX}/verdict", "", json.dumps(verdict))


def _refuse(store: Store, text: str) -> None:
    _decide(store, ["config", text])


def _tell_missing(store: Store, launch: Launch, seconds: float) -> None:
    ranks = range(launch.world_size)
    there = {rank for rank in ranks if store.check([f"{_PREFIX}/rank/{rank}"])}
    hosts = dict.fromkeys(store.get(f"{_PREFIX}/rank/{rank}").decode().split()[0] for rank in sorted(there))
    missing = [rank for rank in ranks if rank not in there]
    text = (
        f"{len(there)} of {launch.world_size} ranks came within {seconds:,.0f} s, on {_some(list(hosts))}; missing: "
        f"{_some(missing)}. A node that is not there, or a rank that died before it could say why"
    )
    _decide(store, ["lost", text])


def _some(values: list[str] | list[int]) -> str:
    return ", ".join(map(str, values[:_NAMED])) + (f" and {len(values) - _NAMED} more" if len(values) > _NAMED else "")


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise ConfigError(f"MASTER_PORT is {text!r}, not the number of a port: take a free one from 1024 to 65535")
    return int(text)


def _where(environ: Mapping[str, str]) -> str:
    return f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']} (MASTER_ADDR, MASTER_PORT)"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
