"""The command `ckptman`: its verbs, and their exit codes."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Annotated, NoReturn

import typer

from ckptman.cli.console import complain, exit_code, message, plain, say, stop_writing
from ckptman.errors import CkptmanError

TRACEBACK_ENV = "CKPTMAN_TRACEBACK"
"""Set to 1 to print the traceback of an error, for a bug report."""
EXIT_BUG = 70
"""EX_SOFTWARE of sysexits.h."""

_VERBS = {
    "list": "list:list_checkpoints",
    "status": "status:status",
    "report": "report:report",
    "path": "path:path",
    "show": "show:show",
    "verify": "verify:verify",
    "diff": "diff:diff",
    "export": "export:export",
    "adopt": "adopt:adopt",
    "copy": "copy:copy",
    "drain": "drain:drain",
    "memory": "memory:memory_app",
    "prune": "prune:prune",
    "pin": "pin:pin",
    "unpin": "pin:unpin",
    "rollback": "rollback:rollback",
    "plan": "plan:plan",
    "simulate": "simulate:simulate",
    "doctor": "doctor:doctor",
    "chain": "chain:chain_app",
    "submit": "submit:submit",
    "template": "template:template",
}
"""Module and function of each verb, in the order of `--help`."""


def _tell_version(wanted: bool) -> None:
    if wanted:
        from ckptman import __version__

        say(f"ckptman {__version__}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def make_app(verbs: Iterable[str] = tuple(_VERBS)) -> typer.Typer:
    """Return the command with these verbs. Each takes milliseconds to import, so a call asks for one only."""
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
    app.callback()(_common)
    for verb in verbs:
        module, _, name = _VERBS[verb].partition(":")
        found = getattr(importlib.import_module(f"ckptman.cli.{module}"), name)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=verb)
        else:
            # What follows the script belongs to the script.
            settings = {"allow_interspersed_args": False} if verb == "submit" else None
            app.command(verb, context_settings=settings)(found)
    return app


def run() -> NoReturn:
    """Run the command line of this process and exit. Called by `ckptman.cli.main`."""
    # Where the shell closed them (`>&-`) they are None, and what is said goes nowhere.
    sys.stdout, sys.stderr = (each or open(os.devnull, "w", encoding="utf-8") for each in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        # A terminal that knows no Unicode gets escapes, not an exception.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. An expected error is one message on stderr."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return stop_writing()
    except (CkptmanError, OSError) as error:
        if os.environ.get(TRACEBACK_ENV) == "1":
            _print_traceback(error)
        complain(message(error))
        return exit_code(error)
    except Exception as error:  # noqa: BLE001 whatever it is: 1, with which Python ends, says "they differ" of a diff
        _print_traceback(error)
        complain(f"this is a bug of ckptman ({type(error).__name__}), not your mistake: please report the above")
        return EXIT_BUG
    return code


def _run(arguments: Sequence[str]) -> int:
    verb = next((each for each in arguments if not each.startswith("-")), "")
    app = make_app([verb]) if verb in _VERBS else make_app()
    try:
        typer.main.get_command(app)(args=list(arguments), prog_name="ckptman")
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else 0
    return 0


def _print_traceback(error: Exception) -> None:
    for part in traceback.format_exception(error):
        typer.echo("\n".join(map(plain, part.rstrip("\n").split("\n"))), err=True)
