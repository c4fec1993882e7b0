"""Whether a loader keeps up with the training, and what a node reads from its file system for that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["enough", "tight", "starves"]

MARGIN = 1.2
"""Less than this many times the need is tight: no file system is as fast all the time as it was just now."""
WORTH_A_LOOK, PROBLEM = 0.1, 0.3
"""Shares of a step that devices may wait for a batch that is loaded between steps: a utilisation of 90 %, and 70 %."""
MUCH_BYTES_PER_SECOND, TOO_MUCH_BYTES_PER_SECOND = 0.5e9, 1e9
"""What a node may read from a shared file system before others notice, by the practitioners' rule."""


@dataclass(frozen=True)
class Need:
    """What the training on a node consumes. `ranks`: loaders on the node, each for one rank."""

    steps_per_second: float
    batches_per_step: int = 1
    ranks: int = 1

    @property
    def batches_per_second(self) -> float:
        """Of all ranks on the node."""
        return self.steps_per_second * self.batches_per_step * self.ranks

    @property
    def text(self) -> str:
        """Where the number comes from: `2.5 steps/s x 8 ranks`."""
        batches = f" x {self.batches_per_step} batches" if self.batches_per_step > 1 else ""
        ranks = f" x {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{rate_text(self.steps_per_second)} steps/s{batches}{ranks}"


@dataclass(frozen=True)
class Judgement:
    """Whether data keeps up, with which `workers` of the node (0: in the training processes), and a sentence about it.

    `times`: the rate of the loader over the need. `num_workers`: for the loader of each rank.
    """

    verdict: Verdict
    times: float
    workers: int
    num_workers: int
    text: str


def judge(need: Need, rates: Sequence[tuple[int, float]], cpus: int) -> Judgement:
    """Judge a loader by the batches per second that it gives with so many workers, of which there is at least one.

    The workers of one loader stand for those of all loaders of the node: 8 give what 4 loaders with 2 each give.
    Without workers each rank loads for itself, and waits meanwhile. `cpus`: those that the node has for it.
    """
    wanted = need.batches_per_second
    judged = [_one(need, workers, rate, cpus) for workers, rate in sorted(rates)]
    for verdict in ("enough", "tight"):
        if found := next((each for each in judged if each.verdict == verdict), None):
            return found
    workers, rate = max(((workers, rate) for workers, rate in rates if workers), key=_rate, default=(0, 0.0))
    if not workers:
        return judged[0]
    more = math.ceil(workers * wanted * MARGIN / rate)
    remedy = (
        f"about {more} workers would do if each gave as much"
        if more <= cpus
        else f"that would take some {more} workers, and there are {_count(cpus, 'CPU')} here: do less for each sample, "
        f"or prepare the data before the run"
    )
    text = (
        f"Data will starve the GPUs: this node needs {rate_text(wanted)} batches/s ({need.text}), and the loader gives "
        f"{rate_text(rate)} batches/s at most, with {_count(workers, 'worker')}; {remedy}."
    )
    return Judgement("starves", rate / wanted, workers, math.ceil(workers / need.ranks), text)


def _one(need: Need, workers: int, rate: float, cpus: int) -> Judgement:
    wanted = need.batches_per_second
    verdict: Verdict
    if not workers:
        rate *= min(need.ranks, cpus)
        waits = wanted / rate
        verdict = "enough" if waits <= WORTH_A_LOOK else "tight" if waits <= PROBLEM else "starves"
        begins = {
            "enough": "Data will not starve the GPUs",
            "tight": "Data holds the GPUs up",
            "starves": "Data will starve the GPUs",
        }[verdict]
        text = f"{begins}: without workers ({need.text}), {_share(waits)} of each step is spent waiting for its data"
        return Judgement(verdict, rate / wanted, 0, 0, text + ("." if verdict == "enough" else "; use workers."))
    each = math.ceil(workers / need.ranks)
    verdict = "enough" if rate >= MARGIN * wanted else "tight" if rate >= wanted else "starves"
    begins = "Data will not starve the GPUs" if verdict == "enough" else "Data is tight"
    ranks = f", num_workers={each} in each of the {need.ranks} ranks" if need.ranks > 1 else ""
    text = (
        f"{begins}: this node needs {rate_text(wanted)} batches/s ({need.text}), and {_count(workers, 'worker')} "
        f"{'give' if workers > 1 else 'gives'} {rate_text(rate)} batches/s{ranks}"
    )
    if verdict != "enough":
        text += f"; under {MARGIN:g} times the need, a slow moment of the file system holds the GPUs up"
    return Judgement(verdict, rate / wanted, workers, each, text + ".")


def rate_text(rate: float) -> str:
    """Return a number per second to three digits: `0.031`, `2.5`, `1,320`."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _rate(pair: tuple[int, float]) -> float:
    return pair[1]


def _share(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else "all"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
