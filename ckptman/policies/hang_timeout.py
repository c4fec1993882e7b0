"""How long a rank may show no sign of life before it is taken for stuck. Time is measured elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ckptman.policies.parameters import check_at_least, check_positive

Doing = Literal["open", "restore", "start", "step", "stage", "save"]
"""What a rank is at: opening the root; restoring; compiling and all else before the end of the first step; a step, with
what the loop does between two steps, such as an evaluation; what a save does first, up to the copy from the devices;
the rest of a save, or waiting for one."""

SLOW = 3.0
"""Starting and saving may take that many times as long as a step: both depend on a file system that others use too."""
_FILES: tuple[Doing, ...] = ("open", "restore", "save")
"""While it is at these, a rank waits for files and for no collective of the training."""
OPEN_SECONDS = 300.0
"""Opening a root may take so long where all is well: the claim of a run on another host is watched for 30 s, so are its
leases, and the drafts that it left are removed."""
_LIKE = 1.25
"""A pause that is so many times as long as the longest one so far is still like it."""
_AHEAD_SECONDS = 45.0
"""What the watchdog needs for its own work: it looks now and then, asks the others, and writes."""
_LOOKS, _LONGEST_LOOK_SECONDS = 20, 5.0


@dataclass(frozen=True)
class HangTimeout:
    """The longest silence that is allowed: `factor` times the longest pause of that kind so far, but never less than a
    floor, which is `floor_seconds` in a step and three times that while a run starts or saves.

    A pause is the time between two signs of life. After `speak_seconds` without one a rank says where it is, and goes
    on, if a collective of the training may be what it waits for: anywhere but in a restore, and in a save once it is
    copied from the devices. Pauses like those that were seen before are not told. None: it tells none.

    Raises: IntervalError (seconds that are not above 0, a factor below 1).
    """

    floor_seconds: float = 600.0
    factor: float = 3.0
    speak_seconds: float | None = None

    def __post_init__(self) -> None:
        check_positive("watchdog", "floor_seconds", self.floor_seconds)
        check_at_least("watchdog", "factor", self.factor, 1)
        if self.speak_seconds is not None:
            check_positive("watchdog", "speak_seconds", self.speak_seconds)

    @property
    def look_seconds(self) -> float:
        """The time between two looks at the clock."""
        shortest = min(self.floor_seconds, self.speak_seconds or self.floor_seconds)
        return min(shortest / _LOOKS, _LONGEST_LOOK_SECONDS)

    def limit_seconds(self, doing: Doing, longest_seconds: float = 0.0) -> float:
        """For how long a rank may be silent, when `longest_seconds` is the longest pause of this kind so far."""
        floor = self.floor_seconds * (1.0 if doing == "step" else SLOW)
        if doing == "open":
            floor = max(floor, OPEN_SECONDS)
        return max(floor, self.factor * longest_seconds)

    def notice_seconds(self, doing: Doing, longest_seconds: float = 0.0) -> float:
        """After how long at the latest a silence is noticed: it is looked for only now and then."""
        return self.limit_seconds(doing, longest_seconds) + 2 * self.look_seconds


def ahead_of(abort_seconds: float) -> float:
    """Return the `speak_seconds` with which the watchdog speaks before a collective is aborted, after that long."""
    return max(abort_seconds / 2, abort_seconds - _AHEAD_SECONDS)


class Progress:
    """The signs of life of one rank, and what was learnt from them. Every time is one that the caller passes.

    The training thread calls `beat`, threads that save call `begin` and `end`, the watchdog calls `overdue`.
    """

    def __init__(self, patience: HangTimeout) -> None:
        self.patience = patience
        self.longest_seconds: dict[Doing, float] = dict.fromkeys(get_args(Doing), 0.0)
        """The longest pause of each kind so far."""
        self._last: tuple[float, Doing, int] = (0.0, "start", 0)
        self._told: tuple[float, Doing, int] | None = None
        self._saves: dict[int, tuple[float, int]] = {}
        self._count = 0
        self._interruptions = 0

    def beat(self, now: float, doing: Doing, step: int) -> None:
        """The rank is alive, and goes on with `doing`, after `step`."""
        since, before, last = self._last
        if now - since > self.longest_seconds[before]:
            self.longest_seconds[before] = now - since
        if doing != "step" or step == last:  # a sign of life within a step: in an evaluation or the like
            self._interruptions += 1
        self._last = (now, doing, step)

    def begin(self, now: float, step: int) -> int:
        """Note that the save of `step` begins behind the training. Return what to tell `end`."""
        self._count += 1
        self._interruptions += 1
        self._saves[self._count] = (now, step)
        return self._count

    def end(self, now: float, save: int) -> None:
        """A save has ended, well or not."""
        since, _ = self._saves.pop(save)
        self.longest_seconds["save"] = max(self.longest_seconds["save"], now - since)

    @property
    def training(self) -> tuple[int | None, int]:
        """The last step that has ended, None where this rank is not in a step or a save runs behind it; and a number
        that changes where there is anything but training."""
        _, doing, step = self._last
        return step if doing == "step" and not self._saves else None, self._interruptions

    @property
    def limit_seconds(self) -> float:
        """The limit for what the rank is at."""
        doing = self._last[1]
        return self.patience.limit_seconds(doing, self.longest_seconds[doing])

    def late(self, now: float) -> LongPause | None:
        """Return the silence that is to be told, once; None: there is none."""
        (since, doing, step), speak_seconds = self._last, self.patience.speak_seconds
        if speak_seconds is None or doing in _FILES or self._told == self._last:
            return None
        if now - since <= max(speak_seconds, _LIKE * self.longest_seconds[doing]):
            return None
        self._told = (since, doing, step)
        return LongPause(doing, step, False, now - since, self.limit_seconds)

    def overdue(self, now: float) -> LongPause | None:
        """Return what has been silent for longer than its limit; None: nothing."""
        running: list[tuple[float, Doing, int, bool]] = [(*self._last, False)]
        running += [(since, "save", step, True) for since, step in list(self._saves.values())]
        for since, doing, step, behind in running:
            limit = self.patience.limit_seconds(doing, self.longest_seconds[doing])
            if now - since > limit:
                return LongPause(doing, step, behind, now - since, limit)
        return None


@dataclass(frozen=True)
class LongPause:
    """A silence that was too long: what the rank is at, after which step, whether behind the training, for how long."""

    doing: Doing
    step: int
    behind: bool
    waited_seconds: float
    limit_seconds: float

    def __str__(self) -> str:
        return (
            f"no sign of life for {_seconds(self.waited_seconds)} (limit {_seconds(self.limit_seconds)}) {self.where}"
        )

    @property
    def where(self) -> str:
        """Where it is stuck, in words."""
        if self.behind:
            return f"from the save of step {self.step} in the background"
        if self.doing == "open":
            return "while opening the checkpoint root: see whether its file system answers"
        if self.doing == "restore":
            return "while restoring"
        if self.doing == "start":
            return "between the start of the run and the end of its first step"
        if self.doing in ("stage", "save"):
            return f"while saving, or waiting for a save, at step {self.step}"
        return f"in what came after step {self.step}: the next step, an evaluation"


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:.1f} s"
