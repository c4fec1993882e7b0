"""A Slurm of small executables on PATH and one controller: jobs are real processes, and what goes wrong is planned."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

KILL_WAIT_SECONDS = 3.0
REQUEUE_SECONDS = 0.5
NOTICE_SECONDS = 0.5
"""After that a node that is gone is noticed."""
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL")

CLIENT = """#!{python} -S
import json, os, socket, sys
name = {name!r}
try:
    with socket.create_connection(("127.0.0.1", {port})) as talk:
        talk.sendall(json.dumps([name, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode() + b"\\n")
        code, out, err = json.loads(talk.makefile().readline())
except (OSError, ValueError):
    code, out, err = 1, "", name + ": error: Unable to contact slurm controller (connect failure)\\n"
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""
SRUN = """#!{python} -S
import os, signal, subprocess, sys
command = [each for each in sys.argv[1:]]
while command[0].startswith("--"):
    command.pop(0)
task = subprocess.Popen(command, env={{**os.environ, "SLURM_PROCID": "0"}}, start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: task.kill())
code = task.wait()
sys.exit(code if code >= 0 else 128 - code)
"""


class Trouble(NamedTuple):
    """What goes wrong with a call, and is said of it. `done`: what was asked for is done all the same."""

    said: str = "error: Socket timed out on send/recv operation"
    done: bool = False


LOST = Trouble(done=True)
FAILS = Trouble()
FULL = Trouble("error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit)")
DENIED = Trouble("error: Kill job error: Access/permission denied")


@dataclass
class Job:
    id: str
    script: str
    command: list[str]
    options: dict[str, str]
    folder: str
    environ: dict[str, str]
    state: str = "PENDING"
    reason: str = "None"
    nodes: list[str] = field(default_factory=list)
    restarts: int = 0
    begins: float = 0.0
    kill_at: float = 0.0
    then: str = ""
    ended: str = ""
    batch: subprocess.Popen[bytes] | None = None

    @property
    def dependency(self):
        return self.options.get("--dependency", "").partition(":")[2]


class SmallSlurm:
    """A cluster in a folder; a context manager.

    `troubles`: what goes wrong with the next calls of a program; None: nothing. `seconds`: how long each call takes.
    """

    def __init__(self, folder, nodes=4):
        self.folder, self.nodes = folder, [f"n{number}" for number in range(1, nodes + 1)]
        self.troubles = {}
        self.seconds = 0.0
        self._jobs = {}
        self._down = set()
        self._gone = {}
        self._lock = threading.RLock()
        self._away = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="controller")
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(0.02)
        (folder / "bin").mkdir(parents=True)
        for name in ("sbatch", "squeue", "scontrol", "scancel", "sinfo", "srun"):
            path = folder / "bin" / name
            text = SRUN if name == "srun" else CLIENT
            path.write_text(text.format(python=sys.executable, name=name, port=self._socket.getsockname()[1]))
            path.chmod(0o755)
        self.environ = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "SLURM_CONF": str(folder)}

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._over.set()
        self._thread.join()
        self._socket.close()
        for job in self._jobs.values():
            while self._send(job, signal.SIGKILL):
                time.sleep(0.02)
            if job.batch is not None:
                job.batch.wait()

    # ---- what a test may do ------------------------------------------------------------------------------------

    def ask(self, *command):
        done = subprocess.run(command, env={**os.environ, **self.environ}, capture_output=True, text=True, timeout=240)
        return done.stdout if done.returncode == 0 else ""

    def queue(self):
        with self._lock:
            return {job.id: job.state for job in self._jobs.values() if job.state not in OVER}

    def idle(self):
        with self._lock:
            busy = {node for job in self._jobs.values() for node in job.nodes}
            return [node for node in self.nodes if node not in busy | self._down | set(self._gone)]

    def wait(self, done, timeout_seconds, what):
        deadline = time.monotonic() + timeout_seconds
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} after {timeout_seconds:.0f} s")
            time.sleep(0.05)

    def stop_controller(self):
        """Jobs run on; nobody can be asked, and nothing is noticed."""
        with self._lock:
            self._away = True

    def start_controller(self):
        with self._lock:
            self._away = False

    def kill_node(self, name):
        with self._lock:
            for job in self._jobs.values():
                if name in job.nodes:
                    self._send(job, signal.SIGKILL)
            self._gone[name] = time.monotonic()

    def kill_daemon(self, name):
        with self._lock:
            self._gone[name] = time.monotonic()

    def start_node(self, name):
        with self._lock:
            self._gone.pop(name, None)

    # ---- the controller ----------------------------------------------------------------------------------------

    def _serve(self):
        while not self._over.is_set():
            with suppress(OSError, ValueError):  # nobody calls, or who did was killed
                talk, _ = self._socket.accept()
                with talk:
                    if not self._away:
                        self._talk(talk)
            with self._lock:
                for job in [] if self._away else list(self._jobs.values()):
                    self._advance(job, time.monotonic())

    def _talk(self, talk):
        with talk.makefile("rw") as lines:
            name, arguments, folder, environ = json.loads(lines.readline())
            lines.write(json.dumps(self._answer(name, arguments, folder, environ)) + "\n")

    def _answer(self, name, arguments, folder, environ):
        planned = self.troubles.get(name)
        trouble = planned.pop(0) if planned else None
        self._over.wait(self.seconds)
        answer = (0, "", "")
        if trouble is None or trouble.done:
            with self._lock:
                answer = getattr(self, f"_{name}")(arguments, folder, environ)
        return answer if trouble is None else (1, "", f"{name}: {trouble.said}\n")

    def _advance(self, job, now):
        gone = [now - self._gone[node] for node in job.nodes if node in self._gone]
        if job.state == "RUNNING" and gone:
            if max(gone) > NOTICE_SECONDS:
                self._fail(job)
        elif job.state == "RUNNING" and job.batch is not None and job.batch.poll() is not None:
            self._end(job, "FAILED" if job.batch.returncode else "COMPLETED")
        elif job.state == "COMPLETING":
            left = self._send(job, signal.SIGKILL if now > job.kill_at else None)
            if not left and (job.batch is None or job.batch.poll() is not None):
                job.nodes, job.state = [], job.then
                if job.then == "PENDING":
                    job.restarts, job.begins = job.restarts + 1, now + REQUEUE_SECONDS
        elif job.state == "PENDING":
            before = self._jobs.get(job.dependency)
            if before is not None and before.state not in OVER:
                job.reason = "Dependency"
            elif job.reason != "JobHeldUser":
                job.reason = "BeginTime" if now < job.begins else "Resources"
                if job.reason == "Resources":
                    self._place(job)

    def _place(self, job):
        wanted = int(job.options.get("--nodes", "1"))
        idle = [node for node in self.idle() if node in _allowed(self.nodes, job.options)]
        if len(idle) >= wanted:
            self._start(job, idle[:wanted])
        elif job.options.get("--partition") == "high":
            for other in self._jobs.values():
                if other.state == "RUNNING" and other.options.get("--partition") != "high":
                    self._end(other, "PREEMPTED", again="--no-requeue" not in other.options)

    def _start(self, job, nodes):
        path = self.folder / f"script-{job.id}"
        path.write_text(job.script)
        path.chmod(0o755)
        facts = {"SLURM_JOB_ID": job.id, "SLURM_JOB_NODELIST": ",".join(nodes), **self.environ}
        if job.restarts:
            facts["SLURM_RESTART_COUNT"] = str(job.restarts)
        output = Path(job.folder, job.options.get("--output", "slurm-%j.out").replace("%j", job.id))
        with output.open("ab") as log:
            job.batch = subprocess.Popen(
                [str(path), *job.command[1:]],
                cwd=job.folder,
                env={**job.environ, **facts},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        job.state, job.reason, job.nodes = "RUNNING", "None", nodes

    def _end(self, job, state, again=False, number=signal.SIGTERM):
        """End what still runs of a job: SIGTERM, and SIGKILL later; then it is over, or waits again."""
        job.ended = time.strftime("%Y-%m-%dT%H:%M:%S")
        job.state, job.then, job.kill_at = "COMPLETING", state, time.monotonic() + KILL_WAIT_SECONDS
        if again:
            job.then = "PENDING"
        self._send(job, number, batch=True)

    def _fail(self, job):
        self._end(job, "NODE_FAIL", again="--no-requeue" not in job.options, number=signal.SIGKILL)
        job.kill_at = 0.0

    def _send(self, job, number, *, tasks=True, batch=False):
        """Signal the tasks of a job, its batch script, or with SIGKILL all that is left. How many there are."""
        found = 0
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                environ = process.environ()
                where = (environ.get("SLURM_CONF"), environ.get("SLURM_JOB_ID"))
                if where != (str(self.folder), job.id) or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                found += 1
                script = job.batch is not None and process.pid == job.batch.pid
                is_task = "SLURM_PROCID" in environ
                if number == signal.SIGKILL or (number and ((batch and script) or (tasks and is_task))):
                    process.send_signal(number)
        return found

    # ---- the programs ------------------------------------------------------------------------------------------

    def _sbatch(self, arguments, folder, environ):
        words = list(arguments)
        given = [words.pop(0) for _ in list(words) if words and words[0].startswith("--")]
        options = _options(given)
        script = f"#!/bin/sh\n{options['--wrap']}\n" if "--wrap" in options else Path(words[0]).read_text()
        lines = [line for line in script.splitlines() if line.startswith("#SBATCH")]
        options = {**_options([word for line in lines for word in shlex.split(line)[1:]]), **options}
        if "--test-only" in options:
            fits = len(_allowed(self.nodes, options)) >= int(options.get("--nodes", "1"))
            return (
                (0, "", "") if fits else (1, "", "allocation failure: Requested node configuration is not available\n")
            )
        job = Job(str(len(self._jobs) + 1), script, words, options, folder, environ)
        self._jobs[job.id] = job
        return 0, f"{job.id}\n", ""

    def _squeue(self, arguments, folder, environ):
        said = dict(itertools.pairwise(arguments))
        jobs = list(self._jobs.values())
        if "-j" in said:
            jobs = [self._jobs[each] for each in said["-j"].split(",") if each in self._jobs]
            if not jobs:
                return 1, "", "slurm_load_jobs error: Invalid job id specified\n"
        if said.get("-t") != "all":
            jobs = [job for job in jobs if job.state not in OVER]
        return 0, "".join(_row(said["-o"], job) + "\n" for job in jobs), ""

    def _sinfo(self, arguments, folder, environ):
        return 0, "\n".join(self.idle()) + "\n", ""

    def _scancel(self, arguments, folder, environ):
        options = _options([each for each in arguments if each.startswith("--")])
        for job in [self._jobs[each] for each in arguments if each in self._jobs]:
            if "--signal" in options:
                number, script = signal.Signals[f"SIG{options['--signal'].removeprefix('SIG')}"], "--batch" in options
                if script and job.batch is not None:
                    with suppress(ProcessLookupError):
                        job.batch.send_signal(number)
                else:
                    self._send(job, number)
            elif job.state == "PENDING":
                job.state = "CANCELLED"
            elif job.state == "RUNNING":
                self._end(job, "CANCELLED")
        return 0, "", ""

    def _scontrol(self, arguments, folder, environ):
        verb, *words = arguments
        values = dict(word.partition("=")[::2] for word in words)
        if words[0] == "hostnames":
            return 0, words[1].replace(",", "\n") + "\n", ""
        if words[0] == "node":
            return 0, "".join(self._node(name) + "\n" for name in words[1].split(",")), ""
        if "nodename" in values:
            self._set_node(values["nodename"], values["state"])
            return 0, "", ""
        job = self._jobs.get(values.get("JobId") or words[0])
        if job is None:
            return 1, "", "Invalid job id specified\n"
        if verb == "requeue" and job.state == "RUNNING":
            self._end(job, "PENDING", again=True)
        elif verb in ("uhold", "release"):
            job.reason = "JobHeldUser" if verb == "uhold" else "None"
        elif verb == "update" and "EndTime" in values:
            self._end(job, "TIMEOUT")
        elif verb == "update":
            delay = values["StartTime"].removeprefix("now").removeprefix("+") or "0"
            job.begins = time.monotonic() + float(delay)
        return 0, "", ""

    def _node(self, name):
        state = "DOWN" if name in self._down else "DOWN*" if name in self._gone else "IDLE"
        return f"NodeName={name} CoresPerSocket=1 State={state} Weight=1" + " Reason=test" * (state != "IDLE")

    def _set_node(self, name, state):
        if state == "resume":
            self._down.discard(name)
            return
        self._down.add(name)
        for job in self._jobs.values():
            if name in job.nodes and job.state == "RUNNING":
                self._fail(job)


def _options(words):
    return dict(word.partition("=")[::2] for word in words)


def _allowed(nodes, options):
    excluded = options.get("--exclude", "").split(",")
    wanted = options.get("--nodelist", ",".join(nodes)).split(",")
    return [node for node in nodes if node in wanted and node not in excluded]


def _row(form, job):
    waits_for = f"afterany:{job.dependency}(unfulfilled)" if job.dependency and job.state == "PENDING" else ""
    values = {"%i": job.id, "%A": job.id, "%T": job.state, "%r": job.reason, "%E": waits_for, "%N": ",".join(job.nodes)}
    values |= {"%e": job.ended or "N/A", "%o": " ".join(job.command)}
    for name, value in values.items():
        form = form.replace(name, value)
    return form
