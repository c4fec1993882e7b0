"""What rules keep of a run, as `ckptman plan` counts it, against the rules themselves on every save of the run."""

import random
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

import ckptman
from ckptman.cli.app import main
from ckptman.forecast.disk_forecast import Saves, cadence_seconds, disk_figures, most_kept
from ckptman.policies.calendar import KeepDaily, KeepHourly, KeepMonthly, KeepWeekly, KeepWithin
from ckptman.policies.retention import Record, plan
from ckptman.policies.retention_rules import AtMost, KeepAny, KeepBest, KeepEvery, KeepLast, KeepSteps
from ckptman.policies.save_policies import AtStep, DalyInterval, EverySeconds, EverySteps, InitTimeInterval, OnStop
from ckptman.storage.catalog.catalog import Catalog
from tests.cli.test_plan import CONFIG, planned

HOUR, DAY = 3600.0, 86_400.0
BEGUN = datetime(2026, 1, 1, tzinfo=timezone.utc).timestamp()
GB = 10**9


def records_of(saves, start=0.0):
    numbers = range(1, saves.count + 1)
    return [Record(saves.step(each), each, start + each * saves.interval_seconds, 1, {}) for each in numbers]


@pytest.mark.parametrize(
    ("policy", "saves"),
    [
        (KeepLast(12_000), Saves(30 * DAY, 200.0)),
        (KeepWithin(60 * DAY), Saves(90 * DAY, 441.0)),
        (KeepLast(5) | KeepEvery(1000), Saves(30 * DAY, 441.0, 2.0)),
        (KeepEvery(7), Saves(DAY, 90.0, 30.0)),
        (KeepEvery(3), Saves(DAY, 900.0, 10.0)),  # more multiples than saves
        (KeepLast(3) | KeepEvery(100) | KeepWithin(HOUR), Saves(DAY, 90.0, 30.0)),
        (KeepSteps(90, 900, 905, 10**9) | KeepLast(2), Saves(DAY, 900.0, 10.0)),
        (KeepLast(9), Saves(10.0, 4.0)),
    ],
)
def test_kept_is_what_the_rules_keep_of_every_save(policy, saves):
    records = records_of(saves)
    if "905" in str(policy):  # no save falls on it, so it is saved besides
        records = [*records[:10], replace(records[9], step=905, time_seconds=9050.0), *records[10:]]
        records = [replace(each, sequence=number) for number, each in enumerate(records)]
    assert most_kept(policy, saves) == sum(verdict.keep for verdict in plan(records, policy))


@pytest.mark.parametrize("seed", range(6))
def test_no_start_in_the_calendar_keeps_more(seed):
    print(f"seed {seed}")
    generator = random.Random(seed)
    counts = [generator.randint(1, 12) for _ in range(5)]
    kinds = (KeepHourly, KeepDaily, KeepWeekly, KeepMonthly, KeepLast)
    rules = [kind(count) for kind, count in zip(kinds, counts)]
    policy = KeepAny(tuple(generator.sample(rules, generator.randint(1, 4))))
    saves = Saves(generator.uniform(1, 70) * DAY, generator.choice([2.0, 7.0, 30.0]) * HOUR)
    found = most_kept(policy, saves)
    most = 0
    for day in range(120):
        records = records_of(saves, BEGUN + day * DAY + generator.uniform(0, DAY))
        most = max(most, len(policy.keeps(records).keys() | {records[-1].sequence}))
    assert most <= found <= most + 1, policy


def test_a_month_is_counted_from_its_worst_day():
    saves = Saves(30 * DAY, 900.0)
    assert most_kept(KeepMonthly(12), saves) == 3  # 31 January to 1 March
    assert most_kept(KeepWeekly(10), saves) == 6
    assert most_kept(KeepDaily(7) | KeepWeekly(4), saves) == 10
    # However long: no counting of single saves.
    assert most_kept(KeepHourly(10**9) | KeepLast(10**6), Saves(1e12, 1.0)) > 2 * 10**8


