"""Whether a loader keeps up with the training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["enough", "tight", "starves"]

MARGIN = 1.2
"""Below this many times the need is tight: a file system is not always as fast as it was during the measurement."""
ENOUGH_WAIT, TIGHT_WAIT = 0.1, 0.3
"""The share of a step that devices may wait for a batch that is loaded between steps: utilization of 90 % and 70 %."""


@dataclass(frozen=True)
class Need:
    """What the training on a node consumes. Each of its ranks has a loader."""

    steps_per_second: float
    batches_per_step: int = 1
    ranks_per_node: int = 1

    @property
    def batches_per_second(self) -> float:
        """The rate that all ranks of the node need together."""
        return self.steps_per_second * self.batches_per_step * self.ranks_per_node

    @property
    def text(self) -> str:
        """How the rate comes about: `2.5 steps/s x 8 ranks`."""
        batches = f" x {self.batches_per_step} batches" if self.batches_per_step > 1 else ""
        ranks = f" x {self.ranks_per_node} ranks" if self.ranks_per_node > 1 else ""
        return f"{rate_text(self.steps_per_second)} steps/s{batches}{ranks}"


@dataclass(frozen=True)
class Judgement:
    """Whether data keeps up, and a sentence about it.

    `times`: the rate of the loader divided by the need. `workers`: of the whole node (0: the training processes load
    the data themselves). `num_workers`: for the loader of each rank.
    """

    verdict: Verdict
    times: float
    workers: int
    num_workers: int
    text: str


def judge(need: Need, rates: Sequence[tuple[int, float]], cpus: int) -> Judgement:
    """Judge a loader by its batches per second with each number of workers. `cpus`: those the node has for it.

    The workers of the measured loader represent those of all loaders of the node: 8 workers give what 4 loaders with 2
    each give. Without workers, each rank loads its own batches, and waits meanwhile.
    """
    judged = [
        _with_workers(need, workers, rate, cpus) if workers else _without_workers(need, rate, cpus)
        for workers, rate in sorted(rates)
    ]
    for verdict in ("enough", "tight"):
        for each in judged:
            if each.verdict == verdict:
                return each
    return max(judged, key=lambda each: (each.workers > 0, each.times))


def _without_workers(need: Need, rate: float, cpus: int) -> Judgement:
    waits = need.batches_per_second / (rate * min(need.ranks_per_node, cpus))
    share = f"{100 * waits:.2g} %" if waits < 0.995 else "all"
    told = f"without workers ({need.text}), {share} of each step is spent waiting for its data"
    if waits <= ENOUGH_WAIT:
        return Judgement("enough", 1 / waits, 0, 0, f"Data will not starve the GPUs: {told}.")
    if waits <= TIGHT_WAIT:
        return Judgement("tight", 1 / waits, 0, 0, f"Data holds the GPUs up: {told}; use workers.")
    return Judgement("starves", 1 / waits, 0, 0, f"Data will starve the GPUs: {told}; use workers.")


def _with_workers(need: Need, workers: int, rate: float, cpus: int) -> Judgement:
    wanted = need.batches_per_second
    each = math.ceil(workers / need.ranks_per_node)
    needs = f"this node needs {rate_text(wanted)} batches/s ({need.text})"
    gives = f"{'1 worker gives' if workers == 1 else f'{workers} workers give'} {rate_text(rate)} batches/s"
    if need.ranks_per_node > 1:
        gives += f", num_workers={each} in each of the {need.ranks_per_node} ranks"
    if rate >= MARGIN * wanted:
        text = f"Data will not starve the GPUs: {needs}, and {gives}."
        return Judgement("enough", rate / wanted, workers, each, text)
    if rate >= wanted:
        risk = f"under {MARGIN:g} times the need, a slow moment of the file system holds the GPUs up"
        return Judgement("tight", rate / wanted, workers, each, f"Data is tight: {needs}, and {gives}; {risk}.")
    more = math.ceil(workers * wanted * MARGIN / rate)
    remedy = f"about {more} workers would do if each gave as much"
    if more > cpus:
        remedy += (
            f", more than there are CPUs here ({cpus}): do less for each sample, or prepare the data before the run"
        )
    text = f"Data will starve the GPUs: {needs}, but {gives}; {remedy}."
    return Judgement("starves", rate / wanted, workers, each, text)


def rate_text(rate: float) -> str:
    """Return a number per second to three digits: `0.031`, `2.5`, `1,320`."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
