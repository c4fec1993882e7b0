"""The health of this rank while it trains, and of all ranks for the journal; and which rank holds the others up."""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple

import torch

from ckptman.data.resumable_loader import ResumableLoader
from ckptman.engine.comm.control_group import Channel, RankFailed
from ckptman.engine.state.accelerators import is_capturing
from ckptman.errors import ConfigError, RankLostError
from ckptman.policies.health import HealthThresholds
from ckptman.runtime.health.device import open_device
from ckptman.runtime.health.host import Host
from ckptman.runtime.health.rank_report import (
    FEWEST_STEPS,
    MOST_NAMED,
    RankHealth,
    Straggler,
    breaches_over_ranks,
    over_ranks,
    stragglers,
    usual_seconds,
)
from ckptman.runtime.health.sampler import Open, Sampler
from ckptman.runtime.log import tell
from ckptman.runtime.outcome import this_node
from ckptman.runtime.watchdog import Watchdog
from ckptman.session.run_session import RunSession
from ckptman.session.timings import Timings

Setting = HealthThresholds | Literal["auto"] | None
_FIRST_PERIODS = 12
"""Nothing is sampled before training has run for so many periods: what is over by then needs none of this."""
_MOST_LAPS = 2000
_MOST_OPEN = 200
_SOON_SECONDS = 3600.0
"""A straggler is not told again within that time."""
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def thresholds_of(setting: Setting) -> HealthThresholds | None:
    """Return what `health=` means. Raises: ConfigError."""
    if setting is None or isinstance(setting, HealthThresholds):
        return setting
    if setting != "auto":
        raise ConfigError(f"health is 'auto', a HealthThresholds, or None not to look, not {setting!r}")
    return HealthThresholds()


class _Section(NamedTuple):
    """Work of this rank's own: seconds on the host, and two events around it on its device, if it has one."""

    seconds: float
    begun: Any
    ended: Any

    @property
    def is_over(self) -> bool:
        return self.ended is None or bool(self.ended.query())

    def longest(self) -> float:
        """Return the larger of the two."""
        return self.seconds if self.ended is None else max(self.seconds, self.begun.elapsed_time(self.ended) / 1000)


