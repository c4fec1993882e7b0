"""Random chains of programs that know nothing of ckptman, on a Slurm in memory with a clock of its own.

A chain must not end while it could continue, must not continue when it cannot succeed, and must never be doubled; and
each end must have the cause that was planned.
"""

import errno
import json
import os
import random
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest

from ckptman.errors import SchedulerError
from ckptman.jobs import attempt as attempt_module
from ckptman.jobs.attempt import Supervisor
from ckptman.jobs.causes import Cause
from ckptman.jobs.chain_record import Chain
from ckptman.jobs.slurm.commands import Job, QueueFullError, UnreachableError
from ckptman.jobs.slurm.submission import Submission, prepare, submit_chain
from ckptman.storage.io.durable_files import DISK

NOW = 1_000_000.0
GLOO = "RuntimeError: [/p/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:24775. GLHF!"
STEPD = "slurmstepd: error: *** JOB {job} ON n1 CANCELLED AT 2026-11-30T02:38:25{why} ***"
PROGRAM = """
import json, pathlib, sys
plan = json.loads(pathlib.Path("plan.json").read_text())
out = pathlib.Path("out")
tracker = out / "latest_checkpointed_iteration.txt"
if plan["saves"]:
    step = (int(tracker.read_text()) if tracker.exists() else 0) + 10
    (out / f"iter_{step:07}").mkdir(parents=True)
    (out / f"iter_{step:07}" / "model.pt").write_bytes(bytes(1000))
    tracker.write_text(str(step))
print(plan["log"], flush=True)
sys.exit(plan["code"])
"""


@dataclass(frozen=True)
class End:
    """How an attempt ends. `state`: of its job for Slurm; `cause`: the name that the chain must find; `killed`: the
    batch script, too; `forever`: each later attempt ends so, without a new checkpoint."""

    name: str
    cause: str
    log: str = "step"
    code: int = 1
    saves: bool = True
    state: str = "RUNNING"
    killed: bool = False
    down: str = ""
    forever: bool = False


LIMIT = STEPD.replace("{why}", " DUE TO TIME LIMIT")
PASSING = [
    End("saved, and again", "", code=75),
    End("the time limit, exit 0", "time-limit", LIMIT, 0, state="COMPLETING"),
    End("the time limit, exit 1", "time-limit", LIMIT, 1, state="COMPLETING"),
    End("the time limit, killed", "time-limit", LIMIT, killed=True, state="TIMEOUT"),
    End("the time limit, killed and forgotten", "time-limit", LIMIT, killed=True, state=""),
    End("killed and forgotten", "unknown", killed=True, state=""),
    End("preempted", "preempted", STEPD.replace("{why}", " DUE TO PREEMPTION"), 1, state="PREEMPTED"),
    End("cancelled", "cancelled", STEPD.replace("{why}", ""), 1, state="CANCELLED"),
    End("a node fails, killed", "node", killed=True, state="NODE_FAIL"),
    End("a node fails, its peer sees it first", "node", GLOO, 1, down="n1"),
    End("a node fails before the first save", "node", GLOO, 1, saves=False, down="n1"),
    End("an error, once", "exception", "ValueError: bad batch", 1),
    End("a segfault", "signal", f"{GLOO}\nsrun: error: n1: task 1: Segmentation fault", 139),
    End("a GPU without memory", "oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", 1),
    End("the kernel's OOM killer", "host-oom", "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0", 137),
    End("a port is taken", "port", "OSError: [Errno 98] Address already in use", 1, saves=False),
    End("a stale handle", "filesystem", "OSError: [Errno 116] Stale file handle: 'data'", 1, saves=False),
    End("no space", "space", "OSError: [Errno 28] No space left on device", 1, saves=False),
    End("a collective timed out", "nccl", "[rank1]: Watchdog caught collective operation timeout: WorkNCCL", 1),
    End("a broken GPU", "ecc", "RuntimeError: CUDA error: uncorrectable ECC error encountered", 1),
    End("an echo alone", "peer", GLOO, 1),
    End("an exit code alone", "exit", code=7),
]
FOREVER = [
    End("the same error", "exception", "ValueError: the data is not there", 1, saves=False, forever=True),
    End("a missing module", "import", "ModuleNotFoundError: No module named 'x'", 1, saves=False, forever=True),
    End("a model that is too large", "oom", "torch.OutOfMemoryError: CUDA out of memory.", 1, False, forever=True),
    End("an exit code", "exit", code=3, saves=False, forever=True),
    End("no quota", "space", "OSError: [Errno 122] Disk quota exceeded", 1, saves=False, forever=True),
]
DONE = End("finished", "", code=0)


