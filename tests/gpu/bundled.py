"""The bundled loop on GPUs in processes of its own, and what may befall it: `python -m tests.gpu.bundled TROUBLE ...`.

TROUBLE is "none", or what happens after a step: "stop=3" asks the run to stop; "oom=3" and "freeze=3" have rank 1 ask
for more memory than there is, or stand still.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil

from ckptman.storage.io.checksums import digest_bytes
from ckptman.train.dataset.tokenfile import META, TOKENS, TokenMeta

ROOT = Path(__file__).parents[2]
STEPS = 8
EXIT_AGAIN = 75
VOCABULARY = 300
SHAPE = {
    "model.dim": 32,
    "model.layers": 2,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.dropout": 0.2,
    "data.sequence_tokens": 16,
    "data.global_batch": 4,
    "data.micro_batch": 2,
    "optimizer.warmup_steps": 3,
    "parallel.device": "cuda",
    "parallel.compute_dtype": "float32",
    "run.steps": STEPS,
    "run.log_every": 1,
    "checkpoint.every_steps": 100,
    "checkpoint.keep_last": 2,
}


def make_tokens(folder):
    """A token folder of random tokens, without a tokenizer."""
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 5000).astype("<u2").tobytes()
    (folder / TOKENS).write_bytes(tokens)
    meta = TokenMeta(
        dtype="uint16", count=5000, vocab_size=VOCABULARY, eos_id=0, sources=1, digest=digest_bytes(tokens)
    )
    (folder / META).write_text(meta.model_dump_json())
    return folder


class Started:
    """Ranks that run, by themselves or under torchrun."""

    def __init__(self, process, log):
        self._process, self._log = process, log

    def wait(self, limit_seconds):
        """The exit code; None: it has not ended in time."""
        try:
            return self._process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            return None

    def output(self):
        """What it has printed so far."""
        return self._log.read_text(errors="replace")

    def trouble_began(self):
        """When the trouble began, in unix seconds."""
        found = re.search(r"trouble begins at ([0-9.]+)", self.output())
        assert found is not None, self.output()
        return float(found[1])

    def kill(self):
        """End all that is left of it."""
        try:
            family = [self._process, *psutil.Process(self._process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for each in family:
            try:
                each.kill()
            except psutil.NoSuchProcess:
                pass
        self._process.wait(10)


@contextmanager
def start_ranks(world_size, tokens, folder, trouble="none", **changes):
    """Start a run in `folder`, on as many GPUs. `changes`: of its configuration, with `__` for the dot."""
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text("")
    values = SHAPE | {"data.path": tokens, "checkpoint.root": folder / "ck", "run.log": folder / "steps.jsonl"}
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    settings = [f"--set={name}={value}" for name, value in values.items()]
    command = [sys.executable]
    if world_size > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    command += ["-m", __name__, trouble, "--config", str(folder / "run.toml"), *settings]
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "TORCHELASTIC_", "CKPTMAN_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=subprocess.STDOUT
        )
    started = Started(process, folder / "log")
    try:
        yield started
    finally:
        started.kill()


def _arrange(trouble):
    from ckptman.train.report import StepReport

    kind, _, step = trouble.partition("=")
    add = StepReport.add

    def add_and_more(self, now, *rest):
        add(self, now, *rest)
        if now == int(step):
            _TROUBLES[kind]()

    StepReport.add = add_and_more


def _stop():
    os.kill(os.getpid(), signal.SIGTERM)


def _oom():
    import torch

    if os.environ["RANK"] == "1":
        print(f"trouble begins at {time.time()}", flush=True)
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def _freeze():
    if os.environ["RANK"] == "1":
        print(f"trouble begins at {time.time()}", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)


_TROUBLES = {"stop": _stop, "oom": _oom, "freeze": _freeze}


if __name__ == "__main__":
    from ckptman.train.__main__ import main

    if sys.argv[1] != "none":
        _arrange(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
