"""What thousands of ranks say comes to a few lines of the journal, and the one that holds them up is named."""

import json
import random

import pytest

from ckptman.policies.health import FIGURES, HealthBreach, HealthThresholds
from ckptman.runtime.health.rank_report import (
    RankHealth,
    breaches_over_ranks,
    over_ranks,
    stragglers,
    usual_seconds,
)


def ranks(count, seed=1, **of_one):
    """Healthy ranks with steps of a second; `of_one`: figures that differ on some ranks, by `rN`."""
    chance, found = random.Random(seed), []
    for rank in range(count):
        figures = {
            "step_seconds": 1.0,
            "work_seconds": chance.gauss(0.5, 0.01),
            "loader_seconds": 0.01,
            "utilisation": 0.97,
            "clock": chance.gauss(0.9, 0.015),
        }
        figures |= of_one.get(f"r{rank}", {})
        found.append(RankHealth(rank, f"node{rank // 8:04}", samples=300, figures=figures))
    return found


LATE, SLOWED = {"loader_seconds": 0.4}, {"clock": 0.6}
SLOW = ranks(64, r13={"work_seconds": 0.75})


@pytest.mark.parametrize(
    ("found", "thresholds", "named"),
    [
        (ranks(64), {}, []),
        (SLOW, {}, [(13, "work")]),
        (SLOW, {"straggler_share": None}, []),
        (SLOW, {"straggler_share": 0.3}, []),
        (ranks(64, r7=SLOWED), {}, [(7, "clock")]),
        # A loader that the GPU hides holds nobody up. On a CPU the training waits for whatever it waits for.
        (ranks(8, r3=LATE), {}, []),
        (ranks(8, r3={**LATE, "utilisation": 0.6}), {}, [(3, "loader")]),
        (
            [RankHealth(r, "n", figures={"step_seconds": 1.0, "loader_seconds": 0.4 * r}) for r in range(2)],
            {},
            [(1, "loader")],
        ),
        # One rank or few steps make no straggler.
        (ranks(1, r0={"work_seconds": 9.0}), {}, []),
        ([RankHealth(rank, "n") for rank in range(4)], {}, []),
    ],
)
def test_a_straggler_is_named_and_no_other_rank(found, thresholds, named):
    assert [(each.rank, each.of) for each in stragglers(found, HealthThresholds(**thresholds))] == named


def test_what_is_said_of_a_straggler():
    (found,) = stragglers(SLOW, HealthThresholds())
    assert 0.2 < found.behind < 0.3
    told = "rank 13 on node0001 is a straggler: its own work takes 0.75 s a step, the median rank 0.5"
    assert str(found).startswith(told)
    (slow,) = stragglers(ranks(64, r7=SLOWED), HealthThresholds())
    assert "its GPU runs at 60% of its clock, that of the median rank at" in str(slow)


def test_the_usual_time_of_a_step_leaves_out_the_longest():
    assert usual_seconds([1.0] * 5) is None
    assert usual_seconds([1.0] * 98 + [60.0, 90.0]) == 1.0


def test_a_line_is_bounded_however_many_ranks_there_are():
    breach = HealthBreach("utilisation", "problem", 0.5, 0.7, 1e9, 600.0, 0.96, "GPU utilisation 50%, below 70%")
    figures = {name: random.Random(2).uniform(1e9, 2e9) for name in FIGURES}
    many = [
        RankHealth(
            rank, f"node{rank // 8}", 600.0, 120, 3, {**figures, "utilisation": 1 - rank / 1e5}, breaches=(breach,)
        )
        for rank in range(16384)
    ]
    fields = over_ranks(many)
    expected = {"min": 0.8362, "median": 0.9181, "max": 1.0, "min_rank": 16383, "max_rank": 0}
    assert fields["figures"]["utilisation"] == expected
    assert len(json.dumps(fields)) < 3000
    events, counts = breaches_over_ranks(many)
    assert counts == {"utilisation": 16384}
    assert len(events) == 8
    assert events[0]["rank"] == 0
    assert (events[0]["what"], events[0]["since"], events[0]["ended"]) == ("utilisation", 1e9, False)
    told = "rank 0 on node0: GPU utilisation 50%, below 70%, in 96% of the samples of 600 s of training"
    assert events[0]["text"] == told
