"""Proofs that a checkpoint loads, in a process of their own: the command line has not imported torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ckptman.errors import CkptmanError, ConfigError, CorruptError
from ckptman.tools.verify.reports import LoadReport, PlanReport, world_sizes_with

# The search path of this process: with -m, a random.py in the current folder would take the place of Python's own.
# What was imported stays: looking for garbage in it took a quarter of the import, half a second at the end, and a copy
# of each of its pages in every rank that is forked.
_START = (
    "import gc, sys; gc.disable(); sys.path[:] = {!r}; from ckptman.tools.verify.{} import main; "
    "gc.freeze(); gc.enable(); sys.exit(main(sys.argv[1:]))"
)
_KINDS = {each.__name__: each for each in (CorruptError, ConfigError)}


def load_on(
    path: Path,
    world_sizes: Sequence[int],
    mesh: tuple[int, ...] | None = None,
    done: Callable[[float], None] | None = None,
    allow: Sequence[str] = (),
) -> Iterator[LoadReport]:
    """Load the checkpoint on each world size, and yield what kept it from loading bit for bit (see
    `verify.reshard_check`).

    `mesh`, (S,) or (R, S): the world size R x S is loaded as R replicas of S shards; it is added if it is not among
    `world_sizes`. `done` is called with the finished part of all of them, from 0 to 1. `allow`: classes that may be
    unpickled, as `module.Class`.

    Raises: CorruptError (it cannot be read at all), ConfigError (no such mesh or class), CkptmanError (the check itself
    could not run, which says nothing about the checkpoint).
    """
    sizes = world_sizes_with(world_sizes, mesh)
    finished = 0
    wanted = {"world_sizes": sizes, "mesh": mesh, "progress": done is not None, "allow": allow}
    for found in _answers("reshard_check", len(sizes), folder=str(path), **wanted):
        if done is not None and "done" in found:
            done((finished + found["done"]) / len(sizes))
            continue
        finished += 1
        yield LoadReport(**found)


def refused_on(path: Path, allow: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return what a load would refuse to unpickle (`refused`), and the `quantized` tensors (see `verify.pickle_check`).

    Raises: as `load_on`.
    """
    (found,) = _answers("pickle_check", 1, folder=str(path), allow=allow)
    return found


def plan_on(
    path: Path,
    world_sizes: Sequence[int],
    bandwidth_bytes_per_second: float | None = None,
    mesh: tuple[int, ...] | None = None,
    rank_bandwidth_bytes_per_second: float | None = None,
) -> Iterator[PlanReport]:
    """Plan a load on each world size (see `verify.plan_check`). Nothing is loaded and no rank is started.

    The bandwidths are those of the whole file system, and of one rank. `mesh` as for `load_on`. Raises: as `load_on`.
    """
    sizes = world_sizes_with(world_sizes, mesh)
    speeds = {"bandwidth": bandwidth_bytes_per_second, "rank_bandwidth": rank_bandwidth_bytes_per_second}
    for found in _answers("plan_check", len(sizes), folder=str(path), world_sizes=sizes, mesh=mesh, **speeds):
        yield PlanReport(**found)


def _answers(module: str, expected: int, **request: Any) -> Iterator[dict[str, Any]]:
    """Yield what `main` of a module of `verify` prints, line by line, in a process of its own. Raises: as `load_on`."""
    command = [sys.executable, "-c", _START.format(sys.path, module), json.dumps(request)]
    # One thread each: the ranks are forked, and share the cores.
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryFile("w+", errors="replace") as complaints,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints, text=True, env=environ
        ) as process,
    ):
        try:
            assert process.stdout is not None
            reports = 0
            for line in process.stdout:
                found = json.loads(line)
                if "error" in found:
                    raise (_KINDS.get(found["kind"], CkptmanError))(found["error"])
                reports += "done" not in found
                yield found
            if process.wait() or reports < expected:
                complaints.seek(0)
                last = complaints.read().strip().rpartition("\n")[2]
                raise CkptmanError(f"the loading check ended with exit code {process.returncode}: {last}")
        finally:
            process.terminate()
