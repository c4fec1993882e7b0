"""What is known of programs that save in their own way: the records of their chains, and their newest checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ckptman.errors import CkptmanError
from ckptman.jobs.chain_record import Chain, find_chains
from ckptman.jobs.history import History
from ckptman.jobs.newest_checkpoints import find_newest, latest
from ckptman.runtime.outcome import read_outcome
from ckptman.tools.monitoring.history import Attempt, RunHistory, Stretch


def roots_of_chains(base: Path) -> list[Path]:
    """Return the checkpoint directories of the chains submitted from `base`, without duplicates, active chains last.

    A chain that has not saved yet is left out. Raises: OSError."""
    found: dict[Path, bool] = {}
    for chain in find_chains(base):
        with suppress(CkptmanError):
            for root in _places_of(chain)[:1]:
                found[root] = found.pop(root, False) or chain.state.state in ("active", "paused")
    return sorted(found, key=lambda root: found[root])


def chains_of(root: Path, base: Path) -> list[Chain]:
    """Return the chains submitted from `base` that save under a directory, oldest first. Raises: OSError."""
    root, found = root.resolve(), []
    for chain in find_chains(base):
        with suppress(CkptmanError):
            if any(root == each or root in each.parents or each in root.parents for each in _places_of(chain)):
                found.append(chain)
    return found


def history_of_chains(root: Path, chains: Sequence[Chain], now: float) -> RunHistory | None:
    """Return the history of a program as the records of its chains tell it: when its attempts ran, and what they left.

    An attempt trained from its beginning, as far as anybody but the program can tell, and all that came after its
    newest checkpoint was for nothing. None: no attempt has begun. Raises: CkptmanError, OSError.
    """
    attempts: list[Attempt] = []
    step = 0
    for chain in chains:
        ends, records = chain.ends(), chain.attempts()
        for record, following in zip(records, [*(each.begun_seconds for each in records[1:]), now]):
            begun, end = record.begun_seconds, ends.get(record.number)
            found = latest(end.newest if end else find_newest((str(root),), Path(record.workdir)))
            ended = end.ended_seconds if end else min(chain.last_sign(record, now), following)
            stretch = Stretch(step, begun)
            if found is not None and begun < found.time_seconds <= ended:
                step = max(step, found.step)
                stretch.marks.append((found.time_seconds, step))
            attempts.append(
                Attempt(
                    number=len(attempts) + 1,
                    run_id="",
                    job_id="" if chain.spec.scheduler == "local" else record.job_id,
                    host=record.host,
                    world_size=1,
                    chain=str(chain.folder),
                    launch=str(chain.folder),
                    process=begun,
                    started=begun,
                    first_step=begun,
                    stretches=[stretch],
                    state=end.ending if end else "running",
                    reason=end.reason if end else "",
                    ended=ended if end else None,
                    last=ended,
                )
            )
    if not attempts:
        return None
    note = "it saves in its own way: start-up and saves count as training, up to the newest checkpoint of each attempt"
    return RunHistory(root, "", tuple(attempts), (), (), (), (note,))


def _places_of(chain: Chain) -> list[Path]:
    """Return the checkpoint directories of a chain, the most certain first: the root that its attempts reported, the
    directory of its newest checkpoint, and the directories named at its submission."""
    spec, attempts = chain.spec, chain.attempts()
    outcome = read_outcome(chain.outcome_path(attempts[-1].number)) if attempts else None
    newest = latest(next((end.newest for end in reversed(chain.ends().values()) if end.newest), {}))
    named = [Path(spec.begins_in or spec.workdir, each) for each in spec.progress or spec.places]
    found = [
        *([Path(root)] if (root := History.read(chain).root or (outcome.root if outcome else "")) else []),
        *([Path(newest.path).parent] if newest is not None else []),
        *(each for each in named if each.is_dir()),
    ]
    return [each.resolve() for each in found]
