"""Ranks that are forked from this process and watched: none of them can hang us.

All at a time, and then joined by gloo where they have something to say to each other; or in waves: a few processes do
the work of one rank after the other, so that no more of them are in memory.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

from ckptman.errors import RankLostError
from ckptman.io.isolated_process import IsolatedProcess

Tell = Callable[[str, float], None]
Work = Callable[[int, Tell], list[str]]
"""What a rank does, given its number, and whom to tell what it is about to do and how much of all is done, from 0 to 1:
the problems it found."""
Done = Callable[[float], None]

_HEAD = struct.Struct("<iidd")
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
    """Do `work` for that many ranks in forked processes; all problems, each with its rank.

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


class _Board:
    """What a process does, where the one that watches it can look it up: telling it would wake it each time."""

    def __init__(self, rank: int) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)  # shared with what is forked from here
        self.write(rank, "its start")

    def write(self, rank: int, text: str, done: float = 0.0) -> None:
        said = text.encode(errors="replace")[: mmap.PAGESIZE // 2]
        # The length comes last: who looks in between sees a text that is cut, not one that is wrong in the end.
        self._memory[: _HEAD.size] = _HEAD.pack(0, rank, time.monotonic(), done)
        self._memory[_HEAD.size : _HEAD.size + len(said)] = said
        self._memory[:4] = struct.pack("<i", len(said))

    def read(self) -> tuple[int, str, float, float]:
        """Rank, what it does, since when (seconds of `time.monotonic`), and how much of all that it has done."""
        size, rank, since, done = _HEAD.unpack(self._memory[: _HEAD.size])
        return rank, self._memory[_HEAD.size : _HEAD.size + size].decode(errors="replace"), since, done


class _Process:
    """A running process, the ranks that it does, and what it found."""

    def __init__(self, work: Work, ranks: Sequence[int], world_size: int, store: str | None) -> None:
        self.problems: dict[int, list[str]] = {}
        self.has_failed = False
        self.death: str | None = None
        """Why it will not give a result, or None."""
        self._ranks, self._world_size, self._board = ranks, world_size, _Board(ranks[0])
        self._read_bytes, self._read_at = 0, time.monotonic()
        serve = partial(_serve, work, ranks, world_size, store, self._board)
        self.child = IsolatedProcess(serve, keeps_files=True)

    @property
    def is_done(self) -> bool:
        return len(self.problems) == len(self._ranks)

    @property
    def where(self) -> tuple[str, str]:
        """Which rank it is at, and what that does."""
        rank, text, _, _ = self._board.read()
        return f"rank {rank} of {self._world_size}", text

    @property
    def done(self) -> float:
        """How much of its ranks is done, from 0 to 1."""
        return 1.0 if self.is_done else min(1.0, (len(self.problems) + self._board.read()[3]) / len(self._ranks))

    def silence_seconds(self) -> float:
        """For how long it told nothing and read nothing: over a large tensor and a slow disk it tells nothing."""
        if self.is_done:
            return 0.0
        now, read_bytes = time.monotonic(), _read_bytes(self.child.pid)
        if read_bytes != self._read_bytes:
            self._read_bytes, self._read_at = read_bytes, now
        return now - max(self._board.read()[2], self._read_at)

    def listen(self) -> None:
        """Take in all that was said, and that it died before it was done."""
        try:
            while not self.is_done and self.child.pipe.poll():
                has_failed, rank, problems = self.child.pipe.recv()
                self.has_failed |= has_failed
                self.problems[rank] = [f"rank {rank} of {self._world_size}: {problem}" for problem in problems]
        except (EOFError, ConnectionResetError):
            who, text = self.where
            self.death = f"{who} died at {text}: it {self.child.ending()}"


def _read_bytes(pid: int) -> int:
    """What a process has read so far, from files and from the page cache; 0 where the kernel does not tell."""
    try:
        return int(Path(f"/proc/{pid}/io").read_bytes().split(None, 2)[1])
    except (OSError, ValueError, IndexError):
        return 0


def _watch(running: list[_Process], silence_seconds: float, done: Done | None) -> list[str]:
    look_seconds = min(silence_seconds / 10, _TOLD_SECONDS if done is not None else silence_seconds)
    told_at = time.monotonic()
    while waiting := [each for each in running if not each.is_done]:
        wait([each.child.pipe for each in waiting], look_seconds)
        if done is not None and time.monotonic() - told_at >= _TOLD_SECONDS:
            told_at = time.monotonic()
            done(sum(each.done for each in running) / len(running))
        for each in waiting:
            each.listen()
        lost = [each.death for each in waiting if each.death is not None]
        silent = [each for each in waiting if each.silence_seconds() > silence_seconds / 2]
        if max((each.silence_seconds() for each in silent), default=0.0) > silence_seconds:
            # Those that wait for the one that hangs are silent too, and none can tell which it is.
            lost += [
                f"{each.where[0]} was silent for {each.silence_seconds():.0f} s at {each.where[1]}, and was killed"
                for each in silent
            ]
        if lost or any(each.has_failed for each in waiting):
            return [*lost, *_problems(running)]
    return _problems(running)


def _problems(running: list[_Process]) -> list[str]:
    by_rank = {rank: problems for each in running for rank, problems in each.problems.items()}
    return [problem for rank in sorted(by_rank) for problem in by_rank[rank]]


def _serve(
    work: Work, ranks: Sequence[int], world_size: int, store: str | None, board: _Board, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    for rank in ranks:
        failed = False
        board.write(rank, "its start")
        try:
            if store is not None:
                _join(store, rank, world_size)
            problems = work(rank, partial(board.write, rank))
        except RankLostError as error:
            time.sleep(_LOST_PATIENCE_SECONDS)
            failed, problems = True, [f"it lost the other ranks: {error}"]
        except BaseException as error:  # noqa: BLE001 DCP's own exception is a BaseException
            failed, problems = True, [f"{type(error).__name__}: {error}"]
        pipe.send((failed and store is not None, rank, problems))
    while store is not None:
        time.sleep(1.0)  # the others may still be in a collective with this one: whoever forked it ends all of them


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
