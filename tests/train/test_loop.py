"""The bundled loop end to end, in this process: stopped and gone on, it repeats the uninterrupted run bit by bit."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from ckptman.runtime.journal import read_journal
from ckptman.storage.format.manifest import read_manifest
from ckptman.storage.format.paths import step_folder
from ckptman.train.__main__ import main
from ckptman.train.report import StepReport
from ckptman.train.tokenize import tokenize

STEPS = 8
SHAPE = {
    "model.dim": 16,
    "model.layers": 2,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.dropout": 0.2,
    "data.sequence_tokens": 12,
    "data.global_batch": 5,
    "data.micro_batch": 2,
    "optimizer.warmup_steps": 3,
    "parallel.device": "cpu",
    "run.steps": STEPS,
    "run.log_every": 1,
    "checkpoint.every_steps": 100,
    "checkpoint.keep_last": 2,
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text").write_text(Path(__file__).read_text())
    tokenize(folder / "tokens", [folder / "text"], vocab_size=300, workers=1)
    return folder / "tokens"


@pytest.fixture(autouse=True)
def leave_torch_as_it_was(monkeypatch):
    for name in [name for name in os.environ if name in ("RANK", "WORLD_SIZE") or name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def run(tokens, folder, **changes):
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text("")
    values = SHAPE | {"data.path": tokens, "checkpoint.root": folder / "ck", "run.log": folder / "steps.jsonl"}
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    settings = [f"--set={name}={str(value).lower() if value is True else value}" for name, value in values.items()]
    return main(["--config", str(folder / "run.toml"), *settings])


def losses(folder):
    events, torn = read_journal(folder / "steps.jsonl")
    assert not torn
    assert all(float.fromhex(each["loss_hex"]) == each["loss"] for each in events)
    return [(each["step"], each["loss_hex"], each["grad_norm"], each["position"]) for each in events]


def saved_bytes(folder, step):
    """Size and digest of each file; `.metadata` is left out, because it holds the path it was written to."""
    files = read_manifest(folder / "ck" / step_folder(step)).files
    return {name: each for name, each in files.items() if name != ".metadata"}


def stop_at(step, monkeypatch):
    add = StepReport.add

    def add_and_stop(self, now, *rest):
        add(self, now, *rest)
        if now == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(StepReport, "add", add_and_stop)


def test_stopped_twice_it_repeats_the_uninterrupted_run(tokens, tmp_path, monkeypatch, capsys, caplog):
    caplog.set_level("INFO", "ckptman")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(tokens, whole) == 0
    assert f"step {STEPS}/{STEPS}  loss " in capsys.readouterr().out
    with monkeypatch.context() as patch:
        stop_at(3, patch)
        assert run(tokens, parts) == 75
    with monkeypatch.context() as patch:
        stop_at(5, patch)
        assert run(tokens, parts) == 75
    assert "stopping after step 5: SIGTERM on rank 0" in caplog.messages
    assert run(tokens, parts) == 0
    assert losses(parts) == losses(whole)
    assert [step for step, *_ in losses(whole)] == list(range(1, STEPS + 1))
    assert saved_bytes(parts, STEPS) == saved_bytes(whole, STEPS)
    assert run(tokens, parts) == 0, "a finished run that is started again has nothing to do"
    assert len(losses(parts)) == STEPS


def test_losses_are_told_in_batches_and_none_is_lost(tokens, tmp_path, capsys, monkeypatch):
    every, third = tmp_path / "every", tmp_path / "third"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run(tokens, third, run__log_every=3, run__peak_tflops=0.001, parallel__activation_checkpointing=True) == 0
    shown = capsys.readouterr().out
    assert "tokens/s" in shown
    assert "MFU" in shown
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert run(tokens, every) == 0
    assert losses(third) == losses(every)


def test_a_signal_before_the_first_step_leaves_at_once(tokens, tmp_path, monkeypatch):
    enter = StepReport.__enter__

    def enter_and_stop(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return enter(self)

    monkeypatch.setattr(StepReport, "__enter__", enter_and_stop)
    with pytest.raises(SystemExit) as caught:
        run(tokens, tmp_path / "run")
    assert caught.value.code == 75
    assert not (tmp_path / "run" / "steps.jsonl").exists()
    assert not torch.distributed.is_initialized()


def test_another_seed_is_refused_in_one_line(tokens, tmp_path, capsys):
    assert run(tokens, tmp_path / "run", run__steps=3) == 0
    capsys.readouterr()
    assert run(tokens, tmp_path / "run", run__steps=3, run__seed=2) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: 'data': the checkpoint was made with another run.seed: 1, and this run has 2")


@pytest.mark.slow
def test_a_time_limit_that_is_near_stops_the_run(tokens, tmp_path):
    elapsed = time.time() - psutil.Process().create_time()
    assert run(tokens, tmp_path / "run", run__steps=10**6, run__time_limit_seconds=elapsed + 40) == 75


def test_dry_run_says_what_it_means_and_makes_nothing(tokens, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(
        f'[data]\npath = "{tokens}"\n[run]\nsteps = 3\n[checkpoint]\nroot = "{tmp_path / "ck"}"\n'
    )
    assert main(["--config", str(tmp_path / "run.toml"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "mesh         1 ranks: replicate 1 x shard 1" in shown
    assert "parameters   3," in shown
    assert "save_factor" not in shown
    assert "InitTimeInterval(factor=4" in shown
    assert not (tmp_path / "ck").exists()