@dataclass
class MemorySlurm:
    """The client of a Slurm in memory. `troubles`: what goes wrong with the next calls of a method."""

    batch: list[str] = field(default_factory=list)
    queue: dict[str, Job] = field(default_factory=dict)
    depends: dict[str, str] = field(default_factory=dict)
    begins: dict[str, float] = field(default_factory=dict)
    down: str = ""
    now: float = NOW
    troubles: dict[str, list[type[Exception]]] = field(default_factory=dict)

    def _fail(self, name):
        if self.troubles.get(name):
            raise self.troubles[name].pop(0)("not now")

    def set(self, job_id, state, reason="None"):
        self.queue[job_id] = Job(job_id, state, reason, "N/A", "")

    def submit(self, batch_file, number, options):
        self._fail("submit")
        job_id = str(100 + len(self.batch) + 1)
        self.batch.append(str(number))
        self.depends[job_id] = next((each.rpartition(":")[2] for each in options if "afterany" in each), "")
        self.set(job_id, "PENDING")
        return job_id

    def is_ready(self, job_id):
        before = self.queue.get(self.depends[job_id])
        return before is None or before.over

    def jobs(self, ids):
        self._fail("jobs")
        return {each: self.queue[each] for each in ids if each in self.queue}

    def ask(self, ids, _):
        with suppress(SchedulerError):
            return self.jobs(ids)

    def bad_nodes(self, nodes):
        self._fail("bad_nodes")
        return {self.down: "DOWN"} if self.down and self.down in nodes else {}

    def names_of(self, nodes):
        return nodes.split(",")

    def why_never(self, *_):
        return ""

    def cancel(self, ids):
        for each in ids:
            self.set(each, "CANCELLED")

    def requeue(self, job_id):
        self.set(job_id, "REQUEUED")

    def update(self, job_id, **values):
        if "StartTime" in values:
            self.begins[job_id] = self.now + float(values["StartTime"].removeprefix("now+"))

    def is_left_alone(self, job_id):
        return False

    def signal_steps(self, job_id, name):
        pass


TROUBLES = {
    "submit": [UnreachableError, QueueFullError, SchedulerError],
    "jobs": [UnreachableError],
    "bad_nodes": [SchedulerError],
}


def play(folder, monkeypatch, seed):
    """Play one chain to its end. Its plan, the ends, and its last state."""
    rng = random.Random(seed)
    plan = [rng.choice(PASSING) for _ in range(rng.randrange(1, 7))]
    plan.append(rng.choice(FOREVER) if rng.random() < 0.4 else DONE)
    slurm = MemorySlurm()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(attempt_module, "ask_queue", slurm.ask)
    (folder / "program.py").write_text(PROGRAM)
    (folder / "train.sbatch").write_text(
        f"#!/bin/bash\n#SBATCH --time=60\nexec >> log 2>&1\n{sys.executable} -S program.py --save out\n"
    )
    (folder / "log").touch()
    # If Slurm kills a batch script without a word, nobody requeues its job.
    modes = ["successor"] if any(end.killed for end in plan) else ["successor", "requeue"]
    submission = Submission(script=folder / "train.sbatch", mode=rng.choice(modes))
    [made] = prepare(submission, None, {}, NOW)
    submit_chain(made, slurm, NOW)
    played = []
    for _ in range(60):
        ready = [each for each, job in slurm.queue.items() if job.waits and slurm.is_ready(each)]
        assert len(ready) <= 1, "two jobs of one chain never run at once"
        if not ready:
            break
        job_id = ready[0]
        end = plan[min(len(played), len(plan) - 1)]
        slurm.now = max(slurm.now + 60, slurm.begins.get(job_id, 0.0)) + rng.choice([0, 0, 0, -3600, 86400])
        if rng.random() < 0.2:
            # An attempt that is killed before it can submit its successor ends a chain: nobody is left.
            name = rng.choice([each for each in TROUBLES if not end.killed or each != "submit"])
            slurm.troubles[name] = [rng.choice(TROUBLES[name])]
        is_full = rng.random() < 0.1
        if run_job(folder, slurm, made.chain, job_id, end, monkeypatch, rng, is_full=is_full):
            played.append(replace(end, cause="") if is_full else end)
        slurm.troubles.clear()
    return plan, played, made.chain, slurm


