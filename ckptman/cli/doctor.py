"""`ckptman doctor [DIR]`: whether a mount is safe and how fast it is; or what is around the job."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ckptman.cli import console
from ckptman.cli.console import ending_cleanly, status_line
from ckptman.cli.options import AsJson, is_size, option, parse_size, path_argument
from ckptman.cli.select import choose, is_foreign
from ckptman.engine.state.installed_torch import TorchFacts
from ckptman.errors import CkptmanError, ConfigError
from ckptman.policies.parameters import check_positive
from ckptman.storage.io.isolated_process import Died, NoAnswer, run_isolated
from ckptman.tools.doctor.examine import SIZE_BYTES, examine
from ckptman.tools.doctor.job_environment import survey
from ckptman.tools.doctor.speed import LEAST_BYTES

MOST_TIMEOUT_SECONDS = 86400
SECOND_TIMEOUT_SECONDS = 30
_LINE = 120
_COLOURS = {"ok": "green", "slow": "yellow", "warning": "yellow", "FAILED": "red"}


def doctor(
    # No path to typer: it would look at the directory in this process, and hang with its file system.
    folder: Annotated[
        str | None,
        path_argument(
            "DIR", "A folder on the mount to examine; it may hold checkpoints that are in use. Left out: the job."
        ),
    ] = None,
    size: Annotated[
        str | None,
        option(
            "--size",
            "SIZE",
            "Most bytes to write at a time (256MiB; never over 5 % of the free space), besides 1 MB of small files.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        option(
            "--against",
            "SIZE",
            "A checkpoint, or its size such as 70GB: seconds per save and load. Without DIR: what one process saves.",
        ),
    ] = None,
    second_client: Annotated[
        str | None,
        option(
            "--second-client",
            "COMMAND",
            'Starts a process on another node, such as "srun -w NODE -N 1 -n 1" or "ssh NODE": renames, claims and '
            "locks are tried between this host and that one.",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Time limit of each check.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Examine a mount, or the job.

    With DIR: whether its file system is safe for checkpoints (renames, fsync, claims), how much space is free, and how
    fast it is. Works in a folder of its own inside DIR, and removes it. Without DIR: torch, devices, Slurm, memory and
    limits around this process. Exit code 1: something is broken.
    """
    check_positive("doctor", "--timeout", timeout)
    if timeout > MOST_TIMEOUT_SECONDS:
        raise ConfigError(f"--timeout: a day at most ({MOST_TIMEOUT_SECONDS} s), not {timeout:g}")
    if folder is None and size is not None:
        raise ConfigError("--size is of the test files in a DIR: name one, as in ckptman doctor DIR --size 1GiB")
    command = [] if second_client is None else _second_command(folder, second_client, timeout)
    size_bytes = SIZE_BYTES if size is None else parse_size("--size", size)
    if size_bytes < LEAST_BYTES:
        raise ConfigError(f"--size: at least 1MiB, or there is nothing to measure, not {size!r}")
    against_bytes = None if against is None else _against_bytes(against, timeout)
    with ending_cleanly(), status_line() as note:
        if folder is None:
            note("torch")
            findings = survey(_torch_facts(timeout), against_bytes)
        else:
            findings = examine(
                Path(folder),
                size_bytes=size_bytes,
                against_bytes=against_bytes,
                timeout_seconds=timeout,
                second_command=command,
                note=note,
            )
    failed = [each for each in findings if each.verdict == "FAILED"]
    if as_json:
        console.say_json(
            {"directory": folder, "good": not failed, "against_bytes": against_bytes, "findings": findings}
        )
    else:
        rows = [
            (
                each.name,
                console.paint(each.verdict, _COLOURS.get(each.verdict)),
                f"{each.value}; {each.advice}" if each.advice else each.value,
            )
            for each in findings
        ]
        width = min(_LINE, console.terminal_width() or _LINE)
        console.say(*console.table(("check", "result", "what it means"), rows, width=width))
    if failed:
        what = "; ".join(f"{each.name} ({each.value}){': ' + each.advice if each.advice else ''}" for each in failed)
        where = "this job is not fit to run" if folder is None else f"{folder} is not fit to save to"
        raise CkptmanError(f"{where}: {what}")


def _second_command(folder: str | None, written: str, timeout: float) -> list[str]:
    """Return the words of a command. Raises: ConfigError."""
    if folder is None:
        raise ConfigError("--second-client looks at a DIR: name one, as in ckptman doctor DIR --second-client 'ssh n2'")
    if timeout < SECOND_TIMEOUT_SECONDS:
        raise ConfigError(
            f"--timeout: at least {SECOND_TIMEOUT_SECONDS} s with --second-client, as other clients see late what this "
            f"one does, not {timeout:g}"
        )
    try:
        command = shlex.split(written)
    except ValueError as error:
        raise ConfigError(f"--second-client: {written!r} is not a command ({error})") from None
    if not command:
        raise ConfigError("--second-client: name a command that starts a process on another node, such as 'ssh n2'")
    return command


def _against_bytes(written: str, timeout: float) -> int:
    """Return a size, or the size of the checkpoint at a path. Raises: ConfigError, NotFoundError, CorruptError."""
    if is_size(written):
        return parse_size("--against", written, needs_unit=True)

    def look() -> int | None:
        path = Path(written)
        if not written.strip() or not path.exists():
            return None
        if is_foreign(path):
            return sum(each.lstat().st_size for each in path.rglob("*"))
        return choose(path, allow_nonfinite=True)[-1].require_manifest().total_bytes

    try:
        size = run_isolated(look, timeout)  # a path may be on the very file system that hangs
    except NoAnswer as error:
        raise CkptmanError(f"--against: {written} {error}: give its size, such as 70GB") from None
    if size is None:
        raise ConfigError(
            f"--against: {written!r} is not a size such as 70GB or 1.5TiB, and there is no such path: give a size, or "
            f"the path of a checkpoint or a root"
        )
    return size


def _torch_facts(timeout: float) -> TorchFacts:
    """Ask in a process of its own: a broken driver can hang whoever asks for devices."""

    def ask() -> TorchFacts:
        from ckptman.engine.state.installed_torch import torch_facts

        return torch_facts()

    try:
        return run_isolated(ask, timeout)
    except NoAnswer as error:
        return TorchFacts(unanswered=str(error))
    except Died as error:
        return TorchFacts(problem=str(error))
