"""Anomalies of a device or a node: figures, thresholds, and how long a breach has to hold.

HealthThresholds()
HealthThresholds(utilisation=0.5, pcie_bytes_per_second=None, period_seconds=10)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Literal, NamedTuple

from ckptman.errors import ConfigError, IntervalError
from ckptman.policies.intervals import seconds_text
from ckptman.policies.parameters import check_positive

Level = Literal["look", "problem"]

_HOUR_SECONDS = 3600.0
"""The training time of which a share has to be in breach; nothing is said twice within an hour."""
_SMOOTH_SECONDS = 300.0
_LONGEST_PERIOD_SECONDS = 60.0
_QUIET_SECONDS = 600.0
"""A breach ends after so much training time without it."""
_LONG_STEPS, _LONG_SECONDS = 5.0, 10.0
"""A step that takes so many times the usual, and so long, is an evaluation or similar."""
_SHARES = ("utilisation", "utilisation_look", "power_share", "loader_share", "host_memory_share", "share")
_USUAL_LIMIT_WATTS = (500.0, 700.0)
HARDWARE_XIDS = (48, 64, 74, 79, 92, 94, 95, 119, 120, 140)
"""Xids of a GPU that is broken or has to be reset, by NVIDIA's catalogue of Xids: uncorrectable memory errors (48, 94,
95, 140), many corrected ones (92), a row that cannot be remapped (64), NVLink (74), off the bus (79), its own processor
(119, 120). Not the ones that programs cause: 13, 31, 43, 45."""


@dataclass(frozen=True, kw_only=True)
class HealthSample:
    """The figures of a rank's device and node at one time. None: not known.

    `utilisation`: share of the time in which a kernel ran; `pcie_in...`: received by the device; `clock`: as a share of
    its maximum; `slowdown_celsius`: the temperature at which the device slows down; `throttled`: why it is slowed down;
    `ecc_errors`: uncorrected ones since the first sample; `lost`: why the device cannot be read any more; `loader`:
    share of the time in which training waited for its ResumableLoader. The other figures are those of the host.
    """

    utilisation: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    pcie_in_bytes_per_second: float | None = None
    pcie_out_bytes_per_second: float | None = None
    temperature_celsius: float | None = None
    slowdown_celsius: float | None = None
    clock: float | None = None
    throttled: tuple[str, ...] = ()
    ecc_errors: int = 0
    xids: tuple[int, ...] = ()
    lost: str = ""
    loader: float | None = None
    host_available_bytes: float | None = None
    host_total_bytes: float | None = None
    disk_read_bytes_per_second: float | None = None
    disk_write_bytes_per_second: float | None = None
    network_in_bytes_per_second: float | None = None
    network_out_bytes_per_second: float | None = None


_SMOOTHED = ("utilisation", "power_watts", "pcie_in_bytes_per_second", "pcie_out_bytes_per_second", "clock", "loader")
"""They jump within a step, so their means are judged."""
_HIGHEST = ("memory_used_bytes", "temperature_celsius")
_HOST = ("host_available", "disk_", "network_")
FIGURES = (*_SMOOTHED, *_HIGHEST, *(each.name for each in fields(HealthSample) if each.name.startswith(_HOST)))
"""The figures of a summary: the maximum of `_HIGHEST`, the mean of all others."""


class Finding(NamedTuple):
    """A figure beyond its threshold. `what`: name of the figure; `text`: description for people."""

    what: str
    level: Level
    value: float
    threshold: float
    text: str


@dataclass(frozen=True)
class HealthThresholds:
    """Thresholds of the health of GPUs and nodes. None turns one off.

    Utilisation, power, PCIe and the wait for the loader are averaged over five minutes of training. A breach counts
    when it held in more than `share` of an hour of training, which takes three minutes, or eight if it is averaged.
    Samples during a save, a restore or an evaluation, and before the first step, do not count.

    Args:
        utilisation: share of the time in which a GPU is busy; a problem below it.
        utilisation_look: the same; worth a look below it.
        power_watts: a problem below it, on devices with a power limit of 500 to 700 W.
        power_share: the same for all other devices, as a share of their power limit.
        pcie_bytes_per_second: into or out of a GPU; worth a look above it.
        temperature_margin_celsius: a problem if a GPU is closer than this to the temperature at which it slows down.
        throttling: whether it is a problem if a GPU slows down for its temperature or for lack of power.
        loader_share: share of training time spent waiting for a ResumableLoader; on a GPU a problem only together with
            a low utilisation.
        host_memory_share: share of a node's memory; a problem if less is available.
        straggler_share: share of a step; a rank whose own work takes that much longer than that of the median rank is
            a straggler.
        bad_xids: NVIDIA's Xids that put a node on the list of bad nodes.
        share: of the samples of an hour of training.
        period_seconds: time between two samples, at most 60.

    Raises:
        IntervalError: a number that is out of range.
        ConfigError: a value of the wrong kind.
    """

    utilisation: float | None = 0.7
    utilisation_look: float | None = 0.9
    power_watts: float | None = 350.0
    power_share: float | None = 0.5
    pcie_bytes_per_second: float | None = 20e9
    temperature_margin_celsius: float | None = 5.0
    throttling: bool = True
    loader_share: float | None = 0.1
    host_memory_share: float | None = 0.05
    straggler_share: float | None = 0.1
    bad_xids: tuple[int, ...] = HARDWARE_XIDS
    share: float = 0.05
    period_seconds: float = 5.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in ("throttling", "bad_xids") or (value is None and name not in ("share", "period_seconds")):
                continue
            check_positive("HealthThresholds", name, value)
            if name in _SHARES and value > 1:
                raise IntervalError(f"HealthThresholds: {name} is a share, above 0 and up to 1, not {value!r}")
        if self.period_seconds > _LONGEST_PERIOD_SECONDS:
            raise IntervalError(f"HealthThresholds: period_seconds is at most 60, not {self.period_seconds!r}")
        if isinstance(self.bad_xids, str) or not all(type(each) is int for each in self.bad_xids):
            raise ConfigError(
                f"HealthThresholds: bad_xids are numbers of Xids, such as (48, 79), not {self.bad_xids!r}"
            )

    def findings(self, sample: HealthSample) -> Iterator[Finding]:
        """Yield each figure of a sample that is beyond its threshold, except for device errors."""
        used = sample.utilisation
        levels: tuple[tuple[Level, float | None], ...] = (
            ("problem", self.utilisation),
            ("look", self.utilisation_look),
        )
        for level, least in levels:
            if used is not None and least is not None and used < least:
                yield Finding("utilisation", level, used, least, f"GPU utilisation {used:.0%}, below {least:.0%}")
                break
        power, least = sample.power_watts, self.least_watts(sample.power_limit_watts)
        if power is not None and least is not None and power < least:
            yield Finding("power_watts", "problem", power, least, f"GPU power {power:.0f} W, below {least:.0f} W")
        for name, way in (("pcie_in_bytes_per_second", "into"), ("pcie_out_bytes_per_second", "out of")):
            rate, most = getattr(sample, name), self.pcie_bytes_per_second
            if rate is not None and most is not None and rate > most:
                text = f"PCIe {rate / 1e9:.1f} GB/s {way} the GPU, above {most / 1e9:g} GB/s"
                yield Finding(name, "look", rate, most, text)
        margin, slowdown, now = self.temperature_margin_celsius, sample.slowdown_celsius, sample.temperature_celsius
        if margin is not None and slowdown is not None and now is not None and now > slowdown - margin:
            text = f"GPU at {now:.0f} °C, above {slowdown - margin:.0f} °C (it slows down at {slowdown:.0f} °C)"
            yield Finding("temperature_celsius", "problem", now, slowdown - margin, text)
        if self.throttling and sample.throttled:
            yield Finding("throttled", "problem", 1.0, 0.0, f"GPU slowed down ({', '.join(sample.throttled)})")
        wait, most, low = sample.loader, self.loader_share, self.utilisation_look or 1.0
        if wait is not None and most is not None and wait > most and (used is None or used < low):
            text = f"training waits for its loader {wait:.0%} of the time, above {most:.0%}"
            yield Finding("loader", "problem", wait, most, text)
        left, whole, least = sample.host_available_bytes, sample.host_total_bytes, self.host_memory_share
        if left is not None and whole and least is not None and left < least * whole:
            text = f"host memory {left / 1e9:.1f} GB available, below {least:.0%} of {whole / 1e9:.0f} GB"
            yield Finding("host_available_bytes", "problem", left, least * whole, text)

    def least_watts(self, limit_watts: float | None) -> float | None:
        """Return the power below which a device with this limit has a problem; None: not checked."""
        if limit_watts is None:
            return None
        if self.power_watts is not None and _USUAL_LIMIT_WATTS[0] <= limit_watts <= _USUAL_LIMIT_WATTS[1]:
            return self.power_watts
        return None if self.power_share is None else self.power_share * limit_watts


@dataclass(frozen=True)
class HealthBreach:
    """A breach that began or ended. `since`: its beginning, in unix seconds; `seconds`: how long it has held; `share`:
    of the samples in that time; `bad_node`: whether its node should not be used again."""

    what: str
    level: Level
    value: float
    threshold: float
    since: float
    seconds: float
    share: float
    text: str
    ended: bool = False
    bad_node: bool = False

    def __str__(self) -> str:
        if not self.seconds:
            return self.text
        return f"{self.text}, in {self.share:.0%} of the samples of {seconds_text(self.seconds)} of training"


@dataclass
class HealthSummary:
    """The figures of a rank since the last summary: the number of samples, their sum and the maximum of each."""

    samples: int = 0
    set_aside: int = 0
    figures: dict[str, tuple[int, float, float]] = field(default_factory=dict)

    def add(self, sample: HealthSample) -> None:
        """Add a sample of training."""
        self.samples += 1
        for name in FIGURES:
            if (value := getattr(sample, name)) is not None:
                count, total, most = self.figures.get(name, (0, 0.0, -math.inf))
                self.figures[name] = (count + 1, total + value, max(most, value))

    def values(self) -> dict[str, float]:
        """Return one number for each known figure. Another thread might be adding the last one."""
        known = dict(self.figures).items()
        return {name: most if name in _HIGHEST else total / count for name, (count, total, most) in known}


class Hourly:
    """Allows each key once an hour."""

    def __init__(self) -> None:
        self._last: dict[object, float] = {}

    def is_due(self, key: object, now: float) -> bool:
        """Return whether `key` was not allowed in the last hour, and allow it now."""
        if now - self._last.get(key, -math.inf) < _HOUR_SECONDS:
            return False
        self._last[key] = now
        return True


class HealthWatch:
    """Decides which samples of a rank make a breach. The caller passes every time, in unix seconds.

    A sample counts when its step has ended, because a step that takes far longer than the others is an evaluation or
    similar. Errors of a device count at once.
    """

    def __init__(self, thresholds: HealthThresholds) -> None:
        period = thresholds.period_seconds
        self.thresholds = thresholds
        self.summary = HealthSummary()
        self._window = max(1, round(_HOUR_SECONDS / period))
        self._quiet = max(1, round(_QUIET_SECONDS / period))
        self._recent: deque[HealthSample] = deque(maxlen=max(1, round(_SMOOTH_SECONDS / period)))
        # By figure and level: the latest samples in breach, as (number, time, finding), and when a breach began.
        self._hits: dict[tuple[str, Level], deque[tuple[int, float, Finding]]] = {}
        self._since: dict[tuple[str, Level], float] = {}
        self._number = 0
        self._step, self._step_since = -1, 0.0
        self._waiting: list[tuple[float, HealthSample]] = []
        self._ecc_errors = 0
        self._errors = Hourly()

    def see(
        self, now: float, step: int | None, sample: HealthSample, usual_seconds: float | None = None
    ) -> list[HealthBreach]:
        """Take in a sample; return the breaches that began or ended.

        Args:
            step: the last step that ended; None: the rank did something other than training since the last sample.
            usual_seconds: what a step takes; None: not known yet.
        """
        found = list(self._device_errors(now, sample))
        if step is None:
            self.summary.set_aside += 1
            return found
        if step != self._step:
            for time, each in self._waiting:
                found += self._judge(time, each)
            self._waiting.clear()
            self._step, self._step_since = step, now
        self._waiting.append((now, sample))
        if now - self._step_since > max(_LONG_STEPS * (usual_seconds or 0.0), _LONG_SECONDS):
            self.summary.set_aside += len(self._waiting)
            self._waiting.clear()
        return found

    def _judge(self, now: float, sample: HealthSample) -> Iterator[HealthBreach]:
        self._number += 1
        self.summary.add(sample)
        self._recent.append(sample)
        for finding in self.thresholds.findings(self._smoothed(sample)):
            hits = self._hits.setdefault(finding[:2], deque(maxlen=self._window))
            hits.append((self._number, now, finding))
        for key, hits in list(self._hits.items()):
            last, last_time, _ = hits[-1]
            if key in self._since:
                if self._number - last >= self._quiet:
                    yield self._breach(key, last, last_time, ended=True)
                    del self._hits[key], self._since[key]
                continue
            while hits and hits[0][0] <= self._number - self._window:
                hits.popleft()
            if not hits:
                del self._hits[key]
            elif len(hits) > self.thresholds.share * self._window:
                self._since[key] = hits[0][1]
                yield self._breach(key, self._number, now)

    def _breach(self, key: tuple[str, Level], number: int, now: float, *, ended: bool = False) -> HealthBreach:
        hits, since = self._hits[key], self._since[key]
        mean = math.fsum(found.value for _, _, found in hits) / len(hits)
        # The share is that of the samples still remembered; a long breach began before them.
        share, found = len(hits) / (number - hits[0][0] + 1), hits[-1][2]
        return HealthBreach(*key, mean, found.threshold, since, now - since, share, found.text, ended)

    def _smoothed(self, sample: HealthSample) -> HealthSample:
        """Return a sample with the means of the figures that jump within a step; None: too few samples yet."""
        means: dict[str, float | None] = dict.fromkeys(_SMOOTHED)
        for name in _SMOOTHED if len(self._recent) == self._recent.maxlen else ():
            values = [value for each in self._recent if (value := getattr(each, name)) is not None]
            if 2 * len(values) > len(self._recent):
                means[name] = math.fsum(values) / len(values)
        return replace(sample, **means)  # type: ignore[arg-type]

    def _device_errors(self, now: float, sample: HealthSample) -> Iterator[HealthBreach]:
        """Yield the errors of the device, each kind at most once an hour."""
        errors: list[tuple[str, float, bool, str]] = []
        if (rise := sample.ecc_errors - self._ecc_errors) > 0:
            errors.append(("ecc_errors", rise, True, f"{rise} uncorrected ECC error{'s' * (rise > 1)} of the GPU"))
            self._ecc_errors = sample.ecc_errors
        for xid in sample.xids:
            errors.append(("xid", xid, xid in self.thresholds.bad_xids, f"the driver reports Xid {xid} of the GPU"))
        if sample.lost:
            errors.append(("lost", 1.0, True, f"the GPU cannot be read any more: {sample.lost}"))
        for what, value, is_bad, text in errors:
            if self._errors.is_due((what, value if what == "xid" else None), now):
                level: Level = "problem" if is_bad else "look"
                yield HealthBreach(what, level, value, 0.0, now, 0.0, 1.0, text, bad_node=is_bad)
