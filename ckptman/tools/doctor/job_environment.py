"""What a job finds around itself: the checks of `ckptman doctor` without a directory.

FAILED is what is certainly broken; what only might be is a warning. torch is not imported here: what it reports comes
in as `TorchFacts`.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckptman.engine.state.installed_torch import TorchFacts
from ckptman.errors import CkptmanError, ConfigError
from ckptman.jobs.slurm.batch_script import parse, warned
from ckptman.jobs.slurm.commands import ended_jobs
from ckptman.policies.intervals import seconds_text
from ckptman.runtime.deadline import deadline_from_environment, run_command
from ckptman.runtime.host_memory import available_bytes
from ckptman.storage.catalog.backends import node_memory
from ckptman.storage.format import paths
from ckptman.storage.io.mount import Run
from ckptman.tools.doctor.finding import Check, Finding, first_number, found, size_text

LEAST_TORCH = (2, 11)
STAGING_SLOTS = 2
SCRATCH_BYTES_PER_SECOND = 2e9
"""What scratch gives one process, by the practitioners' table."""
_SHM_BYTES = 2**30
_OPEN_FILES = 4096
_TIME_ERROR = 5
_FAR_SECONDS = 10 * 365 * 86400
"""No job ends so long from now, or ended so long ago."""
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Job:
    """The facts that the checks go by. `against_bytes`: what one process saves."""

    torch: TorchFacts
    environ: Mapping[str, str]
    against_bytes: int | None = None
    run: Run = run_command

    @property
    def local_processes(self) -> int:
        """The processes of this run on this node, as far as the environment says, or 1.

        SLURM_TASKS_PER_NODE can be "4(x2)": all nodes count as the first.
        """
        names = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        return next(filter(None, (first_number(self.environ.get(name, "")) for name in names)), 1)

    @property
    def no_torch(self) -> Finding | None:
        """The finding of a check that has to ask torch, if torch does not answer."""
        if self.torch.version:
            return None
        unanswered = self.torch.unanswered
        return found("unknown", "torch is not there to ask" if unanswered is None else f"torch {unanswered}")


def survey(torch: TorchFacts, against_bytes: int | None = None) -> list[Finding]:
    """Run every check. `against_bytes`: what one process saves."""
    job = Job(torch, os.environ, against_bytes)
    rows = ((check.name, check.run(job)) for check in CHECKS)
    return [replace(row, name=name) for name, row in rows if row is not None]


def check_python(job: Job) -> Finding:
    return found("ok", ".".join(map(str, sys.version_info[:3])), executable=sys.executable)


def check_torch(job: Job) -> Finding:
    """Check that torch can be imported and is new enough. FAILED too if it does not answer, like a disk."""
    torch = job.torch
    if torch.unanswered is not None:
        advice = "raise --timeout; where that does not help, a device or a file system hangs, and a run with it"
        return found("FAILED", torch.unanswered, advice)
    if not torch.version:
        advice = "list, verify and prune work without; saving and restoring do not"
        if torch.problem is None:
            return found("warning", "not installed here", advice)
        return found("FAILED", f"cannot be imported: {torch.problem}", advice)
    number = re.match(r"(\d+)\.(\d+)", torch.version)
    if number is not None and (int(number[1]), int(number[2])) < LEAST_TORCH:
        needed = ".".join(map(str, LEAST_TORCH))
        return found("FAILED", torch.version, f"ckptman needs torch {needed} or newer: upgrade it")
    return found("ok", f"{torch.version} ({torch.device})", version=torch.version)


def check_devices(job: Job) -> Finding:
    """Devices that torch sees, against the processes of this node, and against what Slurm gave."""
    if no_torch := job.no_torch:
        return no_torch
    torch, environ = job.torch, job.environ
    if torch.problem is not None:
        return found("FAILED", torch.problem, "no process can use a device: see the driver and the modules")
    count, given = len(torch.device_names), first_number(environ.get("SLURM_GPUS_ON_NODE", ""))
    figures = {"kind": torch.device, "count": count, "names": list(torch.device_names)}
    if not count and given:
        if hidden := next((name for name in _HIDING if environ.get(name) in ("", "-1")), None):
            return found("warning", f"none of {given}: {hidden} hides them", **figures)
        why = "torch is built for the CPU" if torch.device == "cpu" else "does the driver fit this torch?"
        advice = f"the run would go on without them, or fail: {why}"
        return found("FAILED", f"none, and Slurm gave {given} to this node", advice, **figures)
    if not count:
        return found("ok", "none: the CPU", **figures)
    value = f"{count} ({', '.join(dict.fromkeys(torch.device_names))})"
    processes = job.local_processes
    if processes > count:
        advice = "right where every process is bound to its own; else several share one device"
        return found("warning", f"{value} for {processes} processes", advice, **figures)
    if "LOCAL_WORLD_SIZE" in environ and processes < count:
        advice = "start one process for each: torchrun --nproc-per-node, or --ntasks-per-node"
        return found("warning", f"{value} for {processes} of them used", advice, **figures)
    return found("ok", value, **figures)


