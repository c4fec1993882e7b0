"""Which worker gets which tests: files, the longest first, and all of a real Slurm to one worker.

A worker that waits for Slurm leaves its core to the others, so there is one more worker than there are cores.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling

SLURM = "tests/slurm/"
"""One cluster serves all tests of this folder: its start takes seconds, and a second one memory and ports."""
SECONDS = Path(__file__).with_name("seconds.json")
"""What the tests of a file took together, measured by `pytest --write-seconds`; of files that take a second or more."""


class FilesByTime(LoadScopeScheduling):
    """Hand out files in the order of their measured seconds."""

    def __init__(self, config: Any, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def scope_of(nodeid: str) -> str:
    """What is handed out as one: a file, or all tests of Slurm."""
    return SLURM if nodeid.startswith(SLURM) else nodeid.partition("::")[0]


class Order:
    """The longest first. A file without a measurement takes less than a second, or is new: it comes last."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}

    def key(self, nodeid: str) -> tuple[float, str]:
        scope = scope_of(nodeid)
        return -self._seconds.get(scope, 0.0), scope


def write(durations: Iterable[tuple[str, float]]) -> None:
    """Write down what tests took, as seconds of each scope."""
    took: defaultdict[str, float] = defaultdict(float)
    for nodeid, seconds in durations:
        took[scope_of(nodeid)] += seconds
    kept = OrderedDict((scope, round(took[scope])) for scope in sorted(took) if took[scope] >= 1)
    SECONDS.write_text(json.dumps(kept, indent=1) + "\n")
