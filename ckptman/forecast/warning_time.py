"""How long before its end a job wants to be warned, so that a save is durable in time. Pure."""

from __future__ import annotations

import math

from ckptman.policies.save_policies import BeforeDeadline

UNMEASURED_SECONDS = 180
"""Before any save was measured."""
SHORTEST_LIMIT_SECONDS = 600.0
"""Slurm looks every 30 seconds, and may warn a minute early: a job that is shorter would be warned when it begins."""
_LOOK_SECONDS, _FULL_SECONDS = 30, 30


def warning_seconds(save_seconds: float | None) -> int:
    """So long before the time limit the warning has to come: a save with its reserve (as `BeforeDeadline` reckons, the
    step that runs and an evaluation included), and half a minute between two looks of the controller.

    `save_seconds`: until a save is durable, as measured; None: not yet.
    """
    if save_seconds is None:
        return UNMEASURED_SECONDS
    policy = BeforeDeadline()
    needed_seconds = save_seconds * policy.safety + policy.margin_seconds + _LOOK_SECONDS
    return math.ceil(needed_seconds / _FULL_SECONDS) * _FULL_SECONDS
