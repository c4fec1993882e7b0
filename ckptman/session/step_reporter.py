"""Tells the journal, and the trackers, of the steps that end. Only the leader has one.

The loop notes what ended and goes on. Metrics that are on a device are on their way to the host from the next look on:
the loop begins that and asks for its end, at the end of steps, because another thread must not ask a device while a
graph is being captured. All else is the work of a thread.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ckptman.engine.state.accelerators import record
from ckptman.runtime.metrics_log import MetricsLog
from ckptman.runtime.tracker import TrackedRun, Tracker
from ckptman.session.run_session import RunSession
from ckptman.session.timings import TimeLost
from ckptman.session.tracker_threads import MOST_WAITING, TrackerQueue, TrackerThreads

PROGRESS_SECONDS = 30.0
"""Between two `progress` in the journal."""
LOOK_SECONDS = 1.0
"""Between two looks at what has ended."""
MOST_METRICS = 16
"""Of so many at most a `progress` tells, by names of at most `_MOST_NAME` characters: it is to stay a short line."""
_MOST_NAME = 64
_MANY_NUMBERS = 1000
"""When so many metrics wait they are handed on: to do that for more at once would be felt."""
_WRITE_SECONDS = 5.0
"""How long the end of the run waits for the last `progress`."""


class _Ended(NamedTuple):
    """A step that ended, number `position` of this attempt: when, and how long saves had blocked training by then."""

    position: int
    step: int
    seconds: float
    stall_seconds: float
    metrics: dict[str, Any]


class _Arriving(NamedTuple):
    """Steps whose metrics are on their way to the host; all are there when the events are reached."""

    steps: list[_Ended]
    events: list[Any]


class StepReporter:
    """Notes the steps of an attempt, and tells of them. Nothing of it raises, or holds up the training."""

    def __init__(
        self,
        session: RunSession,
        world_size: int,
        trackers: Sequence[Tracker],
        stall: TimeLost,
        outlook: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        assert session.journal is not None
        self._session, self._world_size, self._stall, self._outlook = session, world_size, stall, outlook
        self._trackers = TrackerThreads(trackers, session.journal)
        self._log = MetricsLog(session.root, session.number)
        self._thread = TrackerQueue("ckptman-progress")
        self._waiting: deque[_Ended] = deque(maxlen=MOST_WAITING)
        self._arriving: _Arriving | None = None
        self._count, self._numbers, self._due_seconds = 0, 0, 0.0
        self._is_started = False
        self._newest = self._told = _Ended(0, 0, time.monotonic(), 0.0, {})
        """The last steps that the thread, and the journal, know of."""

    def starts(self, step: int) -> None:
        """Begin to train after `step`."""
        run = TrackedRun(self._session.run_id, self._session.root, self._session.number, step, self._world_size)
        self._trackers.start(run)
        self._is_started = True
        if not self._count:
            self._told = self._told._replace(seconds=time.monotonic())

    def step_ended(self, step: int, metrics: object, *, is_saved: bool = False) -> None:
        """Note that a step has ended, with what a save would take for its metrics, which does not change any more.

        `is_saved`: a run may go on from it, so what trackers are to know of it is told now.
        """
        now = time.monotonic()
        if not self._count:
            self._begin()
        self._count += 1
        numbers = metrics if isinstance(metrics, dict) else {}
        self._waiting.append(_Ended(self._count, step, now, self._stall.seconds, numbers))
        self._numbers += len(numbers)
        if self._arriving is not None or is_saved or now >= self._due_seconds or self._numbers > _MANY_NUMBERS:
            self._look(now)
            if is_saved:
                self._thread.put(self._log.flush)

    def finish(self, *, wait: bool) -> None:
        """Tell of all that ended, and let the journal have it. `wait`: also for devices to have done what they were
        given, which one that has failed may never."""
        if not self._count:
            return
        for _ in range(2):  # what was on its way, and what has ended since
            self._look(time.monotonic(), last=True, wait=wait)
        self._thread.put(self._write)
        self._thread.end()
        self._thread.wait(_WRITE_SECONDS)

    def close(self) -> None:
        """Close the trackers, for at most `CLOSE_SECONDS`."""
        self._trackers.close()

    # ---- in the loop -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._is_started:  # a program that restores nothing
            self.starts(0)
        with contextlib.suppress(RuntimeError):  # no more threads: nothing is told
            self._thread.start()
            weakref.finalize(self, self._thread.end)

    def _look(self, now: float, *, last: bool = False, wait: bool = False) -> None:
        """Hand on what is on the host, or begin to bring it there. `last`: what is not there now is left out."""
        if self._arriving is None:
            steps, self._numbers = [self._waiting.popleft() for _ in range(len(self._waiting))], 0
            self._arriving = _begin_arriving(steps)
            self._due_seconds = now + min(LOOK_SECONDS, PROGRESS_SECONDS)
        is_there = _is_there(self._arriving.events, wait=wait)
        if is_there or last:
            steps = self._arriving.steps if is_there else [each._replace(metrics={}) for each in self._arriving.steps]
            self._thread.put(self._tell, steps, numbers=sum(1 + len(each.metrics) for each in steps))
            self._arriving = None

    # ---- in the thread -----------------------------------------------------------------------------------------

    def _tell(self, steps: list[_Ended]) -> None:
        for each in steps:
            numbers = _numbers(each.metrics)
            if numbers:
                self._trackers.log(each.step, numbers)
                self._log.add(each.step, numbers)
            self._newest = each._replace(metrics=numbers)
        if not self._told.position or self._newest.seconds - self._told.seconds >= PROGRESS_SECONDS:
            self._write()

    def _write(self) -> None:
        """Write a `progress` of all that ended since the last."""
        told, newest = self._told, self._newest
        if newest.position == told.position:
            return
        self._told = newest
        self._log.flush()
        short = {name: number for name, number in newest.metrics.items() if len(name) <= _MOST_NAME}
        with contextlib.suppress(Exception):  # a journal that cannot be written warns, and warnings may be errors
            self._session.note(
                "progress",
                step=newest.step,
                steps=newest.position - told.position,
                seconds=round(newest.seconds - told.seconds, 3),
                stall_seconds=round(newest.stall_seconds, 3),
                metrics=dict(list(short.items())[:MOST_METRICS]),
                **self._outlook(),
            )


def _begin_arriving(steps: list[_Ended]) -> _Arriving:
    """Begin to copy to the host what is on devices, without waiting for any. Called where steps are made, as copies
    come after what was asked of a device there."""
    steps = [each._replace(metrics=dict(each.metrics)) for each in steps]
    on_devices: dict[tuple[torch.device, torch.dtype], list[tuple[dict[str, Any], str, torch.Tensor]]] = {}
    for each in steps:
        for name, metric in each.metrics.items():
            if isinstance(metric, torch.Tensor) and (type(metric) is not torch.Tensor or metric.device.type != "cpu"):
                one = each.metrics[name] = _one_number(metric)
                if one is not None and one.device.type != "cpu":
                    on_devices.setdefault((one.device, one.dtype), []).append((each.metrics, name, one))
    events = []
    for (device, _), found in on_devices.items():
        try:
            module = torch.get_device_module(device)
            can_wait = hasattr(module, "Stream")  # as MPS cannot
            together = torch.stack([one for _, _, one in found]).to("cpu", non_blocking=can_wait)
            if can_wait:
                events.append(record(module.current_stream(device)))
            on_host: Sequence[Any] = together.unbind()
        except Exception:  # noqa: BLE001 the training hears of a device that fails by what it does next
            on_host = [None] * len(found)
        for (metrics, name, _), number in zip(found, on_host):
            metrics[name] = number
    return _Arriving(steps, events)


def _one_number(metric: Any) -> torch.Tensor | None:
    """Return what a rank has of a metric by itself; None: that is no number."""
    try:
        if (placements := getattr(metric, "placements", None)) is not None:  # of a DTensor, which asks the other ranks
            metric = metric.to_local() if all(each.is_replicate() for each in placements) else ()
        return metric.detach().reshape(())  # type: ignore[no-any-return]
    except Exception:  # noqa: BLE001 more than one number; or a class of others
        return None


def _is_there(events: list[Any], *, wait: bool) -> bool:
    try:
        for event in events if wait else []:
            event.synchronize()
        return all(event.query() for event in events)
    except Exception:  # noqa: BLE001 as above
        return False


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers. Of others a save warns."""
    found = {}
    for name, metric in metrics.items():
        with contextlib.suppress(Exception):  # a user's own class may raise anything
            found[str(name)] = float(metric.detach() if isinstance(metric, torch.Tensor) else metric)
    return found
