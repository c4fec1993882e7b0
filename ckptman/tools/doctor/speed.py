"""How fast a mount is: durable writes and cold reads with one stream and with several, and small files.

Bytes move as in saves and loads: 4 MiB a call, past the page cache if the file system allows it. They cannot be
compressed. Every test ends after some seconds, with what it has moved by then. Raises: OSError.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.file_reader import FileReader
from ckptman.storage.io.mount import MEMORY, family_of
from ckptman.storage.io.threads import ALIGN_BYTES, STRIDE_BYTES
from ckptman.tools.doctor.finding import Finding, Place, Verdict, found, size_text

STREAMS = 4
"""A rank writes with as many."""
SHARE_OF_FREE = 0.05
"""A test of bandwidth takes at most this share of the free space. The small files of all checks are under 1 MB."""
LEAST_BYTES = 1024 * 1024
SLOW_BYTES_PER_SECOND = 0.5e9
"""What one process gets from a project folder on NFS, by the practitioners' table; scratch gives it four times that."""
SLOW_FILES_PER_SECOND = 100.0
ROUGH_BYTES = 64 * 1024 * 1024
_FLUSH_BYTES = 64 * 1024 * 1024
_SMALL_FILES = 200
_SMALL_BYTES = 4096


def most_bytes(rows: Mapping[str, Finding]) -> int:
    """Return how much a test may write, by the space and the quotas that were found; 0 if nobody knows what is free."""
    quotas = rows["quota"].figures.get("quotas", []) if "quota" in rows else []
    left: list[int] = [each["left_bytes"] for each in quotas if each["left_bytes"] is not None]
    return int(SHARE_OF_FREE * min([rows["space"].figures.get("free_bytes", 0), *left])) // 4096 * 4096


@dataclass(frozen=True)
class _Sample:
    """What a test of bandwidth moved, and how. `cold`: nothing came from the cache of this host."""

    streams: int
    bytes: int
    rate: float
    direct: bool
    cold: bool = True


def check_write(place: Place) -> Finding:
    """Durable writes with one stream, then with `STREAMS`, whose files stay for `check_read`."""
    if place.size_bytes < LEAST_BYTES:
        return _not_measured()
    one = _write(place, 1)
    for path in place.own.glob("stream-*"):
        DISK.remove_file(path)
    return _bandwidth(place, "durable", "", one, _write(place, STREAMS))


def check_read(place: Place) -> Finding:
    """Cold reads of the files that `check_write` left, with one stream, then with several."""
    if place.size_bytes < LEAST_BYTES:
        return _not_measured()
    if "bytes_per_second" not in place.found["write"].figures:
        return found("unknown", "not tried: nothing could be written")
    in_memory = place.mount is not None and family_of(place.mount) is MEMORY
    one, several = (_read(place, streams, in_memory) for streams in (1, STREAMS))
    cached = "from memory" if in_memory else "from the cache of this host, which does not let go of it"
    return _bandwidth(place, "cold", "" if one.cold and several.cold else cached, one, several)


def check_small_files(place: Place) -> Finding:
    """Small files: made and flushed one by one, looked at, removed."""
    data = os.urandom(_SMALL_BYTES)
    paths = [place.own / f"small-{number}" for number in range(_SMALL_FILES)]

    def rate(paths: Sequence[Path], work: Callable[[Path], object]) -> tuple[int, float]:
        began, count = time.monotonic(), 0
        for path in paths:
            work(path)
            count += 1
            if time.monotonic() > began + place.repeat_seconds:
                break
        return count, count / max(time.monotonic() - began, 1e-9)

    count, made = rate(paths, lambda path: DISK.write_file(path, data))
    _, looked = rate(paths[:count], os.stat)
    _, removed = rate(paths[:count], DISK.remove_file)
    told = (f"{each:,.0f}" if each >= 10 else f"{each:.2g}" for each in (made, looked, removed))
    value = "{} made and flushed, {} looked at, {} removed per s".format(*told)
    figures = {"files": count, "create_per_second": made, "stat_per_second": looked, "unlink_per_second": removed}
    if made < SLOW_FILES_PER_SECOND:
        return found("slow", value, "a save makes some files for each rank: many ranks wait for this", **figures)
    return found("ok", value, **figures)


def _not_measured() -> Finding:
    share = f"{SHARE_OF_FREE * 100:.0f} % of what is known to be free"
    return found("unknown", f"not measured: {share} is less than {size_text(LEAST_BYTES)}")


