"""Figures of the node of a rank: memory, and the traffic of its disks and networks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptman.runtime.host_memory import available_bytes, total_bytes

_INFINIBAND, _NETWORKS = Path("/sys/class/infiniband"), Path("/sys/class/net")
_WORD_BYTES = 4
"""InfiniBand counts in lanes: four bytes are one."""
_IP_OVER_INFINIBAND = "32"


class Host:
    """This node. Rates are those since the reading before, and not known at the first one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before: tuple[float, dict[str, int]] = (clock(), _counters())

    def read(self) -> dict[str, Any]:
        """Return figures of a `HealthSample`. Raises: OSError."""
        (then, before), now, counters = self._before, self._clock(), _counters()
        self._before = (now, counters)
        seconds = max(1e-9, now - then)
        # A counter that went back is of a device that was taken away.
        rates = {name: max(0, value - before[name]) / seconds for name, value in counters.items() if name in before}
        memory = {"host_available_bytes": available_bytes(), "host_total_bytes": total_bytes()}
        return {**memory, **{f"{name}_bytes_per_second": rate for name, rate in rates.items()}}


def _counters() -> dict[str, int]:
    """Return bytes since the machine started, by kind; what this machine does not tell is left out."""
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
    """Return whether a network is a device, and not one whose traffic another one carries."""
    folder = _NETWORKS / name
    with suppress(OSError):
        return (folder / "device").exists() and (folder / "type").read_text().strip() != _IP_OVER_INFINIBAND
    return False


def _infiniband_bytes(counter: str) -> int:
    total = 0
    for path in _INFINIBAND.glob(f"*/ports/*/counters/{counter}"):
        with suppress(OSError, ValueError):
            total += int(path.read_text()) * _WORD_BYTES
    return total
