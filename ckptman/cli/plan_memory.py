"""`ckptman plan` with checkpoints in memory: its options, what they come to, and what is printed of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from ckptman.cli import console
from ckptman.cli.options import parse_rate, parse_seconds, parse_share, parse_size
from ckptman.errors import ConfigError
from ckptman.forecast.failure_costs import (
    DISK_ALONE,
    SURVIVED,
    SURVIVED_SOURCE,
    WITH_MEMORY,
    Nodes,
    failure_figures,
    node_figures,
)
from ckptman.forecast.figures import Figure
from ckptman.forecast.save_costs import Life, Saving
from ckptman.policies.memory_tier import MemoryTier
from ckptman.policies.retention_rules import size_text
from ckptman.policies.save_policies import EverySeconds, EverySteps, SavePolicy

_EXCHANGE_SOURCE = "rate assumed, TCP over one network of 100 Gbit/s at less than half; yours: --exchange"
_HEADERS = ("after a failure", "interval", "lost per failure", "restart", "costs", "goodput")


@dataclass(frozen=True)
class MemoryOptions:
    """Options as they were typed; None: left out."""

    memory: bool
    memory_interval: str | None
    copies: int | None
    exchange: str | None
    host_memory: str | None
    restart_in_place: str | None
    survived: float | None

    @property
    def wanted(self) -> bool:
        """Whether any of them is given."""
        values = (getattr(self, each.name) for each in fields(self) if each.name != "memory")
        return self.memory or any(each is not None for each in values)


@dataclass(frozen=True)
class MemoryPlan:
    """What checkpoints in memory come to. `figures`: what they take, by name; `ways`: what a failure costs by each way
    to go on; `host_bytes`: of a node, if they are given."""

    figures: dict[str, Figure]
    ways: dict[str, list[Figure]]
    host_bytes: int | None


def memory_plan(
    written: MemoryOptions,
    mesh: tuple[int, int],
    saving: Saving,
    life: Life,
    disk: Mapping[str, Figure],
    step_seconds: float | None,
    tier: MemoryTier | None,
) -> MemoryPlan | None:
    """Return what options come to; None: none is given. `mesh`: nodes, and ranks of each; `disk`: figures of the tier;
    `tier`: that of the configuration, for what is left out.

    Raises: ConfigError.
    """
    if not written.wanted and tier is None:
        return None
    tier = tier or MemoryTier()
    if saving.blocking:
        raise ConfigError("--blocking leaves no private copy that could become a checkpoint in memory: leave it out")
    rate, source = parse_rate("--exchange", written.exchange or "5GB/s"), "" if written.exchange else _EXCHANGE_SOURCE
    nodes = Nodes(*mesh, rate, tier.copies if written.copies is None else written.copies, source)
    policy = _policy(written.memory_interval) or tier.policy
    if isinstance(policy, EverySteps) and step_seconds is None:
        raise ConfigError(f"saves to memory go by steps, {policy!r}: say what a step takes, as in --step 2s")
    figures = node_figures(nodes, saving, policy, step_seconds)
    share = SURVIVED if written.survived is None else parse_share("--survived", written.survived)
    figures.append(
        Figure("survived", share, "share", "of the failures", SURVIVED_SOURCE if written.survived is None else "")
    )
    by_name = {each.name: each for each in figures}
    in_place = written.restart_in_place
    seconds = None if in_place is None else parse_seconds("--restart-in-place", in_place)
    host = written.host_memory
    host_bytes = None if host is None else parse_size("--host-memory", host, needs_unit=True)
    return MemoryPlan(by_name, failure_figures(disk, by_name, life, seconds, share), host_bytes)


def memory_lines(made: MemoryPlan) -> Iterator[str]:
    """Yield what a failure costs by each way to go on, and whether a node has the memory."""
    cells = [(name, *(each.text for each in figures)) for name, figures in made.ways.items()]
    yield from console.table(_HEADERS, cells, right=" ".join(_HEADERS[1:]))
    text = {name: each.text for name, each in made.figures.items()}
    lost = int(made.figures["copies"].value) - 1
    survives = f"the loss of any {'one node' if lost == 1 else f'{lost} nodes'}" if lost else "that of processes alone"
    yield (
        f"in memory: every {text['interval']}, stalls {text['stalled']} of the time, counts after "
        f"{text['counts_after']}; survives {survives}: {text['survived']} of the failures are taken to be no worse"
    )
    needed, host = made.figures["of_a_node"], made.host_bytes
    if host is None:
        yield f"memory of a node for it: {needed.text}"
    elif needed.value > host:
        yield f"memory of a node for it: {needed.text}, which does not fit in {size_text(host)}"
    else:
        more = "; /dev/shm has half of that, unless your site says otherwise" if needed.value > host / 2 else ""
        yield f"memory of a node for it: {needed.text} of {size_text(host)}{more}"
    good = {name: next(each.value for each in figures if each.name == "goodput") for name, figures in made.ways.items()}
    if good[WITH_MEMORY] < good[DISK_ALONE]:
        yield (
            "with memory alone less of the time is training that lasts than with disk alone: saves to disk are "
            "frequent here, and what a failure costs is the restart"
        )


def _policy(written: str | None) -> SavePolicy | None:
    """Parse how often is saved to memory: `30s`, `20steps`. Raises: ConfigError."""
    if written is None:
        return None
    if (steps := re.fullmatch(r"\s*([0-9]{1,12})\s*steps?\s*", written)) is None:
        return EverySeconds(parse_seconds("--memory-interval", written))
    return EverySteps(int(steps[1]))