def _bandwidth(place: Place, how: str, instead: str, *both: _Sample) -> Finding:
    """Judge the rates. `how` the bytes were moved; `instead`: how else, if it is not as those of a checkpoint are."""
    best, least = max(each.rate for each in both), min(each.bytes for each in both)
    rough = place.size_bytes < ROUGH_BYTES
    doubts = [instead] if instead else []
    if least < place.size_bytes // 2:
        doubts.append(f"stopped after {size_text(least)}")
    if rough:
        doubts.append(f"rough: measured on {size_text(place.size_bytes)}")
    rates = ", ".join(
        f"{size_text(each.rate)}/s with {each.streams} stream{'s' if each.streams > 1 else ''}" for each in both
    )
    verdict: Verdict = "ok" if best >= SLOW_BYTES_PER_SECOND else "unknown" if rough else "slow"
    return found(
        verdict,
        f"{rates} ({', '.join(doubts if instead else [how, *doubts])})",
        "less than a project folder on NFS gives one process (0.5 GB/s)" if verdict == "slow" else "",
        test_bytes=place.size_bytes,
        bytes_per_second=best,
        doubts=doubts,
        **{f"bytes_per_second_{each.streams}": each.rate for each in both},
        direct=all(each.direct for each in both),
        cold=all(each.cold for each in both),
    )


def _write(place: Place, streams: int) -> _Sample:
    """Write files of one stream each, and flush them and the directory. The files stay."""
    from ckptman.storage.io.file_writer import FileWriter  # not at the top: it loads numpy, which the verb does without

    size = max(ALIGN_BYTES, place.size_bytes // streams // ALIGN_BYTES * ALIGN_BYTES)
    memory = mmap.mmap(-1, STRIDE_BYTES)
    memory.write(os.urandom(STRIDE_BYTES))
    data = memoryview(memory)
    began = time.monotonic()

    def write(number: int) -> tuple[int, bool]:
        done = unflushed = 0
        with FileWriter(place.own / f"stream-{number}", size, flags=os.O_EXCL) as file:
            # At least one call, so that there is a rate.
            while done < size and (not done or time.monotonic() < began + place.part_seconds):
                piece = data[: min(len(data), size - done)]
                file.write(piece, done)
                done, unflushed = done + len(piece), unflushed + len(piece)
                if unflushed >= _FLUSH_BYTES and not file.is_direct:
                    file.flush()  # else the last flush takes longer than the test may
                    unflushed = 0
            file.flush(done)
        return done, file.is_direct

    with ThreadPoolExecutor(streams) as pool:
        moved = list(pool.map(write, range(streams)))
    DISK.sync_folder(place.own)
    seconds, count = time.monotonic() - began, sum(each for each, _ in moved)
    return _Sample(streams, count, count / max(seconds, 1e-9), all(direct for _, direct in moved))


def _read(place: Place, streams: int, in_memory: bool) -> _Sample:
    """Read the files of `_write` once, past the cache of this host as far as it lets go of them."""
    paths = sorted(place.own.glob("stream-*"))
    dropped = [_drop(path) for path in paths]
    began = time.monotonic()

    def read(paths: Sequence[Path]) -> tuple[int, bool]:
        done, direct = 0, True
        scratch = memoryview(mmap.mmap(-1, STRIDE_BYTES))
        for path in paths:
            with closing(FileReader(path)) as file:
                offset, size = 0, os.fstat(file.open()).st_size
                while offset < size and (not done or time.monotonic() < began + place.part_seconds):
                    wanted = min(len(scratch), size - offset)
                    count = file.read_direct(offset, wanted, scratch)
                    if not count:
                        direct = False
                        count = file.read([scratch[:wanted]], offset)
                    done, offset = done + count, offset + count
        return done, direct

    with ThreadPoolExecutor(streams) as pool:
        moved = list(pool.map(read, (paths[number::streams] for number in range(streams))))
    seconds, count, direct = time.monotonic() - began, sum(each for each, _ in moved), all(each for _, each in moved)
    cold = not in_memory and all(direct if each is None else each for each in dropped)
    return _Sample(streams, count, count / max(seconds, 1e-9), direct, cold)


def _drop(path: Path) -> bool | None:
    """Take a file out of the page cache; return whether its first byte is gone from it, None if nobody can say."""
    with closing(FileReader(path)) as file:
        with suppress(OSError):
            os.posix_fadvise(file.open(), 0, 0, os.POSIX_FADV_DONTNEED)
        cached = file.is_cached(0)
    return None if cached is None else not cached