def check_backends(job: Job) -> Finding:
    """gloo, which ckptman always needs between processes, and NCCL (or RCCL) if there are devices."""
    if no_torch := job.no_torch:
        return no_torch
    value = ", ".join(job.torch.backends) or "none"
    if "gloo" not in job.torch.backends:
        return found("FAILED", value, "ckptman talks between ranks through gloo: runs of one process only")
    if job.torch.device_names and "nccl" not in job.torch.backends:
        return found("warning", value, "there are devices and no NCCL: install a torch that is built with it")
    return found("ok", value)


def check_world(job: Job) -> Finding:
    """RANK, WORLD_SIZE and what belongs to them: consistent with each other and with Slurm."""
    environ = job.environ
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    texts = {name: environ[name] for name in names if environ.get(name)}
    if wrong := [f"{name}={text[:20]}" for name, text in texts.items() if not re.fullmatch(r"[0-9]{1,9}", text)]:
        return found("FAILED", ", ".join(wrong), "no whole numbers: no process group can be made")
    numbers = {name: int(text) for name, text in texts.items()}
    value = ", ".join(f"{name}={number}" for name, number in numbers.items())
    tasks = 1
    if "SLURM_PROCID" in environ:  # else this is the batch script, not a task
        tasks = first_number(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "") or 1
    world = numbers.get("WORLD_SIZE")
    if world is None:
        if tasks == 1:
            return found("ok", "one process (WORLD_SIZE is not set)")
        advice = "every task would train alone and write to the same root: set RANK and WORLD_SIZE, or use torchrun"
        return found("warning", f"one of {tasks} tasks of srun, and WORLD_SIZE is not set", advice)
    for low, high in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if low in numbers and high in numbers and numbers[low] >= numbers[high]:
            return found("FAILED", value, f"{low} must be below {high}: the start would hang", **numbers)
    if numbers.get("LOCAL_WORLD_SIZE", 0) > world or not world:
        return found("FAILED", value, "WORLD_SIZE is the number of all processes", **numbers)
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if world > 1 and not environ.get(name)]:
        advice = "init_process_group() finds nobody without them: use torchrun, or set them"
        return found("warning", f"{value}; not set: {', '.join(missing)}", advice, **numbers)
    if tasks > world:
        advice = "several worlds would write to one root: WORLD_SIZE is at least the number of tasks"
        return found("warning", f"{value}, in a step of {tasks} tasks", advice, **numbers)
    return found("ok", value, **numbers)


def check_job(job: Job) -> Finding:
    """The Slurm job and its size."""
    environ = job.environ
    job_id = environ.get("SLURM_JOB_ID")
    if not job_id:
        return found("ok", "not in a Slurm job: no deadline")
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "?"
    value = f"{job_id}, nodes: {nodes}, tasks: {environ.get('SLURM_NTASKS') or '?'}"
    if restarts := environ.get("SLURM_RESTART_COUNT"):
        value += f", restarts: {restarts}"
    return found("ok", value, job_id=job_id)


def check_time_left(job: Job) -> Finding | None:
    """When the allocation ends, asked the way a run asks."""
    if not job.environ.get("SLURM_JOB_ID"):
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        end = deadline_from_environment(job.environ, job.run)
    if caught:
        return found("warning", "not known", str(caught[0].message))
    if end is None:
        return found("ok", "no time limit")
    left = end - time.time()
    if abs(left) > _FAR_SECONDS:
        return found("unknown", f"the end is said to be {end:g}, which cannot be a time of this job")
    if left < 0:
        return found("warning", f"the job ended {seconds_text(-left)} ago", "see the clock", seconds=left)
    return found("ok", seconds_text(left), seconds=left)


def check_warning(job: Job) -> Finding | None:
    """`--signal` of the job, by the environment or the batch script, against the time of a save."""
    job_id = job.environ.get("SLURM_JOB_ID")
    if not job_id:
        return None
    try:
        if written := job.environ.get("SBATCH_SIGNAL"):
            asked = warned({"--signal": written})
        else:
            script = job.run(("scontrol", "write", "batch_script", job_id, "-"))
            asked = warned(parse(script, "the batch script").options)
    except (OSError, subprocess.SubprocessError, ConfigError):
        asked = None
    if asked is None:
        advice = "without one, BeforeDeadline stops the run in time; #SBATCH --signal=USR2@180 asks for one"
        return found("unknown", "none is seen (not the one of an option of sbatch)", advice)
    hints: list[str] = []
    value = f"{asked.name} {seconds_text(asked.seconds)} before the end"
    if job.against_bytes is not None and asked.seconds:
        rate = job.against_bytes / asked.seconds
        value += f": time for {size_text(job.against_bytes)} a process at {size_text(rate)}/s"
        if rate > SCRATCH_BYTES_PER_SECOND:
            hints.append("scratch gives one process about 2 GB/s: ask for a longer warning")
    if asked.batch_only:
        hints.append("it goes to the batch script only, which has to pass it on")
    if asked.name in ("USR1", "10"):
        hints.append("NCCL may take SIGUSR1: USR2 is safer")
    return found("warning" if hints else "ok", value, "; ".join(hints), signal=asked.name, seconds=asked.seconds)


