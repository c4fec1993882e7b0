"""Whether a rename is atomic, and seen at once: commits are made while another process looks at them all the time.

Called in a process of its own (`run_isolated`), which may hang, in a folder that nobody else uses.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from ckptman.doctor.finding import Finding, why
from ckptman.io.durable_files import DISK, Disk
from ckptman.io.isolated_process import IsolatedProcess

PATIENCE_SECONDS = 10.0
"""How long the other process may take to see what was renamed."""
SLOW_SIGHT_SECONDS = 1.0
_ROUNDS = 100
_BROKEN = "commits are not safe here: a run could load half a checkpoint, or find none. Save to another file system"
_NAMES = ("__0_0.distcp", "blocks-00000.bin", "manifest.json")
_PIECE_BYTES = 8
_FILE_BYTES = 4096


class _Wrong(Exception):
    """What another process saw, and must never see."""


@dataclass(frozen=True)
class _Change:
    """What is about to be renamed: `path` gets what was saved as number `new`.

    Until then it holds number `old`, and where it is gone for a moment `other` does. `old` is None: it is absent, and
    `other` is the name that it comes from. `other` is None: it is a file, and never absent.
    """

    path: Path
    other: Path | None
    old: int | None
    new: int


def check_rename(folder: Path, disk: Disk = DISK, seconds: float = 1.0) -> Finding:
    """Commits, commits over an earlier save, and replaced files, while another process looks at them all the time.

    It must never see a part of a folder, files of two saves together, neither the old name nor the new one, or both.
    """
    current, rounds, slowest = folder / "current.json", 0, 0.0
    _fill_file(current, 0)
    with IsolatedProcess(_watch, duplex=True) as watcher:
        deadline = time.monotonic() + seconds
        while rounds < 3 or (rounds < _ROUNDS and time.monotonic() < deadline):
            rounds += 1
            for change, act in _changes(folder, current, rounds, disk):
                try:
                    slowest = max(slowest, _watched(watcher, change, act))
                except _Wrong as error:
                    what = f"a folder or file that was renamed {error}" if str(error).startswith("was ") else str(error)
                    return Finding("rename", "FAILED", what, _BROKEN, {"round": rounds})
            for path in folder.glob("step-*"):
                disk.remove_tree(path)
    figures = {"renames": 4 * rounds, "slowest_visible_seconds": slowest}
    if slowest > SLOW_SIGHT_SECONDS:
        value = f"atomic, but another process saw it only after {slowest:.2g} s"
        advice = "commits are whole when they are seen; other nodes see them late"
        return Finding("rename", "slow", value, advice, figures)
    return Finding("rename", "ok", f"atomic, and seen at once by another process, {4 * rounds} times", "", figures)


def _changes(folder: Path, current: Path, number: int, disk: Disk) -> Iterator[tuple[_Change, Callable[[], None]]]:
    """A commit; a commit over it, which first stands aside; a file that is replaced. Each is ready when yielded."""
    step, first, second = folder / f"step-{number}", 2 * number, 2 * number + 1
    draft = _fill_folder(folder / f"step-{number}.tmp-1", first, disk)
    yield _Change(step, draft, None, first), lambda: disk.rename(draft, step)
    again = _fill_folder(folder / f"step-{number}.tmp-2", second, disk)
    aside = folder / f"step-{number}.old-2"

    def replace() -> None:
        disk.rename(step, aside)
        disk.rename(again, step)

    yield _Change(step, aside, first, second), replace
    written = folder / "current.json.tmp"
    _fill_file(written, number)
    yield _Change(current, None, number - 1, number), lambda: disk.rename(written, current)


def _watched(watcher: IsolatedProcess, change: _Change, act: Callable[[], None]) -> float:
    """Make a change while the watcher looks. Seconds until it saw it. Raises: _Wrong."""
    watcher.pipe.send(change)
    watcher.receive()  # it looks now
    act()
    done = time.monotonic()
    said: tuple[str, float] = watcher.receive()
    wrong, seen = said
    if wrong:
        raise _Wrong(wrong)
    return max(0.0, seen - done)


def _watch(pipe: Connection) -> None:
    """The other process: looks at each change it is told of, says when it has begun to, and what became of it."""
    while True:
        change: _Change = pipe.recv()
        pipe.send("looking")
        deadline = time.monotonic() + PATIENCE_SECONDS
        result: tuple[str, float] = (f"another process did not see it for {PATIENCE_SECONDS:g} s", 0.0)
        try:
            while time.monotonic() < deadline:
                if _see(change) == change.new:
                    result = ("", time.monotonic())
                    break
            if not result[0] and change.old is None and change.other is not None and _number(change.other) is not None:
                raise _Wrong("was seen under its old and its new name at a time")
        except _Wrong as wrong:
            result = (str(wrong), 0.0)
        except OSError as error:
            result = (f"could not be read while it was renamed: {why(error)}", 0.0)
        pipe.send(result)


def _see(change: _Change) -> int | None:
    """Return what the name holds now; None: nothing, and its other name does. Raises: _Wrong."""
    if change.other is None:
        try:
            data = change.path.read_bytes()
        except FileNotFoundError:
            raise _Wrong("a file was gone while it was being replaced") from None
        return _check(data, "a file that was being replaced")
    number = _number(change.path)
    if number is None and _number(change.other) is None:
        # Gone from its first name, and not yet under the other when we looked there: then it must be by now.
        number = _number(change.path)
        if number is None:
            raise _Wrong("was seen under neither name")
    if number not in (None, change.old, change.new):
        raise _Wrong("held what was saved before that")
    return number


def _number(folder: Path) -> int | None:
    """Return which save a folder holds; None: there is no such folder. Raises: _Wrong (a part of one, or two)."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        numbers = set()
        for name in _NAMES:
            try:
                file = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=fd)
            except FileNotFoundError:
                raise _Wrong(f"was seen without its {name}") from None
            with open(file, "rb", buffering=0) as opened:
                numbers.add(_check(opened.read(), name))
    finally:
        os.close(fd)
    if len(numbers) > 1:
        raise _Wrong("was seen with files of two saves")
    return numbers.pop()


def _check(data: bytes, what: str) -> int:
    if len(data) != _FILE_BYTES or data != data[:_PIECE_BYTES] * (_FILE_BYTES // _PIECE_BYTES):
        raise _Wrong(f"{what} was seen with {len(data):,} of {_FILE_BYTES:,} bytes, or with those of two saves")
    return int.from_bytes(data[:_PIECE_BYTES], "little")


def _fill_folder(path: Path, number: int, disk: Disk) -> Path:
    disk.make_folder(path)
    for name in _NAMES:
        _fill_file(path / name, number)
    return path


def _fill_file(path: Path, number: int) -> None:
    path.write_bytes(number.to_bytes(_PIECE_BYTES, "little") * (_FILE_BYTES // _PIECE_BYTES))
