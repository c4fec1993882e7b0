"""The report of ranks that are stuck: who still answers, and who was stopped and has to be ended by a neighbour."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from typing import Any

import psutil
import torch.distributed as dist

from ckptman._torch_compat import default_store
from ckptman.runtime.outcome import this_node

Process = tuple[str, int, float]
_LOOK_SECONDS = 0.1
_NAMED = 8


class HangReport:
    """Who of the ranks still answers, asked in the store of the default process group. Only ranks that are stuck do."""

    def __init__(self, rank: int, world_size: int, attempt: int | str, leader: Process | None = None) -> None:
        self._rank, self._world_size = rank, world_size
        self._leader = leader
        self._prefix = f"ckptman/stalled/{attempt}"
        self.silent: list[int] | None = None
        """The ranks that did not answer; None: not known."""
        self.places: dict[int, str] = {}
        self._store: Any = None
        if world_size > 1 and dist.is_initialized():
            self._store = default_store()

    def register(self) -> None:
        """Say which process this rank is. Every rank does, while all is well."""
        if self._store is not None:
            self._store.set(f"{self._prefix}/process/{self._rank}", json.dumps(this_process()))
            self._store.set(f"{self._prefix}/node/{self._rank}", this_node(os.environ))

    def answer(self, where: str) -> None:
        """Say that this rank can still act, and is stuck at `where`."""
        if self._store is not None:
            self._store.set(f"{self._prefix}/{self._rank}", where)

    def call(self, seconds: float) -> None:
        """Wait for that long for the answers of all ranks."""
        if self._store is None:
            return
        missing, until = list(range(self._world_size)), time.monotonic() + seconds
        while True:
            missing = [rank for rank in missing if not self._store.check([f"{self._prefix}/{rank}"])]
            self.silent = missing
            if not missing or time.monotonic() > until:
                break
            time.sleep(_LOOK_SECONDS)
        answered = [rank for rank in range(self._world_size) if rank not in set(missing)]
        for rank in answered:
            self.places[rank] = self._store.get(f"{self._prefix}/{rank}").decode()

    def end(self) -> None:
        """Let all leave: the outcome is written."""
        if self._store is not None:
            self._store.set(f"{self._prefix}/end", json.dumps(self.silent or []))

    def await_end(self) -> None:
        """Wait until the outcome is written."""
        if self._store is None:
            return
        while not self._store.check([f"{self._prefix}/end"]):
            time.sleep(_LOOK_SECONDS)
        self.silent = json.loads(self._store.get(f"{self._prefix}/end"))

    def kill_stopped(self) -> None:
        """End the silent ranks of this host that are stopped (SIGSTOP): they can neither act nor leave by themselves,
        and a launcher would wait for them. All others have a watchdog of their own, or are in a debugger."""
        # Where nobody could be asked it may be rank 0, which keeps the store unless torchrun does.
        for rank in [0] if self.silent is None else self.silent:
            known = self._process_of(rank)
            if known is None:
                continue
            host, pid, started = known
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                if (host, process.create_time()) == (socket.gethostname(), started) and _is_stopped(process):
                    process.send_signal(signal.SIGKILL)

    def bad_nodes(self) -> dict[str, str]:
        """Return nodes with ranks that do not answer, and which; none where those are several, and more than half of
        all: then it is hardly the nodes."""
        if self._store is None or not self.silent:
            return {}
        ranks_of: dict[str, list[int]] = {}
        for rank in range(self._world_size):
            key = f"{self._prefix}/node/{rank}"
            if self._store.check([key]):
                ranks_of.setdefault(self._store.get(key).decode(), []).append(rank)
        silent = set(self.silent)
        found = {node: [rank for rank in ranks if rank in silent] for node, ranks in ranks_of.items()}
        bad = {node: ranks for node, ranks in found.items() if ranks}
        if len(bad) > max(1, len(ranks_of) // 2):
            return {}
        return {node: f"ranks {', '.join(map(str, ranks))} there were silent" for node, ranks in bad.items()}

    def _process_of(self, rank: int) -> Process | None:
        if rank == 0 and self._leader is not None:
            return self._leader
        key = f"{self._prefix}/process/{rank}"
        if self._store is None or not self._store.check([key]):
            return None
        host, pid, started = json.loads(self._store.get(key))
        return host, pid, started

    def text(self) -> str:
        """Return what is known about the ranks, for people."""
        if self._world_size == 1:
            return "there is one rank"
        if self.silent is None:
            return "nobody could be asked: the store where the ranks met, at rank 0 or its torchrun, does not answer"
        if self.silent:
            named = ", ".join(map(str, self.silent[:_NAMED])) + ", ..." * (len(self.silent) > _NAMED)
            return f"not heard of: rank {named}" if len(self.silent) == 1 else f"not heard of: ranks {named}"
        groups: dict[str, list[int]] = {}
        for rank, place in self.places.items():
            groups.setdefault(place, []).append(rank)
        if len(groups) == 1:
            return "all ranks answer, and are stuck after the same step: their stacks say where"
        answers = [f"rank {ranks[0]}{' and others' * (len(ranks) > 1)} {place}" for place, ranks in groups.items()]
        return f"all ranks answer, at different places: {'; '.join(answers[:_NAMED])}"


def this_process() -> Process:
    """Return host, pid, and when it began."""
    return socket.gethostname(), os.getpid(), psutil.Process().create_time()


def _is_stopped(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_STOPPED)
