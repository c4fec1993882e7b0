"""The thread that samples the device and the node of this rank while it trains."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from ckptman.errors import plain
from ckptman.policies.health import HealthBreach, HealthSample, HealthSummary, HealthThresholds, HealthWatch, Hourly
from ckptman.runtime.health.devices import DeviceLost
from ckptman.runtime.log import tell
from ckptman.runtime.outcome import report_node

_HANGS_SECONDS = 60.0
_CLOSE_SECONDS = 1.0
"""A library that hangs is not waited for any longer."""
_MOST_KEPT = 64


class Source(Protocol):
    """A source of figures for a `HealthSample`. Called by the thread of the sampler."""

    def read(self) -> dict[str, Any]:
        """Return figures by name. After an error it is not read again; the error is logged once."""


Open = Callable[[], Source]
Phase = Callable[[], tuple[int | None, float | None]]
"""Returns the last step that ended, None if the rank did anything but train since the last call; and the time of a
step."""


class Sampler:
    """Samples, and logs each breach in one line.

    Args:
        who: the rank and its node, in words.
        node: the name of the node in the list of bad nodes.
        sources: what to open in the thread of the sampler, by a name for people.
        quiet: do not log that a library is not installed.
    """

    def __init__(
        self,
        thresholds: HealthThresholds,
        who: str,
        node: str,
        sources: dict[str, Open],
        phase: Phase,
        *,
        quiet: bool = False,
    ) -> None:
        self.watch = HealthWatch(thresholds)
        self._who, self._node, self._sources, self._phase, self._quiet = who, node, sources, phase, quiet
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckptman-health", daemon=True)
        self._breaches: list[HealthBreach] = []
        self._told = Hourly()
        self._busy_with: tuple[str, float] | None = None

    def start(self) -> None:
        """Begin to sample."""
        with suppress(RuntimeError):  # no thread can be started
            self._thread.start()

    def stop(self) -> None:
        """Stop soon."""
        self._closed.set()

    def close(self) -> None:
        """Stop. Does not wait for a library that hangs."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)

    def take(self) -> tuple[HealthSummary, tuple[HealthBreach, ...]]:
        """Return what was found since the last call. Any thread may call it."""
        if (busy := self._busy_with) is not None and time.monotonic() - busy[1] > _HANGS_SECONDS:
            self._tell(f"{busy[0]} hangs", f"{busy[0]} has not answered for a minute: no figures until it does")
        summary, self.watch.summary = self.watch.summary, HealthSummary()
        breaches, self._breaches = self._breaches, []
        return summary, tuple(breaches)

    def _run(self) -> None:
        self._guarded("the sampler of health", self._sample)

    def _sample(self) -> None:
        opened: dict[str, Source] = {}
        for name, opening in self._sources.items():
            if (source := self._guarded(name, opening)) is not None:
                opened[name] = source
        start, begun = time.time(), time.monotonic()
        while opened and not self._closed.wait(self.watch.thresholds.period_seconds):
            figures: dict[str, Any] = {}
            for name, source in list(opened.items()):
                read = self._guarded(name, source.read)
                if read is None or "lost" in read:
                    del opened[name]
                figures |= read or {}
            step, usual_seconds = self._phase()
            # A clock that is set does not make a step long.
            now = start + time.monotonic() - begun
            for breach in self.watch.see(now, step, HealthSample(**figures), usual_seconds):
                self._found(breach)

    def _guarded(self, name: str, call: Callable[[], Any]) -> Any:
        """Call a library that might be broken or hang. Log an error and return None."""
        self._busy_with = (name, time.monotonic())
        try:
            return call()
        except DeviceLost as error:
            return {"lost": plain(error)}
        except ModuleNotFoundError as error:
            if not self._quiet:
                self._tell(name, f"no figures of {name}: {error}", logging.INFO)
        except BaseException as error:  # noqa: BLE001 training continues after any error
            why = f"{type(error).__name__}: {error}"
            self._tell(name, f"{name} does not work ({why}): no figures of it; training goes on")
        finally:
            self._busy_with = None
        return None

    def _found(self, breach: HealthBreach) -> None:
        if len(self._breaches) < _MOST_KEPT:
            self._breaches.append(breach)
        if breach.ended:
            return
        level = logging.WARNING if breach.level == "problem" else logging.INFO
        self._tell(f"{breach.what} {breach.level}", str(breach), level)
        if breach.bad_node:
            with suppress(OSError):
                report_node(self._node, breach.text, os.environ)

    def _tell(self, key: str, text: str, level: int = logging.WARNING) -> None:
        """Log a line, with the same key at most once an hour."""
        if self._told.is_due(key, time.monotonic()):
            tell(f"health of {self._who}: {text}", level)
