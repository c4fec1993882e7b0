"""The whole campaign: run it, print and write what each part measured, draw the chart."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from benchmarks import planning
from benchmarks.engine import gpu, load, memory, save, stall, steps, traffic, wide
from benchmarks.engine.bars import Bar, bars
from benchmarks.engine.chart import draw
from benchmarks.engine.facts import facts
from benchmarks.engine.report import print_bars, print_planning, print_section
from benchmarks.engine.section import Plan, Section, last_line
from benchmarks.engine.team import MeasureError, fresh
from benchmarks.planning import Planned

GIB = 1 << 30
FULL_BYTES, FULL_REPEAT = 2 * GIB, 5
Measure = Callable[[Plan], list[Section]]
PARTS: dict[str, list[Measure]] = {
    "load": [load.measure],
    "save": [save.measure],
    "stall": [stall.measure],
    "steps": [*steps.PARTS],
    "bytes": [traffic.measure],
    "memory": [memory.measure],
    "planning": [],
    "wide": [*wide.PARTS],
    "gpu": gpu.PARTS,
}


class Results:
    """What was measured so far. It is printed and written as each part ends: a run that is killed keeps it."""

    def __init__(self, plan: Plan, out: Path) -> None:
        self._plan, self._out, self._begun = plan, out, time.time()
        self._machine = facts(plan.root)
        self.console = Console(width=None if sys.stdout.isatty() else 150)
        self.sections: dict[str, Section] = {}
        self.planned: list[Planned] | None = None
        self.failed: dict[str, str] = {}
        """Why a part has no results, by its name."""

    @property
    def file(self) -> Path:
        return self._out / "bench.json"

    def bars(self) -> list[Bar]:
        return bars(self.sections, self.planned)

    def measure(self, part: str, function: Callable[..., Any], argument: Any) -> Any:
        """The result of one part, measured in a process of its own. Where it fails the others go on; None then."""
        try:
            return fresh(function, argument)
        except MeasureError as error:
            print(error, file=sys.stderr)
            self.failed[part] = last_line(str(error))
            self.console.print(f"[red]{part} has failed:[/] {escape(self.failed[part])}\n")
        return None

    def add(self, sections: list[Section]) -> None:
        self.sections |= {section.key: section for section in sections}
        for section in sections:
            print_section(self.console, section)

    def write(self) -> None:
        """Write all of it, so that the file is whole at any time."""
        self._out.mkdir(parents=True, exist_ok=True)
        result = {
            "machine": self._machine,
            "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._begun)),
            "seconds": time.time() - self._begun,
            "state_bytes": self._plan.state_bytes,
            "repeat": self._plan.repeat,
            "sections": [section.as_json() for section in self.sections.values()],
            "planning": self.planned,
            "bars": [bar.as_json() for bar in self.bars()],
            "failed": self.failed,
        }
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        new.replace(self.file)


def main() -> None:
    options = _options()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    root = options.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    plan = Plan(int(options.size_gib * GIB), options.repeat, root, options.quick, options.device)
    _check_room(plan)
    results = Results(plan, options.out)
    for part in options.only:
        print(part, file=sys.stderr)
        if part == "planning":
            results.planned = results.measure(part, planning.measure, plan.quick)
            print_planning(results.console, results.planned)
        for number, measure in enumerate(PARTS[part]):
            name = part if len(PARTS[part]) == 1 else f"{part}, {number + 1} of {len(PARTS[part])}"
            results.add(results.measure(name, measure, plan) or [])
            results.write()
        results.write()
    _end(results, plan, options.chart or options.out / "performance.svg")


def _end(results: Results, plan: Plan, chart: Path) -> None:
    is_full = plan.state_bytes >= FULL_BYTES and plan.repeat >= FULL_REPEAT
    holds = "" if is_full else "the bars are meant for 2 GiB and five rounds: this run was smaller"
    if plan.device == "cpu":
        holds += "; those of a GPU were tried out on the CPU"
    print_bars(results.console, results.bars(), holds)
    drawn = f", {chart}" if draw(results.sections, chart) else ""
    results.console.print(f"{results.file}{drawn}", markup=False)
    if results.failed:
        sys.exit(f"not measured, see above: {'; '.join(results.failed)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").strip())
    parser.add_argument("--quick", action="store_true", help="64 MiB and one round: does it run?")
    parser.add_argument("--size-gib", type=float, help="size of the state (2; with --quick 0.0625); twice that for gpu")
    parser.add_argument("--repeat", type=int, help="rounds of each comparison (5; with --quick 1)")
    parser.add_argument(
        "--root", type=Path, default=Path("runs/bench"), help="where to write: the disk that is measured"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench/results"), help="folder of bench.json and the chart"
    )
    parser.add_argument("--chart", type=Path, help="the chart (performance.svg in --out)")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of gpu: cpu tries out the script")
    options = parser.parse_args()
    has_gpu = options.device == "cpu" or torch.cuda.is_available()
    if options.only and "gpu" in options.only and not has_gpu:
        parser.error("there is no GPU that torch can use; --device cpu tries out the script")
    options.only = options.only or [part for part in PARTS if part != "gpu" or has_gpu]
    if options.size_gib is None:
        options.size_gib = 0.0625 if options.quick else FULL_BYTES / GIB
    if options.repeat is None:
        options.repeat = 1 if options.quick else FULL_REPEAT
    if not 0 < options.size_gib < math.inf or options.repeat < 1:
        parser.error("--size-gib must be more than 0, and --repeat at least 1")
    return options


def _check_room(plan: Plan) -> None:
    free = shutil.disk_usage(plan.root).free
    needed = 12 * plan.state_bytes
    if free < needed:
        sys.exit(
            f"{plan.root} has {free / GIB:.1f} GiB free; {needed / GIB:.1f} GiB are needed (see --size-gib, --root)"
        )
