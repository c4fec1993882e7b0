"""How an error that ends a rank of the bundled loop is told: at once, before anything waits for the other ranks."""

from __future__ import annotations

import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from ckptman.errors import CkptmanError
from ckptman.train.launch import Launch


class ErrorReport:
    """Prints the error that ends this rank, once: with a traceback, or one message per node where ckptman knows it."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._told: BaseException | None = None

    def tell(self, error: BaseException) -> int:
        """Print an error, unless that was done, and return the exit code that goes with it."""
        if isinstance(error, SystemExit):
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error, KeyboardInterrupt):  # the interpreter tells it
            return 128 + signal.SIGINT
        if error is not self._told:
            self._told = error
            sys.stderr.write(self._text(error))
            sys.stderr.flush()
        return error.exit_code if isinstance(error, CkptmanError) else 1

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Print an error inside before it goes on: what is around it may have to wait for something."""
        try:
            yield
        except BaseException as error:
            self.tell(error)
            raise

    def _text(self, error: BaseException) -> str:
        launch = self._launch
        if not isinstance(error, CkptmanError):
            who = f"rank {launch.rank} of {launch.world_size} on {socket.gethostname()}"
            return f"{who} failed:\n{''.join(traceback.format_exception(error))}"
        # All ranks of a node have it; a rank beyond what every node has may be alone with it.
        tells = launch.local_rank == 0 or launch.local_rank >= launch.local_world_size
        return f"error: {error}\n" if tells else ""
