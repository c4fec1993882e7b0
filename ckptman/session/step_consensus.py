"""How the ranks agree, once a step and without waiting, whether to save, to stop, or to raise a failure."""

from __future__ import annotations

import signal
from typing import NamedTuple

from ckptman.engine.comm.control_group import Channel, Contribution, Meeting, failing_as_one
from ckptman.engine.saving.memory_saves import MemorySaves
from ckptman.engine.saving.saver import Saver
from ckptman.engine.state.step_record import StepRecorder
from ckptman.errors import CkptmanError, ConfigError
from ckptman.policies.save_policies import Decision, SavePolicy
from ckptman.runtime.requests import Requests
from ckptman.runtime.signals import SignalHandler
from ckptman.session.timings import Timings

_STOP, _SAVE, _FAILED, _SLOW, _STEP, _MINUS_STEP, _MEMORY = range(7)
_RANKS = 1 << 32
"""A stop flag is signal number x this + rank, so that the largest flag names a signal and one rank that got it."""
_ASKED_SAVE = Decision("ckptman ask save")
_ASKED = {"stop": 128, "hold": 129}
"""What stands in a stop flag for a signal number if `ckptman ask` wants the stop."""


class Agreed(NamedTuple):
    """What at least one rank wants. `stop`: "SIGTERM on rank 2", or "ckptman ask stop"; `failed`: the number of a save
    that failed, or 0."""

    stop: str | None
    save: bool
    failed: int
    memory: bool = False
    """Whether to save to memory."""


class StepConsensus:
    """What each rank wants, known to all ranks one step later.

    At the end of a step a rank sends what it wants at the next one: the leader what the policy decides (for that step,
    one step early), every rank whether a signal came or a save failed. It is collected at the end of that next step.
    """

    def __init__(
        self,
        control: Channel,
        policy: SavePolicy,
        timings: Timings,
        signals: SignalHandler | None,
        saver: Saver,
        recorder: StepRecorder,
        requests: Requests | None = None,
    ) -> None:
        self._control, self._policy, self._timings, self._signals, self._saver = (
            control,
            policy,
            timings,
            signals,
            saver,
        )
        self._exchange, self._recorder, self._requests = Meeting(control, "step()"), recorder, requests
        self.recording_is_slow = False
        """Whether it takes any rank too long to record the state at each step."""
        self._expected_step = -1
        self._planned: Decision | CkptmanError | None = None
        self.has_stopped = False
        """Whether the ranks have agreed to stop. A loop that goes on is not asked again."""
        self.memory: MemorySaves | None = None
        """What saves to memory, where anything does."""
        self._planned_memory: Decision | None = None

    def at(self, step: int) -> Agreed | None:
        """Return what the ranks agreed on for `step`, or agree on now if they did not know that it would come; None:
        nothing.

        Raises: ConfigError on every rank if they are at different steps.
        """
        if self._exchange.flying and step == self._expected_step:
            flags = self._collect()
        else:
            self.drain()
            self._launch(step, ahead=False)
            flags = self._collect()
        if flags[_STEP] != -flags[_MINUS_STEP]:
            raise ConfigError(f"the ranks are at different steps, from {-flags[_MINUS_STEP]} to {flags[_STEP]}")
        self.recording_is_slow |= bool(flags[_SLOW])
        if not (flags[_STOP] or flags[_SAVE] or flags[_FAILED] or flags[_MEMORY]):
            return None
        return Agreed(stop_text(flags[_STOP]), bool(flags[_SAVE]), flags[_FAILED], bool(flags[_MEMORY]))

    def ahead(self, step: int) -> None:
        """Send what this rank wants at `step`, the next one."""
        self._expected_step = step
        self._launch(step, ahead=True)

    def drain(self) -> None:
        """Take in what is still under way, and forget it: every rank sends again what it still wants."""
        if self._exchange.flying:
            self._collect()

    def decisions(self, step: int, stop: str | None) -> tuple[Decision | None, Decision | None]:
        """Return the decisions behind what was agreed on: to save, and to save to memory. Leader only. Raises: what the
        policy raised."""
        is_asked = self._requests is not None and self._requests.save
        if stop is not None:
            decision = self._policy.decide(self._timings.facts(step, ahead=False, stop=stop))
            return decision or (_ASKED_SAVE if is_asked else None), None
        if self._planned is _ASKED_SAVE and not is_asked:  # a save of the loop's own has carried it out
            self._planned = None
        if isinstance(self._planned, CkptmanError):
            raise self._planned
        in_memory = self._planned_memory
        if self._planned is not None and not self._planned.stop and self.memory is not None and self.memory.is_ready:
            in_memory = in_memory or self._planned  # what is copied for the disk anyhow
        return self._planned, in_memory

    def _launch(self, step: int, *, ahead: bool) -> None:
        flags = tuple(self._flags(step, ahead=ahead))
        self._exchange.begin(lambda: Contribution(maxima=flags))

    def _collect(self) -> tuple[int, ...]:
        with failing_as_one():
            return self._exchange.end().maxima

    def _flags(self, step: int, *, ahead: bool) -> list[int]:
        if self._control.is_leader:
            self._planned, self._planned_memory = self._plan(step, ahead), self._plan_memory(step, ahead)
        slow, to_memory = int(bool(self._recorder.too_slow)), int(self._planned_memory is not None)
        return [self.stop_flag(), int(self._planned is not None), self._saver.failed, slow, step, -step, to_memory]

    def _plan_memory(self, step: int, ahead: bool) -> Decision | None:
        memory = self.memory
        if memory is None or not memory.is_ready:
            return None
        try:
            return memory.tier.policy.decide(self._timings.facts(step, ahead=ahead, of=self._timings.memory_saves))
        except Exception as error:  # noqa: BLE001 a user's own policy may raise anything, and the disk has what counts
            memory.turn_off(f"its save policy failed: {type(error).__name__}: {error}")
            return None

    def stop_flag(self) -> int:
        """Return what this rank was asked to do, as an integer of which the highest of all ranks counts."""
        received = self._signals.received if self._signals is not None else None
        asked = self._requests.stop if self._requests is not None else None
        number = int(received or 0)
        if asked == "hold" or (asked is not None and not number):
            number = _ASKED[asked]
        return 0 if number == 0 or self.has_stopped else number * _RANKS + self._control.rank

    def _plan(self, step: int, ahead: bool) -> Decision | CkptmanError | None:
        # A policy that raises must not leave the other ranks waiting: the error travels as a decision.
        facts = self._timings.facts(step, ahead=ahead)
        if self.has_stopped:
            facts = facts._replace(time_left_seconds=None)
        try:
            decision = self._policy.decide(facts)
        except Exception as error:  # noqa: BLE001 a user's own policy may raise anything
            return ConfigError(f"the save policy failed: {type(error).__name__}: {error}")
        if decision is None and self._requests is not None and self._requests.save:
            return _ASKED_SAVE
        return decision


def stop_text(flag: int) -> str | None:
    """Return the signal, or the request, that the highest flag of all ranks stands for; None: there is none."""
    if not flag:
        return None
    number, rank = divmod(flag, _RANKS)
    if (asked := next((what for what, each in _ASKED.items() if each == number), None)) is not None:
        return f"ckptman ask {asked}"
    return f"{signal.Signals(number).name} on rank {rank}"
