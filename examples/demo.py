"""A training run that is stopped, moved to another number of processes, killed, and loses nothing.

    make demo      (or: python examples/demo.py [--folder FOLDER] [--steps 72])

Real input: the source code of Python's own standard library is tokenised, and the bundled model is trained on it by
`torchrun`. On the way one process is told to stop (SIGTERM), and later one is killed (kill -9). At the end the newest
checkpoint is verified on 1, 2 and 4 processes, older ones are pruned, and what the run says of itself is checked.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from ckptman.errors import CkptmanError
from ckptman.runtime.journal import read_journal
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.format.paths import journal_path

SAVE_EVERY_STEPS = 8
GLOBAL_BATCH = 8
WIDTH = max(110, shutil.get_terminal_size().columns)
CONSOLE = Console(highlight=False, width=WIDTH)


@dataclass
class Part:
    """One attempt of the run: how many processes, and how it is to end."""

    processes: int
    event: str  # "stop": SIGTERM to one process; "kill": kill -9 of one; "finish": nothing happens to it
    at_step: int
    started: float = 0.0
    ended: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to work and leave the run; left out: a temporary folder")
    parser.add_argument("--steps", type=int, default=72, help="optimizer steps in all (default: 72)")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ckptman-demo-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        parts = plan(options.steps)
        tokenise(folder / "tokens")
        for part in parts:
            attempt(part, folder, options.steps)
        root = folder / "checkpoints"
        run(f"ckptman verify {root} --world-size 1,2,4")
        run(f"ckptman prune {root} --keep-last 1")
        run(f"ckptman list {root}")
        report(parts, folder, options.steps)
    say(f"\nThe whole demo took {time.monotonic() - began:.0f} s.")
    return 0


def plan(steps: int) -> list[Part]:
    """4, 2 and 2 processes; on a machine with fewer GPUs than that, as many as it has."""
    gpus = count_gpus()
    many, few = (4, 2) if gpus == 0 or gpus >= 4 else (min(gpus, 2), 1)
    return [Part(many, "stop", steps // 3), Part(few, "kill", 2 * steps // 3 - 3), Part(few, "finish", steps)]


def tokenise(folder: Path) -> None:
    """The standard library's own source code: tens of megabytes of real text on every machine."""
    library = sysconfig.get_paths()["stdlib"]
    if not folder.exists():
        which = f"{library} --glob *.py --exclude site-packages"
        run(f"python -m ckptman.train.tokenize {folder} {which} --vocab-size 4096 --train-bytes 8000000")


def attempt(part: Part, folder: Path, steps: int) -> None:
    """Start torchrun, do to it what is planned when the time has come, and wait for its end."""
    settings = {
        "data.path": folder / "tokens",
        "data.sequence_tokens": 128,
        "data.global_batch": GLOBAL_BATCH,
        "data.micro_batch": 2,
        "model.dim": 96,
        "model.layers": 3,
        "model.heads": 6,
        "model.kv_heads": 2,
        "model.dropout": 0.05,
        "parallel.shard_ranks": 2,
        "run.steps": steps,
        "run.log": folder / "steps.jsonl",
        "run.log_every": 1,
        "checkpoint.root": folder / "checkpoints",
        "checkpoint.every_steps": SAVE_EVERY_STEPS,
        "checkpoint.keep_last": 3,
    }
    config = Path(__file__).with_name("run.toml")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={part.processes}"]
    command += ["-m", "ckptman.train", "--config", str(config)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    say(f"\n== {part.processes} processes, {part.processes // 2 or 1} x {min(part.processes, 2)} HSDP, BF16")
    part.started = time.time()
    log = folder / f"attempt-{int(part.started)}.log"
    with log.open("wb") as output:
        launcher = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment())
        try:
            if part.event != "finish":
                wait_for_step(part, folder, launcher, log)
                victim = a_worker(folder)
                name = "SIGTERM" if part.event == "stop" else "SIGKILL"
                say(f"   step {part.at_step} is done: {name} to process {victim.pid}, one of {part.processes}")
                victim.send_signal(signal.Signals[name])
            launcher.wait(timeout=180)
        finally:
            end_all(launcher, folder)
    part.ended = time.time()
    for line in log.read_text(errors="replace").splitlines():
        if "ckptman: " in line or "parameters on" in line:
            say(f"   {line}")
    if part.event == "finish" and launcher.returncode != 0:
        fail(f"the last attempt ended with {launcher.returncode}:\n{log.read_text(errors='replace')[-3000:]}")


