"""A state that changes between two saves, and during one: each checkpoint is what the state was when it was saved.

A save takes over from the one before it what has not changed. Here everything changes that can (`state_changes`), one
after the other in an order drawn by chance, in one run that saves after each; and while a save is being written.
"""

import copy
import tempfile
import warnings
from pathlib import Path

import torch

import ckptman
from ckptman.errors import ConfigError
from ckptman.storage.format.paths import step_folder
from tests.faults.limits import limit
from tests.faults.subject import open_run
from tests.helpers.state_changes import CHANGES, Expected, make_state

RUNS = 60
CHANGES_OF_A_RUN = 12
SECONDS = 120.0


def run(tally):
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for number in range(tally.count(RUNS)):
            with limit(SECONDS), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.manual_seed(tally.dice.randrange(2**31))
                _one_run(tally, Path(folder) / str(number), number)


def _one_run(tally, root, seed):
    names = [tally.dice.choice(list(CHANGES)) for _ in range(CHANGES_OF_A_RUN)]
    during = [tally.dice.choice(list(CHANGES)) for _ in names]
    state, kept, done = make_state(seed), {}, []
    options = {"retention": ckptman.KeepLast(100), "save_policy": ckptman.EverySteps(10**9)}
    with open_run(root, state, **options) as checkpointer:
        checkpointer.restore()
        for step, (before, later) in enumerate(zip(names, during), start=1):
            with tally.fault(f"{', '.join([*done, before])}, then {later} while it is saved", before):
                if not _change(state, before):
                    tally.survive()
                    continue
                done.append(before)
                try:
                    expected = Expected(state)
                except ConfigError:  # such a state cannot be saved
                    checkpointer.wait()
                    tally.survive()
                    return
                checkpointer.save(step)
                kept[step] = expected
                if _change(state, later):
                    done.append(later)
                tally.survive()
        with tally.fault("the checkpoints of a run", "read back"):
            checkpointer.wait()
            for step, expected in kept.items():
                differs = expected.differences(root / step_folder(step))
                tally.check(not differs, "wrong", f"step {step} of {done}: {differs}")
            tally.survive()


def _change(state, name):
    """Whether the change could be made; some make no sense after others."""
    before = copy.copy(state)
    try:
        CHANGES[name](state)
    except (KeyError, RuntimeError, AttributeError, TypeError, ValueError, IndexError):
        for each in state.keys() - before.keys():
            del state[each]
        return False
    return True
