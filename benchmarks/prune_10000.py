"""How long the plan of `ckptman prune` takes, as a whole process, for 10,000 checkpoints of 4 ranks (9 files each).

    python benchmarks/prune_10000.py [--runs 10] [--checkpoints 10000] [--at FOLDER]

Prints the minimum, median and maximum of the wall time of a dry run, warm, for several sets of rules. No torch.
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

RULES = {
    "last 3": ["--keep-last", "3"],
    "calendar": ["--keep-hourly", "24", "--keep-daily", "7", "--keep-weekly", "4", "--keep-monthly", "12"],
    "all of them": [
        *("--keep-last", "3", "--keep-every", "10000", "--keep-best", "loss:3", "--keep-within", "1d"),
        *("--keep-daily", "7", "--keep-steps", "100,5000", "--max-bytes", "1GB"),
    ],
}
_SAVE_SECONDS = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--at", type=Path, default=None, help="where to make them; a temporary folder unless said")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.at) as folder:
        root, born = Path(folder), time.time() - options.checkpoints * _SAVE_SECONDS
        for number in range(1, options.checkpoints + 1):
            when = born + number * _SAVE_SECONDS
            commit(root, number * 100, ranks=4, sequence=number, metrics={"loss": 3 / number}, time_seconds=when)
        for what, rules in RULES.items():
            report(what, wall_seconds(["prune", str(root), *rules, "--dry-run"], options.runs))


if __name__ == "__main__":
    main()
