"""What became of runs, in numbers: the ledger, saves, health and checkpoints of each."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ckptman.errors import CkptmanError, NotFoundError
from ckptman.jobs.slurm.accounting import JobTimes, ask_accounting, jobs_of_chains, merge
from ckptman.storage.catalog.catalog import Catalog, Entry
from ckptman.tools.monitoring.history import RunHistory, chain_folders, ran, read_history
from ckptman.tools.monitoring.ledger import KINDS, Kind, Ledger, Now, make_ledger
from ckptman.tools.monitoring.other_programs import chains_of, history_of_chains
from ckptman.tools.monitoring.status import Status, read_status


@dataclass(frozen=True)
class RunReport:
    """One run. `entries`: its complete checkpoints, oldest first."""

    root: Path
    history: RunHistory
    ledger: Ledger
    status: Status
    entries: tuple[Entry, ...]

    def health(self) -> list[Mapping[str, Any]]:
        """Return the events that tell how devices and nodes were, oldest first."""
        return [event for event in self.history.events if event.get("event") == "health"]

    def breaches(self) -> list[Mapping[str, Any]]:
        """Return what was found wrong with devices, nodes and ranks, oldest first."""
        return [event for event in self.history.events if event.get("event") in ("health_breach", "straggler")]


def read_reports(roots: Sequence[str | os.PathLike[str]], now: float, *, slurm: bool = True) -> list[RunReport]:
    """Return what became of some runs. `slurm`: ask it, too: its queue, and its accounting, where there is one.

    Raises: NotFoundError (no run was started in a root), ConfigError (it is one checkpoint), OSError.
    """
    histories = [_history(Path(root), now) for root in roots]
    chains = [jobs_of_chains(chain_folders(each.attempts)) for each in histories]
    ids = {job.job_id for found, _ in chains for job in found}
    ids |= {attempt.job_id for history in histories for attempt in history.attempts}
    slurm_jobs, silence = ask_accounting(ids) if slurm else ([], "")
    reports = []
    for history, (found, notes), status in zip(histories, chains, read_status(roots, now, slurm=slurm)):
        if silence:
            notes = [*notes, f"Slurm's accounting did not answer: {silence}"]
        own = own_jobs(found, history)
        ids = {job.job_id for job in own} | {attempt.job_id for attempt in history.attempts}
        own = merge(own, [job for job in slurm_jobs if job.job_id in ids])
        history = replace(history, jobs=tuple(own), notes=(*history.notes, *notes))
        reports.append(_report(history, status, now))
    return reports


def _history(root: Path, now: float) -> RunHistory:
    try:
        return read_history(root, now)
    except NotFoundError:
        found = history_of_chains(root, chains_of(root, Path.cwd()), now)
        if found is None:
            raise
        return found


def own_jobs(jobs: Sequence[JobTimes], history: RunHistory) -> list[JobTimes]:
    """Return the jobs of chains without those that trained in another root, as a later phase of a training does."""
    ours = {job.root for job in jobs for attempt in history.attempts if ran(job, attempt)} - {""}
    return [job for job in jobs if not job.root or not ours or job.root in ours]


def _report(history: RunHistory, status: Status, now: float) -> RunReport:
    durable, entries = status.saved_step, tuple[Entry, ...]()
    if history.events:
        try:
            entries = tuple(Catalog(history.root).complete())
            durable = entries[-1].step if entries else 0
        except CkptmanError as error:
            history = replace(history, notes=(*history.notes, str(error)))
    is_now: Now = "running" if status.state in ("running", "silent") else "over"
    if status.state == "queued" or status.state == "starting":
        is_now = status.state
    ledger = make_ledger(history, now, durable_step=durable, is_now=is_now)
    return RunReport(history.root, history, ledger, status, entries)


def as_data(report: RunReport) -> dict[str, Any]:
    """Return a report for programs. Times in unix seconds, durations in seconds."""
    ledger = report.ledger
    data = asdict(ledger)
    parts = {name: data.pop(name) for name in ("attempts", "spans", "notes")}
    derived = {name: getattr(ledger, name) for name in ("total_seconds", "held_seconds", "goodput")}
    return {
        "root": str(report.root),
        "run_id": report.history.run_id,
        "status": asdict(report.status),
        "ledger": data | derived,
        "endings": endings(ledger),
        **parts,
        "saves": [asdict(save) | {"attempt": each.number} for each in report.history.attempts for save in each.saves],
        "health": report.health(),
        "breaches": report.breaches(),
        "checkpoints": [
            {"step": each.step, "bytes": each.require_manifest().total_bytes, "time_seconds": each.time_seconds}
            for each in report.entries
        ],
    }


def endings_text(ledger: Ledger) -> str:
    """Return how many attempts ended in which way, in words."""
    return ", ".join(f"{count} {ending}" for ending, count in endings(ledger).items())


def endings(ledger: Ledger) -> dict[str, int]:
    """Return how many attempts ended in which way, the most frequent first."""
    return dict(Counter(attempt.ending for attempt in ledger.attempts).most_common())


def shares(seconds: Mapping[Kind, float]) -> list[tuple[str, str, float, float]]:
    """Return training and the kinds that took any time: name, title, seconds, share of all of it."""
    total = sum(seconds.values())
    shown = [kind for kind in KINDS if total and (kind == "training" or seconds[kind] > 0)]
    return [(kind, KINDS[kind], seconds[kind], seconds[kind] / total) for kind in shown]
