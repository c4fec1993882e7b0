"""The roots that Checkpointers of this process hold: given back also if one is lost without `close()`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from ckptman.errors import warn_only
from ckptman.runtime.log import tell


class OpenRoot:
    """A root that a Checkpointer of this process holds.

    Args:
        root: Its absolute path.
        end: The method that ends the Checkpointer because of an error.

    Attributes:
        in_block: Whether the Checkpointer is inside its `with` block.
        held: What gives the root back.
    """

    here: ClassVar[dict[Path, OpenRoot]] = {}

    def __init__(self, root: Path, end: Callable[[BaseException], None]) -> None:
        self.pid, self._root, self._end = os.getpid(), root, weakref.WeakMethod(end)
        self.in_block = False
        self.held = contextlib.ExitStack()
        self._thread: threading.Thread | None = None
        self.here[root] = self

    @classmethod
    def take_over(cls, root: Path) -> None:
        """End an earlier Checkpointer of this process that still holds the root, as when the cell of a notebook runs
        again. One inside its `with` block is in use and keeps the root."""
        opened = cls.here.get(root)
        if opened is None or opened.pid != os.getpid():
            return
        end = opened._end()
        if end is None:
            if opened._thread is not None:
                opened._thread.join()
        elif not opened.in_block:
            warn_only(
                f"{root}: an earlier Checkpointer of this process was not closed. It ends now, and this one takes "
                f"over. Use each in a `with` block, or call close()"
            )
            # Not an Exception: a crash would make what it was restored from a suspect.
            end(SystemExit("a later Checkpointer of the same process took over"))

    def close(self) -> None:
        """Give back the root, and all that comes with it."""
        try:
            self.held.close()
        finally:
            if self.here.get(self._root) is self:
                del self.here[self._root]

    def close_in_thread(self) -> None:
        """Give it back in a thread of its own: whichever thread collects garbage may be one that is ended."""

        def work() -> None:
            with contextlib.suppress(Exception):
                self.close()

        if threading.main_thread().is_alive():  # else the process ends, which gives back all
            self._thread = threading.Thread(target=work, name="ckptman-give-back", daemon=True)
            self._thread.start()


def tell_left_open(where: str, opened: OpenRoot, listening: contextlib.ExitStack) -> None:
    """Warn of a Checkpointer that was not closed, at exit or as soon as nobody has it any more."""
    if os.getpid() != opened.pid:
        return
    listening.close()
    opened.close_in_thread()
    if getattr(sys, "last_value", None) is None:  # else the process ends by an error, and that has been printed
        tell(
            f"the run in {where} ends without close(): it leaves no outcome for a chain to go by, and its last step "
            f"may not be saved. Use the Checkpointer in a `with` block, or call close()",
            logging.WARNING,
        )
