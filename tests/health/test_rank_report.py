"""What thousands of ranks say comes to a few lines of the journal, and the one that holds them up is named."""

import json
import random

from ckptman.health.rank_report import RankHealth, breaches_over_ranks, exceeding, over_ranks, stragglers, usual_seconds
from ckptman.policies.health import FIGURES, HealthBreach, HealthThresholds

DEFAULT = HealthThresholds()


def ranks(count, seed=1, **of_one):
    """Healthy ranks with steps of a second; `of_one`: what is different on some, by `rN`."""
    chance, found = random.Random(seed), []
    for rank in range(count):
        work = chance.gauss(0.5, 0.01)
        figures = {"utilisation": 0.97, "clock": chance.gauss(0.9, 0.015)}
        fields = {"step_seconds": 1.0, "work_seconds": work, "loader_seconds": 0.01, "samples": 300, "figures": figures}
        found.append(RankHealth(rank, f"node{rank // 8:04}", **{**fields, **of_one.get(f"r{rank}", {})}))
    return found


def test_a_straggler_is_named_and_no_other_rank():
    assert stragglers(ranks(64), DEFAULT) == []
    [found] = stragglers(ranks(64, r13={"work_seconds": 0.75}), DEFAULT)
    assert (found.rank, found.node, found.of) == (13, "node0001", "work")
    assert 0.2 < found.behind < 0.3
    assert str(found).startswith(
        "rank 13 on node0001 is a straggler: its own work takes 0.75 s a step, the median rank 0.5"
    )
    [slow] = stragglers(ranks(64, r7={"figures": {"utilisation": 1.0, "clock": 0.6}}), DEFAULT)
    assert (slow.rank, slow.of) == (7, "clock")
    assert "its GPU runs at 60% of its clock, that of the median rank at" in str(slow)
    assert stragglers(ranks(64, r13={"work_seconds": 0.75}), HealthThresholds(straggler_share=None)) == []
    assert stragglers(ranks(64, r13={"work_seconds": 0.75}), HealthThresholds(straggler_share=0.3)) == []


def test_a_loader_that_the_gpu_hides_holds_nobody_up():
    late = {"loader_seconds": 0.4}
    assert stragglers(ranks(8, r3=late), DEFAULT) == []
    [found] = stragglers(ranks(8, r3={**late, "figures": {"utilisation": 0.6}}), DEFAULT)
    assert (found.rank, found.of) == (3, "loader")
    # On a CPU the training waits for whatever it waits for.
    [found] = stragglers(
        [RankHealth(r, "n", step_seconds=1.0, loader_seconds=0.4 * (r == 1)) for r in range(2)], DEFAULT
    )
    assert found.rank == 1


def test_one_rank_or_few_steps_make_no_straggler():
    assert stragglers(ranks(1, r0={"work_seconds": 9.0}), DEFAULT) == []
    assert stragglers([RankHealth(rank, "n") for rank in range(4)], DEFAULT) == []
    assert usual_seconds([1.0] * 5) is None
    assert usual_seconds([1.0] * 98 + [60.0, 90.0]) == 1.0
    assert exceeding([1.0, None, 2.0], 1.0, 0.5) == [(2, 2.0, 1.0)]


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
    assert fields["figures"]["utilisation"] == {
        "min": 0.8362,
        "median": 0.9181,
        "max": 1.0,
        "min_rank": 16383,
        "max_rank": 0,
    }
    assert len(json.dumps(fields)) < 3000
    events, counts = breaches_over_ranks(many)
    assert counts == {"utilisation": 16384}
    assert len(events) == 8
    assert events[0]["rank"] == 0
    assert (events[0]["what"], events[0]["since"], events[0]["ended"]) == ("utilisation", 1e9, False)
    assert (
        events[0]["text"]
        == "rank 0 on node0: GPU utilisation 50%, below 70%, in 96% of the samples of 600 s of training"
    )
