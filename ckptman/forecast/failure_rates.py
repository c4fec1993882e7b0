"""How often machines fail: published rates, scaled to a number of GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from ckptman.errors import ConfigError
from ckptman.forecast.figures import Figure, time_text
from ckptman.policies.parameters import check_count


@dataclass(frozen=True)
class Rate:
    """`interruptions` in all, over `gpu_hours` (GPUs x hours)."""

    name: str
    interruptions: float
    gpu_hours: float
    how: str
    source: str


MOST_GPUS = 200_000
"""More than any machine has."""
RATES = (
    Rate(
        "llama3",
        419,
        54 * 24 * 16_384,
        "419 unexpected interruptions in 54 days on 16,384 GPUs",
        "Grattafiori et al., The Llama 3 Herd of Models, arXiv 2407.21783, 2024",
    ),
    Rate(
        "rsc1",
        6.5,
        1000 * 24 * 8,
        "6.5 failures in 1,000 days of nodes of 8 GPUs",
        "Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, arXiv 2410.21680",
    ),
)


def rate_named(name: str) -> Rate:
    """One of `RATES`. Raises: ConfigError naming those there are."""
    for each in RATES:
        if each.name == name:
            return each
    known = ", ".join(each.name for each in RATES)
    raise ConfigError(f"no published rate {name!r}; there are {known}; or give your own mean time with --mtbf")


def mtbf_figure(gpus: int, rate: Rate) -> Figure:
    """Mean seconds between failures of so many GPUs: one that fails ends the run. Raises IntervalError, ConfigError."""
    check_count("failures", "gpus", gpus)
    if gpus > MOST_GPUS:
        raise ConfigError(f"gpus: at most {MOST_GPUS:,}, more than any machine has")
    hours = rate.gpu_hours / rate.interruptions
    seconds = hours * 3600 / gpus
    many = f"{gpus:,} GPU{'s' if gpus > 1 else ''}"
    return Figure(
        "mtbf",
        seconds,
        "seconds",
        f"{rate.how}: one in {hours:,.0f} GPU hours; / {many} = {time_text(seconds)}",
        f"{rate.source}. A scaling, and no measurement: your own journal knows better",
    )
