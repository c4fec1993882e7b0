"""Figures of a node, and of a GPU from the management library of its maker: `nvidia-ml-py` or `amdsmi`.

`amdsmi` should be the version of the installed ROCm. The libraries are imported when a GPU is opened.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptman.runtime.host_memory import available_bytes, total_bytes

_MOST_REFUSALS = 3
_KNOWN = ("utilisation", "power_watts", "temperature_celsius")
_MOST_XIDS = 16
_NVIDIA_THROTTLED = {0x8: "hardware", 0x20: "temperature", 0x40: "temperature, by hardware", 0x80: "power brake"}
"""Neither the power cap (0x4), at which a busy GPU runs, nor idling."""
_AMD_THROTTLED = {
    "active_prochot_thrm": "processor hot",
    "active_socket_thrm": "temperature",
    "active_vr_thrm": "temperature of the voltage regulator",
    "active_hbm_thrm": "temperature of its memory",
}
_INFINIBAND, _NETWORKS = Path("/sys/class/infiniband"), Path("/sys/class/net")
_WORD_BYTES = 4
"""InfiniBand counts in lanes: four bytes are one."""
_IP_OVER_INFINIBAND = "32"


class DeviceLost(Exception):
    """The device fell off its bus, or was taken away."""


class Device:
    """A GPU, named by its PCI address. Raises: ImportError, and the errors of its library.

    `error`: the class of these errors; `lost`: the code of the one that means that the device is lost.
    """

    error: type[Exception]
    lost: int | None = None

    def __init__(self) -> None:
        self._refused: Counter[str] = Counter()

    def read(self) -> dict[str, Any]:
        """Return figures of a `HealthSample`; None: not known. Raises: DeviceLost."""
        raise NotImplementedError

    def ask(self, name: str, question: Callable[[], Any]) -> Any:
        """Return an answer, or None. A question that is refused three times in a row is no longer asked.

        Raises: DeviceLost.
        """
        if self._refused[name] >= _MOST_REFUSALS:
            return None
        try:
            answer = question()
        except self.error as error:
            if self.lost is not None and getattr(error, "value", None) == self.lost:
                raise DeviceLost(str(error)) from error
            self._refused[name] += 1
            return None
        self._refused[name] = 0
        return answer


class NvidiaDevice(Device):
    def __init__(self, pci_address: str) -> None:
        import pynvml

        super().__init__()
        self._nvml: Any = pynvml
        self.error, self.lost = pynvml.NVMLError, pynvml.NVML_ERROR_GPU_IS_LOST
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_address.encode())
        self._events = self._watch_xids()
        self._ecc_before = self._ecc_errors()
        self._limit_milliwatts = self._of("EnforcedPowerLimit")
        self._slowdown = self._of("TemperatureThreshold", pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        self._most_clock = self._of("MaxClockInfo", pynvml.NVML_CLOCK_SM)

    def read(self) -> dict[str, Any]:
        """It sleeps for some 40 ms, in which the library counts PCIe traffic."""
        nvml = self._nvml
        memory = self._of("MemoryInfo")
        return {
            "utilisation": _number(getattr(self._of("UtilizationRates"), "gpu", None), 0.01),
            "power_watts": _number(self._of("PowerUsage"), 1e-3),
            "power_limit_watts": _number(self._limit_milliwatts, 1e-3),
            "memory_used_bytes": getattr(memory, "used", None),
            "memory_total_bytes": getattr(memory, "total", None),
            "pcie_in_bytes_per_second": _number(self._of("PcieThroughput", nvml.NVML_PCIE_UTIL_RX_BYTES), 1e3),
            "pcie_out_bytes_per_second": _number(self._of("PcieThroughput", nvml.NVML_PCIE_UTIL_TX_BYTES), 1e3),
            "temperature_celsius": self._of("Temperature", nvml.NVML_TEMPERATURE_GPU),
            "slowdown_celsius": self._slowdown,
            "clock": _share(self._of("ClockInfo", nvml.NVML_CLOCK_SM), self._most_clock),
            "throttled": self._throttled(),
            "ecc_errors": max(0, self._ecc_errors() - self._ecc_before),
            "xids": self._xids(),
        }

    def _of(self, what: str, *arguments: Any) -> Any:
        question = getattr(self._nvml, f"nvmlDeviceGet{what}")
        return self.ask(f"{what}{arguments}", lambda: question(self._handle, *arguments))

    def _throttled(self) -> tuple[str, ...]:
        reasons = self._of("CurrentClocksThrottleReasons") or 0
        return tuple(text for bit, text in _NVIDIA_THROTTLED.items() if reasons & bit)

    def _ecc_errors(self) -> int:
        kinds = (self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self._nvml.NVML_VOLATILE_ECC)
        return self._of("TotalEccErrors", *kinds) or 0

    def _watch_xids(self) -> Any:
        """Subscribe to Xids; None if that is not possible."""
        nvml = self._nvml
        with contextlib.suppress(nvml.NVMLError):
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
            return events
        return None

    def _xids(self) -> tuple[int, ...]:
        """Return the Xids since the last call."""
        found: list[int] = []
        with contextlib.suppress(self._nvml.NVMLError):  # above all: there are no more
            while self._events is not None and len(found) < _MOST_XIDS:
                found.append(int(self._nvml.nvmlEventSetWait_v2(self._events, 0).eventData))
        return tuple(found)


class AmdDevice(Device):
    def __init__(self, pci_address: str) -> None:
        import amdsmi

        super().__init__()
        self._smi: Any = amdsmi
        self.error = amdsmi.AmdSmiException
        amdsmi.amdsmi_init(amdsmi.AmdSmiInitFlags.INIT_AMD_GPUS)
        self._handle = amdsmi.amdsmi_get_processor_handle_from_bdf(pci_address)
        self._ecc_before = self._ecc_errors()
        self._limit_microwatts = self._of("power_cap_info").get("power_cap")
        self._slowdown = self._temperature("CRITICAL")

    def read(self) -> dict[str, Any]:
        memory, clock = self._of("gpu_vram_usage"), self._of("clock_info", self._smi.AmdSmiClkType.GFX)
        traffic = self._of("pcie_info").get("pcie_metric", {})
        return {
            "utilisation": _number(self._of("gpu_activity").get("gfx_activity"), 0.01),
            "power_watts": self._power(),
            "power_limit_watts": _number(self._limit_microwatts, 1e-6) or None,
            "memory_used_bytes": _number(memory.get("vram_used"), 2**20),
            "memory_total_bytes": _number(memory.get("vram_total"), 2**20),
            "pcie_in_bytes_per_second": _number(traffic.get("pcie_bandwidth"), 1e6 / 8),  # both ways together
            "temperature_celsius": self._temperature("CURRENT"),
            "slowdown_celsius": self._slowdown,
            "clock": _share(clock.get("clk"), clock.get("max_clk")),
            "throttled": self._throttled(),
            "ecc_errors": max(0, self._ecc_errors() - self._ecc_before),
        }

    def _of(self, what: str, *arguments: Any) -> dict[str, Any]:
        question = getattr(self._smi, f"amdsmi_get_{what}")
        return self.ask(what, lambda: question(self._handle, *arguments)) or {}

    def _power(self) -> float | None:
        """Return watts; None for 0, which the second of two GPUs in one package reports."""
        found = self._of("power_info")
        values = (_number(found.get(f"{each}_socket_power")) for each in ("current", "average"))
        return next(filter(None, values), None)

    def _temperature(self, metric: str) -> float | None:
        which = (self._smi.AmdSmiTemperatureType.HOTSPOT, getattr(self._smi.AmdSmiTemperatureMetric, metric))
        found = self.ask(metric, lambda: self._smi.amdsmi_get_temp_metric(self._handle, *which))
        return _number(found) or None

    def _throttled(self) -> tuple[str, ...]:
        found = self._of("violation_status")
        return tuple(text for name, text in _AMD_THROTTLED.items() if found.get(name) is True)

    def _ecc_errors(self) -> int:
        return int(_number(self._of("gpu_total_ecc_count").get("uncorrectable_count")) or 0)


def _number(value: object, unit: float = 1.0) -> float | None:
    """Return a value in a unit; None if it is None or "N/A"."""
    return value * unit if isinstance(value, int | float) and not isinstance(value, bool) else None


def _share(value: object, most: object) -> float | None:
    part, whole = _number(value), _number(most)
    return part / whole if part is not None and whole else None


def open_device(vendor: str, pci_address: str) -> Device:
    """Open a GPU of "nvidia" or "amd".

    Raises: ImportError if the library is not installed, RuntimeError if it knows nothing of this device, and whatever
    a broken library raises.
    """
    try:
        device = (AmdDevice if vendor == "amd" else NvidiaDevice)(pci_address)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is not installed (pip install 'ckptman[{vendor}]')") from error
    figures = device.read()
    if all(figures.get(name) is None for name in _KNOWN):
        raise RuntimeError(f"it knows neither utilisation nor power nor temperature of {pci_address}")
    return device


class Host:
    """This node. Rates are means since the last reading."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before: tuple[float, dict[str, int]] = (clock(), _counters())

    def read(self) -> dict[str, Any]:
        """Return figures of a `HealthSample`. Raises: OSError."""
        (then, before), now, counters = self._before, self._clock(), _counters()
        self._before = (now, counters)
        seconds = max(1e-9, now - then)
        # A counter goes back when a device is removed.
        rates = {name: max(0, value - before[name]) / seconds for name, value in counters.items() if name in before}
        memory = {"host_available_bytes": available_bytes(), "host_total_bytes": total_bytes()}
        return {**memory, **{f"{name}_bytes_per_second": rate for name, rate in rates.items()}}


