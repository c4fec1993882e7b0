"""The bundled loop under torchrun, in a chain: a rank is stopped, and the run finishes with nobody touching it."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ckptman.policies.hang_timeout import HangTimeout
from ckptman.runtime.journal import read_journal
from ckptman.storage.format.paths import journal_path, stacks_path
from ckptman.train.tokenize import tokenize
from tests.helpers.forkserver import programs

pytestmark = pytest.mark.slow

FLOOR_SECONDS = 4.0
STEPS = 60
EVERY = 10
LIMIT_SECONDS = 100.0

RUN = f"""
[model]
dim = 16
layers = 1
heads = 2
kv_heads = 1
[data]
path = "tokens"
sequence_tokens = 12
global_batch = 4
[parallel]
device = "cpu"
[run]
steps = {STEPS}
log = "steps.jsonl"
log_every = 1
watchdog_seconds = {FLOOR_SECONDS}
[checkpoint]
root = "run"
every_steps = {EVERY}
async_save = false
"""


def lines(path):
    return read_journal(path)[0] if path.exists() else []


@pytest.mark.timeout(300)
def test_a_rank_of_torchrun_is_stopped_and_the_chain_finishes_the_run(tmp_path):
    (tmp_path / "text").write_text(Path(__file__).read_text())
    tokenize(tmp_path / "tokens", [tmp_path / "text"], vocab_size=300, workers=1)
    (tmp_path / "run.toml").write_text(RUN)
    unwanted = ("SLURM_", "CKPTMAN_", "TORCHELASTIC_", "MASTER_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ckptman.train"]
    python = str(programs() / "python")
    command = [python, "-m", "ckptman", "submit", "--scheduler", "local", "--", python, *torchrun]
    log = tmp_path / "steps.jsonl"
    with (tmp_path / "out").open("wb") as out:
        chain = subprocess.Popen(
            [*command, "--config", "run.toml"],
            cwd=tmp_path,
            env={**env, "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            until = time.monotonic() + LIMIT_SECONDS
            while len(lines(log)) < 2 * EVERY + 3:
                assert chain.poll() is None, (tmp_path / "out").read_text()
                assert time.monotonic() < until, (tmp_path / "out").read_text()
                time.sleep(0.05)
            (started,) = (each for each in lines(journal_path(tmp_path / "run")) if each["event"] == "attempt_started")
            os.kill(started["pid"], signal.SIGSTOP)
            stopped = time.time()
            code = chain.wait(LIMIT_SECONDS)
        finally:
            if chain.poll() is None:  # twice: it kills every process of the attempt
                chain.terminate()
                time.sleep(0.5)
                chain.terminate()
                chain.wait(LIMIT_SECONDS)
    text = (tmp_path / "out").read_text()
    assert code == 0, text
    assert "attempt 1 crashed: Stalled: no sign of life for" in text
    events = lines(journal_path(tmp_path / "run"))
    (failed,) = (each for each in events if each["event"] == "failed")
    assert failed["reason"].endswith("; not heard of: rank 0")
    assert failed["time"] - stopped < HangTimeout(FLOOR_SECONDS).notice_seconds("step") + 15
    assert stacks_path(tmp_path / "run", 1, 1).exists()
    _, second = [each for each in events if each["event"] == "attempt_started"]
    assert second["time"] - stopped < HangTimeout(FLOOR_SECONDS).notice_seconds("step") + 60
    losses = {}
    for line in lines(log):
        losses.setdefault(line["step"], set()).add(line["loss_hex"])
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert all(len(each) == 1 for each in losses.values()), "steps that were done again have the same loss, bit for bit"
    assert len(lines(log)) - STEPS <= EVERY + 1, "no more than an interval was done again"
    print(f"the next attempt began {second['time'] - stopped:.1f} s after the stop")
