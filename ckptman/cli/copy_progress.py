"""How far a copy is, on a terminal: bytes, speed, and the time that is left, with what it is made of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckptman.cli import console as text

if TYPE_CHECKING:
    from ckptman.forecast.transfer_time import Remaining
    from ckptman.transfer.progress import Meter


@contextmanager
def copy_progress(name: str) -> Iterator[Meter]:
    """What counts the pieces of a copy; shown where somebody looks."""
    from ckptman.transfer.progress import Meter

    if not sys.stderr.isatty():
        yield Meter()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TextColumn("{task.fields[left]}", markup=False),
    )
    above = sys.stdout.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=above) as bar:
        task = bar.add_task(text.plain(name), total=None, left="")
        shown = [""]

        def show(meter: Meter) -> None:
            if shown[0] != meter.phase:  # else the speed would be that of the phase before
                shown[0] = meter.phase
                bar.reset(task, total=meter.total_bytes, description=f"{text.plain(name)}: {meter.phase}")
            bar.update(task, completed=meter.done_bytes, left=left_text(meter.remaining()))

        yield Meter(show)


def left_text(left: Remaining | None) -> str:
    """`12 s left`, or where both matter `12 s left: 8 s of bytes, 4 s of files`."""
    if left is None:
        return ""
    told = f"{text.age(left.seconds)} left"
    if left.both_matter:
        told += f": {text.age(left.byte_seconds)} of bytes, {text.age(left.file_seconds)} of files"
    return told
