"""`ckptman doctor [DIR]`: whether a mount keeps what saves build on, and how fast it is; or what is around the job."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptman.cli import console
from ckptman.cli.options import AsJson, is_size, option, parse_size, path_argument
from ckptman.errors import CkptmanError, ConfigError

if TYPE_CHECKING:
    from ckptman.doctor.finding import Finding
    from ckptman.doctor.job_environment import TorchFacts

# No path to typer: it would look at the folder in this process, and hang where its file system does.
Folder = Annotated[
    str | None,
    path_argument(
        "DIR", "A folder on the mount to examine; it may hold checkpoints that are in use. Left out: the job."
    ),
]
Size = Annotated[
    str | None,
    option(
        "--size",
        "SIZE",
        "Write no more than this at a time (256MiB), nor 5 % of what is free; and less than 1 MB of small files.",
    ),
]
Against = Annotated[
    str | None,
    option(
        "--against",
        "SIZE",
        "A checkpoint, or its size such as 70GB: seconds per save and load. Without DIR: what one process saves.",
    ),
]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="Give a check up when it takes longer than this.")
]
LEAST_BYTES = 1024 * 1024
MOST_TIMEOUT_SECONDS = 86400
_LINE = 120
_COLOURS = {"ok": "green", "slow": "yellow", "warning": "yellow", "FAILED": "red"}


def doctor(
    folder: Folder = None, size: Size = None, against: Against = None, timeout: Timeout = 60.0, as_json: AsJson = False
) -> None:
    """Examine a mount, or the job.

    Of DIR: whether renames, fsync and claims are safe on its file system, what room there is, and how fast it is. Works
    in a folder of its own inside DIR, and removes it. Without DIR: torch, devices, Slurm, memory and limits around this
    process. Exit code 1: something is broken.
    """
    from ckptman.policies.parameters import check_positive

    check_positive("doctor", "--timeout", timeout)
    if timeout > MOST_TIMEOUT_SECONDS:
        raise ConfigError(f"--timeout: a day at most ({MOST_TIMEOUT_SECONDS} s), not {timeout:g}")
    if folder is None and size is not None:
        raise ConfigError("--size is of the test files in a DIR: name one, as in ckptman doctor DIR --size 1GiB")
    size_bytes = _size_bytes(size)
    against_bytes = _against_bytes(against, timeout)
    with _ending_cleanly(), _progress() as note:
        if folder is None:
            findings = _survey(against_bytes, timeout, note)
        else:
            from ckptman.doctor.examine import examine

            findings = examine(
                Path(folder), size_bytes=size_bytes, against_bytes=against_bytes, timeout_seconds=timeout, note=note
            )
    failed = [each for each in findings if each.verdict == "FAILED"]
    if as_json:
        console.say_json(
            {
                "directory": folder,
                "good": not failed,
                "against_bytes": against_bytes,
                "findings": [vars(each) for each in findings],
            }
        )
    else:
        console.say(*_table(findings, _width()))
    if failed:
        raise CkptmanError(_complaint(folder, failed))


def _size_bytes(written: str | None) -> int:
    from ckptman.doctor.examine import SIZE_BYTES

    size = SIZE_BYTES if written is None else parse_size("--size", written)
    if size < LEAST_BYTES:
        raise ConfigError(f"--size: at least 1MiB, or there is nothing to measure, not {written!r}")
    return size


def _against_bytes(written: str | None, timeout: float) -> int | None:
    """Return the size that was written, or that of the checkpoint there. Raises: ConfigError, NotFoundError,
    CorruptError."""
    if written is None:
        return None
    if is_size(written):
        return parse_size("--against", written, needs_unit=True)
    from ckptman.io.isolated_process import NoAnswer, run_isolated

    try:
        # A path may be on the very file system that hangs.
        found = run_isolated(lambda: _checkpoint_bytes(Path(written)), timeout) if written.strip() else None
    except NoAnswer as error:
        raise CkptmanError(f"--against: {written} {error}: give its size, such as 70GB") from None
    if found is None:
        raise ConfigError(
            f"--against: {written!r} is not a size such as 70GB or 1.5TiB, and there is no such path: give a size, or "
            f"the path of a checkpoint or a root"
        )
    return found


def _checkpoint_bytes(path: Path) -> int | None:
    """Return the bytes of a checkpoint, or of the newest of a root; None where there is nothing."""
    from ckptman.cli.select import choose, is_foreign

    if not path.exists():
        return None
    if is_foreign(path):
        return sum(each.lstat().st_size for each in path.rglob("*"))
    return choose(path)[-1].require_manifest().total_bytes


def _survey(against_bytes: int | None, timeout: float, note: Callable[[str], None]) -> list[Finding]:
    from ckptman.doctor.job_environment import survey

    note("torch")
    return survey(_torch_facts(timeout), against_bytes)


def _torch_facts(timeout: float) -> TorchFacts:
    """Asked in a process of its own: a driver that is broken may hang whoever asks for devices."""
    from ckptman.doctor.job_environment import TorchFacts
    from ckptman.io.isolated_process import Died, NoAnswer, run_isolated

    def ask() -> TorchFacts:
        from ckptman.state.installed_torch import torch_facts

        return torch_facts()

    try:
        return run_isolated(ask, timeout)
    except NoAnswer as error:
        return TorchFacts(unanswered=str(error))
    except Died as error:
        return TorchFacts(problem=str(error))


def _table(findings: Sequence[Finding], width: int) -> list[str]:
    """Lines of three columns: check, result, what it means; the last is broken to the width."""
    names = max(len("check"), *(len(each.name) for each in findings))
    verdicts = max(len("result"), *(len(each.verdict) for each in findings))
    indent = names + verdicts + 4
    lines = [f"{'check':{names}}  {'result':{verdicts}}  what it means"]
    for each in findings:
        meaning = console.plain(f"{each.value}; {each.advice}" if each.advice else each.value)
        broken = textwrap.wrap(meaning, max(40, width - indent), break_on_hyphens=False, break_long_words=False) or [""]
        verdict = f"{each.verdict:{verdicts}}"
        verdict = console.paint(verdict, _COLOURS[each.verdict]) if each.verdict in _COLOURS else verdict
        lines.append(f"{each.name:{names}}  {verdict}  {broken[0]}".rstrip())
        lines += [" " * indent + more for more in broken[1:]]
    return lines


def _width() -> int:
    return min(_LINE, shutil.get_terminal_size((_LINE, 24)).columns) if sys.stdout.isatty() else _LINE


def _complaint(folder: str | None, failed: Sequence[Finding]) -> str:
    what = "; ".join(f"{each.name} ({each.value}){': ' + each.advice if each.advice else ''}" for each in failed)
    where = "this job is not fit to run" if folder is None else f"{folder} is not fit to save to"
    return f"{where}: {what}"


@contextmanager
def _ending_cleanly() -> Iterator[None]:
    """SIGTERM and SIGHUP end the command with everything cleaned up, as Ctrl-C does."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for each in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(each) is signal.SIG_DFL:
                before[each] = signal.signal(each, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What to call with the name of each check: shown on a terminal, and nowhere else."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    shown = contextlib.ExitStack()
    shown.callback(lambda: print("\r\x1b[K", end="", file=sys.stderr, flush=True))
    with shown:
        yield lambda name: print(f"\r\x1b[K{name} ...", end="", file=sys.stderr, flush=True)
