"""Death at the n-th system call that changes a file, in a process that is really gone afterwards.

Counted are fsync, pwrite and write to files, and whatever Python tells its auditors: opening to write, mkdir, links,
rename, cuts, removals. So nothing that a run does to a disk goes by uncounted, through whatever layer it does it.
"""

import os
import sys
import threading

DEAD = 77
"""Exit code of a process that was ended here."""
_AUDITED = {"os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "os.truncate"}
_WRITES = os.O_WRONLY | os.O_RDWR


class Tap:
    """Counts the changes to what is under `world`; at number `at` (from 0) the process ends, ahead of it.

    With `half`, a write at that number leaves half of its bytes. `install` puts it in place for good, in a fork.
    """

    def __init__(self, world, at, half=False):
        self._world, self._at, self._half = f"{world}/", at, half
        self._turn = threading.RLock()
        self.count = 0
        self.writes = []
        """The numbers of those that write, where half of it can be done."""

    def install(self):
        for name in ("fsync", "pwrite", "write"):
            setattr(os, name, self._tapped(getattr(os, name), name != "fsync"))
        sys.addaudithook(self._hear)

    def _tapped(self, real, writes):
        def call(fd, *arguments):
            if not self._is_ours(fd):
                return real(fd, *arguments)
            with self._turn:
                if writes:
                    self.writes.append(self.count)
                if self._is_now() and self._half and writes:
                    # Whole pages: the file may be open for direct I/O.
                    size = len(arguments[0]) // 2
                    part = memoryview(arguments[0])[: size & -4096 if size >= 4096 else size]
                    real(fd, part, *arguments[1:])
                self._pass()
            return real(fd, *arguments)

        return call

    def _hear(self, event, arguments):
        if event == "open":
            path, _, flags = arguments
            if not (isinstance(flags, int) and flags & _WRITES):
                return
        elif event in _AUDITED:
            path = arguments[0]
            if event == "os.truncate" and isinstance(path, int):
                path = self._world if self._is_ours(path) else None
            if (
                arguments[-1] not in (-1, None)
                and isinstance(arguments[-1], int)
                and event in ("os.remove", "os.rmdir")
            ):
                path = self._world  # by the file descriptor of its folder: a tree is being removed
        else:
            return
        if os.fspath(path).startswith(self._world) if isinstance(path, (str, os.PathLike)) else False:
            with self._turn:
                self._pass()

    def _is_now(self):
        return self.count == self._at

    def _pass(self):
        if self._is_now():
            os._exit(DEAD)
        self.count += 1

    def _is_ours(self, fd):
        try:
            return os.readlink(f"/proc/self/fd/{fd}").startswith(self._world)  # noqa: PTH115 called for each write
        except OSError:
            return False
