"""Ranks that are forked from this process, joined by gloo through a file, and watched: none of them can hang us."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

import torch
import torch.distributed as dist

from ckptman.errors import EXIT_OK

Tell = Callable[[str], None]
Work = Callable[[int, int, Tell], list[str]]
"""What a rank does, given rank, world size, and whom to tell what it is about to do: the problems it found."""


def run_forked(work: Work, world_size: int, silence_seconds: float) -> list[str]:
    """Do `work` on that many forked ranks; all problems, each with its rank.

    A rank that dies, fails, or tells nothing for `silence_seconds` is a problem, and ends the others. When this
    returns, no rank is alive. Called from a process with one thread: a fork takes no other thread along.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ckptman-ranks-") as folder:
        ranks = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_rank, args=(work, rank, world_size, folder, theirs), daemon=True)
                process.start()
                theirs.close()
                ranks.append(_Rank(rank, world_size, process, ours))
            return _watch(ranks, silence_seconds)
        finally:
            for each in ranks:
                each.end()


class _Rank:
    """A running rank, what it said last, and when."""

    def __init__(self, rank: int, world_size: int, process: ForkProcess, pipe: Connection) -> None:
        self.who = f"rank {rank} of {world_size}"
        self.process, self.pipe = process, pipe
        self.at, self.heard = "its start", time.monotonic()
        self.problems: list[str] | None = None

    def listen(self) -> None:
        """Take in all that was said."""
        try:
            while self.pipe.poll():
                said = self.pipe.recv()
                self.heard = time.monotonic()
                if isinstance(said, str):
                    self.at = said
                else:
                    self.problems = [f"{self.who}: {problem}" for problem in said]
        except (EOFError, ConnectionResetError):
            pass  # it has ended; its exit code tells

    def has_died(self) -> str | None:
        """Why it will not give a result, or None."""
        if self.problems is not None or self.process.exitcode is None:
            return None
        self.listen()
        return None if self.problems is not None else f"{self.who} died at {self.at}: {_ending(self.process.exitcode)}"

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


def _watch(ranks: list[_Rank], silence_seconds: float) -> list[str]:
    while waiting := [each for each in ranks if each.problems is None]:
        patience = min(each.heard for each in waiting) + silence_seconds - time.monotonic()
        ended = [each.process.sentinel for each in waiting]
        wait([*ended, *(each.pipe for each in waiting if each.process.is_alive())], max(0.0, patience))
        for each in waiting:
            each.listen()
        lost = [why for each in waiting if (why := each.has_died())]
        lost += [
            f"{each.who} was silent for {silence_seconds:g} s at {each.at}, and was killed"
            for each in waiting
            if each.problems is None and time.monotonic() - each.heard > silence_seconds
        ]
        if lost:
            return [*(problem for each in ranks for problem in each.problems or ()), *lost]
    return [problem for each in ranks for problem in each.problems or ()]


def _rank(work: Work, rank: int, world_size: int, folder: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; whoever forked us ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(os.path.join(folder, "store"), world_size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=120),
        )
        problems = work(rank, world_size, pipe.send)
    except BaseException as error:  # noqa: BLE001 DCP's own exception is a BaseException
        problems = [f"{type(error).__name__}: {error}"]
    pipe.send(problems)
    os._exit(EXIT_OK)  # no clean-up of what was forked: it belongs to the parent


def _ending(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    return f"{name} (out of memory?)" if name == "SIGKILL" else name
