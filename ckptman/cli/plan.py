"""`ckptman plan`: what a run will need, before it spends a GPU hour: size, disk, seconds, the interval."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from ckptman.cli import console, options
from ckptman.cli.options import flag, option, parse_rate, parse_seconds, parse_size
from ckptman.errors import ConfigError
from ckptman.forecast.failure_costs import DISK_ALONE, SURVIVED, WITH_MEMORY, failure_figures, memory_figures
from ckptman.forecast.figures import Figure
from ckptman.forecast.save_costs import BOUND_SECONDS, tier_figures
from ckptman.forecast.scenario import DTYPE_BYTES, Memory, Model, Scenario, Tier, mtbf_figure
from ckptman.policies.parameters import check_count, check_positive
from ckptman.policies.retention_rules import KeepEvery, KeepSteps, RetentionPolicy, limited, rules_of, size_text

MOST_FACTOR = 1_000_000
_TABLE = {"shm": 4e9, "scratch": 2e9, "project": 0.5e9}
_TABLE_SOURCE = "assumed: one process, by the practitioners' table (2024). Measure yours: --tier NAME=DIR"
_TIER_HELP = (
    "Where to save, and how fast it is: scratch=2GB/s, scratch=2GB/s/node:10GB/s (at most), or scratch=DIR, which is "
    "measured. Can be given several times."
)
_EXPLAIN = flag("--explain", "Every number with its formula and source.", panel=options.OTHERS)
Figures = dict[str, Figure]
_SAVES = ("tier", "rate", "save", "stall", "load", "warning", "kept", "disk")
_INTERVALS = ("tier", "by init", "by Daly", "best", "bound", "interval", "lost per failure", "goodput")
_FAILURES = ("after a failure", "interval", "lost per failure", "restart", "costs", "goodput")
_RIGHT = " ".join((*_SAVES[1:], "init", "by", "Daly", "best", "bound", "interval", "restart", "costs", "goodput"))
_DROPPED = ("warning", "rate", "kept", "by init", "by Daly", "bound", "best")
_NAMES = {"by init": "interval_by_init", "by Daly": "interval_by_daly", "best": "interval_best"}
_NAMES |= {"bound": "interval_bound", "lost per failure": "lost_per_failure"}


@options.with_retention
def plan(
    params: Annotated[
        str | None, option("--params", "N", "A model with N parameters: 9e9, 7B, 350M.", "Model and machine")
    ] = None,
    model: Annotated[str | None, option("--model", "MODULE:FUNCTION", "The model that a function returns.")] = None,
    dtype: Annotated[str | None, option("--dtype", "TYPE", "Type of the parameters, with --params (float32).")] = None,
    moments: Annotated[
        int, option("--moments", "N", "Optimizer tensors per parameter (2: AdamW).", least=0, most=100)
    ] = 2,
    moment_dtype: Annotated[
        str | None, option("--moment-dtype", "TYPE", "Type of these, with --params (--dtype).")
    ] = None,
    nodes: Annotated[int, option("--nodes", "N", "Number of nodes (1).", least=1)] = 1,
    gpus: Annotated[int, option("--gpus", "N", "GPUs per node (8).", least=1)] = 8,
    tier: Annotated[list[str] | None, option("--tier", "NAME=RATE|DIR", _TIER_HELP, "Saves")] = None,
    staging: Annotated[str, option("--staging", "RATE", "Copies of a rank from GPU to host (10GB/s).")] = "10GB/s",
    blocking: Annotated[bool, flag("--blocking", "Training waits until a save is durable.")] = False,
    init: Annotated[str, option("--init", "TIME", "From start to first step, without the load (20min).")] = "20min",
    factor: Annotated[float, option("--factor", "X", "Factor of the interval by init time (4).")] = 4.0,
    mtbf: Annotated[
        str | None, option("--mtbf", "TIME", "Mean time between failures of the whole run.", "Failures and time")
    ] = None,
    rate: Annotated[str, option("--rate", "NAME", "Or a published one: llama3 (default), rsc1.")] = "llama3",
    length: Annotated[str, option("--length", "TIME", "Length of the whole run (30d).")] = "30d",
    step: Annotated[str | None, option("--step", "TIME", "Time per step, for rules that go by steps.")] = None,
    notice: Annotated[str | None, option("--notice", "TIME", "Until a failure is noticed (0).")] = None,
    queue: Annotated[str | None, option("--queue", "TIME", "Queue time of a job after a failure (0).")] = None,
    memory: options.MemoryOption = False,
    memory_interval: Annotated[
        str | None, option("--memory-interval", "TIME|STEPS", "How often: 30s, 20steps (as costs 1 % of the time).")
    ] = None,
    copies: Annotated[int | None, option("--copies", "N", "Nodes that hold each part (2).", least=1)] = None,
    exchange: Annotated[str | None, option("--exchange", "RATE", "What a node sends to others (5GB/s).")] = None,
    host_memory: Annotated[str | None, option("--host-memory", "SIZE", "Memory of a node, such as 1TB.")] = None,
    restart_in_place: options.RestartInPlaceOption = None,
    survived: options.SurvivedOption = None,
    keep: RetentionPolicy | None = None,
    explain: Annotated[bool, _EXPLAIN] = False,
    as_json: options.AsJson = False,
) -> None:
    """Estimate what a run will need, before it spends a GPU hour.

    Checkpoint size, save time and stall on each tier, the interval, goodput at a given failure rate, disk usage under
    the keep rules, and how early to be warned. With --memory, also what a failure costs with checkpoints in memory and
    with restarts inside the allocation. Sizes are in powers of 1000.
    """
    if (params is None) == (model is None):
        which = "nothing is given" if params is None else "--params and --model are given"
        raise ConfigError(f"{which}: name one of --params 9e9, --model package.module:function")
    check_positive("plan", "--factor", factor)
    if factor > MOST_FACTOR:
        raise ConfigError(f"--factor: at most {MOST_FACTOR:,} (4 is usual), not {factor:g}")
    step_seconds = None if step is None else parse_seconds("--step", step)
    if step_seconds is None and any(isinstance(each, KeepEvery | KeepSteps) for each in rules_of(keep)):
        raise ConfigError("a rule to keep checkpoints goes by steps: say what a step takes, as in --step 2s")
    failures = mtbf_figure(nodes * gpus, rate)
    if mtbf is not None:
        failures = Figure("mtbf", parse_seconds("--mtbf", mtbf), "seconds", "as given")
    of_memory = (memory_interval, copies, exchange, host_memory, restart_in_place, survived)
    in_memory = None
    if memory or any(each is not None for each in of_memory):
        if blocking:
            raise ConfigError("--blocking leaves no private copy to become a checkpoint in memory: leave it out")
        in_memory = Memory(
            interval_seconds=None if memory_interval is None else _memory_interval(memory_interval, step_seconds),
            copies=2 if copies is None else copies,
            exchange_bytes_per_second=parse_rate("--exchange", exchange or "5GB/s"),
            restart_seconds=None if restart_in_place is None else parse_seconds("--restart-in-place", restart_in_place),
            survived=options.parse_share("--survived", SURVIVED if survived is None else survived),
            host_bytes=None if host_memory is None else parse_size("--host-memory", host_memory, needs_unit=True),
        )
    scenario = Scenario(
        model=_model(params, model, dtype, moments, moment_dtype),
        nodes=nodes,
        gpus_per_node=gpus,
        tiers=_tiers(tier or [], nodes, nodes * gpus),
        staging_bytes_per_second=parse_rate("--staging", staging),
        blocking=blocking,
        init_seconds=parse_seconds("--init", init),
        factor=factor,
        notice_seconds=0.0 if notice is None else parse_seconds("--notice", notice),
        queue_seconds=0.0 if queue is None else parse_seconds("--queue", queue),
        mtbf_seconds=failures.value,
        run_seconds=parse_seconds("--length", length),
        step_seconds=step_seconds,
        retention=keep,
        in_memory=in_memory,
    )
    made = plan_of(scenario, failures)
    if as_json:
        console.say_json(as_dict(made, explain))
    else:
        console.say(*lines(made, explain))


def _model(params: str | None, model: str | None, dtype: str | None, moments: int, moment_dtype: str | None) -> Model:
    for name, value in (("--dtype", dtype), ("--moment-dtype", moment_dtype)):
        if value is not None and value not in DTYPE_BYTES:
            raise ConfigError(f"{name}: one of {', '.join(DTYPE_BYTES)}, not {value!r}")
        if value is not None and params is None:
            raise ConfigError(f"{name} goes with --params: the model has its own")
    if params is None:
        from ckptman.engine.state.meta_model import model_of

        return model_of(model or "", moments)
    count, dtype = options.parse_count("--params", params), dtype or "float32"
    moment = moments * DTYPE_BYTES[moment_dtype or dtype]
    return Model(f"{count:,} parameters in {dtype}", count, count * DTYPE_BYTES[dtype], count * moment)


def _memory_interval(written: str, step_seconds: float | None) -> float:
    """Parse how often to save to memory: `30s`, `20steps`. Raises: ConfigError."""
    if (steps := re.fullmatch(r"\s*([0-9]{1,12})\s*steps?\s*", written)) is None:
        return parse_seconds("--memory-interval", written)
    check_count("plan", "--memory-interval", int(steps[1]))
    if step_seconds is None:
        raise ConfigError(f"--memory-interval {written} goes by steps: say what a step takes, as in --step 2s")
    return int(steps[1]) * step_seconds


def _tiers(written: Sequence[str], nodes: int, gpus: int) -> tuple[Tier, ...]:
    """Parse `NAME=2GB/s`, `NAME=2GB/s/node`, `NAME=2GB/s/gpu`, and `NAME=DIR`, which is measured.

    Each may end in `:10GB/s`, the most that the file system gives. Without any: the practitioners' table.
    Raises: ConfigError, NotFoundError, RootError.
    """
    if not written:
        return tuple(
            Tier(name, rate, rate, f"{size_text(rate)}/s in all  [{_TABLE_SOURCE}]") for name, rate in _TABLE.items()
        )
    tiers = tuple(_tier(each, nodes, gpus) for each in written)
    names = [each.name for each in tiers]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--tier: {twice[0]} is given twice; give each tier a name of its own")
    return tiers


def _tier(written: str, nodes: int, gpus: int) -> Tier:
    name, equals, what = written.partition("=")
    if not (equals and name.strip() and what.strip()):
        raise ConfigError(f"--tier: NAME=RATE or NAME=DIR, as in scratch=2GB/s or scratch=/scratch/me, not {written!r}")
    most = float("inf")
    head, colon, tail = what.rpartition(":")
    if colon and tail[:1].isdigit():
        most, what = parse_rate(f"--tier {name}", tail), head
    if what[:1].isdigit() or what[:1] in "-+.":
        times, per = 1, "in all"
        for ending, count in (("/node", nodes), ("/gpu", gpus)):
            if what.endswith(ending):
                what, times, per = what.removesuffix(ending), count, f"x {count} {ending[1:]}s"
        write = read = parse_rate(f"--tier {name}", what)
        how = f"{size_text(write)}/s {per}  [as given]"
    else:
        write, read = _measured(name, Path(what))
        times, how = nodes, f"{size_text(write)}/s of this node x {nodes}  [measured in {what}; ckptman doctor]"
    if most < write * times:
        how = f"at most {size_text(most)}/s: {how}"
    return Tier(name, min(most, write * times), min(most, read * times), how)


def _measured(name: str, folder: Path) -> tuple[float, float]:
    """Return the bytes per second that this node writes and reads in a directory."""
    from ckptman.tools.doctor.examine import examine

    found = {each.name: each.figures for each in examine(folder)}
    write, read = (found.get(each, {}).get("bytes_per_second") for each in ("write", "read"))
    if not write:
        raise ConfigError(f"--tier {name}: {folder} could not be measured: ckptman doctor {folder} says why")
    return float(write), float(read or write)


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
    lines = [f"{scenario.model.title}, {console.count(scenario.gpus, 'GPU')}", ""]
    sizes = [(each.name.replace("_", " "), each.text) for each in (*scenario.size.values(), *made.host)]
    lines += console.table(("checkpoint", "size"), sizes, right="size")
    for headers in (_SAVES, _INTERVALS):
        names = [_NAMES.get(each, each) for each in headers[1:]]
        cells = [(tier.name, *(figures[name].text for name in names)) for tier, figures in made.tiers]
        lines += ["", *console.table(headers, cells, right=_RIGHT, drop=_DROPPED)]
    if scenario.in_memory is not None:
        cells = [(name, *(each.text for each in figures)) for name, figures in made.ways.items()]
        lines += ["", *console.table(_FAILURES, cells, right=_RIGHT), *_memory_remarks(made, scenario.in_memory)]
    counted = made.failures.formula.partition("  [")[0]
    lines += ["", f"failures: one in {made.failures.text} ({counted})", *_advice(made)]
    for title, figures in _sections(made) if explain else ():
        named = ((each.name.replace("_", " "), each) for each in figures)
        lines += ["", title, *(f"  {name} = {each.text}: {each.formula}" for name, each in named)]
    return lines


def _sections(made: Plan) -> Iterator[tuple[str, Iterable[Figure]]]:
    yield "checkpoint", (*made.scenario.size.values(), *made.host)
    yield "failures", [made.failures]
    if made.ways:
        yield "in memory", made.in_memory.values()
    for name, figures in made.ways.items():
        yield f"after a failure: {name}", figures
    for tier, by_name in made.tiers:
        yield f"tier {tier.name}", by_name.values()


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
        where = f"save to {tier.name}: " if len(made.tiers) > 1 else "save "
        yield (
            f"{where}every {interval:,} s, EverySeconds({interval}), and ask Slurm for --signal=USR2@"
            f"{figures['warning'].value:.0f}; {figures['goodput'].text} of the time is training that lasts"
        )
    for tier, figures in made.tiers:
        yield from (f"{tier.name}: {remark}" for remark in _remarks(made, tier, figures))


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
