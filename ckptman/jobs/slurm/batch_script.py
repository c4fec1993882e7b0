"""A user's batch script, what its options of sbatch mean to a chain, and the file that is submitted in its place."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ckptman.errors import ConfigError

_DIRECTIVE = "#SBATCH"
MOST_TASKS = 1000
"""Of one array: each becomes a chain of its own."""
_SHORT = {
    "-t": "--time",
    "-J": "--job-name",
    "-d": "--dependency",
    "-a": "--array",
    "-o": "--output",
    "-e": "--error",
    "-D": "--chdir",
    "-x": "--exclude",
}
_MOST_BYTES = 4 * 1024 * 1024
"""What Slurm takes, unless its MaxScriptSize says otherwise."""
_DEFAULT_WARNING_SECONDS = 60
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?", re.ASCII)
_SIGNAL = re.compile(r"(?:(?P<flags>[RB]{1,2}):)?(?P<name>\w+)(?:@(?P<seconds>\d{1,9}))?", re.ASCII | re.IGNORECASE)
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(0*[1-9]\d*))?)?", re.ASCII)


@dataclass(frozen=True)
class BatchScript:
    """`interpreter`: the words of its first line. `directives`: its #SBATCH lines. `options`: what they say."""

    interpreter: tuple[str, ...]
    directives: tuple[str, ...]
    options: Mapping[str, str]


class Warned(NamedTuple):
    """What `--signal` asks for: a signal, by its name or number, so long before the time limit. `batch_only`: the batch
    script gets it, and not the tasks."""

    name: str
    seconds: int
    batch_only: bool = False


def parse(text: str, name: str) -> BatchScript:
    """Read a batch script as sbatch does: its directives end at the first command. Raises: ConfigError."""
    if refused := _refused_by_sbatch(text):
        raise ConfigError(f"{name}: {refused}")
    lines = text.splitlines()
    if not lines or not lines[0].startswith("#!") or not lines[0][2:].split():
        raise ConfigError(
            f"{name} is not a batch script: its first line has to name an interpreter, such as #!/bin/bash"
        )
    directives = []
    for line in lines[1:]:
        if line.startswith(_DIRECTIVE):
            directives.append(line)
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    options: dict[str, str] = {}
    for line in directives:
        try:
            options |= read_options(shlex.split(line.removeprefix(_DIRECTIVE), comments=True))
        except ValueError as error:
            raise ConfigError(f"{name}: {line}: {error}") from None
    return BatchScript(tuple(lines[0][2:].split(None, 1)), tuple(directives), options)


def _refused_by_sbatch(text: str) -> str:
    """Return what sbatch would refuse a script for, and how to mend it. It is given another file, and cannot see it."""
    if not text.strip():
        return "the batch script is empty: write the commands of the job into it"
    if "\r\n" in text:
        return "the batch script has DOS line breaks, which sbatch refuses: remove them (sed -i 's/\\r$//', dos2unix)"
    if "\0" in text:
        return "the batch script holds NUL characters, which sbatch refuses: save it as plain text"
    if len(text.encode()) > _MOST_BYTES:
        return (
            f"the batch script has more than {_MOST_BYTES // 2**20} MiB, which Slurm refuses: keep data in other files"
        )
    return ""


_BATCH = """
# Written by ckptman submit, from {name}: one attempt of a chain. The script itself is beside this file.
trap '' HUP INT TERM USR1 USR2  # until Python can take them: the successor has to be in the queue first
workdir={workdir} chain={folder} python={python}

# Python starts outside the working directory, where a random.py beside the training script would be imported.
for try in {{1..{tries}}}; do
    if cd "$workdir" && cd "$chain" && "$python" -c "import ckptman.jobs.attempt"; then
        exec "$python" -m ckptman.jobs.attempt . "$1" "$workdir" ${{2:+"$2"}}
    fi
    node=${{SLURMD_NODENAME:-$(hostname)}}
    echo "ckptman: $workdir, $chain or $python cannot be used on $node: try $try of {tries}, {pause} s apart"
    sleep {pause}
done

# Elsewhere, then: this job again, or another one in its place.
job=$(scontrol show job --oneliner "$SLURM_JOB_ID")
excluded=$(sed -n 's/.* ExcNodeList=\\([^ ]*\\).*/\\1/p' <<< "$job")
moved=$(sed -n 's/.* Comment=ckptman-moved-\\([0-9]*\\).*/\\1/p' <<< "$job")
case $excluded in "" | "(null)") excluded=$node ;; *) excluded=$excluded,$node ;; esac
moved=$((${{moved:-0}} + 1)) replaced=${{2:+$2,}}$SLURM_JOB_ID
if [ "$moved" -gt {tries} ] || [ "$(tr -cd , <<< "$replaced" | wc -c)" -ge {tries} ]; then
    echo "ckptman: {tries} nodes could not be used: ckptman chain resume continues the chain"
    exit 1
fi
if scontrol requeue "$SLURM_JOB_ID"; then
    scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$excluded" Comment="ckptman-moved-$moved"
    echo "ckptman: this job was requeued, without $node"
    exit 0
fi
mine=$SLURM_JOB_ID conf=${{SLURM_CONF:-}}
unset ${{!SLURM_@}} ${{!SBATCH_@}}
if env {variables}${{conf:+SLURM_CONF="$conf"}} sbatch {options} --chdir="$workdir" \\
    --dependency="afterany:$mine" --exclude="$excluded" "$0" "$1" "$replaced"; then
    echo "ckptman: another job was submitted, without $node"
fi
"""
TRIES, PAUSE_SECONDS = 10, 30
"""How often a node may lack the folder of the chain, or Python, as while a mount is late; and how often a job may be
requeued because of that."""


