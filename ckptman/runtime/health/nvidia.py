"""Figures of a GPU by NVIDIA's management library (the package `nvidia-ml-py`)."""

from __future__ import annotations

import contextlib
from typing import Any

from ckptman.runtime.health.device import Device

_WATTS, _KILOBYTES = 0.001, 1000.0
"""Power comes in milliwatts, PCIe traffic in kB/s."""
_THROTTLED = {0x8: "hardware", 0x20: "temperature", 0x40: "temperature, by hardware", 0x80: "power brake"}
"""Not the cap of its power (0x4), at which a GPU runs that works hard, and not when it is idle."""
_MOST_XIDS = 16


class NvidiaDevice(Device):
    """A GPU, named by its PCI address. Raises: ImportError, pynvml.NVMLError."""

    def __init__(self, pci_address: str) -> None:
        import pynvml

        super().__init__()
        self._nvml: Any = pynvml
        self.error = pynvml.NVMLError
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_address.encode())
        self._events = self._watch_xids()
        self._ecc_before = self._ecc_errors()
        self._limit_milliwatts = self._of("EnforcedPowerLimit")
        self._slowdown = self._of("TemperatureThreshold", pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        self._most_clock = self._of("MaxClockInfo", pynvml.NVML_CLOCK_SM)

    def read(self) -> dict[str, Any]:
        """It takes some 40 ms, in which it sleeps: PCIe traffic is counted meanwhile."""
        nvml = self._nvml
        utilisation, memory = self._of("UtilizationRates"), self._of("MemoryInfo")
        clock = self._of("ClockInfo", nvml.NVML_CLOCK_SM)
        return {
            "utilisation": None if utilisation is None else utilisation.gpu / 100,
            "power_watts": _times(self._of("PowerUsage"), _WATTS),
            "power_limit_watts": _times(self._limit_milliwatts, _WATTS),
            "memory_used_bytes": None if memory is None else memory.used,
            "memory_total_bytes": None if memory is None else memory.total,
            "pcie_in_bytes_per_second": _times(self._of("PcieThroughput", nvml.NVML_PCIE_UTIL_RX_BYTES), _KILOBYTES),
            "pcie_out_bytes_per_second": _times(self._of("PcieThroughput", nvml.NVML_PCIE_UTIL_TX_BYTES), _KILOBYTES),
            "temperature_celsius": self._of("Temperature", nvml.NVML_TEMPERATURE_GPU),
            "slowdown_celsius": self._slowdown,
            "clock": clock / self._most_clock if clock is not None and self._most_clock else None,
            "throttled": self._throttled(),
            "ecc_errors": max(0, self._ecc_errors() - self._ecc_before),
            "xids": self._xids(),
        }

    def is_lost(self, error: Exception) -> bool:
        return bool(getattr(error, "value", None) == self._nvml.NVML_ERROR_GPU_IS_LOST)

    def _of(self, what: str, *arguments: Any) -> Any:
        question = getattr(self._nvml, f"nvmlDeviceGet{what}")
        return self.ask(f"{what}{arguments}", lambda: question(self._handle, *arguments))

    def _throttled(self) -> tuple[str, ...]:
        reasons = self._of("CurrentClocksThrottleReasons") or 0
        return tuple(text for bit, text in _THROTTLED.items() if reasons & bit)

    def _ecc_errors(self) -> int:
        kinds = (self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self._nvml.NVML_VOLATILE_ECC)
        return self._of("TotalEccErrors", *kinds) or 0

    def _watch_xids(self) -> Any:
        """Ask to be told of Xids from now on; None where that is not possible."""
        nvml = self._nvml
        with contextlib.suppress(nvml.NVMLError):
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
            return events
        return None

    def _xids(self) -> tuple[int, ...]:
        """Return those that came since the last look."""
        found: list[int] = []
        with contextlib.suppress(self._nvml.NVMLError):  # above all: there is none
            while self._events is not None and len(found) < _MOST_XIDS:
                found.append(int(self._nvml.nvmlEventSetWait_v2(self._events, 0).eventData))
        return tuple(found)


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit
