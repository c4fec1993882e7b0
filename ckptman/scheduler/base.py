"""The seam between a chain and the place where its attempts run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol

Say = Callable[[str], None]


class Scheduler(Protocol):
    """Runs one attempt at a time. No wider than `run_chain` needs, which is its only caller."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def run_attempt(self, command: Sequence[str], env: Mapping[str, str]) -> int:
        """Run `command` to its end, with exactly the environment `env`; its exit code, or -n if signal n killed it.

        When it returns, no process of the attempt is alive. Raises: SchedulerError if the command cannot be started.
        """
        ...

    def stop_asked(self) -> signal.Signals | None:
        """The signal that asked the whole chain to end, or None."""
        ...


def patient(say: Say) -> Say:
    """The same `say`, which does not mind that nobody can hear it: after a SIGHUP the terminal is gone."""

    def tell(text: str) -> None:
        try:
            say(text)
        except OSError:
            pass

    return tell
