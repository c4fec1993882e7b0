"""A user's batch script: what Slurm reads of it, and the batch file that is submitted in its place."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptman.errors import ConfigError
from ckptman.scheduler.slurm.options import read_options

_DIRECTIVE = "#SBATCH"


@dataclass(frozen=True)
class BatchScript:
    """`interpreter`: the words of its first line. `directives`: its #SBATCH lines. `options`: what they say."""

    interpreter: tuple[str, ...]
    directives: tuple[str, ...]
    options: Mapping[str, str] = field(default_factory=dict)


def parse(text: str, name: str) -> BatchScript:
    """Read a batch script as sbatch does: its directives end at the first command. Raises: ConfigError."""
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
        options |= read_options(_words(line[len(_DIRECTIVE) :], name))
    return BatchScript(tuple(lines[0][2:].split(None, 1)), tuple(directives), options)


def batch_file(script: BatchScript, name: str, python: str, folder: str) -> str:
    """Return what is submitted for each attempt: the directives of the script, and a command that takes it from there.

    It leaves the working directory while Python starts: a `random.py` beside the training script is not ours.
    """
    lines = (
        "#!/bin/bash",
        *script.directives,
        "",
        f"# Written by ckptman submit, from {name}: one attempt of a chain. The script itself is beside this file.",
        "trap '' HUP INT TERM USR1 USR2  # until Python can take them: the successor has to be in the queue first",
        "workdir=$PWD",
        f'cd {shlex.quote(folder)} && exec {shlex.quote(python)} -m ckptman.scheduler.attempt . "$1" "$workdir"',
    )
    return "\n".join(lines) + "\n"


def _words(text: str, name: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"{name}: {_DIRECTIVE}{text}: {error}") from None
