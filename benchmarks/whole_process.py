"""How long a command of `ckptman` takes as a whole process, from its start to its end."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence


def wall_seconds(arguments: Sequence[str], runs: int) -> list[float]:
    """Of each run, the page cache warm."""
    command = [sys.executable, "-c", "from ckptman.cli import main; main()", *arguments]
    seconds = []
    for _ in range(runs + 1):
        begun = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - begun)
    return seconds[1:]  # the first one warms the page cache


def report(what: str, seconds: Sequence[float]) -> None:
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    print(f"{what:>18}: min {low:.3f} s, median {middle:.3f} s, max {high:.3f} s", flush=True)
