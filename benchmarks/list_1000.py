"""How long `ckptman list` takes, as a whole process, for 1,000 checkpoints of 4 ranks (9 files each). No torch.

    python benchmarks/list_1000.py [--runs 20]

Prints the minimum, median and maximum of the wall time, warm, and the same for an empty root: the start alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.whole_process import report, wall_seconds
from tests.helpers.checkpoints import commit


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
            report(what, wall_seconds(["list", str(root)], runs))


if __name__ == "__main__":
    main()
