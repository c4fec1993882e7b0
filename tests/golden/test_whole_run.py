"""One whole run of two ranks: what it notes, in which order, and how often its ranks wait for each other.

These numbers are to go down. One that goes up is a change of what every user waits for.
"""

import json
from collections import Counter

import torch
import torch.distributed as dist

import ckptman
from tests.helpers.ranks import run_ranks

WAITING = ("broadcast_object_list", "all_gather_object", "gather_object", "all_gather", "all_reduce", "barrier")
COLLECTIVES = {
    "attempt 1 opens": 8,
    "attempt 1 restores": 5,
    "step 1": 5,
    "step 2": 7,
    "step 3": 1,
    "step 4": 6,
    "attempt 1 ends": 7,
    "attempt 2 opens": 6,
    "attempt 2 restores": 10,
    "step 5": 5,
    "step 6": 7,
    "attempt 2 ends": 7,
}
SAVES = ["save_begun", "save_durable"]
EVENTS = [
    *("attempt_started", "first_step", *SAVES, *SAVES, "finished"),
    *("attempt_started", "restored", "first_step", *SAVES, "finished"),
]
"""Without `progress`, which comes by the clock."""


def whole_run(root):
    """Two attempts: saves at steps 2 and 4; goes on, and saves at step 6. What each part made, on rank 0."""
    counted, found = Counter(), {}

    def counting(name):
        called = getattr(dist, name)

        def call(*args, **options):
            counted[name] += 1
            return called(*args, **options)

        return call

    def part(name):
        found[name] = sum(counted.values())
        counted.clear()

    real = {name: getattr(dist, name) for name in WAITING}
    for name in WAITING:
        setattr(dist, name, counting(name))
    try:
        for attempt, steps in ((1, (1, 2, 3, 4)), (2, (5, 6))):
            state = {"weight": torch.zeros(10), "step": 0}
            options = {"save_policy": ckptman.EverySteps(2), "async_save": False, "deadline": None, "watchdog": None}
            with ckptman.Checkpointer(root, state, total_steps=6, **options) as checkpointer:
                part(f"attempt {attempt} opens")
                assert checkpointer.restore() == steps[0] - 1
                part(f"attempt {attempt} restores")
                for step in steps:
                    state["weight"] += 1
                    state["step"] = step
                    checkpointer.step(step)
                    part(f"step {step}")
            part(f"attempt {attempt} ends")
    finally:
        for name, called in real.items():
            setattr(dist, name, called)
    return found


def test_what_a_run_notes_and_how_often_its_ranks_wait(tmp_path):
    found, _ = run_ranks(2, whole_run, tmp_path / "run")
    lines = (tmp_path / "run" / ".ckptman" / "journal.jsonl").read_text().splitlines()
    events = [event for line in lines if (event := json.loads(line)["event"]) != "progress"]
    print(found, events, sep="\n")
    assert found == COLLECTIVES
    assert events == EVENTS
