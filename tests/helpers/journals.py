"""Roots with a journal and checkpoints of runs that were never made."""

import json
import time

from ckptman.storage.format.paths import journal_path
from tests.helpers.checkpoints import commit


def write_journal(root, events, ago_seconds=0.0):
    """Give a root a journal. `ago_seconds`: its last event happened so long ago; None: the times stay."""
    shift = 0.0 if ago_seconds is None else time.time() - ago_seconds - max(each["time"] for each in events)
    path = journal_path(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({**each, "time": each["time"] + shift}) for each in events]
    path.write_text("\n".join(lines) + "\n")
    return root


def make_root(root, events, steps, ago_seconds=0.0):
    """Make a root with checkpoints of some steps and a journal."""
    for step in steps:
        commit(root, step, metrics={"loss": 1 / step}, time_seconds=time.time() - ago_seconds)
    return write_journal(root, events, ago_seconds)
