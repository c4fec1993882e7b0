"""What `--help` prints, at any width from 40 columns up; and what replaces an option that was removed."""

from __future__ import annotations

import shutil
from typing import Any

from typer.core import TyperCommand, TyperGroup

from ckptman.cli.options import OTHERS
from ckptman.errors import ConfigError

LEAST_COLUMNS, MOST_COLUMNS = 40, 100
Panels = dict[str, list[tuple[str, str]]]
"""Of each panel its name, and the rows in it: a name, and what it does."""
_GPU_MEMORY = "ckptman plan no longer estimates GPU memory; use `accelerate estimate-memory`"
REMOVED: dict[tuple[str, str], str] = {
    ("plan", "--config"): "use --params with the number that `python -m ckptman.train --dry-run` prints",
    ("plan", "--set"): "it changed a key of --config; use --params",
    ("plan", "--shard"): "leave it out; the ranks share each save evenly, however the model is sharded",
    ("plan", "--gpu-memory"): _GPU_MEMORY,
    ("plan", "--sequence"): _GPU_MEMORY,
    ("plan", "--micro-batch"): _GPU_MEMORY,
    ("plan", "--vocab"): _GPU_MEMORY,
    ("plan", "--dim"): _GPU_MEMORY,
    ("plan", "--layers"): _GPU_MEMORY,
    ("simulate", "--svg"): "use --json, whose `curve` any plotting program can draw",
    ("probe loader", "--config"): "name a function that makes the loader, such as train.py:make_loader",
    ("probe loader", "--set"): "name a function that makes the loader, such as train.py:make_loader",
    ("probe loader", "--world-size"): "let the function make the loader of one rank",
}
"""(verb, option) -> the rest of the sentence "OPTION was removed: ..."."""


def help_width() -> int:
    """Return the columns that help may take."""
    return min(max(LEAST_COLUMNS, shutil.get_terminal_size().columns), MOST_COLUMNS) - 2


class Verb(TyperCommand):
    """A verb whose options are shown in the panels that they name, and which remembers those it had."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # click's NoSuchOption, of which newer versions of typer have a copy
            option = getattr(error, "option_name", "")
            verb = ctx.command_path.partition(" ")[2]  # `probe loader` of `ckptman probe loader`
            replacement = REMOVED.get((verb, option))
            if replacement is None:
                raise
            raise ConfigError(f"{option} was removed: {replacement}") from None

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write(formatter, _parameters(self, ctx))


class Group(TyperGroup):
    """Verbs in the panels that they name, with all that is said of each."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: Panels = {}
        for name in self.list_commands(ctx):
            if (verb := self.get_command(ctx, name)) is not None:
                panel = getattr(verb, "rich_help_panel", None) or "Commands"
                panels.setdefault(panel, []).append((name, verb.get_short_help_str(limit=1000)))
        _write(formatter, {**panels, **_parameters(self, ctx)})


def _parameters(command: Any, ctx: Any) -> Panels:
    """Return the arguments, and the options by panel: one that names none belongs to that of the one before it."""
    panels: Panels = {}
    panel = OTHERS
    for each in command.get_params(ctx):
        if each.param_type_name == "argument":
            panels.setdefault("Arguments", []).append(((each.metavar or each.name).strip("[]"), each.help or ""))
        elif (record := each.get_help_record(ctx)) is not None:
            panel = getattr(each, "rich_help_panel", None) or panel
            panels.setdefault(panel, []).append(record)
    return panels


def _write(formatter: Any, panels: Panels) -> None:
    for panel, rows in panels.items():
        with formatter.section(panel):
            formatter.write_dl(rows, col_max=min(26, formatter.width // 3))
