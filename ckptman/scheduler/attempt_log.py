"""The end of the log of an attempt, which is evidence of why it ended."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptman.scheduler.chain_record import AttemptRecord

MOST_BYTES = 8 * 1024 * 1024
_LONGEST_LINE = 2000


def logs_of_this_process() -> dict[str, Any]:
    """Return where the output of this process goes, as an attempt records it."""
    (log, log_begin), (error_log, error_begin) = _file_of(1), _file_of(2)
    if error_log == log:
        error_log, error_begin = "", 0
    return {"log": log, "log_begin": log_begin, "error_log": error_log, "error_begin": error_begin}


def logs_of(attempt: AttemptRecord) -> list[list[str]]:
    """Return the last lines that an attempt wrote, at most 8 MiB of each file; the file of its errors first."""
    files = ((attempt.error_log, attempt.error_begin), (attempt.log, attempt.log_begin))
    return [list(_tail(path, begin)) for path, begin in files]


def _tail(path: str, begin: int) -> Iterator[str]:
    with suppress(OSError, ValueError):
        if not path or not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 a FIFO would block
            return
        with open(path, "rb") as log:
            size = os.fstat(log.fileno()).st_size
            log.seek(max(begin if begin <= size else 0, size - MOST_BYTES))
            text = log.read(MOST_BYTES).decode(errors="replace")
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
