"""User code as a source of faults: a loop that breaks, raises, exits, forks or nests blocks at any point of a step.

Each case runs in a process of its own. Afterwards every checkpoint of its root is compared with a run that nobody
disturbed, by its step: model with a frozen layer and BatchNorm, optimizer, schedule, position in the data, generators,
values of ranks. Then the run goes on from the newest one, to the very end of that run. What a forked child does must
leave no trace.
"""

import contextlib
import functools
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from xxhash import xxh3_128_hexdigest

import ckptman
from ckptman.runtime.outcome import read_outcome
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.writer_lock import read_owner
from ckptman.storage.format.paths import outcome_path
from tests.faults.limits import in_child
from tests.faults.mutants import apply

CASES = 2000
STEPS = 9
SECONDS = 60.0
POINTS = ("fetched", "forward", "backward", "updated", "saved")
FAULTS = (
    *("break", "break", "raise", "exit 0", "exit 75", "exit 3", "generator", "interrupt"),
    *("fork and leave", "fork and raise", "fork and exit", "fork and step", "nested", "nested in the same root"),
)
ENDS = {"raise": "failed", "exit 75": "stopped", "exit 3": "failed", "interrupt": "failed"}


class Fault(Exception):
    """Raised by the user's code."""


class Loop:
    """A small training loop of its user, with everything that a state can have."""

    def __init__(self, hidden):
        torch.manual_seed(3)
        random.seed(4)
        np.random.seed(5)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.AdamW([each for each in self.model.parameters() if each.requires_grad], 1e-2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        samples = torch.randn(5 * 6, 5, generator=torch.Generator().manual_seed(6))
        self.data = ckptman.ResumableLoader(DataLoader(TensorDataset(samples), 6, shuffle=True))
        self.counts, self.seen = ckptman.PerRank({"tokens": 0}), ckptman.FromRank0([0])
        self.hidden = hidden

    @property
    def state(self):
        model = ckptman.Trainable(self.model)
        inner = {"model": model, "optimizer": self.optimizer, "schedule": self.schedule}
        outer = {"data": self.data, "counts": self.counts, "seen": self.seen, "rng": ckptman.RNGState()}
        return {"trainer": self, **outer} if self.hidden else {**inner, **outer}

    def state_dict(self):
        return {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule")}

    def load_state_dict(self, state):
        for name, values in state.items():
            getattr(self, name).load_state_dict(values)

    def batches(self):
        """Batches of one epoch after the other."""
        while True:
            for (batch,) in self.data:
                yield batch

    def step(self, batch, at):
        """Train on a batch. Returns whether to break, as soon as `at` says so of a point."""
        if at("fetched"):
            return True
        loss = self.model(batch).square().mean() * random.random() + float(np.random.rand())
        if at("forward"):
            return True
        self.optimizer.zero_grad()
        loss.backward()
        if at("backward"):
            return True
        self.optimizer.step()
        self.schedule.step()
        self.counts.value["tokens"] += 30
        self.seen.value[0] += 1
        return at("updated")

    def digest(self):
        """Of all that the state holds, generators included."""
        torch_state = torch.get_rng_state().numpy().tobytes()
        numpy_state = np.random.get_state(legacy=True)
        rng = (random.getstate(), torch_state, numpy_state[1].tobytes(), numpy_state[2:])
        tensors = [each.numpy().tobytes() for each in self.model.state_dict().values()]
        for moments in self.optimizer.state_dict()["state"].values():
            tensors += [each.numpy().tobytes() for each in moments.values()]
        rates = [group["lr"] for group in self.optimizer.param_groups], self.schedule.state_dict()
        told = self.data.epoch, self.data.batch, self.counts.value, self.seen.value
        return xxh3_128_hexdigest(repr((rng, tensors, rates, told)).encode())


@functools.cache
def reference():
    """Digests of a run that nobody disturbed, before its first step and after each."""
    loop = Loop(hidden=False)
    found, batches = [loop.digest()], loop.batches()
    for _ in range(STEPS):
        loop.step(next(batches), lambda point: False)
        found.append(loop.digest())
    return tuple(found)


def run(tally):
    """2,000 loops, each with a fault or two."""
    torch.set_num_threads(1)
    reference()
    gc.collect()
    gc.freeze()  # a forked child must not tidy up what it has inherited
    for number in range(tally.count(CASES, least=len(FAULTS))):
        dice = random.Random(tally.dice.randrange(2**32))
        fault = FAULTS[number % len(FAULTS)]
        plan = {
            "fault": fault,
            "step": dice.randint(1, STEPS),
            "point": dice.choice(POINTS),
            "hidden": dice.random() < 0.4,
            "async_save": dice.random() < 0.6,
            "every": dice.choice([1, 2, 3, 100]),
            "keep": dice.choice([None, 1, 2]),
        }
        with tally.fault(f"loop {number}: {plan}", fault), tempfile.TemporaryDirectory(prefix="faults-") as folder:
            root = Path(folder, "root")
            loop = in_child(lambda root=root, plan=plan: disturbed(root, plan, tally.mutant), SECONDS)
            if loop.hung:
                tally.fail("hang", f"the loop hangs: {loop.said[-1500:]}")
                continue
            if not loop.in_order:
                tally.fail("other", f"the loop ended with {loop.status}, {loop.error!r}: {loop.said[-700:]}")
                continue
            judged = in_child(lambda root=root, plan=plan: judge(root, plan), SECONDS)
            if not judged.in_order:
                tally.fail("hang" if judged.hung else "other", f"{judged.error!r}: {judged.said[-700:]}")
            elif judged.value:
                tally.fail("wrong", judged.value)
            else:
                tally.survive()


def disturbed(root, plan, mutant):
    """The loop with its fault, which ends as the fault has it end."""
    import faulthandler

    faulthandler.dump_traceback_later(SECONDS - 10)  # who hangs says where
    apply(mutant)
    me, loop = os.getpid(), Loop(plan["hidden"])

    def at(step, point):
        return (point, step) == (plan["point"], plan["step"]) and act(plan["fault"], me, root, checkpointer[0])

    checkpointer = []
    retention = None if plan["keep"] is None else ckptman.KeepLast(plan["keep"])
    policy = ckptman.EverySteps(plan["every"]) | ckptman.OnStop()

    def train():
        with ckptman.Checkpointer(
            root, loop.state, save_policy=policy, retention=retention, async_save=plan["async_save"], watchdog=None
        ) as made:
            checkpointer.append(made)
            step = made.restore()
            for batch in loop.batches():
                if step >= STEPS:
                    break
                step += 1
                if loop.step(batch, functools.partial(at, step)):
                    break
                made.step(step)
                if at(step, "saved"):
                    break
                yield step

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for step in train():
                if plan["fault"] == "generator" and step == plan["step"]:
                    break
        except (Fault, SystemExit, KeyboardInterrupt, ckptman.ConfigError):
            pass
        finally:
            gc.collect()  # a generator that was left is closed
            if os.getpid() != me:
                os._exit(0)  # the fork that unwound through all of this
    faulthandler.cancel_dump_traceback_later()


def act(fault, me, root, checkpointer):
    """Do what the fault is. Returns whether the loop is to break."""
    kind, _, rest = fault.partition(" ")
    if kind == "raise":
        raise Fault
    if kind == "exit":
        sys.exit(int(rest))
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "nested":
        other = root if rest else root.parent / "other"
        value = {"n": 1}
        with contextlib.suppress(ckptman.BusyError), ckptman.Checkpointer(other, {"value": value}) as inner:
            assert not rest, "a second run got into a root that has one"
            inner.restore()
            inner.step(1)
    if kind == "fork":
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            assert not status, f"the child ended with {status}"
            return False
        signal.alarm(20)
        if rest == "and raise":
            raise Fault
        if rest == "and exit":
            sys.exit(75)
        if rest == "and step":
            checkpointer.step(10**6)
        return True
    return kind == "break"


def judge(root, plan):
    """What is wrong with what the loop left; "": nothing."""
    import faulthandler

    faulthandler.dump_traceback_later(SECONDS - 10)
    warnings.simplefilter("ignore")
    outcome, ended = read_outcome(outcome_path(root)), plan["fault"]
    expected = ENDS.get(ended, "finished")
    if outcome is None or outcome.state != expected:
        return f"the outcome is {outcome and outcome.state}, not {expected}"
    if read_owner(root) is not None:
        return "the root is still claimed"
    wanted, steps = reference(), [entry.step for entry in Catalog(root).complete()]
    if plan["keep"] is not None and len(steps) > plan["keep"]:
        return f"steps {steps} are there, and {plan['keep']} were to be kept"
    for step in steps:
        loop = Loop(plan["hidden"])
        with ckptman.Checkpointer(root, loop.state, save_policy=ckptman.OnStop()) as run:
            run.restore(step)
            if loop.digest() != wanted[step]:
                return f"the checkpoint of step {step} is not what the run was at that step"
    due = [step for step in range(1, least_step(plan) + 1) if step % plan["every"] == 0]
    if due and (not steps or max(steps) < due[-1]):
        return f"step {due[-1]} was saved, and the newest there is {max(steps, default=None)}"
    loop = Loop(plan["hidden"])
    with ckptman.Checkpointer(root, loop.state, save_policy=ckptman.OnStop(), watchdog=None) as run:
        step, batches = run.restore(), loop.batches()
        while step < STEPS:
            loop.step(next(batches), lambda point: False)
            step += 1
            run.step(step)
        if loop.digest() != wanted[STEPS]:
            return f"the run that went on from step {max(steps, default=0)} ended as another one"
    return "" if threading.active_count() < 10 else "threads are left"


def least_step(plan):
    """The last step that `step()` was told of for certain."""
    kind = plan["fault"].partition(" ")[0]
    if kind in ("fork", "nested"):
        return STEPS
    return int(plan["step"]) - (kind != "generator" and plan["point"] != "saved")