def _counters() -> dict[str, int]:
    """Return the known counters of this machine, in bytes since it started."""
    import psutil

    found: dict[str, int] = {}
    if (disks := psutil.disk_io_counters(nowrap=False)) is not None:
        found |= {"disk_read": disks.read_bytes, "disk_write": disks.write_bytes}
    networks = psutil.net_io_counters(pernic=True, nowrap=False)
    counted = [each for name, each in networks.items() if _is_of_its_own(name)]
    for name, mine, theirs in (
        ("network_in", "bytes_recv", "port_rcv_data"),
        ("network_out", "bytes_sent", "port_xmit_data"),
    ):
        found[name] = sum(getattr(each, mine) for each in counted) + _infiniband_bytes(theirs)
    return found


def _is_of_its_own(name: str) -> bool:
    """Return whether a network is a device, and its traffic is not counted at another one."""
    folder = _NETWORKS / name
    with contextlib.suppress(OSError):
        return (folder / "device").exists() and (folder / "type").read_text().strip() != _IP_OVER_INFINIBAND
    return False


def _infiniband_bytes(counter: str) -> int:
    total = 0
    for path in _INFINIBAND.glob(f"*/ports/*/counters/{counter}"):
        with contextlib.suppress(OSError, ValueError):
            total += int(path.read_text()) * _WORD_BYTES
    return total
