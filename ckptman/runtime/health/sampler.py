"""The thread that reads the figures of this rank's device and node, now and then, while it trains."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from ckptman.errors import plain
from ckptman.policies.health import HealthBreach, HealthSample, HealthSummary, HealthThresholds, HealthWatch
from ckptman.runtime.health.device import DeviceLost
from ckptman.runtime.log import tell
from ckptman.runtime.outcome import report_node

_HANGS_SECONDS = 60.0
_CLOSE_SECONDS = 1.0
"""A library that hangs is left behind."""
_MOST_KEPT = 64


class Source(Protocol):
    """What gives some of the figures of a `HealthSample`. Called by the thread of the sampler."""

    def read(self) -> dict[str, Any]:
        """Return figures by name. Whatever it raises ends it, is told once, and does no harm."""


Open = Callable[[], Source]
Phase = Callable[[], tuple[int | None, float | None]]
"""What the rank was at since it was asked before: the last step that has ended, None where it was not training alone;
and what a step takes."""


class Sampler:
    """Samples, and tells each breach in one line.

    Args:
        who: the rank and its node, in words.
        node: what the node is called in the list of bad nodes.
        sources: what to open in the thread of the sampler, by what people call it.
        quiet: whether a library that is not installed is told of no one.
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
        self._told: dict[str, float] = {}
        self._busy_with: tuple[str, float] | None = None

    def start(self) -> None:
        """Begin to sample."""
        with suppress(RuntimeError):  # no more threads are to be had
            self._thread.start()

    def stop(self) -> None:
        """Stop soon."""
        self._closed.set()

    def close(self) -> None:
        """Stop. What hangs is left behind."""
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
        """Call a library that may be broken, or hang. Return None where it fails, which is told."""
        self._busy_with = (name, time.monotonic())
        try:
            return call()
        except DeviceLost as error:
            return {"lost": plain(error)}
        except ModuleNotFoundError as error:
            if not self._quiet:
                self._tell(name, f"no figures of {name}: {error}", logging.INFO)
        except BaseException as error:  # noqa: BLE001 whatever it is, training goes on
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
        self._tell(
            f"{breach.what} {breach.level}", str(breach), logging.WARNING if breach.level == "problem" else logging.INFO
        )
        if breach.bad_node:
            with suppress(OSError):
                report_node(self._node, breach.text, os.environ)

    def _tell(self, key: str, text: str, level: int = logging.WARNING) -> None:
        """Log a line, the same one at most once an hour."""
        now = time.monotonic()
        if now - self._told.get(key, -1e9) >= 3600:
            self._told[key] = now
            tell(f"health of {self._who}: {text}", level)
