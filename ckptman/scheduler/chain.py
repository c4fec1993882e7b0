"""A chain: attempts one after another, until the run is finished; and the seam to where they run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

from ckptman.errors import EXIT_AGAIN, EXIT_OK, CorruptError, ExistsError, NotFoundError, RootError, SchedulerError
from ckptman.io.durable_files import DISK
from ckptman.policies.resubmit import Attempt, Ending, decide
from ckptman.policies.retention_rules import is_known_time
from ckptman.runtime.outcome import ATTEMPT_ENV, OUTCOME_ENV, Outcome, read_outcome

CHAINS = "ckptman-chains"
"""The folder that holds chains, in the directory where they were submitted."""
Say = Callable[[str], None]


class Scheduler(Protocol):
    """Runs one attempt at a time. No wider than `run_chain` needs, which is its only caller."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def run_attempt(self, command: Sequence[str], env: Mapping[str, str]) -> int:
        """Run `command` to its end, with exactly the environment `env`; its exit code, or -n if signal n killed it.

        When it returns, no process of the attempt is alive. Raises: SchedulerError if the command cannot be started.
        """
        ...

    def stop_asked(self) -> signal.Signals | None:
        """Return the signal that asked the whole chain to end, or None."""
        ...


def patient(say: Say) -> Say:
    """Return the same `say`, which does not mind that nobody can hear it: after a SIGHUP the terminal is gone."""

    def tell(text: str) -> None:
        try:
            say(text)
        except OSError:
            pass

    return tell


def run_chain(
    scheduler: Scheduler,
    command: Sequence[str],
    chain_dir: Path,
    *,
    say: Say,
    crash_limit: int = 3,
    max_attempts: int | None = None,
    stall_limit: int | None = None,
    progress: Callable[[str], int] | None = None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Run `command` again and again until it is finished. Exit code 0: finished; 75: asked to stop, run it again.

    How an attempt ended is read from the outcome it wrote to `chain_dir`, and only without one from its exit code.
    `progress` tells the newest commit sequence under a root, 0 if this chain committed nothing there (default:
    `newest_sequence` since now). `say` hears one line per attempt. `environ` defaults to that of this process.

    Raises: SchedulerError (`crash_limit` attempts in a row crashed with no new checkpoint, or `stall_limit` ended so in
    whatever way, the last of `max_attempts` crashed, the checkpoints are gone, or the command cannot be started),
    ExistsError (`chain_dir` belongs to an earlier chain).
    Called by `ckptman submit --scheduler local`.
    """
    tell = patient(say)
    progress = progress or partial(newest_sequence, since_seconds=time.time())
    environ = os.environ if environ is None else environ
    chain_dir = _fresh(chain_dir)
    attempts: list[Attempt] = []
    root = ""
    with scheduler:
        while (stop := scheduler.stop_asked()) is None:
            number = len(attempts) + 1
            outcome_file = chain_dir / f"outcome-{number}.json"
            marks = {ATTEMPT_ENV: str(number), OUTCOME_ENV: str(outcome_file)}
            returncode = scheduler.run_attempt(command, {**environ, **marks})
            outcome = _outcome(outcome_file, tell)
            ending, reason = judge(returncode, outcome)
            root_before, root = root, outcome.root if outcome else root
            before = attempts[-1].committed_sequence if attempts else 0
            attempts.append(Attempt(number, ending, reason, _progress(progress, root, before, tell)))
            following = decide(attempts, crash_limit, max_attempts, stall_limit=stall_limit)
            tell(following.reason)
            if ending == "finished":
                return EXIT_OK
            if before and root == root_before and not attempts[-1].committed_sequence and not newest_sequence(root):
                raise SchedulerError(f"the chain ends: {gone_text(root)}")
            if ending == "stopped" and number == max_attempts:
                return EXIT_AGAIN
            if not following.again and scheduler.stop_asked() is None:
                raise SchedulerError(f"the chain ends: {following.reason}. Remove the cause and submit again")
    tell(f"the chain ends, because {stop.name} asked for it: submit again to go on from the newest checkpoint")
    return EXIT_AGAIN


def judge(returncode: int, outcome: Outcome | None) -> tuple[Ending, str]:
    """Return how an attempt ended, and why. What it wrote wins over its exit code, which launchers and scripts swallow.

    An outcome that still says "running" was left by an attempt that was killed: exit code 0 is then no proof of an end.
    """
    code = _describe(returncode)
    if outcome is None:
        known: dict[int, tuple[Ending, str]] = {EXIT_OK: ("finished", code), EXIT_AGAIN: ("stopped", code)}
        return known.get(returncode, ("crashed", code))
    if outcome.state == "finished":
        return "finished", outcome.reason
    if outcome.state == "stopped":
        return "stopped", outcome.reason
    if outcome.state == "failed":
        return "crashed", f"{outcome.reason} ({code})"
    if returncode == EXIT_AGAIN:
        return "stopped", code
    return "crashed", f"{code}, and the run did not say that it ended"


def newest_sequence(root: str, since_seconds: float = 0.0) -> int:
    """Commit sequence of the newest complete checkpoint under `root`; 0 if none was made since `since_seconds` (unix).

    Raises: RootError.
    """
    from ckptman.catalog.catalog import Catalog

    try:
        complete = Catalog(root).complete()
    except NotFoundError:
        return 0
    newest = complete[-1].require_manifest() if complete else None
    if newest is None or (is_known_time(newest.time_seconds) and newest.time_seconds < since_seconds):
        return 0
    return newest.sequence


def gone_text(root: str) -> str:
    """Say that no checkpoint is left of those that attempts made under `root`: another one would start over."""
    return f"{root} held checkpoints of earlier attempts, and holds none now: was it moved or deleted?"


def new_chain_dir(base: Path, now: time.struct_time, pid: int) -> Path:
    """A name for the folder of a new chain: `<base>/ckptman-chains/20261121-150300-4711`."""
    return base / CHAINS / f"{time.strftime('%Y%m%d-%H%M%S', now)}-{pid}"


def _fresh(chain_dir: Path) -> Path:
    chain_dir = Path(chain_dir).resolve()  # an attempt may change its working directory
    DISK.make_folders(chain_dir)
    # An outcome of an earlier chain would be read as that of an attempt that died before it wrote one.
    if any(chain_dir.glob("outcome-*.json")):
        raise ExistsError(f"{chain_dir} holds the outcomes of an earlier chain: name a new folder, or remove this one")
    return chain_dir


def _outcome(path: Path, tell: Say) -> Outcome | None:
    try:
        return read_outcome(path)
    except CorruptError as error:
        tell(f"{error}; going by the exit code")
        return None


def _progress(progress: Callable[[str], int], root: str, before: int, tell: Say) -> int:
    if not root:
        return before
    try:
        return progress(root)
    except RootError as error:
        tell(f"{error}; counted as no progress")
        return before


def _describe(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"
