"""Ranks that are forked from this process and watched: none of them can hang us.

All at a time, and then joined by gloo where they have something to say to each other; or in waves: a few processes do
the work of one rank after the other, so that no more of them are in memory.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from ckptman.errors import RankLostError
from ckptman.storage.io.isolated_process import IsolatedProcess

Tell = Callable[[str, float], None]
Work = Callable[[int, Tell], list[str]]
"""What a rank does, given its number, and whom to tell what it is about to do and how much of all is done, from 0 to 1:
the problems it found."""
Done = Callable[[float], None]

_TOLD_SECONDS = 1.0
_LOOPBACK = "lo"
_LOST_PATIENCE_SECONDS = 10.0
"""For how long a rank that lost the others keeps quiet: the one that is gone says better what happened."""


def run_forked(
    work: Work,
    world_size: int,
    silence_seconds: float,
    processes: int | None = None,
    *,
    joined: bool = False,
    done: Done | None = None,
) -> list[str]:
    """Do `work` for that many ranks in forked processes. Return all problems, each with its rank.

    With `processes`, fewer than ranks, process p does ranks p, p + processes and so on. Else each rank is a process,
    and with `joined` all are in one process group. One that dies, fails where others wait for it, or tells and reads
    nothing for `silence_seconds`, is a problem, and ends the others. When this returns, no process is alive. Called
    from a process with one thread: a fork takes no other thread along. `done` is told every second how much is done.
    """
    count = min(world_size, processes or world_size)
    with tempfile.TemporaryDirectory(prefix="ckptman-ranks-") as folder, ExitStack() as stack:
        store = os.path.join(folder, "store") if joined and 1 < count == world_size else None
        running: list[_Process] = []
        for number in range(count):
            running.append(_Process(work, range(number, world_size, count), world_size, store))
            stack.callback(running[-1].child.end)
        return _watch(running, silence_seconds, done)


class _At(NamedTuple):
    """What a rank is about to do, and how much of all it has done, from 0 to 1."""

    rank: int
    doing: str
    done: float = 0.0


class _Found(NamedTuple):
    """The result of a rank. `failed`: others wait for it in vain."""

    rank: int
    problems: list[str]
    failed: bool


class _Process:
    """A running process, the ranks that it does, and what it found."""

    def __init__(self, work: Work, ranks: Sequence[int], world_size: int, store: str | None) -> None:
        self.problems: dict[int, list[str]] = {}
        self.has_failed = False
        self.death: str | None = None
        """Why it will not give a result, or None."""
        self._ranks, self._world_size, self.at = ranks, world_size, _At(ranks[0], "its start")
        self._read_bytes, self._heard_at = 0, time.monotonic()
        self.child = IsolatedProcess(partial(_serve, work, ranks, world_size, store), keeps_files=True)

    @property
    def is_done(self) -> bool:
        return len(self.problems) == len(self._ranks)

    @property
    def who(self) -> str:
        """The rank it is at."""
        return f"rank {self.at.rank} of {self._world_size}"

    @property
    def done(self) -> float:
        """How much of its ranks is done, from 0 to 1."""
        return 1.0 if self.is_done else min(1.0, (len(self.problems) + self.at.done) / len(self._ranks))

    def silence_seconds(self) -> float:
        """Return for how long it sent and read nothing: over a large tensor and a slow disk it sends nothing."""
        now, read_bytes = time.monotonic(), _read_bytes(self.child.pid)
        if read_bytes != self._read_bytes:
            self._read_bytes, self._heard_at = read_bytes, now
        return 0.0 if self.is_done else now - self._heard_at

    def listen(self) -> None:
        """Take in all that it sent, and that it died before it was done."""
        try:
            while not self.is_done and self.child.pipe.poll():
                said: _At | _Found = self.child.pipe.recv()
                self._heard_at = time.monotonic()
                if isinstance(said, _At):
                    self.at = said
                else:
                    self.has_failed |= said.failed
                    whose = f"rank {said.rank} of {self._world_size}"
                    self.problems[said.rank] = [f"{whose}: {problem}" for problem in said.problems]
        except (EOFError, ConnectionResetError):
            self.death = f"{self.who} died at {self.at.doing}: it {self.child.ending()}"


def _read_bytes(pid: int) -> int:
    """Return what a process has read so far, from files and from the page cache; 0 where the kernel does not tell."""
    try:
        return int(Path(f"/proc/{pid}/io").read_bytes().split(None, 2)[1])
    except (OSError, ValueError, IndexError):
        return 0


def _watch(running: list[_Process], silence_seconds: float, done: Done | None) -> list[str]:
    look_seconds = min(silence_seconds / 10, _TOLD_SECONDS if done is not None else silence_seconds)
    looked_at = time.monotonic()
    while waiting := [each for each in running if not each.is_done]:
        wait([each.child.pipe for each in waiting], look_seconds)
        for each in waiting:
            each.listen()
        lost = [each.death for each in waiting if each.death is not None]
        if time.monotonic() - looked_at >= look_seconds:
            looked_at = time.monotonic()
            lost += _silent(waiting, silence_seconds)
            if done is not None:
                done(sum(each.done for each in running) / len(running))
        if lost or any(each.has_failed for each in waiting):
            return [*lost, *_problems(running)]
    return _problems(running)


def _silent(waiting: list[_Process], silence_seconds: float) -> list[str]:
    """Return the ranks to give up, if one of them was silent for too long."""
    silences = [(each, each.silence_seconds()) for each in waiting]
    if max(silence for _, silence in silences) <= silence_seconds:
        return []
    # Those that wait for the one that hangs are silent too, and none can tell which it is.
    return [
        f"{each.who} was silent for {silence:.0f} s at {each.at.doing}, and was killed"
        for each, silence in silences
        if silence > silence_seconds / 2
    ]


def _problems(running: list[_Process]) -> list[str]:
    by_rank = {rank: problems for each in running for rank, problems in each.problems.items()}
    return [problem for rank in sorted(by_rank) for problem in by_rank[rank]]


def _serve(work: Work, ranks: Sequence[int], world_size: int, store: str | None, pipe: Connection) -> None:
    torch.set_num_threads(1)
    parent = os.getppid()
    for rank in ranks:
        failed = False
        _tell(pipe, rank, "its start")
        try:
            if store is not None:
                _join(store, rank, world_size)
            problems = work(rank, partial(_tell, pipe, rank))
        except RankLostError as error:
            time.sleep(_LOST_PATIENCE_SECONDS)
            failed, problems = True, [f"it lost the other ranks: {error}"]
        except BaseException as error:  # noqa: BLE001 DCP's own exception is a BaseException
            failed, problems = True, [f"{type(error).__name__}: {error}"]
        pipe.send(_Found(rank, problems, failed and store is not None))
    while store is not None and os.getppid() == parent:
        time.sleep(1.0)  # the others may still be in a collective with this one: whoever forked it ends all of them


def _tell(pipe: Connection, rank: int, doing: str, done: float = 0.0) -> None:
    pipe.send(_At(rank, doing, done))


def _join(store: str, rank: int, world_size: int) -> None:
    if _LOOPBACK in (name for _, name in socket.if_nameindex()):
        # All are on this host, whose name need not lead to an address on every login node.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
