"""`overlap=True`: the copy runs under the next forward and backward, and what is saved is the state of its own step."""

import os
import signal
import threading
import time

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ckptman
from ckptman.engine.saving.staging import Slot, Stager
from tests.engine.dcp.test_values import differing
from tests.engine.saving.test_staging import WAIT, HeldUp
from tests.gpu.device import Run, check_saved, open_run
from tests.helpers.apps import App
from tests.helpers.ranks import run_ranks

ONE = "step-0000000001"


@pytest.mark.parametrize("leads", ["first", "second"])
def test_what_is_saved_is_the_state_of_its_step(tmp_path, monkeypatch, leads):
    """The copying thread begins only when the next optimizer step is about to begin, and then takes its time."""
    run, finished = Run(), []
    held = HeldUp(monkeypatch)
    waiting = Slot.copy

    def slow(slot, memory, numbers):
        waiting(slot, memory, numbers)
        if threading.current_thread().name.startswith("ckptman-stage"):
            time.sleep(0.2)
            finished.append(time.monotonic())

    monkeypatch.setattr(Slot, "copy", slow)
    optimizers = [run.first, run.second] if leads == "first" else [run.second, run.first]
    about_to_step = register_optimizer_step_pre_hook(lambda *_: held.go.set())
    with open_run(tmp_path, run.state, overlap=True) as checkpointer:
        expected = run.copies()
        checkpointer.save(1)
        run.backward(1)
        assert not held.copied.is_set(), "it runs under forward and backward"
        assert differing(run.tensors(), expected) == ["passes"]
        asked = time.monotonic()
        for optimizer in optimizers:
            optimizer.step()
            assert len(finished) == 1, "the parameters changed while they were copied"
        assert finished[0] - asked >= 0.2
        assert "first.weight" in differing(run.tensors(), expected)
        with torch.no_grad():
            for each in run.net.frozen.parameters():
                each.zero_()
    about_to_step.remove()
    check_saved(tmp_path, None, {1: expected})


def test_what_no_optimizer_updates_may_change_at_once(tmp_path, monkeypatch):
    run, held = Run(), HeldUp(monkeypatch)
    with open_run(tmp_path, run.state, overlap=True) as checkpointer:
        expected = run.copies()
        checkpointer.save(1)
        with torch.no_grad():
            for each in [*run.net.frozen.parameters(), *run.net.buffers(), *run.state["hosted"].values()]:
                each.zero_()
        held.go.set()
    check_saved(tmp_path, None, {1: expected})


def test_without_overlap_nothing_is_copied_later(tmp_path, monkeypatch):
    run, held = Run(), HeldUp(monkeypatch)
    with open_run(tmp_path, run.state) as checkpointer:
        expected = run.copies()
        checkpointer.save(1)
        run.train_step(1)
        assert not held.copied.is_set()
    check_saved(tmp_path, None, {1: expected})


def test_two_saves_without_a_step_between_and_one_at_the_end(tmp_path, monkeypatch):
    run, held = Run(), HeldUp(monkeypatch)
    with open_run(tmp_path, run.state, overlap=True) as checkpointer:
        expected = run.copies()
        checkpointer.save(1)
        checkpointer.save(2)
        timer = threading.Timer(0.1, held.go.set)
        timer.start()
        run.backward(1)
        between = run.copies()
        run.first.step()
        checkpointer.save(3)
        last = run.copies()
        timer.join()
    check_saved(tmp_path, None, {1: expected, 2: expected, 3: last})
    assert differing(between, last) != []


def test_a_run_that_ends_with_an_error_waits_for_its_copy(tmp_path, monkeypatch):
    run, held = Run(), HeldUp(monkeypatch)
    expected = run.copies()
    threading.Timer(0.1, held.go.set).start()
    with pytest.raises(ValueError, match="of the user"), open_run(tmp_path, run.state, overlap=True) as checkpointer:
        checkpointer.save(1)
        raise ValueError("of the user")
    run.train_step(1)
    check_saved(tmp_path, None, {1: expected})


