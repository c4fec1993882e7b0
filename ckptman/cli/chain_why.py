"""`ckptman chain why`: the cause of an end, its evidence, the reaction of the chain, and the next command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptman.cli import console
from ckptman.errors import EXIT_AGAIN, NotFoundError

if TYPE_CHECKING:
    from ckptman.scheduler.chain_record import Chain, EndRecord
    from ckptman.scheduler.slurm.control import ChainStatus

_REACTIONS = {
    "again": "again: the next attempt starts at once",
    "elsewhere": "elsewhere: the next attempt starts at once, without the node",
    "wait": "wait: the next attempt starts after a pause",
    "count": "count: it counts towards the limit of {crash_limit} crashes without a new checkpoint",
    "hold": "hold: the chain stops, because the next attempt would fail, too",
}


def explain(chain: Chain, seen: ChainStatus, number: int | None, as_json: bool) -> None:
    """Print why an attempt of a chain ended. Raises: NotFoundError (it has not ended)."""
    end = _end_of(chain, seen, number)
    what_next = _what_next(chain, seen, end)
    if as_json:
        facts = end.model_dump(include={"number", "ending", "reason", "cause", "evidence", "reaction", "step"})
        console.say_json({"chain": str(chain.folder), "state": seen.state.state, **facts, "next": what_next})
        return
    begun = next((each.begun_seconds for each in seen.attempts if each.number == end.number), end.ended_seconds)
    at = f" at step {end.step:,}" if end.step else ""
    console.say(f"{console.plain(chain.folder.name)}: {seen.state.state}")
    took = console.age(max(0.0, (end.seen_seconds or end.ended_seconds) - begun))
    console.say(f"attempt {end.number} {end.ending} after {took}{at}")
    why = end.reason
    if not end.cause and end.returncode == EXIT_AGAIN and end.ending == "stopped":
        why = "the program exited with 75, which means: saved, run me again"
    rows = [("cause", f"{end.cause}: {why}" if end.cause else why)]
    evidence = [each for each in end.evidence if each != end.reason]
    rows += [("" if place else "evidence", each) for place, each in enumerate(evidence)]
    if end.ending == "crashed" and end.cause:
        rows.append(("reaction", _REACTIONS[end.reaction].format(crash_limit=chain.spec.crash_limit)))
    if limit := _limit(seen, end):
        rows.append(("chain", limit))
    rows.append(("next", what_next))
    if seen.state.state == "active" and (remedy := _remedy(end)):
        rows.append(("remedy", remedy))
    for title, text in rows:
        console.say(f"  {title:<10}{console.plain(text)}")


def _limit(seen: ChainStatus, end: EndRecord) -> str:
    """Return why a chain has ended or is held, apart from the reason of its last attempt; "" if that is all."""
    if seen.state.state in ("active", "finished"):
        return ""
    limit = seen.state.reason.partition(f"attempt {end.number} {end.ending}:")[0].rstrip("; ")
    return f"{seen.state.state}: {limit}" if limit else ""


def _remedy(end: EndRecord) -> str:
    """Return what a user can do about the cause of an end; "" if there is nothing."""
    from ckptman.scheduler.causes import Cause

    if not end.cause or end.ending == "finished":
        return ""
    remedy = Cause(end.cause, end.reason).remedy.replace("ROOT", end.root or "ROOT")
    return "" if remedy.startswith("nothing") else remedy


def _end_of(chain: Chain, seen: ChainStatus, number: int | None) -> EndRecord:
    if number is not None and number in seen.ends:
        return seen.ends[number]
    if number is not None and any(each.number == number for each in seen.attempts):
        raise NotFoundError(f"attempt {number} of {chain.folder.name} has not ended: ckptman chain show")
    if number is not None:
        raise NotFoundError(f"{chain.folder.name} has no attempt {number}: ckptman chain show lists them")
    if not seen.ends:
        raise NotFoundError(f"no attempt of {chain.folder.name} has ended: ckptman chain show")
    return seen.ends[max(seen.ends)]


def _what_next(chain: Chain, seen: ChainStatus, end: EndRecord) -> str:
    """Return what the user has to do, with the command."""
    from ckptman.cli.chain import why_it_waits
    from ckptman.scheduler.local_record import is_gone

    state, resume = seen.state.state, f"ckptman chain resume {chain.folder.name}"
    if chain.spec.scheduler == "local":
        resume = "submit the command again"
    remedy = _remedy(end) or "remove the cause"
    if state == "finished":
        return "nothing: the run is finished"
    if state == "cancelled":
        return "submit the script again to continue from the newest checkpoint"
    if state == "paused":
        return resume
    if state == "stopped":
        return f"{remedy}, then {resume}"
    if is_gone(chain.spec, seen.state):
        return f"the process that ran it is gone: {resume}"
    if seen.running:
        return f"nothing: job {seen.running[-1][1].id} runs"
    if seen.waiting:
        job = seen.waiting[0][1]
        return f"nothing: job {job.id} waits in the queue{why_it_waits(chain, job)}"
    if chain.spec.scheduler == "local":
        return "nothing: the chain is running"
    return resume if seen.is_known else "ask again: Slurm does not answer now"
