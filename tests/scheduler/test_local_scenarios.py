"""What can happen to the attempts of a chain on the local scheduler: the run is finished, by one attempt at a time."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import psutil
import pytest

from tests.helpers.counting_run import SAVED_EVERY, check, counting, there

pytestmark = pytest.mark.slow

STEPS = 14
LOST = SAVED_EVERY - 1
SHELL = "sh -c '\"$@\"; exit $?' sh"
"""A launcher that passes nothing on."""
WAIT_SECONDS = 60.0

Act = Callable[[psutil.Process, int], None]
"""Done to the process of a chain and to the run of its newest attempt, whose id it is given."""


def warn(chain, run):
    chain.send_signal(signal.SIGUSR2)


def end(chain, run):
    chain.send_signal(signal.SIGTERM)


def tell_the_run(chain, run):
    os.kill(run, signal.SIGTERM)


def kill_the_run(chain, run):
    os.kill(run, signal.SIGKILL)


def kill_the_launcher(chain, run):
    chain.children()[0].kill()


class Scenario(NamedTuple):
    """`acts`: what happens to each attempt in turn; the last one is left alone."""

    acts: Sequence[Act]
    endings: Sequence[str]
    lost: int = 0
    launcher: str = ""


SCENARIOS = {
    "a warning": Scenario([warn], ["stopped", "finished"]),
    "a warning, behind a shell": Scenario([warn], ["stopped", "finished"], launcher=SHELL),
    "the run is told": Scenario([tell_the_run], ["stopped", "finished"]),
    "kill -9 of the run": Scenario([kill_the_run], ["crashed", "finished"], LOST),
    "kill -9 of the run, behind a shell": Scenario([kill_the_run], ["crashed", "finished"], LOST, SHELL),
    "kill -9 of the launcher": Scenario([kill_the_launcher], ["stopped", "finished"], launcher=SHELL),
    "the chain is ended, and submitted again": Scenario([end], ["stopped", "finished"]),
    "five attempts": Scenario(
        [warn, kill_the_run, tell_the_run, warn], ["stopped", "crashed", "stopped", "stopped", "finished"], LOST
    ),
}


def submit(folder, command):
    chain = f"exec {sys.executable} -m ckptman submit --scheduler local -- {command}"
    with (folder / "out").open("ab") as out:
        return subprocess.Popen(["sh", "-c", chain], cwd=folder, stdout=out, stderr=subprocess.STDOUT)


def wait(path, chain):
    deadline = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        assert chain.poll() is None, (path.parents[1] / "out").read_text()
        assert time.monotonic() < deadline, (path.parents[1] / "out").read_text()
        time.sleep(0.01)


def end_all(folder):
    """What a failed test left behind."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(folder) in word for word in process.cmdline()):
                process.kill()


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_list(tmp_path, name):
    acts, endings, lost, launcher = SCENARIOS[name]
    places = [5 + 2 * number for number in range(len(acts))]
    command = f"{launcher} {counting(tmp_path, STEPS, places)}"
    chain = submit(tmp_path, command)
    try:
        for number, act in enumerate(acts, 1):
            place = there(tmp_path, number)
            wait(place, chain)
            act(psutil.Process(chain.pid), int(place.read_text()))
        if chain.wait(WAIT_SECONDS) == 75:  # as asked for
            chain = submit(tmp_path, command)
        assert chain.wait(WAIT_SECONDS) == 0, (tmp_path / "out").read_text()
    finally:
        chain.kill()
        end_all(tmp_path)
    said = (tmp_path / "out").read_text()
    assert re.findall(r"^ckptman: attempt \d+ (\w+)", said, re.MULTILINE) == endings, said
    check(tmp_path, STEPS, places, lost)