class RunHealth:
    """Samples this rank's device, times its steps, and writes what the ranks say to the journal.

    The training thread calls `own_work` and `step_ended`; `report` and `note` are called wherever a save is written.
    """

    def __init__(
        self,
        thresholds: HealthThresholds,
        control: Channel,
        session: RunSession,
        watchdog: Watchdog,
        timings: Timings,
        state: Iterable[object],
    ) -> None:
        self._thresholds, self._session = thresholds, session
        self._rank, self._is_leader, self._several = control.rank, control.is_leader, control.distributed
        self._loaders = [each for each in state if isinstance(each, ResumableLoader)]
        self._node = this_node(os.environ)
        self._phase = _Phase(watchdog, timings)
        self._sampler: Sampler | None = None
        self._closed = False
        self._made = self._reported = time.monotonic()
        self._told: dict[tuple[int, str], float] = {}
        # Of the step that is under way, and of those that are over.
        self._lap_began: float | None = None
        self._waited = 0.0
        self._is_in_work = False
        self._sections: list[_Section] = []
        self._open: deque[list[_Section]] = deque(maxlen=_MOST_OPEN)
        self._steps: deque[float] = deque(maxlen=_MOST_LAPS)
        self._loader: deque[float] = deque(maxlen=_MOST_LAPS)
        self._work: deque[float] = deque(maxlen=_MOST_LAPS)

    # ---- the training thread -----------------------------------------------------------------------------------

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Time what is done inside, on the host and on its device."""
        if self._is_in_work or len(self._sections) >= _MOST_LAPS:  # it is timed already, or no step ends
            yield
            return
        self._is_in_work, event, begun = True, _event(), time.perf_counter()
        try:
            yield
        finally:
            self._is_in_work = False
            self._sections.append(_Section(time.perf_counter() - begun, event, _event() if event is not None else None))

    def step_ended(self) -> None:
        """Note that a step has ended."""
        now = time.perf_counter()
        waited, sections = self._wait_seconds(), self._sections
        if self._lap_began is not None:
            self._steps.append(now - self._lap_began)
            if self._loaders:
                self._loader.append(waited - self._waited)
            if sections:
                self._open.append(sections)
            self._settle()
        self._lap_began, self._waited = now, waited
        if sections:
            self._sections = []
        if self._sampler is None and not self._closed:
            self._start_in_time()

    def _settle(self) -> None:
        """Count the work of steps whose events are over."""
        with suppress(RuntimeError):  # the device has failed, as the training hears from its own calls
            while self._open and all(each.is_over for each in self._open[0]):
                self._work.append(sum(each.longest() for each in self._open.popleft()))

    def _start_in_time(self) -> None:
        if time.monotonic() - self._made < _FIRST_PERIODS * self._thresholds.period_seconds:
            return
        sources: dict[str, Open] = {}
        if (device := _device()) is not None:
            sources["the GPU"] = partial(open_device, *device)
        if next((os.environ[name] for name in _LOCAL_RANK if os.environ.get(name)), "0") == "0":
            sources["the host"] = Host
        if self._loaders:
            sources["the loader"] = partial(_LoaderShare, self._loaders)
        who = f"rank {self._rank} on {self._node}" if self._several else self._node
        quiet = not self._is_leader  # all of them lack a library that one lacks
        self._sampler = Sampler(self._thresholds, who, self._node, sources, self._phase, quiet=quiet)
        weakref.finalize(self, self._sampler.stop)
        self._sampler.start()

    def _wait_seconds(self) -> float:
        return sum(each.wait_seconds for each in self._loaders)

    # ---- what the ranks say ------------------------------------------------------------------------------------

    def report(self) -> RankHealth | None:
        """Return what this rank has to say since the last call; None: nothing was sampled. Never raises."""
        if self._sampler is None:
            return None
        try:
            return self._report(self._sampler)
        except Exception as error:  # noqa: BLE001 no figure is worth a save
            tell(f"health: no report ({type(error).__name__}: {error})", logging.WARNING)
            return None

    def _report(self, sampler: Sampler) -> RankHealth | None:
        summary, breaches = sampler.take()
        steps, work, loader = _taken(self._steps), _taken(self._work), _taken(self._loader)
        if not (summary.samples or breaches or steps):
            return None
        begun, self._reported = self._reported, time.monotonic()
        return RankHealth(
            self._rank,
            self._node,
            self._reported - begun,
            summary.samples,
            summary.set_aside,
            summary.values(),
            median(steps) if len(steps) >= FEWEST_STEPS else None,  # saves and evaluations are in some of them
            usual_seconds(work),
            usual_seconds(loader),
            breaches,
        )

    def note(self, reports: Sequence[RankHealth | None]) -> None:
        """Write to the journal what the ranks said, and name stragglers. Leader only. Never raises."""
        known = [each for each in reports if each is not None]
        try:
            if known:
                self._note(known)
        except Exception as error:  # noqa: BLE001 no figure is worth a save
            tell(f"health: no summary ({type(error).__name__}: {error})", logging.WARNING)

    def _note(self, reports: Sequence[RankHealth]) -> None:
        events, counts = breaches_over_ranks(reports)
        self._session.note("health", **over_ranks(reports), breaches=counts)
        for event in events:
            self._session.note("health_breach", **event)
        now = time.monotonic()
        slow = [each for each in stragglers(reports, self._thresholds) if self._is_news(each, now)]
        for each in slow[:MOST_NAMED]:
            self._told[each.rank, each.of] = now
            tell(str(each), logging.WARNING)
            self._session.note("straggler", **each._asdict(), text=str(each))

    def _is_news(self, found: Straggler, now: float) -> bool:
        return now - self._told.get((found.rank, found.of), -math.inf) >= _SOON_SECONDS

    def close(self) -> None:
        """Stop sampling."""
        self._closed = True
        if self._sampler is not None:
            self._sampler.close()


def finish(health: RunHealth | None, control: Channel) -> None:
    """Bring together what the ranks have to say at the end of a run, and stop sampling. Every rank calls it."""
    reporting = health.report if health is not None else lambda: None
    with suppress(RankFailed, RankLostError):  # who is lost is told by what comes next
        control.gather_on_leader(reporting, health.note if health is not None else lambda _: None)
    if health is not None:
        health.close()


class _Phase:
    """What the rank was at since it was asked before. It knows no RunHealth, which nobody may hold but its run."""

    def __init__(self, watchdog: Watchdog, timings: Timings) -> None:
        self._progress, self._timings, self._interruptions = watchdog.progress, timings, 0

    def __call__(self) -> tuple[int | None, float | None]:
        step, interruptions = self._progress.training
        before, self._interruptions = self._interruptions, interruptions
        return step if interruptions == before else None, self._timings.step_seconds


class _LoaderShare:
    """For which share of the time the training waited for its loaders."""

    def __init__(self, loaders: Sequence[ResumableLoader[Any]]) -> None:
        self._loaders = loaders
        self._before = self._now()

    def read(self) -> dict[str, Any]:
        then, waited = self._before
        now, waits = self._before = self._now()
        return {"loader": (waits - waited) / max(1e-9, now - then)}

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), sum(each.wait_seconds for each in self._loaders)


def _taken(laps: deque[float]) -> list[float]:
    """Return and forget what the training thread may be adding to."""
    found = list(laps)
    laps.clear()
    return found


def _device() -> tuple[str, str] | None:
    """Return vendor and PCI address of the GPU that this thread uses; None: there is none."""
    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return None
    with suppress(AttributeError, RuntimeError):
        found: Any = cuda.get_device_properties(cuda.current_device())
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        return "amd" if torch.version.hip else "nvidia", address
    return None


def _event() -> Any:
    """Return an event on the current stream of a GPU; None where there is none, or a graph is captured."""
    cuda: Any = torch.cuda
    if not cuda.is_initialized() or is_capturing():
        return None
    with suppress(RuntimeError, TypeError):
        event = cuda.Event(enable_timing=True)
        event.record()
        return event
    return None
