"""The worked example of the page on memory: its numbers are those that the program prints, and so is its drawing."""

import re
import shlex
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.failure_chart import EXAMPLE, drawing, planned, ways
from ckptman.cli.app import main
from ckptman.forecast.figures import time_text
from tests.docs.test_docs import REPOSITORY, blocks, commands

DRAWING = REPOSITORY / "docs" / "images" / "memory.svg"


def shown(verb):
    """Return the command of the page that is one of this verb."""
    everything = [each for block in blocks("memory.md") if block.language == "console" for each in commands(block)]
    (found,) = (each for each in everything if each.text.startswith(f"ckptman {verb} "))
    return found


@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_numbers_are_those_that_the_program_prints(verb, capsys):
    command = shown(verb)
    capsys.readouterr()
    assert main(shlex.split(command.text)[1:]) == 0
    printed = iter(" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    for line in command.shown:
        assert line == "..." or " ".join(line.split()) in printed, line


def test_the_drawing_is_of_the_same_example_and_up_to_date():
    assert shlex.split(shown("plan").text)[1:] == list(EXAMPLE)
    made = planned()
    assert drawing(made) == DRAWING.read_text(encoding="utf-8"), (
        "python -m benchmarks.failure_chart docs/images/memory.svg"
    )
    for each in made["after_a_failure"]:
        assert sum(seconds for _, seconds in ways(made)[each["name"]]) == pytest.approx(
            each["cost_per_failure_seconds"], rel=1e-6
        )
        assert time_text(each["cost_per_failure_seconds"]) in DRAWING.read_text(encoding="utf-8")


def test_the_drawing_is_readable_anywhere():
    text = DRAWING.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    width = float(root.attrib["width"])
    for bar in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(bar.attrib["x"]) >= 0
        assert float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"@import|@font-face|href|url\(", text)
