"""Each example is killed at random steps, and computes what the run computed that nobody killed."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import torch

import ckptman
from tests.helpers.forkserver import Python

EXAMPLES = Path(__file__).parents[2] / "examples"
LAST = {
    ("accelerate_loop", 1): 45,
    ("accelerate_loop", 2): 24,
    ("fabric_loop", 1): 87,
    ("fabric_loop", 2): 45,
    ("fsdp2", 1): 40,
    ("fsdp2", 2): 40,
    ("gan", 1): 60,
    ("lightning_trainer", 1): 87,
    ("lightning_trainer", 2): 45,
    ("nanogpt", 1): 60,
    ("nanogpt", 2): 60,
    ("vision", 1): 60,
    ("vision", 2): 55,
}
"""The last step of an example on so many ranks."""
MARKS = {
    ("gan", 1): [pytest.mark.slow],
    **{(name, 2): [pytest.mark.slow] for name, ranks in LAST if ranks == 2},
}

Losses = dict[int, str]
_STANDS_STILL = """
import builtins, runpy, sys

def told(*values, **options):
    printed(*values, **options)
    if values and str(values[0]).startswith(f"step {at}: "):
        sys.stdin.readline()

_, at, *sys.argv = sys.argv
printed, builtins.print = builtins.print, told
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script that waits, after it has printed a step, until somebody has sent it a signal."""


def run(example, root, ranks, stop_after, how):
    """Run an example, and send its ranks a signal after a step. Return the losses by step, and the exit code."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        variables |= {"WORLD_SIZE": ranks, "RANK": rank, "LOCAL_RANK": rank}
        is_alone = ranks == 1 and example != "fsdp2"
        environment = os.environ | {name: str(each) for name, each in variables.items() if not is_alone}
        environment |= {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
        script = EXAMPLES / f"{example}.py"
        arguments = ("-c", _STANDS_STILL, stop_after, script, root)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        processes.append(Python(*arguments, env=environment, text=True, **pipes))
    losses = {}
    assert processes[0].stdout
    try:
        for line in processes[0].stdout:
            if found := re.match(r"step (\d+): (loss .+)", line):
                losses[int(found[1])] = found[2]
                if int(found[1]) == stop_after:
                    for each in processes:
                        each.send_signal(how)
                    with contextlib.suppress(BrokenPipeError):
                        print(file=processes[0].stdin, flush=True)
        codes = {each.wait(240) for each in processes}
    finally:
        for each in processes:
            each.kill()
            each.communicate()
    assert codes <= {0, 75, -signal.SIGKILL}
    return losses, max(codes, key=abs)


def same(one, other):
    """Whether two states are equal bit for bit, but for the generators of Python and NumPy, which only some seed."""
    if isinstance(one, dict):
        names = one.keys() - {"generators"}
        return names == other.keys() - {"generators"} and all(same(one[name], other[name]) for name in names)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def check_killed(example, ranks, folder, longest):
    """Kill and stop an example until it is over, each time after `longest` steps or fewer, and compare it."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    whole, code = run(example, folder / "whole", ranks, None, signal.SIGTERM)
    assert (max(whole), code) == (LAST[example, ranks], 0)
    losses = {}
    for attempt in range(200):
        stop_after = max(losses, default=0) + draw.randint(1, longest)
        if not attempt:
            stop_after = min(stop_after, LAST[example, ranks] - 5)  # a stop may take a step or two
        how = draw.choice([signal.SIGKILL, signal.SIGTERM])
        found, code = run(example, folder / "run", ranks, stop_after, how)
        assert all(losses.get(step, loss) == loss for step, loss in found.items()), f"attempt {attempt}"
        losses |= found
        if code == 0:
            break
    assert attempt
    assert losses == whole
    both = {each.name for each in (folder / "whole").glob("step-*")} & {
        each.name for each in (folder / "run").iterdir()
    }
    last = [ckptman.read(folder / each / max(both)) for each in ("whole", "run")]
    assert last[0].keys() == last[1].keys()
    for name, value in last[0].items():
        assert same(value, last[1][name]), name


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("example", "ranks"), [pytest.param(*each, marks=MARKS.get(each, pytest.mark.campaign)) for each in LAST]
)
def test_killed_and_stopped(example, ranks, tmp_path):
    check_killed(example, ranks, tmp_path, longest=LAST[example, ranks])


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("example", "ranks"), LAST)
def test_killed_about_twenty_times(example, ranks, tmp_path):
    check_killed(example, ranks, tmp_path, longest=LAST[example, ranks] // 10)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sharded_on_two_ranks_one_and_two(tmp_path):
    whole, _ = run("fsdp2", tmp_path / "whole", 2, None, signal.SIGTERM)
    losses = {}
    for ranks, stop_after in ((2, 12), (1, 25), (2, None)):
        found, _ = run("fsdp2", tmp_path / "run", ranks, stop_after, signal.SIGTERM)
        losses |= found
    values = [{step: float(loss.split()[1]) for step, loss in each.items()} for each in (losses, whole)]
    assert values[0] == pytest.approx(values[1], rel=1e-4)  # sums are taken in another order
    manifest = sorted((tmp_path / "run").glob("step-*"))[-1] / "manifest.json"
    assert json.loads(manifest.read_text())["step"] == LAST["fsdp2", 2]


def test_a_whole_example_is_short():
    for path in EXAMPLES.glob("*.py"):
        if path.name != "demo.py":
            text = path.read_text()
            assert text.count("\n") <= 80, path
            assert not re.search(r"ckptman\.\w*\b_|import _", text), path
