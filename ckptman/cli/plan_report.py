"""What `ckptman plan` prints: tables, the advice, every number with its formula, or JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptman.cli import console

if TYPE_CHECKING:
    from ckptman.cli.plan_inputs import Subject
    from ckptman.forecast.figures import Figure
    from ckptman.forecast.save_costs import TierRates


@dataclass(frozen=True)
class Plan:
    """Everything that is printed. `tiers`: each with all its figures."""

    subject: Subject
    memory: list[Figure]
    failures: list[Figure]
    limit_bytes: int | None
    tiers: list[tuple[TierRates, list[Figure]]]
    blocking: bool
    step_seconds: float | None = None


def value_of(figures: Sequence[Figure], name: str) -> float:
    return next(each.value for each in figures if each.name == name)


def _text(figures: Sequence[Figure], name: str) -> str:
    return next(each.text for each in figures if each.name == name)


def lines(made: Plan, explain: bool, room: int | None) -> list[str]:
    subject, weights = made.subject, made.subject.weights
    gpus = f"{console.count(subject.gpus, 'GPU')}: replicate {subject.replicas} x shard {weights.shards}"
    lines = [f"{console.plain(subject.title)}, {gpus}", ""]
    rows = [(each.name.replace("_", " "), each.text) for each in subject.checkpoint]
    lines += [*console.table(("checkpoint", "size"), rows, right="size"), ""]
    rows = [(each.name.replace("_", " "), each.text) for each in made.memory]
    lines += console.table(("memory of a GPU", "size"), rows, right="size")
    if room is not None:
        lines += _fits(made.memory, room)
    lines += ["", *console.table(_SAVES, _rows(made, _SAVES), right=_RIGHT), ""]
    lines += console.table(_INTERVALS, _rows(made, _INTERVALS), right=_RIGHT)
    lines += ["", f"failures: one in {made.failures[0].text} ({made.failures[0].formula})", *_advice(made)]
    return [*lines, *_explained(made)] if explain else lines


_SAVES = ("tier", "rate", "save", "stall", "load", "warning", "kept", "disk")
_INTERVALS = ("tier", "by init", "by Daly", "best", "bound", "interval", "lost per failure", "goodput")
_RIGHT = " ".join((*_SAVES[1:], "init", "by", "Daly", "best", "bound", "interval", "goodput"))
_NAMES = {"by init": "interval_by_init", "by Daly": "interval_by_daly", "best": "interval_best"}
_NAMES |= {"bound": "interval_bound", "lost per failure": "lost_per_failure"}


def _rows(made: Plan, headers: Sequence[str]) -> list[tuple[str, ...]]:
    names = [_NAMES.get(each, each) for each in headers[1:]]
    return [(console.plain(tier.name), *(_text(figures, name) for name in names)) for tier, figures in made.tiers]


def _fits(memory: Sequence[Figure], room: int) -> list[str]:
    from ckptman.policies.retention_rules import size_text

    lines = []
    for name, how in (("total_plain", "without"), ("total_checkpointed", "with")):
        verdict = "fits" if value_of(memory, name) <= room else "does not fit"
        lines.append(f"{how} activation checkpointing it {verdict} in {size_text(room)}")
    return lines


def _advice(made: Plan) -> list[str]:
    """Return what to do, by the numbers: the tier that yields most, and what to write where."""
    from ckptman.forecast.save_costs import BOUND_SECONDS
    from ckptman.policies.retention_rules import size_text

    lines = []
    lasting = [each for each in made.tiers if each[0].lasts]
    if lasting:
        tier, figures = max(lasting, key=lambda each: value_of(each[1], "goodput"))
        interval, warning = value_of(figures, "interval"), value_of(figures, "warning")
        where = f"save to {console.plain(tier.name)}: " if len(made.tiers) > 1 else "save "
        lines.append(
            f"{where}every {math.ceil(interval):,} s, EverySeconds({math.ceil(interval)}), and ask Slurm for "
            f"--signal=USR2@{warning:.0f}; {_text(figures, 'goodput')} of the time is training that lasts"
        )
    lines += _by_configuration(made)
    for tier, figures in made.tiers:
        if value_of(figures, "restart") > value_of(made.failures, "mtbf"):
            lines.append(
                f"{console.plain(tier.name)}: a restart takes longer than it is from one failure to the next: look for "
                f"the cause of the failures, or take fewer GPUs"
            )
        lines += _bound_costs(tier, figures, made.blocking)
        if made.limit_bytes is not None and value_of(figures, "disk") > made.limit_bytes:
            lines.append(
                f"{console.plain(tier.name)}: {_text(figures, 'disk')} are there while a save is on its way, and "
                f"--max-bytes is {size_text(made.limit_bytes)}: a limit trims when the save is durable"
            )
        if not tier.lasts:
            lines.append(f"{console.plain(tier.name)}: memory of a node, and gone with it")
        busy = value_of(figures, "save") / value_of(figures, "interval")
        if busy > 0.25 and value_of(figures, "save") <= BOUND_SECONDS:
            lines.append(
                f"{console.plain(tier.name)}: saves are under way {100 * busy:.0f} % of the time: if others need that "
                f"file system too, save less often (ckptman simulate says what it costs)"
            )
        if value_of(figures, "save") > BOUND_SECONDS:
            took = _text(figures, "save")
            lines.append(
                f"{console.plain(tier.name)}: a save takes {took}, longer than the bound of 15 min: save to a faster "
                f"tier, and copy from there"
            )
    return lines


def _bound_costs(tier: TierRates, figures: list[Figure], blocking: bool) -> list[str]:
    """Say where the bound costs more than a percent of what the best interval yields."""
    at_bound, at_best = value_of(figures, "goodput"), value_of(figures, "goodput_best")
    if at_bound >= 0.99 * at_best:
        return []
    seconds = math.ceil(value_of(figures, "interval_best"))
    shorter = "save in the background (without --blocking)" if blocking else "make the private copy faster"
    return [
        f"{console.plain(tier.name)}: the bound costs more than it is worth: {_text(figures, 'goodput')} of the time "
        f"is training that lasts at {_text(figures, 'interval')}, and {_text(figures, 'goodput_best')} at the best "
        f"interval, {_text(figures, 'interval_best')}: {shorter}, or take EverySeconds({seconds}) and lose more in "
        f"each failure"
    ]


def _by_configuration(made: Plan) -> list[str]:
    """Say how often the configuration saves, where it is one that says it: what is saved, kept and on disk is of
    that."""
    from ckptman.forecast.disk_forecast import intervals_of
    from ckptman.policies.save_policies import EverySteps

    intervals = intervals_of(made.subject.save_policy)
    known = [repr(each) for each in intervals if made.step_seconds is not None or not isinstance(each, EverySteps)]
    lines = [f"kept and disk are by the configuration, which saves by {' | '.join(known)}"] if known else []
    if len(known) < len(intervals):
        lines.append("checkpoint.every_steps is left out: say what a step takes, as in --step 2s")
    return lines


def _sections(made: Plan) -> list[tuple[str, list[Figure]]]:
    sections = [("checkpoint", made.subject.checkpoint), ("memory", made.memory), ("failures", made.failures)]
    return [*sections, *((f"tier {tier.name}", figures) for tier, figures in made.tiers)]


def _explained(made: Plan) -> list[str]:
    lines = []
    for title, figures in _sections(made):
        lines += ["", f"{console.plain(title)}"]
        for each in figures:
            source = f"  [{each.source}]" if each.source else ""
            lines.append(f"  {each.name.replace('_', ' ')} = {each.text}: {console.plain(each.formula + source)}")
    return lines


def as_dict(made: Plan, explain: bool, room: int | None) -> dict[str, Any]:
    def values(figures: Sequence[Figure]) -> dict[str, Any]:
        return {each.key: each.as_dict() if explain else each.value for each in figures}

    subject, shape = made.subject, made.subject.shape
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
        "failures": values(made.failures),
        "blocking": made.blocking,
        "tiers": [{"name": tier.name, **values(figures)} for tier, figures in made.tiers],
    }
