"""`ckptman simulate`: a month of failures, played against intervals between saves."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from ckptman.cli import console
from ckptman.cli.options import (
    OTHERS,
    AsJson,
    MemoryOption,
    RestartInPlaceOption,
    SurvivedOption,
    option,
    parse_seconds,
    parse_share,
)
from ckptman.errors import ConfigError, ExistsError
from ckptman.forecast.failure_costs import IN_PLACE, SURVIVED, WITH_MEMORY
from ckptman.forecast.failure_rates import mtbf_figure, rate_named
from ckptman.forecast.figures import time_text
from ckptman.forecast.goodput import Costs, InMemory, best_interval_seconds
from ckptman.forecast.save_costs import BOUND_SECONDS, LEAST_INTERVAL_SECONDS
from ckptman.forecast.simulation import Played, add_up, play, play_grid
from ckptman.policies.intervals import daly_interval_seconds
from ckptman.policies.memory_tier import CostShare
from ckptman.policies.parameters import check_count
from ckptman.runtime.failure_trace import Trace, read_trace

FAILURES = 5_000
MOST_RUNS = 1_000
MOST_EVENTS = 100_000
"""Failures and runs that are played: more take minutes and tell no more."""
_POINTS, _CURVE_STEP = 97, 8
"""So many intervals are searched for the best; the curve shows one in so many of them."""
_BAR = 44
_EIGHTHS = ("", *"▏▎▍▌▋▊▉")
_PICTURE_COLUMNS = 100


@dataclass(frozen=True)
class _Named:
    """What a policy yields. `spread`: the goodput that nine of ten runs lie between; `of_best`: beside the best one."""

    name: str
    played: Played
    spread: tuple[float, float]
    of_best: float


def simulate(
    stall: Annotated[str | None, option("--stall", "TIME", "For so long a save blocks training (5s).", "Costs")] = None,
    save: Annotated[
        str | None, option("--save", "TIME", "Until a save is durable (60s, or as long as --stall).")
    ] = None,
    restart: Annotated[
        str | None, option("--restart", "TIME", "From a failure until training goes on (20min).")
    ] = None,
    mtbf: Annotated[
        str | None, option("--mtbf", "TIME", "Mean time between failures, which come at random.", "Failures")
    ] = None,
    gpus: Annotated[int | None, option("--gpus", "N", "Instead: that of so many GPUs, by a published rate.")] = None,
    rate: Annotated[str, option("--rate", "NAME", "Which one: llama3 (the default), rsc1.")] = "llama3",
    trace: Annotated[
        Path | None,
        option("--trace", "FILE", "Instead: recorded failures; a file of times, a journal, or a root with a journal."),
    ] = None,
    length: Annotated[str | None, option("--length", "TIME", "Of a run (30d; of a trace, all of it).")] = None,
    runs: Annotated[int | None, option("--runs", "N", "Play so many runs (enough for 5,000 failures).")] = None,
    seed: Annotated[int, option("--seed", "N", "Of the failures at random (1).")] = 1,
    interval: Annotated[
        list[str] | None, option("--interval", "TIME", "Play this one too. May be given several times.")
    ] = None,
    memory: MemoryOption = False,
    memory_interval: Annotated[
        str | None, option("--memory-interval", "TIME", "How often (as costs 1 % of the time).")
    ] = None,
    memory_save: Annotated[
        str | None, option("--memory-save", "TIME", "Until a checkpoint in memory counts (10s, or as --stall).")
    ] = None,
    restart_in_place: RestartInPlaceOption = None,
    survived: SurvivedOption = None,
    svg: Annotated[Path | None, option("--svg", "FILE", "Draw the chart into a file.", OTHERS)] = None,
    as_json: AsJson = False,
) -> None:
    """Play a month of failures against intervals between saves.

    Says what each policy yields, beside the best fixed interval that a search finds on the same failures. "derived" is
    the best interval of `ckptman plan`, without the plan's bound of 15 minutes. With --memory, it is played with
    checkpoints in memory too, and with --restart-in-place with restarts inside the allocation.
    """
    if sum(each is not None for each in (mtbf, gpus, trace)) != 1:
        raise ConfigError("say how often it fails: one of --mtbf 8h, --gpus 1024, --trace FILE")
    recorded = None if trace is None else read_trace(trace, lambda written: parse_seconds("a failure", written))
    costs = _costs(stall, save, restart, recorded)
    mean, words = _mean(mtbf, gpus, rate, recorded, trace)
    wanted = [parse_seconds("--interval", each) for each in interval or []]
    played, seconds = _failures(recorded, mean, length, runs, seed)
    # Intervals from as often as can be to some times the derived one: the best is searched for among them.
    least = max(costs.settled_seconds, LEAST_INTERVAL_SECONDS)
    most = max(2 * least, 8 * best_interval_seconds(costs.stall_seconds, min(mean, seconds)))
    grid = play_grid(played, seconds, costs, least, most, _POINTS)
    best = max(grid, key=lambda each: each.goodput)
    found = [
        _named(name, best, [play(failures, seconds, costs, each) for failures in played])
        for name, each in [("best fixed", best.interval_seconds), *_intervals(costs, mean, wanted)]
    ]
    share = SURVIVED if survived is None else parse_share("--survived", survived)
    near: dict[str, InMemory] = {}
    if memory or any(each is not None for each in (memory_interval, memory_save, restart_in_place, survived)):
        near = _in_memory(costs, memory_interval, memory_save, restart_in_place)
        ways = _play_memory(near, share, played, seconds, costs, mean, seed)
        found += [_named(name, best, each) for name, each in ways]
    chart = _chart(grid[::_CURVE_STEP], found)
    if svg is not None:
        _draw(svg, chart, f"Goodput by interval: {words}")
    if as_json:
        made = _as_dict(found, costs, mean, seconds, len(played), seed if recorded is None else None)
        console.say_json(made | _memory_as_dict(near, share))
        return
    s, d, r = (time_text(each) for each in (costs.stall_seconds, costs.settled_seconds, costs.restart_seconds))
    failures = console.count(sum(map(len, played)), "failure")
    origin = f"seed {seed}" if recorded is None else "as recorded"
    lines = [
        f"{words}; a save blocks {s} and is durable after {d}; a restart takes {r}",
        f"{console.count(len(played), 'run')} of {time_text(seconds)}, {failures} ({origin})",
        *_memory_lines(near, share),
        "",
        *console.table(_HEADERS, map(_row, found), right=_RIGHT, drop=_DROPPED),
        "",
        *chart,
    ]
    console.say(*lines)


def _named(name: str, best: Played, runs: Sequence[Played]) -> _Named:
    goodputs = sorted(each.goodput for each in runs)
    edge = len(goodputs) // 20
    total = add_up(runs)
    of_best = total.goodput / best.goodput if best.goodput else 1.0
    return _Named(name, total, (goodputs[edge], goodputs[-1 - edge]), of_best)


def _in_memory(costs: Costs, interval: str | None, save: str | None, in_place: str | None) -> dict[str, InMemory]:
    """Return how saves to memory are played, by the way that training goes on after a failure. Raises: ConfigError."""
    stall = costs.stall_seconds
    counts = max(stall, _cost("--memory-save", save, None, 10.0))
    wanted = stall / CostShare().share if interval is None else parse_seconds("--memory-interval", interval)
    seconds = max(wanted, counts, LEAST_INTERVAL_SECONDS)
    # What is in memory is on disk before the job ends, which takes as long as a save.
    restarts = {WITH_MEMORY: costs.restart_seconds + costs.settled_seconds}
    if in_place is not None:
        restarts[IN_PLACE] = parse_seconds("--restart-in-place", in_place)
    return {
        name: InMemory(Costs(stall, counts, restart), seconds, flushed=name == WITH_MEMORY)
        for name, restart in restarts.items()
    }


def _play_memory(
    near: dict[str, InMemory],
    share: float,
    played: Sequence[Sequence[float]],
    seconds: float,
    costs: Costs,
    mean: float,
    seed: int,
) -> Iterator[tuple[str, list[Played]]]:
    """Play each way on the same failures, of which the same ones are survived, at the derived interval."""
    generator = random.Random(f"survived {seed}")
    survived = [[generator.random() < share for _ in failures] for failures in played]
    _, interval = _intervals(costs, mean, ())[0]
    for name, memory in near.items():
        yield name, [play(each, seconds, costs, interval, memory, lasts) for each, lasts in zip(played, survived)]


def _cost(option: str, written: str | None, measured: float | None, likely: float) -> float:
    """Return the seconds as given, as the journal of a trace measured them, or what is likely."""
    if written is None:
        return likely if measured is None else measured
    return 0.0 if written.strip() in ("0", "0s") else parse_seconds(option, written)


def _costs(stall: str | None, save: str | None, restart: str | None, recorded: Trace | None) -> Costs:
    stall_seconds = _cost("--stall", stall, recorded.stall_seconds if recorded else None, 5.0)
    save_seconds = _cost("--save", save, recorded.save_seconds if recorded else None, 60.0)
    restart_seconds = _cost("--restart", restart, recorded.restart_seconds if recorded else None, 1200.0)
    if save is not None and save_seconds < stall_seconds:
        raise ConfigError(
            f"--save {save}: a save is not durable before it lets go of training, after {time_text(stall_seconds)}"
        )
    return Costs(stall_seconds, max(stall_seconds, save_seconds), restart_seconds)


def _mean(
    mtbf: str | None, gpus: int | None, rate: str, recorded: Trace | None, path: Path | None
) -> tuple[float, str]:
    """Mean seconds between failures, and what to call them."""
    if recorded is not None:
        how_often = f"one in {time_text(recorded.mtbf_seconds)}" if recorded.failures else "none"
        return recorded.mtbf_seconds, f"failures of {console.plain(path)}: {how_often}"
    if gpus is not None:
        check_count("simulate", "--gpus", gpus)
        figure = mtbf_figure(gpus, rate_named(rate))
        return figure.value, f"a failure in {figure.text} ({console.count(gpus, 'GPU')}, {rate})"
    seconds = parse_seconds("--mtbf", mtbf or "")
    return seconds, f"a failure in {time_text(seconds)}"


def _failures(
    recorded: Trace | None, mean: float, length: str | None, runs: int | None, seed: int
) -> tuple[list[Sequence[float]], float]:
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
    check_count("simulate", "--runs", runs)
    if runs > MOST_EVENTS:
        raise ConfigError(f"--runs: at most {MOST_EVENTS:,} can be played in a while: give fewer --runs")
    if (events := max(runs, runs * seconds / mean)) > MOST_EVENTS:
        raise ConfigError(
            f"{events:,.0f} failures or runs are more than the {MOST_EVENTS:,} that can be played in a while: give "
            f"fewer --runs, a shorter --length or a longer --mtbf"
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


def _intervals(costs: Costs, mean: float, wanted: Sequence[float]) -> list[tuple[str, float]]:
    """Return the intervals that policies take, with their names, and those that were asked for."""
    settled = costs.settled_seconds
    least = max(settled, LEAST_INTERVAL_SECONDS)
    daly = daly_interval_seconds(costs.stall_seconds, mean, costs.restart_seconds)
    held = f", held to {time_text(settled)}"
    return [
        ("derived", max(least, best_interval_seconds(costs.stall_seconds, mean))),
        ("DalyInterval", max(least, daly)),
        ("InitTimeInterval", max(least, min(4 * costs.restart_seconds, BOUND_SECONDS))),
        ("every 15 min", max(least, BOUND_SECONDS)),
        *((f"every {time_text(each)}{held if each < settled else ''}", each) for each in wanted),
    ]


def _memory_lines(near: dict[str, InMemory], share: float) -> Iterator[str]:
    for name, memory in near.items():
        often, counts, restart = (
            time_text(each)
            for each in (memory.interval_seconds, memory.costs.settled_seconds, memory.costs.restart_seconds)
        )
        yield f"{name}: every {often}, counts after {counts}; {100 * share:.3g} % of the failures restart in {restart}"


def _memory_as_dict(near: dict[str, InMemory], share: float) -> dict[str, Any]:
    if not near:
        return {}
    ways = [
        {
            "name": name,
            "interval_seconds": memory.interval_seconds,
            "counts_seconds": memory.costs.settled_seconds,
            "restart_seconds": memory.costs.restart_seconds,
        }
        for name, memory in near.items()
    ]
    return {"memory": {"survived": share, "ways": ways}}


_HEADERS = ("policy", "interval", "saves", "lost", "stalled", "restarting", "goodput", "9 of 10 runs", "of the best")
_DROPPED = ("9 of 10 runs", "saves", "restarting", "stalled", "of the best")
_RIGHT = "interval saves lost stalled restarting goodput"


def _row(each: _Named) -> tuple[str, ...]:
    played = each.played
    shares = (played.lost_seconds, played.stalled_seconds, played.restarting_seconds)
    low, high = each.spread
    return (
        each.name,
        time_text(played.interval_seconds),
        f"{played.saves:,}",
        *(f"{100 * share / played.seconds:.2f} %" for share in shares),
        f"{100 * played.goodput:.2f} %",
        f"{100 * low:.1f} to {100 * high:.1f} %",
        f"{100 * each.of_best:.2f} %",
    )


def _chart(curve: Sequence[Played], found: Sequence[_Named]) -> list[str]:
    """A bar for each interval, those of the policies with their names. Bars begin where the scale says."""
    points = [*((each, "") for each in curve), *((each.played, each.name) for each in found)]
    points.sort(key=lambda point: point[0].interval_seconds)
    low, high = _scale([played.goodput for played, _ in points])
    lengths = [time_text(played.interval_seconds) for played, _ in points]
    width = max(map(len, ["interval", *lengths]))
    beside = width + len("   100.00 %  ") + max(len(name) for _, name in points)
    bar_columns = max(8, min(_BAR, (console.terminal_width() or 120) - beside))
    lines = [f"{'interval':>{width}}  goodput, from {100 * low:.4g} % to {100 * high:.4g} %"]
    for (played, name), length in zip(points, lengths):
        eighths = round((played.goodput - low) / (high - low) * bar_columns * 8)
        bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8]
        line = f"{length:>{width}}  {console.paint(bar, 'green') if name else bar} {100 * played.goodput:.2f} %"
        lines.append(f"{line}  {console.plain(name)}" if name else line)
    return lines


def _scale(values: Sequence[float]) -> tuple[float, float]:
    """Round bounds around shares, so that small differences can be seen."""
    low, high = min(values), max(values)
    for step in (0.001, 0.005, 0.01, 0.05, 0.1):
        if high - low <= 10 * step:
            break
    floor = math.floor(low / step) * step
    return floor, max(math.ceil(high / step) * step, floor + step)


def _draw(path: Path, chart: Sequence[str], title: str) -> None:
    """Write the chart as a picture. Nothing but an earlier picture is overwritten. Raises: ExistsError."""
    import io

    from rich.console import Console
    from rich.text import Text

    canvas = Console(record=True, width=_PICTURE_COLUMNS, file=io.StringIO())
    canvas.print(Text.from_ansi("\n".join(chart)), no_wrap=True)
    # Fonts are not fetched from elsewhere when the picture is opened.
    picture = re.sub(r"@font-face \{.*?\}", "", canvas.export_svg(title=title), flags=re.DOTALL)
    if path.exists() and not (path.is_file() and path.read_bytes()[:4] == b"<svg"):
        raise ExistsError(f"{path} is there and is not a picture: name another file to --svg")
    path.write_text(picture, encoding="utf-8")


def _as_dict(
    found: Sequence[_Named], costs: Costs, mean: float, seconds: float, runs: int, seed: int | None
) -> dict[str, Any]:
    return {
        "mtbf_seconds": mean,
        "stall_seconds": costs.stall_seconds,
        "durable_seconds": costs.settled_seconds,
        "restart_seconds": costs.restart_seconds,
        "run_seconds": seconds,
        "runs": runs,
        "seed": seed,
        "failures": found[0].played.failures,
        "policies": [
            {
                "name": each.name,
                "goodput": each.played.goodput,
                "goodput_low": each.spread[0],
                "goodput_high": each.spread[1],
                "of_best": each.of_best,
                **{name: value for name, value in asdict(each.played).items() if name not in ("seconds", "failures")},
            }
            for each in found
        ],
    }
