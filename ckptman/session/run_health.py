"""Monitors this rank while it trains, and writes the health of all ranks and its stragglers to the journal."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from statistics import median
from typing import Any, Literal, NamedTuple

import torch

from ckptman.data.resumable_loader import ResumableLoader
from ckptman.engine.comm.control_group import Channel, RankFailed
from ckptman.engine.state.accelerators import is_capturing
from ckptman.errors import ConfigError, RankLostError
from ckptman.policies.health import HealthThresholds, Hourly
from ckptman.runtime.health.devices import Host, open_device
from ckptman.runtime.health.rank_report import (
    MOST_NAMED,
    RankHealth,
    breaches_over_ranks,
    over_ranks,
    stragglers,
    usual_seconds,
)
from ckptman.runtime.health.sampler import Open, Phase, Sampler
from ckptman.runtime.log import tell
from ckptman.runtime.outcome import this_node
from ckptman.runtime.watchdog import Watchdog
from ckptman.session.run_session import RunSession
from ckptman.session.timings import Timings

Setting = HealthThresholds | Literal["auto"] | None
_FIRST_PERIODS = 12
"""Sampling begins after so many periods of training: shorter runs do not need it."""
_MOST_LAPS = 2000
_MOST_OPEN = 200
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def thresholds_of(setting: Setting) -> HealthThresholds | None:
    """Return the thresholds that `health=` stands for. Raises: ConfigError."""
    if setting is None or isinstance(setting, HealthThresholds):
        return setting
    if setting != "auto":
        raise ConfigError(f"health is 'auto', a HealthThresholds, or None not to look, not {setting!r}")
    return HealthThresholds()


class _Section(NamedTuple):
    """A piece of the rank's own work: seconds on the host, and the events around it on its device, if it has one."""

    seconds: float
    begun: Any
    ended: Any

    @property
    def has_ended(self) -> bool:
        return self.ended is None or bool(self.ended.query())

    def longest(self) -> float:
        """Return the longer of the times on the host and on the device."""
        return self.seconds if self.ended is None else max(self.seconds, self.begun.elapsed_time(self.ended) / 1000)


class RunHealth:
    """Samples this rank's device, times its steps, and writes the reports of the ranks to the journal.

    The training thread calls `own_work` and `step_ended`; the thread that writes a save calls `report` and `note`.
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
        self._phase = _phase(watchdog, timings)
        self._sampler: Sampler | None = None
        self._closed = False
        self._made = self._reported = time.monotonic()
        self._told = Hourly()
        # The current step, and those that have ended.
        self._lap_began: float | None = None
        self._waited = 0.0
        self._is_in_work = False
        self._sections: list[_Section] = []
        self._open: deque[list[_Section]] = deque(maxlen=_MOST_OPEN)
        self._laps: dict[str, deque[float]] = {
            f"{each}_seconds": deque(maxlen=_MOST_LAPS) for each in ("step", "work", "loader")
        }

    # ---- the training thread -----------------------------------------------------------------------------------

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Time the block on the host and on its device."""
        if self._is_in_work or len(self._sections) >= _MOST_LAPS:  # nested, or no step ends
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
        now, waited, sections = time.perf_counter(), _waited(self._loaders), self._sections
        if self._lap_began is not None:
            self._laps["step_seconds"].append(now - self._lap_began)
            if self._loaders:
                self._laps["loader_seconds"].append(waited - self._waited)
            if sections:
                self._open.append(sections)
            with suppress(RuntimeError):  # the device has failed; the calls of the training raise that
                while self._open and all(each.has_ended for each in self._open[0]):
                    self._laps["work_seconds"].append(sum(each.longest() for each in self._open.popleft()))
        self._lap_began, self._waited = now, waited
        if sections:
            self._sections = []
        if self._sampler is None and not self._closed:
            self._start_in_time()

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
        quiet = not self._is_leader  # a library that one rank lacks is missing on all
        self._sampler = Sampler(self._thresholds, who, self._node, sources, self._phase, quiet=quiet)
        weakref.finalize(self, self._sampler.stop)
        self._sampler.start()

    # ---- what the ranks say ------------------------------------------------------------------------------------

    def report(self) -> RankHealth | None:
        """Return the report of this rank since the last call; None: nothing was sampled. Never raises."""
        if self._sampler is None:
            return None
        with _harmless("report"):
            summary, breaches = self._sampler.take()
            laps = {name: list(each) for name, each in self._laps.items()}
            for each in self._laps.values():
                each.clear()
            if not (summary.samples or breaches or laps["step_seconds"]):
                return None
            begun, self._reported = self._reported, time.monotonic()
            figures, seconds = summary.values(), self._reported - begun
            for name, times in laps.items():
                if (usual := usual_seconds(times)) is not None:
                    # Some steps contain saves and evaluations.
                    figures[name] = median(times) if name == "step_seconds" else usual
            return RankHealth(self._rank, self._node, seconds, summary.samples, summary.set_aside, figures, breaches)
        return None

    def note(self, reports: Sequence[RankHealth | None]) -> None:
        """Write the reports of the ranks to the journal, and name stragglers. Leader only. Never raises."""
        known = [each for each in reports if each is not None]
        if not known:
            return
        with _harmless("summary"):
            events, counts = breaches_over_ranks(known)
            self._session.note("health", **over_ranks(known), breaches=counts)
            for event in events:
                self._session.note("health_breach", **event)
            now, slow = time.monotonic(), stragglers(known, self._thresholds)
            due = (each for each in slow if self._told.is_due((each.rank, each.of), now))
            for each in islice(due, MOST_NAMED):
                tell(str(each), logging.WARNING)
                self._session.note("straggler", **each._asdict(), text=str(each))

    def close(self) -> None:
        """Stop sampling."""
        self._closed = True
        if self._sampler is not None:
            self._sampler.close()


