"""What `ckptman plan` prints: tables, the advice, every number with its formula, or JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckptman.cli import console
from ckptman.cli.plan_inputs import Subject
from ckptman.cli.plan_memory import MemoryPlan, memory_lines
from ckptman.forecast.disk_forecast import intervals_of
from ckptman.forecast.figures import Figure
from ckptman.forecast.save_costs import BOUND_SECONDS, TierRates
from ckptman.policies.retention_rules import size_text
from ckptman.policies.save_policies import EverySteps


@dataclass(frozen=True)
class Plan:
    """Everything that is printed. `tiers`: each with all its figures, by name."""

    subject: Subject
    memory: list[Figure]
    failures: Figure
    limit_bytes: int | None
    tiers: list[tuple[TierRates, dict[str, Figure]]]
    blocking: bool
    step_seconds: float | None
    in_memory: MemoryPlan | None = None


_SAVES = ("tier", "rate", "save", "stall", "load", "warning", "kept", "disk")
_INTERVALS = ("tier", "by init", "by Daly", "best", "bound", "interval", "lost per failure", "goodput")
_RIGHT = " ".join((*_SAVES[1:], "init", "by", "Daly", "best", "bound", "interval", "goodput"))
_DROPPED = ("warning", "rate", "kept", "by init", "by Daly", "bound", "best")
_NAMES = {"by init": "interval_by_init", "by Daly": "interval_by_daly", "best": "interval_best"}
_NAMES |= {"bound": "interval_bound", "lost per failure": "lost_per_failure"}


def lines(made: Plan, explain: bool, room: int | None) -> list[str]:
    """Return the plan for people. `room`: bytes of a GPU, if they are given."""
    subject, weights = made.subject, made.subject.weights
    gpus = f"{console.count(subject.gpus, 'GPU')}: replicate {subject.replicas} x shard {weights.shards}"
    lines = [f"{console.plain(subject.title)}, {gpus}"]
    for title, figures in (("checkpoint", subject.checkpoint), ("memory of a GPU", made.memory)):
        rows = [(each.name.replace("_", " "), each.text) for each in figures]
        lines += ["", *console.table((title, "size"), rows, right="size")]
    if room is not None:
        needs = {each.name: each.value for each in made.memory}
        for name, how in (("total_plain", "without"), ("total_checkpointed", "with")):
            verdict = "fits" if needs[name] <= room else "does not fit"
            lines.append(f"{how} activation checkpointing it {verdict} in {size_text(room)}")
    for headers in (_SAVES, _INTERVALS):
        names = [_NAMES.get(each, each) for each in headers[1:]]
        cells = [(console.plain(tier.name), *(figures[name].text for name in names)) for tier, figures in made.tiers]
        lines += ["", *console.table(headers, cells, right=_RIGHT, drop=_DROPPED)]
    if made.in_memory is not None:
        lines += ["", *memory_lines(made.in_memory)]
    lines += ["", f"failures: one in {made.failures.text} ({made.failures.formula})", *_advice(made)]
    return [*lines, *_explained(made)] if explain else lines


def best_tier(tiers: Sequence[tuple[TierRates, dict[str, Figure]]]) -> tuple[TierRates, dict[str, Figure]]:
    """Return the tier to save to: of those that outlive a node, where there are any, the one that yields most."""
    return max(tiers, key=lambda each: (each[0].lasts, each[1]["goodput"].value))


def _advice(made: Plan) -> list[str]:
    """Return what to do, by the numbers: the tier that yields most, and what to write where."""
    lines = []
    tier, figures = best_tier(made.tiers)
    if tier.lasts:
        interval = math.ceil(figures["interval"].value)
        where = f"save to {console.plain(tier.name)}: " if len(made.tiers) > 1 else "save "
        lines.append(
            f"{where}every {interval:,} s, EverySeconds({interval}), and ask Slurm for --signal=USR2@"
            f"{figures['warning'].value:.0f}; {figures['goodput'].text} of the time is training that lasts"
        )
    intervals = intervals_of(made.subject.save_policy)
    known = [repr(each) for each in intervals if made.step_seconds is not None or not isinstance(each, EverySteps)]
    if known:
        lines.append(f"kept and disk are by the configuration, which saves by {' | '.join(known)}")
    if len(known) < len(intervals):
        lines.append("checkpoint.every_steps is left out: say what a step takes, as in --step 2s")
    for tier, figures in made.tiers:
        lines += [f"{console.plain(tier.name)}: {remark}" for remark in _remarks(made, tier, figures)]
    return lines


def _remarks(made: Plan, tier: TierRates, figures: dict[str, Figure]) -> Iterator[str]:
    """Yield what is to be said against saving to a tier."""
    if figures["restart"].value > made.failures.value:
        yield (
            "a restart takes longer than it is from one failure to the next: look for the cause of the failures, or "
            "take fewer GPUs"
        )
    if figures["goodput"].value < 0.99 * figures["goodput_best"].value:
        seconds = math.ceil(figures["interval_best"].value)
        shorter = "save in the background (without --blocking)" if made.blocking else "make the private copy faster"
        yield (
            f"the bound costs more than it is worth: {figures['goodput'].text} of the time is training that lasts at "
            f"{figures['interval'].text}, and {figures['goodput_best'].text} at the best interval, "
            f"{figures['interval_best'].text}: {shorter}, or take EverySeconds({seconds}) and lose more in each failure"
        )
    if made.limit_bytes is not None and figures["disk"].value > made.limit_bytes:
        yield (
            f"{figures['disk'].text} are there while a save is on its way, and --max-bytes is "
            f"{size_text(made.limit_bytes)}: a limit trims when the save is durable"
        )
    if not tier.lasts:
        yield "memory of a node, and gone with it"
    busy = figures["save"].value / figures["interval"].value
    if figures["save"].value > BOUND_SECONDS:
        yield (
            f"a save takes {figures['save'].text}, longer than the bound of 15 min: save to a faster tier, and copy "
            f"from there"
        )
    elif busy > 0.25:
        yield (
            f"saves are under way {100 * busy:.0f} % of the time: if others need that file system too, save less "
            f"often (ckptman simulate says what it costs)"
        )


def _explained(made: Plan) -> list[str]:
    sections = [("checkpoint", made.subject.checkpoint), ("memory", made.memory), ("failures", [made.failures])]
    if made.in_memory is not None:
        sections.append(("in memory", [*made.in_memory.figures.values()]))
        sections += [(f"after a failure: {name}", figures) for name, figures in made.in_memory.ways.items()]
    sections += [(f"tier {console.plain(tier.name)}", [*figures.values()]) for tier, figures in made.tiers]
    lines = []
    for title, figures in sections:
        lines += ["", title]
        for each in figures:
            source = f"  [{each.source}]" if each.source else ""
            lines.append(f"  {each.name.replace('_', ' ')} = {each.text}: {console.plain(each.formula + source)}")
    return lines


def as_dict(made: Plan, explain: bool, room: int | None) -> dict[str, Any]:
    def values(figures: Iterable[Figure]) -> dict[str, Any]:
        return {each.key: each.as_dict() if explain else each.value for each in figures}

    subject, shape = made.subject, made.subject.shape
    in_memory: dict[str, Any] = {}
    if (found := made.in_memory) is not None:
        host = {} if found.host_bytes is None else {"host_bytes": found.host_bytes}
        in_memory["memory_tier"] = values(found.figures.values()) | host
        in_memory["after_a_failure"] = [{"name": name, **values(figures)} for name, figures in found.ways.items()]
    return {
        "model": {
            "title": subject.title,
            "parameters": subject.weights.parameters,
            "frozen": subject.weights.frozen,
            "dim": shape.dim,
            "layers": shape.layers,
            "vocab": shape.vocab,
            "shape_is_assumed": shape.assumed,
        },
        "mesh": {"gpus": subject.gpus, "replicate": subject.replicas, "shard": subject.weights.shards},
        "checkpoint": values(subject.checkpoint),
        "memory": values(made.memory) | ({} if room is None else {"gpu_bytes": room}),
        "failures": values([made.failures]),
        "blocking": made.blocking,
        "tiers": [{"name": tier.name, **values(figures.values())} for tier, figures in made.tiers],
        **in_memory,
    }
