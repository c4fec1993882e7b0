"""Progress bars with the remaining time, if standard error is a terminal."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from ckptman.cli import console

_AGAIN_SECONDS = 0.01

if TYPE_CHECKING:
    from rich.progress import Progress

    from ckptman.forecast.transfer_time import Remaining
    from ckptman.storage.transfer.progress import Meter


@contextmanager
def progress(what: str, total_bytes: int | None) -> Iterator[Callable[[float], None] | None]:
    """Yield a function to call with the bytes done since the last call, or None if standard error is not a terminal.

    Without `total_bytes` it is to be called with the fraction done so far, from 0 to 1.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import DownloadColumn, TaskProgressColumn, TimeRemainingColumn, TransferSpeedColumn

    counts = (
        (TaskProgressColumn(),) if total_bytes is None else (DownloadColumn(binary_units=True), TransferSpeedColumn())
    )
    with _bar(*counts, TimeRemainingColumn()) as bar:
        task = bar.add_task(console.plain(what), total=1.0 if total_bytes is None else total_bytes)
        if total_bytes is None:
            yield lambda part: bar.update(task, completed=part)
        else:
            yield lambda done: bar.advance(task, done)


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Yield a function to call with what is being done: a line that each call replaces, shown on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    try:
        yield lambda text: print(f"\r\x1b[K{console.plain(text)} ...", end="", file=sys.stderr, flush=True)
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP end the command with everything cleaned up."""

    def leave(number: int, frame: FrameType | None) -> None:
        if _is_in_finalizer(frame):  # where Python drops what is raised
            threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number)).start()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)

    with ExitStack() as undo:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(each) in (signal.SIG_DFL, signal.default_int_handler):  # nohup has SIGHUP ignored
                undo.callback(signal.signal, each, signal.signal(each, leave))
        yield


def _is_in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@contextmanager
def copy_progress(name: str) -> Iterator[Meter]:
    """Yield the meter of a copy, and show its phase, speed and remaining time."""
    from ckptman.storage.transfer.progress import Meter

    if not sys.stderr.isatty():
        yield Meter()
        return
    from rich.progress import DownloadColumn, TextColumn, TransferSpeedColumn

    left = TextColumn("{task.fields[left]}", markup=False)
    with _bar(DownloadColumn(binary_units=True), TransferSpeedColumn(), left) as bar:
        task = bar.add_task(console.plain(name), total=None, left="")
        shown = [""]

        def show(meter: Meter) -> None:
            if shown[0] != meter.phase:  # else the speed would be that of the phase before
                shown[0] = meter.phase
                bar.reset(task, total=meter.total_bytes, description=f"{console.plain(name)}: {meter.phase}")
            bar.update(task, completed=meter.done_bytes, left=left_text(meter.remaining()))

        yield Meter(show)


def _bar(*columns: Any) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    # Lines that are said meanwhile go above the bar; where standard output is no terminal, they stay there.
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )


def left_text(left: Remaining | None) -> str:
    """`12 s left`, or where both matter `12 s left: 8 s of bytes, 4 s of files`."""
    if left is None:
        return ""
    told = f"{console.age(left.seconds)} left"
    if left.both_matter:
        told += f": {console.age(left.byte_seconds)} of bytes, {console.age(left.file_seconds)} of files"
    return told
