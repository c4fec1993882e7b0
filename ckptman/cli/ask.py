"""`ckptman ask ROOT save|stop|hold`: a request to the run that trains in a root."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from ckptman.cli import console
from ckptman.cli.options import option, parse_seconds
from ckptman.cli.select import Root
from ckptman.errors import CkptmanError, ConfigError, NotFoundError
from ckptman.storage.format.paths import Ask

if TYPE_CHECKING:
    from ckptman.storage.catalog.liveness import Owner
    from ckptman.tools.monitoring.status import Status

POLL_SECONDS = 0.5
_MEANING = {
    "save": "save at its next step",
    "stop": "save at its next step and stop",
    "hold": "save at its next step, stop, and stay stopped",
}


def ask(
    root: Root,
    what: Annotated[str, typer.Argument(metavar="save|stop|hold", show_default=False, help="The request.")],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it is done, and print the step.")] = False,
    timeout: Annotated[str, option("--timeout", "TIME", "With --wait: the longest wait (default: 10min).")] = "10min",
) -> None:
    """Ask the run that trains in ROOT to save, or to save and stop.

    save: save at the next step, and continue. stop: do what the run does at a stop signal, which is to save and exit
    with code 75 unless it has save_on_stop=False; a chain starts the next attempt. hold: as stop, but the chain starts
    no attempt until ckptman chain resume.

    The request is a file in ROOT, so this works from any machine and container that can write there.
    """
    from ckptman.runtime.requests import leave
    from ckptman.storage.catalog.writer_lock import read_owner
    from ckptman.tools.monitoring.status import read_status

    if what not in get_args(Ask):
        raise ConfigError(f"the request is save, stop or hold, not {what!r}")
    seconds = parse_seconds("--timeout", timeout)
    owner = read_owner(root)
    (run,) = read_status([root], time.time())
    if run.trouble:
        raise NotFoundError(run.trouble)
    if run.state not in ("running", "silent") or owner is None or read_owner(root) != owner:  # it may just have ended
        raise NotFoundError(f"no run is training in {root}: see ckptman status {root}")
    if what == "hold":
        _hold(run)
    request = leave(root, cast(Ask, what), owner)
    console.say(f"Asked attempt {run.attempt} on {console.plain(owner.host)} to {_MEANING[what]}.")
    if wait:
        _report(_answer(root, request, owner, seconds))


def _hold(run: Status) -> None:
    """Have the chain of a run start no further attempt, and say how it continues."""
    if not run.chain:
        console.say("The run is in no chain: hold is the same as stop.")
        return
    from ckptman.jobs.chain_record import Chain
    from ckptman.jobs.slurm.control import hold

    chain = Chain(Path(run.chain))
    hold(chain, time.time())
    name = console.plain(run.chain)
    then = f"ckptman chain resume {name}" if chain.spec.scheduler == "slurm" else "submit its command again"
    console.say(f"The chain is paused. To continue it: {then}")


def _answer(root: Path, request: str, owner: Owner, timeout_seconds: float) -> Mapping[str, Any]:
    from ckptman.policies.intervals import duration_text
    from ckptman.runtime.requests import answer
    from ckptman.storage.catalog.writer_lock import owner_lives

    until = time.monotonic() + timeout_seconds
    while True:
        if (found := answer(root, request)) is not None:
            return found
        if not owner_lives(root, owner):
            if (found := answer(root, request)) is not None:  # it comes before the end
                return found
            raise CkptmanError("the attempt ended before it carried out the request: ckptman status shows how")
        if time.monotonic() > until:
            raise CkptmanError(
                f"no answer within {duration_text(timeout_seconds)}: if the run is alive, it carries the request out "
                f"when a step ends"
            )
        time.sleep(POLL_SECONDS)


def _report(answer: Mapping[str, Any]) -> None:
    done, step = answer.get("done"), answer.get("step")
    if done == "failed":
        raise CkptmanError(f"failed at step {step}: the journal and the log of the run have the reason")
    lines = {"saved": f"Saved step {step}.", "stopped": f"Stopped after step {step}."}
    console.say(lines.get(str(done), f"The run finished at step {step} before that."))
