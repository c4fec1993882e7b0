"""Drains behind the training: `ckptman drain` in a process of its own, so that it takes nothing from the run's.

Only the leader has one. What is not done when the run ends is done by the next attempt, or by a drain in another job.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import psutil

from ckptman.errors import plain, warn
from ckptman.lifecycle.outcome import OUTCOME_ENV
from ckptman.monitor.journal import Journal

END_SECONDS = 10.0
LOOK_SECONDS = 5.0
STUCK_SECONDS = 600.0
"""How long a drain at the end of a run may move nothing."""
_NICE = 10


class Drainer:
    """Copies to the tiers of a run, one process at a time."""

    def __init__(self, root: Path, journal: Journal) -> None:
        self._root, self._journal = root, journal
        self._process: subprocess.Popen[bytes] | None = None
        self._told: tuple[IO[bytes], IO[bytes]] | None = None
        self._again = False
        self._warned: set[str] = set()

    def poke(self) -> None:
        """There is something new: have it copied, after what is under way. Returns at once."""
        self._again = True
        if self._process is None or self._process.poll() is not None:
            self._reap()
            self._start()

    def close(self, *, finish: bool) -> None:
        """Wait until everything is copied, or, unless `finish`, break off: it can be taken up later."""
        if finish:
            while self._process is not None:
                if not self._ends():
                    self._break_off()
                    self._complain(f"a drain moved nothing for {STUCK_SECONDS:.0f} s, and was ended")
                    return
                self._reap()
                if self._again:
                    self._start()
        else:
            self._break_off()

    def _ends(self) -> bool:
        """Wait for the process as long as it moves bytes. A mount that hangs must not hold the allocation."""
        assert self._process is not None
        before, since = -1, time.monotonic()
        while time.monotonic() - since < STUCK_SECONDS:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LOOK_SECONDS)
                return True
            if (now := _moved_bytes(self._process.pid)) != before:
                before, since = now, time.monotonic()
        return False

    def _break_off(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        if self._process.poll() is None:
            self._process.kill()
            # One that waits for a dead mount cannot be killed either: it is left to itself.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        self._process.returncode = 0  # it did not fail: it was told to end
        self._reap()

    def _start(self) -> None:
        self._again = False
        self._told = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        command = [sys.executable, "-m", "ckptman", "drain", str(self._root), "--json"]
        # The outcome of the attempt is for the run to write.
        environ = {name: value for name, value in os.environ.items() if name != OUTCOME_ENV}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._told[0], stderr=self._told[1], env=environ
            )
        except OSError as error:
            self._complain(f"it cannot be started ({error})")
            return
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICE)

    def _reap(self) -> None:
        process, told, self._process, self._told = self._process, self._told, None, None
        if process is None or told is None:
            return
        texts = []
        for file in told:
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
            file.close()
        for task in _tasks(texts[0]):
            copied = task["copied"]
            if copied is not None and not copied["already"]:
                seconds = copied["copy_seconds"] + copied["verify_seconds"]
                self._journal.record("drained", step=task["step"], tier=task["tier"], seconds=seconds)
        if process.returncode:
            self._complain(texts[1].strip().removeprefix("Error: ") or f"it ended with {process.returncode}")

    def _complain(self, why: str) -> None:
        self._journal.record("drain_failed", cause=why)
        if why not in self._warned:
            self._warned.add(why)
            warn(f"not all could be copied to the tiers of {self._root}, and the run goes on: {plain(why)}")


def _moved_bytes(pid: int) -> int:
    """What a process has read and written, by calls."""
    try:
        counters = psutil.Process(pid).io_counters()
    except (psutil.Error, AttributeError, NotImplementedError):
        return time.monotonic_ns()  # nobody can tell: it is believed to go on
    return int(counters.read_chars + counters.write_chars)


def _tasks(told: str) -> list[dict[str, Any]]:
    try:
        tasks: list[dict[str, Any]] = json.loads(told)["tasks"]
    except (ValueError, KeyError, TypeError):
        return []
    return tasks
