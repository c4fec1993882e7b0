"""`ckptman submit -- COMMAND`: run a training command again and again until it is finished."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from ckptman.cli.text import plain
from ckptman.errors import ConfigError

Command = Annotated[
    list[str], typer.Argument(metavar="-- COMMAND", show_default=False, help="What runs, such as torchrun train.py.")
]
SchedulerName = Annotated[str, typer.Option("--scheduler", metavar="NAME", show_default=False, help="local: here.")]
MaxAttempts = Annotated[
    int | None, typer.Option("--max-attempts", metavar="N", show_default=False, help="End after N attempts.")
]
CrashLimit = Annotated[
    int, typer.Option("--crash-limit", metavar="N", help="End after N crashes in a row with no new checkpoint.")
]
ChainDir = Annotated[
    Path | None,
    typer.Option(
        "--chain-dir",
        metavar="DIR",
        show_default=False,
        help="Where each attempt leaves how it ended (default: a new folder under ./ckptman-chains).",
    ),
]


def submit(
    command: Command,
    scheduler: SchedulerName,
    max_attempts: MaxAttempts = None,
    crash_limit: CrashLimit = 3,
    chain_dir: ChainDir = None,
) -> None:
    """Run a command until it is finished.

    It runs again after a stop (exit code 75) and after a crash. SIGTERM and SIGINT are passed on to it, and end the
    chain when it has saved.
    """
    _check(scheduler, max_attempts, crash_limit)
    from ckptman.scheduler.chain import new_chain_dir, run_chain
    from ckptman.scheduler.local import LocalScheduler

    folder = chain_dir or new_chain_dir(Path.cwd(), time.localtime(), os.getpid())
    raise typer.Exit(
        run_chain(LocalScheduler(_say), command, folder, say=_say, crash_limit=crash_limit, max_attempts=max_attempts)
    )


def _check(scheduler: str, max_attempts: int | None, crash_limit: int) -> None:
    from ckptman.policy.checks import check_count

    if scheduler == "slurm":
        raise ConfigError("--scheduler slurm is not there yet: use --scheduler local, inside an allocation")
    if scheduler != "local":
        raise ConfigError(f"there is no scheduler {scheduler!r}; known: local")
    check_count("submit", "--crash-limit", crash_limit)
    if max_attempts is not None:
        check_count("submit", "--max-attempts", max_attempts)


def _say(line: str) -> None:
    # Not the `say` of other verbs: a terminal that is gone must not end the chain.
    print(f"ckptman: {plain(line)}", flush=True)
