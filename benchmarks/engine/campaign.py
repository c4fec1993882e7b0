"""The whole campaign: run it, print the tables, write the JSON, draw the chart."""

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

import torch
from rich.console import Console

from benchmarks import planning
from benchmarks.engine import gpu, load, memory, save, stall, steps, traffic
from benchmarks.engine.bars import bars
from benchmarks.engine.chart import draw
from benchmarks.engine.facts import facts
from benchmarks.engine.report import print_bars, print_planning, print_section
from benchmarks.engine.section import Plan, Section
from benchmarks.engine.team import fresh

GIB = 1 << 30
FULL_BYTES, FULL_REPEAT = 2 * GIB, 5
PARTS: dict[str, Callable[[Plan], list[Section]]] = {
    "load": load.measure,
    "save": save.measure,
    "stall": stall.measure,
    "steps": steps.measure,
    "bytes": traffic.measure,
    "memory": memory.measure,
}
OTHERS = ("planning", "gpu")


def main() -> None:
    options = _options()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begun = time.time()
    parts = options.only or [*PARTS, *OTHERS]
    root = options.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    plan = Plan(int(options.size_gib * GIB), options.repeat, root, options.quick)
    _check_room(plan)
    machine = facts(root)
    sections: dict[str, Section] = {}
    planned = None
    for part in parts:
        print(part, file=sys.stderr)
        if part == "planning":
            planned = fresh(planning.measure, plan.quick)
        elif part != "gpu" or torch.cuda.is_available():
            measure = gpu.measure if part == "gpu" else PARTS[part]
            sections |= {section.key: section for section in fresh(measure, plan)}
    found = bars(sections, planned)
    console = Console(width=None if sys.stdout.isatty() else 150)
    for section in sections.values():
        print_section(console, section)
    if "planning" in parts:
        print_planning(console, planned)
    is_full = plan.state_bytes >= FULL_BYTES and plan.repeat >= FULL_REPEAT
    holds = "" if is_full else "the bars are meant for 2 GiB and five rounds: this run was smaller"
    print_bars(console, found, holds)
    options.out.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": machine,
        "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun)),
        "seconds": time.time() - begun,
        "state_bytes": plan.state_bytes,
        "repeat": plan.repeat,
        "sections": [section.as_json() for section in sections.values()],
        "planning": planned,
        "bars": [bar.as_json() for bar in found],
    }
    (options.out / "bench.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    chart = options.chart or options.out / "performance.svg"
    drawn = f", {chart}" if draw(sections, chart) else ""
    console.print(f"{options.out / 'bench.json'}{drawn}", markup=False)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").strip())
    parser.add_argument("--quick", action="store_true", help="64 MiB and two rounds: does it run?")
    parser.add_argument("--size-gib", type=float, help="size of the state (2; with --quick 0.0625)")
    parser.add_argument("--repeat", type=int, help="rounds of each comparison (5; with --quick 2)")
    parser.add_argument(
        "--root", type=Path, default=Path("runs/bench"), help="where to write: the disk that is measured"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench/results"), help="folder of bench.json and the chart"
    )
    parser.add_argument("--chart", type=Path, help="the chart (performance.svg in --out)")
    parser.add_argument("--only", nargs="+", choices=[*PARTS, *OTHERS], help="these parts alone")
    options = parser.parse_args()
    if options.size_gib is None:
        options.size_gib = 0.0625 if options.quick else FULL_BYTES / GIB
    if options.repeat is None:
        options.repeat = 2 if options.quick else FULL_REPEAT
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
