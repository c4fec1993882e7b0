"""What must hold, and whether it does. A ratio is taken sample by sample, from one round; its median is what counts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.engine import wide
from benchmarks.engine.contestants import CKPTMAN, CKPTMAN_IN_DCP, DCP, DCP_BEST, DEVICE_ALONE, KEPT_WARM
from benchmarks.engine.gpu import LOOPS as GPU_LOOPS
from benchmarks.engine.gpu import MEMORY, OVERLAP, OVERLAP_CALL
from benchmarks.engine.section import Section
from benchmarks.planning import Planned

RAW = "raw, "
STEP_BARS = {
    "disk, 60 small layers with hooks": 1.15,
    "/dev/shm, 60 small layers with hooks": 1.3,
    "disk, large products": 1.1,
    "/dev/shm, large products": 1.1,
}
FLAT_MIB = 64.0


@dataclass(frozen=True)
class Bar:
    """`bound` None: reported only. `at_least` False: at most."""

    what: str
    samples: list[float]
    bound: float | None
    at_least: bool = False
    unit: str = "x"

    @property
    def value(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None

    @property
    def is_met(self) -> bool | None:
        """None: not measured, or nothing to be met."""
        if self.value is None or self.bound is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "median": self.value, "met": self.is_met}


def bars(sections: Mapping[str, Section], planned: list[Planned] | None) -> list[Bar]:
    """All of them, in the order of the table in the docs."""
    found = [*_moves(sections), *_after_save(sections), *_stalls(sections), *_bytes(sections), *_memory(sections)]
    return [*found, *_planning(planned), *_wide(sections), *_gpu(sections)]


def _moves(sections: Mapping[str, Section]) -> Iterator[Bar]:
    moves: tuple[tuple[str, str, tuple[tuple[str, float | None], ...], float], ...] = (
        ("load_cached", "load, page cache", ((DCP, None),), 0.75),
        ("load_cold", "load, cold disk", ((DCP, 2.0),), 0.85),
        ("save_durable", "save until durable", ((DCP, 1.8), (DCP_BEST, 1.0)), 0.9),
    )
    for key, what, others, of_raw in moves:
        if (section := sections.get(key)) is None:
            continue
        raw = section.fastest(RAW)
        for own in (CKPTMAN, CKPTMAN_IN_DCP):
            yield Bar(f"{what}: {own}, speed over {raw or 'raw'}", section.ratios(raw, own), of_raw, at_least=True)
            for name, bound in others:
                yield Bar(f"{what}: {own}, speed over {name}", section.ratios(name, own), bound, at_least=True)
            if device := section.fastest(DEVICE_ALONE):
                yield Bar(f"{what}: {own}, speed over {device}", section.ratios(device, own), None, at_least=True)


def _after_save(sections: Mapping[str, Section]) -> Iterator[Bar]:
    if (section := sections.get("load_after_save")) is not None:
        raw = section.fastest(RAW)
        for row, bound in ((KEPT_WARM, 0.6), (CKPTMAN, None)):
            what = f"load right after a save: {row}, speed over {raw or 'raw'}"
            yield Bar(what, section.ratios(raw, row), bound, at_least=True)


def _stalls(sections: Mapping[str, Section]) -> Iterator[Bar]:
    if (section := sections.get("stall_ratio")) is not None:
        rows = section.rows
        yield Bar("stall of an async save, later ones, over a warm memcpy", rows.get(f"{CKPTMAN}, later", []), 1.15)
        yield Bar("stall of an async save, first over second", rows.get(f"{CKPTMAN}, first to second", []), 1.5)
    for section in (each for key, each in sections.items() if key.startswith("steps, ")):
        for row in (row for row in section.rows if row.startswith(f"{CKPTMAN}, ")):
            asked = (bound for what, bound in STEP_BARS.items() if row == f"{CKPTMAN}, {what}")
            yield Bar(f"step time during a save, over no save: {row}", section.rows[row], next(asked, None))
    for section in (each for key, each in sections.items() if key.startswith("steps_lost, ")):
        for row in (row for row in section.rows if row.startswith(f"{DCP}, ")):
            ours = row.replace(DCP, CKPTMAN, 1)
            yield Bar(f"training lost to a save, over that to {DCP}: {ours}", section.ratios(ours, row), 0.5)


def _bytes(sections: Mapping[str, Section]) -> Iterator[Bar]:
    if (section := sections.get("bytes")) is None:
        return
    for row, samples in section.rows.items():
        what = row.removeprefix(f"{CKPTMAN}, ")
        if what != row:
            bound = 1.2 if what.startswith("largest") else 1.02 if what.startswith("written") else 1.05
            yield Bar(f"bytes {what}", samples, None if "columns" in what else bound)


def _memory(sections: Mapping[str, Section]) -> Iterator[Bar]:
    if (section := sections.get("memory")) is None:
        return
    for row, samples in section.rows.items():
        what = row.removeprefix(f"{CKPTMAN}, ")
        if what != row:
            yield Bar(f"peak memory of one {what} beyond state and staging", [max(samples)], 300.0, unit="MiB")
            if len(samples) == 2:
                growth = samples[1] - samples[0]
                yield Bar(f"the same, growth with a state 4 x as large: {what}", [growth], FLAT_MIB, unit="MiB")


def _wide(sections: Mapping[str, Section]) -> Iterator[Bar]:
    for key, what, of_raw in (
        ("wide_load", "load from memory", 0.7),
        ("wide_load_gpu", "load from memory onto the GPU", 0.5),
        ("wide_save", "save to /dev/shm until durable", 0.6),
    ):
        if (section := sections.get(key)) is not None:
            for threads in map(wide.told, (1, 2, 4, 8, 16)):
                rows = f"{RAW}buffered, {threads}", f"{CKPTMAN}, {threads}"
                own = next((row for row in section.rows if row in (rows[1], f"{rows[1]}, {wide.LARGE}")), None)
                if own is not None:
                    bound = of_raw if threads == wide.told(16) else None
                    yield Bar(f"{what}: speed over raw, {threads}", section.ratios(rows[0], own), bound, at_least=True)
    if (section := sections.get("wide_beside")) is not None:
        for name, bound in ((CKPTMAN, 3.0), (DCP, None)):
            slower = section.ratios(f"{name}, {wide.BESIDE}", f"{name}, {wide.ALONE}")
            yield Bar(f"load beside a busy Python thread, over the same alone: {name}", slower, bound)
    if (section := sections.get("wide_calls")) is not None:
        yield Bar("calls of Python for each GiB loaded", section.rows[wide.OF_EACH_GIB], 2000.0, unit="calls")
    if (section := sections.get("wide_restart")) is not None:
        yield Bar("restore in a new process right after a save, over plain DCP", section.ratios(CKPTMAN, DCP), 1.0)
    if (section := sections.get("wide_beyond")) is not None:
        yield Bar("restore() beyond its load", section.rows.get(CKPTMAN, []), 0.1, unit="s")


def _planning(planned: list[Planned] | None) -> Iterator[Bar]:
    for what in ("save", "reshard"):
        seconds = {each["world"]: each[f"{what}_seconds"] for each in planned or ()}  # type: ignore[literal-required]
        few, many = min(seconds, default=0), max(seconds, default=0)
        name = f"planning of a {what}, simulated, {many or 4096} ranks"
        yield Bar(name, [seconds[many]] if many else [], 60.0, unit="s")
        power = [math.log(seconds[many] / seconds[few]) / math.log(many / few)] if many > few else []
        yield Bar(f"{name}: power of its growth with the ranks", power, 1.2, unit="")


def _gpu(sections: Mapping[str, Section]) -> Iterator[Bar]:
    for loop in GPU_LOOPS:
        if (stall := sections.get(f"gpu_stall, {loop}")) is None:
            continue
        what, over = f"GPU, {loop}", sections[f"gpu_stall_ratio, {loop}"].rows
        yield Bar(f"{what}: stall, later ones, over the pinned copy", over.get(f"{CKPTMAN}, later", []), 1.1)
        yield Bar(f"{what}: stall to memory, over the pinned copy", over.get(f"{MEMORY}, later", []), 1.15)
        milliseconds = [1000 * seconds for seconds in stall.rows.get(OVERLAP_CALL, [])]
        yield Bar(f"{what}: time of the call of a save with overlap", milliseconds, 20.0, unit="ms")
        later = over.get(f"{OVERLAP}, later", [])
        yield Bar(f"{what}: the same and what its next step waits, over the pinned copy", later, None)
        steps = sections[f"gpu_steps, {loop}"].rows
        for name in (CKPTMAN, OVERLAP, MEMORY):
            yield Bar(f"{what}: step time during a save, over no save: {name}", steps.get(name, []), 1.03)
