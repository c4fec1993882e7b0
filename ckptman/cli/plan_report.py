"""What `ckptman plan` prints: tables, the advice, every number with its formula, or JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ckptman.cli import console
from ckptman.forecast.failure_costs import DISK_ALONE, WITH_MEMORY, failure_figures, memory_figures
from ckptman.forecast.figures import Figure
from ckptman.forecast.save_costs import BOUND_SECONDS, tier_figures
from ckptman.forecast.scenario import Memory, Scenario, Tier
from ckptman.policies.retention_rules import limited, size_text

Figures = dict[str, Figure]
_SAVES = ("tier", "rate", "save", "stall", "load", "warning", "kept", "disk")
_INTERVALS = ("tier", "by init", "by Daly", "best", "bound", "interval", "lost per failure", "goodput")
_FAILURES = ("after a failure", "interval", "lost per failure", "restart", "costs", "goodput")
_RIGHT = " ".join((*_SAVES[1:], "init", "by", "Daly", "best", "bound", "interval", "restart", "costs", "goodput"))
_DROPPED = ("warning", "rate", "kept", "by init", "by Daly", "bound", "best")
_NAMES = {"by init": "interval_by_init", "by Daly": "interval_by_daly", "best": "interval_best"}
_NAMES |= {"bound": "interval_bound", "lost per failure": "lost_per_failure"}


@dataclass(frozen=True)
class Plan:
    """A scenario and what follows from it. `ways`: the costs of a failure, by the way to resume."""

    scenario: Scenario
    failures: Figure
    host: list[Figure]
    tiers: list[tuple[Tier, Figures]]
    in_memory: Figures = field(default_factory=dict)
    ways: dict[str, list[Figure]] = field(default_factory=dict)

    @property
    def best(self) -> tuple[Tier, Figures]:
        """The tier to save to: of those that outlive a node, if there are any, the one with the highest goodput."""
        return max(self.tiers, key=lambda each: (each[0].lasts, each[1]["goodput"].value))


def plan_of(scenario: Scenario, failures: Figure) -> Plan:
    """Work a scenario out. Raises: ConfigError, IntervalError."""
    ranks, part = scenario.gpus_per_node, scenario.rank_bytes
    words = f"{ranks} GPUs of a node x {part:,} B: their private copies"
    host = [] if scenario.blocking else [Figure("host_copy_of_a_node", ranks * part, "bytes", words)]
    tiers = [(tier, tier_figures(scenario, tier)) for tier in scenario.tiers]
    made = Plan(scenario, failures, host, tiers)
    if scenario.in_memory is None:
        return made
    in_memory = memory_figures(scenario, scenario.in_memory)
    ways = failure_figures(scenario, scenario.in_memory, made.best[1], in_memory)
    return replace(made, in_memory=in_memory, ways=ways)


def lines(made: Plan, explain: bool) -> list[str]:
    """Return the plan for people."""
    scenario = made.scenario
    lines = [f"{console.plain(scenario.model.title)}, {console.count(scenario.gpus, 'GPU')}", ""]
    sizes = [(each.name.replace("_", " "), each.text) for each in (*scenario.size.values(), *made.host)]
    lines += console.table(("checkpoint", "size"), sizes, right="size")
    for headers in (_SAVES, _INTERVALS):
        names = [_NAMES.get(each, each) for each in headers[1:]]
        cells = [(console.plain(tier.name), *(figures[name].text for name in names)) for tier, figures in made.tiers]
        lines += ["", *console.table(headers, cells, right=_RIGHT, drop=_DROPPED)]
    if scenario.in_memory is not None:
        cells = [(name, *(each.text for each in figures)) for name, figures in made.ways.items()]
        lines += ["", *console.table(_FAILURES, cells, right=_RIGHT), *_memory_remarks(made, scenario.in_memory)]
    counted = made.failures.formula.partition("  [")[0]
    lines += ["", f"failures: one in {made.failures.text} ({counted})", *_advice(made)]
    for title, figures in _sections(made) if explain else ():
        named = ((each.name.replace("_", " "), each) for each in figures)
        lines += ["", title, *(f"  {name} = {each.text}: {console.plain(each.formula)}" for name, each in named)]
    return lines


def _sections(made: Plan) -> Iterator[tuple[str, Iterable[Figure]]]:
    yield "checkpoint", (*made.scenario.size.values(), *made.host)
    yield "failures", [made.failures]
    if made.ways:
        yield "in memory", made.in_memory.values()
    for name, figures in made.ways.items():
        yield f"after a failure: {name}", figures
    for tier, by_name in made.tiers:
        yield f"tier {console.plain(tier.name)}", by_name.values()


def as_dict(made: Plan, explain: bool) -> dict[str, Any]:
    """Return the plan for programs: the scenario, and what follows from it."""

    def values(figures: Iterable[Figure]) -> dict[str, Any]:
        return {each.key: {"value": each.value, "formula": each.formula} if explain else each.value for each in figures}

    scenario = made.scenario
    found = asdict(scenario) | {
        "retention": None if scenario.retention is None else str(scenario.retention),
        "checkpoint": values(scenario.size.values()),
        "memory": values(made.host),
        "failures": values([made.failures]),
        "tiers": [{"name": tier.name, **values(figures.values())} for tier, figures in made.tiers],
    }
    if scenario.in_memory is not None:
        found["memory_tier"] = values(made.in_memory.values())
        found["after_a_failure"] = [{"name": name, **values(figures)} for name, figures in made.ways.items()]
    return found


def _advice(made: Plan) -> Iterator[str]:
    """Yield what to do: which tier to save to, how often, and what speaks against each tier."""
    tier, figures = made.best
    if tier.lasts:
        interval = math.ceil(figures["interval"].value)
        where = f"save to {console.plain(tier.name)}: " if len(made.tiers) > 1 else "save "
        yield (
            f"{where}every {interval:,} s, EverySeconds({interval}), and ask Slurm for --signal=USR2@"
            f"{figures['warning'].value:.0f}; {figures['goodput'].text} of the time is training that lasts"
        )
    for tier, figures in made.tiers:
        yield from (f"{console.plain(tier.name)}: {remark}" for remark in _remarks(made, tier, figures))


def _remarks(made: Plan, tier: Tier, figures: Figures) -> Iterator[str]:
    limit = limited(made.scenario.retention)
    interval, best, save = figures["interval"], figures["interval_best"], figures["save"]
    if figures["restart"].value > made.failures.value:
        yield "a restart takes longer than the time between failures: look for their cause, or take fewer GPUs"
    if figures["goodput"].value < 0.99 * figures["goodput_best"].value:
        how = (
            "save in the background (without --blocking)" if made.scenario.blocking else "make the private copy faster"
        )
        yield (
            f"the bound costs more than it is worth: {figures['goodput'].text} of the time is training that lasts at "
            f"{interval.text}, and {figures['goodput_best'].text} at the best interval, {best.text}: {how}, or take "
            f"EverySeconds({math.ceil(best.value)}) and lose more in each failure"
        )
    if limit is not None and figures["disk"].value > limit.bytes:
        yield (
            f"{figures['disk'].text} are there while a save is under way, and --max-bytes is {size_text(limit.bytes)}: "
            f"a limit trims when the save is durable"
        )
    if not tier.lasts:
        yield "memory of a node, and gone with it"
    if save.value > BOUND_SECONDS:
        yield f"a save takes {save.text}, longer than the bound of 15 min: save to a faster tier, and copy from there"
    elif save.value > 0.25 * interval.value:
        yield (
            f"saves are under way {100 * save.value / interval.value:.0f} % of the time: if others need that file "
            f"system too, save less often (ckptman simulate says what it costs)"
        )


def _memory_remarks(made: Plan, memory: Memory) -> Iterator[str]:
    """Yield what checkpoints in memory survive, and whether a node has room for them."""
    text = {name: each.text for name, each in made.in_memory.items()}
    lost = int(made.in_memory["copies"].value) - 1
    survives = f"the loss of any {'one node' if lost == 1 else f'{lost} nodes'}" if lost else "that of processes alone"
    yield (
        f"in memory: every {text['interval']}, stalls {text['stalled']} of the time, counts after "
        f"{text['counts_after']}; survives {survives}: {text['survived']} of the failures are assumed to be no worse"
    )
    needed, host = made.in_memory["of_a_node"], memory.host_bytes
    room = ""
    if host is not None and needed.value > host:
        room = f", which does not fit in {size_text(host)}"
    elif host is not None:
        room = f" of {size_text(host)}"
        room += "; /dev/shm has half of that, unless your site says otherwise" if needed.value > host / 2 else ""
    yield f"memory of a node for it: {needed.text}{room}"
    goodput = {name: figures[-1].value for name, figures in made.ways.items()}
    if goodput[WITH_MEMORY] < goodput[DISK_ALONE]:
        yield (
            "with memory alone less of the time is training that lasts than with disk alone: saves to disk are "
            "frequent here, and what a failure costs is the restart"
        )
