"""How fast `ckptman verify` reads, against threads that do nothing but read the same files.

    python benchmarks/verify.py [--size-gib 6] [--rounds 15] [--cold] [--root runs/bench]

A state is saved by four ranks with `ckptman.save`, so there are several large files; below a few GiB the start of the
processes counts too. Then, in rounds, they are
read raw (preads of 4 MiB into one reused buffer a thread) and verified, on 1, 2 and 4 threads each, in an order that
turns from round to round. Prints the ratio of the speeds, verify to raw: minimum, median and maximum over the rounds,
for each number of threads and for the best of each. The bar is 0.8 for the best, warm. `--cold` also measures with the
files out of the page cache.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the threads of a pool do not come along when ranks are forked
sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.engine import cache
from benchmarks.engine.team import forked, fresh, ranks
from ckptman.storage.format.manifest import read_manifest
from ckptman.storage.integrity.folder_check import check_coverage, verify_folder

THREADS = (1, 2, 4)
STRIDE_BYTES = 4 << 20
RANKS = 4
BAR = 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size-gib", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--root", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.root) as folder:
        path = Path(folder, "step-0000000001")
        forked(save_state, path, int(options.size_gib * (1 << 30)))
        files = {name: record.bytes for name, record in read_manifest(path).files.items()}
        total = sum(files.values())
        print(f"{len(files)} files, {total / (1 << 30):.2f} GiB, {os.cpu_count()} cores")
        for cold in (False, True) if options.cold else (False,):
            print("cold" if cold else "warm")
            _report(fresh(measure, path, options.rounds, cold), total)
        shutil.rmtree(path)


def measure(path: Path, rounds: int, cold: bool) -> list[dict[tuple[str, int], float]]:
    """Seconds of each contestant, round by round, in a process without torch, as the command is one. The first round
    is for warming up and is left out."""
    work: list[tuple[tuple[str, int], Callable[[], None]]] = []
    for threads in THREADS:
        work += [(("raw", threads), _raw(path, threads)), (("verify", threads), _verify(path, threads))]
    results = []
    for number in range(rounds + 1):
        seconds = {}
        turn = number % len(work)
        for name, run in work[turn:] + work[:turn]:
            cache.evict(path) if cold else cache.warm(path)
            begun = time.perf_counter()
            run()
            seconds[name] = time.perf_counter() - begun
        results.append(seconds)
    return results[1:]


def _report(rounds: list[dict[tuple[str, int], float]], total: int) -> None:
    for threads in THREADS:
        raw, ours = ([each[what, threads] for each in rounds] for what in ("raw", "verify"))
        speeds = (
            f"raw {total / statistics.median(raw) / 1e9:5.2f} GB/s, verify {total / statistics.median(ours) / 1e9:5.2f}"
        )
        print(f"  {threads} threads: {speeds} GB/s, {_ratios([r / o for r, o in zip(raw, ours)])}")
    best = [min(each["raw", n] for n in THREADS) / min(each["verify", n] for n in THREADS) for each in rounds]
    held = "held" if statistics.median(best) >= BAR else "MISSED"
    print(f"  best of each: {_ratios(best)}; the bar of {BAR} is {held}")


def _ratios(ratios: list[float]) -> str:
    return f"ratio min {min(ratios):.2f}, median {statistics.median(ratios):.2f}, max {max(ratios):.2f}"


def save_state(path: Path, size: int) -> None:
    """Save a state of that many bytes with several ranks."""
    from benchmarks.engine.state import empty_shared_state, fill

    ranks(RANKS, _save, fill(empty_shared_state(size)), path)


def _save(rank: int, state: dict[str, Any], path: Path) -> None:
    import ckptman

    ckptman.save(state, path)


def _verify(path: Path, threads: int) -> Callable[[], None]:
    """The default level as the command does it, without the start of a process."""

    def run() -> None:
        manifest = read_manifest(path)
        assert verify_folder(path, manifest, threads=threads, processes=True).good
        assert check_coverage(path, manifest) == []

    return run


def _raw(path: Path, threads: int) -> Callable[[], None]:
    sizes = {name: record.bytes for name, record in read_manifest(path).files.items()}
    pieces = [
        (name, low, min(STRIDE_BYTES, size - low))
        for name, size in sizes.items()
        for low in range(0, size, STRIDE_BYTES)
    ]
    buffers = [memoryview(mmap.mmap(-1, STRIDE_BYTES)) for _ in range(threads)]
    for buffer in buffers:
        buffer[:] = bytes(STRIDE_BYTES)  # touched, as a reused buffer is

    def run() -> None:
        numbers = count()
        fds = {name: os.open(path / name, os.O_RDONLY) for name in sizes}

        def read(buffer: memoryview) -> None:
            while (number := next(numbers)) < len(pieces):
                name, low, size = pieces[number]
                while size:
                    got = os.preadv(fds[name], [buffer[:size]], low)
                    low, size = low + got, size - got

        helpers = [threading.Thread(target=read, args=(buffer,)) for buffer in buffers[1:]]
        for helper in helpers:
            helper.start()
        read(buffers[0])
        for helper in helpers:
            helper.join()
        for fd in fds.values():
            os.close(fd)

    return run


if __name__ == "__main__":
    main()
