"""Tables on terminals of any width, and where there is none; sizes and ages; signals that end a command."""

import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptman.cli import console
from ckptman.cli.console import age, ending_cleanly, size, table
from ckptman.errors import plain

HEADERS = ("step", "root", "size", "state")
ROWS = [
    ("10", "/scratch/project/runs/long-name/checkpoints", "1.0 GiB", "complete"),
    ("20", "/scratch/project/runs/b", "2.0 GiB", "does not count: __1_0.distcp is missing, and so is the manifest"),
]


def lines(monkeypatch, columns, **options):
    monkeypatch.setattr(console, "terminal_width", lambda: columns)
    return console.table(HEADERS, ROWS, right="step size", **options)


def test_elsewhere_than_on_a_terminal_a_table_stays_whole(monkeypatch):
    told = lines(monkeypatch, None, drop=("size",))
    assert len(told) == 3
    assert told[2].endswith(ROWS[1][3])
    assert told[0].split() == list(HEADERS)


def test_the_last_column_is_folded_below_itself(monkeypatch):
    told = lines(monkeypatch, 100)
    start = told[0].index("state")
    assert [line[:start].strip() for line in told[3:]] == [""]
    assert " ".join([told[2][start:], told[3][start:]]) == ROWS[1][3]


@pytest.mark.parametrize("columns", [40, 50, 60, 80, 100])
@pytest.mark.parametrize("drop", [(), ("size",), ("size", "root")])
def test_no_line_is_longer_than_the_terminal_and_no_cell_is_cut(columns, drop, monkeypatch):
    told = lines(monkeypatch, columns, drop=drop, indent=2)
    assert max(map(len, told)) <= max(columns, 2 + len(ROWS[0][1]))
    whole = " ".join(" ".join(told).split())
    shown = " ".join(told[:3]).split()
    for header, *cells in zip(HEADERS, *ROWS):
        left_out = f"no room for {header}" in whole or f", {header}: in a wider" in whole
        assert left_out == (header not in shown)
        assert left_out or all(cell in whole for cell in cells)


def test_colours_take_no_room_and_text_brings_none_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(console, "terminal_width", lambda: 40)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    bad = console.paint("bad\x1b[2J", "red")
    console.say(*console.table(("a", "b", "c"), [(bad, "x", "\x1b[1;31mred"), ("longer", "y", "good")]), bad)
    painted = "\x1b[1;31mbad\\x1b[2J\x1b[0m"
    told = [f"{painted}  x  \\x1b[1;31mred", "longer      y  good", painted]
    assert capsys.readouterr().out.splitlines()[1:] == told


def test_tables_align_and_end_without_blanks():
    assert table(("n", "what"), [("1", "x"), ("200", "longer")], right="n") == ["  n  what", "  1  x", "200  longer"]
    assert table(("a", "b"), [(None, 0)]) == ["a  b", "-  0"]
    assert table((), []) == []


@dataclass
class Found:
    path: Path
    sizes: tuple[float, ...]


def test_results_become_strict_json(capsys):
    console.say_json({"found": [Found(Path("a/b"), (1.5, math.nan, -math.inf))]})
    assert json.loads(capsys.readouterr().out) == {"found": [{"path": "a/b", "sizes": [1.5, "NaN", "-Infinity"]}]}


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**40, "5.0 TiB"), (2**60, "1024.0 PiB")]
)
def test_sizes(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5.0, "0 s"), (99.0, "99 s"), (300.0, "5 min"), (7200.0, "2 h"), (86400.0 * 12, "12 d")]
)
def test_ages(seconds, text):
    assert age(seconds) == text


def test_plain_leaves_text_of_all_languages_as_it_is():
    assert plain("épo­que 損失 [bold]") == "épo­que 損失 [bold]"


class Finalized:
    """Gets a signal while it is finalized, where Python drops exceptions."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)]
)
def test_a_signal_in_a_finalizer_is_not_lost(number, ends):
    with pytest.raises(ends), ending_cleanly():
        Finalized(number)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.01)
