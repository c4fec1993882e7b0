"""How long a save takes in a root that holds 20,000 checkpoints of 4 ranks (9 files each), and in an empty one.

    python benchmarks/save_20000.py [--runs 10] [--checkpoints 20000] [--at FOLDER]

Prints the minimum, median and maximum of the seconds from the decision until a save of a few bytes is durable, and
until older checkpoints are pruned, and how far a loop of pure Python gets meanwhile, in per cent of what
it does undisturbed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import ckptman
from benchmarks.whole_process import report
from ckptman.runtime.journal import read_journal
from ckptman.storage.format.paths import journal_path
from tests.helpers.checkpoints import commit

_SAVE_SECONDS = 600.0
_SLICE_SECONDS = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--checkpoints", type=int, default=20_000)
    parser.add_argument("--at", type=Path, default=None, help="where to make them; a temporary folder unless said")
    options = parser.parse_args()
    for checkpoints in (0, options.checkpoints):
        with tempfile.TemporaryDirectory(dir=options.at) as folder:
            root, born = Path(folder), time.time() - (checkpoints + 1) * _SAVE_SECONDS
            for number in range(1, checkpoints + 1):
                when = born + number * _SAVE_SECONDS
                commit(root, number * 100, ranks=4, sequence=number, metrics={"loss": 3 / number}, time_seconds=when)
            durable, seconds, rates = saves(root, checkpoints * 100, options.runs)
            report(f"with {checkpoints:,}: durable", durable)
            report("pruned", seconds)
            low, high = min(rates), max(rates)
            print(f"{'a loop meanwhile':>18}: {low:.0f} to {high:.0f} % of its rate", flush=True)


def saves(root: Path, last: int, runs: int) -> tuple[list[float], list[float], list[float]]:
    """The seconds of each save until it is durable, and until the one before is pruned; and the rate of a loop
    meanwhile in per cent of what it is without. Each save but the first prunes the one before; the first counts for
    nothing."""
    retention = ckptman.KeepLast(1) | ckptman.KeepEvery(steps=100)
    seconds, rates = [], []
    with ckptman.Checkpointer(
        root, {"x": torch.zeros(64)}, save_policy=ckptman.OnStop(), retention=retention, deadline=None, watchdog=None
    ) as checkpointer:
        # Nothing here could be loaded: what is measured is what the root costs, and the run is told to begin after it.
        checkpointer._ready = True
        alone = rate_until(time.perf_counter() + 1.0)
        for number in range(1, runs + 2):
            begun = time.perf_counter()
            checkpointer.save(last + number)
            running, done = checkpointer._saver._running, 0
            while running and not running[0].done():
                done += _slice()
            took = time.perf_counter() - begun
            checkpointer.wait()
            seconds.append(took)
            rates.append(100 * done / took / alone)
            time.sleep(0.5)  # what is removed behind the training is removed, and saves are not all of one moment
    events, _ = read_journal(journal_path(root))
    durable = [event["seconds"] for event in events if event["event"] == "save_durable"]
    return durable[1:], seconds[1:], rates[1:]


def rate_until(end: float) -> float:
    """How many rounds a second the loop does until then."""
    begun, done = time.perf_counter(), 0
    while time.perf_counter() < end:
        done += _slice()
    return done / (time.perf_counter() - begun)


def _slice() -> int:
    done, end = 0, time.perf_counter() + _SLICE_SECONDS
    while time.perf_counter() < end:
        done += 1
    return done


if __name__ == "__main__":
    main()
