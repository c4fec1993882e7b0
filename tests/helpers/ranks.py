"""Real ranks for tests: processes forked from one server that has imported torch once, joined by gloo.

    results = run_ranks(3, function, arg, ...)          # function(arg, ...) on each rank, results in order of rank
    with start_ranks(4, function, arg) as world:         # to kill some of them
        world.kill(2)

A function that raises fails the test with its traceback; nothing outlives its time limit.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.helpers.preload"])


class RankError(AssertionError):
    """A rank raised, died or hung."""


class World:
    """Running ranks. `results` waits for all of them."""

    def __init__(self, folder: Path, processes: list[ForkServerProcess], pipes: list[Connection], limit: float) -> None:
        self.folder, self.processes, self._pipes = folder, processes, pipes
        self._deadline = time.monotonic() + limit
        self._messages: dict[int, list[Any]] = {rank: [] for rank in range(len(processes))}

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to a rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)

    def await_message(self, rank: int, text: str) -> None:
        """Wait until a rank has called `say(text)`."""
        while ("said", text) not in self._messages[rank]:
            self._read(rank)
            kind, value = self._messages[rank][-1]
            if kind == "error":
                raise RankError(f"rank {rank}:\n{value}")

    def join(self) -> list[int | None]:
        """Wait until all have ended, however; their exit codes."""
        for process in self.processes:
            process.join(max(0.1, self._deadline - time.monotonic()))
            if process.exitcode is None:
                raise RankError(f"a rank did not end in time (pid {process.pid})")
        return [process.exitcode for process in self.processes]

    def results(self) -> list[Any]:
        """What each rank returned. Raises: RankError with the traceback of those that did not."""
        found: list[Any] = []
        errors = []
        for rank in range(len(self.processes)):
            try:
                while not any(kind in ("result", "error") for kind, _ in self._messages[rank]):
                    self._read(rank)
            except RankError as error:
                errors.append(str(error))
                continue
            kind, value = next(each for each in self._messages[rank] if each[0] != "said")
            (found if kind == "result" else errors).append(value if kind == "result" else f"rank {rank}:\n{value}")
        if errors:
            raise RankError("\n".join(errors))
        self.join()
        return found

    def _read(self, rank: int) -> None:
        if not wait([self._pipes[rank]], max(0.0, self._deadline - time.monotonic())):
            raise RankError(f"rank {rank} said nothing in time")
        try:
            self._messages[rank].append(self._pipes[rank].recv())
        except EOFError:
            self.processes[rank].join(5)
            raise RankError(f"rank {rank} died with exit code {self.processes[rank].exitcode}") from None


_say: Callable[[str], None] = lambda text: None  # noqa: E731 replaced in each rank


def say(text: str) -> None:
    """In a rank: tell the test something (see World.await_message)."""
    _say(text)


@contextlib.contextmanager
def start_ranks(world_size: int, function: Callable[..., Any], *args: Any, limit: float = 60.0) -> Iterator[World]:
    """Start ranks that each call `function(*args)` inside an initialised gloo process group."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes, pipes = [], []
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_main, args=(rank, world_size, folder, theirs, function, args))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        world = World(Path(folder), processes, pipes, limit)
        try:
            yield world
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join(10)
            for pipe in pipes:
                pipe.close()


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, limit: float = 60.0) -> list[Any]:
    """Call `function(*args)` on that many ranks and return their results in order of rank."""
    with start_ranks(world_size, function, *args, limit=limit) as world:
        return world.results()


def _main(
    rank: int, world_size: int, folder: str, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    global _say
    import torch
    import torch.distributed as dist

    _say = lambda text: pipe.send(("said", text))  # noqa: E731
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    # As in a training script. A loader's worker from a forkserver would not see that its rank was killed, and stay.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        result = function(*args)
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        os._exit(1)
    pipe.send(("result", result))
    pipe.close()
    dist.barrier()
    dist.destroy_process_group()
