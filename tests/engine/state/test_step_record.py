"""The save at the end of a run is of what `step()` saw, or is not made; whoever leaves the block, and however."""

import contextlib
import copy
import json
import math
import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckptman
from ckptman.checkpointer import Checkpointer
from ckptman.engine.comm import control_group as ranks_module
from ckptman.engine.state import step_record
from ckptman.engine.state.step_record import OptimizerHooks, StepRecorder
from ckptman.errors import BusyError, CommitError, ConfigError, RankLostError
from ckptman.runtime.outcome import read_outcome
from ckptman.storage.catalog.writer_lock import read_owner
from ckptman.storage.format.manifest import read_manifest
from ckptman.storage.format.paths import outcome_path
from tests.helpers.ranks import run_ranks

NEVER = ckptman.EverySteps(10**6) | ckptman.OnStop()
SAMPLES = 64


class Loader:
    """An iterable that counts what it gave."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        while self.position < SAMPLES:
            self.position += 1
            yield torch.full((4, 3), float(self.position)) + torch.arange(4.0)[:, None]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Trainer:
    """Holds model and optimizer, and shows neither."""

    def __init__(self):
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 70), nn.BatchNorm1d(70), nn.Linear(70, 70))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def forward(self, batch):
        loss = self.model(batch).square().mean()
        return loss

    def train(self, batch):
        self.optimizer.zero_grad()
        self.forward(batch).backward()
        self.optimizer.step()

    def state_dict(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def state_of(trainer, loader, *, hidden):
    state = {"trainer": trainer}
    if not hidden:
        state = {"model": trainer.model, "optimizer": trainer.optimizer}
    return {**state, "data": loader, "rng": ckptman.RNGState()}


def restored(root, *, hidden=False):
    trainer, loader = Trainer(), Loader()
    with Checkpointer(root, state_of(trainer, loader, hidden=hidden), save_policy=NEVER) as checkpointer:
        return checkpointer.restore(), trainer, loader


def reference(steps):
    trainer, batches = Trainer(), iter(Loader())
    for _ in range(steps):
        trainer.train(next(batches))
    return trainer


def assert_same(found, wanted):
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def outcome_of(root):
    return read_outcome(outcome_path(root))


@pytest.mark.parametrize("hidden", [False, True])
def test_a_batch_that_was_fetched_after_the_last_step_is_not_skipped(tmp_path, hidden):
    trainer, loader, step = Trainer(), Loader(), 0
    with Checkpointer(tmp_path, state_of(trainer, loader, hidden=hidden), save_policy=NEVER) as checkpointer:
        for batch in loader:
            if step >= 5:
                break
            trainer.train(batch)
            step += 1
            checkpointer.step(step)
    found, other, data = restored(tmp_path, hidden=hidden)
    assert (loader.position, found, data.position) == (6, 5, 5)
    assert_same(other.model, reference(5).model)


@pytest.mark.parametrize("hidden", [False, True])
def test_what_a_forward_pass_changed_after_the_last_step_is_not_saved(tmp_path, hidden):
    """A module's last step is not saved then; the small tensors of other objects are kept as they were."""
    trainer, loader = Trainer(), Loader()
    keep = {"save_policy": ckptman.EverySteps(2), "retention": ckptman.KeepLast(1)}
    with (
        contextlib.nullcontext()
        if hidden
        else pytest.warns(
            RuntimeWarning, match=r"(?s)step 3, the last one, is not saved.*was changed since.*is step 2\."
        ),
        Checkpointer(tmp_path, state_of(trainer, loader, hidden=hidden), **keep) as checkpointer,
    ):
        for step, batch in enumerate(loader, 1):
            loss = trainer.forward(batch * (float("nan") if step == 4 else 1.0))
            if not loss.isfinite():
                break
            trainer.optimizer.zero_grad()
            loss.backward()
            trainer.optimizer.step()
            checkpointer.step(step)
    found, other, _ = restored(tmp_path, hidden=hidden)
    assert found == (3 if hidden else 2)
    assert_same(other.model, reference(found).model)


