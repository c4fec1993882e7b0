"""`ckptman plan`: what a run will need, before it spends a GPU hour: memory, disk, seconds, the interval."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptman.cli import console
from ckptman.cli.options import (
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
    option,
    parse_rate,
    parse_retention,
    parse_seconds,
    parse_size,
)
from ckptman.errors import ConfigError

if TYPE_CHECKING:
    from ckptman.forecast.figures import Figure
    from ckptman.policies.retention import RetentionPolicy
    from ckptman.policies.save_policies import SavePolicy

Params = Annotated[str | None, option("--params", "N", "A model of so many parameters: 9e9, 7B, 350M.")]
ConfigFile = Annotated[Path | None, option("--config", "FILE", "The model of a run of the bundled loop.")]
Changes = Annotated[
    list[str] | None, option("--set", "SECTION.KEY=VALUE", "Change a value of --config. May be given several times.")
]
ModelOption = Annotated[
    str | None,
    option("--model", "MODULE:FUNCTION", "The model that a function returns, built without memory. Needs torch."),
]
Dtype = Annotated[str | None, option("--dtype", "TYPE", "Of parameters and gradients, with --params (float32).")]
Moments = Annotated[int, option("--moments", "N", "Tensors that the optimizer keeps for each parameter (2: AdamW).")]
MomentDtype = Annotated[
    str | None, option("--moment-dtype", "TYPE", "Their type, with --params (that of the parameters).")
]
Nodes = Annotated[int, option("--nodes", "N", "Nodes (1).")]
Gpus = Annotated[int, option("--gpus", "N", "GPUs of a node (8).")]
Shard = Annotated[int | None, option("--shard", "N", "GPUs that share one copy of the model (a node's worth).")]
Sequence_ = Annotated[int | None, option("--sequence", "N", "Tokens of a sample (4096).")]
MicroBatch = Annotated[int | None, option("--micro-batch", "N", "Samples that a GPU computes at once (1).")]
Vocab = Annotated[int | None, option("--vocab", "N", "Size of the vocabulary (128256).")]
Dim = Annotated[int | None, option("--dim", "N", "Width of the model (by its parameters, as Llama's).")]
Layers = Annotated[int | None, option("--layers", "N", "Layers (by its parameters, as Llama's).")]
GpuMemory = Annotated[str | None, option("--gpu-memory", "SIZE", "Of one GPU, such as 80GB: does it fit?")]
Tiers = Annotated[
    list[str] | None,
    option(
        "--tier",
        "NAME=RATE|DIR",
        "Where to save, and how fast it is: scratch=2GB/s, scratch=2GB/s/node:10GB/s (at most), or scratch=DIR, which "
        "is measured. May be given several times.",
    ),
]
Staging = Annotated[str | None, option("--staging", "RATE", "Of a rank's private copy, from GPU to host (10GB/s).")]
Blocking = Annotated[bool, typer.Option("--blocking", help="Training waits until a save is durable.")]
Init = Annotated[
    str | None, option("--init", "TIME", "From the start of a run to its first step, without the load (20min).")
]
Factor = Annotated[float, option("--factor", "X", "Interval by init time: so many times that (4).")]
Mtbf = Annotated[str | None, option("--mtbf", "TIME", "Mean time between failures of the whole run.")]
RateName = Annotated[str, option("--rate", "NAME", "Without --mtbf, a published one: llama3 (the default), rsc1.")]
Days = Annotated[str, option("--length", "TIME", "Of the whole run (30d).")]
StepTime = Annotated[str | None, option("--step", "TIME", "Of one step, for rules that go by steps.")]
Explain = Annotated[bool, typer.Option("--explain", help="Every number with its formula, and where that is from.")]


MOST_FACTOR = 1_000_000
_STAGING_SOURCE = "rate assumed, less than half of PCIe 4.0 x16; yours: --staging, or save_staged in the journal"
_INIT_SOURCE = "init assumed, Leonardo on its fast file system, 2024; yours: --init, or init_seconds in the journal"


def plan(
    params: Params = None,
    config: ConfigFile = None,
    changes: Changes = None,
    model: ModelOption = None,
    dtype: Dtype = None,
    moments: Moments = 2,
    moment_dtype: MomentDtype = None,
    nodes: Nodes = 1,
    gpus: Gpus = 8,
    shard: Shard = None,
    sequence: Sequence_ = None,
    micro_batch: MicroBatch = None,
    vocab: Vocab = None,
    dim: Dim = None,
    layers: Layers = None,
    gpu_memory: GpuMemory = None,
    tier: Tiers = None,
    staging: Staging = None,
    blocking: Blocking = False,
    init: Init = None,
    factor: Factor = 4.0,
    mtbf: Mtbf = None,
    rate: RateName = "llama3",
    length: Days = "30d",
    step: StepTime = None,
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
    explain: Explain = False,
    as_json: AsJson = False,
) -> None:
    """What a run will need, before it spends a GPU hour.

    Memory of a GPU, size of a checkpoint, seconds and stall of a save on each tier, the interval, goodput at a given
    rate of failures, disk under the keep rules, and how early to be warned. Sizes are in powers of 1000.
    """
    from ckptman.cli.plan_inputs import PlanOptions, subject_of, tiers_of
    from ckptman.cli.plan_report import Plan, as_dict, lines
    from ckptman.forecast.disk_forecast import Saves, disk_figures
    from ckptman.forecast.failure_rates import mtbf_figure, rate_named
    from ckptman.forecast.figures import Figure
    from ckptman.forecast.gpu_memory import memory_figures
    from ckptman.forecast.save_costs import Life, Saving, tier_figures
    from ckptman.policies.parameters import check_positive

    check_positive("plan", "--factor", factor)
    if factor > MOST_FACTOR:
        raise ConfigError(f"--factor: at most {MOST_FACTOR:,} (4 is usual); what is more was a slip")
    copying = parse_rate("--staging", staging or "10GB/s")
    init_seconds, run_seconds = parse_seconds("--init", init or "20min"), parse_seconds("--length", length)
    room = None if gpu_memory is None else parse_size("--gpu-memory", gpu_memory, needs_unit=True)
    step_seconds = None if step is None else parse_seconds("--step", step)
    written = PlanOptions(
        params=params,
        config=config,
        model=model,
        changes=changes or [],
        dtype=dtype,
        moments=moments,
        moment_dtype=moment_dtype,
        nodes=nodes,
        gpus=gpus,
        shard=shard,
        sequence=sequence,
        micro_batch=micro_batch,
        vocab=vocab,
        dim=dim,
        layers=layers,
    )
    subject = subject_of(written)
    if mtbf is None:
        failures = [mtbf_figure(subject.gpus, rate_named(rate))]
    else:
        failures = [Figure("mtbf", parse_seconds("--mtbf", mtbf), "seconds", "as given")]
    saving = Saving(subject.total_bytes, subject.largest_bytes, copying, blocking, "" if staging else _STAGING_SOURCE)
    life = Life(init_seconds, failures[0].value, factor, "" if init else _INIT_SOURCE)
    rules = parse_retention(
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
    retention = subject.retention if rules is None else rules
    _check_steps(step_seconds, retention)
    tiers = []
    for each in tiers_of(tier or [], nodes, subject.gpus):
        figures = tier_figures(each, saving, life)
        interval, who = _cadence(subject.save_policy, figures, step_seconds)
        saves = Saves(run_seconds, interval, step_seconds or 1.0)
        tiers.append((each, [*figures, *disk_figures(retention, subject.total_bytes, saves, who)]))
    memory = memory_figures(subject.weights, subject.shape, subject.batch)
    if not blocking:
        host = min(gpus, subject.gpus) * subject.largest_bytes
        words = f"{min(gpus, subject.gpus)} GPUs of a node x {subject.largest_bytes:,} B: their private copies"
        memory.append(Figure("host_copy_of_a_node", host, "bytes", words))
    made = Plan(subject, memory, failures, _limit_bytes(retention), tiers, blocking, step_seconds)
    if as_json:
        console.say_json(as_dict(made, explain, room))
    else:
        console.say(*lines(made, explain, room))


def _check_steps(given: float | None, policy: RetentionPolicy | None) -> None:
    """Raises: ConfigError for a rule that counts steps where nobody says what one takes."""
    from ckptman.policies.retention import KeepEvery, KeepSteps
    from ckptman.policies.retention_rules import rules_of

    if given is None and any(isinstance(each, KeepEvery | KeepSteps) for each in rules_of(policy)):
        raise ConfigError("a rule to keep checkpoints goes by steps: say what a step takes, as in --step 2s")


def _cadence(policy: SavePolicy | None, figures: list[Figure], step_seconds: float | None) -> tuple[float, str]:
    """Return the seconds between saves: as the configuration says, where there is one, or the interval of the plan;
    and whose."""
    from ckptman.cli.plan_report import value_of
    from ckptman.forecast.disk_forecast import cadence_seconds

    stall, save, restart = (value_of(figures, name) for name in ("stall", "save", "restart"))
    own = cadence_seconds(policy, stall, save, restart, step_seconds)
    seconds, who = value_of(figures, "interval"), ""
    if own is not None:
        seconds, who = own, " (by the configuration, no shorter than a save)"
    return (seconds, who) if step_seconds is None or step_seconds <= seconds else (step_seconds, " (a step)")


def _limit_bytes(policy: RetentionPolicy | None) -> int | None:
    from ckptman.policies.retention_rules import limited

    limit = limited(policy)
    return None if limit is None else limit.bytes
