"""Options of sbatch: their spellings, and what those mean that a chain has to know."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ckptman.errors import ConfigError

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
_DEFAULT_WARNING_SECONDS = 60
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?", re.ASCII)
_SIGNAL = re.compile(r"(?:(?P<flags>[RB]{1,2}):)?(?P<name>\w+)(?:@(?P<seconds>\d{1,9}))?", re.ASCII | re.IGNORECASE)
_RANGE = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+)(?::(?P<stride>\d+))?)?", re.ASCII)


class Warned(NamedTuple):
    """What `--signal` asks for: a signal, by its name or number, so long before the time limit. `batch_only`: the batch
    script gets it, and not the tasks."""

    name: str
    seconds: int
    batch_only: bool = False


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


def limit_seconds(options: Mapping[str, str]) -> float | None:
    """Return what `--time` allows: minutes, minutes:seconds, h:m:s, days-hours, days-h:m, days-h:m:s. None: not
    known."""
    match = _TIME.fullmatch(options.get("--time", "").strip())
    if match is None:
        return None
    parts = [int(match[name] or 0) for name in ("first", "second", "third")]
    if match["days"] is not None:
        hours, minutes, seconds = parts
        hours += 24 * int(match["days"])
    elif match["third"] is not None:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, parts[0], parts[1]
    total = hours * 3600.0 + minutes * 60 + seconds
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
    tasks: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        last = int(match["last"] or match["first"]) if match else -1
        stride = int(match["stride"] or 1) if match else 0
        if match is None or not stride or last < int(match["first"]):
            raise ConfigError(f"--array={text} is not a list of tasks: give it as 0-15, 1,3,5-7 or 0-15:4")
        if (last - int(match["first"])) // stride >= MOST_TASKS:
            raise ConfigError(f"--array={text} has more than {MOST_TASKS:,} tasks: submit them in parts")
        tasks.update(range(int(match["first"]), last + 1, stride))
    if len(tasks) > MOST_TASKS:
        raise ConfigError(f"--array={text} has {len(tasks):,} tasks, and {MOST_TASKS:,} are the most: submit in parts")
    return sorted(tasks)
