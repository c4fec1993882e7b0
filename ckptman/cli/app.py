"""The command `ckptman`: its verbs, and how every one of them ends."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from ckptman.cli.list import list_checkpoints
from ckptman.cli.prune import prune
from ckptman.cli.show import show
from ckptman.cli.submit import submit
from ckptman.cli.text import complain, say, stop_writing
from ckptman.cli.verify import verify
from ckptman.errors import CkptmanError, RootError

TRACEBACK_ENV = "CKPTMAN_TRACEBACK"
"""Set to 1 to see the traceback of an error, for a bug report."""

# Formatting by rich costs more to import than a whole listing of 1,000 checkpoints takes.
app = typer.Typer(
    name="ckptman",
    help="Checkpoints of PyTorch training runs: look, prove, prune, and run to the end.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("list")(list_checkpoints)
app.command("show")(show)
app.command("verify")(verify)
app.command("prune")(prune)
app.command("submit", context_settings={"allow_interspersed_args": False})(submit)


def _tell_version(wanted: bool) -> None:
    if wanted:
        from ckptman import __version__

        say(f"ckptman {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def run() -> NoReturn:
    """Run the command line of this process and exit. Called by `ckptman.cli.main`."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that knows no Unicode gets escapes, not an exception.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. What ckptman or the system refuses is one message on stderr."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return stop_writing()
    except CkptmanError as error:
        return _fail(error, error.exit_code)
    except OSError as error:
        return _fail(error, RootError.exit_code)
    return code


def _run(arguments: Sequence[str]) -> int:
    try:
        typer.main.get_command(app)(args=list(arguments), prog_name="ckptman")
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else 0
    return 0


def _fail(error: Exception, code: int) -> int:
    if os.environ.get(TRACEBACK_ENV) == "1":
        import traceback

        traceback.print_exception(error)
    # The text of an OSError begins with its number; ours were given a whole message.
    ours = isinstance(error, CkptmanError) and isinstance(error, OSError) and error.strerror
    complain(ours or str(error))
    return code
