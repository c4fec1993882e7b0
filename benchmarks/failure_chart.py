"""The drawing of docs/memory.md: what a failure costs by each way to go on, as `ckptman plan` tells it.

python -m benchmarks.failure_chart docs/images/memory.svg
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from html import escape
from pathlib import Path
from typing import Any

from ckptman.cli.app import main
from ckptman.forecast.failure_costs import DISK_ALONE, IN_PLACE, WITH_MEMORY
from ckptman.forecast.figures import time_text

NOTICE, QUEUE, INIT = 30.0, 30 * 60.0, 20 * 60.0
EXAMPLE = (
    *("plan", "--params", "70e9", "--nodes", "64", "--tier", "scratch=2GB/s", "--mtbf", "8h", "--notice", "30s"),
    *("--queue", "30min", "--restart-in-place", "2min", "--host-memory", "1TB"),
)
"""As in docs/memory.md."""
WIDTH, LEFT, RIGHT, BAR, PITCH = 760, 24, 24, 22, 62
COLOURS = {
    "lost": ("#dc2626", "#f87171"),
    "find out": ("#6b7280", "#9ca3af"),
    "flush": ("#0d9488", "#2dd4bf"),
    "queue": ("#b45309", "#fbbf24"),
    "start": ("#7c3aed", "#a78bfa"),
    "load": ("#2563eb", "#60a5fa"),
    "in place": ("#16a34a", "#4ade80"),
}
"""Of each part, in a light and in a dark page."""
NAMES = {
    "lost": "trained, and lost",
    "find out": "to find out",
    "flush": "memory to disk",
    "start": "start-up",
    "in place": "restart in place",
}
TITLES = {
    DISK_ALONE: "Disk alone",
    WITH_MEMORY: "With memory",
    IN_PLACE: "With memory, restarts inside the allocation",
}

Part = tuple[str, float]


def planned() -> dict[str, Any]:
    """Return what `ckptman plan` says of the example."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main([*EXAMPLE, "--json"])
    assert code == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def ways(made: dict[str, Any]) -> dict[str, list[Part]]:
    """Return the parts of a failure in seconds, by the way that training goes on after it."""
    (tier,) = made["tiers"]
    found: dict[str, list[Part]] = {}
    for each in made["after_a_failure"]:
        lost: list[Part] = [("lost", each["lost_per_failure_seconds"])]
        away: list[Part] = [("find out", NOTICE)]
        away += [("flush", tier["save_seconds"])] if each["name"] == WITH_MEMORY else []
        away += [("queue", QUEUE), ("start", INIT), ("load", tier["load_seconds"])]
        found[each["name"]] = lost + ([("in place", each["restart_seconds"])] if each["name"] == IN_PLACE else away)
    return found


def drawing(made: dict[str, Any]) -> str:
    """Return the drawing: a bar for each way, from the last step that counts to the first new one."""
    found = ways(made)
    before = max(parts[0][1] for parts in found.values())
    after = max(sum(seconds for _, seconds in parts[1:]) for parts in found.values())
    scale = (WIDTH - LEFT - RIGHT) / (before + after)
    fault = LEFT + before * scale
    body, y = [], 34.0
    for name, parts in found.items():
        total = time_text(sum(seconds for _, seconds in parts))
        body.append(_text(fault + 8, y - 7, f"{TITLES[name]}: {total}", "ink", bold=True))
        x = fault - parts[0][1] * scale
        for part, seconds in parts:
            width = max(seconds * scale, 1.5)
            body.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" class="{part.replace(" ", "-")}">'
                f"<title>{escape(NAMES.get(part, part))}: {escape(time_text(seconds))}</title></rect>"
            )
            label = time_text(seconds)
            if width > 7 * len(label):
                body.append(_text(x + width / 2, y + 15, label, "on", middle=True))
            x += seconds * scale
        y += PITCH
    bottom = y - PITCH + BAR
    body.append(f'<path d="M{fault:.1f} 12V{bottom + 8:.1f}" class="fault"/>')
    body.append(_text(fault - 60, 24, "the fault", "faint"))
    x, y = LEFT, bottom + 26
    for part in COLOURS:
        words = NAMES.get(part, part)
        body.append(f'<rect x="{x}" y="{y - 10:.1f}" width="12" height="12" class="{part.replace(" ", "-")}"/>')
        body.append(_text(x + 17, y, words, "ink"))
        x += 34 + round(6.4 * len(words))
    return _framed(body, y + 14)


def _text(x: float, y: float, words: str, kind: str, *, bold: bool = False, middle: bool = False) -> str:
    more = ' font-weight="600"' if bold else ""
    more += ' text-anchor="middle"' if middle else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{more}>{escape(words)}</text>'


def _framed(body: list[str], height: float) -> str:
    def fills(dark: int) -> str:
        return "".join(f".{part.replace(' ', '-')}{{fill:{pair[dark]}}}" for part, pair in COLOURS.items())

    light = f".ink{{fill:#1f2937}}.faint{{fill:#6b7280}}.on{{fill:#ffffff}}.fault{{stroke:#1f2937}}{fills(0)}"
    dark = f".ink{{fill:#e5e7eb}}.faint{{fill:#9ca3af}}.on{{fill:#111827}}.fault{{stroke:#e5e7eb}}{fills(1)}"
    style = f"{light}@media (prefers-color-scheme: dark){{{dark}}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="system-ui, sans-serif" font-size="12" role="img">\n'
        f"<title>What a failure costs: disk alone, with memory, with restarts inside the allocation</title>\n"
        f"<style>{style}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(drawing(planned()), encoding="utf-8")
