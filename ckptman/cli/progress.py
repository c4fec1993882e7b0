"""A bar on a terminal, with the time that is left; nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptman.cli import console as text


@contextmanager
def progress(what: str, total_bytes: int | None) -> Iterator[Callable[[float], None] | None]:
    """What to call with the bytes that were done since the last call; without `total_bytes`, with how much of all is
    done, from 0 to 1. None where nobody would see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts = (
        (TaskProgressColumn(),) if total_bytes is None else (DownloadColumn(binary_units=True), TransferSpeedColumn())
    )
    columns = TextColumn("{task.description}", markup=False), BarColumn(), *counts, TimeRemainingColumn()
    # Lines that are said meanwhile go above the bar; where standard output is no terminal, they stay there.
    above = sys.stdout.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=above) as bar:
        task = bar.add_task(text.plain(what), total=1.0 if total_bytes is None else total_bytes)
        if total_bytes is None:
            yield lambda part: bar.update(task, completed=part)
        else:
            yield lambda done: bar.advance(task, done)
