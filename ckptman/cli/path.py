"""`ckptman path ROOT`: the path of one checkpoint, for scripts."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptman.cli import console
from ckptman.cli.options import option
from ckptman.cli.select import Root
from ckptman.errors import ConfigError, NotFoundError, plain


def path(
    root: Root,
    latest: Annotated[bool, typer.Option("--latest", help="The newest one that counts: the default.")] = False,
    best: Annotated[
        str | None, option("--best", "METRIC", "The one with the lowest value of a metric, such as loss.")
    ] = None,
    step: Annotated[int | None, option("--step", "N", "The one of this step.")] = None,
    highest: Annotated[bool, typer.Option("--max", help="With --best: the one with the highest value.")] = False,
) -> None:
    """Print the path of one checkpoint: python eval.py "$(ckptman path ROOT --best loss)".

    Only one that counts: it is complete, not known to be damaged, and no rollback left it behind. Exit code 3: there is
    none.
    """
    from ckptman.run import Run

    if latest + (best is not None) + (step is not None) > 1:
        raise ConfigError("--latest, --best and --step exclude each other: name one of them")
    if highest and best is None:
        raise ConfigError("--max says how --best compares: name the metric, as in --best accuracy --max")
    run = Run(root)
    counting = [each for each in run.checkpoints if each.counts]
    missing = "there is no checkpoint that counts"
    if best is not None:
        found = run.best(best, "max" if highest else "min")
        missing = f"no checkpoint has a finite {plain(best)}" if counting else missing
    elif step is not None:
        found = next((each for each in reversed(counting) if each.step == step), None)
        missing = f"there is no checkpoint of step {step} that counts" if counting else missing
    else:
        found = run.latest
    if found is None:
        raise NotFoundError(f"{root}: {missing}: ckptman list {root} shows what is there")
    console.say(str(found.path))
