"""What is the fault of the environment: an outage, a shortage, a broken device; not of a checkpoint or of the program.

The one list of it. Whoever reads a file asks whether its error says anything about the bytes, a load whether another
checkpoint would help, the leader what its attempt failed of.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from ckptman._tracebacks import raised_from
from ckptman.errors import BusyError, CommitError, CorruptError, RankLostError, SchedulerError

SHORTAGE = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""This process or its host has no memory or no descriptor left."""
AWAY = (
    *(errno.ETIMEDOUT, errno.ENOTCONN, errno.ENODEV, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED),
)
"""The server of a mount is not reached, or its client was shut out."""
DENIED = (errno.EACCES, errno.EPERM)
"""This user may not read it."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""The disk is full, or the quota used up."""
ELSEWHERE = (*SHORTAGE, *AWAY, *DENIED)
"""An error of reading that says nothing about the bytes of the file."""
UNREADABLE = (errno.EIO, errno.EREMOTEIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA, errno.EILSEQ)
"""The disk does not give the bytes: to whoever wants them they are damaged."""

_OUTAGES = (*AWAY, *SHORTAGE, *FULL, errno.EIO, errno.ESTALE)
_OF_OURS = (BusyError, CommitError, RankLostError, SchedulerError)
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
_BROKEN_DEVICE = re.compile(
    r"uncorrectable (?:ecc|nvlink)|fallen off the bus|no cuda-capable device|no hip gpus|cuda error: unknown error"
    r"|cuda driver initialization failed|hardware exception by gpu|system not yet initialized",
    re.IGNORECASE,
)
"""What drivers of CUDA and ROCm say where the device or its link is broken, and not the program."""
_OF_A_DEVICE = ("AcceleratorError", "CUDA error:", "HIP error:")
"""What is in the text of any error of a device, at whatever was asked of it next: that may well be a load."""
_NO_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "error: out of memory")
"""What torch's allocators say: on the CPU their error has no class of its own."""
_TEXTS = re.compile(
    r"out of memory|memoryerror|can(?:no|')t allocate memory|alloc_failed|\b(?:nccl|gloo|rccl)\b"
    r"|connection (?:closed|reset|refused|aborted|timed out)|broken pipe|socket timeout|timed out waiting"
    r"|dataloader (?:worker .*(?:killed by signal|exited unexpectedly)|timed out)"
    r"|no space left|disk quota|input/output error|stale file handle|transport endpoint|too many open files"
    r"|shared memory object|start new thread|(?:cuda|hip) error: (?!device-side assert)|cu(?:blas|dnn)_status_",
    re.IGNORECASE,
)
"""What a RuntimeError says where memory, a device, a connection, another process or a mount was to blame."""

Trouble = Literal["shortage", "away", "denied", "device"]
Cause = Literal["environment", "program"]


@contextmanager
def reading(path: Path, remedy: str) -> Iterator[None]:
    """Inside, what the system refuses of a file counts as damage of it, unless the fault is elsewhere (`ELSEWHERE`).

    Raises: CorruptError; OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno in ELSEWHERE:
            raise
        raise CorruptError(f"{path} cannot be read: {error.strerror or error}; {remedy}") from error


def trouble_of_load(text: str, code: int | None) -> Trouble | None:
    """Return what kept a rank from loading, where that says nothing about the checkpoint; None where it may.

    Args:
        text: The error as it crossed ranks, "Class: message".
        code: Its errno, where the system said no.
    """
    if code in SHORTAGE or "MemoryError" in text.partition(":")[0] or any(sign in text for sign in _NO_MEMORY):
        return "shortage"
    if code in AWAY:
        return "away"
    if code in DENIED:
        return "denied"
    return "device" if any(sign in text for sign in _OF_A_DEVICE) else None


def is_broken_device(error: BaseException) -> bool:
    """Return whether an error says that a device of this node is broken, so that the node had better be left out."""
    return isinstance(error, RuntimeError) and _BROKEN_DEVICE.search(str(error)) is not None


def cause_of(error: BaseException) -> Cause:
    """Return whether an attempt failed of its environment: a disk, memory, a device, a connection, a rank, a user.

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
        cause, context = raised_from(each)
        left += [cause, context if context is not None and _is_outage(context) else None]
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
    if is_broken_device(error) or getattr(failure, "errno", None) is not None:
        return True
    text = str(error) if isinstance(error, RuntimeError) else str(getattr(failure, "text", ""))
    return _TEXTS.search(text) is not None