def finish(health: RunHealth | None, control: Channel) -> None:
    """Write the last reports of the ranks, and stop sampling. Every rank calls it at the end of a run."""
    reporting = health.report if health is not None else lambda: None
    with suppress(RankFailed, RankLostError):  # the next call reports a lost rank
        control.gather_on_leader(reporting, health.note if health is not None else lambda _: None)
    if health is not None:
        health.close()


@contextmanager
def _harmless(what: str) -> Iterator[None]:
    """Log any error: no figure is worth a save."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 whatever it is
        tell(f"health: no {what} ({type(error).__name__}: {error})", logging.WARNING)


def _phase(watchdog: Watchdog, timings: Timings) -> Phase:
    """Return what the sampler asks for. It holds no RunHealth, so that a run that is not closed can be collected."""
    progress, before = watchdog.progress, 0

    def phase() -> tuple[int | None, float | None]:
        nonlocal before
        step, interruptions = progress.training
        is_training, before = interruptions == before, interruptions
        return step if is_training else None, timings.step_seconds

    return phase


class _LoaderShare:
    """The share of the time for which the training waited for its loaders."""

    def __init__(self, loaders: Sequence[ResumableLoader[Any]]) -> None:
        self._loaders = loaders
        self._before = time.perf_counter(), _waited(loaders)

    def read(self) -> dict[str, Any]:
        then, waited = self._before
        now, waits = self._before = time.perf_counter(), _waited(self._loaders)
        return {"loader": (waits - waited) / max(1e-9, now - then)}


def _waited(loaders: Sequence[ResumableLoader[Any]]) -> float:
    return sum(each.wait_seconds for each in loaders)


def _device() -> tuple[str, str] | None:
    """Return vendor and PCI address of the current GPU; None: there is none."""
    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return None
    with suppress(AttributeError, RuntimeError):
        found: Any = cuda.get_device_properties(cuda.current_device())
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        return "amd" if torch.version.hip else "nvidia", address
    return None


def _event() -> Any:
    """Return an event on the current stream of a GPU; None without a GPU, or while a graph is captured."""
    cuda: Any = torch.cuda
    if not cuda.is_initialized() or is_capturing():
        return None
    with suppress(RuntimeError, TypeError):
        event = cuda.Event(enable_timing=True)
        event.record()
        return event
    return None
