"""Each template, submitted to a real Slurm: who runs, what it is told, how it ends."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptman.cli.app import main
from ckptman.jobs.chain_record import find_chains

pytestmark = pytest.mark.timeout(600)

SMALL = {"partition": "main", "mem": "200", "time": "10", "cpus_per_task": "1", "log_folder": "logs"}
RANKS = {**SMALL, "nodes": "2", "gpus_per_node": "0", "tasks_per_node": "2", "exclusive": "false"}
FACTS = "rank $SLURM_PROCID of $SLURM_STEP_NUM_TASKS on $SLURMD_NODENAME at $MASTER_ADDR:$MASTER_PORT"
TELL = f'echo "{FACTS} until $SLURM_JOB_END_TIME"'
# As a Checkpointer does: no rank leaves before all have arrived and the outcome is on disk.
LEAVE = """
echo '"state": "stopped"' > "$CKPTMAN_OUTCOME"
mark=arrived-$SLURM_JOB_ID
touch "$mark-$SLURM_PROCID"
until [ "$(ls | grep -c "$mark-")" = "$SLURM_STEP_NUM_TASKS" ]; do sleep 0.1; done
exit 75
"""

# It waits for SIGTERM as a training loop does, and says so.
WAITING = """
import os, signal, sys, time
from pathlib import Path
rank = os.environ.get("RANK", os.environ["SLURM_PROCID"])
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
Path(sys.argv[1], f"there-{rank}").touch()
deadline = time.monotonic() + 60
while not stop and time.monotonic() < deadline:
    time.sleep(0.05)
