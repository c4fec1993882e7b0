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

    def remove_node(self, node):
        """Hand on what a dead worker has left. Returns the test it died of, which is not run again.

        The method of the parent hands on finished files too: a worker that gets one has nothing to run, and is never
        asked again.
        """
        work = self.assigned_work.pop(node)
        died_of = next(((unit, test) for unit in work.values() for test, is_done in unit.items() if not is_done), None)
        if died_of is None:
            return None
        unit, test = died_of
        unit[test] = True
        self.workqueue.update({scope: unit for scope, unit in work.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return test

    def _reschedule(self, node):
        """A worker runs a test once it knows the next one: give it two, or tell it that there are no more."""
        if node in self.registered_collections:  # else it has only just begun, in place of a dead one
            super()._reschedule(node)
            if not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                self._reschedule(node)


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
