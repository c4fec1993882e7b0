"""The end of a process that is stuck: whatever it hangs on must not hang this too, so every part of it has its time."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ckptman.errors import EXIT_STALLED, plain_lines
from ckptman.io.filesystem import DISK, Disk

PART_SECONDS = 10.0
"""How long a part may take. A file system that is slower than that is stuck, too."""
_OPEN = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def within(seconds: float, work: Callable[[], object]) -> bool:
    """Do `work` in a thread that is left behind after that many seconds. Whether it was done, with no error."""
    done = threading.Event()

    def run() -> None:
        with contextlib.suppress(Exception):
            work()
            done.set()

    try:
        thread = threading.Thread(target=run, daemon=True, name="ckptman-last-words")
        thread.start()
    except RuntimeError:  # no more threads are to be had
        return False
    thread.join(seconds)
    return done.is_set()


def write_stacks(path: Path, text: str, disk: Disk = DISK) -> None:
    """Append `text` and the stack of every thread to a file. Raises: OSError."""
    disk.make_folders(path.parent)
    fd = os.open(path, _OPEN, 0o666)
    try:
        os.write(fd, f"{plain_lines(text)}\n\n".encode())
        faulthandler.dump_traceback(fd, all_threads=True)
    finally:
        os.close(fd)


def say(text: str) -> None:
    """A line on standard error, past whatever sys.stderr is: its lock may be held by a thread that hangs."""
    os.write(2, f"ckptman: {plain_lines(text)}\n".encode())


def end_process(
    text: str,
    stacks: Path,
    parts: Sequence[tuple[float, Callable[[], object]]] = (),
    leave: Callable[[int], object] = os._exit,
) -> None:
    """Write the stacks, say why, do the `parts` (each with the seconds that it may take), and leave with code 13.

    Stacks that cannot be written to their file go to standard error. Called by the thread of the watchdog.
    """
    if within(PART_SECONDS, lambda: write_stacks(stacks, text)):
        text = f"{text}; stacks are in {stacks}"
    else:
        within(PART_SECONDS, lambda: faulthandler.dump_traceback(2, all_threads=True))
    within(PART_SECONDS, lambda: say(text))
    for seconds, part in parts:
        within(seconds, part)
    within(PART_SECONDS, sys.stdout.flush)
    leave(EXIT_STALLED)
