"""How fast a mount is: durable writes and cold reads with one stream and with several, and small files.

Written and read by what saves and loads do it with: 4 MiB a call, past the page cache where the file system takes that.
What is written cannot be compressed. Every test ends after some seconds, with what it has moved by then. Called in a
process of its own (`run_isolated`). Raises: OSError.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptman.storage.io.durable_files import DISK, Disk
from ckptman.storage.io.file_reader import FileReader
from ckptman.storage.io.threads import ALIGN_BYTES, STRIDE_BYTES
from ckptman.tools.doctor.finding import Finding, Verdict, size_text

if TYPE_CHECKING:
    from ckptman.storage.io.file_writer import FileWriter

STREAMS = 4
"""As many as a rank writes with."""
SLOW_BYTES_PER_SECOND = 0.5e9
"""What one process gets from a project folder on NFS, by the practitioners' table; scratch gives it four times that."""
SLOW_FILES_PER_SECOND = 100.0
ROUGH_BYTES = 64 * 1024 * 1024
_FLUSH_BYTES = 64 * 1024 * 1024
_SMALL_FILES = 200
_SMALL_BYTES = 4096


@dataclass(frozen=True)
class SpeedSample:
    """What a test of bandwidth moved, and how. `cold`: what was read was not in the cache of this host."""

    streams: int
    bytes: int
    seconds: float
    direct: bool
    cold: bool = True

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.bytes / max(self.seconds, 1e-9)


