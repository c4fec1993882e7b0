"""What a failure costs by each way to go on, and what checkpoints in memory take: as the code that saves takes it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptman.engine.comm.peers import Place, receivers
from ckptman.engine.saving import memory_saves
from ckptman.engine.saving.part_exchange import PartExchange
from ckptman.errors import IntervalError
from ckptman.forecast.failure_costs import (
    DISK_ALONE,
    IN_PLACE,
    RECEIVED,
    SLOTS,
    WITH_MEMORY,
    Nodes,
    failure_figures,
    node_figures,
)
from ckptman.forecast.goodput import Costs, shares
from ckptman.forecast.save_costs import Life, Saving, TierRates, tier_figures
from ckptman.policies import CostShare, EverySeconds, EverySteps
from ckptman.storage.io.durable_files import DISK

GB = 10**9
SAVING = Saving(total_bytes=64 * GB, largest_bytes=2 * GB, staging_bytes_per_second=10e9)
LIFE = Life(init_seconds=600, mtbf_seconds=4 * 3600, notice_seconds=30, queue_seconds=1800)
NODES = Nodes(count=4, ranks=8, exchange_bytes_per_second=4e9)


def by_name(figures):
    return {each.name: each.value for each in figures}


def costs(nodes=NODES, life=LIFE, in_place=None, survived=0.9):
    disk = {each.name: each for each in tier_figures(TierRates("scratch", 1e9, 2e9, "1 GB/s"), SAVING, life)}
    taken = {each.name: each for each in node_figures(nodes, SAVING, CostShare(), None)}
    found = failure_figures(disk, taken, life, in_place, survived)
    return {name: by_name(figures) for name, figures in found.items()}


def test_a_node_needs_what_saves_to_memory_ask_for():
    assert memory_saves.SLOTS == SLOTS
    part, ranks, nodes = 7, 2, 3
    places = [Place(f"n{rank // ranks}") for rank in range(nodes * ranks)]
    for copies in (1, 2, 3):
        peers = receivers(places, copies)
        of_rank = []
        for rank in range(ranks):
            exchange = PartExchange(SimpleNamespace(rank=rank), Path("/nowhere"), peers, DISK)
            of_rank.append(SLOTS * part + exchange.needs_bytes([part] * len(places)))
        saving = Saving(part * len(places), part, 1.0)
        told = by_name(node_figures(Nodes(nodes, ranks, 1.0, copies), saving, CostShare(), None))
        assert told["of_a_node"] == sum(of_rank) == (SLOTS + RECEIVED * (copies - 1)) * ranks * part


def test_the_interval_in_memory_costs_one_percent_and_is_no_shorter_than_the_exchange():
    told = by_name(node_figures(NODES, SAVING, CostShare(), None))
    assert (told["stall"], told["exchange"], told["counts_after"]) == (0.2, 4.0, 4.2)
    assert (told["interval"], told["stalled"]) == (20.0, 0.01)
    slow = Nodes(4, 8, exchange_bytes_per_second=0.5e9)
    assert by_name(node_figures(slow, SAVING, CostShare(), None))["interval"] == pytest.approx(32.2)
    assert by_name(node_figures(NODES, SAVING, EverySeconds(60), None))["interval"] == 60
    assert by_name(node_figures(NODES, SAVING, EverySteps(10), 2.5))["interval"] == 25
    assert by_name(node_figures(NODES, SAVING, EverySteps(1), 2.5))["interval"] == pytest.approx(4.2)
    assert by_name(node_figures(NODES, SAVING, CostShare(), 300.0))["interval"] == 300  # a step
    alone = by_name(node_figures(Nodes(1, 8, 4e9), SAVING, CostShare(), None))
    assert (alone["copies"], alone["exchange"], alone["of_a_node"]) == (1, 0, SLOTS * 8 * 2 * GB)


def test_what_a_failure_costs_is_half_an_interval_and_what_passes_until_it_trains_again():
    found = costs()
    disk, memory, in_place = (found[name] for name in (DISK_ALONE, WITH_MEMORY, IN_PLACE))
    save, load, stall = 64, 32, 0.2
    assert disk["restart"] == 30 + 1800 + 600 + load
    assert memory["restart"] == 30 + save + 1800 + 600 + load
    assert in_place["restart"] == 30 + 600 + stall
    assert disk["lost_per_failure"] == pytest.approx(disk["interval"] / 2 + save, rel=0.02)
    for each in (memory, in_place):
        assert each["interval"] == 20
        assert each["lost_per_failure"] == pytest.approx(20 / 2 + 4.2, rel=0.02)
    for each in found.values():
        assert each["cost_per_failure"] == each["lost_per_failure"] + each["restart"]
    assert costs(in_place=45)[IN_PLACE]["restart"] == 45
    assert costs(in_place=45)[IN_PLACE]["goodput"] > in_place["goodput"] > disk["goodput"]


def test_disk_alone_is_what_the_tier_says_with_the_queue():
    figures = by_name(tier_figures(TierRates("scratch", 1e9, 2e9, "1 GB/s"), SAVING, LIFE))
    disk = costs()[DISK_ALONE]
    assert disk["goodput"] == figures["goodput"]
    assert disk["goodput"] == shares(figures["interval"], Costs(0.2, 64, 2462), LIFE.mtbf_seconds).good
    # Rules that go by what a run measures of its start know nothing of the queue.
    without = by_name(tier_figures(TierRates("scratch", 1e9, 2e9, "1 GB/s"), SAVING, Life(600, 4 * 3600)))
    for name in ("interval_by_init", "interval_by_daly", "interval", "lost_per_failure"):
        assert figures[name] == pytest.approx(without[name])
    assert figures["goodput"] < without["goodput"]


@settings(max_examples=60, deadline=None, print_blob=True)
@given(
    life=st.builds(
        Life, st.just(600), st.floats(60, 1e7), notice_seconds=st.floats(0, 600), queue_seconds=st.floats(0, 1e5)
    ),
    in_place=st.none() | st.floats(0, 1e4),
    survived=st.floats(0, 1),
    copies=st.integers(1, 4),
)
def test_shares_are_shares(life, in_place, survived, copies):
    for each in costs(Nodes(4, 8, 4e9, copies), life, in_place, survived).values():
        assert 0 <= each["goodput"] <= 1
        assert each["lost_per_failure"] >= 0
        assert each["restart"] >= 0


@pytest.mark.parametrize(
    ("exchange", "copies", "told"),
    [
        (1e9, 0, "--copies must be a whole number of at least 1"),
        (0.0, 2, "--exchange must be a finite number above 0"),
    ],
)
def test_what_cannot_be(exchange, copies, told):
    with pytest.raises(IntervalError, match=told):
        node_figures(Nodes(2, 1, exchange, copies), SAVING, CostShare(), None)