def test_the_hooks_go_with_the_run(tmp_path):
    run, hooks = Run(), [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    before = [len(each) for each in hooks]
    with open_run(tmp_path, run.state, overlap=True):
        assert [len(each) for each in hooks] == [each + 1 for each in before]
    assert [len(each) for each in hooks] == before


def test_an_optimizer_that_has_taken_the_place_of_another_waits_too(tmp_path, monkeypatch):
    run, held = Run(), HeldUp(monkeypatch)
    with open_run(tmp_path, run.state, overlap=True) as checkpointer:
        for step in (1, 2):
            expected = run.copies()
            held.go.clear()
            held.copied.clear()
            checkpointer.save(step)
            threading.Timer(0.1, held.go.set).start()
            new = torch.optim.AdamW(run.net.first.parameters(), lr=0.1)
            run.backward(step)
            new.step()
            assert held.copied.is_set(), "the parameters changed while they were copied"
            checkpointer.wait()
            check_saved(tmp_path, None, {step: expected})
            run.state["first"] = run.first = new


def test_a_fork_steps_without_waiting_for_a_copy_of_its_parent(tmp_path, monkeypatch):
    run, held = Run(), HeldUp(monkeypatch)
    with open_run(tmp_path, run.state, overlap=True) as checkpointer:
        expected = run.copies()
        checkpointer.save(1)
        if not (child := os.fork()):
            signal.alarm(int(WAIT))
            run.second.step()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        held.go.set()
    check_saved(tmp_path, None, {1: expected})


def test_a_learning_rate_that_a_schedule_changes_before_the_step(tmp_path, monkeypatch):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    held = HeldUp(monkeypatch)
    with open_run(tmp_path, state, overlap=True) as checkpointer:
        checkpointer.save(1)
        optimizer.param_groups[0]["lr"].fill_(0.25)  # as warm-up does at the beginning of a step
        held.go.set()
        optimizer.step()
    fresh = nn.Linear(2, 2)
    restored = torch.optim.AdamW(fresh.parameters(), lr=torch.tensor(0.0), foreach=False)
    ckptman.load({"model": fresh, "optimizer": restored}, tmp_path / ONE)
    assert restored.param_groups[0]["lr"] == 0.5


def test_a_copy_that_fails_fails_its_save_and_nothing_else(tmp_path, monkeypatch):
    """An error in the optimizer step of one rank would leave the others waiting for it."""
    run = Run()
    with open_run(tmp_path, run.state, overlap=True) as checkpointer:
        held = HeldUp(monkeypatch, RuntimeError("the copy failed"))
        checkpointer.save(1)
        held.go.set()
        run.train_step(1)
        with pytest.raises(ckptman.CommitError, match="the copy failed"):
            checkpointer.wait()
        monkeypatch.undo()
        expected = run.copies()
        checkpointer.save(2)
    assert not (tmp_path / ONE).exists()
    check_saved(tmp_path, None, {2: expected})


def train_sharded(root):
    original = Slot.copy

    def slow(slot, memory, numbers):
        if threading.current_thread().name.startswith("ckptman-stage"):
            time.sleep(0.05)
        original(slot, memory, numbers)

    Slot.copy = slow
    app, digests = App((2,)), {}
    with ckptman.Checkpointer(
        root, app.state, save_policy=ckptman.EverySteps(1), deadline=None, overlap=True
    ) as checkpointer:
        for step in range(1, 4):
            app.train_step()
            digests[step] = app.digests()
            checkpointer.step(step)
    return digests


def load_sharded(root):
    digests = {}
    for step in (1, 2, 3):
        app = App((2,), seed=1)
        with ckptman.Checkpointer(f"{root}-{step}", app.state, deadline=None) as checkpointer:
            checkpointer.restore(path=f"{root}/step-{step:010d}")
        digests[step] = app.digests()
    return digests


@pytest.mark.slow
def test_sharded_parameters_too(tmp_path):
    saved = run_ranks(2, train_sharded, str(tmp_path / "run"), limit=2 * WAIT)
    assert run_ranks(2, load_sharded, str(tmp_path / "run"), limit=2 * WAIT) == saved
    assert saved[0][1] != saved[0][2]


def test_what_is_still_being_copied_is_held_for_although_the_next_copy_failed(tmp_path, monkeypatch):
    """The thread that copies is at save 1 when save 2 cannot be staged: the optimizer has to wait all the same."""
    run, stage, fails = Run(), Stager.stage, []

    def failing(*args):
        if fails:
            raise MemoryError("no memory for the copy")
        return stage(*args)

    monkeypatch.setattr(Stager, "stage", failing)
    held = HeldUp(monkeypatch)
    with open_run(tmp_path, run.state, overlap=True) as checkpointer:
        expected = run.copies()
        checkpointer.save(1)
        fails.append(1)
        checkpointer.save(2)
        assert not held.copied.is_set()
        timer = threading.Timer(0.1, held.go.set)
        timer.start()
        run.train_step(1)
        assert held.copied.is_set(), "the parameters changed while they were copied"
        timer.join()
        fails.clear()
        with pytest.raises(ckptman.CommitError, match="no memory for the copy"):
            checkpointer.wait()
        checkpointer.save(3)
    check_saved(tmp_path, None, {1: expected})
    assert not (tmp_path / "step-0000000002").exists()


def interrupt_soon():
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT]).start()


def test_a_ctrl_c_while_a_step_waits_does_not_let_the_next_one_pass(tmp_path, monkeypatch):
    """As in a notebook: somebody interrupts, and goes on."""
    run, held = Run(), HeldUp(monkeypatch)
    with open_run(tmp_path, run.state, overlap=True, signals=False) as checkpointer:
        expected = run.copies()
        checkpointer.save(1)
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            run.first.step()
        threading.Timer(0.3, held.go.set).start()
        run.first.step()
        assert held.copied.is_set()
    check_saved(tmp_path, None, {1: expected})


def test_a_ctrl_c_while_a_save_is_waited_for_does_not_make_it_durable(tmp_path, monkeypatch):
    run, held = Run(), HeldUp(monkeypatch)
    with open_run(tmp_path, run.state, overlap=True, signals=False) as checkpointer:
        checkpointer.save(1)
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            checkpointer.wait()
        threading.Timer(0.3, held.go.set).start()
        checkpointer.wait()
        assert (tmp_path / ONE / "manifest.json").exists()