def run_job(folder, slurm, chain, job_id, end, monkeypatch, rng, *, is_full):
    """Run a job of a chain, which ends as planned. Whether an attempt began in it."""
    plan = {"saves": end.saves, "log": end.log.format(job=job_id), "code": end.code}
    (folder / "plan.json").write_text(json.dumps(plan))
    slurm.set(job_id, "RUNNING")
    log = folder / "log"
    place = {"log": str(log), "log_begin": log.stat().st_size, "error_log": "", "error_begin": 0}
    monkeypatch.setattr(attempt_module, "logs_of_this_process", lambda: place)
    environ = {"SLURM_JOB_ID": job_id, "SLURM_JOB_NODELIST": "n1,n2,n3", "PATH": "/usr/bin:/bin"}
    number = int(slurm.batch[int(job_id) - 101])
    job = PlannedSupervisor(
        *(chain, number, environ, slurm, str(folder)),
        say=lambda _: None,
        clock=lambda: slurm.now,
        sleep=lambda _: None,
    )
    # Of a program that has saved nothing yet, a long attempt that crashes is no crash loop.
    job.plan = end, slurm, rng.randrange(60, 500 if end.forever else 3000)
    begun = len(chain.attempts())
    with monkeypatch.context() as context:
        if is_full:  # the disk of the chain's folder, for one record
            put, failed = DISK.create_whole_file, []

            def create(path, data):
                if path.name.startswith("ended-") and not failed:
                    failed.append(path)
                    raise OSError(errno.ENOSPC, "No space left on device")
                return put(path, data)

            context.setattr(DISK, "create_whole_file", create)
        with suppress(KilledError):
            job.run()
    slurm.down = ""
    if slurm.queue[job_id].state == "REQUEUED":
        pass
    elif end.killed and not end.state:
        del slurm.queue[job_id]
    elif not slurm.queue[job_id].over:
        slurm.set(job_id, "FAILED" if end.code else "COMPLETED")
    return len(chain.attempts()) > begun


class KilledError(Exception):
    """The batch script was killed."""


class PlannedSupervisor(Supervisor):
    def _end(self, attempt, returncode):
        end, slurm, seconds = self.plan
        slurm.now += seconds
        os.utime(self._chain.folder / f"attempt-{attempt.number:04}.json", (slurm.now, slurm.now))
        slurm.down = end.down
        if end.state:
            slurm.set(attempt.job_id, end.state)
        if end.killed:
            raise KilledError
        super()._end(attempt, returncode)


def check(plan, played, chain: Chain, slurm):
    names = [end.name for end in played]
    state, ends = chain.state, chain.ends()
    assert [each.number for each in chain.attempts()] == list(range(1, len(played) + 1)), names
    for number, planned in enumerate(played, 1):
        if number in ends and planned.cause and number < len(played):
            found = ends[number]
            # Slurm may not answer when it is asked about a job that was killed, or about nodes.
            allowed = [planned.cause, *["unknown"] * planned.killed, *["peer"] * bool(planned.down)]
            assert found.cause in allowed, (number, names, found)
    if plan[-1] is DONE:
        assert (state.state, played[-1].name) == ("finished", "finished"), (names, state)
    else:
        assert state.state == "stopped", (names, state)
        limit = {"exit": 3, "space": 10}.get(plan[-1].cause, 2)
        unrecorded = sum(end.forever and not end.cause for end in played)
        assert 1 <= sum(end.forever for end in played) <= limit + unrecorded, names
    assert not [job for job in slurm.queue.values() if job.waits or job.runs], "nothing is left in the queue"
    assert Cause(ends[max(ends)].cause, "").remedy


@pytest.mark.parametrize("seed", range(12))
def test_a_random_chain(tmp_path, monkeypatch, seed):
    check(*play(tmp_path, monkeypatch, seed))


@pytest.mark.campaign
def test_two_hundred_random_chains(tmp_path, monkeypatch):
    first = random.SystemRandom().randrange(10**9)
    print(f"seeds {first} to {first + 199}")
    for seed in range(first, first + 200):
        folder = tmp_path / str(seed)
        folder.mkdir()
        check(*play(folder, monkeypatch, seed))
