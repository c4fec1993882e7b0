"""Which worker gets which tests: files, the longest first, and all of a real Slurm to one worker.

A worker that waits for Slurm leaves its core to the others, so there is one more worker than there are cores.
"""

import json
from collections import OrderedDict, defaultdict
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

SLURM = "tests/slurm/"
"""One cluster serves all tests of this folder: its start takes seconds, and a second one memory and ports."""
SECONDS = Path(__file__).with_name("seconds.json")
"""What the tests of a file took together, measured by `pytest --write-seconds`; of files that take a second or more."""


class FilesByTime(LoadScopeScheduling):
    """Hand out files in the order of their measured seconds."""

    def __init__(self, config, log):
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid):
        return scope_of(nodeid)


def scope_of(nodeid):
    """What is handed out as one: a file, or all tests of Slurm."""
    return SLURM if nodeid.startswith(SLURM) else nodeid.partition("::")[0]


class Order:
    """The longest first. A file without a measurement takes less than a second, or is new: it comes last."""

    def __init__(self):
        self._seconds = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}

    def key(self, nodeid):
        scope = scope_of(nodeid)
        return -self._seconds.get(scope, 0.0), scope


def write(durations):
    """Write down what tests took, as seconds of each scope."""
    took = defaultdict(float)
    for nodeid, seconds in durations:
        took[scope_of(nodeid)] += seconds
    kept = OrderedDict((scope, round(took[scope])) for scope in sorted(took) if took[scope] >= 1)
    SECONDS.write_text(json.dumps(kept, indent=1) + "\n")
