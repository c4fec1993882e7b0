"""When to save: each policy is data with one pure method, `decide(facts)`, and policies combine with `|`.

    InitTimeInterval(factor=4) | OnStop() | BeforeDeadline()

A decision is taken for a step before that step has run, so that the ranks can agree on it meanwhile: the times in the
facts are predictions for the end of that step. Nothing here looks at a clock, a disk or a process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from ckptman.errors import ConfigError
from ckptman.policies.intervals import daly_interval_seconds, seconds_text
from ckptman.policies.parameters import check_at_least, check_count, check_positive, check_range

_FORESEEN_STEPS = 2**24


class Facts(NamedTuple):
    """What is known about the end of step `step`, for which a decision is asked. Times in seconds.

    A save that is on its way counts as saved. When it fails, `saved_step` and `seconds_since_save` go back to the save
    before it, and the policies find themselves due again.
    """

    step: int
    """The step the decision is about (optimizer steps completed)."""
    previous_step: int
    """The step asked about before this one; before the first, the restored step or 0. Step numbers may jump."""
    saved_step: int | None
    """The last step saved or restored from; None: there is no checkpoint."""
    start_step: int
    """The step this attempt started from; 0 on a fresh run."""
    seconds_since_save: float
    """Since the last save began; before the first one, since this attempt started to train."""
    init_seconds: float | None = None
    """From the start of the process to the end of its first finished step."""
    step_seconds: float | None = None
    """Measured time of one step (StepMeter)."""
    stall_seconds: float | None = None
    """Measured time for which a save blocks training."""
    durable_seconds: float | None = None
    """Measured time from the decision to save until the checkpoint is durable, if need be by an earlier attempt."""
    time_left_seconds: float | None = None
    """Until the deadline, seen from the end of `step`; None: no deadline is known."""
    stop: str | None = None
    """Why a stop was asked for ("SIGTERM on rank 2"); None: it was not."""

    @property
    def base_step(self) -> int:
        """The step that training would fall back to if it died now."""
        return self.start_step if self.saved_step is None else self.saved_step


@dataclass(frozen=True, slots=True)
class Decision:
    """Save at this step, for this reason; `stop`: and then leave."""

    reason: str
    stop: bool = False


class SavePolicy(ABC):
    """Decide at which steps to save. Policies combine with `|`.

    To write your own, subclass it and keep `decide` a pure function of the facts.
    """

    @abstractmethod
    def decide(self, facts: Facts) -> Decision | None:
        """Decide whether to save at `facts.step`. Called on the leader, one step ahead.

        Args:
            facts: what is known about the end of that step; times in seconds.

        Returns:
            The reason to save, and whether to leave after it; None: no save.
        """

    def __or__(self, other: SavePolicy) -> AnyOf:
        return AnyOf((self, other)) if isinstance(other, SavePolicy) else NotImplemented


@dataclass(frozen=True, repr=False)
class AnyOf(SavePolicy):
    """Save when any of its policies does: what `|` makes. It names every reason, and stops if one of them stops."""

    policies: tuple[SavePolicy, ...]

    def __post_init__(self) -> None:
        flat: list[SavePolicy] = []
        for policy in self.policies:
            if not isinstance(policy, SavePolicy):
                raise ConfigError(f"AnyOf: every policy must be a SavePolicy, not {policy!r}")
            flat += policy.policies if isinstance(policy, AnyOf) else (policy,)
        if not flat:
            raise ConfigError("AnyOf: give at least one policy; with none, nothing would ever be saved")
        object.__setattr__(self, "policies", tuple(flat))

    def decide(self, facts: Facts) -> Decision | None:
        made = [decision for policy in self.policies if (decision := policy.decide(facts)) is not None]
        if not made:
            return None
        reasons = dict.fromkeys(decision.reason for decision in made)
        return Decision("; ".join(reasons), stop=any(decision.stop for decision in made))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))


def next_save(policy: SavePolicy, facts: Facts) -> tuple[int, str] | None:
    """Return the step of the next save and its reason, as far as can be foreseen at the end of `facts.step`.

    None: none can be. A policy of the user's own is not asked: it may not be meant to be asked about what never comes.
    """
    policies = policy.policies if isinstance(policy, AnyOf) else (policy,)
    own = tuple(each for each in policies if type(each).__module__ == __name__)
    pace, left = facts.step_seconds or 0.0, facts.time_left_seconds

    def after(steps: int) -> Decision | None:
        later = steps * pace
        then = facts._replace(step=facts.step + steps, seconds_since_save=facts.seconds_since_save + later)
        return AnyOf(own).decide(then._replace(time_left_seconds=None if left is None else left - later))

    below, steps = 0, 1
    while own and steps < _FORESEEN_STEPS and after(steps) is None:
        below, steps = steps, 2 * steps
    if not own or steps >= _FORESEEN_STEPS:
        return None
    while steps - below > 1:
        middle = (below + steps) // 2
        below, steps = (middle, steps) if after(middle) is None else (below, middle)
    decision = after(steps)
    return None if decision is None else (facts.step + steps, decision.reason)


@dataclass(frozen=True)
class EverySteps(SavePolicy):
    """Save at each multiple of `steps`, or at the first step asked about beyond it.

    Args:
        steps: optimizer steps.

    Raises:
        IntervalError: `steps` is less than 1.
    """

    steps: int

    def __post_init__(self) -> None:
        check_count("EverySteps", "steps", self.steps)

    def decide(self, facts: Facts) -> Decision | None:
        multiple = facts.step - facts.step % self.steps
        if multiple <= facts.base_step:
            return None
        reason = "every step" if self.steps == 1 else f"every {self.steps} steps"
        overdue = multiple <= facts.previous_step  # it was asked for before, and that save failed
        return Decision(f"{reason} (due since step {multiple})" if overdue else reason)


@dataclass(frozen=True)
class EverySeconds(SavePolicy):
    """Save at the last step that ends within `seconds` of the last save.

    Args:
        seconds: from the start of one save to that of the next.

    Raises:
        IntervalError: `seconds` is not above 0, or not finite.
    """

    seconds: float

    def __post_init__(self) -> None:
        check_positive("EverySeconds", "seconds", self.seconds)

    def decide(self, facts: Facts) -> Decision | None:
        return Decision(f"every {seconds_text(self.seconds)}") if _last_chance(facts, self.seconds) else None


@dataclass(frozen=True, init=False, repr=False)
class AtStep(SavePolicy):
    """Save at each of the steps named, or at the first step asked about beyond it: `AtStep(100, 200)`.

    Args:
        *steps: optimizer steps.

    Raises:
        ConfigError: no step is given.
        IntervalError: a step is less than 1.
    """

    steps: tuple[int, ...]

    def __init__(self, *steps: int) -> None:
        if not steps:
            raise ConfigError("AtStep: name at least one step, as in AtStep(100, 200)")
        for step in steps:
            check_count("AtStep", "step", step)
        object.__setattr__(self, "steps", tuple(sorted(set(steps))))

    def decide(self, facts: Facts) -> Decision | None:
        passed = [step for step in self.steps if facts.base_step < step <= facts.step]
        if not passed:
            return None
        reason = f"at step {passed[-1]}"
        return Decision(reason if passed[-1] == facts.step else f"{reason} (now at {facts.step})")

    def __repr__(self) -> str:
        return f"AtStep({', '.join(map(str, self.steps))})"


@dataclass(frozen=True)
class OnStop(SavePolicy):
    """Save, and leave, when a stop was asked for: a signal on any rank."""

    def decide(self, facts: Facts) -> Decision | None:
        return None if facts.stop is None else Decision(f"stop asked: {facts.stop}", stop=True)


@dataclass(frozen=True)
class BeforeDeadline(SavePolicy):
    """Save, and leave, at the last step from which a save can still be durable in time, even if no signal comes.

    Saying no at this step puts the next chance one step later, so this is the last step when less is left at its end
    than save * safety + margin_seconds + step_seconds. Let `margin_seconds` cover what can come between two steps, such
    as an evaluation. `save` is durable_seconds, if a save was measured. Else, if this attempt

    - has saved nothing yet, it is `assumed_save_seconds`. When there is no longer time for two such saves, it saves
      once to measure, and goes on; but not where a step takes longer than that, or where even a save as short as a step
      would leave no time for the last one.
    - has a save under way, it is what that will have taken at the next chance: seconds_since_save + step_seconds.

    So the last save is in time if the first one was measured before it, or if it takes no longer than assumed and there
    was time for two. Else it may come too late, and what the run falls back to is the first one.

    Args:
        margin_seconds: time for what comes between two steps.
        assumed_save_seconds: what a save takes, before one was measured.
        safety: the factor on the time of a save.

    Raises:
        IntervalError: a negative margin, an assumed save that is not above 0, or a `safety` below 1.
    """

    margin_seconds: float = 30
    assumed_save_seconds: float = 60
    safety: float = 1.5

    def __post_init__(self) -> None:
        check_at_least("BeforeDeadline", "margin_seconds", self.margin_seconds, 0)
        check_positive("BeforeDeadline", "assumed_save_seconds", self.assumed_save_seconds)
        check_at_least("BeforeDeadline", "safety", self.safety, 1)

    def decide(self, facts: Facts) -> Decision | None:
        left_seconds, step_seconds = facts.time_left_seconds, facts.step_seconds or 0.0
        if left_seconds is None:
            return None
        count, save = 1, "save"
        if facts.durable_seconds is not None:
            save_seconds = facts.durable_seconds
        elif facts.base_step != facts.start_step:
            save, save_seconds = "save under way", facts.seconds_since_save + step_seconds
        else:
            save, save_seconds = "assumed save", self.assumed_save_seconds
            if step_seconds <= save_seconds and left_seconds >= self._needed_seconds(step_seconds, step_seconds):
                count, save = 2, "two assumed saves"
        needed_seconds = self._needed_seconds(count * save_seconds, step_seconds)
        if left_seconds >= needed_seconds:
            return None
        reason = (
            f"{seconds_text(left_seconds)} left before the deadline, {seconds_text(needed_seconds)} needed "
            f"({self.safety:g} x {save} of {seconds_text(save_seconds)} "
            f"+ margin of {seconds_text(self.margin_seconds)} + step of {seconds_text(step_seconds)})"
        )
        return Decision(f"first save, to measure its cost: {reason}") if count == 2 else Decision(reason, stop=True)

    def _needed_seconds(self, save_seconds: float, step_seconds: float) -> float:
        return save_seconds * self.safety + self.margin_seconds + step_seconds


def with_stops(policy: SavePolicy) -> SavePolicy:
    """Return a policy that also saves at a stop request and before the deadline, which `policy` may do already."""
    policies = policy.policies if isinstance(policy, AnyOf) else (policy,)
    missing = [kind() for kind in (OnStop, BeforeDeadline) if not any(isinstance(each, kind) for each in policies)]
    return AnyOf((policy, *missing)) if missing else policy


class DerivedInterval(SavePolicy):
    """An interval derived from what was measured, held between two bounds, and converted into steps.

    Subclasses are dataclasses with the two bounds as fields; `max_seconds=None` is no upper bound. Until the interval
    can be derived it is `max_seconds`.
    """

    min_seconds: float
    max_seconds: float | None

    @abstractmethod
    def derived_seconds(self, facts: Facts) -> float | None:
        """From the start of one save to that of the next, by what was measured; None: not measured yet."""

    @abstractmethod
    def derivation(self, facts: Facts) -> str:
        """Return how `derived_seconds` came about, with its numbers. Asked for only where there is a value."""

    def interval_seconds(self, facts: Facts) -> float | None:
        """Return the interval within its bounds; None: not known yet, and not bounded."""
        derived = self.derived_seconds(facts)
        if derived is None:
            return self.max_seconds
        return max(self.min_seconds, derived if self.max_seconds is None else min(derived, self.max_seconds))

    def interval_steps(self, facts: Facts) -> int | None:
        """As many steps as fit into the interval, and at least 1; None: not known yet."""
        seconds = self.interval_seconds(facts)
        return max(1, int(seconds / facts.step_seconds)) if seconds is not None and facts.step_seconds else None

    def decide(self, facts: Facts) -> Decision | None:
        seconds, steps = self.interval_seconds(facts), self.interval_steps(facts)
        steps_since_save = facts.step - facts.base_step
        if steps is not None and steps_since_save >= steps:
            passed = "1 step" if steps_since_save == 1 else f"{steps_since_save} steps"
        elif seconds is not None and _last_chance(facts, seconds):
            passed = seconds_text(facts.seconds_since_save)
        else:
            return None
        since = "since the start" if facts.saved_step is None else "since the last save"
        return Decision(f"{passed} {since} ({self._explain(facts, seconds)})")

    def _explain(self, facts: Facts, seconds: float | None) -> str:
        derived, held = self.derived_seconds(facts), seconds_text(seconds or 0.0)
        if derived is None:
            text = f"{held} until the interval can be derived"
        elif derived == seconds:
            text = self.derivation(facts)
        else:
            text = f"{self.derivation(facts)}, held to {held}"
        return f"{text} at {seconds_text(facts.step_seconds)} a step" if facts.step_seconds else text


@dataclass(frozen=True)
class InitTimeInterval(DerivedInterval):
    """Save every `factor` times the measured init phase: the practitioners' rule, 3 to 5 times.

    The init phase runs from the start of the process to the end of its first finished step: what a restart costs.
    Source: the advice to users of Leonardo (CINECA); at least every 15 minutes: HKUST (2024).

    Args:
        factor: the interval is so many times the init phase.
        min_seconds: the shortest interval.
        max_seconds: the longest interval, and the interval until init was measured. None: no upper bound.

    Raises:
        IntervalError: the factor is not above 0, or the bounds are negative or cross.
    """

    factor: float = 4
    min_seconds: float = 0
    max_seconds: float | None = 900

    def __post_init__(self) -> None:
        check_positive("InitTimeInterval", "factor", self.factor)
        check_range("InitTimeInterval", self.min_seconds, self.max_seconds)

    def derived_seconds(self, facts: Facts) -> float | None:
        return None if facts.init_seconds is None else self.factor * facts.init_seconds

    def derivation(self, facts: Facts) -> str:
        init_seconds = facts.init_seconds or 0.0
        return f"{self.factor:g} x init of {seconds_text(init_seconds)} = {seconds_text(self.factor * init_seconds)}"


@dataclass(frozen=True)
class DalyInterval(DerivedInterval):
    """Save at the interval that keeps training available most, given how often the machine fails.

    Costs are measured: a save is what it blocks training for, a restart the init phase. The formula and its source are
    in `daly_interval_seconds`. As soon as a step was measured it saves once, to measure what a save costs. The interval
    is at least what a save takes to become durable, since the next one cannot begin before.

    Args:
        mtbf_seconds: mean time between failures of the whole run.
        min_seconds: the shortest interval.
        max_seconds: the longest interval, and the interval until the costs were measured. None: no upper bound.

    Raises:
        IntervalError: the MTBF is not above 0, or the bounds are negative or cross.
    """

    mtbf_seconds: float
    min_seconds: float = 0
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        check_positive("DalyInterval", "mtbf_seconds", self.mtbf_seconds)
        check_range("DalyInterval", self.min_seconds, self.max_seconds)

    def decide(self, facts: Facts) -> Decision | None:
        nothing_saved_yet = facts.base_step == facts.start_step
        if facts.stall_seconds is None and facts.step_seconds is not None and nothing_saved_yet:
            return Decision("first save, to measure its cost")
        return super().decide(facts)

    def derived_seconds(self, facts: Facts) -> float | None:
        if facts.stall_seconds is None or facts.init_seconds is None:
            return None
        return max(self._optimum_seconds(facts.stall_seconds, facts.init_seconds), facts.durable_seconds or 0.0)

    def derivation(self, facts: Facts) -> str:
        save_seconds, restart_seconds = facts.stall_seconds or 0.0, facts.init_seconds or 0.0
        durable_seconds = facts.durable_seconds or 0.0
        optimum_seconds = self._optimum_seconds(save_seconds, restart_seconds)
        text = (
            f"save of {seconds_text(save_seconds)}, restart of {seconds_text(restart_seconds)} "
            f"and MTBF of {seconds_text(self.mtbf_seconds)} give {seconds_text(optimum_seconds)}"
        )
        return f"{text}, a save takes {seconds_text(durable_seconds)}" if durable_seconds > optimum_seconds else text

    def _optimum_seconds(self, save_seconds: float, restart_seconds: float) -> float:
        return daly_interval_seconds(save_seconds, self.mtbf_seconds, restart_seconds)


def _last_chance(facts: Facts, seconds: float) -> bool:
    """Return whether the step after this one would end later than `seconds` after the last save."""
    return facts.seconds_since_save >= seconds or facts.seconds_since_save + (facts.step_seconds or 0.0) > seconds
