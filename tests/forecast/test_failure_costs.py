"""What a failure costs by each way to resume, and what checkpoints in memory take: as the code that saves takes it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptman.engine.comm.peers import Place, receivers
from ckptman.engine.saving import memory_saves
from ckptman.engine.saving.part_exchange import PartExchange
from ckptman.forecast.failure_costs import (
    DISK_ALONE,
    IN_PLACE,
    RECEIVED,
    SLOTS,
    WITH_MEMORY,
    failure_figures,
    memory_figures,
)
from ckptman.forecast.goodput import Costs, shares
from ckptman.forecast.save_costs import tier_figures
from ckptman.forecast.scenario import Memory, Model
from tests.helpers.planned_run import GB, TIER, scenario

MEMORY = Memory(None, 2, 4e9, None, 0.9, None)


def by_name(figures):
    return {each.name: each.value for each in figures}


def in_memory(memory=MEMORY, **changes):
    return by_name(memory_figures(scenario(**changes), memory).values())


def costs(memory=MEMORY, **changes):
    planned = scenario(notice_seconds=30.0, **{"queue_seconds": 1800.0, **changes})
    found = failure_figures(planned, memory, tier_figures(planned, TIER), memory_figures(planned, memory))
    return {name: by_name(figures) for name, figures in found.items()}


def test_a_node_needs_what_saves_to_memory_ask_for():
    assert memory_saves.SLOTS == SLOTS
    part, ranks, nodes = 7, 2, 3
    places = [Place(f"n{rank // ranks}") for rank in range(nodes * ranks)]
    for copies in (1, 2, 3):
        peers = receivers(places, copies)
        of_rank = []
        for rank in range(ranks):
            exchange = PartExchange(SimpleNamespace(rank=rank), Path("/nowhere"), peers)
            of_rank.append(SLOTS * part + exchange.needs_bytes([part] * len(places)))
        model = Model("", part * len(places), part * len(places), 0)
        told = in_memory(Memory(None, copies, 1.0, None, 0.9, None), model=model, nodes=nodes, gpus_per_node=ranks)
        assert told["of_a_node"] == sum(of_rank) == (SLOTS + RECEIVED * (copies - 1)) * ranks * part


def test_the_interval_in_memory_costs_one_percent_and_is_no_shorter_than_the_exchange():
    told = in_memory()
    assert (told["stall"], told["exchange"], told["counts_after"]) == (0.2, 4.0, 4.2)
    assert (told["interval"], told["stalled"]) == (20.0, 0.01)
    assert in_memory(Memory(None, 2, 0.5e9, None, 0.9, None))["interval"] == pytest.approx(32.2)
    assert in_memory(Memory(60.0, 2, 4e9, None, 0.9, None))["interval"] == 60
    assert in_memory(Memory(2.5, 2, 4e9, None, 0.9, None))["interval"] == pytest.approx(4.2)
    assert in_memory(step_seconds=300.0)["interval"] == 300
    alone = in_memory(model=Model("", 16 * GB, 16 * GB, 0), nodes=1)
    assert (alone["copies"], alone["exchange"], alone["of_a_node"]) == (1, 0, SLOTS * 8 * 2 * GB)


def test_a_failure_costs_half_an_interval_and_what_passes_until_it_trains_again():
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
    faster = costs(Memory(None, 2, 4e9, 45.0, 0.9, None))[IN_PLACE]
    assert faster["restart"] == 45
    assert faster["goodput"] > in_place["goodput"] > disk["goodput"]


def test_the_queue_costs_goodput_and_changes_no_rule_that_a_run_measures_for_itself():
    planned = {queue: tier_figures(scenario(queue_seconds=queue), TIER) for queue in (0.0, 1830.0)}
    without, figures = (by_name(each.values()) for each in planned.values())
    assert costs()[DISK_ALONE]["goodput"] == figures["goodput"] < without["goodput"]
    assert figures["goodput"] == shares(figures["interval"], Costs(0.2, 64, 2462), 4 * 3600).good
    for name in ("interval_by_init", "interval_by_daly", "interval", "lost_per_failure"):
        assert figures[name] == without[name]


@settings(max_examples=60, deadline=None, print_blob=True)
@given(
    mtbf=st.floats(60, 1e7),
    queue=st.floats(0, 1e5),
    memory=st.builds(
        Memory,
        st.none() | st.floats(1, 1e4),
        st.integers(1, 4),
        st.just(4e9),
        st.none() | st.floats(0, 1e4),
        st.floats(0, 1),
        st.none(),
    ),
)
def test_shares_are_shares(mtbf, queue, memory):
    for each in costs(memory, mtbf_seconds=mtbf, queue_seconds=queue).values():
        assert 0 <= each["goodput"] <= 1
        assert each["lost_per_failure"] >= 0
        assert each["restart"] >= 0
