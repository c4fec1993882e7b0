"""What earlier attempts of a run measured, by its journal: what a save takes, and how fast they trained."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptman.runtime.journal import number_in, read_journal
from ckptman.storage.format.paths import journal_path

LAST_SAVES = 5
"""How many saves are looked at: one slow save must not count for ever."""


def save_seconds(root: str | os.PathLike[str]) -> float | None:
    """Return what a save takes by the journal of a root (`typical_save_seconds`); None too where it cannot be read."""
    try:
        events, _ = read_journal(journal_path(Path(root)))
    except OSError:
        return None
    return typical_save_seconds(events)


def typical_save_seconds(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Return seconds from decision to durable of the longest but one of the last 5 saves; None: none was measured.

    Of fewer than three the longest. One save that met a file system in trouble is not what the next one takes.
    """
    took = [number_in(event.get("seconds")) for event in events if event.get("event") == "save_durable"]
    last = sorted([seconds for seconds in took if seconds is not None][-LAST_SAVES:], reverse=True)
    return (last[1] if len(last) > 2 else last[0]) if last else None


def steps_per_second(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Return how fast the newest attempt that tells it trained, without the time it waited for saves; None: none does.

    By `progress`, whose first one in an attempt has its slow first step; else by `pace_changed`; else by the moments of
    its first step and its saves.
    """
    attempts: dict[Any, list[Mapping[str, Any]]] = {}
    for event in events:
        attempts.setdefault(str(event.get("attempt")), []).append(event)
    for own in reversed(attempts.values()):
        for found in (_by_progress(own), _by_pace(own), _by_saves(own)):
            if found:
                return found
    return None


def _by_progress(events: Sequence[Mapping[str, Any]]) -> float | None:
    steps = seconds = 0.0
    stalled: float | None = None
    for event in (each for each in events if each.get("event") == "progress"):
        done, took = number_in(event.get("steps")), number_in(event.get("seconds"))
        stalls = number_in(event.get("stall_seconds")) or 0.0
        if stalled is not None and done is not None and took is not None:
            steps, seconds = steps + done, seconds + took - max(0.0, stalls - stalled)
        stalled = stalls
    return steps / seconds if seconds > 0 else None


def _by_pace(events: Sequence[Mapping[str, Any]]) -> float | None:
    paces = [number_in(each.get("step_seconds")) for each in events if each.get("event") == "pace_changed"]
    return 1 / paces[-1] if paces and paces[-1] else None


def _by_saves(events: Sequence[Mapping[str, Any]]) -> float | None:
    points = [
        (step, at)
        for each in events
        if each.get("event") in ("first_step", "save_begun")
        and (step := number_in(each.get("step"))) is not None
        and (at := _time(each)) is not None
    ]
    if len(points) < 2:
        return None
    (first, began), (last, ended) = points[0], points[-1]
    stalls = sum(
        number_in(each.get("stall_seconds")) or 0.0
        for each in events
        if each.get("event") == "save_durable" and first <= (number_in(each.get("step")) or 0.0) < last
    )
    seconds = ended - began - stalls
    return (last - first) / seconds if seconds > 0 and last > first else None


def _time(event: Mapping[str, Any]) -> float | None:
    return number_in(event.get("time"))
