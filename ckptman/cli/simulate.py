"""`ckptman simulate`: a month of failures, played against intervals between saves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from ckptman.cli import console
from ckptman.cli.options import (
    AsJson,
    MemoryOption,
    RestartInPlaceOption,
    SurvivedOption,
    option,
    parse_seconds,
    parse_share,
)
from ckptman.errors import ConfigError
from ckptman.forecast.failure_costs import IN_PLACE, SURVIVED, WITH_MEMORY
from ckptman.forecast.figures import time_text
from ckptman.forecast.goodput import Costs, InMemory, best_interval_seconds
from ckptman.forecast.save_costs import BOUND_SECONDS, LEAST_INTERVAL_SECONDS
from ckptman.forecast.scenario import mtbf_figure
from ckptman.forecast.simulation import Played, add_up, play
from ckptman.policies.intervals import daly_interval_seconds
from ckptman.policies.tiers import SHARE
from ckptman.runtime.failure_trace import Trace, read_trace

FAILURES = 5_000
MOST_RUNS = 1_000
MOST_EVENTS = 100_000
"""Failures and runs that are played: more take minutes and tell no more."""
_POINTS = 97
"""Intervals that are searched for the best."""
_HEADERS = ("policy", "interval", "saves", "lost", "stalled", "restarting", "goodput", "9 of 10 runs", "of the best")
_DROPPED = ("9 of 10 runs", "saves", "restarting", "stalled", "of the best")


def simulate(
    stall: Annotated[str | None, option("--stall", "TIME", "How long a save blocks training (5s).", "Costs")] = None,
    save: Annotated[str | None, option("--save", "TIME", "Until a save is durable (60s, or as --stall).")] = None,
    restart: Annotated[str | None, option("--restart", "TIME", "From a failure to training again (20min).")] = None,
    mtbf: Annotated[
        str | None, option("--mtbf", "TIME", "Mean time between failures, which come at random.", "Failures")
    ] = None,
    gpus: Annotated[int | None, option("--gpus", "N", "Instead: that of N GPUs, at a published rate.", least=1)] = None,
    rate: Annotated[str, option("--rate", "NAME", "The published rate: llama3 (default), rsc1.")] = "llama3",
    trace: Annotated[
        Path | None,
        option("--trace", "FILE", "Instead: recorded failures; a file of times, a journal, or a root with a journal."),
    ] = None,
    length: Annotated[str | None, option("--length", "TIME", "Length of a run (30d, or all of a trace).")] = None,
    runs: Annotated[int | None, option("--runs", "N", "Number of runs (enough for 5,000 failures).", least=1)] = None,
    seed: Annotated[int, option("--seed", "N", "Seed of the random failures (1).")] = 1,
    interval: Annotated[list[str] | None, option("--interval", "TIME", "Play this too. Can be repeated.")] = None,
    memory: MemoryOption = False,
    memory_interval: Annotated[str | None, option("--memory-interval", "TIME", "How often (at a cost of 1 %).")] = None,
    memory_save: Annotated[
        str | None, option("--memory-save", "TIME", "Until a checkpoint in memory counts (10s, or as --stall).")
    ] = None,
    restart_in_place: RestartInPlaceOption = None,
    survived: SurvivedOption = None,
    as_json: AsJson = False,
) -> None:
    """Play a month of failures against intervals between saves.

    Shows what each policy yields, compared with the best fixed interval that a search finds on the same failures.
    "derived" is the best interval of `ckptman plan`, without the plan's bound of 15 minutes. With --memory, it is
    played with checkpoints in memory too, and with --restart-in-place with restarts inside the allocation.
    """
    if sum(each is not None for each in (mtbf, gpus, trace)) != 1:
        raise ConfigError("say how often it fails: one of --mtbf 8h, --gpus 1024, --trace FILE")
    recorded = None if trace is None else read_trace(trace, lambda written: parse_seconds("a failure", written))
    costs = _costs(stall, save, restart, recorded)
    if recorded is not None:
        mean = recorded.mtbf_seconds
        how_often = f"one in {time_text(mean)}" if recorded.failures else "none"
        words = f"failures of {trace}: {how_often}"
    elif gpus is not None:
        mean = mtbf_figure(gpus, rate).value
        words = f"a failure in {time_text(mean)} ({console.count(gpus, 'GPU')}, {rate})"
    else:
        mean = parse_seconds("--mtbf", mtbf or "")
        words = f"a failure in {time_text(mean)}"
    failures, seconds = _failures(recorded, mean, length, runs, seed)

    def played(interval_seconds: float) -> list[Played]:
        return [play(each, seconds, costs, interval_seconds) for each in failures]

    least = max(costs.durable_seconds, LEAST_INTERVAL_SECONDS)
    derived = max(least, best_interval_seconds(costs.stall_seconds, mean))
    longest = max(2 * least, 8 * best_interval_seconds(costs.stall_seconds, min(mean, seconds)))
    grid = (least * (longest / least) ** (number / (_POINTS - 1)) for number in range(_POINTS))
    curve = [add_up(played(each)) for each in grid]
    best = max(curve, key=lambda each: each.goodput)
    intervals = {
        "best fixed": best.interval_seconds,
        "derived": derived,
        "DalyInterval": max(least, daly_interval_seconds(costs.stall_seconds, mean, costs.restart_seconds)),
        "InitTimeInterval": max(least, min(4 * costs.restart_seconds, BOUND_SECONDS)),
        "every 15 min": max(least, BOUND_SECONDS),
    }
    for each in (parse_seconds("--interval", written) for written in interval or []):
        held = f", held to {time_text(costs.durable_seconds)}" if each < costs.durable_seconds else ""
        intervals[f"every {time_text(each)}{held}"] = each
    found = [_yield(name, played(each), best) for name, each in intervals.items()]
    share = SURVIVED if survived is None else parse_share("--survived", survived)
    ways: dict[str, InMemory] = {}
    if memory or any(each is not None for each in (memory_interval, memory_save, restart_in_place, survived)):
        ways = _in_memory(costs, memory_interval, memory_save, restart_in_place)
    for name, near in ways.items():
        generator = random.Random(f"survived {seed}")
        lasts = [[generator.random() < share for _ in each] for each in failures]
        runs_of = [play(each, seconds, costs, derived, near, of) for each, of in zip(failures, lasts)]
        found.append(_yield(name, runs_of, best))
    told = [_way(name, way) for name, way in ways.items()]
    many = sum(map(len, failures))
    if as_json:
        made = {"mtbf_seconds": mean, **asdict(costs), "run_seconds": seconds, "runs": len(failures)}
        made |= {"seed": seed if recorded is None else None, "failures": many, "policies": found}
        made["curve"] = [{"interval_seconds": each.interval_seconds, "goodput": each.goodput} for each in curve]
        if ways:
            made["memory"] = {"survived": share, "ways": told}
        console.say_json(made)
        return
    s, d, r = map(time_text, asdict(costs).values())
    origin = f"seed {seed}" if recorded is None else "as recorded"
    lines = [
        f"{words}; a save blocks {s} and is durable after {d}; a restart takes {r}",
        f"{console.count(len(failures), 'run')} of {time_text(seconds)}, {console.count(many, 'failure')} ({origin})",
    ]
    for way in told:
        often, counts, away = (time_text(way[f"{each}_seconds"]) for each in ("interval", "counts", "restart"))
        restarts = f"{100 * share:.3g} % of the failures restart in {away}"
        lines.append(f"{way['name']}: every {often}, counts after {counts}; {restarts}")
    rows = console.table(_HEADERS, map(_row, found), right=" ".join(_HEADERS[1:-2]), drop=_DROPPED)
    console.say(*lines, "", *rows)


def _yield(name: str, runs: Sequence[Played], best: Played) -> dict[str, Any]:
    """Return what a policy yields in all runs, the range of nine in ten of them, and how it compares with the best."""
    total, goodputs = add_up(runs), sorted(each.goodput for each in runs)
    edge = len(goodputs) // 20
    return {
        "name": name,
        **asdict(total),
        "goodput": total.goodput,
        "goodput_low": goodputs[edge],
        "goodput_high": goodputs[-1 - edge],
        "of_best": total.goodput / best.goodput if best.goodput else 1.0,
    }


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    shares = (found[f"{part}_seconds"] / found["seconds"] for part in ("lost", "stalled", "restarting"))
    return (
        found["name"],
        time_text(found["interval_seconds"]),
        f"{found['saves']:,}",
        *(f"{100 * share:.2f} %" for share in (*shares, found["goodput"])),
        f"{100 * found['goodput_low']:.1f} to {100 * found['goodput_high']:.1f} %",
        f"{100 * found['of_best']:.2f} %",
    )


def _way(name: str, way: InMemory) -> dict[str, Any]:
    return {
        "name": name,
        "interval_seconds": way.interval_seconds,
        "counts_seconds": way.costs.settled_seconds,
        "restart_seconds": way.costs.restart_seconds,
    }


def _costs(stall: str | None, save: str | None, restart: str | None, recorded: Trace | None) -> Costs:
    """Return what is given, else what the journal of a trace measured, else what is likely. Raises: ConfigError."""
    measured = (recorded.stall_seconds, recorded.save_seconds, recorded.restart_seconds) if recorded else (None,) * 3
    found = [
        _cost(option, written, likely if known is None else known)
        for option, written, known, likely in zip(
            ("--stall", "--save", "--restart"), (stall, save, restart), measured, (5.0, 60.0, 1200.0)
        )
    ]
    if save is not None and found[1] < found[0]:
        raise ConfigError(
            f"--save {save}: a save is not durable before it lets go of training, after {time_text(found[0])}"
        )
    return Costs(found[0], max(found[:2]), found[2])


def _cost(option: str, written: str | None, otherwise: float) -> float:
    if written is None:
        return otherwise
    return 0.0 if written.strip() in ("0", "0s") else parse_seconds(option, written)


def _in_memory(costs: Costs, interval: str | None, save: str | None, in_place: str | None) -> dict[str, InMemory]:
    """Return how saves to memory are played, by the way to resume after a failure. Raises: ConfigError."""
    stall = costs.stall_seconds
    counts = max(stall, _cost("--memory-save", save, 10.0))
    wanted = stall / SHARE if interval is None else parse_seconds("--memory-interval", interval)
    seconds = max(wanted, counts, LEAST_INTERVAL_SECONDS)
    # Memory is written to disk before the job ends, which takes as long as a save.
    flushed = Costs(stall, counts, costs.restart_seconds + costs.durable_seconds)
    ways = {WITH_MEMORY: InMemory(flushed, seconds, flushed=True)}
    if in_place is not None:
        ways[IN_PLACE] = InMemory(Costs(stall, counts, parse_seconds("--restart-in-place", in_place)), seconds)
    return ways


def _failures(
    recorded: Trace | None, mean: float, length: str | None, runs: int | None, seed: int
) -> tuple[list[list[float]], float]:
    """Return the failures of each run, and how long a run is. Raises: ConfigError."""
    seconds = None if length is None else parse_seconds("--length", length)
    if recorded is not None:
        if runs is not None:
            raise ConfigError("--runs: a trace is one run; leave it out, or give --mtbf")
        if seconds is not None and seconds > recorded.seconds:
            raise ConfigError(f"--length {length}: the trace ends after {time_text(recorded.seconds)}; leave it out")
        seconds = seconds or recorded.seconds
        return [[each for each in recorded.failures if each <= seconds]], seconds
    seconds = seconds or 30 * 86400.0
    if runs is None:
        runs = max(1, min(round(FAILURES * mean / seconds), MOST_RUNS))
    if runs > MOST_EVENTS or runs * seconds / mean > MOST_EVENTS:
        raise ConfigError(
            f"more than {MOST_EVENTS:,} failures or runs take too long to play: give fewer --runs, a shorter --length "
            f"or a longer --mtbf"
        )
    generator = random.Random(seed)
    return [_at_random(generator, mean, seconds) for _ in range(runs)], seconds


def _at_random(generator: random.Random, mean: float, seconds: float) -> list[float]:
    found: list[float] = []
    time = generator.expovariate(1 / mean)
    while time < seconds:
        found.append(time)
        time += generator.expovariate(1 / mean)
    return found
