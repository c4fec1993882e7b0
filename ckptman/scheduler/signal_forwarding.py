"""How the processes of a batch script are asked to stop, each in the way that it understands."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from ckptman.scheduler.process_tree import handles

_LAUNCHERS_OF_STEPS = {"srun"}
"""Given SIGTERM, it kills its tasks at once. They get theirs from Slurm."""


def tell_to_stop(script: int, number: signal.Signals, steps: Callable[[], None] | None) -> str:
    """Hand a signal on to the processes below and including `script`, a process id. What was done, for people.

    A script that catches the signal gets it, and does the rest. Otherwise whoever on this node understands SIGTERM gets
    that, the topmost of each branch: torchrun passes it on to its workers, training does not to its data loaders, and
    bash, which would die of it, is left alone. `steps` has Slurm tell the tasks of `srun`; None where it has done so.
    """
    import psutil

    if handles(script, number):
        os.kill(script, number)
        return "handed on to the script, which catches it"
    told = []
    if steps is not None:
        steps()
        told.append("SIGTERM to the tasks of srun")
    try:
        left = [psutil.Process(script)]
    except psutil.Error:
        return "the script has ended"
    while left:
        process = left.pop()
        try:
            if process.name() in _LAUNCHERS_OF_STEPS:
                continue
            if handles(process.pid, signal.SIGTERM):
                process.send_signal(signal.SIGTERM)
                told.append(f"SIGTERM to {process.name()}")
            else:
                left += process.children()
        except psutil.Error:
            continue
    return ", ".join(told) or "Slurm has told the tasks"
