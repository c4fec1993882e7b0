"""What the watchdog of a rank does when it finds it stuck: stacks, who is silent, the outcome on disk, and the end."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from ckptman._torch_compat import abort_default_group, group_timeouts
from ckptman.engine.comm.control_group import Channel, Contribution
from ckptman.engine.comm.hang_report import HangReport, this_process
from ckptman.errors import EXIT_STALLED, ConfigError
from ckptman.policies.hang_timeout import HangTimeout, LongPause, ahead_of
from ckptman.runtime.journal import Journal
from ckptman.runtime.outcome import ATTEMPT_ENV, read_outcome, report_node
from ckptman.runtime.watchdog import PART_SECONDS, Watchdog, end_process, say, within, write_stacks
from ckptman.session.run_notes import STALLED, RunNotes
from ckptman.session.run_session import RunSession, report_failed_start
from ckptman.storage.format.paths import journal_path, new_nonce, outcome_path, stacks_path

Setting = float | HangTimeout | Literal["auto"] | None
_LEADER, _DEPUTY = 0, 1
_AUTO_SECONDS = 600.0
_NEVER_SECONDS = 10**9
_IF_NO_HANG = ". If nothing hung, give watchdog= more seconds, or call beat() meanwhile"


def hang_timeout_of(
    setting: Setting, world_size: int, environ: Mapping[str, str], abort_seconds: float | None = None
) -> HangTimeout | None:
    """Return what `watchdog=` means. "auto": on where ranks can wait for each other, and where a chain would go on.

    It speaks ahead of NCCL, which aborts a collective after `abort_seconds` (None: there is no NCCL).

    Raises: ConfigError.
    """
    if setting is None or (setting == "auto" and world_size == 1 and not environ.get(ATTEMPT_ENV)):
        return None
    if isinstance(setting, bool) or not (setting == "auto" or isinstance(setting, int | float | HangTimeout)):
        raise ConfigError(
            f"watchdog is the seconds after which a step that does not end counts as stuck, or 'auto', or None for no "
            f"watchdog, not {setting!r}"
        )
    if isinstance(setting, HangTimeout):
        patience = setting
    elif setting != "auto":
        patience = HangTimeout(float(setting))
    else:  # as long as NCCL waits if nothing else is said, less what it takes to be ahead of it
        ahead = _AUTO_SECONDS if abort_seconds is None else ahead_of(max(abort_seconds, _AUTO_SECONDS))
        patience = HangTimeout(min(_AUTO_SECONDS, ahead))
    if abort_seconds is None or patience.speak_seconds is not None:
        return patience
    return replace(patience, speak_seconds=ahead_of(abort_seconds))


class RankWatchdog(Watchdog):
    """The watchdog of one rank of a run. It watches from now on, unless `setting` says otherwise: first that the root
    is opened, which a file system that does not answer may keep from ending. Raises: ConfigError."""

    def __init__(self, setting: Setting, control: Channel, root: Path) -> None:
        # The smallest on any rank: all look at about the same time, and some ranks are in more groups than others.
        mine = min(group_timeouts("nccl"), default=math.inf)
        sent = Contribution(maxima=(-int(min(mine, _NEVER_SECONDS) * 1000),), told=(this_process(), new_nonce()))
        met = control.agree("Checkpointer()", lambda: sent)
        abort_seconds = None if met.maxima[0] == -_NEVER_SECONDS * 1000 else -met.maxima[0] / 1000
        patience = hang_timeout_of(setting, control.world_size, os.environ, abort_seconds)
        # Told now: where rank 0 keeps the store, nobody could ask for it later.
        self._leader, opening = met.told
        look_seconds = (patience or HangTimeout()).look_seconds
        report = HangReport(control.rank, control.world_size, opening, self._leader)
        self._words = HangReporter(report, root, control.rank, control.world_size, look_seconds)
        super().__init__(patience, self._words, self._words.speak)
        self._register()
        self.beat("open", 0)
        self.start()

    def opened(self, control: Channel, session: RunSession, notes: RunNotes) -> None:
        """The root is open, and the run begins."""
        self._words.session, self._words.notes = session, notes
        self._words.report = HangReport(control.rank, control.world_size, session.number, self._leader)
        self._register()
        if self.patience is not None:
            session.note("watchdog", **asdict(self.patience))
        self.beat("start", 0)

    def _register(self) -> None:
        if self.patience is not None:
            self._words.report.register()


class HangReporter:
    """What a rank does that is stuck. It is called by its watchdog, and does not return.

    Each rank that can still act calls the roll in the store through which the ranks once met; who does not answer
    is named. The leader writes the outcome, or the rank after it where the leader is silent. Nobody leaves before that:
    a launcher may kill all others when the first one exits.
    """

    session: RunSession | None = None
    """None until the root is open."""
    notes: RunNotes | None = None

    def __init__(self, report: HangReport, root: Path, rank: int, world_size: int, look_seconds: float) -> None:
        self.report, self._root = report, root
        self._rank, self._world_size = rank, world_size
        # The others look at other times, and learnt a little more or less.
        self._report_seconds = 2.0 + 4 * look_seconds

    @property
    def _attempt(self) -> int:
        return self.session.number if self.session is not None else 0

    def __call__(self, stall: LongPause, arm: Callable[[float], None]) -> None:
        close_seconds = self.notes.close_seconds if self.notes is not None else 0.0
        arm(self._report_seconds + 8 * PART_SECONDS + close_seconds)
        text, stacks = self._text(stall), stacks_path(self._root, self._attempt, self._rank)
        saying = (self._report_seconds + 4 * PART_SECONDS, lambda: self._say(stall))
        parts = [saying, (PART_SECONDS, abort_process_group)]
        if self.notes is not None:
            parts.append((close_seconds, self.notes.close))
        end_process(text, stacks, parts)

    def speak(self, stall: LongPause) -> None:
        """Say where this rank is, and who else is silent, while the process goes on: NCCL may end it soon."""
        text, stacks = self._text(stall), stacks_path(self._root, self._attempt, self._rank)
        within(PART_SECONDS, lambda: write_stacks(stacks, text))
        # Each silence is told by itself: an answer to an earlier one says nothing of this one.
        report = HangReport(self._rank, self._world_size, f"{self._attempt}/{stall.doing}-{stall.step}")
        within(PART_SECONDS, lambda: report.answer(stall.where))
        if self._rank in (_LEADER, _DEPUTY):
            within(self._report_seconds + PART_SECONDS, lambda: report.call(self._report_seconds))
            text = f"{text}; {report.text()}"
        within(PART_SECONDS, lambda: say(f"{text}; it goes on; stacks are in {stacks}"))

    def _text(self, stall: LongPause) -> str:
        return f"rank {self._rank} of {self._world_size} (host {socket.gethostname()}, pid {os.getpid()}): {stall}"

    def _say(self, stall: LongPause) -> None:
        report = self.report
        within(PART_SECONDS, lambda: report.answer(stall.where))
        if self._rank in (_LEADER, _DEPUTY):
            within(self._report_seconds + PART_SECONDS, lambda: report.call(self._report_seconds))
        if self._rank == _LEADER or (self._rank == _DEPUTY and self._leader_is_silent(report)):
            within(PART_SECONDS, lambda: self._write(stall, report.text() + ("" if report.silent else _IF_NO_HANG)))
            within(PART_SECONDS, report.end)
        else:
            within(self._report_seconds + 2 * PART_SECONDS, report.await_end)
        within(PART_SECONDS, report.kill_stopped)

    def _leader_is_silent(self, report: HangReport) -> bool:
        # While the root is opened, what lies there is of the attempt before.
        found = read_outcome(outcome_path(self._root)) if self.session is not None else None
        return (report.silent is None or _LEADER in report.silent) and (found is None or found.state == "running")

    def _write(self, stall: LongPause, who: str) -> None:
        """Say on disk how the attempt ended: the outcome first, which is what a chain goes by."""
        session, step = self.session, stall.step
        reason = f"{STALLED}: {stall}; {who}"
        for node, why in self.report.bad_nodes().items():
            report_node(node, why, os.environ)
        if session is None:
            report_failed_start(self._root, reason, EXIT_STALLED)
            return
        if self.notes is not None:
            self.notes.stalled(session.number, step, f"{stall}; {who}")
        within(PART_SECONDS / 2, lambda: session.write_outcome("failed", step, reason, EXIT_STALLED))
        if session.journal is None:
            session.journal = Journal(journal_path(session.root))
            session.journal.bind(attempt=session.number)
        silent = {"silent_seconds": stall.waited_seconds}
        session.journal.record(
            "failed", sync=True, step=step, reason=reason, error=STALLED, cause="environment", **silent
        )


def abort_process_group() -> None:
    """Let no kernel of a collective spin on: the devices are free for the next attempt. gloo needs nothing."""
    if dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        abort_default_group()
