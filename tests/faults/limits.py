"""Bounds of a case: seconds, memory, and a process of its own where it may die, hang, or eat what there is."""

import contextlib
import os
import pickle
import resource
import select
import signal
import sys
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@contextmanager
def limit(seconds, what="it"):
    """Raise TimeoutError in the main thread when the block takes longer. Blocking system calls are interrupted."""

    def ring(*_):
        raise TimeoutError(f"{what} took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Ended:
    """How a child ended: with a value, with an error, by a signal or an exit code, or by its time limit."""

    value: Any = None
    error: BaseException | None = None
    status: int = 0
    hung: bool = False
    said: str = ""
    peak_bytes: int = 0

    @property
    def in_order(self):
        return self.error is None and not self.status and not self.hung


def in_child(work, seconds, memory_bytes=None, user=None):
    """Do `work` in a fork of this process, which has one thread. `memory_bytes`: what it may take besides what it has.

    `user`: the user id it has. What it prints is in `said`. Killed with all that it started when `seconds` are over.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    ours, theirs = os.pipe()
    words, mouth = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pytest has a thread that watches the time
        pid = os.fork()
    if not pid:
        os.close(ours)
        os.close(words)
        os.setsid()
        for stream in (1, 2):
            os.dup2(mouth, stream)
        _work(work, theirs, memory_bytes, user)
    os.close(theirs)
    os.close(mouth)
    result, said, hung = _listen(ours, words, time.monotonic() + seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL) if hung else None
    _, status, usage = os.wait4(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    text = said.decode(errors="backslashreplace")
    if hung:
        return Ended(hung=True, status=status, said=text)
    if not result:
        return Ended(status=status or -1, said=text, peak_bytes=usage.ru_maxrss * 1024)
    value, error = pickle.loads(result)
    return Ended(value, error, status, said=text, peak_bytes=usage.ru_maxrss * 1024)


def _listen(ours, words, deadline):
    heard = {ours: b"", words: b""}
    open_ends = set(heard)
    hung = False
    while ours in open_ends:
        ready, _, _ = select.select(list(open_ends), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            hung = True
            break
        for each in ready:
            data = os.read(each, 65536)
            heard[each] += data
            if not data:
                open_ends.discard(each)
    while words in open_ends and select.select([words], [], [], 0)[0]:
        data = os.read(words, 65536)
        heard[words] += data
        if not data:
            break
    os.close(ours)
    os.close(words)
    return heard[ours], heard[words], hung


def _work(work, pipe, memory_bytes, user):
    code = 0
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        if memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (virtual_bytes() + memory_bytes,) * 2)
        try:
            answer = (work(), None)
        except BaseException as error:
            answer = (None, error)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            data = pickle.dumps(answer)
        except Exception:
            data = pickle.dumps((None, RuntimeError(f"{type(answer[1] or answer[0]).__name__}: {answer[1]}")))
        with os.fdopen(pipe, "wb") as out:
            out.write(data)
    except BaseException as error:
        print(f"the child itself failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = 70
    finally:
        os._exit(code)


def virtual_bytes():
    """The address space that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
