"""The end of the log of an attempt, which is evidence of why it ended."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptman.jobs.chain_record import AttemptRecord

MOST_BYTES = 8 * 1024 * 1024
_LONGEST_LINE = 2000


def logs_of_this_process() -> dict[str, Any]:
    """Return the log fields of an `AttemptRecord` for the output of this process."""
    (log, log_begin), (error_log, error_begin) = _file_of(1), _file_of(2)
    if error_log == log:
        error_log, error_begin = "", 0
    return {"log": log, "log_begin": log_begin, "error_log": error_log, "error_begin": error_begin}


def logs_of(attempt: AttemptRecord, later: Sequence[AttemptRecord] = ()) -> list[list[str]]:
    """Return the last lines that an attempt wrote, at most 8 MiB of each file; the file of its errors first.

    `later`: attempts that may have written to the same files since.
    """
    errors = [each.error_begin for each in later if each.error_log == attempt.error_log]
    output = [each.log_begin for each in later if each.log == attempt.log]
    return [
        list(_tail(attempt.error_log, attempt.error_begin, min(errors, default=None))),
        list(_tail(attempt.log, attempt.log_begin, min(output, default=None))),
    ]


def _tail(path: str, begin: int, end: int | None) -> Iterator[str]:
    with suppress(OSError, ValueError):
        if not path or not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 a FIFO would block
            return
        with open(path, "rb") as log:
            size = os.fstat(log.fileno()).st_size
            end = size if end is None else min(end, size)
            begin = max(begin if begin <= end else 0, end - MOST_BYTES)
            log.seek(begin)
            text = log.read(end - begin).decode(errors="replace")
        for line in text.splitlines():
            yield line[:_LONGEST_LINE]


def _file_of(descriptor: int) -> tuple[str, int]:
    """Return the file that a descriptor leads to, and its size; "" if it is not a file."""
    try:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        path.encode()  # else it could not be recorded
        found = os.fstat(descriptor)
    except (OSError, UnicodeEncodeError):
        return "", 0
    return (path, found.st_size) if stat.S_ISREG(found.st_mode) else ("", 0)
