"""`python -m tests.faults`: every kind of fault in a process of its own, two at a time, and a table at the end."""

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.tally import Tally, table, timed, write
from tests.helpers.forkserver import Python

KINDS = {
    "ranks": ("lost_ranks.run", "a rank that dies, is stopped, or has a disk that hangs"),
    "kill": ("kills.run", "`kill -9` at a random moment"),
    "user": ("user.run", "loops that break, raise, exit, fork or nest blocks"),
    "changes": ("changes.run", "a state that changes between saves and during one"),
    "program": ("program.run", "an object of the program that raises in a restore"),
    "replicas": ("replicas.run", "a bit of a replica differs on one rank"),
    "memory": ("memory.run", "checkpoints in memory: damage, deaths, kills"),
    "copy": ("copies.run", "death in a copy or a drain, then a power cut"),
    "crash": ("crash.run", "death at each change of a file, then a power cut"),
    "flips": ("damage.run_flips", "one flipped bit"),
    "files": ("damage.run_files", "files cut, grown, missing, swapped, old"),
    "disk": ("disks.run", "full, over quota, read-only, forbidden"),
    "io": ("io_errors.run", "an error at each operation; slow disks"),
    "hostile": ("hostile.run", "checkpoints made to do harm"),
    "fuzz": ("fuzz.run", "any bytes for each parser"),
}
"""The function that injects them, and what they are; the longest first."""
LIMIT_SECONDS = 1500.0
"""Of one kind: one that takes longer is a hang itself."""
QUICK = 0.08
MEMORY_BYTES = 16 * 1024**3
TOGETHER = 2


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="The fault campaign.")
    parser.add_argument("--quick", action="store_true", help=f"a small part of each kind: --share {QUICK}")
    parser.add_argument(
        "--share", type=float, default=1.0, help="how much of each kind, from 0 to 1; 1 mounts disks too"
    )
    parser.add_argument("--seed", type=int, default=None, help="the same seed injects the same faults")
    parser.add_argument("--only", metavar="KIND,...", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--mutants", action="store_true", help="break the library on purpose: is it noticed?")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="all counts, failures and messages")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--mutant", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    share = QUICK if options.quick else options.share
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    if options.part:
        write(options.out, [run_kind(options.part, seed, options.share, options.mutant, options.out)])
        return 0
    chosen = [kind for kind in KINDS if kind in options.only.split(",")]
    if options.mutants:
        return run_mutants(seed, chosen)
    print(f"seed {seed}: python -m tests.faults --seed {seed}{f' --share {share}' * (share < 1)}", flush=True)
    with ThreadPoolExecutor(TOGETHER) as pool:
        tallies = list(pool.map(lambda kind: run_apart(kind, seed, share, ""), chosen))
    if options.out:
        write(options.out, tallies)
    print(report(tallies))
    return 0 if all(tally.good for tally in tallies) else 1


def run_kind(kind, seed, share, mutant="", trace=None):
    """Inject one kind of fault in this process, into the library as it is or as a mutant."""
    from tests.faults.mutants import apply

    apply(mutant)
    tally = Tally(kind, seed, share, mutant, trace.with_suffix(".case") if trace else None)
    module, _, function = KINDS[kind][0].partition(".")
    run = getattr(importlib.import_module(f"tests.faults.{module}"), function)
    with timed(tally), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, of loads without a process group
        try:
            run(tally)
        except Exception as error:
            tally.fail("other", f"the campaign itself failed: {type(error).__name__}: {error}")
    return tally


def run_apart(kind, seed, share, mutant):
    """The same in a process of its own, which may die or hang: that is a failure too, of the case it was at."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        out, words = Path(folder, "out.json"), Path(folder, "words")
        part = ["--part", kind, "--seed", str(seed), "--out", str(out), "--mutant", mutant]
        begun = time.monotonic()
        with words.open("wb") as file:
            command = ("-m", "tests.faults", *part, "--share", share)
            process = Python(*command, stdout=file, stderr=subprocess.STDOUT, env=_environment())
            try:
                process.wait(LIMIT_SECONDS)
                ended = f"ended with {process.returncode}"
            except subprocess.TimeoutExpired:
                ended = f"took longer than {LIMIT_SECONDS:.0f} s"
            finally:
                _end(process)
        if out.exists() and out.stat().st_size:
            (found,) = json.loads(out.read_text())
            tally = Tally.from_dict(found)
        else:
            tally = Tally(kind, seed, seconds=time.monotonic() - begun)
            case = out.with_suffix(".case")
            at = case.read_text().strip() if case.exists() else "its start"
            said = words.read_text(errors="replace")[-1500:]
            tally.fail("hang" if "longer" in ended else "other", f"the campaign {ended} at: {at}\n{said}")
        print(
            f"{kind}: {tally.injected:,} faults in {tally.seconds:.0f} s, failures {dict(tally.failures)}", flush=True
        )
        return tally


def _environment():
    unwanted = ("SLURM_", "CKPTMAN_", "TORCHELASTIC_", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    memory = "/dev/shm"
    if "TMPDIR" not in kept and os.access(memory, os.W_OK):
        kept["TMPDIR"] = memory  # thousands of files that no test needs on a disk
    return {**kept, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}


def _end(process):
    import contextlib
    import signal

    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def report(tallies):
    """What to print: failures, what was skipped, the messages by kind, and the table."""
    lines = []
    for tally in tallies:
        lines += [f"FAILED {each}" for each in tally.described]
        lines += [f"skipped: {tally.kind}, {each}" for each in tally.skipped]
        lines += [f"note: {tally.kind}, {each}" for each in tally.notes]
    texts = sum((tally.texts for tally in tallies), Counter[str]())
    lines.append(f"{sum(texts.values()):,} messages of {len(texts)} sorts (--out keeps them)")
    lines += ["", table(tallies, {kind: title for kind, (_, title) in KINDS.items()})]
    return "\n".join(lines)


def run_mutants(seed, kinds):
    """Each mutant has to be noticed by the kind of fault that is there for it."""
    from tests.faults import mutants

    chosen = {name: mutant for name, mutant in mutants.MUTANTS.items() if mutant.kind in kinds}
    print(f"seed {seed}", flush=True)
    with ThreadPoolExecutor(TOGETHER) as pool:
        tallies = list(pool.map(lambda name: run_apart(chosen[name].kind, seed, chosen[name].share, name), chosen))
    missed = 0
    print("| what is broken | kind | faults | |\n|---|---|---:|---|")
    for (name, mutant), tally in zip(chosen.items(), tallies):
        noticed = tally.injected and any(tally.failures[each] for each in mutant.failures)
        missed += not noticed
        seen = ", ".join(f"{count} {failure}" for failure, count in tally.failures.items())
        print(f"| {name} | {mutant.kind} | {tally.injected:,} | {'noticed' if noticed else 'MISSED'}: {seen} |")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
