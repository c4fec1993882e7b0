"""What a job finds around itself: every check passes on what is right, and reports what is wrong."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptman.engine.state.installed_torch import TorchFacts
from ckptman.tools.doctor import job_environment as checks
from ckptman.tools.doctor.job_environment import Job
from tests.storage.io.test_mount import Commands

GPUS = TorchFacts("2.13.0+cu130", "cuda", ("NVIDIA A100",) * 4, ("gloo", "nccl"))
CPU = TorchFacts("2.13.0+cpu", "cpu", (), ("gloo",))
NONE = TorchFacts()
GB = 10**9


def check(found, verdict, value, advice=""):
    assert found.verdict == verdict
    assert value in found.value
    assert advice in found.advice


@pytest.mark.parametrize(
    ("torch", "verdict", "value"),
    [
        (GPUS, "ok", "2.13.0+cu130 (cuda)"),
        (NONE, "warning", "not installed here"),
        (TorchFacts(problem="libcudart.so.13: cannot open shared object file"), "FAILED", "cannot be imported: libcud"),
        (TorchFacts(unanswered="does not answer within 60 s"), "FAILED", "does not answer within 60 s"),
        (TorchFacts("2.4.1"), "FAILED", "2.4.1"),
        (TorchFacts("2.11.0a0+git"), "ok", "2.11.0a0+git (cpu)"),
    ],
)
def test_torch(torch, verdict, value):
    check(checks.check_torch(Job(torch, {})), verdict, value)


@pytest.mark.parametrize(
    ("torch", "environ", "verdict", "told"),
    [
        (GPUS, {"LOCAL_WORLD_SIZE": "4"}, "ok", "4 (NVIDIA A100)"),
        (GPUS, {"LOCAL_WORLD_SIZE": "8"}, "warning", "for 8 processes"),
        (GPUS, {"LOCAL_WORLD_SIZE": "2"}, "warning", "2 of them used"),
        (GPUS, {"SLURM_TASKS_PER_NODE": "4(x2)"}, "ok", "4"),
        (CPU, {}, "ok", "none: the CPU"),
        (CPU, {"SLURM_GPUS_ON_NODE": "4"}, "FAILED", "none, and Slurm gave 4 to this node"),
        (CPU, {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": ""}, "warning", "CUDA_VISIBLE_DEVICES hides them"),
        (NONE, {}, "unknown", "torch is not there"),
        (TorchFacts("2.13", "cuda", problem="CUDA unknown error"), {}, "FAILED", "CUDA unknown error"),
    ],
)
def test_devices(torch, environ, verdict, told):
    check(checks.check_devices(Job(torch, environ)), verdict, told)


def test_backends():
    no_nccl, nothing = TorchFacts("2.13", "cuda", ("A100",), ("gloo",)), TorchFacts("2.13", "cpu", (), ())
    verdicts = [checks.check_backends(Job(each, {})).verdict for each in (GPUS, CPU, NONE, no_nccl, nothing)]
    assert verdicts == ["ok", "ok", "unknown", "warning", "FAILED"]


WORLD = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
MASTER = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "verdict", "told"),
    [
        ({}, "ok", "one process"),
        ({**WORLD, **MASTER}, "ok", "RANK=1, WORLD_SIZE=4"),
        (WORLD, "warning", "not set: MASTER_ADDR, MASTER_PORT"),
        ({**WORLD, **MASTER, "RANK": "4"}, "FAILED", "RANK=4"),
        ({**WORLD, **MASTER, "LOCAL_RANK": "9"}, "FAILED", "LOCAL_RANK=9"),
        ({**WORLD, **MASTER, "RANK": "0", "WORLD_SIZE": "2"}, "FAILED", "WORLD_SIZE=2"),
        ({"WORLD_SIZE": "0"}, "FAILED", "WORLD_SIZE=0"),
        ({"WORLD_SIZE": "9" * 5000}, "FAILED", "WORLD_SIZE=99999999999999999999"),
        ({"WORLD_SIZE": "²"}, "FAILED", "WORLD_SIZE=²"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "8"}, "warning", "one of 8 tasks of srun, and WORLD_SIZE is not set"),
        ({"SLURM_NTASKS": "8"}, "ok", "one process"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", **WORLD, **MASTER}, "warning", "in a step of 8 tasks"),
    ],
)
def test_world(environ, verdict, told):
    check(checks.check_world(Job(CPU, environ)), verdict, told)


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "8"}
SCRIPT = "scontrol write batch_script 7 -"


def test_the_job_and_its_size():
    assert checks.check_job(Job(CPU, {**JOB, "SLURM_RESTART_COUNT": "1"})).value == "7, nodes: 2, tasks: 8, restarts: 1"
    no_job = Job(CPU, {})
    assert "not in a Slurm job" in checks.check_job(no_job).value
    assert (checks.check_time_left(no_job), checks.check_warning(no_job)) == (None, None)


@pytest.mark.parametrize(
    ("end", "asked", "verdict", "value", "advice"),
    [
        ("1000600", {}, "ok", "600 s", ""),
        ("999900", {}, "warning", "the job ended 100 s ago", "see the clock"),
        ("", {"squeue -h -j 7 -o %e": "UNLIMITED\n"}, "ok", "no time limit", ""),
        ("", {}, "warning", "not known", "Pass deadline="),
        ("1e300", {}, "unknown", "the end is said to be 1e+300, which", ""),
    ],
)
def test_the_time_that_is_left(end, asked, verdict, value, advice, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)
    job = Job(CPU, {**JOB, **({"SLURM_JOB_END_TIME": end} if end else {})}, run=Commands(asked))
    check(checks.check_time_left(job), verdict, value, advice)


@pytest.mark.parametrize(
    ("script", "verdict", "value", "advice"),
    [
        ("#SBATCH --signal=USR2@180\n", "ok", "USR2 180 s before the end", ""),
        ("#SBATCH -N 2 --signal SIGUSR2@90\n", "ok", "USR2 90 s", ""),
        ("#SBATCH --signal=B:USR1@120 \n", "warning", "USR1 120 s", "the batch script only, which has to pass it on"),
        ("#SBATCH --signal=USR1@120\n", "warning", "USR1 120 s", "NCCL may take SIGUSR1"),
        ("##SBATCH --signal=USR2@180\n", "unknown", "none is seen", "#SBATCH --signal=USR2@180 asks for one"),
        (f"#SBATCH --signal=USR2@{'9' * 400}\n", "unknown", "none is seen", ""),
        (subprocess.TimeoutExpired("scontrol", 10), "unknown", "none is seen", ""),
    ],
)
def test_the_warning_signal(script, verdict, value, advice):
    answer = f"#!/bin/bash\n{script}" if isinstance(script, str) else script
    check(checks.check_warning(Job(CPU, JOB, run=Commands({SCRIPT: answer}))), verdict, value, advice)


def test_the_warning_signal_against_a_save():
    run = Commands({SCRIPT: "#!/bin/bash\n#SBATCH --signal=USR2@10\n"})
    found = checks.check_warning(Job(CPU, {**JOB, "SBATCH_SIGNAL": "USR2@100"}, 70 * GB, run))
    assert (found.verdict, run.asked) == ("ok", [])
    assert found.value == "USR2 100 s before the end: time for 70 GB a process at 700 MB/s"
    check(checks.check_warning(Job(CPU, JOB, 70 * GB, run)), "warning", "", "ask for a longer warning")


@pytest.mark.parametrize(
    ("against", "verdict", "told"),
    [
        (None, "ok", "--against SIZE"),
        (10 * GB, "ok", ""),
        (20 * GB, "warning", "one staged copy fits, not two"),
        (30 * GB, "warning", "not even one staged copy fits"),
    ],
)
def test_host_memory(against, verdict, told, monkeypatch):
    monkeypatch.setattr(checks, "available_bytes", lambda: 100 * GB)
    check(checks.check_memory(Job(CPU, {"LOCAL_WORLD_SIZE": "4"}, against)), verdict, "100 GB left", told)


@pytest.mark.parametrize(("free", "verdict", "told"), [(2**20, "ok", ""), (2**14, "warning", "bus error")])
def test_shared_memory(free, verdict, told, monkeypatch):
    space = os.statvfs_result((4096, 4096, 2**20, free, free, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    check(checks.check_shared_memory(Job(CPU, {})), verdict, " free of 4.29 GB", told)


@pytest.mark.parametrize(
    ("limits", "torch", "against", "verdict", "told"),
    [
        ((resource.RLIM_INFINITY,) * 2, GPUS, GB, "okok", ""),
        ((1024, 524288), GPUS, GB, "warningwarning", "ulimit -n hard"),
        ((1024, 1024), CPU, GB, "warningok", "only your site can raise it"),
        ((2 * GB, 2 * GB), GPUS, GB, "okok", ""),
        ((2 * GB, 2 * GB), GPUS, None, "okwarning", "ulimit -l unlimited"),
        ((2 * GB - 1, 2 * GB), GPUS, GB, "okwarning", "2 GB, and two pinned slots are 2 GB"),
    ],
)
def test_limits(limits, torch, against, verdict, told, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    both = [each(Job(torch, {}, against)) for each in (checks.check_open_files, checks.check_locked_memory)]
    assert "".join(each.verdict for each in both) == verdict
    assert told in str(both)


@pytest.mark.parametrize(("state", "verdict"), [(0, "ok"), (4, "ok"), (5, "unknown"), (-1, "unknown")])
def test_the_clock(state, verdict, monkeypatch):
    library = SimpleNamespace(adjtimex=lambda buffer: state)
    monkeypatch.setattr(checks.ctypes, "CDLL", lambda name: library)
    assert checks.check_clock(Job(CPU, {})).verdict == verdict


@pytest.mark.parametrize(
    ("environ", "processes"),
    [
        ({}, 1),
        ({"SLURM_TASKS_PER_NODE": "8(x16)"}, 8),
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_TASKS_PER_NODE": "1"}, 4),
        ({"LOCAL_WORLD_SIZE": "9" * 5000, "SLURM_TASKS_PER_NODE": "²"}, 1),
    ],
)
def test_processes_of_this_node(environ, processes):
    assert Job(CPU, environ).local_processes == processes


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise ModuleNotFoundError('no torch', name='torch')", "TorchFacts(version='', device='cpu'"),
        ("raise RuntimeError('two\\nlines')", "problem='RuntimeError: two'"),
        ("import sys; sys.exit(3)", "problem='SystemExit: 3'"),
        ("from types import ModuleType", "problem=\"ModuleNotFoundError: No module named 'torch.distributed'"),
        ("import no_such_module", "problem=\"ModuleNotFoundError: No module named 'no_such_module'\""),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_without_torch_it_is_said_and_ctrl_c_meanwhile_is_ctrl_c(code, told, tmp_path):
    (tmp_path / "torch.py").write_text(code)
    command = "from ckptman.engine.state.installed_torch import torch_facts; print(torch_facts())"
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}
    ran = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=240, env=environ)
    assert told in (ran.stderr if "Interrupt" in code else ran.stdout)
