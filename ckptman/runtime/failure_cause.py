"""What an attempt failed of: the program and what it had loaded, or what is around it. Told by the error itself."""

from __future__ import annotations

import errno
import re
from typing import Literal

from ckptman.errors import BusyError, CommitError, RankLostError, SchedulerError
from ckptman.io.safe_open import AWAY, SHORTAGE
from ckptman.runtime.bad_nodes import is_device_trouble

Cause = Literal["environment", "program"]

_OF_OURS = (BusyError, CommitError, RankLostError, SchedulerError)
_OUTAGES = (*AWAY, *SHORTAGE, errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT)
_BY_NAME = {
    *("OutOfMemoryError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"),
    *("BrokenExecutor", "SubprocessError", "HTTPException", "QueueShutDown"),
}
"""Classes of torch, which is not there where this module is read, and of modules that are seldom there."""
_OF_CLIENTS = {
    *("aiobotocore", "aiohttp", "azure", "boto3", "botocore", "comet_ml", "fsspec", "gcsfs", "google", "grpc", "http"),
    *("httpcore", "httpx", "huggingface_hub", "mlflow", "neptune", "paramiko", "redis", "requests", "s3fs", "urllib3"),
    *("wandb",),
}
"""Packages that speak with servers: what they raise is an outage as a rule, and never the doing of what was loaded."""
_TEXTS = re.compile(
    r"out of memory|memoryerror|can(?:no|')t allocate memory|alloc_failed|\b(?:nccl|gloo|rccl)\b"
    r"|connection (?:closed|reset|refused|aborted|timed out)|broken pipe|socket timeout|timed out waiting"
    r"|dataloader (?:worker .*(?:killed by signal|exited unexpectedly)|timed out)"
    r"|no space left|disk quota|input/output error|stale file handle|transport endpoint|too many open files"
    r"|shared memory object|start new thread|(?:cuda|hip) error: (?!device-side assert)|cu(?:blas|dnn)_status_",
    re.IGNORECASE,
)
"""What a RuntimeError says where memory, a device, a connection, another process or a mount was to blame."""


def cause_of(error: BaseException) -> Cause:
    """Whether an error is the environment's: a disk or a mount, memory, a device, a connection, another rank, a user.

    What an error was raised from counts like the error itself, and so does each of a group; what it was raised while
    handling counts where that is an outage. Never raises. Called by the leader when its attempt fails.
    """
    try:
        return "environment" if _has_environment(error) else "program"
    except Exception:  # noqa: BLE001 a user's class of errors may have anything for an attribute
        return "program"


def _has_environment(error: BaseException) -> bool:
    seen = set[int]()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if _is_environment(each):
            return True
        context = None if each.__suppress_context__ else each.__context__
        left += [each.__cause__, context if context is not None and _is_outage(context) else None]
        group = getattr(each, "exceptions", ())
        left += group if isinstance(group, tuple) else ()
    return False


def _is_outage(error: BaseException) -> bool:
    """Whether it is no answer of the program's own asking, as that a file is not there often is."""
    return isinstance(error, (MemoryError, ConnectionError, *_OF_OURS)) or getattr(error, "errno", None) in _OUTAGES


def _is_environment(error: BaseException) -> bool:
    # What is no Exception asks to leave: Ctrl-C, sys.exit, a signal. A group of them is one of what is in it.
    if not isinstance(error, Exception):
        return not hasattr(error, "exceptions")
    if isinstance(error, (OSError, EOFError, MemoryError, *_OF_OURS)):
        return True
    kinds = type(error).__mro__
    if any(each.__name__ in _BY_NAME or each.__module__.partition(".")[0] in _OF_CLIENTS for each in kinds):
        return True
    # What failed on another rank comes as that rank's text, and its errno where the system said no.
    failure = getattr(error, "failure", None)
    if is_device_trouble(error) or getattr(failure, "errno", None) is not None:
        return True
    text = str(error) if isinstance(error, RuntimeError) else str(getattr(failure, "text", ""))
    return _TEXTS.search(text) is not None