def test_an_evaluation_or_another_learning_rate_after_the_last_step_costs_nothing(tmp_path):
    trainer, loader = Trainer(), Loader()
    schedule = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, 0.5)
    state = {**state_of(trainer, loader, hidden=False), "schedule": schedule}
    metrics = {"loss": 1.0}
    with Checkpointer(tmp_path, state, save_policy=NEVER) as checkpointer:
        batches = iter(loader)
        for step in range(1, 4):
            trainer.train(next(batches))
            checkpointer.step(step, metrics=metrics)
            schedule.step()
        metrics["loss"] = 2.0
        rate = schedule.get_last_lr()[0]
        trainer.model.eval()
        with torch.no_grad():
            trainer.forward(next(batches))
        torch.rand(3), schedule.step()
    assert trainer.optimizer.param_groups[0]["lr"] == rate / 2
    other = Trainer()
    again = torch.optim.lr_scheduler.StepLR(other.optimizer, 1, 0.5)
    with Checkpointer(tmp_path, {**state_of(other, Loader(), hidden=False), "schedule": again}) as checkpointer:
        assert checkpointer.restore() == 3
        assert other.optimizer.param_groups[0]["lr"] == again.get_last_lr()[0] == rate * 2
    assert read_manifest(tmp_path / "step-0000000003").metrics == {"loss": 1.0}


def test_values_and_small_tensors_are_those_of_the_step(tmp_path):
    counts, seen = {"tokens": 0, "by source": [0, 0]}, torch.zeros(3)
    state = {"counts": counts, "seen": seen, "rng": ckptman.RNGState()}
    with Checkpointer(tmp_path, state, save_policy=NEVER) as checkpointer:
        for step in (1, 2):
            counts["tokens"] += 10
            counts["by source"][0] += 1
            seen += 1
            checkpointer.step(step)
        drawn = torch.rand(3)
        counts["by source"][1], counts["tokens"] = 7, 0
        seen += 1
    fresh = {"counts": {"tokens": 0, "by source": [0, 0]}, "seen": torch.zeros(3), "rng": ckptman.RNGState()}
    with Checkpointer(tmp_path, fresh, save_policy=NEVER) as checkpointer:
        assert checkpointer.restore() == 2
        assert fresh["counts"] == {"tokens": 20, "by source": [2, 0]}
        assert torch.equal(fresh["seen"], torch.full((3,), 2.0))
        assert torch.equal(torch.rand(3), drawn)


def test_large_tensors_of_other_objects_are_noticed_when_they_change(tmp_path):
    large = torch.zeros(100_000)
    with (
        pytest.warns(RuntimeWarning, match="'large' was changed since"),
        Checkpointer(tmp_path, {"large": large}, save_policy=NEVER) as checkpointer,
    ):
        checkpointer.step(1)
        large += 1


class Slow:
    """Each call of `state_dict` takes a given time of the CPU, by a clock that the test moves."""

    def __init__(self, monkeypatch):
        self.seconds, self.now, self.asked = 0.0, 0.0, 0
        monkeypatch.setattr(step_record, "time", SimpleNamespace(thread_time=lambda: self.now))

    def state_dict(self):
        self.asked += 1
        self.now += self.seconds
        return {"value": 1}

    def load_state_dict(self, state):
        raise AssertionError


@pytest.mark.parametrize(
    ("spent", "step_seconds", "is_slow"),
    [([0.05] * 3, 0.1, True), ([0.01] * 9 + [0.0] + [0.01] * 9, 0.01, False)],
    ids=["slow", "on a machine that is busy for a moment"],
)
def test_an_object_that_is_slow_to_tell_its_state_is_not_asked_at_each_step(monkeypatch, spent, step_seconds, is_slow):
    slow = Slow(monkeypatch)
    recorder = StepRecorder({"slow": slow}, OptimizerHooks({"slow": slow}))
    for slow.seconds in spent:
        assert not recorder.too_slow
        recorder.record(step_seconds)
    assert recorder.too_slow == ("slow" if is_slow else "")
    if is_slow:
        recorder.given_up = True
        assert "too long" in recorder.changed(recorder.record(step_seconds))
        assert slow.asked == len(spent)


def test_waiting_for_a_turn_is_nothing_that_an_object_does():
    class Waits(Loader):
        def state_dict(self):
            threading.Event().wait(0.05)
            return super().state_dict()

    waits = Waits()
    recorder = StepRecorder({"waits": waits}, OptimizerHooks({"waits": waits}))
    for _ in range(5):
        recorder.record(0.06)
    assert not recorder.too_slow


