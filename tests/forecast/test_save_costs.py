"""What rules keep of a run, as `ckptman plan` counts it, and the room for it."""

import random
from datetime import datetime, timezone

import pytest
import torch

import ckptman
from ckptman.errors import ConfigError
from ckptman.forecast.save_costs import tier_figures
from ckptman.policies.retention_by_time import KeepDaily, KeepHourly, KeepMonthly, KeepWeekly, KeepWithin
from ckptman.policies.retention_plan import plan
from ckptman.policies.retention_rules import AtMost, KeepAny, KeepBest, KeepEvery, KeepLast, KeepSteps, Record
from ckptman.storage.catalog.catalog import Catalog
from tests.helpers.planned_run import GB, scenario

HOUR, DAY = 3600.0, 86_400.0
QUARTER = {"mtbf_seconds": 1e9}
"""Failures are so rare that a run saves every 15 minutes."""


def disk(policy, seconds, step_seconds=None, **changes):
    """What the rules keep of a run of so many seconds, and how many checkpoints there are at once."""
    planned = scenario(run_seconds=seconds, retention=policy, step_seconds=step_seconds, **{**QUARTER, **changes})
    figures = tier_figures(planned, planned.tiers[0])
    assert figures["interval"].value == 900 or changes
    return figures["kept"].value, figures["disk"].value / (64 * GB), figures["disk"].formula


@pytest.mark.parametrize(
    ("policy", "seconds", "step_seconds"),
    [
        (KeepLast(1200), 30 * DAY, 2.0),
        (KeepWithin(60 * DAY), 90 * DAY, 2.0),
        (KeepLast(5) | KeepEvery(1000), 30 * DAY, 2.0),
        (KeepEvery(3), DAY, 10.0),  # more multiples than saves
        (KeepLast(3) | KeepEvery(100) | KeepWithin(3 * HOUR), DAY, 30.0),
        (KeepSteps(90, 900, 905, 10**9) | KeepLast(2), DAY, 10.0),
        (KeepLast(9), 1000.0, 10.0),
    ],
)
def test_kept_is_what_the_rules_keep_of_every_save(policy, seconds, step_seconds):
    steps = {round(time / step_seconds): time for time in range(900, int(seconds) + 1, 900)}
    if "905" in str(policy):  # no save falls on it, so it is an additional one
        steps[905] = 9050
    records = [Record(step, number, steps[step], 1, {}) for number, step in enumerate(sorted(steps))]
    kept, _, _ = disk(policy, seconds, step_seconds)
    assert kept == sum(verdict.keep for verdict in plan(records, policy))


@pytest.mark.parametrize("seed", range(6))
def test_hardly_any_start_in_the_calendar_keeps_more(seed):
    print(f"seed {seed}")
    generator = random.Random(seed)
    kinds = (KeepHourly, KeepDaily, KeepWeekly, KeepMonthly, KeepLast)
    rules = [kind(generator.randint(1, 12)) for kind in kinds]
    policy = KeepAny(tuple(generator.sample(rules, generator.randint(1, 4))))
    seconds, interval = generator.uniform(1, 70) * DAY, generator.choice([2.0, 7.0, 30.0]) * HOUR
    found, _, _ = disk(policy, seconds, step_seconds=interval)
    most = 0
    for day in range(120):
        begun = datetime(2026, 1, 1, tzinfo=timezone.utc).timestamp() + day * DAY + generator.uniform(0, DAY)
        times = [begun + number * interval for number in range(1, int(seconds / interval) + 1)]
        records = [Record(number, number, time, 1, {}) for number, time in enumerate(times)]
        most = max(most, sum(verdict.keep for verdict in plan(records, policy)) if records else 1)
    assert most - 2 <= found <= most + 1, policy


def test_each_metric_has_its_own_best_and_months_are_counted_from_a_bad_day():
    month = 30 * DAY
    assert disk(KeepLast(3) | KeepBest("loss", 2) | KeepBest("acc", 2, "max"), month)[0] == 7
    assert disk(KeepLast(3) | KeepBest("loss", 2) | KeepBest("loss", 1), month)[0] == 5
    assert disk(KeepLast(3) | KeepBest("loss", 9_999), month)[0] == 2880
    assert disk(KeepMonthly(12), month)[0] == 3  # 31 January to 1 March
    assert disk(KeepWeekly(10), month)[0] == 6
    assert disk(KeepDaily(7) | KeepWeekly(4), month)[0] == 10


def test_what_is_there_besides_the_kept_is_counted():
    words = "(1 by the rules + 3 that are verified, resumed from or being saved) x 64 GB"
    assert disk(KeepLast(1), DAY) == (1, 4, words)
    assert disk(KeepWithin(9 * DAY), DAY)[:2] == (96, 96)
    assert disk(None, DAY) == (96, 96, "96 x 64 GB")
    # A limit makes room for those that no rule may remove, and afterwards for the one being saved.
    assert disk(KeepLast(50) & AtMost(bytes=640 * GB), DAY)[:2] == (10, 11)
    assert disk(KeepLast(9) & AtMost(bytes=640 * GB), DAY)[:2] == (9, 11)
    assert disk(KeepLast(50) & AtMost(bytes=1), DAY)[:2] == (1, 4)
    assert disk(AtMost(bytes=640 * GB), DAY)[:2] == (10, 11)
    assert disk(KeepLast(2), 1000.0)[:2] == (1, 1)


@pytest.mark.parametrize(("policy", "saves"), [(KeepLast(1), 1_000_001), (KeepDaily(1), 71_429)])
def test_too_many_saves_are_refused_with_a_remedy(policy, saves):
    with pytest.raises(ConfigError, match=f"{saves:,} saves are too many .*: give a shorter --length"):
        disk(policy, 900 * saves)


def test_a_resumed_run_has_no_more_than_is_planned(tmp_path):
    root, state = tmp_path / "run", {"n": {"n": torch.zeros(4)}}
    rules = {"save_policy": ckptman.EverySteps(1), "retention": KeepLast(1)}
    with ckptman.Checkpointer(root, state, **rules) as checkpointer:
        checkpointer.restore()
        checkpointer.step(1)
    most = 0
    with ckptman.Checkpointer(root, state, **rules) as checkpointer:
        for step in range(checkpointer.restore() + 1, 8):
            checkpointer.step(step)
            most = max(most, len(Catalog(root).complete()))
    assert 2 <= most <= disk(KeepLast(1), DAY)[1]
