"""The bundled loop on a real Slurm, 2 nodes x 2 ranks: stopped and killed in many ways, it repeats the whole run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ckptman.monitor.journal import read_journal
from ckptman.scheduler.record import Chain
from ckptman.store.manifest import read_manifest
from ckptman.store.names import step_folder
from ckptman.train.tokenize import tokenize
from tests.slurm.cluster import Cluster
from tests.slurm.test_chains import over, submit

STEPS = 80
INTERVAL = 5
SHAPE = {
    "model.dim": 16,
    "model.layers": 2,
    "model.heads": 2,
    "model.kv_heads": 1,
    "data.sequence_tokens": 12,
    "data.global_batch": 6,
    "data.micro_batch": 2,
    "optimizer.warmup_steps": 3,
    "parallel.device": "cpu",
    "run.steps": STEPS,
    "run.log_every": 1,
    "run.timeout_seconds": 60,
    "checkpoint.every_steps": INTERVAL,
    "checkpoint.keep_last": 2,
}
BODY = """#!/bin/bash
#SBATCH --time=5 --nodes=2 --ntasks-per-node=2 --output=log
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) OMP_NUM_THREADS=1
srun --kill-on-bad-exit=1 {python} -m ckptman.train --config run.toml {settings}
"""
Disturb = Callable[[Cluster, str], None]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text").write_text(Path(__file__).read_text())
    tokenize(folder / "tokens", [folder / "text"], vocab_size=300, workers=1)
    return folder / "tokens"


@pytest.fixture(scope="module")
def whole(tokens: Path, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, with nobody disturbing it."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in cluster.environ.items():
            patch.setenv(name, value)
        chain = submit(script(folder, tokens))
        over(chain, cluster, 120)
    assert len(chain.attempts()) == 1
    return folder


def script(folder: Path, tokens: Path) -> Path:
    (folder / "run.toml").write_text("")
    values = SHAPE | {"data.path": tokens, "checkpoint.root": "ck", "run.log": "steps.jsonl"}
    settings = " ".join(f"--set {name}={value}" for name, value in values.items())
    path = folder / "train.sbatch"
    path.write_text(BODY.format(python=sys.executable, settings=settings))
    return path


def steps(folder: Path) -> list[tuple[int, str]]:
    """Steps and losses, in the order in which they were logged."""
    path = folder / "steps.jsonl"
    return [(each["step"], each["loss_hex"]) for each in read_journal(path)[0]] if path.exists() else []


def saved_bytes(folder: Path) -> dict[str, object]:
    files = read_manifest(folder / "ck" / step_folder(STEPS)).files
    return {name: each for name, each in files.items() if name != ".metadata"}


def ranks(job: str) -> list[psutil.Process]:
    """The processes of the tasks of a job, in the order of their ranks."""
    found = {}
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            mine = environ.get("SLURM_JOB_ID") == job and process.name().startswith("python")
            if mine and "ckptman.train" in process.cmdline():
                found.setdefault(int(environ["SLURM_PROCID"]), process)
        except (psutil.Error, KeyError):
            continue
    return [found[rank] for rank in sorted(found)]


def warn(lab: Cluster, job: str) -> None:
    lab.ask("scancel", "--signal=USR2", "--batch", job)


def kill_a_rank(lab: Cluster, job: str) -> None:
    ranks(job)[3].send_signal(signal.SIGKILL)


def cancel(lab: Cluster, job: str) -> None:
    lab.ask("scancel", job)


def requeue(lab: Cluster, job: str) -> None:
    lab.ask("scontrol", "requeue", job)


def kill_the_batch_script(lab: Cluster, job: str) -> None:
    lab.ask("scancel", "--signal=KILL", "--batch", job)


def kill_srun(lab: Cluster, job: str) -> None:
    for process in psutil.process_iter():
        try:
            if process.name() == "srun" and process.environ().get("SLURM_JOB_ID") == job:
                process.kill()
        except psutil.Error:
            continue


def disturbed(lab: Cluster, folder: Path, tokens: Path, ways: list[Disturb]) -> Chain:
    """A run, of which one attempt after the other is disturbed after some steps of its own; the last one is not."""
    chain = submit(script(folder, tokens))
    for number, disturb in enumerate(ways, 1):
        lab.wait(lambda number=number: len(chain.attempts()) >= number, 60, f"no attempt {number}")
        before = len(steps(folder))
        lab.wait(lambda before=before: len(steps(folder)) >= before + INTERVAL + 5, 90, f"attempt {number} trains not")
        disturb(lab, chain.attempts()[-1].job_id)
        lab.wait(lambda number=number: number in chain.ends() or len(chain.attempts()) > number, 90, "it runs on")
        for job in chain.jobs():  # a delay after a crash is not waited for
            lab.ask("scontrol", "update", f"JobId={job.job_id}", "StartTime=now")
    over(chain, lab, 120)
    assert chain.state.state == "finished", (folder / "log").read_text()
    return chain


def check(folder: Path, whole: Path, allowed: int) -> None:
    """The run is the whole run, and at most `allowed` steps were computed twice."""
    logged, expected = steps(folder), steps(whole)
    assert [step for step, _ in expected] == list(range(1, STEPS + 1))
    assert dict(logged) == dict(expected)
    assert set(logged) == set(expected)
    assert len(logged) - len(expected) <= allowed
    assert saved_bytes(folder) == saved_bytes(whole)


@pytest.mark.timeout(300)
def test_a_warning_and_a_killed_rank(lab: Cluster, tokens: Path, whole: Path, tmp_path: Path) -> None:
    chain = disturbed(lab, tmp_path, tokens, [warn, kill_a_rank])
    assert [end.ending for end in chain.ends().values()] == ["stopped", "crashed", "finished"]
    check(tmp_path, whole, allowed=INTERVAL)


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ways", "allowed"),
    [
        ([warn] * 4, 0),
        ([cancel, requeue, cancel, requeue], 0),
        ([kill_a_rank, kill_srun, kill_the_batch_script, kill_a_rank], 4 * INTERVAL),
    ],
)
def test_five_attempts(
    lab: Cluster, tokens: Path, whole: Path, tmp_path: Path, ways: list[Disturb], allowed: int
) -> None:
    chain = disturbed(lab, tmp_path, tokens, ways)
    assert len(chain.attempts()) == 5
    check(tmp_path, whole, allowed)


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_other_numbers_of_nodes(lab: Cluster, tokens: Path, tmp_path: Path) -> None:
    """Two nodes, then one, then two. On other numbers of ranks sums are rounded otherwise; but no step is missing."""
    chain = submit(script(tmp_path, tokens))
    for number, nodes in ((1, 1), (2, 2)):
        lab.wait(lambda number=number: len(chain.attempts()) >= number, 60, f"no attempt {number}")
        before = len(steps(tmp_path))
        lab.wait(lambda before=before: len(steps(tmp_path)) >= before + INTERVAL, 90, f"attempt {number} trains not")
        lab.wait(lambda number=number: len(chain.jobs()) > number, 30, "no successor")
        lab.ask(
            "scontrol", "update", f"JobId={chain.jobs()[number].job_id}", f"NumNodes={nodes}", f"NumTasks={2 * nodes}"
        )
        warn(lab, chain.attempts()[-1].job_id)
        lab.wait(lambda number=number: number in chain.ends(), 60, "it runs on")
    over(chain, lab, 120)
    assert [each.nodes.count(",") + each.nodes.count("-") for each in chain.attempts()] == [1, 0, 1]
    assert [step for step, _ in steps(tmp_path)] == list(range(1, STEPS + 1))