time.sleep(0.5)
Path(sys.argv[1], f"saved-{rank}").touch()
sys.exit(75 if stop else 1)
"""


def rendered(name, values, *options):
    Path("logs").mkdir(exist_ok=True)
    settings = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    assert main(["template", name, "-o", f"{name}.sbatch", *settings, *options]) == 0
    return Path(f"{name}.sbatch")


def program(name, body, monkeypatch):
    """A program of this name, in the place of a real one."""
    path = Path("bin", name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent.resolve()}{os.pathsep}{os.environ['PATH']}")


def sbatch(*arguments):
    command = ["sbatch", "--parsable", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def log_of(job):
    return "\n".join(path.read_text() for path in sorted(Path("logs").glob(f"*-{job}*.out")))


def ended(lab, job, timeout_seconds=60):
    """The exit code of a job, and its log."""
    deadline = time.monotonic() + timeout_seconds
    while any(each.split("_")[0] == job for each in lab.queue()):
        assert time.monotonic() < deadline, log_of(job)
        time.sleep(0.1)
    found = re.findall(r"ExitCode=(\d+):(\d+)", lab.ask("scontrol", "show", "job", "-o", job))
    assert {number for _, number in found} == {"0"}, log_of(job)
    return max(int(code) for code, _ in found), log_of(job)


def ranks(log, job, port_of=None):
    """(rank, ranks, node) of each line that TELL wrote; all of them at the first node, at the port of the job."""
    pattern = r"rank (\d+) of (\d+) on (\w+) at (\w+):(\d+) until (\d+)"
    found = re.findall(pattern, log)
    assert found, log
    for each in found:
        assert each[3] == found[0][3]
        assert int(each[4]) == 20000 + int(port_of or job) % 10000
        assert 0 < int(each[5]) - time.time() <= 601
    return sorted((int(rank), int(size), node) for rank, size, node, *_ in found)


@pytest.mark.parametrize("name", ["generic", "leonardo", "lumi", "superpod"])
def test_one_task_for_each_rank(lab, tmp_path, monkeypatch, name):
    program("singularity", 'echo "singularity ${SINGULARITY_BIND:-without} $1 $2"; shift 3; exec "$@"', monkeypatch)
    program("nvidia-smi", 'echo "nvidia-smi $*"; exec sleep 60', monkeypatch)
    monkeypatch.setenv("SINGULARITY_BIND", "/hides/everything")
    monkeypatch.setenv("CKPTMAN_DEBUG", "1")
    values = {
        **RANKS,
        "command": shlex.join(["sh", "-c", f"sleep 1; env | grep -E 'WANDB|NCCL|MIOPEN'; {TELL}; {LEAVE}"]),
    }
    if name == "lumi":
        values["cpu_masks"] = "0x1,0x2"
    job = sbatch(str(rendered(name, values)))
    code, log = ended(lab, job)
    assert code == 75, log
    assert [each[:2] for each in ranks(log, job)] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert len({node for *_, node in ranks(log, job)}) == 2
    assert "NCCL_DEBUG=INFO" in log
    assert ("WANDB_MODE=offline" in log) == (name == "leonardo")
    assert log.count("singularity without exec --bind=") == (4 if name == "lumi" else 0)
    assert ("NCCL_SOCKET_IFNAME=hsn0" in log) == (name == "lumi")
    if name == "superpod":
        # One file for each host; here all nodes are on one.
        told = "".join(path.read_text() for path in Path("logs").glob(f"dmon-{job}-*.log"))
        assert told.count("nvidia-smi dmon -s pucvmet -o DT -d 10") == 2


def test_one_torchrun_for_each_node(lab, tmp_path, monkeypatch):
    program(
        "torchrun",
        f'echo "torchrun $*"; echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT cpus $OMP_NUM_THREADS"; {TELL}; {LEAVE}',
        monkeypatch,
    )
    job = sbatch(str(rendered("torchrun", {**RANKS, "command": "python train.py --a 'b c'"})))
    code, log = ended(lab, job)
    assert code == 75, log
    assert [each[:2] for each in ranks(log, job)] == [(0, 2), (1, 2)]
    [line] = set(re.findall("torchrun .*", log))
    assert "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d" in line
    assert re.search(rf"--rdzv-id={job} --rdzv-endpoint=\w+:{20000 + int(job) % 10000} ", line)
    assert line.endswith("--no-python python train.py --a b c")
    assert "600 cpus 1" in log


def test_torchrun_itself_understands_its_arguments(lab, tmp_path, monkeypatch, scontrol_that_knows_hosts):
    launcher = Path(sys.executable).with_name("torchrun")
    if not launcher.exists():
        pytest.skip("torchrun is not beside this Python")
    monkeypatch.setenv("PATH", f"{launcher.parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "wait.py").write_text(WAITING)
    rendered("torchrun", {**RANKS, "command": shlex.join([sys.executable, "-S", "wait.py", "."])})
    assert main(["submit", "--max-attempts", "1", "torchrun.sbatch"]) == 0
    lab.wait(lambda: len(list(tmp_path.glob("there-*"))) == 4, 90, "not all workers are there")
    [job] = lab.queue()
    lab.ask("scancel", "--signal=USR2", "--batch", job)
    ended_code = _over(lab)
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == [f"saved-{rank}" for rank in range(4)], ended_code


@pytest.fixture
def scontrol_that_knows_hosts(lab, monkeypatch, tmp_path):
    """The nodes of this cluster have names that no resolver knows: they are all here."""
    real = next(each for each in map(Path, os.environ["PATH"].split(os.pathsep)) if (each / "scontrol").exists())
    program(
        "scontrol",
        f'[ "$1" = show ] && [ "$2" = hostnames ] && exec echo 127.0.0.1; exec {real}/scontrol "$@"',
        monkeypatch,
    )


def _over(lab):
    lab.wait(lambda: not lab.queue(), 90, "the job goes on")
    [chain] = find_chains(Path.cwd())
    return f"{chain.state} {[path.read_text() for path in Path('logs').iterdir()]}"


@pytest.mark.parametrize("how", ["submit", "sbatch"])
def test_the_warning_reaches_every_rank(lab, tmp_path, how):
    (tmp_path / "wait.py").write_text(WAITING)
    path = rendered("generic", {**RANKS, "command": shlex.join([sys.executable, "-S", "wait.py", "."])})
    if how == "submit":
        assert main(["submit", "--max-attempts", "1", str(path)]) == 0
    else:
        sbatch("--signal=TERM@180", str(path))
    lab.wait(lambda: len(list(tmp_path.glob("there-*"))) == 4, 60, "not all ranks are there")
    [job] = lab.queue()
    # What Slurm does 180 seconds before the end: it tells the batch script, or the tasks where sbatch was told so.
    lab.ask("scancel", *(["--signal=USR2", "--batch"] if how == "submit" else ["--signal=TERM"]), job)
    code, log = ended(lab, job)
    assert code == 75, log
    assert len(list(tmp_path.glob("saved-*"))) == 4


@pytest.mark.parametrize(("state", "code"), [("stopped", 75), ("running", 143)])
def test_ranks_that_end_one_after_another(lab, tmp_path, state, code):
    # The first is taken for a failure by srun, which ends the others.
    leave = f'echo \'"state": "{state}"\' > "$CKPTMAN_OUTCOME"; [ $SLURM_PROCID = 1 ] || sleep 20; exit 75'
    path = rendered("generic", {**RANKS, "command": shlex.join(["sh", "-c", leave])})
    assert ended(lab, sbatch(str(path)))[0] == code


def test_a_matrix_runs_each_point_on_as_much_as_it_says(lab, tmp_path):
    command = shlex.join(["sh", "-c", f'echo "point $SCALING_POINT"; {TELL}'])
    values = {**SMALL, "gpus_per_node": "0", "matrix": "1x1 1x3 2x2", "command": command}
    path = rendered("scaling-matrix", values)
    job = sbatch(str(path))
    code, log = ended(lab, job)
    assert code == 0, log
    for task, (point, nodes, tasks) in enumerate([("1x1", 1, 1), ("1x3", 1, 3), ("2x2", 2, 2)]):
        log = Path(f"logs/scaling-{job}_{task}.out").read_text()
        assert log.count(f"point {point}") == nodes * tasks, log
        raw = re.search(r"JobId=(\d+) ", lab.ask("scontrol", "show", "job", "-o", f"{job}_{task}"))
        assert raw
        found = ranks(log, job, port_of=raw[1])
        assert [each[:2] for each in found] == [(rank, nodes * tasks) for rank in range(nodes * tasks)]
        assert len({node for *_, node in found}) == nodes
    job = sbatch("--array=2", "--nodes=1", str(path))
    code, log = ended(lab, job)
    assert code == 2
    assert "submit it with --nodes=2" in log


def test_tokens_first_then_the_training(lab, tmp_path):
    first = rendered("tokenize", {**SMALL, "command": "sh -c 'sleep 1; echo tokens > tokens; exit 0'"})
    then = rendered("generic", {**RANKS, "command": "cat tokens"})
    before = sbatch(str(first))
    job = sbatch(f"--dependency=afterok:{before}", "--kill-on-invalid-dep=yes", str(then))
    code, log = ended(lab, job)
    assert (code, log.count("tokens")) == (0, 4)
    rendered("tokenize", {**SMALL, "command": "false"}, "--force")
    before = sbatch(str(first))
    job = sbatch(f"--dependency=afterok:{before}", "--kill-on-invalid-dep=yes", str(then))
    lab.wait(lambda: not lab.queue(), 60, "the training waits for ever")
    assert "JobState=CANCELLED" in lab.ask("scontrol", "show", "job", "-o", job)


@pytest.mark.parametrize(("name", "code"), [("verify", 3), ("prune", 3)])
def test_jobs_on_cpus_end_with_the_code_of_the_command(lab, tmp_path, name, code):
    venv = Path(sys.executable).parents[1]
    command = shlex.join(["ckptman", name, "nowhere"])
    values = {**SMALL, "command": command, "setup": f"export PATH={shlex.quote(str(venv / 'bin'))}:$PATH"}
    found, log = ended(lab, sbatch(str(rendered(name, values))))
    assert found == code, log
    assert "there is no checkpoint root nowhere" in log


def test_values_with_everything_in_them(lab, tmp_path):
    folder = tmp_path / "logs 'x' \"y\" #z;$(touch made) `touch made`"
    folder.mkdir()
    name = "a 'b' \"c\" $(touch made) `touch made` #d;&|<>*?!é"
    values = {
        **RANKS,
        "job_name": name,
        "log_folder": str(folder),
        "sbatch": '--comment=it\'s "so" # and $(touch made)',
        "env.STRANGE": "a\nb 'c' $(touch made) \\",
        "command": shlex.join(["sh", "-c", 'echo "$1|$STRANGE|" >> seen', "sh", "x 'y' $(touch made)\n`touch made`"]),
    }
    job = sbatch(str(rendered("generic", {**values, "nodes": "1", "tasks_per_node": "1"})))
    code, _ = ended(lab, job)
    assert code == 0
    assert (tmp_path / "seen").read_text() == ("x 'y' $(touch made)\n`touch made`|a\nb 'c' $(touch made) \\|\n")
    assert (folder / f"{name}-{job}.out").exists()
    shown = lab.ask("scontrol", "show", "job", "-o", job)
    assert f"JobName={name} " in shown
    assert 'Comment=it\'s "so" # and $(touch made) ' in shown
    assert not list(tmp_path.rglob("made"))
