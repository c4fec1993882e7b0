"""The command `ckptman`: its verbs, and how every one of them ends."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from ckptman.cli.adopt import adopt
from ckptman.cli.chain import chain_app
from ckptman.cli.copy import copy
from ckptman.cli.diff import diff
from ckptman.cli.doctor import doctor
from ckptman.cli.drain import drain
from ckptman.cli.export import export
from ckptman.cli.list import list_checkpoints
from ckptman.cli.pin import pin, unpin
from ckptman.cli.plan import plan
from ckptman.cli.prune import prune
from ckptman.cli.rollback import rollback
from ckptman.cli.show import show
from ckptman.cli.simulate import simulate
from ckptman.cli.submit import submit
from ckptman.cli.template import template
from ckptman.cli.text import complain, message, plain, say, stop_writing
from ckptman.cli.verify import verify
from ckptman.errors import CkptmanError, RootError

TRACEBACK_ENV = "CKPTMAN_TRACEBACK"
"""Set to 1 to see the traceback of an error, for a bug report."""
EXIT_BUG = 70
"""EX_SOFTWARE of sysexits.h."""

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
app.command("diff")(diff)
app.command("export")(export)
app.command("adopt")(adopt)
app.command("copy")(copy)
app.command("drain")(drain)
app.command("prune")(prune)
app.command("pin")(pin)
app.command("unpin")(unpin)
app.command("plan")(plan)
app.command("simulate")(simulate)
app.command("rollback")(rollback)
app.command("doctor")(doctor)
app.add_typer(chain_app, name="chain")
app.command("submit", context_settings={"allow_interspersed_args": False})(submit)
app.command("template")(template)


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
    # Where the shell closed them (`>&-`) they are None, and what is said goes nowhere.
    sys.stdout, sys.stderr = (each or open(os.devnull, "w", encoding="utf-8") for each in (sys.stdout, sys.stderr))
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
    except Exception as error:  # noqa: BLE001 whatever it is: 1, with which Python ends, says "they differ" of a diff
        _print_traceback(error)
        complain(f"this is no error of yours but a bug of ckptman ({type(error).__name__}): please report the above")
        return EXIT_BUG
    return code


def _run(arguments: Sequence[str]) -> int:
    try:
        typer.main.get_command(app)(args=list(arguments), prog_name="ckptman")
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else 0
    return 0


def _fail(error: Exception, code: int) -> int:
    if os.environ.get(TRACEBACK_ENV) == "1":
        _print_traceback(error)
    complain(message(error))
    return code


def _print_traceback(error: Exception) -> None:
    for part in traceback.format_exception(error):
        typer.echo("\n".join(map(plain, part.rstrip("\n").split("\n"))), err=True)
