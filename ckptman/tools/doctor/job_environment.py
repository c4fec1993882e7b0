"""What a job finds around itself: the checks of `ckptman doctor` without a folder. Each is a function of plain facts.

FAILED is what is broken for sure; what only may be is a warning. Torch is not imported here: what it says comes in as
`TorchFacts`.
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
from ckptman.tools.doctor.finding import Finding, first_number, size_text
from ckptman.tools.doctor.quota import Run

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


def survey(torch: TorchFacts, against_bytes: int | None = None) -> list[Finding]:
    """Every check. `against_bytes`: what one process saves."""
    environ = os.environ
    return [
        Finding("python", "ok", ".".join(map(str, sys.version_info[:3])), "", {"executable": sys.executable}),
        check_torch(torch),
        check_devices(torch, environ),
        check_backends(torch),
        check_world(environ),
        *check_job(environ, run_command, time.time(), against_bytes),
        check_memory(available_bytes(), local_processes(environ), against_bytes),
        check_shared_memory(),
        check_left_in_memory(Path(paths.MEMORY_PATH), environ),
        check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], torch, against_bytes),
        check_clock(),
    ]


def check_torch(torch: TorchFacts) -> Finding:
    """Check whether torch can be imported, and is new enough. FAILED too where it does not answer: as a disk that does
    not."""
    if torch.unanswered is not None:
        advice = "raise --timeout; where that does not help, a device or a file system hangs, and a run with it"
        return Finding("torch", "FAILED", torch.unanswered, advice)
    if not torch.version:
        advice = "list, verify and prune work without; saving and restoring do not"
        if torch.problem is None:
            return Finding("torch", "warning", "not installed here", advice)
        return Finding("torch", "FAILED", f"cannot be imported: {torch.problem}", advice)
    number = re.match(r"(\d+)\.(\d+)", torch.version)
    if number is not None and (int(number[1]), int(number[2])) < LEAST_TORCH:
        needed = ".".join(map(str, LEAST_TORCH))
        return Finding("torch", "FAILED", torch.version, f"ckptman needs torch {needed} or newer: upgrade it")
    return Finding("torch", "ok", f"{torch.version} ({torch.device})", "", {"version": torch.version})


def _nobody_to_ask(torch: TorchFacts) -> str:
    return "torch is not there to ask" if torch.unanswered is None else f"torch {torch.unanswered}"


def check_devices(torch: TorchFacts, environ: Mapping[str, str]) -> Finding:
    """Devices that torch sees, against the processes of this node, and against what Slurm gave."""
    if not torch.version:
        return Finding("devices", "unknown", _nobody_to_ask(torch))
    if torch.problem is not None:
        return Finding(
            "devices", "FAILED", torch.problem, "no process can use a device: see the driver and the modules"
        )
    count, given = len(torch.device_names), first_number(environ.get("SLURM_GPUS_ON_NODE", ""))
    figures = {"kind": torch.device, "count": count, "names": list(torch.device_names)}
    if not count:
        hidden = next((name for name in _HIDING if environ.get(name) in ("", "-1")), None)
        if given and hidden is None:
            why = "torch is built for the CPU" if torch.device == "cpu" else "does the driver fit this torch?"
            advice = f"the run would go on without them, or fail: {why}"
            return Finding("devices", "FAILED", f"none, and Slurm gave {given} to this node", advice, figures)
        if given:
            return Finding("devices", "warning", f"none of {given}: {hidden} hides them", "", figures)
        return Finding("devices", "ok", "none: the CPU", "", figures)
    value = f"{count} ({', '.join(dict.fromkeys(torch.device_names))})"
    processes, advice = local_processes(environ), ""
    if processes > count:
        advice = "right where every process is bound to its own; else several share one device"
        value += f" for {processes} processes"
    elif "LOCAL_WORLD_SIZE" in environ and processes < count:
        advice = "start one process for each: torchrun --nproc-per-node, or --ntasks-per-node"
        value += f" for {processes} of them used"
    return Finding("devices", "warning" if advice else "ok", value, advice, figures)


def check_backends(torch: TorchFacts) -> Finding:
    """gloo, which ckptman always needs between processes, and NCCL (or RCCL) where there are devices."""
    if not torch.version:
        return Finding("backends", "unknown", _nobody_to_ask(torch))
    value = ", ".join(torch.backends) or "none"
    if "gloo" not in torch.backends:
        advice = "ckptman talks between ranks through gloo: runs of one process only"
        return Finding("backends", "FAILED", value, advice)
    if torch.device_names and "nccl" not in torch.backends:
        advice = "there are devices and no NCCL: install a torch that is built with it"
        return Finding("backends", "warning", value, advice)
    return Finding("backends", "ok", value)


def check_world(environ: Mapping[str, str]) -> Finding:
    """RANK, WORLD_SIZE and what belongs to them: consistent with each other and with Slurm."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    texts = {name: environ[name] for name in names if environ.get(name)}
    wrong = [f"{name}={text[:20]}" for name, text in texts.items() if not re.fullmatch(r"[0-9]{1,9}", text)]
    if wrong:
        return Finding("world", "FAILED", ", ".join(wrong), "no whole numbers: no process group can be made")
    numbers = {name: int(text) for name, text in texts.items()}
    value = ", ".join(f"{name}={number}" for name, number in numbers.items())
    tasks = first_number(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "") or 1
    tasks = tasks if "SLURM_PROCID" in environ else 1  # else this is the batch script, not a task
    world = numbers.get("WORLD_SIZE")
    if world is None:
        if tasks > 1:
            advice = "every task would train alone and write to the same root: set RANK and WORLD_SIZE, or use torchrun"
            return Finding("world", "warning", f"one of {tasks} tasks of srun, and WORLD_SIZE is not set", advice)
        return Finding("world", "ok", "one process (WORLD_SIZE is not set)")
    for low, high in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if low in numbers and high in numbers and numbers[low] >= numbers[high]:
            return Finding("world", "FAILED", value, f"{low} must be below {high}: the start would hang", numbers)
    if numbers.get("LOCAL_WORLD_SIZE", 0) > world or not world:
        return Finding("world", "FAILED", value, "WORLD_SIZE is the number of all processes", numbers)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if world > 1 and not environ.get(name)]
    if missing:
        advice = "init_process_group() finds nobody without them: use torchrun, or set them"
        return Finding("world", "warning", f"{value}; not set: {', '.join(missing)}", advice, numbers)
    if tasks > world:
        advice = "several worlds would write to one root: WORLD_SIZE is at least the number of tasks"
        return Finding("world", "warning", f"{value}, in a step of {tasks} tasks", advice, numbers)
    return Finding("world", "ok", value, "", numbers)


