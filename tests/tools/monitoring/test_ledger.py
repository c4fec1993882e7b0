"""Where the hours went: the parts add up on every scenario, and are what really happened, or not known."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from ckptman.jobs.slurm.accounting import JobTimes
from ckptman.tools.monitoring.history import history_of
from ckptman.tools.monitoring.ledger import KINDS, add, make_ledger
from tests.tools.monitoring.invented_run import InventedRun, invented

ROOT = Path("root")


def run_of(seed, *jobs, **fields):
    """A run with a job of each of these ends and numbers of steps."""
    run = InventedRun(seed, **fields)
    for ending, steps in jobs:
        run.job(ending, steps)
    return run


def ledger_of(run, *, jobs=True, now=None, is_now="over"):
    """The ledger of a run, whose parts add up in any case."""
    history = history_of(ROOT, run.events, run.jobs if jobs else ())
    return whole(make_ledger(history, run.now if now is None else now, is_now=is_now))


def whole(ledger):
    """The parts add up to the whole, in all and for each attempt, and no moment is counted twice."""
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.total_seconds, abs=1e-3)
    assert sum(sum(each.seconds.values()) for each in ledger.attempts) == pytest.approx(ledger.total_seconds, abs=1e-3)
    assert all(before.end == after.begin for before, after in zip(ledger.spans, ledger.spans[1:]))
    assert all(span.seconds > 0 for span in ledger.spans)
    return ledger


@pytest.mark.parametrize("seed", range(4))
def test_every_kind_of_end(seed):
    run = invented(seed)
    ledger = ledger_of(run)
    total = ledger.total_seconds
    assert total == pytest.approx(run.now - run.begun)
    for kind in KINDS:
        assert ledger.seconds[kind] == pytest.approx(run.truth[kind], abs=0.01 * total), kind
    held = total - run.truth["queueing"] - run.truth["idle"]
    assert ledger.goodput == pytest.approx(run.truth["training"] / held, abs=0.01)
    assert ledger.seconds["unknown"] == 0


def test_without_the_records_of_a_chain_waiting_is_not_known():
    run = invented(1)
    ledger = ledger_of(run, jobs=False)
    assert ledger.seconds["queueing"] == ledger.seconds["idle"] == 0
    assert ledger.seconds["unknown"] >= 0.9 * run.truth["queueing"]
    assert ledger.seconds["training"] == pytest.approx(run.truth["training"], rel=0.01)


def test_the_time_until_slurm_notices_a_dead_node_is_not_training():
    run = run_of(22, ("killed", 330))
    before = ledger_of(run)
    run.jobs[-1] = replace(run.jobs[-1], ended=run.now + 50)
    run.now += 50
    ledger = ledger_of(run)
    trained, trained_before = (each.seconds["training"] + each.seconds["repeated"] for each in (ledger, before))
    assert trained <= trained_before + 30, "at most until its next heartbeat"
    assert ledger.seconds["ending"] >= before.seconds["ending"] + 20


def test_the_chain_says_how_an_attempt_ended():
    run = run_of(23, ("failed", 100))
    told = replace(run.jobs[-1], chain="c", ending="interrupted", reason="node failure: n2; the other ranks lost it")
    run.jobs[-1] = told
    [attempt] = ledger_of(run).attempts
    assert (attempt.ending, attempt.reason) == (told.ending, told.reason)


def test_a_run_at_work():
    run = run_of(4, ("stopped", 300), ("killed", 250))
    run.jobs[-1] = replace(run.jobs[-1], ended=None)
    ledger = ledger_of(run, is_now="running")
    assert ledger.attempts[-1].ending == "running"
    assert ledger.seconds["repeated"] == 0  # what is not saved yet is not lost yet
    quiet = ledger_of(run, now=run.now + 1000, is_now="running")
    assert quiet.seconds["hung"] == pytest.approx(1000, abs=40)


def test_a_rollback_makes_training_for_nothing():
    run = run_of(5, ("stopped", 300))
    before = ledger_of(run).seconds["training"]
    run.roll_back(100)
    assert ledger_of(run).seconds["training"] == pytest.approx(before / 3, rel=0.05)
    run.job("stopped", 200)
    assert ledger_of(run).seconds["training"] == pytest.approx(before, rel=0.05)


def test_saves_to_memory_are_counted_though_the_journal_does_not_tell_of_each():
    run = run_of(6, ("stopped", 300))
    known = ledger_of(run).seconds["saving"]
    for event in run.events:
        if event["event"] == "progress":
            event["stall_seconds"] += 11.0
    assert ledger_of(run).seconds["saving"] == pytest.approx(known + 11, abs=0.1)


def test_causes_and_advice():
    run = run_of(7, ("stopped", 500), ("killed", 500), ("failed", 500))
    run.finish()
    ledger = ledger_of(run)
    assert [each.ending for each in ledger.attempts] == ["stopped", "killed", "failed", "finished"]
    assert [each.reason for each in ledger.attempts][1:3] == ["killed", "RuntimeError: boom"]
    assert ledger.failures == 2
    assert ledger.mtbf_seconds == pytest.approx(ledger.held_seconds / 2)
    assert ledger.interval_seconds == pytest.approx(100 * run.step_seconds + run.stall_seconds, rel=0.02)
    assert 20 < ledger.advised_seconds < 500
    assert add([ledger, ledger])["training"] == 2 * ledger.seconds["training"]


def test_several_runs_in_one_journal():
    run, other = run_of(8, ("stopped", 200)), run_of(9, ("killed", 200), now=1_780_000_000.0)
    for event in other.events:
        if "run_id" in event:
            event["run_id"] = "other"
    ledger = whole(make_ledger(history_of(ROOT, [*other.events, *run.events]), run.now))
    assert len(ledger.attempts) == 1
    assert "other" in ledger.notes[0]


@pytest.mark.parametrize(
    ("places", "off_seconds"),
    [
        ([0.4], 10 * 365 * 86400.0),  # one event far ahead
        ([0.999], 10 * 365 * 86400.0),
        ([0.5], -10_000.0),
        ([0.3, 0.31, 0.32], 100.0),
        ([0.3, 0.31, 0.32], -100.0),
    ],
)
def test_a_clock_that_jumps_costs_no_more_than_the_jump_and_is_noted(places, off_seconds):
    run = run_of(11, ("stopped", 2000), ("killed", 2000), ("stopped", 2000))
    right = ledger_of(run).seconds["training"]
    for place in places:
        run.events[int(place * len(run.events))]["time"] += off_seconds
    ledger = whole(make_ledger(history_of(ROOT, run.events, run.jobs, now=run.now), run.now))
    assert ledger.seconds["training"] == pytest.approx(right, abs=3 * min(abs(off_seconds), 30.0))
    assert any("clocks were off by up to" in note for note in ledger.notes)


def test_a_clock_that_was_wrong_for_a_whole_attempt_still_adds_up_and_is_noted():
    for off_seconds in (10 * 365 * 86400.0, -6000.0, 6000.0):
        run = run_of(11, ("stopped", 200), ("killed", 200), ("stopped", 200))
        begins = [n for n, event in enumerate(run.events) if event["event"] == "attempt_started"]
        for event in run.events[begins[1] : begins[2]]:
            event["time"] += off_seconds
        ledger = whole(make_ledger(history_of(ROOT, run.events, run.jobs, now=run.now), run.now))
        assert ledger.total_seconds == pytest.approx(run.now - run.begun)
        assert any("clocks were off by up to" in note for note in ledger.notes)


def test_a_process_that_waited_for_the_root_hides_no_attempt():
    run = run_of(12, ("stopped", 200), ("stopped", 200))
    second = [event for event in run.events if event["event"] == "attempt_started"][1]
    second["process_seconds"] = run.begun
    for event in run.events:
        event.pop("job_id", None)
    ledger = ledger_of(run, jobs=False)
    assert [each.number for each in ledger.attempts] == [1, 2]
    assert ledger.seconds["training"] == pytest.approx(run.truth["training"], rel=0.05)


def test_a_line_that_is_lost_loses_no_training():
    run = run_of(13, ("stopped", 500))
    run.events = [event for event in run.events if event["event"] != "first_step"]
    assert ledger_of(run).seconds["training"] == pytest.approx(run.truth["training"], rel=0.05)


@pytest.mark.parametrize(("is_now", "ending"), [("starting", "running"), ("over", "killed")])
def test_a_job_that_has_begun_and_no_run_in_it(is_now, ending):
    run = run_of(14, ("stopped", 100))
    run.jobs.append(JobTimes("2", run.now, run.now + 50, None))
    ledger = ledger_of(run, now=run.now + 150, is_now=is_now)
    assert ledger.attempts[-1].ending == ending
    more = 100 if is_now == "starting" else 0
    assert ledger.seconds["starting"] == pytest.approx(run.truth["starting"] + more, abs=1)


def test_a_job_that_waits_now_is_counted():
    run = run_of(15, ("stopped", 100))
    ledger = make_ledger(history_of(ROOT, run.events, run.jobs), run.now + 5000, is_now="queued")
    assert ledger.seconds["queueing"] == pytest.approx(run.truth["queueing"] + 5000, abs=1)


def test_jobs_that_follow_each_other_at_once_are_not_taken_for_each_other():
    run = run_of(18, ("killed", 220), ("killed", 220), ("stopped", 220))
    ends = [job.ended for job in run.jobs]
    jobs = [JobTimes("", job.begun, job.begun, job.ended, chain="c") for job in run.jobs]
    for event in run.events:
        if event["event"] == "attempt_started":
            event |= {"chain": "c", "job_id": ""}
    begins = [event["time"] for event in run.events if event["event"] == "attempt_started"]
    jobs = [replace(job, begun=begin - 0.2, submitted=begin - 0.2) for job, begin in zip(jobs, begins)]
    jobs[0] = replace(jobs[0], ended=begins[1] - 0.3)
    history = history_of(ROOT, run.events, jobs)
    assert [history.job_of(attempt) for attempt in history.attempts] == jobs
    assert ends[2] == jobs[2].ended


def test_slow_steps_are_no_hang():
    run = run_of(16, ("killed", 25), step_seconds=300.0, interval_steps=10)
    run.jobs[-1] = replace(run.jobs[-1], ended=run.now + 250)
    assert ledger_of(run, now=run.now + 250).seconds["hung"] == 0


def test_what_is_held_and_not_known_is_no_free_time():
    run = run_of(17, ("killed", 120))
    run.events = [event for event in run.events if event["event"] != "progress"]
    run.jobs[-1] = replace(run.jobs[-1], ended=run.now + 10_000)
    ledger = ledger_of(run, now=run.now + 10_000)
    assert ledger.seconds["unknown"] > 9_000
    assert ledger.held_seconds > 10_000


def test_nothing_but_a_beginning():
    assert make_ledger(history_of(ROOT, []), 1e9).total_seconds == 0
    lonely = [{"time": 1e9, "event": "attempt_started", "attempt": 1, "run_id": "r"}]
    assert whole(make_ledger(history_of(ROOT, lonely), 1e9 + 50)).goodput is None
    waiting = whole(make_ledger(history_of(ROOT, lonely, [JobTimes("7", 1e9 - 100, 1e9 - 10, 1e9 + 20)]), 1e9 + 50))
    assert waiting.seconds["queueing"] == 90


@pytest.mark.parametrize("seed", range(10))
def test_rubbish_in_the_journal(seed):
    print(f"seed {seed}")
    chance, run = random.Random(seed), invented(seed, attempts=8)
    rubbish = [None, "x", -1, 1e300, [], {}, True, "nan", 2**70]
    for _ in range(300):
        event = chance.choice(run.events)
        event[chance.choice([*event])] = chance.choice(rubbish)
    chance.shuffle(run.events[: len(run.events) // 2])
    history = history_of(ROOT, json.loads(json.dumps(run.events)), run.jobs)
    whole(make_ledger(history, run.now))
