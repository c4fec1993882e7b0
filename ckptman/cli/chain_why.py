"""`ckptman chain why`: the cause of an end, its evidence, the reaction of the chain, and the next command."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ckptman.cli import console
from ckptman.errors import EXIT_AGAIN, NotFoundError

if TYPE_CHECKING:
    from ckptman.jobs.chain_record import AttemptRecord, Chain, EndRecord
    from ckptman.jobs.slurm.control import ChainStatus

_ENDINGS = {"crashed": "crashed", "interrupted": "was interrupted", "stopped": "stopped", "finished": "finished"}
_REACTIONS = {
    "again": "no added delay before the next attempt",
    "elsewhere": "the next attempt does not use the node; no added delay",
    "wait": "the next attempt starts after a pause: 5 min at first, then longer",
    "count": "it counts towards the limit of {limit} crashes in a row without a new checkpoint",
    "hold": "the chain stops: {why}",
}


def explain(chain: Chain, seen: ChainStatus, number: int | None, as_json: bool) -> None:
    """Print why an attempt of a chain ended. Raises: NotFoundError (it has not ended)."""
    end = _end_of(chain, seen, number)
    what_next = _what_next(chain, seen, end)
    if as_json:
        facts = end.model_dump(include={"number", "ending", "reason", "cause", "evidence", "reaction", "step"})
        console.say_json({"chain": str(chain.folder), "state": seen.state.state, **facts, "next": what_next})
        return
    attempt = next((each for each in seen.attempts if each.number == end.number), None)
    console.say(f"{console.plain(chain.folder.name)}: {seen.state.state}", _head(attempt, end))
    why = end.reason
    if not end.cause and end.returncode == EXIT_AGAIN and end.ending == "stopped":
        why = "the program exited with 75, which means: saved, run me again"
    rows = [("cause", f"{why} [{end.cause}]" if end.cause else why)]
    evidence = [each for each in end.evidence if each not in end.reason]
    rows += [("" if place else "evidence", each) for place, each in enumerate(evidence)]
    if attempt is not None and attempt.log and end.ending == "crashed":
        rows.append(("log", attempt.error_log or attempt.log))
    if end.ending == "crashed" and end.cause and not _limit(seen, end):
        rows.append(("reaction", _reaction(chain, seen, end)))
    if end.bad_nodes:
        rows.append(
            ("nodes", "not used for a day: " + ", ".join(f"{node} ({why})" for node, why in end.bad_nodes.items()))
        )
    if limit := _limit(seen, end):
        rows.append(("chain", limit))
    rows.append(("next", what_next))
    if seen.state.state == "active" and (remedy := _remedy(chain, end)):
        rows.append(("you can", remedy))
    console.say(*(f"  {title:<10}{console.plain(text)}" for title, text in rows))


def _head(attempt: AttemptRecord | None, end: EndRecord) -> str:
    """Say which attempt ended, where, after how long, and what it left."""
    where = took = ""
    if attempt is not None:
        where = f" (job {attempt.job_id} on {console.plain(attempt.nodes)})" if attempt.job_id else ""
        took = f" after {console.age(max(0.0, (end.seen_seconds or end.ended_seconds) - attempt.begun_seconds))}"
    left = {True: "it left a new checkpoint", False: "it left no new checkpoint", None: ""}[end.committed]
    step = f"step {end.step:,}" if end.step else ""
    return f"attempt {end.number}{where} {_ENDINGS[end.ending]}{took}" + "".join(
        f"; {each}" for each in (step, left) if each
    )


def _reaction(chain: Chain, seen: ChainStatus, end: EndRecord) -> str:
    limit = chain.spec.crash_limit
    if end.reaction == "count" and end.number == max(seen.ends):
        if crashes := seen.following(time.time()).crashes:
            return f"crash {crashes} of {limit} in a row without a new checkpoint; the chain stops at {limit}"
        if end.committed:
            return "no added delay before the next attempt, because there is a new checkpoint"
    why = "the next attempt would most likely fail in the same way"
    before = seen.ends.get(end.number - 1)
    if before is not None and before.cause == end.cause:
        why = "the same error twice in a row, without a new checkpoint"
    return _REACTIONS[end.reaction].format(limit=limit, why=why)


def _limit(seen: ChainStatus, end: EndRecord) -> str:
    """Return why a chain has ended or is held, apart from the reason of its last attempt; "" if that is all."""
    if seen.state.state in ("active", "finished") or end.number != max(seen.ends):
        return ""
    limit = seen.state.reason.partition(f"attempt {end.number} {end.ending}:")[0].rstrip("; ")
    return f"{seen.state.state}: {limit}" if limit else ""


def _remedy(chain: Chain, end: EndRecord) -> str:
    """Return what a user can do about the cause of an end; "" if there is nothing."""
    from ckptman.jobs.causes import Cause

    if not end.cause or end.ending == "finished":
        return ""
    remedy, name = Cause(end.cause, end.reason).remedy, chain.folder.name
    commands = {
        "space": f"ckptman prune {end.root}" if end.root else "",
        "nccl": f"ckptman status {end.root}" if end.root else "",
        "cancelled": f"ckptman chain cancel {name}",
    }
    if remedy.startswith("nothing"):
        return ""
    command = commands.get(end.cause, f"ckptman chain logs {name} --attempt {end.number}" if "log" in remedy else "")
    return f"{remedy}: {command}" if command else remedy


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
    """Return what the chain does, or what the user has to do, with the command."""
    from ckptman.cli.chain import why_it_waits
    from ckptman.jobs.chain_record import is_gone

    state, resume = seen.state.state, f"ckptman chain resume {chain.folder.name}"
    if chain.spec.scheduler == "local":
        resume = "submit the command again"
    if state == "finished":
        return "nothing: the run is finished"
    if state == "cancelled":
        return "submit the script again to continue from the newest checkpoint"
    if state == "paused":
        return resume
    if state == "stopped":
        return f"{_remedy(chain, end) or 'remove the cause'}; then {resume}"
    if is_gone(chain.spec, seen.state):
        return f"the process that ran the chain is gone: {resume}"
    if seen.running:
        return f"nothing to do: job {seen.running[-1][1].id} runs"
    if seen.waiting:
        job = seen.waiting[0][1]
        return f"nothing to do: job {job.id} waits in the queue{why_it_waits(seen, job)}"
    if chain.spec.scheduler == "local":
        return "nothing to do: the chain continues"
    return resume if seen.is_known else "ask again: Slurm does not answer now"
