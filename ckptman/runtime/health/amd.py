"""Figures of a GPU by AMD's management library (the package `amdsmi`, best that of the ROCm which is installed)."""

from __future__ import annotations

from typing import Any

from ckptman.runtime.health.device import Device

_MEGABYTES, _MEGABITS = 1024 * 1024, 1e6 / 8
_THROTTLED = {
    "active_prochot_thrm": "processor hot",
    "active_socket_thrm": "temperature",
    "active_vr_thrm": "temperature of the voltage regulator",
    "active_hbm_thrm": "temperature of its memory",
}


class AmdDevice(Device):
    """A GPU, named by its PCI address. Raises: ImportError, AmdSmiException; KeyError where it finds no library."""

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
        return {
            "utilisation": _number(self._of("gpu_activity").get("gfx_activity"), 0.01),
            "power_watts": self._power(),
            "power_limit_watts": _number(self._limit_microwatts, 1e-6) or None,
            "memory_used_bytes": _number(memory.get("vram_used"), _MEGABYTES),
            "memory_total_bytes": _number(memory.get("vram_total"), _MEGABYTES),
            # Of both ways together.
            "pcie_in_bytes_per_second": _number(
                self._of("pcie_info").get("pcie_metric", {}).get("pcie_bandwidth"), _MEGABITS
            ),
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
        """Return watts; None also for 0, which the second of two GPUs in one package says."""
        found = self._of("power_info")
        values = (_number(found.get(f"{each}_socket_power")) for each in ("current", "average"))
        return next(filter(None, values), None)

    def _temperature(self, metric: str) -> float | None:
        which = (self._smi.AmdSmiTemperatureType.HOTSPOT, getattr(self._smi.AmdSmiTemperatureMetric, metric))
        found = self.ask(metric, lambda: self._smi.amdsmi_get_temp_metric(self._handle, *which))
        return _number(found) or None

    def _throttled(self) -> tuple[str, ...]:
        found = self._of("violation_status")
        return tuple(text for name, text in _THROTTLED.items() if found.get(name) is True)

    def _ecc_errors(self) -> int:
        return int(_number(self._of("gpu_total_ecc_count").get("uncorrectable_count")) or 0)


def _number(value: object, unit: float = 1.0) -> float | None:
    """Return a value in a unit; None where it is "N/A"."""
    return value * unit if isinstance(value, int | float) and not isinstance(value, bool) else None


def _share(value: object, most: object) -> float | None:
    part, whole = _number(value), _number(most)
    return part / whole if part is not None and whole else None
