"""`ckptman chain logs`: what the attempts of a chain print, from one attempt to the next."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ckptman.cli import console
from ckptman.errors import ConfigError, NotFoundError
from ckptman.jobs.chain_record import is_gone

if TYPE_CHECKING:
    from ckptman.jobs.chain_record import AttemptRecord, Chain

POLL_SECONDS, QUIET_SECONDS = 1.0, 60.0
"""How often a log is looked at, and after how long without a word a chain that ended is left though its last attempt
did not say how it ended."""
LONGEST_LINE_BYTES = 64 * 1024
LOOKED_BACK_BYTES = 16 * 1024 * 1024
"""So much of a log is searched for its last lines."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def show_logs(chain: Chain, number: int | None, lines: int, follow: bool) -> None:
    """Print the end of the log of an attempt (None: the last), and with `follow` what comes after it.

    Raises: NotFoundError (no such attempt, no log, nobody runs the chain any more), ConfigError (its output goes to no
    file), OSError.
    """
    attempts = chain.attempts()
    if number is not None and number not in [each.number for each in attempts]:
        known = f"it has {console.count(len(attempts), 'attempt')}"
        raise NotFoundError(f"{chain.folder} has no attempt {number}: {known}")
    if not attempts and not follow:
        raise NotFoundError(f"{chain.folder}: no attempt has begun yet, see ckptman chain show; -f waits for it")
    if not follow:
        attempt = attempts[-1] if number is None else attempts[number - 1]
        with closing(_Log(chain, attempt)) as log:
            if not log.open():
                raise NotFoundError(f"{attempt.log}, the log of attempt {attempt.number}, is not there: was it moved?")
            _say_title(attempt)
            log.skip_to_last(lines)
            _say(log.read())
            _say(log.rest())
        return
    for position, attempt in enumerate(_attempts(chain, number)):
        _say_title(attempt)
        with closing(_Log(chain, attempt)) as log:
            _follow(chain, log, lines if position == 0 else None)
    state = chain.state
    if is_gone(spec := chain.spec, state):
        raise NotFoundError(f"process {spec.pid}, which ran the chain, is gone: submit the command again to go on")
    _say([f"==> {state.state}: {state.reason} <=="])


def _attempts(chain: Chain, number: int | None) -> Iterator[AttemptRecord]:
    """Yield an attempt (None: the last that has begun), and as they begin those that follow it."""
    begun = chain.attempts()
    following = number or (begun[-1].number if begun else 1)
    while True:
        ended = _has_ended(chain)  # before the look: what begins meanwhile is seen in the next one
        found = [each for each in chain.attempts() if each.number == following]
        if found:
            yield found[0]
            following += 1
        elif ended:
            return
        else:
            time.sleep(POLL_SECONDS)


def _follow(chain: Chain, log: _Log, lines: int | None) -> None:
    """Print a log until its attempt, or the chain, has ended."""
    said, quiet_since = False, time.monotonic()
    while True:
        over = _is_over(chain, log.attempt)
        ended = over or _has_ended(chain)
        if log.open():
            if lines is not None:
                log.skip_to_last(lines)
                lines = None
            found = log.read()
            _say(found)
            quiet_since = time.monotonic() if found else quiet_since
        elif not said:
            said = True
            console.remark(f"{log.attempt.log} is not there yet")
        if over or (ended and time.monotonic() - quiet_since > QUIET_SECONDS):
            _say(log.rest())
            return
        time.sleep(POLL_SECONDS)


def _is_over(chain: Chain, attempt: AttemptRecord) -> bool:
    """Return whether nothing more comes from an attempt: it has ended, the next one has begun, or nobody runs it."""
    if attempt.number in chain.ends() or is_gone(chain.spec, chain.state):
        return True
    return any(each.number > attempt.number for each in chain.attempts())


def _has_ended(chain: Chain) -> bool:
    """Return whether no attempt follows."""
    state = chain.state
    return state.state not in ("active", "paused") or is_gone(chain.spec, state)


class _Log:
    """The part of a log that one attempt wrote, read as it grows. A log that is replaced, or cut, is begun anew."""

    def __init__(self, chain: Chain, attempt: AttemptRecord) -> None:
        self.attempt, self._chain = attempt, chain
        self._file: BinaryIO | None = None
        self._at, self._left = attempt.log_begin, b""

    def open(self) -> bool:
        """Open the log, or the one that took its place. False where there is none, and none was open."""
        attempt = self.attempt
        try:
            found = Path(attempt.log).stat()
        except FileNotFoundError:
            found = None
        if not attempt.log or (found is not None and not stat.S_ISREG(found.st_mode)):
            raise ConfigError(
                f"the output of attempt {attempt.number} goes to no file, but to a terminal or a pipe on "
                f"{attempt.host}: submit with > FILE to have a log"
            )
        if found is None:
            return self._file is not None
        if self._file is not None:
            own = os.fstat(self._file.fileno())
            if (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino) and found.st_size >= self._at:
                return True
            _say([*self.read(), *self.rest(), "==> the log was replaced, or cut: from its beginning <=="])
            self._file.close()
            self._at = 0
        elif found.st_size < self._at:  # rotated since the attempt began
            self._at = 0
        self._file = open(self.attempt.log, "rb")
        return True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def skip_to_last(self, lines: int) -> None:
        """Leave out all but the last lines of what is there."""
        assert self._file is not None
        end = self._end()
        start = max(self._at, end - LOOKED_BACK_BYTES)
        self._file.seek(start)
        data = self._file.read(end - start)
        found = data.split(b"\n")
        self._at = end - len(b"\n".join(found[-lines - (not found[-1]) :]))

    def read(self) -> list[str]:
        """Return the lines that were completed since the last call."""
        lines: list[str] = []
        if self._file is not None and (size := self._end() - self._at) > 0:
            self._file.seek(self._at)
            block = self._file.read(size)
            self._at += len(block)
            *whole, self._left = (self._left + block).split(b"\n")
            lines = list(map(_text, whole))
            if len(self._left) > LONGEST_LINE_BYTES:
                lines += self.rest()
        return lines

    def rest(self) -> list[str]:
        """Return the last line, which nobody has ended."""
        left, self._left = self._left, b""
        return [_text(left)] if left else []

    def _end(self) -> int:
        """Return where the part of this attempt ends for now: where the next one began in the same file."""
        assert self._file is not None
        size = os.fstat(self._file.fileno()).st_size
        with suppress(OSError):
            later = [each for each in self._chain.attempts() if each.number > self.attempt.number]
            if later and later[0].log == self.attempt.log and later[0].log_begin >= self._at:
                return min(size, later[0].log_begin)
        return size


def _text(line: bytes) -> str:
    """Return a line as a terminal would show it: of a progress bar the last state, without colours."""
    shown = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
    return _COLOURS.sub("", shown).expandtabs()


def _say_title(attempt: AttemptRecord) -> None:
    job = f", job {attempt.job_id}" if attempt.job_id else ""
    _say([f"==> attempt {attempt.number}{job}: {attempt.log} <=="])


def _say(lines: Sequence[str]) -> None:
    if lines:
        console.say(*lines)
