"""Where the hours went: the parts add up on every scenario, and are what really happened, or not known."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptman.monitoring.history import history_of
from ckptman.monitoring.ledger import KINDS, Ledger, add, make_ledger
from ckptman.scheduler.slurm.accounting import JobTimes
from tests.monitoring.invented_run import InventedRun, invented

ROOT = Path("root")


def ledger_of(run: InventedRun, *, jobs: bool = True, now: float | None = None, alive: bool = False) -> Ledger:
    history = history_of(ROOT, run.events, run.jobs if jobs else ())
    return make_ledger(history, run.now if now is None else now, is_alive=alive)


def check_whole(ledger: Ledger) -> None:
    """The parts add up to the whole, in all and for each attempt, and no moment is counted twice."""
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.total_seconds, abs=1e-3)
    assert sum(sum(each.seconds.values()) for each in ledger.attempts) == pytest.approx(ledger.total_seconds, abs=1e-3)
    assert all(before.end == after.begin for before, after in zip(ledger.spans, ledger.spans[1:]))
    assert all(span.seconds > 0 for span in ledger.spans)


@pytest.mark.parametrize("seed", range(8))
def test_every_kind_of_end(seed: int) -> None:
    run = invented(seed)
    ledger = ledger_of(run)
    check_whole(ledger)
    assert ledger.total_seconds == pytest.approx(run.now - run.begun)
    whole = ledger.total_seconds
    for kind in KINDS:
        assert ledger.seconds[kind] == pytest.approx(run.truth[kind], abs=0.01 * whole), kind
    held = whole - run.truth["queueing"] - run.truth["idle"]
    assert ledger.goodput == pytest.approx(run.truth["training"] / held, abs=0.01)
    assert ledger.seconds["unknown"] == 0


def test_without_the_records_of_a_chain_waiting_is_not_known() -> None:
    run = invented(1)
    ledger = ledger_of(run, jobs=False)
    check_whole(ledger)
    assert ledger.seconds["queueing"] == ledger.seconds["idle"] == 0
    assert ledger.seconds["unknown"] >= 0.9 * run.truth["queueing"]
    assert ledger.seconds["training"] == pytest.approx(run.truth["training"], rel=0.01)


def test_an_older_journal_does_not_say_when_a_killed_attempt_stopped_to_train() -> None:
    run = InventedRun(3)
    run.job("killed", 330)
    run.finish()
    run.events = [event for event in run.events if event["event"] != "progress"]
    ledger = ledger_of(run)
    check_whole(ledger)
    # 30 steps after the save of step 300 nobody heard of it: lost, or hung, or dead.
    assert ledger.seconds["unknown"] == pytest.approx(30 * run.step_seconds - run.durable_seconds, abs=5)


def test_a_run_at_work() -> None:
    run = InventedRun(4)
    run.job("stopped", 300)
    run.job("killed", 250)
    run.jobs[-1] = replace(run.jobs[-1], ended=None)
    ledger = ledger_of(run, alive=True)
    check_whole(ledger)
    assert ledger.attempts[-1].ending == "running"
    assert ledger.seconds["repeated"] == 0  # what is not saved yet is not lost yet
    quiet = ledger_of(run, now=run.now + 1000, alive=True)
    check_whole(quiet)
    assert quiet.seconds["hung"] == pytest.approx(1000, abs=40)


def test_a_rollback_makes_training_for_nothing() -> None:
    run = InventedRun(5)
    run.job("stopped", 300)
    before = ledger_of(run).seconds["training"]
    run.roll_back(100)
    after = ledger_of(run)
    check_whole(after)
    assert after.seconds["training"] == pytest.approx(before / 3, rel=0.05)
    run.job("stopped", 200)
    assert ledger_of(run).seconds["training"] == pytest.approx(before, rel=0.05)


def test_saves_to_memory_are_counted_though_the_journal_does_not_tell_of_each() -> None:
    run = InventedRun(6)
    run.job("stopped", 300)
    known = ledger_of(run).seconds["saving"]
    for event in run.events:
        if event["event"] == "progress":
            event["stall_seconds"] += 11.0
    ledger = ledger_of(run)
    check_whole(ledger)
    assert ledger.seconds["saving"] == pytest.approx(known + 11, abs=0.1)


def test_causes_and_advice() -> None:
    run = InventedRun(7)
    for ending in ("stopped", "killed", "failed"):
        run.job(ending, 500)
    run.finish()
    ledger = ledger_of(run)
    assert [each.ending for each in ledger.attempts] == ["stopped", "killed", "failed", "finished"]
    assert [each.reason for each in ledger.attempts][1:3] == ["killed", "RuntimeError: boom"]
    assert ledger.failures == 2
    assert ledger.mtbf_seconds == pytest.approx(ledger.held_seconds / 2)
    assert ledger.interval_seconds == pytest.approx(100 * run.step_seconds + run.stall_seconds, rel=0.02)
    assert ledger.advised_seconds is not None
    assert 20 < ledger.advised_seconds < 500
    assert add([ledger, ledger])["training"] == 2 * ledger.seconds["training"]


def test_several_runs_in_one_journal() -> None:
    run, other = InventedRun(8), InventedRun(9, now=1_780_000_000.0)
    run.job("stopped", 200)
    other.job("killed", 200)
    for event in other.events:
        if "run_id" in event:
            event["run_id"] = "other"
    history = history_of(ROOT, [*other.events, *run.events])
    ledger = make_ledger(history, run.now)
    check_whole(ledger)
    assert len(ledger.attempts) == 1
    assert "other" in ledger.notes[0]


def test_a_clock_that_jumps() -> None:
    run = InventedRun(10)
    run.job("killed", 200)
    run.job("stopped", 200)
    for event in run.events[len(run.events) // 3 : len(run.events) // 2]:
        event["time"] -= 10_000
    ledger = ledger_of(run)
    check_whole(ledger)
    assert any("a clock went back by" in note for note in ledger.notes)


def test_nothing_but_a_beginning() -> None:
    history = history_of(ROOT, [])
    assert make_ledger(history, 1e9).total_seconds == 0
    lonely = [{"time": 1e9, "event": "attempt_started", "attempt": 1, "run_id": "r"}]
    ledger = make_ledger(history_of(ROOT, lonely), 1e9 + 50)
    check_whole(ledger)
    assert ledger.goodput is None
    waiting = make_ledger(history_of(ROOT, lonely, [JobTimes("7", 1e9 - 100, 1e9 - 10, 1e9 + 20)]), 1e9 + 50)
    check_whole(waiting)
    assert waiting.seconds["queueing"] == 90


@pytest.mark.parametrize("seed", range(20))
def test_rubbish_in_the_journal(seed: int) -> None:
    print(f"seed {seed}")
    chance, run = random.Random(seed), invented(seed, attempts=8)
    rubbish: list[Any] = [None, "x", -1, 1e300, [], {}, True, "nan", 2**70]
    for _ in range(300):
        event = chance.choice(run.events)
        event[chance.choice([*event])] = chance.choice(rubbish)
    chance.shuffle(run.events[: len(run.events) // 2])
    history = history_of(ROOT, json.loads(json.dumps(run.events)), run.jobs)
    check_whole(make_ledger(history, run.now))
