"""What a test leaves behind in its process: the tests after it would find it there."""

# ruff: noqa: PTH109, PTH115, PTH208

import gc
import os
import signal
import sys
import threading
import time
from collections import Counter

WAIT_SECONDS = 10.0
"""So long a thread that is ending may take; a daemon that waits for something never ends."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
"""Not SIGCHLD: loaders of torch take it once and for all."""
POOLS = ("asyncio", "fsspecIO", "process_request_thread")
"""Threads that libraries keep for the next time."""
OTHERS = ("PYTEST_CURRENT_TEST", "COLUMNS", "LINES", "TORCH", "PYTORCH", "KMP_", "RAYON_", "TOKENIZERS_", "WANDB_")
"""How variables begin that pytest and frameworks set, some when they are imported."""


class Leaks:
    """The state of this process now; `left()` compares it with what is there then.

    Args:
        names: parts of the names of threads and files that may stay.
    """

    def __init__(self, names=()):
        self._stay = (*POOLS, *names)
        self._threads = set(threading.enumerate())
        self._descriptors = _descriptors()
        self._groups = _groups()
        self._handlers = _handlers()
        self._environ = _environ()
        self._directory = os.getcwd()

    def left(self):
        """One line for each thing that is new, or gone. Empty if all is as before."""
        threads = [each for each in threading.enumerate() if each not in self._threads and self._is_left(each)]
        found = self._found()
        if found or threads:
            gc.collect()
            for each in threads:
                each.join(WAIT_SECONDS)
            deadline = time.monotonic() + WAIT_SECONDS  # a pool whose owner is gone closes what it had when it ends
            while (found := self._found()) and time.monotonic() < deadline:
                time.sleep(0.05)
                gc.collect()
        return [*found, *(f"a thread: {each.name}" for each in threads if each.is_alive())]

    def _is_left(self, thread):
        return thread.is_alive() and not self._may_stay(thread.name)

    def _may_stay(self, name):
        return any(each in name for each in self._stay)

    def _found(self):
        descriptors = _descriptors() - self._descriptors
        found = [f"{count} descriptors: {each}" for each, count in descriptors.items() if not self._may_stay(each)]
        found += [f"a process group: {each}" for each in _groups() - self._groups]
        found += [f"another handler: {name}" for name, each in _handlers().items() if each != self._handlers[name]]
        environ = _environ()
        names = sorted(
            name for name in environ.keys() | self._environ.keys() if environ.get(name) != self._environ.get(name)
        )
        found += [f"an environment variable: {name}" for name in names]
        if os.getcwd() != self._directory:
            found.append(f"another directory: {os.getcwd()}")
        return found


class Patches:
    """What the modules and classes of the package, and the environment, hold now; `undo()` puts it back."""

    def __init__(self):
        self._environ = dict(os.environ)
        modules = [each for name, each in sys.modules.items() if name.partition(".")[0] == "ckptman"]
        owners = list(modules)
        for module in modules:
            owners += [
                each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__
            ]
        self._before = [(owner, dict(vars(owner))) for owner in owners]

    def undo(self):
        for owner, before in self._before:
            now = vars(owner)
            for name, value in before.items():
                if now.get(name) is not value and not name.startswith("__"):
                    setattr(owner, name, value)
        for name in os.environ.keys() - self._environ.keys():
            del os.environ[name]
        os.environ.update(self._environ)


def _descriptors():
    """The files and directories that are open, but for those of Python's own folder: libraries keep some.

    Sockets and pipes are those of pools that torch, S3 and pytest keep.
    """
    open_now = Counter()
    for each in os.listdir("/proc/self/fd"):
        try:
            there = os.readlink(f"/proc/self/fd/{each}")
        except OSError:
            continue  # that of the listing itself
        if there.startswith("/") and not there.startswith(("/dev/", sys.prefix)):
            open_now[there] += 1
    return open_now


def _groups():
    """The process groups of torch, if it is here, but for those of meshes: nobody is asked to free them."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None:
        return set()
    return {name for group, name in module._world.pg_names.items() if not group.group_desc.startswith("mesh_")}


def _handlers():
    """Those of signals, and of exits, which a tracker replaces."""
    return {**{each.name: signal.getsignal(each) for each in SIGNALS}, "sys.exit": sys.exit}


def _environ():
    return {name: each for name, each in os.environ.items() if not name.startswith(OTHERS)}
