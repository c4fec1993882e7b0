"""`ckptman plan`: what a run will need, before it spends a GPU hour: memory, disk, seconds, the interval."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from ckptman.cli import console
from ckptman.cli.options import (
    OTHERS,
    AsJson,
    KeepBestOption,
    KeepDailyOption,
    KeepEveryOption,
    KeepHourlyOption,
    KeepLastOption,
    KeepMonthlyOption,
    KeepStepsOption,
    KeepWeeklyOption,
    KeepWithinOption,
    MaxBytesOption,
    MemoryOption,
    RestartInPlaceOption,
    SurvivedOption,
    option,
    parse_rate,
    parse_retention,
    parse_seconds,
    parse_size,
)
from ckptman.cli.plan_inputs import PlanOptions, subject_of, tiers_of
from ckptman.cli.plan_memory import MemoryOptions, memory_plan
from ckptman.cli.plan_report import Plan, as_dict, best_tier, lines
from ckptman.errors import ConfigError
from ckptman.forecast.disk_forecast import Saves, cadence_seconds, disk_figures
from ckptman.forecast.failure_rates import mtbf_figure, rate_named
from ckptman.forecast.figures import Figure
from ckptman.forecast.gpu_memory import memory_figures
from ckptman.forecast.save_costs import Life, Saving, tier_figures
from ckptman.policies.parameters import check_positive
from ckptman.policies.retention_rules import KeepEvery, KeepSteps, limited, rules_of
from ckptman.policies.save_policies import SavePolicy

MOST_FACTOR = 1_000_000
_STAGING_SOURCE = "rate assumed, less than half of PCIe 4.0 x16; yours: --staging, or save_staged in the journal"
_INIT_SOURCE = "init assumed, Leonardo on its fast file system, 2024; yours: --init, or init_seconds in the journal"


def plan(
    params: Annotated[
        str | None, option("--params", "N", "A model of so many parameters: 9e9, 7B, 350M.", "Model and machine")
    ] = None,
    config: Annotated[Path | None, option("--config", "FILE", "The model of a run of the bundled loop.")] = None,
    changes: Annotated[
        list[str] | None,
        option("--set", "SECTION.KEY=VALUE", "Change a value of --config. May be given several times."),
    ] = None,
    model: Annotated[
        str | None,
        option("--model", "MODULE:FUNCTION", "The model that a function returns, built without memory. Needs torch."),
    ] = None,
    dtype: Annotated[
        str | None, option("--dtype", "TYPE", "Of parameters and gradients, with --params (float32).")
    ] = None,
    moments: Annotated[
        int, option("--moments", "N", "Tensors that the optimizer keeps for each parameter (2: AdamW).")
    ] = 2,
    moment_dtype: Annotated[
        str | None, option("--moment-dtype", "TYPE", "Their type, with --params (that of the parameters).")
    ] = None,
    nodes: Annotated[int, option("--nodes", "N", "Nodes (1).")] = 1,
    gpus: Annotated[int, option("--gpus", "N", "GPUs of a node (8).")] = 8,
    shard: Annotated[
        int | None, option("--shard", "N", "GPUs that share one copy of the model (a node's worth).")
    ] = None,
    sequence: Annotated[int | None, option("--sequence", "N", "Tokens of a sample (4096).")] = None,
    micro_batch: Annotated[int | None, option("--micro-batch", "N", "Samples that a GPU computes at once (1).")] = None,
    vocab: Annotated[int | None, option("--vocab", "N", "Size of the vocabulary (128256).")] = None,
    dim: Annotated[int | None, option("--dim", "N", "Width of the model (by its parameters, as Llama's).")] = None,
    layers: Annotated[int | None, option("--layers", "N", "Layers (by its parameters, as Llama's).")] = None,
    gpu_memory: Annotated[str | None, option("--gpu-memory", "SIZE", "Of one GPU, such as 80GB: does it fit?")] = None,
    tier: Annotated[
        list[str] | None,
        option(
            "--tier",
            "NAME=RATE|DIR",
            "Where to save, and how fast it is: scratch=2GB/s, scratch=2GB/s/node:10GB/s (at most), or scratch=DIR, "
            "which is measured. May be given several times.",
            "Saves",
        ),
    ] = None,
    staging: Annotated[
        str | None, option("--staging", "RATE", "Of a rank's private copy, from GPU to host (10GB/s).")
    ] = None,
    blocking: Annotated[bool, typer.Option("--blocking", help="Training waits until a save is durable.")] = False,
    init: Annotated[
        str | None, option("--init", "TIME", "From the start of a run to its first step, without the load (20min).")
    ] = None,
    factor: Annotated[float, option("--factor", "X", "Interval by init time: so many times that (4).")] = 4.0,
    mtbf: Annotated[
        str | None, option("--mtbf", "TIME", "Mean time between failures of the whole run.", "Failures and time")
    ] = None,
    rate: Annotated[
        str, option("--rate", "NAME", "Without --mtbf, a published one: llama3 (the default), rsc1.")
    ] = "llama3",
    length: Annotated[str, option("--length", "TIME", "Of the whole run (30d).")] = "30d",
    step: Annotated[str | None, option("--step", "TIME", "Of one step, for rules that go by steps.")] = None,
    notice: Annotated[str | None, option("--notice", "TIME", "Until a failure is found out (0).")] = None,
    queue: Annotated[str | None, option("--queue", "TIME", "Of a job that goes on after a failure (0).")] = None,
    memory: MemoryOption = False,
    memory_interval: Annotated[
        str | None,
        option("--memory-interval", "TIME|STEPS", "How often: 30s, 20steps (as costs 1 % of the time)."),
    ] = None,
    copies: Annotated[int | None, option("--copies", "N", "Nodes that each part lies on (2).")] = None,
    exchange: Annotated[
        str | None, option("--exchange", "RATE", "What a node sends to others behind the training (5GB/s).")
    ] = None,
    host_memory: Annotated[
        str | None, option("--host-memory", "SIZE", "Of one node, such as 1TB: does it fit?")
    ] = None,
    restart_in_place: RestartInPlaceOption = None,
    survived: SurvivedOption = None,
    keep_last: KeepLastOption = None,
    keep_every: KeepEveryOption = None,
    keep_best: KeepBestOption = None,
    keep_within: KeepWithinOption = None,
    keep_hourly: KeepHourlyOption = None,
    keep_daily: KeepDailyOption = None,
    keep_weekly: KeepWeeklyOption = None,
    keep_monthly: KeepMonthlyOption = None,
    keep_steps: KeepStepsOption = None,
    max_bytes: MaxBytesOption = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Every number with its formula, and where that is from.", rich_help_panel=OTHERS
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What a run will need, before it spends a GPU hour.

    Memory of a GPU, size of a checkpoint, seconds and stall of a save on each tier, the interval, goodput at a given
    rate of failures, disk under the keep rules, and how early to be warned. With --memory, what a failure costs by
    disk alone, with checkpoints in memory, and with restarts inside the allocation. Sizes are in powers of 1000.
    """
    given = locals()
    check_positive("plan", "--factor", factor)
    if factor > MOST_FACTOR:
        raise ConfigError(f"--factor: at most {MOST_FACTOR:,} (4 is usual); what is more was a slip")
    copying = parse_rate("--staging", staging or "10GB/s")
    init_seconds, run_seconds = parse_seconds("--init", init or "20min"), parse_seconds("--length", length)
    room = None if gpu_memory is None else parse_size("--gpu-memory", gpu_memory, needs_unit=True)
    step_seconds = None if step is None else parse_seconds("--step", step)
    subject = subject_of(PlanOptions(**{each.name: given[each.name] for each in fields(PlanOptions)}))
    if mtbf is None:
        failures = mtbf_figure(subject.gpus, rate_named(rate))
    else:
        failures = Figure("mtbf", parse_seconds("--mtbf", mtbf), "seconds", "as given")
    saving = Saving(subject.total_bytes, subject.largest_bytes, copying, blocking, "" if staging else _STAGING_SOURCE)
    noticed = 0.0 if notice is None else parse_seconds("--notice", notice)
    waited = 0.0 if queue is None else parse_seconds("--queue", queue)
    life = Life(init_seconds, failures.value, factor, "" if init else _INIT_SOURCE, noticed, waited)
    rules = parse_retention(**{name: given[name] for name in given if name.startswith(("keep_", "max_"))})
    retention = subject.retention if rules is None else rules
    if step_seconds is None and any(isinstance(each, KeepEvery | KeepSteps) for each in rules_of(retention)):
        raise ConfigError("a rule to keep checkpoints goes by steps: say what a step takes, as in --step 2s")
    tiers = []
    for each in tiers_of(tier or [], nodes, subject.gpus):
        figures = tier_figures(each, saving, life)
        interval, who = _cadence(subject.save_policy, figures, init_seconds, step_seconds)
        saves = Saves(run_seconds, interval, step_seconds or 1.0)
        figures += disk_figures(retention, subject.total_bytes, saves, who)
        tiers.append((each, {figure.name: figure for figure in figures}))
    of_gpu = memory_figures(subject.weights, subject.shape, subject.batch)
    if not blocking:
        host = min(gpus, subject.gpus) * subject.largest_bytes
        words = f"{min(gpus, subject.gpus)} GPUs of a node x {subject.largest_bytes:,} B: their private copies"
        of_gpu.append(Figure("host_copy_of_a_node", host, "bytes", words))
    limit = limited(retention)
    options = MemoryOptions(**{each.name: given[each.name] for each in fields(MemoryOptions)})
    disk, mesh = best_tier(tiers)[1], (nodes, min(gpus, subject.gpus))
    in_memory = memory_plan(options, mesh, saving, life, disk, step_seconds, subject.memory)
    made = Plan(subject, of_gpu, failures, limit.bytes if limit else None, tiers, blocking, step_seconds, in_memory)
    if as_json:
        console.say_json(as_dict(made, explain, room))
    else:
        console.say(*lines(made, explain, room))


def _cadence(
    policy: SavePolicy | None, figures: list[Figure], init_seconds: float, step_seconds: float | None
) -> tuple[float, str]:
    """Return the seconds between saves, by the configuration if it says them, else by the plan; and by which."""
    value = {each.name: each.value for each in figures}
    own = cadence_seconds(policy, value["stall"], value["save"], init_seconds + value["load"], step_seconds)
    seconds, who = value["interval"], ""
    if own is not None:
        seconds, who = own, " (by the configuration, no shorter than a save)"
    return (seconds, who) if step_seconds is None or step_seconds <= seconds else (step_seconds, " (a step)")
