"""What checkpoints in memory take of each node, and what a failure costs when training resumes from disk, from memory,
or from memory in the same allocation.
"""

from __future__ import annotations

from ckptman.forecast.figures import Figure
from ckptman.forecast.goodput import Costs, InMemory, goodput_with_memory, shares
from ckptman.forecast.save_costs import restart_of
from ckptman.forecast.scenario import Memory, Scenario
from ckptman.policies.retention_rules import size_text
from ckptman.policies.tiers import SHARE

SLOTS = 3
"""Of a rank: the checkpoint that counts, the next one, and the one being written to disk."""
RECEIVED = 2
"""Of a part that a node keeps for another: the checkpoint that counts, and the next one."""
SURVIVED = 0.9
_SURVIVED_SOURCE = (
    "assumed: of the 419 interruptions of Llama 3 (arXiv 2407.21783), 8.4 % came from switches and cables, which may "
    "take several nodes; yours: --survived"
)
DISK_ALONE, WITH_MEMORY, IN_PLACE = "disk alone", "with memory", "restarts in place"


def memory_figures(scenario: Scenario, memory: Memory) -> dict[str, Figure]:
    """Return what checkpoints in memory take of a node, its network and training, and how often they are made."""
    part, ranks, staging = scenario.rank_bytes, scenario.gpus_per_node, scenario.staging_bytes_per_second
    copies = min(memory.copies, scenario.nodes)
    others = copies - 1
    size, rate = size_text(part), memory.exchange_bytes_per_second
    stall, exchange = part / staging, others * ranks * part / rate
    wanted, told = memory.interval_seconds, "--memory-interval"
    if wanted is None:
        wanted, told = stall / SHARE, f"a stall is {100 * SHARE:g} % of it"
    interval = max(wanted, stall + exchange, scenario.step_seconds or 0.0)
    slots = f"({SLOTS} slots + {RECEIVED} x {others} received) x {ranks} ranks x {size}"
    sent = f"{others} x {ranks} ranks x {size} / {size_text(rate)}/s (--exchange)"
    found = [
        Figure("copies", copies, "count", f"--copies {memory.copies}, {scenario.nodes:,} nodes"),
        Figure("of_a_node", (SLOTS + RECEIVED * others) * ranks * part, "bytes", slots),
        Figure("stall", stall, "seconds", f"private copy: {size} of a rank / {size_text(staging)}/s (--staging)"),
        Figure("exchange", exchange, "seconds", sent),
        Figure("counts_after", stall + exchange, "seconds", "stall + exchange"),
        Figure("interval", interval, "seconds", f"{told}, no shorter than a save takes until it counts"),
        Figure("stalled", stall / interval, "share", "stall / interval"),
        Figure("survived", memory.survived, "share", f"of the failures  [{_SURVIVED_SOURCE}]"),
    ]
    return {each.name: each for each in found}


def failure_figures(
    scenario: Scenario, memory: Memory, disk: dict[str, Figure], taken: dict[str, Figure]
) -> dict[str, list[Figure]]:
    """Return what a failure costs by each way to resume: lost training, the restart, and the goodput.

    Args:
        scenario: the run.
        memory: how it saves to memory.
        disk: figures of the tier that is saved to.
        taken: the result of `memory_figures`.
    """
    mean, save, load = scenario.mtbf_seconds, disk["save"], taken["stall"]
    costs = Costs(disk["stall"].value, save.value, disk["restart"].value)
    in_place, how = memory.restart_seconds, "--restart-in-place"
    if in_place is None:
        in_place, how = restart_of(scenario, load.value, queue=False)
    found = {DISK_ALONE: _way(disk["interval"], disk["lost_per_failure"], disk["restart"], disk["goodput"])}
    flushed = f"flush {save.text} + {disk['restart'].formula}"
    ways = ((WITH_MEMORY, costs.restart_seconds + save.value, flushed), (IN_PLACE, in_place, how))
    for name, seconds, parts in ways:
        near = InMemory(Costs(load.value, taken["counts_after"].value, seconds), taken["interval"].value)
        lost = shares(near.interval_seconds, near.costs, mean).lost_per_failure_seconds
        good = goodput_with_memory(disk["interval"].value, costs, near, mean, memory.survived)
        found[name] = _way(
            taken["interval"],
            Figure("lost_per_failure", lost, "seconds", "since the last checkpoint in memory that counts"),
            Figure("restart", seconds, "seconds", parts),
            Figure(
                "goodput", good, "share", f"of {100 * memory.survived:g} % of the failures; the others: {DISK_ALONE}"
            ),
        )
    return found


def _way(interval: Figure, lost: Figure, restart: Figure, goodput: Figure) -> list[Figure]:
    words = f"lost {lost.text} + restart {restart.text}"
    return [interval, lost, restart, Figure("cost_per_failure", lost.value + restart.value, "seconds", words), goodput]
