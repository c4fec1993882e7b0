"""torchtitan's trainer goes on exactly, whatever ended it. torchtitan is not among what `make setup` installs."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptman.cli.app import main

pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install '.[torchtitan]'")

from ckptman.errors import ConfigError
from ckptman.integrations.torchtitan import CkptmanCheckpointManager

REPOSITORY = Path(__file__).parents[2]
ON_CPU = Path(__file__).with_name("torchtitan_on_cpu.py")
EXAMPLE = REPOSITORY / "examples" / "torchtitan_llama.py"
STEPS = 12
EXACT = ("model", "optimizer", "lr_scheduler", "train_state", "dataloader")
"""Of the state, all but the generators: torch draws a number when an iterator of data is made, as after a restore."""


class TitanRun:
    """Attempts of one run of the example, each on some ranks."""

    def __init__(self, folder, ranks=1):
        self.folder, self.ranks = folder, ranks
        folder.mkdir(exist_ok=True)

    def start(self):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        world = {"WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        return [
            subprocess.Popen(
                [sys.executable, ON_CPU, self.folder / f"losses-{rank}", EXAMPLE, self.folder, f"--steps={STEPS}"],
                env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            for rank in range(self.ranks)
        ]

    def end(self, processes, expected):
        outputs = [process.communicate(timeout=240)[0] for process in processes]
        assert [process.returncode for process in processes] == [expected] * self.ranks, outputs[0]

    def finish(self):
        self.end(self.start(), 0)

    def interrupt(self, signum, steps, expected):
        """Run until so many steps more have ended on all ranks, and send them a signal."""
        before = [len(self.recorded(rank)) for rank in range(self.ranks)]
        processes = self.start()
        while any(len(self.recorded(rank)) < before[rank] + steps for rank in range(self.ranks)):
            assert all(process.poll() is None for process in processes), processes[0].communicate()[0]
            time.sleep(0.05)
        for process in processes:
            process.send_signal(signum)
        self.end(processes, expected)

    def losses(self, rank=0):
        """Return the loss of each step, as last recorded."""
        return {int(step): loss for step, loss in (line.split() for line in self.recorded(rank))}

    def recorded(self, rank):
        """Return a line for each step that a rank made, of all attempts."""
        path = self.folder / f"losses-{rank}"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def last(self):
        return self.folder / "checkpoint" / f"step-{STEPS:010}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_was_killed_and_stopped_is_the_run_that_nobody_stopped(tmp_path, ranks):
    whole, run = TitanRun(tmp_path / "whole", ranks), TitanRun(tmp_path / "run", ranks)
    whole.finish()
    run.interrupt(signal.SIGKILL, 7, -signal.SIGKILL)
    run.interrupt(signal.SIGTERM, 2, 75)
    run.finish()
    check(run, whole)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_runs_that_were_ended_twenty_times_between_them(tmp_path, ranks):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    whole = TitanRun(tmp_path / "whole", ranks)
    whole.finish()
    for number in range(10):
        run = TitanRun(tmp_path / f"run-{number}", ranks)
        for _ in range(2):
            signum, expected = draw.choice(((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75)))
            run.interrupt(signum, draw.randint(1, 3), expected)
        run.finish()
        check(run, whole)


def check(run, whole):
    assert run.losses() == whole.losses()
    assert sorted(run.losses()) == list(range(1, STEPS + 1))
    assert main(["diff", str(whole.last), str(run.last), *(f"--only={name}.*" for name in EXACT)]) == 0


@pytest.mark.parametrize(
    "setting",
    [
        {"last_save_model_only": True},
        {"last_save_in_hf": True, "last_save_model_only": True},
        {"initial_load_in_hf": True},
    ],
)
def test_settings_that_have_no_place_are_refused_with_the_reason(setting):
    with pytest.raises(ConfigError, match="is not for CkptmanCheckpointManager: "):
        CkptmanCheckpointManager.Config(**setting)
