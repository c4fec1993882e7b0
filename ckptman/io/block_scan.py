"""Reading whole files at the speed of storage, each block digested while it lies in the cache of the core. Torch-free.

`ranges` reads what somebody wants and stops at the first block that is not right. This reads everything, goes on past
what cannot be read, and keeps the digest of each block: which of them are wrong is for the caller.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ckptman.io.file_scan import Hand, Pieces, Scanned, Source
from ckptman.io.scan_processes import digest_apart, groups_of
from ckptman.io.workers import STRIDE_BYTES, THREADS_ENV, cores, io_threads, share_out

_MOST_THREADS = 8


def scan(
    folder: Path,
    sizes: Sequence[tuple[str, int]],
    block_bytes: int,
    *,
    finish: Callable[[Scanned], None],
    threads: int | None = None,
    done: Callable[[int], None] | None = None,
    processes: bool = False,
) -> None:
    """Read the first so many bytes of each of these files, shared out by pieces of a few MiB.

    `finish` is told each file when all of it is read, `done` the bytes that were. Both are called from several threads.
    Without `threads`: one for each core, at most 8, or `CKPTMAN_IO_THREADS`; twice as many where the disk is waited
    for. With `processes`, as many forked processes go before them where there is much to read (see `blockteam`).
    Memory: scratch of 4 MiB for each, and the digests of the files that are under way.
    """
    pieces = Pieces(folder, sizes, block_bytes)
    for source in pieces.sources:
        if not source.size:
            source.open_once()
            source.close()
            finish(source.scanned)
    hands: dict[int, Hand] = {}

    def end(source: Source, count: int) -> None:
        last = source.end(count)
        if done is not None:
            done(count)
        if last:
            finish(source.scanned)

    def work(left: Sequence[int], place: int, scratch: memoryview) -> None:
        source, low, high = pieces.at(left[place])
        hand = hands.get(id(scratch))
        if hand is None:
            hand = hands[id(scratch)] = Hand(scratch, block_bytes)
        source.read(low, high, hand)
        end(source, high - low)

    try:
        threads = threads or default_threads() * (2 if pieces.begin_cold() else 1)
        for group in groups_of(pieces):
            left: Sequence[int] = digest_apart(pieces, group, threads, end) if processes else group
            share_out(len(left), partial(work, left), threads=threads, scratch_bytes=STRIDE_BYTES)
    finally:
        for source in pieces.sources:
            source.close()


def default_threads() -> int:
    """As many as there are cores for this process, at most 8, or `CKPTMAN_IO_THREADS`. Raises: ConfigError."""
    if os.environ.get(THREADS_ENV, "").strip():
        return io_threads()
    return min(_MOST_THREADS, cores())
