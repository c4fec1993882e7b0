"""How an attempt ended, written to disk: a launcher may swallow the exit code (torchrun always does).

And beside it the nodes that had better not be used again, which later attempts of the chain leave out.

An attempt has a number that none had before: checkpoints on disk, in tiers and in memory are compared by them. And
torchrun may start ranks anew (`--max-restarts`): what it makes of exit codes, and how it is told not to.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from ckptman.errors import EXIT_AGAIN, EXIT_OK, CkptmanError, ConfigError, CorruptError, masked
from ckptman.runtime.journal import read_journal
from ckptman.storage.format.paths import DOT, journal_path, outcome_path
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.safe_open import read_regular

OUTCOME_ENV = "CKPTMAN_OUTCOME"
"""Where a chain asks the outcome of this attempt to be written, besides the run's own place."""
ATTEMPT_ENV = "CKPTMAN_ATTEMPT"
"""Number of this attempt in its chain: 1, 2, ..."""
CHAIN_ENV = "CKPTMAN_CHAIN"
"""The folder of the chain, for whoever runs in one of its attempts."""

MOST_BYTES = 1024 * 1024
"""No outcome is larger: its one long text is the message of an error, and is cut where that is longer."""
_MOST_REASON = 64 * 1024
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BESIDE, _LONGEST_REASON = ".node-", 500
State = Literal["running", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class Outcome:
    """What is known about an attempt. `running` is written at its start: if it is still there, the attempt was killed.

    `step` (optimizer steps completed), `root` (absolute path of the checkpoint root), `time_seconds` (unix).
    """

    state: State
    step: int
    reason: str
    exit_code: int
    root: str
    attempt: int
    time_seconds: float
    pid: int
    host: str


_TYPES: dict[str, tuple[type, ...]] = {
    "state": (str,),
    "step": (int,),
    "reason": (str,),
    "exit_code": (int,),
    "root": (str,),
    "attempt": (int,),
    "time_seconds": (int, float),
    "pid": (int,),
    "host": (str,),
}


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Put the outcome at `path`, durably and atomically. Called by the leader. Raises: OSError.

    What looks like a secret in its reason, which may be the text of any error, is masked: others may read this.
    """
    outcome = replace(outcome, reason=masked(outcome.reason))
    # A chain's, or in a root whose mount may be away.
    (DISK.make_folder_if_missing if path.parent.name == DOT else DISK.make_folders)(path.parent)
    said = {**asdict(outcome), "reason": outcome.reason[:_MOST_REASON]}
    DISK.replace_file(path, json.dumps(said, indent=1).encode() + b"\n")


def read_outcome(path: Path) -> Outcome | None:
    """Read the outcome at `path`; None if there is none. Keys that a later version added are left out.

    Raises: CorruptError. Called by whoever decides about the next attempt.
    """
    try:
        data = read_regular(path, MOST_BYTES, follow=True, remedy="remove it")
    except FileNotFoundError:
        return None
    try:
        values = json.loads(data)
        fields = {name: values[name] for name in _TYPES}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _garbage(path, f"{type(error).__name__}: {error}") from None
    for name, kinds in _TYPES.items():
        if not isinstance(fields[name], kinds):
            raise _garbage(path, f"{name} is {fields[name]!r}")
    if fields["state"] not in get_args(State):
        raise _garbage(path, f"state is {fields['state']!r}")
    return Outcome(**fields)


def is_dead(outcome: Outcome) -> bool:
    """Return whether the process that wrote an outcome is known to have ended: it ran on this machine."""
    return outcome.host == socket.gethostname() and not Path(f"/proc/{outcome.pid}").exists()


def own_outcome(root: Path) -> Outcome | None:
    """Read the outcome in a root; None if there is none, or links lead elsewhere. Raises: CorruptError, OSError."""
    path = outcome_path(root)
    return None if path.is_symlink() or path.parent.is_symlink() else read_outcome(path)


def attempt_number(environ: Mapping[str, str]) -> int:
    """Return the number of this attempt, from 1: set by a ckptman chain, else counted by Slurm's requeues.

    Raises: ConfigError.
    """
    for name, first in ((ATTEMPT_ENV, 0), ("SLURM_RESTART_COUNT", 1)):
        text = environ.get(name, "")
        if not text:
            continue
        if not (text.isascii() and text.isdigit()) or int(text) + first < 1:
            raise ConfigError(f"{name} is {text!r}, not the number of an attempt: unset it")
        return int(text) + first
    return 1


def report_node(node: str, reason: str, environ: Mapping[str, str]) -> None:
    """Tell the chain that a node is bad, and why. Nothing where there is no chain. Raises: OSError.

    A batch script can do so too: `echo "why" > "$CKPTMAN_OUTCOME.node-$SLURMD_NODENAME"`. Any rank may call it.
    """
    asked_for = environ.get(OUTCOME_ENV)
    if asked_for and _NODE.fullmatch(node):
        DISK.replace_file(Path(f"{asked_for}{_BESIDE}{node}"), reason[:_LONGEST_REASON].encode())


def reported_nodes(outcome: Path) -> dict[str, str]:
    """Return the nodes that an attempt reported beside its outcome, and why. Raises: OSError."""
    start = outcome.name + _BESIDE
    found = {}
    for path in sorted(outcome.parent.iterdir()):
        name = path.name.removeprefix(start)
        if path.name.startswith(start) and _NODE.fullmatch(name):
            with path.open("rb") as file:
                text = file.read(_LONGEST_REASON).decode(errors="replace")
            found[name] = " ".join(text.split()) or "it was reported"
    return found


def this_node(environ: Mapping[str, str]) -> str:
    """Return the name that Slurm, or else the machine, gives to the node of this process."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def _garbage(path: Path, why: str) -> CorruptError:
    return CorruptError(f"{path} is not an outcome that ckptman wrote ({why}): remove it")


_MOST_ATTEMPTS = 10**6
"""What claims to have a higher number is damaged."""


def highest_attempt(root: Path, saved_by: Iterable[int]) -> int:
    """Return the highest number that anything of a root tells of: its journal, outcome and rollbacks, and those that
    saved its checkpoints, which may be in its tiers. 0: there was no attempt. Raises: as `read_rollbacks`; OSError."""
    from ckptman.storage.catalog.rollback_records import read_rollbacks  # pydantic, which a chain does without

    numbers = list(saved_by)
    numbers += [each.attempt for each in read_rollbacks(root).values() if each.attempt is not None]
    with contextlib.suppress(CkptmanError):  # gone, or damaged: the others tell
        events = read_journal(journal_path(root))[0]
        # Not all starts are in what is read of a long journal; each event says of which attempt it is.
        numbers += [each["attempt"] for each in events if type(each.get("attempt")) is int]
        numbers.append(sum(each.get("event") == "attempt_started" for each in events))
    with contextlib.suppress(CkptmanError, OSError):
        outcome = own_outcome(root)
        numbers += [] if outcome is None else [outcome.attempt]
    return max((each for each in numbers if each < _MOST_ATTEMPTS), default=0)


_RUN_ID, _MOST_RESTARTS = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS"
_NAMES = ("torchrun", "torch.distributed.run", "ckptman.train.torchrun")
"""Among the first words of its command line; the first may be a path."""


def restarts_ranks(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a worker of a torchrun that starts its workers anew when one fails."""
    most = environ.get(_MOST_RESTARTS, "")
    return bool(environ.get(_RUN_ID)) and most.isdecimal() and int(most) > 0


def code_for_again(environ: Mapping[str, str]) -> int:
    """Return the exit code of a rank that has saved and wants to be run again: 75.

    Under a torchrun that restarts ranks it is 0. Any other code is a failure to it: it would start all ranks anew, and
    itself it ends with 0 or 1 in any case. The outcome on disk says that the run has stopped.
    """
    return EXIT_OK if restarts_ranks(environ) else EXIT_AGAIN


def launch_of(environ: Mapping[str, str]) -> str:
    """Return what tells this launch, with all its restarts of ranks, from others; "" where ranks are not restarted."""
    if not restarts_ranks(environ):
        return ""
    return f"{environ[_RUN_ID]}.{environ.get('SLURM_RESTART_COUNT') or 0}"


def end_launcher_at_exit(environ: Mapping[str, str]) -> None:
    """Have the torchrun of this node end, instead of starting its ranks anew, when this process has told its error."""
    if restarts_ranks(environ):
        atexit.register(_end_launcher, os.getpid())


def _end_launcher(pid: int) -> None:
    import psutil

    if os.getpid() != pid:  # a fork's exit is not this rank's
        return
    with suppress(psutil.Error):
        for parent in psutil.Process().parents():
            if any(Path(word).name in _NAMES for word in parent.cmdline()[:4]):
                parent.send_signal(signal.SIGTERM)
                return
