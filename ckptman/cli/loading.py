"""Loading a checkpoint with real processes, from a command line that has not imported torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ckptman.errors import CkptmanError, CorruptError

# The search path of this process: with -m, a random.py in the current folder would take the place of Python's own.
_START = "import sys; sys.path[:] = {!r}; from ckptman.sharded.reshard_check import main; sys.exit(main(sys.argv[1:]))"


def load_on(folder: Path, world_sizes: list[int]) -> Iterator[tuple[int, list[str]]]:
    """Each world size with what kept the checkpoint from loading on it bit for bit (see `sharded.reshard_check`).

    Raises: CorruptError (it cannot be read at all), CkptmanError (the check itself could not run).
    """
    command = [sys.executable, "-c", _START.format(sys.path), str(folder), ",".join(map(str, world_sizes))]
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
            done = 0
            for line in process.stdout:
                found = json.loads(line)
                if "error" in found:
                    raise CorruptError(found["error"])
                done += 1
                yield found["world_size"], found["problems"]
            if process.wait() or done < len(world_sizes):
                complaints.seek(0)
                last = complaints.read().strip().rpartition("\n")[2]
                raise CkptmanError(f"the loading check ended with exit code {process.returncode}: {last}")
        finally:
            process.terminate()