def slow_on_one_rank(root):
    class Tells:
        asked = 0

        def state_dict(self):
            Tells.asked += 1
            return {"value": 1}

        def load_state_dict(self, state):
            raise AssertionError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Checkpointer(root, {"tells": Tells()}, save_policy=NEVER) as checkpointer:
            checkpointer.step(1)
            if dist.get_rank() == 1:
                checkpointer._recorder.too_slow = "tells"
            for step in range(2, 8):
                checkpointer.step(step)
            return checkpointer._recorder.given_up, Tells.asked


@pytest.mark.slow
def test_ranks_agree_to_ask_it_no_more(tmp_path):
    one, other = run_ranks(2, slow_on_one_rank, str(tmp_path))
    assert one == other
    assert one[0]


# ---- who leaves, and how ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "state"), [(75, "stopped"), (0, "finished"), (None, "finished"), (3, "failed")])
def test_sys_exit_within_the_block(tmp_path, code, state):
    value = {"n": 0}
    with pytest.raises(SystemExit), Checkpointer(tmp_path, {"value": value}, save_policy=NEVER) as checkpointer:
        value["n"] = 20
        checkpointer.step(20)
        sys.exit(code)
    outcome = outcome_of(tmp_path)
    assert outcome.state == state
    assert outcome.exit_code == (code or 0) or state == "failed"
    assert checkpointer.exit_code == (75 if code == 75 else 0)
    assert bool(list(tmp_path.glob("step-*"))) == (state != "failed")


def test_a_generator_that_is_closed_ends_its_run_in_order(tmp_path):
    def train():
        with Checkpointer(tmp_path, {"value": {"n": 1}}, save_policy=NEVER) as checkpointer:
            for step in range(1, 100):
                checkpointer.step(step)
                yield step

    steps = train()
    assert [next(steps), next(steps)] == [1, 2]
    steps.close()
    assert outcome_of(tmp_path).state == "finished"
    assert [each.name for each in tmp_path.glob("step-*")] == ["step-0000000002"]