def write_streams(folder: Path, size_bytes: int, streams: int, limit_seconds: float, disk: Disk = DISK) -> SpeedSample:
    """Write `size_bytes` in files of one stream each, and flush files and folder. Files are left there."""
    from ckptman.storage.io.file_writer import FileWriter  # not at the top: it loads numpy, which the verb does without

    share = max(ALIGN_BYTES, size_bytes // streams // ALIGN_BYTES * ALIGN_BYTES)
    memory = mmap.mmap(-1, STRIDE_BYTES)
    memory.write(os.urandom(STRIDE_BYTES))
    data = memoryview(memory)

    def write(number: int) -> tuple[int, bool]:
        file = FileWriter(folder / f"stream-{number}", share, disk=disk, flags=os.O_EXCL)
        return _write(file, data, share, began + limit_seconds)

    began = time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        moved = list(pool.map(write, range(streams)))
    disk.sync_folder(folder)
    seconds = time.monotonic() - began
    return SpeedSample(streams, sum(count for count, _ in moved), seconds, all(direct for _, direct in moved))


def read_streams(folder: Path, streams: int, limit_seconds: float, in_memory: bool) -> SpeedSample:
    """Read the files of `write_streams` once, past the cache of this host as far as it lets go of them."""
    paths = sorted(folder.glob("stream-*"))
    dropped = [_drop(path) for path in paths]
    began = time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        shares = (paths[number::streams] for number in range(streams))
        moved = list(pool.map(lambda share: _read(share, began + limit_seconds), shares))
    seconds = time.monotonic() - began
    direct = all(each for _, each in moved)
    cold = not in_memory and all(direct if each is None else each for each in dropped)
    return SpeedSample(streams, sum(count for count, _ in moved), seconds, direct, cold)


def check_write(folder: Path, size_bytes: int, limit_seconds: float, disk: Disk = DISK) -> Finding:
    """Durable writes with one stream, then with `STREAMS`, whose files stay for `check_read`."""
    one = write_streams(folder, size_bytes, 1, limit_seconds, disk)
    for path in folder.glob("stream-*"):
        disk.remove_file(path)
    both = [one, write_streams(folder, size_bytes, STREAMS, limit_seconds, disk)]
    return _bandwidth("write", both, size_bytes, "durable")


def check_read(folder: Path, size_bytes: int, limit_seconds: float, in_memory: bool = False) -> Finding:
    """Cold reads of the files that `check_write` left, with one stream, then with several."""
    both = [read_streams(folder, streams, limit_seconds, in_memory) for streams in (1, STREAMS)]
    cached = "from memory" if in_memory else "from the cache of this host, which does not let go of it"
    return _bandwidth("read", both, size_bytes, "cold", "" if all(each.cold for each in both) else cached)


def check_small_files(folder: Path, limit_seconds: float, disk: Disk = DISK) -> Finding:
    """Files of 4 KiB: made and flushed one by one, looked at, removed. Each part ends after `limit_seconds`."""
    data = os.urandom(_SMALL_BYTES)
    paths = [folder / f"small-{number}" for number in range(_SMALL_FILES)]
    count, made = _repeat(paths, lambda path: disk.write_file(path, data), limit_seconds)
    _, looked = _repeat(paths[:count], os.stat, limit_seconds)
    _, removed = _repeat(paths[:count], disk.remove_file, limit_seconds)
    verdict: Verdict = "slow" if made < SLOW_FILES_PER_SECOND else "ok"
    advice = "" if verdict == "ok" else "a save makes some files for each rank: many ranks wait for this"
    value = f"{_rate(made)} made and flushed, {_rate(looked)} looked at, {_rate(removed)} removed per s"
    figures = {
        "files": count,
        "create_per_second": made,
        "stat_per_second": looked,
        "unlink_per_second": removed,
    }
    return Finding("small files", verdict, value, advice, figures)


def _bandwidth(name: str, both: Sequence[SpeedSample], size_bytes: int, how: str, instead: str = "") -> Finding:
    """`how` it was moved; `instead`: how it was, where that makes the rate another one than that of a checkpoint."""
    best = max(each.rate for each in both)
    rates = ", ".join(
        f"{size_text(each.rate)}/s with {each.streams} stream{'s' if each.streams > 1 else ''}" for each in both
    )
    doubts, rough = [instead] if instead else [], size_bytes < ROUGH_BYTES
    if min(each.bytes for each in both) < size_bytes // 2:
        doubts.append(f"stopped after {size_text(min(each.bytes for each in both))}")
    if rough:
        doubts.append(f"rough: measured on {size_text(size_bytes)}")
    notes = doubts if instead else [how, *doubts]
    verdict: Verdict = "ok" if best >= SLOW_BYTES_PER_SECOND else "unknown" if rough else "slow"
    advice = "less than a project folder on NFS gives one process (0.5 GB/s)" if verdict == "slow" else ""
    figures: dict[str, object] = {"test_bytes": size_bytes, "bytes_per_second": best, "doubts": doubts}
    figures |= {f"bytes_per_second_{each.streams}": each.rate for each in both}
    figures |= {"direct": all(each.direct for each in both), "cold": all(each.cold for each in both)}
    return Finding(name, verdict, f"{rates} ({', '.join(notes)})", advice, figures)


def _write(file: FileWriter, data: memoryview, size: int, stop: float) -> tuple[int, bool]:
    """Write a file until it is full or the time is over, and flush it: how many bytes, and whether by direct I/O."""
    done = unflushed = 0
    with file:
        # At least one call, so that there is a rate.
        while done < size and (not done or time.monotonic() < stop):
            piece = data[: min(len(data), size - done)]
            file.write(piece, done)
            done, unflushed = done + len(piece), unflushed + len(piece)
            if unflushed >= _FLUSH_BYTES and not file.is_direct:
                file.flush()  # else the last flush takes longer than the test may
                unflushed = 0
        file.flush(done)
    return done, file.is_direct


def _read(paths: Sequence[Path], stop: float) -> tuple[int, bool]:
    """Read files until they end or the time is over: how many bytes, and whether all of them by direct I/O."""
    done, direct = 0, True
    scratch = memoryview(mmap.mmap(-1, STRIDE_BYTES))
    for path in paths:
        with closing(FileReader(path)) as file:
            offset, size = 0, os.fstat(file.open()).st_size
            while offset < size and (not done or time.monotonic() < stop):
                wanted = min(len(scratch), size - offset)
                count = file.read_direct(offset, wanted, scratch)
                if not count:
                    direct = False
                    count = file.read([scratch[:wanted]], offset)
                done, offset = done + count, offset + count
    return done, direct


def _drop(path: Path) -> bool | None:
    """Take a file out of the page cache; whether its first byte is gone from it, None where nobody can say."""
    with closing(FileReader(path)) as file:
        with suppress(OSError):
            os.posix_fadvise(file.open(), 0, 0, os.POSIX_FADV_DONTNEED)
        cached = file.is_cached(0)
    return None if cached is None else not cached


def _repeat(paths: Sequence[Path], work: Callable[[Path], object], limit_seconds: float) -> tuple[int, float]:
    """Do something to one path after the other: to how many, and to how many a second."""
    began, count = time.monotonic(), 0
    for path in paths:
        work(path)
        count += 1
        if time.monotonic() > began + limit_seconds:
            break
    return count, count / max(time.monotonic() - began, 1e-9)


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
