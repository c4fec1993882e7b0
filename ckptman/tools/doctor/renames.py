"""Whether a rename is atomic, and when others see it: things are renamed while another process keeps looking.

A directory that is renamed is a commit, and must be complete at every look. A file that is replaced by a rename is a
record (rules, tiers, pins, the outcome), and a single look may miss it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.isolated_process import IsolatedProcess
from ckptman.tools.doctor import second_client
from ckptman.tools.doctor.finding import Finding, Place, found, why
from ckptman.tools.doctor.second_client import Pipe

SLOW_SIGHT_SECONDS = 1.5
"""Many clients remember names for a second."""
_PROMPT_SECONDS = 0.1
_PAUSE_SECONDS = 0.01
"""Between looks of another client: some keep a name for as long as it is asked for again and again."""
_ROUNDS = 100
_LEAST_ROUNDS = 3
_NAMES = ("__0_0.distcp", "blocks-00000.bin", "manifest.json")
_PIECE_BYTES = 8
_FILE_BYTES = 4096
_GONE_BRIEFLY = (errno.ENOENT, errno.ESTALE)
"""A look that fails with these is repeated."""


class _Wrong(Exception):
    """What another process saw, and must never see."""


@dataclass(frozen=True)
class _Change:
    """A rename that is about to happen: `name` gets the save with the number `new`; None: it is renamed away.

    Until then it holds the save `old`, and while it is gone, `other` holds it. `old` is None: the name is absent, and
    comes from `other`. `other` is None: it is a file, and never absent.
    """

    name: str
    other: str | None
    old: int | None
    new: int | None


@dataclass
class _Sight:
    """What the other process saw of a change; or, after `add`, the worst that it saw of several.

    `wrong`: what it must never see. `seconds`: until it saw the new content; `gone_seconds`: until it saw that a name
    was gone. `missed`: how often a look found nothing, because of `reason`, for `missed_seconds` at most.
    """

    wrong: str = ""
    is_seen: bool = True
    seconds: float = 0.0
    gone_seconds: float = 0.0
    missed: int = 0
    missed_seconds: float = 0.0
    reason: int = 0
    changes: int = 0

    def add(self, other: _Sight) -> None:
        self.wrong, self.is_seen = other.wrong, other.is_seen
        self.seconds = max(self.seconds, other.seconds)
        self.gone_seconds = max(self.gone_seconds, other.gone_seconds)
        self.missed, self.reason = self.missed + bool(other.missed), other.reason or self.reason
        self.missed_seconds = max(self.missed_seconds, other.missed_seconds)
        self.changes += 1


_Act = Callable[[], None]
_Changes = Callable[[Path, int], Iterator[tuple[_Change, _Act]]]


@dataclass(frozen=True)
class Sort:
    """A sort of change: how to make it, what to call its object, and the consequences."""

    changes: _Changes
    counted: str
    subject: str
    atomic: str
    broken: str
    missed: Mapping[int, str]
    """By the reason why a look found nothing."""
    late: str


def _commits(folder: Path, number: int) -> Iterator[tuple[_Change, _Act]]:
    """A commit; a commit over it, which first stands aside; a prune. Each is ready when it is yielded."""
    step, first, second = folder / f"step-{number}", 2 * number, 2 * number + 1
    draft, again = folder / f"step-{number}.tmp-1", folder / f"step-{number}.tmp-2"
    aside, trash = folder / f"step-{number}.old-2", folder / f"step-{number}.trash-3"

    def fill(path: Path, save: int) -> None:
        DISK.make_folder(path)
        for name in _NAMES:
            _fill(path / name, save)

    def replace() -> None:
        DISK.rename(step, aside)
        DISK.rename(again, step)

    fill(draft, first)
    yield _Change(step.name, draft.name, None, first), lambda: DISK.rename(draft, step)
    fill(again, second)
    yield _Change(step.name, aside.name, first, second), replace
    yield _Change(step.name, trash.name, second, None), lambda: DISK.rename(step, trash)
    for path in folder.glob("step-*"):
        DISK.remove_tree(path)


def _replacements(folder: Path, number: int) -> Iterator[tuple[_Change, _Act]]:
    current, written = folder / "current.json", folder / "current.json.tmp"
    if number == 1:
        _fill(current, 0)
    _fill(written, number)
    yield _Change(current.name, None, number - 1, number), lambda: DISK.rename(written, current)


_DELETED = "by its path, a checkpoint that was deleted or saved again fails there for so long"
COMMITS = Sort(
    changes=_commits,
    counted="renames",
    subject="a folder that was renamed",
    atomic="atomic",
    broken="commits are not safe here: a run could load half a checkpoint, or find none. Save to another file system",
    missed=dict.fromkeys(_GONE_BRIEFLY, _DELETED),
    late="commits are whole when they are seen, and seen late",
)
REPLACEMENTS = Sort(
    changes=_replacements,
    counted="replaced",
    subject="a file that was replaced",
    atomic="a file is old or new, never a mixture",
    broken="what ckptman notes beside checkpoints (rules, tiers, pins) could be read damaged. Save to another file "
    "system",
    missed={
        errno.ENOENT: "what ckptman notes beside checkpoints is replaced so, and missed by whoever looks just then: "
        "pin nothing again, and start no run, while another process prunes",
        errno.ESTALE: "what ckptman notes beside checkpoints is replaced so: a command that reads it at that moment "
        "may fail, and works when it is called again",
    },
    late="rules, pins and outcomes are read as they were for so long",
)


def check(sort: Sort, place: Place) -> Finding:
    """Check changes of a sort while another process keeps looking at them.

    It must never see a part of a directory, a mixture of two saves or of two files, neither the old name nor the new
    one, or both. Another client may see an old name for longer: it remembers names. A file that cannot be read for a
    moment is a warning: a second look finds it.
    """
    sight, who = _watched(sort.changes, place), place.second.who
    figures = {
        sort.counted: sight.changes,
        "slowest_visible_seconds": sight.seconds,
        "slowest_gone_seconds": sight.gone_seconds,
        "missed": sight.missed,
        "missed_seconds": sight.missed_seconds,
    }
    if sight.wrong:
        return found("FAILED", f"{sort.subject} {sight.wrong}", sort.broken, **figures)
    if sight.missed:
        at_most = "up to" if sight.is_seen else "at least"
        value = f"{sort.atomic}, but {who} could not read {sort.subject} for {at_most} {sight.missed_seconds:.2g} s "
        value += f"({os.strerror(sight.reason)}), {sight.missed} times of {sight.changes}"
        return found("warning", value, sort.missed[sight.reason], **figures)
    is_slow = not sight.is_seen or sight.seconds > SLOW_SIGHT_SECONDS
    if not sight.is_seen:
        value = f"{sort.atomic}, but {who} did not see it within {second_client.PATIENCE_SECONDS:g} s"
    elif is_slow:
        value = f"{sort.atomic}, but {who} saw it only after {sight.seconds:.2g} s"
    elif place.second.is_elsewhere:
        value = f"{sort.atomic}, and seen by {who} after {sight.seconds:.2g} s at most, {sight.changes} times"
    else:
        value = f"{sort.atomic}, and seen at once by another process, {sight.changes} times"
    if sight.gone_seconds > _PROMPT_SECONDS:
        value += f"; a checkpoint that was deleted is found there by its path for {sight.gone_seconds:.2g} s"
    return found("slow" if is_slow else "ok", value, sort.late if is_slow else "", **figures)


def _watched(changes: _Changes, place: Place) -> _Sight:
    """Make changes while the other process looks, until one is wrong or not seen, or the time is over."""
    total, rounds = _Sight(), 0
    with place.second.start(watch, place.own) as watcher:
        deadline = time.monotonic() + place.repeat_seconds / 2
        while rounds < _ROUNDS and (rounds < _LEAST_ROUNDS or time.monotonic() < deadline):
            rounds += 1
            for change, act in changes(place.own, rounds):
                total.add(_watch_one(watcher, change, act, place.second.is_elsewhere))
                if total.wrong or not total.is_seen:
                    return total
            if total.seconds > SLOW_SIGHT_SECONDS:
                break  # more would only take long
    return total


def _watch_one(watcher: IsolatedProcess, change: _Change, act: _Act, is_elsewhere: bool) -> _Sight:
    patience_seconds = second_client.PATIENCE_SECONDS
    watcher.pipe.send([*astuple(change), is_elsewhere, patience_seconds])
    watcher.receive()  # it looks now
    act()
    done = time.monotonic()
    watcher.pipe.send("what was seen?")
    sight = _Sight(**watcher.receive(3 * patience_seconds))
    setattr(sight, "gone_seconds" if change.new is None else "seconds", time.monotonic() - done)
    return sight


def watch(pipe: Pipe, folder: Path) -> None:
    """Task: look at each change of a message, answer when looking begins, and then what was seen of the change."""
    while True:
        *fields, is_elsewhere, patience_seconds = pipe.recv()
        change = _Change(*fields)
        with suppress(_Wrong, OSError):
            _see(folder, change, is_elsewhere)  # a client may remember what it has asked for
        pipe.send("looking")
        sight = _look(folder, change, is_elsewhere, patience_seconds)
        pipe.recv()
        pipe.send(asdict(sight))


def _look(folder: Path, change: _Change, is_elsewhere: bool, patience_seconds: float) -> _Sight:
    """Look until the change is seen."""
    sight, deadline = _Sight(is_seen=False), time.monotonic() + patience_seconds
    missed_since: float | None = None
    try:
        while not sight.is_seen and time.monotonic() < deadline:
            try:
                sight.is_seen, is_missed = _see(folder, change, is_elsewhere) == change.new, False
            except OSError as error:
                if error.errno not in _GONE_BRIEFLY:
                    raise _Wrong(f"could not be read at that moment: {why(error)}") from None
                sight.missed, sight.reason, is_missed = sight.missed + 1, error.errno, True
                missed_since = missed_since or time.monotonic()
            if missed_since is not None:
                sight.missed_seconds = max(sight.missed_seconds, time.monotonic() - missed_since)
                missed_since = missed_since if is_missed else None
            if is_elsewhere and not sight.is_seen:
                time.sleep(_PAUSE_SECONDS)
        if not is_elsewhere:  # another client may remember names
            if missed_since is not None:
                raise _Wrong(f"could not be read for {patience_seconds:g} s: {os.strerror(sight.reason)}")
            if not sight.is_seen:
                raise _Wrong(f"was not seen by another process for {patience_seconds:g} s")
            if change.old is None and change.other is not None and os.path.lexists(folder / change.other):
                raise _Wrong("was seen under its old and its new name at a time")
    except _Wrong as wrong:
        sight.wrong = str(wrong)
    return sight


def _see(folder: Path, change: _Change, is_elsewhere: bool) -> int | None:
    """Return what the name holds now; None: nothing, and its other name does. Raises: _Wrong, OSError."""
    path = folder / change.name
    if change.other is None:
        return _number_in(path.read_bytes())
    try:
        number = _number(path)
    except _Wrong:
        if not is_elsewhere or change.old is None:
            raise
        # Another client may remember the name of a directory that is gone, and find no file in it.
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from None
    if number is None and not is_elsewhere and _number(folder / change.other) is None:
        # Gone from its first name, and not yet under the other when we looked there: then it must be by now.
        number = _number(path)
        if number is None:
            raise _Wrong("was seen under neither name")
    if number not in (None, change.old, change.new):
        raise _Wrong("held what was saved before that")
    return number


def _number(folder: Path) -> int | None:
    """Return which save a directory holds; None: there is no such directory. Raises: _Wrong (a part of one, or two)."""
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
                numbers.add(_number_in(opened.read(), f" of {name}"))
    finally:
        os.close(fd)
    if len(numbers) > 1:
        raise _Wrong("was seen with files of two saves")
    return numbers.pop()


def _number_in(data: bytes, of_file: str = "") -> int:
    if len(data) != _FILE_BYTES or data != data[:_PIECE_BYTES] * (_FILE_BYTES // _PIECE_BYTES):
        raise _Wrong(f"was seen with {len(data):,} of {_FILE_BYTES:,} bytes{of_file}, or with those of two saves")
    return int.from_bytes(data[:_PIECE_BYTES], "little")


def _fill(path: Path, number: int) -> None:
    path.write_bytes(number.to_bytes(_PIECE_BYTES, "little") * (_FILE_BYTES // _PIECE_BYTES))
