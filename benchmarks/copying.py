"""How fast `ckptman copy` is from memory to disk, against `cp` and `sync` and the parallel tools at hand.

    python benchmarks/copying.py [--size-gib 4] [--rounds 5] [--source /dev/shm] [--root runs/bench] [--json FILE]

A state is saved by four ranks with `ckptman.save` to a file system in memory. Then, in rounds, it is copied to the
disk, durably: by `cp -r` and `sync`, by several `cp` at a time and `sync`, by several `dd` past the page cache, and by
`ckptman copy` with several numbers of threads, in an order that turns from round to round; each begins with nothing at
the destination and nothing unwritten in the page cache. What was copied is read back by several `dd` past the page
cache, and by the verification that is part of each copy of ours.

Prints, over the rounds, minimum, median and maximum of: copying, ours to the best of theirs; verifying, ours to the
best raw read; and both together, to what the bar allows: the best of theirs / 0.85 and the best raw read. A ratio of 1
or more holds.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.pop(0)  # the folder of this file, in which `import copy` would find this file
sys.path.insert(0, str(Path(__file__).parent.parent))

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the threads of a pool do not come along when ranks are forked

from benchmarks.engine.team import forked, fresh
from benchmarks.verify import save_state
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.transfer.copy import CopyOptions, copy_checkpoint

TOOLS = (2, 4)
"""So many processes of each parallel tool."""
THREADS = (0, 2, 8)
"""So many threads of ours; 0: as they come."""
BAR = 0.85
DD = "bs=4M status=none"
Round = dict[str, float]
"""Seconds of each contestant."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size-gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--source", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--root", type=Path, default=Path("runs/bench"))
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=options.source) as memory,
        tempfile.TemporaryDirectory(dir=options.root) as disk,
    ):
        path = Path(memory, "step-0000000001")
        forked(save_state, path, int(options.size_gib * (1 << 30)))
        total = Catalog(memory).entry(1).require_manifest().total_bytes
        print(f"{total / (1 << 30):.2f} GiB, {os.cpu_count()} cores, from {memory} to {disk}")
        rounds: list[Round] = fresh(measure, Path(memory), Path(disk), options.rounds)
    found = report(rounds, total)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"bytes": total, "ratios": found, "seconds": rounds}, indent=1) + "\n")


def measure(source: Path, disk: Path, rounds: int) -> list[Round]:
    """The rounds, in a process without torch, as the command is one. The first is for warming up and is left out."""
    folder = source / "step-0000000001"
    theirs = {"cp": f"cp -r {folder}/. {disk}/theirs && sync {disk}/theirs/* {disk}/theirs/.metadata {disk}/theirs"}
    for number in TOOLS:
        names = f"ls -A {folder} | xargs -P {number} -I@"
        theirs[f"cp x{number}"] = f"{names} sh -c 'cp {folder}/@ {disk}/theirs/@ && sync {disk}/theirs/@'"
        # Where a file ends in the middle of a page, dd writes that by itself.
        theirs[f"dd x{number}"] = f"{names} dd if={folder}/@ of={disk}/theirs/@ {DD} oflag=direct conv=fsync"
    contestants: list[Callable[[Round], None]] = [
        *(lambda into, name=name, line=line: _run(name, line, disk, into) for name, line in theirs.items()),  # type: ignore[misc]
        *(lambda into, number=number: _copy(source, disk, number, into) for number in THREADS),  # type: ignore[misc]
    ]
    results = []
    for number in range(rounds + 1):
        seconds: Round = {}
        turn = number % len(contestants)
        for run in contestants[turn:] + contestants[:turn]:
            os.sync()
            run(seconds)
        results.append(seconds)
    return results[1:]


def report(rounds: list[Round], total: int) -> dict[str, dict[str, float]]:
    """Print what came out, and give the ratios."""
    for name in rounds[0]:
        rates = sorted(total / each[name] / 1e9 for each in rounds)
        print(f"  {name:14} {rates[0]:5.2f}  {statistics.median(rates):5.2f}  {rates[-1]:5.2f} GB/s")

    def best(each: Round, *begin: str) -> float:
        return min(seconds for name, seconds in each.items() if name.startswith(begin))

    found: dict[str, dict[str, float]] = {}
    for threads in (*THREADS, None):
        ours = f" x{threads}" if threads is not None else ""
        ratios: dict[str, list[float]] = {"copying": [], "verifying": [], "both": []}
        for each in rounds:
            raw, read = best(each, "cp", "dd"), best(each, "read")
            copying, verifying = best(each, f"copy{ours}"), best(each, f"verify{ours}")
            ratios["copying"].append(raw / copying)
            ratios["verifying"].append(read / verifying)
            ratios["both"].append((raw / BAR + read) / (copying + verifying))
        for what, values in ratios.items():
            told = {"min": min(values), "median": statistics.median(values), "max": max(values)}
            found[f"{what}{ours or ' best'}"] = told
            bar = {"copying": BAR, "both": 1.0}.get(what)
            held = "" if bar is None else f"; the bar of {bar} is {'held' if told['median'] >= bar else 'MISSED'}"
            name = f"{what}{ours or ', best of ours'}"
            print(f"  {name:24} min {told['min']:.2f}, median {told['median']:.2f}, max {told['max']:.2f}{held}")
    return found


def _run(name: str, line: str, disk: Path, into: Round) -> None:
    target = disk / "theirs"
    target.mkdir()
    begun = time.perf_counter()
    subprocess.run(["sh", "-ec", line], check=True)
    _sync(target)
    into[name] = time.perf_counter() - begun
    if name.startswith("dd"):
        number = name.rpartition("x")[2]
        begun = time.perf_counter()
        line = f"ls -A {target} | xargs -P {number} -I@ dd if={target}/@ of=/dev/null {DD} iflag=direct"
        subprocess.run(["sh", "-ec", line], check=True)
        into[f"read x{number}"] = time.perf_counter() - begun
    shutil.rmtree(target)


def _copy(source: Path, disk: Path, threads: int, into: Round) -> None:
    root = disk / "ours"
    copied = copy_checkpoint(Catalog(source).entry(1), LocalBackend(root), CopyOptions(threads=threads or None))
    assert not copied.already
    assert not copied.from_memory
    into[f"copy x{threads}"], into[f"verify x{threads}"] = copied.copy_seconds, copied.verify_seconds
    shutil.rmtree(root)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


if __name__ == "__main__":
    main()
