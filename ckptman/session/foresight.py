"""Asking the policy about the next step; and about many steps at once while steps are short.

On short steps even a few microseconds of Python count, and most of them are memory that a training step has pushed out
of the caches. So when the policy wants nothing at the next step, it is asked about the steps after it too, each as if
it came later than expected. As long as the clock stays within that, and nothing else that it looks at has changed, its
answer is known to be no.
"""

from __future__ import annotations

from ckptman.policies.save_policies import Decision, SavePolicy
from ckptman.session.timings import Timings

STEPS_AHEAD = 16
SHORT_STEP_SECONDS = 0.1
LATE = 1.5
"""How much slower than measured the steps ahead are taken to be."""


class Foresight:
    """The decisions of a policy on one step after the other, each asked for one step early. Leader only."""

    def __init__(self, policy: SavePolicy, pace: Timings) -> None:
        self._policy, self._pace = policy, pace
        self._until_step = -1
        self._version = -1
        self._base_step = 0
        self._base_seconds = self._step_seconds = 0.0

    def decide(self, step: int) -> Decision | None:
        """Whether to save at `step`, which is the next one, and why. Raises whatever the policy raises."""
        if (
            step <= self._until_step
            and self._pace.version == self._version
            and self._pace.step_seconds == self._step_seconds  # settles in the first steps
            and self._pace.now() <= self._base_seconds + (LATE * (step - self._base_step + 1) - 1) * self._step_seconds
        ):
            return None
        self._until_step = -1
        decision = self._policy.decide(self._pace.facts(step, ahead=True))
        if decision is None:
            self._look_further(step)
        return decision

    def _look_further(self, step: int) -> None:
        facts = self._pace.facts(step, ahead=True)
        seconds = facts.step_seconds
        if not seconds or seconds > SHORT_STEP_SECONDS or step != facts.previous_step + 1:
            return
        self._base_step, self._base_seconds, self._step_seconds = step, self._pace.now(), seconds
        self._version = self._pace.version
        for further in range(step, step + STEPS_AHEAD):
            later = (further - step + 1) * LATE * seconds - seconds
            left = facts.time_left_seconds
            ahead = facts._replace(
                step=further,
                previous_step=further - 1,
                seconds_since_save=facts.seconds_since_save + later,
                time_left_seconds=None if left is None else left - later,
            )
            if self._policy.decide(ahead) is not None:
                return
            self._until_step = further