def wait_for_step(part: Part, folder: Path, launcher: subprocess.Popen[bytes], log: Path) -> None:
    """Until the step log shows the step at which something is to happen."""
    deadline = time.monotonic() + 150
    while not any(event["step"] >= part.at_step for event in steps_done(folder)):
        if launcher.poll() is not None or time.monotonic() > deadline:
            fail(f"the run did not come to step {part.at_step}:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.05)


def a_worker(folder: Path) -> psutil.Process:
    """The process of the last rank: not the leader, so that the others have to be told."""
    ranks = [(int(each.environ()["RANK"]), each) for each in processes(folder) if "RANK" in each.environ()]
    return max(ranks, key=lambda rank: rank[0])[1]


def processes(folder: Path) -> list[psutil.Process]:
    """torchrun and the ranks that work in this folder."""
    setting = f"checkpoint.root={folder / 'checkpoints'}"
    return [each for each in psutil.process_iter(["cmdline"]) if setting in (each.info["cmdline"] or [])]


def end_all(launcher: subprocess.Popen[bytes], folder: Path) -> None:
    """Leave nothing behind, whatever happened."""
    if launcher.poll() is None:
        for each in processes(folder):
            each.kill()
        launcher.kill()
        launcher.wait()


def steps_done(folder: Path) -> list[dict[str, Any]]:
    """The step log, in the order in which steps were done; repeated steps are there again."""
    path = folder / "steps.jsonl"
    return [event for event in read_journal(path)[0] if event["event"] == "step"] if path.exists() else []


def report(parts: list[Part], folder: Path, steps: int) -> None:
    """The table, and the statement that nothing was lost: each part of it is checked, or the demo fails."""
    events, torn = read_journal(journal_path(folder / "checkpoints"))
    log = steps_done(folder)
    table = Table(title="\nThe run")
    for name in ("attempt", "processes", "steps", "why it ended", "steps lost", "seconds to resume"):
        table.add_column(name, justify="right" if name != "why it ended" else "left")
    lost_in_all = 0
    starts = [event for event in events if event["event"] == "attempt_started"]
    check(len(starts) == len(parts), f"{len(parts)} attempts are in the journal")
    restored = {event["attempt"]: event["step"] for event in events if event["event"] == "restored"}
    for number, part in enumerate(parts, 1):
        mine = [event for event in log if part.started <= event["time"] <= part.ended]
        first, last = mine[0]["step"], mine[-1]["step"]
        check([each["step"] for each in mine] == list(range(first, last + 1)), f"attempt {number}: steps without a gap")
        check(first == restored.get(number, 0) + 1, f"attempt {number}: went on right after the restored step")
        resumed_at = restored.get(number + 1, last)
        durable = [e["step"] for e in events if e["event"] == "save_durable" and e["attempt"] <= number]
        check(resumed_at == max(durable), f"attempt {number}: the next one had its newest durable save")
        lost = last - resumed_at
        lost_in_all += lost
        check(lost <= (SAVE_EVERY_STEPS if part.event == "kill" else 0), f"attempt {number}: lost {lost} steps")
        endings = [e for e in events if e["attempt"] == number and e["event"] in ("finished", "stopped", "failed")]
        # A killed leader leaves no last event; one that lost a peer says so.
        why = {"stopped": "asked to stop", "finished": "finished", "failed": "lost a process (kill -9)"}[
            endings[-1]["event"] if endings else "failed"
        ]
        if why == "asked to stop":
            why += f": {endings[-1]['reason']}"
        resume = mine[0]["time"] - part.started
        table.add_row(str(number), str(part.processes), f"{first} to {last}", why, str(lost), f"{resume:.1f}")
    CONSOLE.print(table)

    kept: dict[int, dict[str, Any]] = {}
    repeated = 0
    for event in log:
        if event["step"] in kept:
            repeated += 1
            same = kept[event["step"]]["position"] == event["position"]
            check(same, f"step {event['step']}: the same samples when it was done again")
            if parts[1].processes == parts[2].processes:
                exact = kept[event["step"]]["loss_hex"] == event["loss_hex"]
                check(exact, f"step {event['step']}: the same loss, bit for bit, when it was done again")
        kept[event["step"]] = event
    check(sorted(kept) == list(range(1, steps + 1)), f"each step from 1 to {steps} was done")
    positions = [kept[step]["position"] for step in sorted(kept)]
    check(positions == [GLOBAL_BATCH * step for step in sorted(kept)], "each sample was used once, in one global order")
    check(repeated == lost_in_all, "only the steps after the last save before the kill were done again")
    check(torn == 0, "no line of the journal is torn")
    newest = Catalog(folder / "checkpoints").complete()[-1]
    check(newest.step == steps, f"the newest checkpoint is that of step {steps}")
    say(
        f"\nNothing was lost: {len(parts)} attempts on {' -> '.join(str(part.processes) for part in parts)} processes "
        f"did steps 1 to {steps} and used each of {positions[-1]} samples once, in the same global order. "
        f"The stop lost 0 steps; the kill -9 cost {lost_in_all} steps done again (saves every {SAVE_EVERY_STEPS}), "
        f"with the same losses bit for bit. The last checkpoint loads on 1, 2 and 4 processes."
    )


def check(holds: bool, what: str) -> None:
    """A statement the demo makes; if it is not true, the demo fails."""
    if not holds:
        fail(f"this does not hold: {what}")


def run(command: str) -> None:
    """Show a command and run it with this Python."""
    say(f"\n$ {command}")
    words = command.split()
    program = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "ckptman"]
    done = subprocess.run(program + words[1:], env=environment(), check=False, timeout=300)
    if done.returncode != 0:
        fail(f"{command} ended with {done.returncode}")


def environment() -> dict[str, str]:
    """One thread a process: on small machines more only get in each other's way."""
    return {"OMP_NUM_THREADS": "1", **os.environ, "COLUMNS": str(WIDTH)}


def count_gpus() -> int:
    """GPUs of this machine, asked in another process: this one does not need torch."""
    code = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def say(line: str) -> None:
    CONSOLE.print(line, markup=False, soft_wrap=True)


def fail(line: str) -> None:
    raise CkptmanError(line)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CkptmanError as error:
        sys.exit(f"demo: {error}")
