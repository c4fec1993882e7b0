"""Looking at a chain of Slurm jobs, holding it, letting it go on, and ending it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckptman.errors import ConfigError, NotFoundError
from ckptman.jobs.chain_record import Chain, JobRecord, find_chains
from ckptman.jobs.history import History
from ckptman.jobs.slurm.commands import Job, Slurm, ask_queue
from ckptman.jobs.slurm.submission import avoid_nodes, submit_again, submit_next


@dataclass
class ChainStatus(History):
    """A chain as it is now: on disk, and in the queue (`live`: its jobs that wait or run, in order; `is_known`: Slurm
    has answered)."""

    live: list[tuple[JobRecord, Job]] = field(default_factory=list)
    is_known: bool = True

    @property
    def running(self) -> list[tuple[JobRecord, Job]]:
        return [each for each in self.live if not each[1].waits]

    @property
    def waiting(self) -> list[tuple[JobRecord, Job]]:
        return [each for each in self.live if each[1].waits]


def look(chain: Chain, slurm: Slurm) -> ChainStatus:
    """Return a chain as it is. Raises: SchedulerError if Slurm does not answer, for as long as it is asked."""
    return _status(chain, slurm.jobs([each.job_id for each in chain.jobs()]))


def glance(chain: Chain, environ: Mapping[str, str]) -> ChainStatus:
    """Return a chain as it is, at once: Slurm is asked once."""
    return _status(chain, ask_queue([each.job_id for each in chain.jobs()], environ))


def _status(chain: Chain, queue: Mapping[str, Job] | None) -> ChainStatus:
    status, known = ChainStatus.read(chain), queue or {}
    status.live = [
        (each, known[each.job_id]) for each in chain.jobs() if each.job_id in known and not known[each.job_id].over
    ]
    status.is_known = queue is not None
    return status


def cancel(chain: Chain, slurm: Slurm, now: float) -> ChainStatus:
    """End a chain: nothing more starts, and who runs gets SIGTERM and KillWait to save."""
    if chain.state.state in ("active", "paused"):
        chain.turn("cancelled", f"cancelled by {_who()}", now)
    seen = look(chain, slurm)
    slurm.cancel([job.id for _, job in (*seen.waiting, *seen.running)])  # those that wait first: none may start
    return look(chain, slurm)


def hold(chain: Chain, now: float) -> None:
    """Start no further attempt until `resume`, without a word to Slurm: a job that waits finds out when it begins.

    Raises: ConfigError (the chain has ended).
    """
    state = chain.state
    if state.state not in ("active", "paused"):
        raise ConfigError(f"the chain is {state.state} ({state.reason}): there is nothing to pause")
    if state.state == "active":
        chain.turn("paused", f"paused by {_who()}", now)


def pause(chain: Chain, slurm: Slurm, now: float) -> ChainStatus:
    """Start no further attempt until `resume`. The one that runs goes on to its end."""
    hold(chain, now)
    seen = look(chain, slurm)
    for _, job in seen.waiting:
        slurm.hold(job.id)
    return look(chain, slurm)


def resume(chain: Chain, slurm: Slurm, now: float, *, start_over: bool = False) -> ChainStatus:
    """Continue a chain that was paused, or that stopped because of crashes or a limit.

    `start_over`: even if its checkpoints are gone, at step 0. Raises: ConfigError, SchedulerError.
    """
    state = chain.state
    if state.state in ("finished", "cancelled"):
        raise ConfigError(f"the chain is {state.state} ({state.reason}): submit its script again")
    if not start_over and (gone := History.read(chain).lost()) is not None:
        raise ConfigError(
            f"{gone}. Bring it back and resume again, or start over at step 0: ckptman chain resume --start-over"
        )
    seen = look(chain, slurm)
    if state.state != "active" or start_over:
        forgiven = max((each.number for each in seen.attempts if each.number in seen.ends), default=0)
        given_up = forgiven if start_over else state.given_up
        chain.turn("active", f"resumed by {_who()}", now, forgiven=forgiven, given_up=given_up)
    for _, job in seen.waiting:
        if "held" in job.reason.lower():  # by `pause`, or by Slurm after a launch that failed
            slurm.release(job.id)
    avoid_nodes(chain, slurm, [record for record, _ in seen.waiting], now)
    if not seen.live:
        submit_again(chain, slurm, now)
    elif not seen.waiting and chain.spec.mode == "successor":
        record, job = seen.running[-1]
        submit_next(chain, slurm, record.number, job.id, now)
    return look(chain, slurm)


def named(name: str | None, base: Path) -> Chain:
    """A chain by its folder, its name, the id of one of its jobs, or none for the newest one. Raises: NotFoundError."""
    if name is not None and (Path(name) / "chain.json").is_file():
        return Chain(Path(name).resolve())
    chains = find_chains(base)
    if name is None:
        if not chains:
            raise NotFoundError(f"no chain was submitted from {base}: name the folder of one")
        return chains[-1]
    for chain in chains:
        if chain.folder.name == name or any(job.job_id == name for job in chain.jobs()):
            return chain
    raise NotFoundError(f"there is no chain {name!r} of those submitted from {base}: ckptman chain list shows them")


def _who() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"