def check_job(environ: Mapping[str, str], run: Run, now_seconds: float, against_bytes: int | None) -> list[Finding]:
    """Check the Slurm job: its size, the time that is left, and the warning that comes before its end."""
    job_id = environ.get("SLURM_JOB_ID")
    if not job_id:
        return [Finding("job", "ok", "not in a Slurm job: no deadline")]
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "?"
    value = f"{job_id}, nodes: {nodes}, tasks: {environ.get('SLURM_NTASKS') or '?'}"
    if restarts := environ.get("SLURM_RESTART_COUNT"):
        value += f", restarts: {restarts}"
    return [
        Finding("job", "ok", value, "", {"job_id": job_id}),
        check_time_left(environ, run, now_seconds),
        check_warning(environ, run, job_id, against_bytes),
    ]


def check_time_left(environ: Mapping[str, str], run: Run, now_seconds: float) -> Finding:
    """Check when the allocation ends, asked the way a run asks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        end = deadline_from_environment(environ, run)
    if caught:
        return Finding("time left", "warning", "not known", str(caught[0].message))
    if end is None:
        return Finding("time left", "ok", "no time limit")
    left = end - now_seconds
    if abs(left) > _FAR_SECONDS:
        return Finding("time left", "unknown", f"the end is said to be {end:g}, which cannot be a time of this job")
    figures = {"seconds": left}
    if left < 0:
        return Finding("time left", "warning", f"the job ended {seconds_text(-left)} ago", "see the clock", figures)
    return Finding("time left", "ok", seconds_text(left), "", figures)


def check_warning(environ: Mapping[str, str], run: Run, job_id: str, against_bytes: int | None) -> Finding:
    """`--signal` of the job, against the time of a save; looked for in the environment and in the batch script."""
    try:
        if written := environ.get("SBATCH_SIGNAL"):
            asked = warned({"--signal": written})
        else:
            asked = warned(parse(run(("scontrol", "write", "batch_script", job_id, "-")), "the batch script").options)
    except (OSError, subprocess.SubprocessError, ConfigError):
        asked = None
    if asked is None:
        advice = "without one, BeforeDeadline stops the run in time; #SBATCH --signal=USR2@180 asks for one"
        return Finding("warning signal", "unknown", "none is seen (not the one of an option of sbatch)", advice)
    hints: list[str] = []
    name, seconds = asked.name, asked.seconds
    value = f"{name} {seconds_text(seconds)} before the end"
    if asked.batch_only:
        hints.append("it goes to the batch script only, which has to pass it on")
    if name in ("USR1", "10"):
        hints.append("NCCL may take SIGUSR1: USR2 is safer")
    if against_bytes is not None and seconds:
        rate = against_bytes / seconds
        value += f": time for {size_text(against_bytes)} a process at {size_text(rate)}/s"
        if rate > SCRATCH_BYTES_PER_SECOND:
            hints.insert(0, "scratch gives one process about 2 GB/s: ask for a longer warning")
    figures = {"signal": name, "seconds": seconds}
    return Finding("warning signal", "warning" if hints else "ok", value, "; ".join(hints), figures)


def check_memory(free: int, processes: int, against_bytes: int | None) -> Finding:
    """Host memory that is left, by the machine and by the limits of the job, against two staging slots a process."""
    value = f"{size_text(free)} left"
    figures = {"available_bytes": free, "processes": processes}
    if against_bytes is None:
        return Finding("host memory", "ok", value, "--against SIZE compares it with two staged copies", figures)
    slot = against_bytes * processes
    value += f"; a staged copy is {size_text(slot)}"
    value += f" ({processes} processes of {size_text(against_bytes)})" if processes > 1 else ""
    advice = ""
    if free < slot:
        advice = "not even one staged copy fits: saves would block training until they are durable"
    elif free < STAGING_SLOTS * slot:
        advice = "one staged copy fits, not two: a save that comes while another is being written waits for it"
    return Finding("host memory", "warning" if advice else "ok", value, advice, figures)


def check_shared_memory() -> Finding:
    """/dev/shm, through which data loaders hand over batches."""
    try:
        space = os.statvfs("/dev/shm")
    except OSError as error:
        advice = "worker processes of a data loader need it"
        return Finding("/dev/shm", "warning", f"not there: {error.strerror}", advice)
    total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    figures = {"total_bytes": total, "free_bytes": free}
    value = f"{size_text(free)} free of {size_text(total)}"
    if free >= _SHM_BYTES:
        return Finding("/dev/shm", "ok", value, "", figures)
    advice = "workers of a data loader die of a bus error when it is full: docker --shm-size, or clear it"
    return Finding("/dev/shm", "warning", value, advice, figures)


def check_left_in_memory(base: Path, environ: Mapping[str, str]) -> Finding:
    """Checkpoints in memory of runs that are over: they take memory from the next job on this node."""
    name, advice = "memory tier", ""
    try:
        left = list(node_memory.left_behind(base, ended_jobs(node_memory.job_ids(base), environ)))
    except CkptmanError as error:
        return Finding(name, "warning", str(error), "no run of this user can keep checkpoints in memory here")
    size = sum(each.size_bytes for each in left)
    if left:
        advice = "ckptman memory list shows it; flush brings it to disk, clear --all-dead removes it"
    value = (
        f"{size_text(size)} left behind by {len(left)} run{'' if len(left) == 1 else 's'}" if left else "no leftovers"
    )
    figures = {"bytes": size, "folders": [str(each.folder) for each in left]}
    return Finding(name, "warning" if left else "ok", value, advice, figures)


def check_open_files(soft: int, hard: int) -> Finding:
    """RLIMIT_NOFILE."""
    figures = {"soft": soft, "hard": hard}
    soft_text, hard_text = ("unlimited" if each == resource.RLIM_INFINITY else f"{each:,}" for each in (soft, hard))
    value = f"{soft_text} (can be raised to {hard_text})"
    if soft == resource.RLIM_INFINITY or soft >= _OPEN_FILES:
        return Finding("open files", "ok", value, "", figures)
    remedy = ", and only your site can raise it" if soft == hard else ": ulimit -n hard"
    advice = f"data loaders, sockets and the files of a checkpoint count{remedy}"
    return Finding("open files", "warning", value, advice, figures)


def check_locked_memory(soft: int, torch: TorchFacts, against_bytes: int | None) -> Finding:
    """RLIMIT_MEMLOCK, against the pinned slots of a process with a device."""
    figures = {"soft": soft}
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "unlimited", "", figures)
    value = size_text(soft)
    if not torch.device_names:
        return Finding("locked memory", "ok", f"{value}: nothing is pinned without a device", "", figures)
    needed = "" if against_bytes is None else f", and two pinned slots are {size_text(STAGING_SLOTS * against_bytes)}"
    if against_bytes is not None and STAGING_SLOTS * against_bytes <= soft:
        return Finding("locked memory", "ok", value + needed, "", figures)
    advice = "InfiniBand, and pinned memory with some drivers, count against it: ulimit -l unlimited"
    return Finding("locked memory", "warning", value + needed, advice, figures)


def check_clock() -> Finding:
    """Check whether the kernel's clock is kept by NTP, as it says itself (adjtimex(2))."""
    try:
        # Larger than the struct on every architecture. Its first field, the modes, is 0: nothing is set.
        state = int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(1024)))
    except (AttributeError, OSError):
        state = _TIME_ERROR
    if 0 <= state < _TIME_ERROR:
        return Finding("clock", "ok", "kept by NTP, says the kernel")
    return Finding("clock", "unknown", "whether NTP keeps it is not known", "ckptman compares no clocks of two hosts")


def local_processes(environ: Mapping[str, str]) -> int:
    """Processes of this run on this node, as far as the environment tells; 1 where it does not.

    SLURM_TASKS_PER_NODE may be "4(x2)": the first node stands for all.
    """
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if number := first_number(environ.get(name, "")):
            return number
    return 1
