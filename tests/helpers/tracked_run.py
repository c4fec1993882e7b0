"""A run of six attempts with every kind of end and a rollback, whose trackers are looked at afterwards."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import psutil
import torch

import ckptman
from ckptman.integrations import append_only
from ckptman.integrations.append_only import AppendOnlyTracker
from ckptman.runtime.outcome import highest_attempt
from ckptman.session import step_reporter
from ckptman.storage.catalog.rollback import execute, plan_rollback
from tests.helpers.ranks import say, start_ranks

SAVED_EVERY = 4
ROLLBACK_TO = 12
ATTEMPTS = [(10, "raise"), (15, "kill"), (18, "stop"), (23, "raise"), (15, "raise"), (24, "finish")]
"""Where each attempt ends, and how. Before the fifth one the run is rolled back."""
Make = Callable[[Path], Sequence[ckptman.Tracker]]


def loss(step, attempt):
    """The loss of a step, which tells by whom it was done."""
    return step + attempt / 128


@mock.patch.object(append_only, "CLOSE_SECONDS", 240.0)
@mock.patch.object(step_reporter, "CLOSE_SECONDS", 240.0)
def six_attempts(root, make):
    """Run them, each with the trackers that `make(root)` returns, and return the loss of each step as it counts."""
    counts = {}
    for number, (until, how) in enumerate(ATTEMPTS, 1):
        if number == 5:
            execute(
                root,
                partial(plan_rollback, root, ROLLBACK_TO),
                why="a test",
                by="it",
                time_seconds=time.time(),
                highest=highest_attempt,
            )
        steps = []
        if how == "kill":
            with start_ranks(1, _killed, root, make, number, until, alone=True) as world:
                steps += map(int, world.said(0))
                assert world.wait(0, 240) == -signal.SIGKILL
        else:
            with contextlib.suppress(ZeroDivisionError):
                attempt(root, make(root), number, until, how, steps.append)
            for each in threading.enumerate():  # one that failed does not wait, and W&B has a run once in a process
                if each.name.endswith(("Tracker", "-library")):
                    each.join(240)
        counts = {step: value for step, value in counts.items() if step < steps[0]}
        counts |= {step: loss(step, number) for step in steps}
    assert [*counts] == [*range(1, ATTEMPTS[-1][0] + 1)]
    return counts


def _killed(root, make, number, until):
    os.environ.pop("WANDB_SERVICE", None)  # of the attempt before, which ran in another process
    attempt(root, make(root), number, until, "kill", lambda step: say(str(step)))


def attempt(root, trackers, number, until, how, done):
    state = {"model": torch.nn.Linear(2, 2)}
    policy = ckptman.EverySteps(SAVED_EVERY) | ckptman.OnStop()
    with ckptman.Checkpointer(
        root, state, save_policy=policy, signals=how != "kill", trackers=trackers, run_id="tracked/1"
    ) as checkpointer:
        step = checkpointer.restore()
        assert checkpointer.attempt == number
        while not checkpointer.should_stop():
            step += 1
            state["model"].weight.data += 1.0
            checkpointer.step(step, {"loss": torch.tensor(loss(step, number)), "label": "none"})
            done(step)
            if step == until:
                checkpointer.wait()
                if how == "raise":
                    raise ZeroDivisionError
                if how == "stop":
                    os.kill(os.getpid(), signal.SIGTERM)
                if how == "finish":
                    return
                if how == "kill":
                    drain(checkpointer)
                    for process in psutil.Process().children(recursive=True):
                        process.kill()
                    os.kill(os.getpid(), signal.SIGKILL)


def drain(checkpointer):
    """Wait until the trackers have all that they are to get."""
    assert checkpointer._reporter is not None
    checkpointer._reporter.finish(wait=True)
    for outlet in checkpointer._reporter._trackers._threads:
        settle(outlet.thread)
        if isinstance(outlet.tracker, AppendOnlyTracker):
            settle(outlet.tracker._thread)
        assert not outlet.failed


def settle(thread):
    """Wait until a thread has made all calls that it was given."""
    done = threading.Event()
    thread.put(done.set)
    assert done.wait(60)