def batch_file(
    script: BatchScript,
    name: str,
    python: str,
    folder: Path,
    workdir: Path,
    options: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return what is submitted for each attempt: the directives of the script, and a command that does the rest.

    `options`, `variables`: those of the submission, for a job in place of one that a bad node has lost.
    """
    text = _BATCH.format(
        name=name,
        folder=shlex.quote(str(folder)),
        workdir=shlex.quote(str(workdir)),
        python=shlex.quote(python),
        tries=TRIES,
        pause=PAUSE_SECONDS,
        options=shlex.join(options),
        variables="".join(f"{name}={shlex.quote(value)} " for name, value in variables.items()),
    )
    return "\n".join(("#!/bin/bash", *script.directives, text))


def read_options(words: list[str]) -> dict[str, str]:
    """Options of sbatch by their long names; "" where one has no value. Unknown short ones keep theirs."""
    found: dict[str, str] = {}
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if word.startswith("--"):
            name, given, value = word.partition("=")
        elif word.startswith("-") and len(word) > 1:
            name, value = _SHORT.get(word[:2], word[:2]), word[2:]
            given = value
        else:
            continue
        if not given and place < len(words) and not words[place].startswith("-"):
            value = words[place]
            place += 1
        found[name] = value
    return found


def in_force(script: Mapping[str, str], variables: Mapping[str, str], line: Mapping[str, str]) -> dict[str, str]:
    """Return the options that count: those of the script, before them SBATCH_* `variables`, before all the command
    line."""
    names = {"SBATCH_TIMELIMIT": "--time", "SBATCH_ARRAY_INX": "--array"}
    of_variables = {
        names.get(name, "--" + name.removeprefix("SBATCH_").lower().replace("_", "-")): value
        for name, value in variables.items()
    }
    return {**script, **of_variables, **line}


def remarks(options: Mapping[str, str]) -> Iterator[str]:
    """Return what a user should know of the options in force."""
    if "--time" not in options:
        yield "no --time: each attempt gets the default time limit of its partition"
    if "--dependency" in options:
        yield f"--dependency={options['--dependency']} holds for the first job; the others wait for the one before"
    if "--array" in options:
        yield "each task becomes a chain of its own, an array of one: SLURM_ARRAY_TASK_COUNT is 1 in it"


def limit_seconds(text: str) -> float | None:
    """Return what a `--time` allows: minutes, minutes:seconds, h:m:s, days-hours, days-h:m, days-h:m:s. None: not
    known."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    days, first, second, third = (int(match[name] or 0) for name in ("days", "first", "second", "third"))
    if match["days"] is None and match["third"] is None:
        first, second, third = 0, first, second
    total = ((24 * days + first) * 60 + second) * 60.0 + third
    return total or None  # 0 is "no limit"


def warned(options: Mapping[str, str]) -> Warned | None:
    """Return what `--signal` asks for. None where there is none, or none that can be understood."""
    match = _SIGNAL.fullmatch(options.get("--signal", "").strip())
    if match is None:
        return None
    seconds = int(match["seconds"]) if match["seconds"] else _DEFAULT_WARNING_SECONDS
    return Warned(match["name"].upper().removeprefix("SIG"), seconds, "B" in (match["flags"] or "").upper())


def array_tasks(text: str) -> list[int]:
    """Return the tasks of `--array`: `0-15`, `1,3,5-7`, `0-15:4`. Raises: ConfigError."""
    if "%" in text:
        raise ConfigError(
            f"--array={text}: each task becomes a chain of its own, and how many run at once (%) cannot be kept across "
            f"chains: leave the % out, or give the chains a QOS that allows so many jobs"
        )
    tasks = set[int]()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"--array={text} is not a list of tasks: give it as 0-15, 1,3,5-7 or 0-15:4")
        found = range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))
        tasks.update(found[: MOST_TASKS + 1])
    if len(tasks) > MOST_TASKS:
        raise ConfigError(f"--array={text} has more than {MOST_TASKS:,} tasks: submit in parts")
    return sorted(tasks)
