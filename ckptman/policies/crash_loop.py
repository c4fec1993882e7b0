"""Which checkpoints are not to be loaded a third time: a run crashed twice at the same step after loading them.

It is the checkpoint that is to blame only while no other one leads to a crash at that step too: then it is the code, or
the data of that step, and the newest one is as good as any. Nor is it to blame for what happens before one step has
ended: what it has in it was not used until then, and what a start needs (mounts, devices, connections) was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CRASHES = 2
MOST_IN_VAIN = 3
"""So many starts of one launch in a row may come to nothing, as so many attempts of a chain may."""


@dataclass(frozen=True)
class Crash:
    """An attempt that loaded the checkpoint of step `restored`, and crashed in the step after `step`."""

    attempt: int
    restored: int
    step: int


def crashes_of(events: Sequence[Mapping[str, Any]]) -> list[Crash]:
    """Return the crashes that a journal tells of. A checkpoint that was saved anew since then is another one.

    An event without a step or an attempt that is a whole number tells of none; nor does one that does not name the
    program as the cause: the disk, another rank or the user (or, in journals without causes, nobody knows what).
    """
    found: list[Crash] = []
    restored: int | None = None
    for event in events:
        kind, step, attempt = event.get("event"), event.get("step"), event.get("attempt")
        if kind == "attempt_started":
            restored = None
        elif type(step) is not int:
            continue
        elif kind == "rolled_back":  # somebody wants to go on from there
            found = [each for each in found if each.restored != step]
        elif kind == "restored":
            restored = step
        elif kind == "save_durable":
            found = [each for each in found if each.restored != step]
            if restored is not None and step >= restored:
                restored = None  # what comes is no longer the doing of what was loaded
        elif kind == "failed" and restored is not None and type(attempt) is int and event.get("cause") == "program":
            found.append(Crash(attempt, restored, step))
    return found


def suspects(crashes: Sequence[Crash]) -> dict[int, str]:
    """Return the steps of the checkpoints that are not to be loaded again, each with the reason."""
    found = {}
    later = [each for each in crashes if each.step > each.restored]
    for restored in dict.fromkeys(each.restored for each in later):
        own = [each for each in later if each.restored == restored][-CRASHES:]
        step = own[-1].step
        if len(own) < CRASHES or any(each.step != step for each in own):
            continue
        if any(each.step == step and each.restored != restored for each in crashes):
            continue
        attempts = " and ".join(str(each.attempt) for each in own)
        found[restored] = (
            f"attempts {attempts} loaded it and crashed both after step {step}; it is tried again only if asked for "
            f"(restore(allow_suspect=True), --allow-suspect)"
        )
    return found


def starts_in_vain(events: Sequence[Mapping[str, Any]], launch: str) -> int:
    """Return how many starts of a launch, the latest ones in a row, went on from no later step than the one before.

    A durable save begins a new row. `launch`: as in the events of the starts; torchrun made all starts of one.
    """
    count, furthest = 0, -1
    for event in events:
        kind, step = event.get("event"), event.get("step")
        if kind == "attempt_started":
            is_ours = event.get("launch") == launch
            count, furthest = (count + 1, furthest) if is_ours else (0, -1)
        elif kind == "save_durable":
            count = 0
        elif kind == "restored" and type(step) is int and step > furthest:
            count, furthest = min(count, 1), step
    return count