@pytest.mark.parametrize("leave", ["return", "raise", "exit", "step", "close"])
@pytest.mark.parametrize("background", [False, True])
def test_a_forked_child_that_leaves_the_block_ends_nothing(tmp_path, leave, background):
    def in_child(checkpointer):
        if leave == "raise":
            raise ValueError
        if leave == "exit":
            sys.exit(75)
        if leave == "step":
            checkpointer.step(3)
        if leave == "close":
            checkpointer.close()

    value, child, told = {"n": 0}, -1, []
    with (
        contextlib.suppress(ValueError, SystemExit, ConfigError),
        Checkpointer(
            tmp_path, {"value": value}, save_policy=NEVER, retention=ckptman.KeepLast(1), async_save=background
        ) as checkpointer,
    ):
        for step in (1, 2):
            value["n"] = step
            checkpointer.step(step)
        checkpointer.save(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            child = os.fork()
        if not child:
            signal.alarm(20)
            in_child(checkpointer)
        else:
            told.append(os.waitpid(child, 0)[1])
            assert outcome_of(tmp_path).state == "running"
            assert read_owner(tmp_path) is not None
            value["n"] = 4
            checkpointer.step(4)
    if not child:
        os._exit(0)
    assert told == [0]
    outcome = outcome_of(tmp_path)
    assert (outcome.state, outcome.step, outcome.pid) == ("finished", 4, os.getpid())
    assert [each.name for each in tmp_path.glob("step-*")] == ["step-0000000004"]


# ---- words -----------------------------------------------------------------------------------------------------------


def test_use_after_the_end_is_an_error(tmp_path):
    with Checkpointer(tmp_path, {"value": {"n": 1}}, save_policy=NEVER) as checkpointer:
        checkpointer.step(1)
    uses = [lambda: checkpointer.step(2), lambda: checkpointer.save(2), checkpointer.wait, checkpointer.restore]
    for use in uses:
        with pytest.raises(ConfigError, match=r"is closed.*make a new one"):
            use()
    checkpointer.close()
    assert not checkpointer.should_stop()


def test_a_second_one_in_the_same_process_says_how_to_close_the_first(tmp_path):
    with (
        Checkpointer(tmp_path, {"value": {"n": 1}}, save_policy=NEVER),
        pytest.raises(BusyError, match=r"this very process.*close\(\)"),
    ):
        Checkpointer(tmp_path, {"value": {"n": 1}}, save_policy=NEVER)
    Checkpointer(tmp_path, {"value": {"n": 1}}, save_policy=NEVER).close()


def test_restore_waits_for_a_save_that_is_being_written(tmp_path):
    value = {"n": 5}
    with Checkpointer(tmp_path, {"value": value}, save_policy=NEVER) as checkpointer:
        checkpointer.save(1)
        value["n"] = 6
        assert checkpointer.restore() == 1
        assert value == {"n": 5}


def restores_unlike(root):
    state = {"value": {"n": 1}}
    with Checkpointer(root, state, save_policy=NEVER) as checkpointer:
        checkpointer.save(4)
        with pytest.raises(ConfigError, match=r"on rank 1: every rank has to name the same") as caught:
            checkpointer.restore(*([4] if dist.get_rank() else []))
        assert checkpointer.restore(4) == 4
        with pytest.raises(ConfigError, match="metrics are numbers by name"):
            checkpointer.save(5, metrics=[1.0] if dist.get_rank() == 0 else None)
        checkpointer.save(6, metrics={"huge": 10**400} if dist.get_rank() == 0 else None)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:the metric 'huge'")
def test_ranks_that_restore_unlike_checkpoints_or_have_metrics_of_another_kind_hear_of_it(tmp_path):
    one, other = run_ranks(2, restores_unlike, str(tmp_path))
    assert one == other


def only_rank_0(root):
    ranks_module.LATE_SECONDS = 0.2
    if dist.get_rank():
        dist.barrier()
        return []
    with (
        warnings.catch_warnings(record=True) as told,
        pytest.raises(ConfigError, match="every rank makes one") as caught,
    ):
        warnings.simplefilter("always")
        Checkpointer(root, {"value": {"n": 1}}, timeout_seconds=1.0)
    dist.barrier()
    return [*(str(each.message) for each in told), str(caught.value)]


@pytest.mark.slow
def test_a_checkpointer_on_rank_0_alone_says_that_every_rank_makes_one(tmp_path):
    said, _, _ = run_ranks(3, only_rank_0, str(tmp_path), fresh=True)
    assert len(said) == 2
    assert all("no Checkpointer was made on rank 1, 2 of 3" in each for each in said)


def test_what_a_failed_save_advises_goes_by_its_cause():
    assert "disk full? quota?" in str(CommitError(3, 0, "OSError: [Errno 28] No space left on device"))
    assert "disk full" not in str(CommitError(3, 0, "TypeError: cannot pickle '_thread.lock' object"))


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # an interrupt may come right behind an open()
def test_interrupts_that_are_caught_leave_a_run_that_goes_on(tmp_path):
    """Ctrl-C again and again, at random moments of steps, saves and waits; then the run ends as always."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng, main, over, armed = random.Random(seed), threading.main_thread().ident, list[bool](), list[bool]()
    value, interrupted = {"weights": torch.zeros(30_000), "n": 0}, 0

    def raise_once(*_):
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    def interrupt():
        while not over:
            time.sleep(rng.uniform(0, 0.01))
            signal.pthread_kill(main, signal.SIGINT)

    before, thread = signal.signal(signal.SIGINT, raise_once), threading.Thread(target=interrupt)
    policy = ckptman.EverySteps(2)
    with Checkpointer(tmp_path, value, save_policy=policy, retention=ckptman.KeepLast(1)) as checkpointer:
        try:
            checkpointer.step(1)
            thread.start()
            for step in range(2, 70):
                try:
                    armed.append(True)
                    checkpointer.step(step)
                    if step % 3 == 0:
                        checkpointer.wait()
                    armed.clear()
                except KeyboardInterrupt:
                    interrupted += 1
                except CommitError:
                    armed.clear()
        finally:
            armed.clear()
            over.append(True)
            thread.join(10)
            signal.signal(signal.SIGINT, before)
        value["n"] = 120
        checkpointer.step(120)
        checkpointer.wait()
    assert interrupted > 5
    assert [each.name for each in tmp_path.glob("step-*")] == ["step-0000000120"]


CHANGES = {
    "a step of a fused optimizer": lambda trainer: trainer.optimizer.step(),
    "a cast": lambda trainer: trainer.model.half().float(),
    "one layer more": lambda trainer: trainer.model.append(nn.Linear(70, 2)),
    "one group more": lambda trainer: trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
    "state that is loaded": lambda trainer: trainer.optimizer.load_state_dict(trainer.optimizer.state_dict()),
    "state that is cleared": lambda trainer: trainer.optimizer.state.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_torch_does_not_count_is_noticed_too(tmp_path, change):
    trainer, loader = Trainer(), Loader()
    trainer.model = nn.Sequential(nn.Linear(3, 70), nn.Linear(70, 70))  # no buffers, which would tell
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), fused=True)
    with (
        pytest.warns(RuntimeWarning, match="step 2, the last one, is not saved at the end of the run"),
        Checkpointer(tmp_path, state_of(trainer, loader, hidden=False), save_policy=NEVER) as checkpointer,
    ):
        for step in (1, 2):
            trainer.train(next(iter(loader)))
            checkpointer.step(step)
        CHANGES[change](trainer)
    assert not list(tmp_path.glob("step-*"))


def test_a_fused_optimizer_inside_of_another_object_is_noticed(tmp_path):
    trainer, loader = Trainer(), Loader()
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), fused=True)
    with (
        pytest.warns(RuntimeWarning, match="an optimizer has made a step since"),
        Checkpointer(tmp_path, state_of(trainer, loader, hidden=True), save_policy=NEVER) as checkpointer,
    ):
        trainer.train(next(iter(loader)))
        checkpointer.step(1)
        trainer.optimizer.step()


def test_metrics_are_those_of_their_step_and_only_numbers_are_kept(tmp_path):
    loss = torch.tensor(2.0)
    others = {"none": None, "text": "x", "many": torch.ones(2), "iterator": (each for each in ())}
    with (
        pytest.warns(RuntimeWarning, match="is not a number and is left out") as warned,
        pytest.warns(RuntimeWarning, match="the metric .nan. is NaN"),
        Checkpointer(tmp_path, {"n": {"x": 1}}, save_policy=NEVER) as checkpointer,
    ):
        checkpointer.step(1, metrics={"loss": loss, "nan": math.nan, **others})
        loss.zero_()
    assert len([each for each in warned if "left out" in str(each.message)]) == len(others)
    metrics = read_manifest(tmp_path / "step-0000000001").metrics
    assert (sorted(metrics), metrics["loss"]) == (["loss", "nan"], 2.0)


def _one_rank_asks_for_another_attempt(root):
    with contextlib.suppress(SystemExit), Checkpointer(root, {"n": {"x": 1}}, save_policy=NEVER, watchdog=None) as run:
        run.step(1)
        if dist.get_rank() == 1:
            sys.exit(75)
    return outcome_of(Path(root)).state


def test_any_rank_may_ask_for_another_attempt(tmp_path):
    assert run_ranks(2, _one_rank_asks_for_another_attempt, str(tmp_path)) == ["stopped", "stopped"]


def _other_calls(root, steps, verb):
    run = Checkpointer(root, {"n": {"x": 1}}, save_policy=NEVER, watchdog=None, timeout_seconds=30)
    for step in range(1, steps + 1):
        run.step(step)
    with pytest.raises(ConfigError) as caught:
        if dist.get_rank() == 0:
            OTHER_CALLS[verb](run, steps + 1)
        for step in range(steps + 1, steps + 3):
            run.step(step)
    return str(caught.value)


OTHER_CALLS = {
    "restore()": lambda run, step: run.restore(),
    "save()": lambda run, step: run.save(step),
    "wait()": lambda run, step: run.wait(),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("verb", OTHER_CALLS)
def test_ranks_that_call_other_methods_are_told(tmp_path, verb, steps):
    for told in run_ranks(2, _other_calls, str(tmp_path), steps, verb, fresh=True):
        assert told.startswith(f"rank 0 is in {verb} and rank 1 in step()")


@pytest.mark.parametrize("error", [KeyboardInterrupt, AttributeError])
def test_a_constructor_that_fails_leaves_the_root_free(tmp_path, error):
    with mock.patch.object(StepRecorder, "__init__", side_effect=error), pytest.raises(error):
        Checkpointer(tmp_path, {"n": {"x": 1}}, save_policy=NEVER)
    assert read_owner(tmp_path) is None
    Checkpointer(tmp_path, {"n": {"x": 1}}, save_policy=NEVER).close()


@pytest.mark.parametrize("name", ["optimizer", "schedule"])
def test_the_state_dict_of_an_optimizer_or_a_schedule_is_told(tmp_path, name):
    """Neither changes with it, nor loads into it: a resumed run would begin with a fresh one, in silence."""
    optimizer = Trainer().optimizer
    made = optimizer if name == "optimizer" else torch.optim.lr_scheduler.ConstantLR(optimizer)
    with (
        pytest.warns(RuntimeWarning, match=rf"state\['{name}'\] is the state_dict\(\) of an? {name}.*Put the object"),
        Checkpointer(tmp_path, {name: made.state_dict()}, save_policy=NEVER),
    ):
        pass


def test_containers_are_filled_where_they_are(tmp_path):
    def make():
        return {"a": {"deep": {"n": 1, "list": [1, {"x": 1}]}}, "list": [1, 2, 3], "gone": {"k": 1}}

    saved = make()
    with Checkpointer(tmp_path, saved, save_policy=NEVER) as checkpointer:
        saved["a"]["deep"]["list"][1]["x"] = 7
        saved["list"][:] = [4, 5]
        saved["gone"].clear()
        checkpointer.step(1)
    state = make()
    held = state["a"]["deep"], state["a"]["deep"]["list"][1], state["list"], state["gone"]
    with Checkpointer(tmp_path, state, save_policy=NEVER) as checkpointer:
        checkpointer.restore()
    assert held == ({"n": 1, "list": [1, {"x": 7}]}, {"x": 7}, [4, 5], {})
    assert (state["a"]["deep"], state["list"], state["gone"]) == (held[0], held[2], held[3])
    assert state["a"]["deep"] is held[0]


@pytest.mark.parametrize(
    ("value", "told"),
    [({"x": torch.zeros(1).expand(4)}, r"t\.x is expanded"), ({torch.zeros(1)}, r"t\.0 is a tensor in a set")],
)
def test_what_no_load_fills_is_refused_before_it_is_saved(tmp_path, value, told):
    with (
        pytest.raises(ConfigError, match=told),
        Checkpointer(tmp_path, {"t": value}, save_policy=NEVER) as checkpointer,
    ):
        checkpointer.step(1)


def test_an_optimizer_of_something_else_does_not_cost_the_last_step(tmp_path):
    trainer, probe = Trainer(), Trainer()
    with Checkpointer(tmp_path, state_of(trainer, Loader(), hidden=False), save_policy=NEVER) as checkpointer:
        trainer.train(torch.ones(4, 3))
        checkpointer.step(1)
        probe.train(torch.ones(4, 3))
    assert restored(tmp_path)[0] == 1


def test_containers_that_were_one_when_made_and_several_when_saved(tmp_path):
    def make():
        shared = [0]
        return {"pos": [{"n": 0}] * 3, "by": dict.fromkeys("ab", shared), "other": {"same": shared}}

    state = make()
    with Checkpointer(tmp_path, state, save_policy=NEVER) as checkpointer:
        state["pos"] = [{"n": n} for n in (1, 2, 3)]
        state["by"].update(a=[1], b=[2])
        state["other"]["same"] = [3]
        checkpointer.step(1)
    state = make()
    with Checkpointer(tmp_path, state, save_policy=NEVER) as checkpointer:
        checkpointer.restore()
    assert state == {"pos": [{"n": 1}, {"n": 2}, {"n": 3}], "by": {"a": [1], "b": [2]}, "other": {"same": [3]}}


class Generators(ckptman.RNGState):
    def __init__(self):
        """Calls no other."""


@pytest.mark.parametrize("made", [lambda: copy.deepcopy(ckptman.RNGState()), Generators], ids=["a copy", "a subclass"])
def test_generators_are_those_of_this_process(made):
    rng = made()
    rng.state_dict()
    rng = copy.deepcopy(rng)
    for seed in (2, 3):
        random.seed(seed)
        assert json.loads(rng.state_dict()["generators"])["python"][1] == list(random.getstate()[1])


def _leave_at_other_steps(root):
    run = Checkpointer(root, {"n": {"x": 1}}, save_policy=NEVER, watchdog=None, timeout_seconds=10)
    try:
        with run:
            for step in range(1, 5 - dist.get_rank()):
                run.step(step)
    except (ConfigError, RankLostError) as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_ranks_that_leave_the_block_at_other_steps_are_told_soon(tmp_path):
    assert any(
        "the ranks are at different steps" in told
        for told in run_ranks(2, _leave_at_other_steps, str(tmp_path), fresh=True)
    )
