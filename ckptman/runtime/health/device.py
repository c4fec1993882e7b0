"""What the management libraries of GPUs have in common: questions that a device may have no answer to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

_MOST_REFUSALS = 3
_KNOWN = ("utilisation", "power_watts", "temperature_celsius")


class DeviceLost(Exception):
    """The device is gone: it fell off its bus, or was taken away."""


class Device:
    """A GPU that answers questions of a library whose errors are `error`."""

    error: type[Exception]

    def __init__(self) -> None:
        self._refused: Counter[str] = Counter()

    def read(self) -> dict[str, Any]:
        """Return figures of a `HealthSample`; None: not known. Raises: DeviceLost."""
        raise NotImplementedError

    def is_lost(self, error: Exception) -> bool:
        """Return whether an error of the library says that the device is gone."""
        return False

    def ask(self, name: str, question: Callable[[], Any]) -> Any:
        """Return an answer; None where there is none. What is refused again and again is not asked any more.

        Raises: DeviceLost.
        """
        if self._refused[name] >= _MOST_REFUSALS:
            return None
        try:
            answer = question()
        except self.error as error:
            if self.is_lost(error):
                raise DeviceLost(str(error)) from error
            self._refused[name] += 1
            return None
        self._refused[name] = 0
        return answer


def open_device(vendor: str, pci_address: str) -> Device:
    """Open a GPU of "nvidia" or "amd".

    Raises: ImportError where the library is not installed, RuntimeError where it tells nothing of this device, and
    whatever a broken one raises.
    """
    device: Device
    try:
        if vendor == "amd":
            from ckptman.runtime.health.amd import AmdDevice

            device = AmdDevice(pci_address)
        else:
            from ckptman.runtime.health.nvidia import NvidiaDevice

            device = NvidiaDevice(pci_address)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is not installed (pip install 'ckptman[{vendor}]')") from error
    figures = device.read()
    if all(figures.get(name) is None for name in _KNOWN):
        raise RuntimeError(f"it knows neither utilisation nor power nor temperature of {pci_address}")
    return device
