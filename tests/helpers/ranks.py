"""Real ranks for tests: processes of `tests.helpers.forkserver`, joined by gloo.

    results = run_ranks(3, function, arg, ...)          # function(arg, ...) on each rank, results in order of rank
    with start_ranks(4, function, arg) as world:         # ranks of its own, to kill some of them
        world.kill(2)
    result = alone(function, arg, ...)                   # in one process without a process group

A function that raises fails the test with its traceback; nothing outlives its time limit. `run_ranks` hands functions
to a pool of ranks: what a function patches in the package or sets in the environment is put back, and anything else
that it leaves behind fails its test (see `tests.helpers.leaks`).
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.helpers.forkserver import Python
from tests.helpers.leaks import Leaks, Patches

POOLED = 4
"""Worlds of up to so many ranks wait for the next function."""
_ENVIRON = dict(os.environ)
_HERE = Path.cwd()


class RankError(AssertionError):
    """A rank raised, died or hung."""


class World:
    """Running ranks. `results` waits for all of them."""

    def __init__(self, world_size, *, alone=False, programs=()):
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.processes = []
        self._pipes = []
        self._messages = {}
        self._deadline, self._dismissed = 0.0, False
        self.has_meshes = False
        """Whether a function has made one. torch caches it, and would use it for an equal one of a later function."""
        store = None if alone else f"{self._folder.name}/store"
        for rank in range(world_size):
            ours, theirs = multiprocessing.Pipe()
            before = programs[rank] if programs else ()
            command = (*before, "-m", "tests.helpers.ranks", str(theirs.fileno()))
            self.processes.append(Python(*command, pass_fds=[theirs.fileno()], env=_ENVIRON, cwd=_HERE))
            theirs.close()
            ours.send((rank, world_size, store))
            self._pipes.append(ours)

    def hand(self, limit, function, *args, last=False):
        """Have all ranks call a function, which has so many seconds. `last`: whatever it leaves behind."""
        self._deadline = time.monotonic() + limit
        self._messages = {rank: [] for rank in range(len(self.processes))}
        self.left = []
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # its rank is gone, as is seen by its results
                pipe.send((function, args, last))

    def kill(self, rank, signum=signal.SIGKILL):
        """Send a signal to a rank."""
        self.processes[rank].send_signal(signum)

    def await_message(self, rank, text):
        """Wait until a rank has called `say(text)`."""
        while ("said", text) not in self._messages[rank]:
            self._read(rank)
            kind, value = self._messages[rank][-1]
            if kind == "error":
                raise RankError(f"rank {rank}:\n{value}")

    def said(self, rank):
        """All that a rank has said until it ended."""
        with contextlib.suppress(RankError):
            while True:
                self._read(rank)
        return [text for kind, text in self._messages[rank] if kind == "said"]

    def join(self):
        """Wait until all have ended, however; their exit codes, as of `subprocess.Popen`."""
        self.dismiss()
        return [self.wait(rank, max(0.1, self._deadline - time.monotonic())) for rank in range(len(self.processes))]

    def wait(self, rank, seconds):
        """Wait until a rank has exited, and return its exit code. Raises: RankError if it is still running."""
        try:
            return int(self.processes[rank].wait(seconds))
        except subprocess.TimeoutExpired:
            raise RankError(f"rank {rank} did not end in time (pid {self.processes[rank].pid})") from None

    def results(self):
        """What each rank returned; what it left behind is in `left`. Raises: RankError with tracebacks."""
        found = []
        errors = []
        for rank in range(len(self.processes)):
            try:
                while not any(kind in ("result", "error") for kind, _ in self._messages[rank]):
                    self._read(rank)
            except RankError as error:
                errors.append(str(error))
                continue
            kind, value = next(each for each in self._messages[rank] if each[0] != "said")
            if kind == "error":
                errors.append(f"rank {rank}:\n{value}")
                continue
            result, left, has_meshes = value
            self.has_meshes |= has_meshes
            found.append(pickle.loads(result))
            self.left += [f"rank {rank} leaves {each}" for each in left]
        if errors:
            raise RankError("\n".join(errors))
        if self._dismissed:
            self.join()
        return found

    def dismiss(self):
        """Have the ranks leave once they have nothing to do."""
        self._dismissed = True
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)

    def end(self):
        """Kill what still runs."""
        for process in self.processes:
            process.kill()
            process.wait(10)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def _read(self, rank):
        if not wait([self._pipes[rank]], max(0.0, self._deadline - time.monotonic())):
            raise RankError(f"rank {rank} said nothing in time")
        try:
            self._messages[rank].append(self._pipes[rank].recv())
        except (EOFError, ConnectionError):
            raise RankError(f"rank {rank} died with exit code {self.wait(rank, 5)}") from None


@contextlib.contextmanager
def start_ranks(world_size, function, *args, limit=240.0, alone=False, programs=()):
    """Start ranks of its own that each call `function(*args)` inside an initialised gloo process group.

    `alone`: one process without a group. `programs`: for each rank, the arguments of `python` that run the others, as
    those that take it to another host.
    """
    world = World(world_size, alone=alone, programs=programs)
    try:
        world.hand(limit, function, *args, last=True)
        world.dismiss()
        yield world
    finally:
        world.end()


_pool = {}


@atexit.register
def _end_pool() -> None:
    while _pool:
        _pool.popitem()[1].end()


def run_ranks(world_size, function, *args, limit=240.0, fresh=False):
    """Call `function(*args)` on that many ranks and return their results in order of rank.

    `fresh`: on ranks of its own. A function that leaves a Checkpointer by an error needs them: as other ranks may wait
    in its process groups, these are left to the end of the process.
    """
    if fresh or world_size > POOLED:
        with start_ranks(world_size, function, *args, limit=limit) as world:
            return world.results()
    world = _pool.pop(world_size, None) or World(world_size)
    try:
        world.hand(limit, function, *args)
        results = world.results()
        if world.left:
            raise RankError("\n".join(world.left))
    except BaseException:
        world.end()
        raise
    if world.has_meshes:
        world.dismiss()
        world.end()
    else:
        _pool[world_size] = world
    return results


def alone(function, *args, limit_seconds=240.0):
    """What `function(*args)` returns in a process of its own, which may fork ranks itself.

    Raises: RankError with its traceback, or that it did not end in time.
    """
    with start_ranks(1, function, *args, limit=limit_seconds, alone=True) as world:
        (result,) = world.results()
    return result


_say = lambda text: None  # noqa: E731 replaced in each rank


def say(text):
    """In a rank: tell the test something (see World.await_message)."""
    _say(text)


def _main(pipe):
    global _say
    import torch
    import torch.distributed as dist

    from tests.helpers.preload import FIRST_SEED

    _say = lambda text: pipe.send(("said", text))  # noqa: E731
    rank, world_size, store = pipe.recv()
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than this machine has cores
    if store is not None:
        # As in a training script. A loader's worker from a forkserver would not see that its rank was killed, and stay.
        multiprocessing.set_start_method("fork", force=True)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        if store is not None:
            store = dist.FileStore(store, world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        while handed := pipe.recv():
            function, args, is_last = handed
            if is_last:
                pipe.send(("result", (pickle.dumps(function(*args)), [], False)))
                continue
            torch.manual_seed(FIRST_SEED)
            before, patches = Leaks(), Patches()
            result = pickle.dumps(function(*args))  # an error among it would hold on to all frames
            patches.undo()
            has_meshes = any(group.group_desc.startswith("mesh_") for group in dist.distributed_c10d._world.pg_map)
            pipe.send(("result", (result, before.left(), has_meshes)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        os._exit(1)
    pipe.close()
    if store is not None:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    from tests.helpers import ranks

    ranks._main(Connection(int(sys.argv[1])))
