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

from ckptman._tracebacks import TRACEBACK_ENV
from ckptman.cli.console import complain, exit_code, message, say, stop_writing
from ckptman.cli.help import Group, Verb, help_width
from ckptman.errors import CkptmanError, ConfigError, NotFoundError, plain

_COMPLETION_WORDS = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
EXIT_BUG = 70
"""EX_SOFTWARE of sysexits.h."""

_VERBS = {
    "list": ("Look", "list:list_checkpoints", "what is there, and whether it counts"),
    "status": ("Look", "status:status", "how runs stand: step, saves, job, chain, and when they end"),
    "report": ("Look", "status:report", "where the hours of runs went, as a table or as a page"),
    "path": ("Look", "select:path", "the path of the newest checkpoint, the best, or that of a step"),
    "show": ("Look", "show:show", "one checkpoint: its origin, tensors and values"),
    "diff": ("Look", "diff:diff", "what changed between two checkpoints"),
    "verify": ("Prove", "verify:verify", "proves that every byte is what was saved, and that it loads"),
    "doctor": ("Prove", "doctor:doctor", "whether a mount is safe and how fast it is; or what is around the job"),
    "probe": ("Prove", "probe:probe_app", "whether the loader of a training keeps up with it"),
    "prune": ("Keep", "prune:prune", "deletes by plan, and clears what crashes left over"),
    "pin": ("Keep", "rollback_and_pin:pin", "keeps a checkpoint whatever the rules say"),
    "unpin": ("Keep", "rollback_and_pin:unpin", "lets the rules decide about it again"),
    "rollback": ("Keep", "rollback_and_pin:rollback", "goes back to an earlier step; what is newer is abandoned"),
    "copy": ("Move", "copy:copy", "copies to another root or object store, every byte read back"),
    "drain": ("Move", "copy:drain", "copies to the tiers of a run"),
    "memory": ("Move", "memory:memory_app", "what runs hold in the memory of a node: shows it, flushes it, removes it"),
    "export": ("Move", "export_and_adopt:export", "a checkpoint, or a part of it, for other programs"),
    "adopt": ("Move", "export_and_adopt:adopt", "makes what plain DCP or torchtitan wrote a checkpoint of ckptman"),
    "plan": ("Plan", "plan:plan", "size, disk, seconds and the interval, before a run spends a GPU hour"),
    "simulate": ("Plan", "simulate:simulate", "plays a month of failures against intervals"),
    "submit": ("Run", "submit:submit", "runs a batch script or a command until it is finished"),
    "chain": ("Run", "chain:chain_app", "shows, follows, holds and ends chains of attempts"),
    "ask": ("Run", "status:ask", "has a running training save, stop, or stop and stay stopped"),
    "template": ("Run", "template:template", "makes a batch script for Slurm"),
}
"""Each verb with its panel, module and function, and what it does: the order and the text of `--help`, for which no
verb is imported."""


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


def _not_imported() -> None:
    """Stand in for a verb that is not the one of this call."""


def make_app(verbs: Iterable[str] = tuple(_VERBS)) -> typer.Typer:
    """Return the command with these verbs; of the others only names and what they do, as each takes time to import."""
    # Formatting by rich costs more to import than a whole listing of 1,000 checkpoints takes.
    app = typer.Typer(
        name="ckptman",
        cls=Group,
        help="Checkpoints of PyTorch training runs: look, prove, prune, and run to the end.",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"], "terminal_width": help_width()},
    )
    app.callback()(_common)
    wanted = set(verbs)
    for verb, (panel, where, does) in _VERBS.items():
        module, _, name = where.partition(":")
        found = getattr(importlib.import_module(f"ckptman.cli.{module}"), name) if verb in wanted else _not_imported
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=verb, short_help=does, rich_help_panel=panel)
        else:
            # What follows the script belongs to the script.
            settings = {"allow_interspersed_args": False} if verb == "submit" else None
            app.command(verb, cls=Verb, short_help=does, rich_help_panel=panel, context_settings=settings)(found)
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
        said = message(error)
        if isinstance(error, (NotFoundError, ConfigError)):
            from ckptman.cli.select import suggestion

            said += suggestion(arguments, said, is_missing=isinstance(error, NotFoundError))
        complain(said)
        return exit_code(error)
    except Exception as error:  # noqa: BLE001 whatever it is: 1, with which Python ends, says "they differ" of a diff
        _print_traceback(error)
        complain(f"this is a bug of ckptman ({type(error).__name__}), not your mistake: please report the above")
        return EXIT_BUG
    return code


def _run(arguments: Sequence[str]) -> int:
    words: Iterable[str] = arguments
    if "_CKPTMAN_COMPLETE" in os.environ:  # a shell asks what may come next, and says there what it has
        words = " ".join(os.environ.get(name, "") for name in _COMPLETION_WORDS).split()[1:]
        os.environ["COLUMNS"] = "10000"  # typer folds what is said of an option, and fish takes each line for a word
    app = make_app([next((each for each in words if not each.startswith("-")), "")])
    try:
        typer.main.get_command(app)(args=list(arguments), prog_name="ckptman")
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else 0
    return 0


def _print_traceback(error: Exception) -> None:
    for part in traceback.format_exception(error):
        typer.echo("\n".join(map(plain, part.rstrip("\n").split("\n"))), err=True)
