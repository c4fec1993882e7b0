"""Health in a run: what the ranks found is in its journal, the slow one is named, and no setting of it stops a run."""

import gc
import os
import threading
import time

import pytest
import torch

import ckptman
from ckptman.errors import ConfigError
from ckptman.policies.hang_timeout import HangTimeout, Progress
from ckptman.runtime.journal import read_journal
from ckptman.runtime.outcome import OUTCOME_ENV, reported_nodes
from ckptman.session import run_health
from ckptman.storage.format.paths import journal_path
from tests.helpers.ranks import run_ranks

FAST = ckptman.HealthThresholds(period_seconds=0.01)


def events(root, name):
    return [each for each in read_journal(journal_path(root))[0] if each["event"] == name]


class Card:
    """Stands for the GPU of a rank."""

    def __init__(self, rank):
        self.rank = rank

    def read(self):
        return {"utilisation": 0.9 - self.rank / 10, "ecc_errors": int(self.rank == 1)}


def train(root, slow_rank, steps, outcome):
    os.environ[OUTCOME_ENV] = str(outcome)
    rank = torch.distributed.get_rank()
    run_health._device = lambda: ("nvidia", str(rank))
    run_health.open_device = lambda vendor, address: Card(int(address))
    state = {"model": torch.nn.Linear(2, 2)}
    with ckptman.Checkpointer(root, state, save_policy=ckptman.EverySteps(steps // 2), health=FAST) as checkpointer:
        for step in range(checkpointer.restore() + 1, steps + 1):
            with checkpointer.own_work():
                time.sleep(0.03 if rank == slow_rank else 0.001)  # stands for a forward
            torch.distributed.barrier()  # and for the gradients of all
            checkpointer.step(step)


@pytest.mark.slow
def test_the_leader_writes_what_all_ranks_found(tmp_path):
    run_ranks(3, train, tmp_path / "run", 2, 60, tmp_path / "outcome.json")
    told = events(tmp_path / "run", "health")
    # At both saves all have steps to tell of. At the end, only those whose threads have sampled once more do.
    assert [each["ranks"] for each in told[:2]] == [3, 3]
    figures = told[0]["figures"]
    # Of the slow rank the others see nothing in the time of a step; its own work shows it.
    assert figures["work_seconds"]["max_rank"] == 2
    assert figures["step_seconds"]["min"] > 0.02
    # On a machine that is busy, a thread may not have sampled yet when the first save asks.
    assert {"ecc_errors": 1} in [each["breaches"] for each in told]
    whole = {"min": 0.7, "median": 0.8, "max": 0.9, "min_rank": 2, "max_rank": 0}
    assert whole in [each["figures"].get("utilisation") for each in told]
    assert figures["host_available_bytes"]["min"] > 0
    assert [(each["rank"], each["of"]) for each in events(tmp_path / "run", "straggler")] == [(2, "work")]  # not again
    [breach] = events(tmp_path / "run", "health_breach")
    assert (breach["rank"], breach["what"], breach["level"]) == (1, "ecc_errors", "problem")
    assert list(reported_nodes(tmp_path / "outcome.json")) == [breach["node"]]
    last = [each["event"] for each in read_journal(journal_path(tmp_path / "run"))[0]][-1]
    assert last == "finished"


class Slow(torch.utils.data.Dataset[int]):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        time.sleep(0.01)
        return index


def threads():
    return [each.name for each in threading.enumerate() if each.name == "ckptman-health"]


def test_the_wait_for_a_loader_is_known_by_itself(tmp_path):
    loader = ckptman.ResumableLoader(torch.utils.data.DataLoader(Slow()))
    state = {"data": loader, "rng": ckptman.RNGState()}
    with ckptman.Checkpointer(tmp_path, state, save_policy=ckptman.AtStep(1000), health=FAST) as checkpointer:
        checkpointer.restore()
        for step, _ in enumerate(loader, 1):
            checkpointer.step(step)
        assert threads()
    assert not threads()
    told = events(tmp_path, "health")[0]["figures"]
    assert told["loader_seconds"]["median"] >= 0.01
    assert told["loader"]["median"] > 0.3
    assert loader.wait_seconds >= 0.6


def test_short_runs_and_runs_without_it_start_no_thread(tmp_path):
    for number, health in enumerate(("auto", None)):
        root = tmp_path / str(number)
        with ckptman.Checkpointer(root, {"model": torch.nn.Linear(1, 1)}, health=health) as checkpointer:
            for step in range(checkpointer.restore() + 1, 40):
                with checkpointer.own_work():
                    pass
                checkpointer.step(step)
            assert not threads()
        assert events(root, "health") == []
    with pytest.raises(ConfigError, match="health is 'auto', a HealthThresholds, or None not to look, not True"):
        ckptman.Checkpointer(tmp_path / "x", {"model": torch.nn.Linear(1, 1)}, health=True)


def sampling(root):
    """A run that trains and samples, and its last step."""
    checkpointer = ckptman.Checkpointer(root, {"model": torch.nn.Linear(1, 1)}, health=FAST)
    step = checkpointer.restore()
    while not threads():
        step += 1
        checkpointer.step(step)
    return checkpointer, step


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.leaves("ckptman-")
def test_it_ends_with_a_run_that_fails_or_that_nobody_closes(tmp_path, fails):
    checkpointer, _ = sampling(tmp_path)
    [thread] = [each for each in threading.enumerate() if each.name == "ckptman-health"]
    if fails:
        with pytest.raises(ZeroDivisionError), checkpointer:
            raise ZeroDivisionError
    else:
        del checkpointer
        gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_report_that_breaks_costs_no_save(tmp_path, monkeypatch):
    def broken(*_):
        raise ArithmeticError("no figure")

    monkeypatch.setattr(run_health, "usual_seconds", broken)
    monkeypatch.setattr(run_health, "breaches_over_ranks", broken)
    checkpointer, step = sampling(tmp_path)
    with checkpointer:
        checkpointer.save(step)
        checkpointer.wait()
        assert checkpointer.last_saved == step
        checkpointer._health.note([run_health.RankHealth(0, "n")])


class Event:
    """Stands for one of a GPU, half a second after the one before it."""

    over = False

    def query(self):
        return self.over

    def elapsed_time(self, end):
        return 500.0


def test_work_on_a_device_counts_once_it_is_done_and_nobody_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(run_health, "_event", Event)
    monkeypatch.setattr(Event, "over", False)
    with ckptman.Checkpointer(tmp_path, {"model": torch.nn.Linear(1, 1)}) as checkpointer:
        health = checkpointer._health
        assert health is not None
        step = checkpointer.restore() + 1
        checkpointer.step(step)
        with pytest.raises(KeyError), checkpointer.own_work():
            raise KeyError
        with checkpointer.own_work():
            pass
        checkpointer.step(step + 1)
        assert list(health._laps["work_seconds"]) == []
        Event.over = True
        checkpointer.step(step + 2)
        assert list(health._laps["work_seconds"]) == [1.0]


def test_what_is_not_training_is_known_by_the_signs_of_life():
    progress = Progress(HangTimeout())
    assert progress.training == (None, 0)  # before the first step
    progress.beat(0.0, "step", 1)
    assert progress.training == (1, 0)
    progress.beat(1.0, "step", 2)
    assert progress.training == (2, 0)
    progress.beat(1.5, "step", 2)  # beat() of an evaluation
    assert progress.training == (2, 1)
    save = progress.begin(2.0, 2)
    progress.beat(2.0, "step", 3)
    assert progress.training == (None, 2)
    progress.end(3.0, save)
    assert progress.training == (3, 2)
    progress.beat(4.0, "stage", 3)
    assert progress.training == (None, 3)
