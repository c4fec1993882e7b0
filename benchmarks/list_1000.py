"""How long `ckptman list` takes, as a whole process, for 1,000 checkpoints of 4 ranks (9 files each). No torch.

    python benchmarks/list_1000.py [--runs 20]

Prints the minimum, median and maximum of the wall time, warm, and the same for an empty root: the start alone.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.fake_checkpoint import commit


def measure(root: Path, runs: int) -> list[float]:
    """Wall seconds of each run."""
    command = [sys.executable, "-c", "from ckptman.cli import main; main()", "list", str(root)]
    seconds = []
    for _ in range(runs + 1):
        begun = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - begun)
    return seconds[1:]  # the first one warms the page cache


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        full, empty = Path(folder, "full"), Path(folder, "empty")
        empty.mkdir()
        for step in range(1, 1001):
            commit(full, step * 100, ranks=4, sequence=step, metrics={"loss": 3 / step}, time_seconds=time.time())
        for what, root in (("1,000 checkpoints", full), ("empty root", empty)):
            seconds = measure(root, runs)
            middle = statistics.median(seconds)
            print(f"{what:>18}: min {min(seconds):.3f} s, median {middle:.3f} s, max {max(seconds):.3f} s")


if __name__ == "__main__":
    main()
