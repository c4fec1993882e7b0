"""`ckptman pin PATH --why TEXT` and `ckptman unpin PATH`: what no rule may delete."""

from __future__ import annotations

from typing import Annotated

from ckptman.cli import console
from ckptman.cli.options import option
from ckptman.cli.select import PathOrRoot, Step, choose

Why = Annotated[str, option("--why", "TEXT", "Why it is to stay. Required.")]


def pin(path: PathOrRoot, why: Why, step: Step = None) -> None:
    """Keep a checkpoint, whatever the rules of a prune say.

    PATH is one checkpoint, or a root: then it is that of --step, or the newest finite one. The pin is a file beside the
    manifest, and goes with every copy of the checkpoint. Pinned again, it gets the new reason.
    """
    from ckptman.tools import manage

    (entry,) = choose(path, step)
    manage.pin(entry.path, why)
    console.say(f"Pinned step {entry.step}: {console.plain(why.strip())}")


def unpin(path: PathOrRoot, step: Step = None) -> None:
    """Let the rules of a prune decide about a checkpoint again."""
    from ckptman.tools import manage

    (entry,) = choose(path, step)
    was = manage.unpin(entry.path)
    console.say(f"Step {entry.step} is no longer pinned." if was else f"Step {entry.step} was not pinned.")
