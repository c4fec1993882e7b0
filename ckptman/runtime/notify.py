"""Notes to people: `ckptman submit --notify COMMAND` and `Checkpointer(notify=...)`.

A notifier that hangs, fails or does not exist costs a run nothing: each note has a thread, and a command a session of
its own. Its output goes nowhere, except for the end of what it prints to standard error when it fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ckptman.errors import masked, plain

NOTIFY_ENV = "CKPTMAN_NOTIFY"
"""The command of a chain: a Checkpointer without `notify` uses it, and leaves the end of the attempt to the chain."""
EVENT_ENV, LINE_ENV = "CKPTMAN_EVENT", "CKPTMAN_LINE"

Notify = str | Callable[[dict[str, Any]], object]

AGAIN_SECONDS = 300.0
"""The shortest time between two notes of the same event."""
MOST_SECONDS = 60.0
WAIT_SECONDS = 10.0
"""How long the end of an attempt waits for its notes."""
MOST_AT_ONCE = 4
_LOOK_SECONDS = 0.1
_LONGEST_LINE, _LONGEST_REASON, _LONGEST_ERROR = 500, 1000, 300
_ALWAYS = ("finished", "stopped")
"""These events end a chain: each one counts, as after `ckptman chain resume`."""


class Notifier:
    """Hands notes to a command or a function. Thread-safe; only `wait` waits, and nothing raises.

    Args:
        target: A command for the shell, which gets a note as one JSON object on its standard input, and its line in the
            environment; or a function that is called with the note.
        failed: Called once, with the reason, if the target fails.
        told: When each event was last told, in unix seconds.
    """

    def __init__(
        self,
        target: Notify,
        failed: Callable[[str], object],
        told: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._target, self._failed, self._told, self._clock = target, failed, dict(told or {}), clock
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._has_failed = False
        self._until = float("inf")

    def tell(self, event: str, line: str, **fields: object) -> bool:
        """Begin to hand on a note. Return False if there was one of this event just now, or if too many still run."""
        now = self._clock()
        reason = plain(masked(str(fields.get("reason", ""))))[:_LONGEST_REASON]
        note = {"event": event, "line": plain(masked(line))[:_LONGEST_LINE], **fields, "reason": reason, "time": now}
        with self._lock:
            since = now - self._told.get(event, float("-inf"))
            self._threads = [each for each in self._threads if each.is_alive()]
            is_last = event in _ALWAYS
            if len(self._threads) >= MOST_AT_ONCE * (1 + is_last) or (not is_last and 0 <= since < AGAIN_SECONDS):
                return False
            self._told[event] = now
            thread = threading.Thread(target=self._hand_on, args=(note,), name="ckptman-notify", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # there can be no more threads
                self._fail(str(error))
                return False
            self._threads.append(thread)
        return True

    def wait(self, seconds: float | None = None) -> None:
        """Wait some seconds for the notes that are on their way. Then kill their commands."""
        self._until = until = time.monotonic() + (WAIT_SECONDS if seconds is None else seconds)
        for thread in self._threads:
            thread.join(max(0.0, until + 2.0 - time.monotonic()))
        self._until = float("inf")

    def _hand_on(self, note: dict[str, Any]) -> None:
        try:
            if callable(self._target):
                self._target(note)
            elif why := self._run(self._target, note):
                self._fail(why)
        except BaseException as error:  # noqa: BLE001 the function is the user's
            self._fail(f"{type(error).__name__}: {error}")

    def _run(self, command: str, note: Mapping[str, Any]) -> str:
        """Return why the command failed, or "". Raises: OSError."""
        latest = time.monotonic() + MOST_SECONDS
        child = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, EVENT_ENV: note["event"], LINE_ENV: note["line"]},
            start_new_session=True,
        )
        assert child.stdin is not None
        assert child.stderr is not None
        with child.stdin as written, child.stderr as told:
            for each in (written, told):
                os.set_blocking(each.fileno(), False)
            with contextlib.suppress(OSError):  # it has ended without reading; a pipe has room for a note
                os.write(written.fileno(), json.dumps(note).encode() + b"\n")
            written.close()
            last = b""
            # Read so seldom that a command which prints gigabytes waits for us, and takes no time from the training.
            while time.monotonic() < min(latest, self._until):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_LOOK_SECONDS)
                with contextlib.suppress(BlockingIOError):
                    last = (last + os.read(told.fileno(), 65536))[-_LONGEST_ERROR:]
                if child.returncode is not None:
                    break
            else:
                os.killpg(child.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(1.0)
                return "it did not end in time, and was killed"
        text = " ".join(last.decode(errors="replace").split())
        return "" if child.returncode == 0 else f"exit code {child.returncode}" + (f": {text}" if text else "")

    def _fail(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            with contextlib.suppress(Exception):
                self._failed(plain(masked(why)))
