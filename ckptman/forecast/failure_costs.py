"""What a failure costs by where training goes on from: the disk, memory, or memory in the same allocation; and what
checkpoints in memory take of each node. Each number comes with its formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckptman.forecast.disk_forecast import cadence_seconds
from ckptman.forecast.figures import Figure
from ckptman.forecast.goodput import Costs, InMemory, goodput_with_memory, shares
from ckptman.forecast.save_costs import Life, Saving
from ckptman.policies.memory_tier import CostShare
from ckptman.policies.parameters import check_count, check_positive
from ckptman.policies.retention_rules import size_text
from ckptman.policies.save_policies import SavePolicy

SLOTS = 3
"""Of a rank: the checkpoint that counts, the next one, and what is being written to disk."""
RECEIVED = 2
"""Of a part that a node keeps for another: the checkpoint that counts, and the next one."""
SURVIVED = 0.9
SURVIVED_SOURCE = (
    "assumed: of the 419 interruptions of Llama 3 (arXiv 2407.21783), 8.4 % came from switches and cables, which may "
    "take several nodes; yours: --survived"
)
DISK_ALONE, WITH_MEMORY, IN_PLACE = "disk alone", "with memory", "restarts in place"


@dataclass(frozen=True)
class Nodes:
    """What saves to memory.

    Args:
        count: of nodes.
        ranks: of one node.
        exchange_bytes_per_second: what a node sends to its peers.
        copies: nodes that each part lies on.
        source: whose number the rate is.
    """

    count: int
    ranks: int
    exchange_bytes_per_second: float
    copies: int = 2
    source: str = ""

    @property
    def kept(self) -> int:
        """On so many nodes each part lies: no more than there are."""
        return min(self.copies, self.count)


def node_figures(nodes: Nodes, saving: Saving, policy: SavePolicy, step_seconds: float | None) -> list[Figure]:
    """Return what checkpoints in memory take: of a node, of its network, of the training; and how often they are made.

    Raises: IntervalError.
    """
    check_count("plan", "--copies", nodes.copies)
    check_positive("plan", "--exchange", nodes.exchange_bytes_per_second)
    part, others = saving.largest_bytes, nodes.kept - 1
    of_node = nodes.ranks * part
    stall = part / saving.staging_bytes_per_second
    exchange = others * of_node / nodes.exchange_bytes_per_second
    interval = cadence_seconds(policy, stall, stall + exchange, 0.0, step_seconds)
    assert interval is not None
    interval = max(interval, step_seconds or 0.0)
    size, rate = size_text(part), size_text(nodes.exchange_bytes_per_second)
    told = "a stall is 1 % of it" if policy == CostShare() else f"{policy!r}"
    times = f"{SLOTS} slots + {RECEIVED} x {others} received"
    staged = f"private copy: {size} of a rank / {size_text(saving.staging_bytes_per_second)}/s"
    return [
        Figure("copies", nodes.kept, "count", f"--copies {nodes.copies}, {nodes.count:,} nodes"),
        Figure(
            "of_a_node",
            (SLOTS + RECEIVED * others) * of_node,
            "bytes",
            f"({times}) x {nodes.ranks} ranks x {size}",
            "MemorySaves",
        ),
        Figure("stall", stall, "seconds", staged, saving.source),
        Figure("exchange", exchange, "seconds", f"{others} x {nodes.ranks} ranks x {size} / {rate}/s", nodes.source),
        Figure("counts_after", stall + exchange, "seconds", "stall + exchange"),
        Figure("interval", interval, "seconds", f"{told}, no shorter than a save takes until it counts"),
        Figure("stalled", stall / interval, "share", "stall / interval"),
    ]


def failure_figures(
    disk: Mapping[str, Figure],
    memory: Mapping[str, Figure],
    life: Life,
    in_place_seconds: float | None,
    survived: float,
) -> dict[str, list[Figure]]:
    """Return what a failure costs by each way to go on: the training that it loses, half an interval and what a save
    takes in the mean; and what passes until training goes on, to find out, in the queue, to start and to load.

    Args:
        disk: figures of the tier that is saved to.
        memory: what `node_figures` gave.
        life: with the time in the queue, and to find out.
        in_place_seconds: from a fault to the first new step in the same allocation; None: as the start of a run.
        survived: the share of failures that what is in memory survives.
    """
    mean, save, load = life.mtbf_seconds, disk["save"], memory["stall"]
    costs = Costs(disk["stall"].value, save.value, disk["restart"].value)
    flushed_how = f"flush {save.text} + {life.restart_text(disk['load'].value)}"
    in_place_how = "as given"
    if in_place_seconds is None:
        in_place_seconds = life.notice_seconds + life.init_seconds + load.value
        in_place_how = f"{replace(life, queue_seconds=0.0).restart_text(load.value)}; yours: --restart-in-place"
    found = {DISK_ALONE: _way(disk["interval"], disk["lost_per_failure"], disk["restart"], disk["goodput"])}
    ways = ((WITH_MEMORY, costs.restart_seconds + save.value, flushed_how), (IN_PLACE, in_place_seconds, in_place_how))
    for name, seconds, how in ways:
        in_memory = Costs(memory["stall"].value, memory["counts_after"].value, seconds)
        near = InMemory(in_memory, memory["interval"].value, flushed=name == WITH_MEMORY)
        lost = shares(near.interval_seconds, near.costs, mean).lost_per_failure_seconds
        good = goodput_with_memory(disk["interval"].value, costs, near, mean, survived)
        found[name] = _way(
            memory["interval"],
            Figure("lost_per_failure", lost, "seconds", "since the last checkpoint in memory that counts"),
            Figure("restart", seconds, "seconds", how),
            Figure(
                "goodput",
                good,
                "share",
                f"{100 * survived:g} % of the failures cost this, the others what they cost with {DISK_ALONE}; stalls "
                f"of both kinds of saves",
                "forecast/goodput.py; ckptman simulate plays it",
            ),
        )
    return found


def _way(interval: Figure, lost: Figure, restart: Figure, goodput: Figure) -> list[Figure]:
    cost = lost.value + restart.value
    words = f"lost {lost.text} + restart {restart.text}"
    return [interval, lost, restart, Figure("cost_per_failure", cost, "seconds", words), goodput]