def check_memory(job: Job) -> Finding:
    """Host memory that is free, by the machine and by the limits of the job, against two staging slots a process."""
    free, processes = available_bytes(), job.local_processes
    figures = {"available_bytes": free, "processes": processes}
    if job.against_bytes is None:
        advice = "--against SIZE compares it with two staged copies"
        return found("ok", f"{size_text(free)} left", advice, **figures)
    slot = job.against_bytes * processes
    value = f"{size_text(free)} left; a staged copy is {size_text(slot)}"
    value += f" ({processes} processes of {size_text(job.against_bytes)})" if processes > 1 else ""
    if free < slot:
        advice = "not even one staged copy fits: saves would block training until they are durable"
    elif free < STAGING_SLOTS * slot:
        advice = "one staged copy fits, not two: a save that comes while another is being written waits for it"
    else:
        return found("ok", value, **figures)
    return found("warning", value, advice, **figures)


def check_shared_memory(job: Job) -> Finding:
    """/dev/shm, through which data loaders hand over batches."""
    try:
        space = os.statvfs("/dev/shm")
    except OSError as error:
        return found("warning", f"not there: {error.strerror}", "worker processes of a data loader need it")
    total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    advice = "workers of a data loader die of a bus error when it is full: docker --shm-size, or clear it"
    value, figures = f"{size_text(free)} free of {size_text(total)}", {"total_bytes": total, "free_bytes": free}
    return found("ok", value, **figures) if free >= _SHM_BYTES else found("warning", value, advice, **figures)


def check_left_in_memory(job: Job) -> Finding:
    """Checkpoints in memory of runs that have ended: they take memory from the next job on this node."""
    base = Path(paths.MEMORY_PATH)
    try:
        left = list(node_memory.left_behind(base, ended_jobs(node_memory.job_ids(base), job.environ)))
    except CkptmanError as error:
        return found("warning", str(error), "no run of this user can keep checkpoints in memory here")
    size = sum(each.size_bytes for each in left)
    figures = {"bytes": size, "folders": [str(each.folder) for each in left]}
    if not left:
        return found("ok", "no leftovers", **figures)
    value = f"{size_text(size)} left behind by {len(left)} run{'' if len(left) == 1 else 's'}"
    advice = "ckptman memory list shows it; flush brings it to disk, clear --all-dead removes it"
    return found("warning", value, advice, **figures)


def check_open_files(job: Job) -> Finding:
    """RLIMIT_NOFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_text, hard_text = ("unlimited" if each == resource.RLIM_INFINITY else f"{each:,}" for each in (soft, hard))
    value = f"{soft_text} (can be raised to {hard_text})"
    if soft == resource.RLIM_INFINITY or soft >= _OPEN_FILES:
        return found("ok", value, soft=soft, hard=hard)
    remedy = ", and only your site can raise it" if soft == hard else ": ulimit -n hard"
    advice = f"data loaders, sockets and the files of a checkpoint count{remedy}"
    return found("warning", value, advice, soft=soft, hard=hard)


def check_locked_memory(job: Job) -> Finding:
    """RLIMIT_MEMLOCK, against the pinned slots of a process with a device."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return found("ok", "unlimited", soft=soft)
    if not job.torch.device_names:
        return found("ok", f"{size_text(soft)}: nothing is pinned without a device", soft=soft)
    value, pinned = size_text(soft), STAGING_SLOTS * (job.against_bytes or 0)
    if pinned:
        value += f", and two pinned slots are {size_text(pinned)}"
        if pinned <= soft:
            return found("ok", value, soft=soft)
    advice = "InfiniBand, and pinned memory with some drivers, count against it: ulimit -l unlimited"
    return found("warning", value, advice, soft=soft)


def check_clock(job: Job) -> Finding:
    """Whether the kernel says that NTP keeps its clock (adjtimex(2))."""
    try:
        # Larger than the struct on every architecture. Its first field, the modes, is 0: nothing is set.
        state = int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(1024)))
    except (AttributeError, OSError):
        state = _TIME_ERROR
    if 0 <= state < _TIME_ERROR:
        return found("ok", "kept by NTP, says the kernel")
    return found("unknown", "whether NTP keeps it is not known", "ckptman compares no clocks of two hosts")


CHECKS: tuple[Check[Job], ...] = (
    Check("python", check_python),
    Check("torch", check_torch),
    Check("devices", check_devices),
    Check("backends", check_backends),
    Check("world", check_world),
    Check("job", check_job),
    Check("time left", check_time_left),
    Check("warning signal", check_warning),
    Check("host memory", check_memory),
    Check("/dev/shm", check_shared_memory),
    Check("memory tier", check_left_in_memory),
    Check("open files", check_open_files),
    Check("locked memory", check_locked_memory),
    Check("clock", check_clock),
)
