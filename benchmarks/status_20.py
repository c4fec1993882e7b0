"""How long `ckptman status` of 20 runs and `ckptman report` of a journal of 100,000 lines take, as whole processes.

    python benchmarks/status_20.py [--runs 5]

Prints the minimum, median and maximum of the wall time, warm, and the size of the page. No torch.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.whole_process import report, wall_seconds
from tests.helpers.journals import make_root
from tests.tools.monitoring.invented_run import InventedRun, invented

LINES = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        roots = []
        for seed in range(20):
            run = invented(seed, 40)
            roots.append(str(make_root(Path(folder, str(seed)), run.events, [100, 200, run.durable_step])))
        report("status of 20 runs", wall_seconds(["status", *roots, "--no-slurm"], runs))
        long = InventedRun(1, step_seconds=16.0, interval_steps=20)
        while len(long.events) < LINES:
            long.job(long.random.choice(("stopped", "killed", "failed")), 5000)
        events = [{**each, "time": each["time"]} for each in long.events[:LINES]]
        root = make_root(Path(folder, "long"), events, [long.durable_step])
        size = (root / ".ckptman/journal.jsonl").stat().st_size
        page = Path(folder, "page.html")
        print(f"a journal of {len(events):,} lines, {size / 1e6:.1f} MB, {len(long.jobs)} jobs")
        report("report, as text", wall_seconds(["report", str(root), "--no-slurm"], runs))
        report("report, as a page", wall_seconds(["report", str(root), "--no-slurm", "--html", str(page)], runs))
        print(f"the page: {page.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
