"""What an attempt failed of: the program and what it had loaded, or what is around it. Told by the error itself."""

from __future__ import annotations

import re
from typing import Literal

from ckptman.errors import BusyError, CommitError, RankLostError, SchedulerError
from ckptman.lifecycle.nodes import is_device_trouble

Cause = Literal["environment", "program"]

_OF_OURS = (BusyError, CommitError, RankLostError, SchedulerError)
_OF_TORCH = {"OutOfMemoryError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
"""By name: this module is read where there is no torch."""
_TEXTS = re.compile(
    r"out of memory|memoryerror|can(?:no|')t allocate memory|alloc_failed|nccl|gloo|rccl"
    r"|connection (?:closed|reset|refused|aborted|timed out)|broken pipe|socket timeout|timed out waiting"
    r"|dataloader worker .*(?:killed by signal|exited unexpectedly)"
    r"|no space left|disk quota|input/output error|stale file handle|transport endpoint",
    re.IGNORECASE,
)
"""What a RuntimeError says where memory, a connection, another process or a mount was to blame."""


def cause_of(error: BaseException) -> Cause:
    """Whether an error is the environment's: a disk or a mount, memory, a device, a connection, another rank, a user.

    What an error was raised from counts like the error itself. Called by the leader when its attempt fails.
    """
    seen = set[int]()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        if _is_environment(each):
            return "environment"
        each = each.__cause__
    return "program"


def _is_environment(error: BaseException) -> bool:
    # What is no Exception asks to leave: Ctrl-C, sys.exit, a signal.
    if not isinstance(error, Exception) or isinstance(error, (OSError, MemoryError, *_OF_OURS)):
        return True
    if any(kind.__name__ in _OF_TORCH for kind in type(error).__mro__) or is_device_trouble(error):
        return True
    # What failed on another rank comes as that rank's text, and its errno where the system said no.
    failure = getattr(error, "failure", None)
    if getattr(failure, "errno", None) is not None:
        return True
    text = str(error) if isinstance(error, RuntimeError) else str(getattr(failure, "text", ""))
    return _TEXTS.search(text) is not None
