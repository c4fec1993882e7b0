"""`ckptman plan`: what a run will need, before it spends a GPU hour: size, disk, seconds, the interval."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ckptman.cli import console, options
from ckptman.cli.options import option, parse_rate, parse_seconds, parse_size
from ckptman.cli.plan_report import as_dict, lines, plan_of
from ckptman.errors import ConfigError
from ckptman.forecast.failure_costs import SURVIVED
from ckptman.forecast.figures import Figure
from ckptman.forecast.scenario import DTYPE_BYTES, Memory, Model, Scenario, Tier, mtbf_figure
from ckptman.policies.parameters import check_count, check_positive
from ckptman.policies.retention_rules import KeepEvery, KeepSteps, rules_of, size_text

MOST_FACTOR, MOST_MOMENTS = 1_000_000, 100
_TABLE = {"shm": 4e9, "scratch": 2e9, "project": 0.5e9}
_TABLE_SOURCE = "assumed: one process, by the practitioners' table (2024). Measure yours: --tier NAME=DIR"
_TIER_HELP = (
    "Where to save, and how fast it is: scratch=2GB/s, scratch=2GB/s/node:10GB/s (at most), or scratch=DIR, which is "
    "measured. Can be given several times."
)
_EXPLAIN = typer.Option("--explain", help="Every number with its formula and source.", rich_help_panel=options.OTHERS)


def plan(
    params: Annotated[
        str | None, option("--params", "N", "A model with N parameters: 9e9, 7B, 350M.", "Model and machine")
    ] = None,
    model: Annotated[str | None, option("--model", "MODULE:FUNCTION", "The model that a function returns.")] = None,
    dtype: Annotated[str | None, option("--dtype", "TYPE", "Type of the parameters, with --params (float32).")] = None,
    moments: Annotated[int, option("--moments", "N", "Optimizer tensors per parameter (2: AdamW).")] = 2,
    moment_dtype: Annotated[
        str | None, option("--moment-dtype", "TYPE", "Type of these, with --params (--dtype).")
    ] = None,
    nodes: Annotated[int, option("--nodes", "N", "Number of nodes (1).")] = 1,
    gpus: Annotated[int, option("--gpus", "N", "GPUs per node (8).")] = 8,
    tier: Annotated[list[str] | None, option("--tier", "NAME=RATE|DIR", _TIER_HELP, "Saves")] = None,
    staging: Annotated[str, option("--staging", "RATE", "Copies of a rank from GPU to host (10GB/s).")] = "10GB/s",
    blocking: Annotated[bool, typer.Option("--blocking", help="Training waits until a save is durable.")] = False,
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
    copies: Annotated[int | None, option("--copies", "N", "Nodes that hold each part (2).")] = None,
    exchange: Annotated[str | None, option("--exchange", "RATE", "What a node sends to others (5GB/s).")] = None,
    host_memory: Annotated[str | None, option("--host-memory", "SIZE", "Memory of a node, such as 1TB.")] = None,
    restart_in_place: options.RestartInPlaceOption = None,
    survived: options.SurvivedOption = None,
    keep_last: options.KeepLastOption = None,
    keep_every: options.KeepEveryOption = None,
    keep_best: options.KeepBestOption = None,
    keep_within: options.KeepWithinOption = None,
    keep_hourly: options.KeepHourlyOption = None,
    keep_daily: options.KeepDailyOption = None,
    keep_weekly: options.KeepWeeklyOption = None,
    keep_monthly: options.KeepMonthlyOption = None,
    keep_steps: options.KeepStepsOption = None,
    max_bytes: options.MaxBytesOption = None,
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
    if not 0 <= moments <= MOST_MOMENTS:
        raise ConfigError(f"--moments: 0 or more tensors for each parameter (AdamW has 2), at most 100, not {moments}")
    check_positive("plan", "--factor", factor)
    if factor > MOST_FACTOR:
        raise ConfigError(f"--factor: at most {MOST_FACTOR:,} (4 is usual), not {factor:g}")
    step_seconds = None if step is None else parse_seconds("--step", step)
    retention = options.parse_retention(
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=keep_best,
        keep_within=keep_within,
        keep_hourly=keep_hourly,
        keep_daily=keep_daily,
        keep_weekly=keep_weekly,
        keep_monthly=keep_monthly,
        keep_steps=keep_steps,
        max_bytes=max_bytes,
    )
    if step_seconds is None and any(isinstance(each, KeepEvery | KeepSteps) for each in rules_of(retention)):
        raise ConfigError("a rule to keep checkpoints goes by steps: say what a step takes, as in --step 2s")
    check_count("plan", "--nodes", nodes)
    check_count("plan", "--gpus", gpus)
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
        check_count("plan", "--copies", in_memory.copies)
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
        retention=retention,
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