def test_each_metric_has_its_own_best():
    saves = Saves(30 * DAY, 1000.0)
    assert most_kept(KeepLast(3) | KeepBest("loss", 2) | KeepBest("acc", 2, "max"), saves) == 7
    assert most_kept(KeepLast(3) | KeepBest("loss", 2) | KeepBest("loss", 1), saves) == 5
    assert most_kept(KeepEvery(5000) | KeepBest("loss", 5), saves) == most_kept(KeepEvery(5000), saves) + 5
    assert most_kept(KeepLast(3) | KeepBest("loss", 9_999), saves) == saves.count


def disk(policy, saves):
    _, kept, room = disk_figures(policy, GB, saves)
    return kept.value, room.value / GB, room.formula


def test_what_lies_beside_the_kept_is_counted_in_words():
    saves = Saves(DAY, 900.0)
    words = "(1 by the rules + 1 that the run went on from + 1 the newest verified + 1 being saved) x 1 GB"
    assert disk(KeepLast(1), saves) == (1, 4, words)
    assert disk(KeepWithin(9 * DAY), saves) == (96, 96, "96, every save, x 1 GB")
    assert disk(None, saves) == (96, 96, "96 x 1 GB")
    # A limit makes room for those that no rule may remove, and for the one being saved afterwards.
    assert disk(KeepLast(50) & AtMost(bytes=10 * GB), saves)[:2] == (10, 11)
    assert disk(KeepLast(9) & AtMost(bytes=10 * GB), saves)[:2] == (9, 11)
    assert disk(KeepLast(50) & AtMost(bytes=1), saves)[:2] == (1, 4)
    assert disk(AtMost(bytes=10 * GB), saves)[:2] == (10, 11)
    assert disk(KeepLast(2), Saves(10.0, 9.0))[:2] == (1, 1)


def test_a_resumed_run_has_no_more_than_is_planned(tmp_path):
    root, state = tmp_path / "run", {"n": {"n": torch.zeros(4)}}
    rules = {"save_policy": EverySteps(1), "retention": KeepLast(1)}
    with ckptman.Checkpointer(root, state, **rules) as checkpointer:
        checkpointer.restore()
        checkpointer.step(1)
    most = 0
    with ckptman.Checkpointer(root, state, **rules) as checkpointer:
        for step in range(checkpointer.restore() + 1, 8):
            checkpointer.step(step)
            most = max(most, len(Catalog(root).complete()))
    assert 2 <= most <= disk(KeepLast(1), Saves(DAY, 900.0))[1]


def test_the_cadence_is_the_shortest_interval_and_no_shorter_than_a_save():
    def cadence(policy, step_seconds=None):
        return cadence_seconds(policy, 1.0, 50.0, 100.0, step_seconds)

    assert cadence(EverySeconds(60) | OnStop() | InitTimeInterval(factor=4)) == 60
    assert cadence(EverySeconds(6)) == 50
    assert cadence(InitTimeInterval(factor=4)) == 400
    assert cadence(EverySteps(100), 2.0) == 200
    assert cadence(EverySteps(100) | EverySeconds(700)) == 700
    assert cadence(DalyInterval(mtbf_seconds=1e9, max_seconds=900)) == 900
    for policy in (EverySteps(100), OnStop() | AtStep(5), None):
        assert cadence(policy) is None


def test_a_configuration_is_planned_at_its_own_interval(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(CONFIG)
    arguments = ["plan", "--config", "run.toml", "--tier", "a=2GB/s"]

    def saves(*changes):
        (tier,) = planned([*arguments, *changes], capsys)["tiers"]
        return int(tier["saves"])

    assert saves() == 2880  # four times a restart, and at least every 15 minutes
    assert saves("--set=checkpoint.every_seconds=60") == 43_200
    assert saves("--set=checkpoint.every_steps=10", "--step=30s") == 8640
    assert saves("--step=1h") == 720  # no more often than steps
    assert main([*arguments, "--set=checkpoint.every_seconds=60", "--set=checkpoint.every_steps=10"]) == 0
    told = capsys.readouterr().out
    assert "kept and disk are by the configuration, which saves by EverySeconds(seconds=60.0)\n" in told
    assert "checkpoint.every_steps is left out: say what a step takes, as in --step 2s" in told
