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

from ckptman.errors import plain, warn_only
from ckptman.runtime.journal import Journal
from ckptman.runtime.outcome import OUTCOME_ENV

END_SECONDS = 10.0
LOOK_SECONDS = 5.0
STUCK_SECONDS = 600.0
"""How long a drain at the end of a run may do nothing."""
_NICE = 10


class Drainer:
    """Copies to the tiers of a run, one process at a time."""

    def __init__(self, root: Path, journal: Journal) -> None:
        self._root, self._journal = root, journal
        self._process: subprocess.Popen[bytes] | None = None
        self._outputs: tuple[IO[bytes], IO[bytes]] | None = None
        self._again = True  # an attempt before may have left something
        self._warned: set[str] = set()

    def poke(self) -> None:
        """Have something new copied, after what is under way. Returns at once."""
        self._again = True
        if self._process is None or self._process.poll() is not None:
            self._reap()
            self._start()

    def close(self, *, finish: bool) -> None:
        """Wait until everything is copied, or, unless `finish`, break off: it can be taken up later."""
        if finish:
            if self._process is None and self._again:
                self._start(nice=0)
            while self._process is not None:
                if not self._ends():
                    self._break_off()
                    self._complain(
                        f"the drain at the end did nothing for {STUCK_SECONDS:g} s, and was ended. ckptman drain "
                        f"{self._root} goes on with it"
                    )
                    return
                self._reap()
                if self._again:
                    self._start(nice=0)
        else:
            self._break_off()

    def _ends(self) -> bool:
        """Wait for the process as long as it does something. A mount that hangs must not hold the allocation."""
        assert self._process is not None
        before, since = None, time.monotonic()
        while time.monotonic() - since < STUCK_SECONDS:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LOOK_SECONDS)
                return True
            if (now := _work_done(self._process.pid)) != before:
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

    def _start(self, nice: int = _NICE) -> None:
        """`nice`: 0 where the end of the run waits for it, which no training goes on beside."""
        self._again = False
        command = [sys.executable, "-m", "ckptman", "drain", str(self._root), "--json"]
        # The outcome of the attempt is for the run to write.
        environ = {name: value for name, value in os.environ.items() if name != OUTCOME_ENV}
        with contextlib.ExitStack() as opened:
            try:
                files = [opened.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=files[0], stderr=files[1], env=environ
                )
            except OSError as error:
                self._complain(f"no drain could be started ({error})")
                return
            self._outputs = files[0], files[1]
            opened.pop_all()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, os.nice(0) + nice)

    def _reap(self) -> None:
        process, outputs, self._process, self._outputs = self._process, self._outputs, None, None
        if process is None or outputs is None:
            return
        texts = []
        for file in outputs:
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
            warn_only(f"not all could be copied to the tiers of {self._root}, which fails no save: {plain(why)}")


def _work_done(pid: int) -> tuple[int, int]:
    """Return what a process has read and written by calls, and the seconds that it has computed, which are whole ones:
    what goes over a network is not in the bytes, and one that hangs computes next to nothing."""
    try:
        process = psutil.Process(pid)
        counters, times = process.io_counters(), process.cpu_times()
    except (psutil.Error, AttributeError, NotImplementedError):
        return time.monotonic_ns(), 0  # nobody can tell: it is believed to go on
    return counters.read_chars + counters.write_chars, int(times.user + times.system)


def _tasks(output: str) -> list[dict[str, Any]]:
    try:
        tasks: list[dict[str, Any]] = json.loads(output)["tasks"]
    except (ValueError, KeyError, TypeError):
        return []
    return tasks
