"""What a job finds around itself: every check passes on what is right, and tells what is wrong."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptman.engine.state.installed_torch import TorchFacts
from ckptman.tools.doctor import job_environment
from ckptman.tools.doctor.job_environment import (
    check_backends,
    check_clock,
    check_devices,
    check_job,
    check_locked_memory,
    check_memory,
    check_open_files,
    check_shared_memory,
    check_torch,
    check_warning,
    check_world,
    local_processes,
)
from tests.tools.doctor.test_mount import Commands

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
    check(check_torch(torch), verdict, value)
    assert job_environment.LEAST_TORCH == (2, 11)


@pytest.mark.parametrize(
    ("torch", "environ", "verdict", "told"),
    [
        (GPUS, {"LOCAL_WORLD_SIZE": "4"}, "ok", "4 (NVIDIA A100)"),
        (GPUS, {}, "ok", "4 (NVIDIA A100)"),
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
    check(check_devices(torch, environ), verdict, told)


def test_backends():
    no_nccl, nothing = TorchFacts("2.13", "cuda", ("A100",), ("gloo",)), TorchFacts("2.13", "cpu", (), ())
    verdicts = [check_backends(each).verdict for each in (GPUS, CPU, NONE, no_nccl, nothing)]
    assert verdicts == ["ok", "ok", "unknown", "warning", "FAILED"]
    assert check_backends(nothing).value == "none"


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
        ({**WORLD, **MASTER, "WORLD_SIZE": "many"}, "FAILED", "WORLD_SIZE=many"),
        ({**WORLD, **MASTER, "RANK": "0", "WORLD_SIZE": "2"}, "FAILED", "WORLD_SIZE=2"),
        ({"WORLD_SIZE": "0"}, "FAILED", "WORLD_SIZE=0"),
        ({"WORLD_SIZE": "9" * 5000}, "FAILED", "WORLD_SIZE=99999999999999999999"),
        ({"WORLD_SIZE": "²"}, "FAILED", "WORLD_SIZE=²"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "9" * 5000}, "ok", "one process"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "8"}, "warning", "one of 8 tasks of srun, and WORLD_SIZE is not set"),
        ({"SLURM_NTASKS": "8"}, "ok", "one process"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", **WORLD, **MASTER}, "warning", "in a step of 8 tasks"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", **WORLD, **MASTER}, "ok", "WORLD_SIZE=4"),
    ],
)
def test_world(environ, verdict, told):
    check(check_world(environ), verdict, told)


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "8", "SLURM_JOB_END_TIME": "1000600"}
SCRIPT = "scontrol write batch_script 7 -"


def test_the_job_and_the_time_that_is_left():
    job, left, _ = check_job({**JOB, "SLURM_RESTART_COUNT": "1"}, Commands({}), 1_000_000.0, None)
    assert job.value == "7, nodes: 2, tasks: 8, restarts: 1"
    assert (left.verdict, left.value) == ("ok", "600 s")
    _, left, _ = check_job(JOB, Commands({}), 1_000_700.0, None)
    assert (left.verdict, left.value) == ("warning", "the job ended 100 s ago")
    (job,) = check_job({}, Commands({}), 0.0, None)
    assert "not in a Slurm job" in job.value
    no_end = {"SLURM_JOB_ID": "7"}
    _, left, _ = check_job(no_end, Commands({"squeue -h -j 7 -o %e": "UNLIMITED\n"}), 0.0, None)
    assert (left.verdict, left.value) == ("ok", "no time limit")
    _, left, _ = check_job(no_end, Commands({}), 0.0, None)
    assert (left.verdict, left.value) == ("warning", "not known")
    assert "Pass deadline=" in left.advice
    for far in ("1e300", "1"):
        _, left, _ = check_job({**JOB, "SLURM_JOB_END_TIME": far}, Commands({}), 1.8e9, None)
        assert (left.verdict, left.value[:27]) == ("unknown", f"the end is said to be {float(far):g}, which"[:27])


@pytest.mark.parametrize(
    ("script", "verdict", "value", "advice"),
    [
        ("#SBATCH --signal=USR2@180\n", "ok", "USR2 180 s before the end", ""),
        ("#SBATCH -N 2 --signal SIGUSR2@90\n", "ok", "USR2 90 s", ""),
        ('#SBATCH --signal="TERM"\n', "ok", "TERM 60 s", ""),
        ("#SBATCH --signal=B:USR1@120 \n", "warning", "USR1 120 s", "the batch script only, which has to pass it on"),
        ("#SBATCH --signal=USR1@120\n", "warning", "USR1 120 s", "NCCL may take SIGUSR1"),
        ("##SBATCH --signal=USR2@180\n", "unknown", "none is seen", "#SBATCH --signal=USR2@180 asks for one"),
        ("#SBATCH --signal=???\n", "unknown", "none is seen", ""),
        (f"#SBATCH --signal=USR2@{'9' * 400}\n", "unknown", "none is seen", ""),
        (subprocess.TimeoutExpired("scontrol", 10), "unknown", "none is seen", ""),
    ],
)
def test_the_warning_signal(script, verdict, value, advice):
    answer = f"#!/bin/bash\n{script}" if isinstance(script, str) else script
    check(check_warning(JOB, Commands({SCRIPT: answer}), "7", None), verdict, value, advice)


def test_the_warning_signal_against_a_save():
    run = Commands({SCRIPT: "#!/bin/bash\n#SBATCH --signal=USR2@10\n"})
    assert check_warning({**JOB, "SBATCH_SIGNAL": f"USR2@{'9' * 400}"}, run, "7", 70 * GB).verdict == "unknown"
    found = check_warning({**JOB, "SBATCH_SIGNAL": "USR2@100"}, run, "7", 70 * GB)
    assert (found.verdict, run.asked) == ("ok", [])
    assert found.value == "USR2 100 s before the end: time for 70 GB a process at 700 MB/s"
    check(check_warning(JOB, run, "7", 70 * GB), "warning", "", "ask for a longer warning")


@pytest.mark.parametrize(
    ("free", "processes", "against", "verdict", "told"),
    [
        (100 * GB, 4, None, "ok", "--against SIZE"),
        (100 * GB, 4, 10 * GB, "ok", ""),
        (100 * GB, 4, 20 * GB, "warning", "one staged copy fits, not two"),
        (100 * GB, 4, 30 * GB, "warning", "not even one staged copy fits"),
    ],
)
def test_host_memory(free, processes, against, verdict, told):
    check(check_memory(free, processes, against), verdict, "", told)


def test_shared_memory(monkeypatch):
    def space(free):
        return os.statvfs_result((4096, 4096, 2**20, free, free, 0, 0, 0, 0, 255))

    def missing(path):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "statvfs", lambda path: space(2**20))
    assert check_shared_memory().verdict == "ok"
    monkeypatch.setattr(os, "statvfs", lambda path: space(2**14))
    assert "bus error" in check_shared_memory().advice
    monkeypatch.setattr(os, "statvfs", missing)
    assert check_shared_memory().verdict == "warning"


def test_limits():
    unlimited = resource.RLIM_INFINITY
    assert check_open_files(unlimited, unlimited).verdict == "ok"
    assert "ulimit -n hard" in check_open_files(1024, 524288).advice
    assert "only your site can raise it" in check_open_files(1024, 1024).advice
    assert check_locked_memory(unlimited, GPUS, GB).verdict == "ok"
    assert check_locked_memory(2**16, CPU, GB).verdict == "ok"
    found = check_locked_memory(2**16, GPUS, GB)
    assert (found.verdict, found.value) == ("warning", "65.5 kB, and two pinned slots are 2 GB")
    assert check_locked_memory(2 * GB, GPUS, GB).verdict == "ok"
    assert check_locked_memory(2**16, GPUS, None).verdict == "warning"


@pytest.mark.parametrize(("state", "verdict"), [(0, "ok"), (4, "ok"), (5, "unknown"), (-1, "unknown")])
def test_the_clock(state, verdict, monkeypatch):
    library = SimpleNamespace(adjtimex=lambda buffer: state)
    monkeypatch.setattr(job_environment.ctypes, "CDLL", lambda name: library)
    assert check_clock().verdict == verdict
    monkeypatch.undo()
    assert check_clock().verdict in ("ok", "unknown")


def test_processes_of_this_node():
    assert local_processes({}) == 1
    assert local_processes({"SLURM_TASKS_PER_NODE": "8(x16)"}) == 8
    assert local_processes({"LOCAL_WORLD_SIZE": "4", "SLURM_TASKS_PER_NODE": "1"}) == 4
    assert local_processes({"LOCAL_WORLD_SIZE": "x"}) == 1
    assert local_processes({"LOCAL_WORLD_SIZE": "9" * 5000, "SLURM_TASKS_PER_NODE": "²"}) == 1


@pytest.mark.slow
def test_what_torch_says_of_itself():
    command = "from ckptman.engine.state.installed_torch import torch_facts; print(torch_facts().version)"
    ran = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=240, check=True)
    import torch

    assert ran.stdout.strip() == str(torch.__version__)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise ModuleNotFoundError('no torch', name='torch')", "TorchFacts(version='', device='cpu'"),
        ("raise OSError('libtorch.so: cannot open')", "problem='OSError: libtorch.so: cannot open'"),
        ("raise RuntimeError('two\\nlines')", "problem='RuntimeError: two'"),
        ("import sys; sys.exit(3)", "problem='SystemExit: 3'"),
        ("from types import ModuleType", "problem=\"ModuleNotFoundError: No module named 'torch.distributed'"),
        ("import sys; sys.modules['torch.distributed'] = sys", "problem=\"AttributeError: module 'sys' has no"),
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
