"""A chain whose attempts have 2 nodes, 1 node and 2 nodes: each goes on from the state that the last one left."""

import json
from pathlib import Path

import pytest

from tests.helpers.scenarios import warn
from tests.slurm.bundled import STEPS, begin, script, steps, trains

DIGESTS = Path(__file__).with_name("digests.py")


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_two_nodes_then_one_then_two(lab, tokens, tmp_path):
    told = tmp_path / "told.jsonl"
    scene = begin(lab, script(tmp_path, tokens, program=f"{DIGESTS} {told}"))
    for number, nodes in ((1, 1), (2, 2)):
        job = trains(scene, tmp_path, number)
        scene.until(lambda number=number: len(scene.chain.jobs()) > number, 30, "no successor")
        successor = f"JobId={scene.chain.jobs()[number].job_id}"
        lab.ask("scontrol", "update", successor, f"NumNodes={nodes}", f"NumTasks={2 * nodes}")
        warn(scene, job)
        scene.until_ended(number, 60)
    scene.finishes(120)
    fresh, *events = [json.loads(line) for line in told.read_text().splitlines()]
    assert (fresh["event"], fresh["step"], fresh["ranks"]) == ("restored", 0, 4)
    assert [(each["event"], each["ranks"]) for each in events] == [
        ("stopped", 4),
        ("restored", 2),
        ("stopped", 2),
        ("restored", 4),
    ]
    for stopped, restored in (events[:2], events[2:]):
        assert stopped["step"] == restored["step"] > 0
        assert stopped["digest"] == restored["digest"]
    assert len({each["digest"] for each in (fresh, *events)}) == 3, "it tells one state from another"
    assert [step for step, _ in steps(tmp_path)] == list(range(1, STEPS + 1))
