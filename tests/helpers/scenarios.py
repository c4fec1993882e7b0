"""What can happen to the jobs of a chain, on a real Slurm and on one of small executables: the same list for both."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import psutil
import pytest

from ckptman.cli.app import main
from ckptman.jobs.chain_record import Chain, find_chains
from tests.helpers import counting_run


class Lab(Protocol):
    """A cluster that a test may treat badly. `tests.slurm.cluster` and `tests.helpers.small_slurm` have one."""

    nodes: list[str]

    def ask(self, *command): ...

    def queue(self): ...

    def idle(self): ...

    def wait(self, done, timeout_seconds, what): ...

    def start_controller(self): ...

    def stop_controller(self): ...

    def start_node(self, name): ...

    def kill_node(self, name): ...

    def kill_daemon(self, name): ...


def script(folder, body, *directives):
    lines = ["#!/bin/bash", "#SBATCH --time=5", "#SBATCH --output=log", *(f"#SBATCH {each}" for each in directives)]
    path = folder / "train.sbatch"
    path.write_text("\n".join([*lines, body]) + "\n")
    return path


def submit(path, *options):
    assert main(["submit", *options, str(path)]) == 0
    return find_chains(path.parent)[-1]


@dataclass
class Scene:
    """A chain that is watched: at each look there is at most one attempt that runs, and one job behind it.

    `program`: a word of the command line of its ranks. `unrecognized_entries`: jobs that are none of the chain.
    """

    lab: Lab
    chain: Chain
    program: str = counting_run.NAME
    unrecognized_entries: set[str] = field(default_factory=set)

    def look(self):
        """The state of each job of the chain that waits or runs."""
        queue = {job: state for job, state in self.lab.queue().items() if job not in self.unrecognized_entries}
        running = [state for state in queue.values() if state not in ("PENDING", "COMPLETING")]
        waiting = [state for state in queue.values() if state == "PENDING"]
        assert len(running) <= 1, queue
        assert len(waiting) <= (1 if running else 2), queue  # a requeued one waits beside its successor
        begun = {each.number for each in self.chain.attempts()}
        assert len(begun - set(self.chain.ends())) <= 1, "two attempts have begun and not ended"
        return queue

    def until(self, done, seconds, what):
        """Look until `done`. Raises: TimeoutError."""
        deadline = time.monotonic() + seconds
        while not done():
            self.look()
            if time.monotonic() > deadline:
                shown = self.lab.ask("squeue", "-o", "%i %T %r %N")
                raise TimeoutError(f"{what} after {seconds:.0f} s\n{shown}\n{self.chain.state}\n{self.log()}")
            time.sleep(0.1)

    def until_ended(self, number, seconds):
        """Until attempt `number` has ended."""
        self.until(
            lambda: number in self.chain.ends() or len(self.chain.attempts()) > number,
            seconds,
            f"attempt {number} runs on",
        )

    def over(self, seconds):
        """Until the chain has ended and none of its jobs is in the queue. A delay after a crash is not waited for."""

        def ended():
            queue = self.look()
            if queue and set(queue.values()) == {"PENDING"}:
                self._hurry()
            return not queue and self.chain.state.state not in ("active", "paused")

        self.until(ended, seconds, "the chain has not ended")

    def finishes(self, seconds):
        self.over(seconds)
        assert self.chain.state.state == "finished", f"{self.chain.state}\n{self.log()}"

    def _hurry(self):
        """End the delay after a crash. Not that of a requeued job, which Slurm could not start yet."""
        rows = (line.split("|") for line in self.lab.ask("squeue", "-h", "-o", "%i|%r").splitlines())
        begun = {each.job_id for each in self.chain.attempts()}
        for job in {job for job, reason in rows if reason == "BeginTime"} - begun:
            self.lab.ask("scontrol", "update", f"JobId={job}", "StartTime=now")

    def runs(self, job):
        return self.lab.queue().get(job) == "RUNNING"

    def nodes(self):
        """The nodes of the newest attempt. Its batch script runs on the first one."""
        return self.lab.ask("scontrol", "show", "hostnames", self.chain.attempts()[-1].nodes).split()

    def ranks(self, job):
        """The processes of the tasks of a job, in the order of their ranks."""
        found = {}
        for process in psutil.process_iter():
            try:
                environ = process.environ()
                mine = environ.get("SLURM_JOB_ID") == job and process.name().startswith(("python", "for-"))
                here = environ.get("SLURM_CONF") == os.environ.get("SLURM_CONF")  # other clusters have the same ids
                if mine and here and any(self.program in word for word in process.cmdline()):
                    found.setdefault(int(environ.get("SLURM_PROCID", "0")), process)
            except psutil.Error:
                continue
        return [found[rank] for rank in sorted(found)]

    def log(self):
        path = self.chain.folder.parents[1] / "log"
        return path.read_text(errors="replace") if path.exists() else "no log"


Act = Callable[[Scene, str], None]
"""Done to the running job of a scene, whose id it is given."""


def warn(scene, job):
    """What --signal=B:USR2@N does."""
    scene.lab.ask("scancel", "--signal=USR2", "--batch", job)


def tell_the_tasks(scene, job):
    scene.lab.ask("scancel", "--signal=TERM", job)


def cancel(scene, job):
    scene.lab.ask("scancel", job)


def requeue(scene, job):
    scene.lab.ask("scontrol", "requeue", job)


def preempt(scene, job):
    """By a job of a higher partition that wants all nodes."""
    wants = ("--partition=high", f"--nodes={len(scene.lab.nodes)}", "--exclusive", "--output=/dev/null")
    scene.unrecognized_entries.add(scene.lab.ask("sbatch", "--parsable", *wants, "--wrap=sleep 1").strip())


def kill_a_rank(scene, job):
    scene.ranks(job)[-1].send_signal(signal.SIGKILL)


def kill_srun(scene, job):
    for process in psutil.process_iter():
        try:
            if process.name() == "srun" and process.environ().get("SLURM_JOB_ID") == job:
                process.kill()
        except psutil.Error:
            continue


def kill_the_batch_script(scene, job):
    scene.lab.ask("scancel", "--signal=KILL", "--batch", job)


def set_a_node_down(scene, job):
    node = f"nodename={scene.nodes()[-1]}"
    scene.lab.ask("scontrol", "update", node, "state=down", "reason=test")
    scene.until(lambda: not scene.runs(job), 60, "the job runs on")
    scene.lab.ask("scontrol", "update", node, "state=resume")


def cut_the_power(scene, job):
    """Of a node: its daemon and all that runs there is gone at once. It comes back when Slurm has noticed."""
    _lose(scene, job, scene.nodes()[-1], scene.lab.kill_node)


def cut_the_power_of_the_first(scene, job):
    _lose(scene, job, scene.nodes()[0], scene.lab.kill_node)


def kill_slurmd(scene, job):
    """Of a node: what runs there runs on, and Slurm cannot reach it. Nobody trains until it is noticed."""
    _lose(scene, job, scene.nodes()[-1], scene.lab.kill_daemon)


def kill_slurmd_of_the_first(scene, job):
    _lose(scene, job, scene.nodes()[0], scene.lab.kill_daemon)


def _lose(scene, job, node, kill):
    hold = scene.chain.folder.parents[1] / "hold"
    hold.touch()
    kill(node)
    scene.until(lambda: not scene.runs(job), 90, "nobody noticed that a node is gone")
    hold.unlink()
    scene.lab.start_node(node)


def restart_the_controller(scene, job):
    scene.lab.stop_controller()
    scene.lab.start_controller()
    scene.lab.ask("scancel", job)


def end_without_a_controller(scene, job):
    """The run ends while nobody can be asked."""
    ranks = scene.ranks(job)
    scene.lab.stop_controller()
    for rank in ranks:
        rank.terminate()
    psutil.wait_procs(ranks, 60)
    scene.lab.start_controller()


SRUN = "srun --nodes=1 --ntasks=1"


@dataclass(frozen=True)
class Scenario:
    """`acts`: what happens to each attempt in turn; the last one is left alone. `endings`: of all, as a pattern.

    `lost`: so many steps an attempt may have to repeat. `slow`: on a real Slurm it is for the campaign.
    `variation`: of another one, always for the campaign.
    """

    acts: Sequence[Act]
    endings: str
    lost: int = 0
    launcher: str = SRUN
    directives: Sequence[str] = ()
    slow: bool = False
    variation: bool = False


LOST = counting_run.SAVED_EVERY - 1
STOPPED = "stopped finished"
OUTSIDE = "(interrupted|stopped) finished"
"""Whether it can save before it is killed is not known."""
ANY = "(crashed|interrupted|stopped) finished"
SCENARIOS = {
    "a warning": Scenario([warn], STOPPED),
    "a warning, without srun": Scenario([warn], STOPPED, launcher=""),
    "scancel --signal": Scenario([tell_the_tasks], STOPPED),
    "scancel": Scenario([cancel], STOPPED),
    "scancel, without srun": Scenario([cancel], STOPPED, launcher="", variation=True),
    "requeue": Scenario([requeue], STOPPED),
    "preemption": Scenario([preempt], STOPPED, directives=["--exclusive"]),
    "kill -9 of the run": Scenario([kill_a_rank], "crashed finished", LOST, slow=True),
    "kill -9 of srun": Scenario([kill_srun], ANY, LOST, variation=True),
    "kill -9 of the batch script": Scenario([kill_the_batch_script], ANY, LOST),
    "a node set down": Scenario([set_a_node_down], OUTSIDE, LOST, directives=["--no-requeue"]),
    "a node set down, requeued": Scenario([set_a_node_down], OUTSIDE, LOST, variation=True),
    "a node that dies": Scenario([cut_the_power], "interrupted finished", LOST, directives=["--no-requeue"], slow=True),
    "a node that dies, requeued": Scenario([cut_the_power], "interrupted finished", LOST, variation=True),
    "a slurmd that dies": Scenario([kill_slurmd], ANY, LOST, slow=True),
    "a controller that is restarted": Scenario([restart_the_controller], STOPPED),
    "no controller at the end": Scenario([end_without_a_controller], STOPPED),
    "five attempts": Scenario([warn] * 4, "stopped stopped stopped stopped finished", variation=True),
}
STEPS = 14


def names(real):
    """The names of all scenarios, marked with where they run."""
    long = {name for name, each in SCENARIOS.items() if each.variation or (each.slow and real)}
    return [pytest.param(name, marks=pytest.mark.campaign if name in long else ()) for name in SCENARIOS]


def play(scenario, lab, folder, seconds=60):
    """Submit a run that counts, do to each attempt what is to happen to it, and see the chain finish it."""
    places = [5 + 2 * number for number in range(len(scenario.acts))]
    body = f"{scenario.launcher} {counting_run.counting(folder, STEPS, places)}"
    scene = Scene(lab, submit(script(folder, body, *scenario.directives)))
    for number, act in enumerate(scenario.acts, 1):
        scene.until(counting_run.there(folder, number).exists, seconds, f"attempt {number} is not at its place")
        act(scene, scene.chain.attempts()[-1].job_id)
    scene.finishes(seconds)
    endings = " ".join(end.ending for end in scene.chain.ends().values())
    assert re.fullmatch(scenario.endings, endings), f"{endings}\n{scene.log()}"
    counting_run.check(folder, STEPS, places, scenario.lost)
    return scene
