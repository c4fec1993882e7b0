"""Notes on what happens to a run, by the events of its journal: `Checkpointer(notify=...)`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ckptman.errors import ConfigError
from ckptman.policies.retention_rules import bytes_text
from ckptman.runtime.log import tell
from ckptman.runtime.notify import NOTIFY_ENV, WAIT_SECONDS, Notifier, Notify
from ckptman.runtime.outcome import CHAIN_ENV
from ckptman.session.run_session import RunSession

STALLED = "Stalled"
"""The `error` of an attempt that the watchdog ended."""


def check_notify(notify: object) -> None:
    """Check the argument of a Checkpointer. Raises: ConfigError."""
    if notify is None or callable(notify):
        return
    if not isinstance(notify, str) or not notify.strip() or "\0" in notify:
        raise ConfigError(f"notify is a command for the shell, a function that takes a dict, or None, not {notify!r}")


class RunNotes:
    """Tells of a run. In a chain with `--notify`, the chain tells how its attempts end.

    Every rank has one, because another rank writes what the leader cannot when it is stuck. Without a notifier it does
    nothing.
    """

    def __init__(self, notify: Notify | None, session: RunSession, environ: Mapping[str, str]) -> None:
        chain, of_chain = environ.get(CHAIN_ENV, ""), environ.get(NOTIFY_ENV)
        self._facts = {"chain": chain, "job_id": session.job_id or "", "root": str(session.root.absolute())}
        self._tells_of_stops = not chain
        self._tells_of_ends = not (chain and of_chain)
        target = notify or of_chain
        self._notifier = Notifier(target, _failed) if target else None
        if self._notifier is not None and session.journal is not None:
            session.journal.listeners.append(self.hear)

    @property
    def close_seconds(self) -> float:
        """How long `close` takes at most."""
        return 0.0 if self._notifier is None else WAIT_SECONDS + 3.0

    def hear(self, event: str, fields: Mapping[str, Any]) -> None:
        """Tell of an event of the journal if it is news for people."""
        step, reason = fields.get("step", 0), str(fields.get("reason", ""))
        if event == "disk_nearly_full":
            free, needed = bytes_text(fields["free_bytes"]), bytes_text(fields["save_bytes"])
            self._tell(event, "the disk is nearly full", f"{free} are free, and a save takes {needed}", fields)
        elif event == "disk_full":
            self._tell(event, f"the disk is full at the save of step {step}", str(fields["cause"]), fields)
        elif event == "failed" and fields["error"] != STALLED and self._tells_of_ends:
            self._tell("crashed", f"crashed after step {step}", reason, fields)
        elif event == "finished" and self._tells_of_ends:
            self._tell(event, f"finished after step {step}", "", fields)
        elif event == "stopped" and self._tells_of_ends and self._tells_of_stops:
            self._tell(event, f"stopped after step {step}", reason, fields)

    def stalled(self, attempt: int, step: int, reason: str) -> None:
        """Tell of a stall. It needs no disk, which may be what is stuck."""
        self._tell("stalled", f"stalled after step {step}", reason, {"attempt": attempt, "step": step})

    def close(self) -> None:
        """Wait some seconds for the notes that are on their way."""
        if self._notifier is not None:
            self._notifier.wait()

    def _tell(self, event: str, what: str, reason: str, fields: Mapping[str, Any]) -> None:
        if self._notifier is not None:
            line = f"run {self._facts['root']}: {what}" + (f": {reason}" if reason else "")
            place = {"attempt": fields.get("attempt", 0), "step": fields.get("step", 0)}
            self._notifier.tell(event, line, reason=reason, **self._facts, **place)


def _failed(why: str) -> None:
    tell(f"notify failed ({why}): run it by hand to see why. Training continues without it", logging.WARNING)
