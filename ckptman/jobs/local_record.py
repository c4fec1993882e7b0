"""The records of a chain of this machine, as a chain of Slurm jobs has them: who looks at one knows the other."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from ckptman.errors import CkptmanError, CorruptError, ExistsError, NotFoundError, masked
from ckptman.jobs.attempt_log import logs_of_this_process
from ckptman.jobs.causes import Cause
from ckptman.jobs.chain import Say
from ckptman.jobs.chain_record import AttemptRecord, Chain, ChainState, EndRecord, Spec, State
from ckptman.jobs.progress import Left
from ckptman.policies.resubmit import Attempt
from ckptman.runtime.outcome import Outcome, this_node


def is_running(spec: Spec) -> bool | None:
    """Return whether the process is alive that runs a chain of a machine; None where that is another machine."""
    if spec.host != socket.gethostname():
        return None
    with suppress(psutil.Error):
        return abs(psutil.Process(spec.pid).create_time() - spec.pid_started) < 1.0
    return False


def is_gone(spec: Spec, state: State) -> bool:
    """Return whether a chain of this machine has lost the process that ran it, which could not say so any more."""
    return spec.scheduler == "local" and state.state == "active" and is_running(spec) is False


class LocalRecord:
    """What is written down of a chain, for those who look. What cannot be written keeps no attempt from running."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        tell: Say,
        now: float,
        crash_limit: int,
        max_attempts: int | None,
    ) -> None:
        self._tell = tell
        spec = Spec(
            scheduler="local",
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_started=psutil.Process().create_time(),
            script=command[0],
            arguments=tuple(map(masked, command[1:])),
            interpreter=(),
            crash_limit=crash_limit,
            max_attempts=max_attempts,
            workdir=str(Path.cwd()),
            created_seconds=now,
        )
        self.chain = Chain(folder)
        with suppress(NotFoundError, CorruptError):
            earlier = self.chain.spec
            if earlier.scheduler == "slurm" or (self.chain.state.state == "active" and is_running(earlier)):
                raise ExistsError(f"{folder} is the folder of another chain: name a new one")
        with self._patience():
            Chain.create_local(folder, spec)

    def begin(self, number: int) -> None:
        self.attempt = AttemptRecord(
            number=number,
            job=0,
            job_id=os.environ.get("SLURM_JOB_ID", ""),
            restart=0,
            nodes=this_node(os.environ),
            host=socket.gethostname(),
            **logs_of_this_process(),
            begun_seconds=time.time(),
        )
        with self._patience():
            self.chain.begin(self.attempt)

    def end(
        self,
        attempt: Attempt,
        returncode: int,
        outcome: Outcome | None,
        sequence: int,
        left: Left,
        cause: Cause | None,
    ) -> None:
        with self._patience():
            self.chain.end(
                EndRecord(
                    number=attempt.number,
                    ending=attempt.outcome,
                    reason=attempt.reason,
                    returncode=returncode,
                    root=outcome.root if outcome else "",
                    step=outcome.step if outcome else left.step,
                    sequence=sequence,
                    committed=attempt.has_saved,
                    ended_seconds=time.time(),
                    newest=left.newest,
                    cause=cause.name if cause else "",
                    evidence=cause.evidence if cause else (),
                    reaction=attempt.reaction,
                )
            )
        self.chain.events.record("end", attempt=attempt.number, ending=attempt.outcome, reason=attempt.reason)

    def held(self) -> str:
        """Return why no further attempt is to start; "": nobody has asked for that."""
        with self._patience():
            state = self.chain.state
            return state.reason if state.state == "paused" else ""
        return ""

    def turn(self, state: ChainState, reason: str) -> None:
        with self._patience():
            self.chain.turn(state, reason, time.time())

    @contextmanager
    def _patience(self) -> Iterator[None]:
        try:
            yield
        except (CkptmanError, OSError) as error:
            self._tell(f"ckptman chain show will not know of it: {error}")
