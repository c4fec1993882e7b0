"""What accelerators are asked for: the device of a thread, events, graphs that are being captured, pinned memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ckptman.errors import warn_only

BUFFER_BYTES = 8 * 1024 * 1024
BUFFERS = 8
_free: deque[tuple[torch.Tensor, Any]] = deque()
"""Pinned buffers, each with the event after which it may be used again, or None. Kept: pinning memory is slow."""
_warned = False


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Inside, a device is the current one of this thread. A new thread has the first of the node, and what it asks of
    the runtime would make a context there, of half a GB for each rank."""
    module = torch.get_device_module(device)
    if hasattr(module, "device"):
        with module.device(device):
            yield
    else:
        yield


def is_capturing() -> bool:
    """Return whether what is done on the current stream goes into a graph, to be done later, instead of being done."""
    accelerator = torch.accelerator.current_accelerator()
    module: Any = None if accelerator is None else torch.get_device_module(accelerator)
    if not hasattr(module, "is_current_stream_capturing") or not module.is_initialized():
        return False
    return bool(module.is_current_stream_capturing())


def record(stream: Any) -> Any:
    """Return an event that is reached when what is on a stream is done. A thread that waits for it sleeps, where the
    device has such events: other ones keep a core busy that the training could use."""
    module = torch.get_device_module(stream.device)
    try:
        event = module.Event(blocking=True)
    except TypeError:
        event = module.Event()
    return stream.record_event(event)


def synchronize(device: torch.device, event: Any) -> None:
    """Wait for an event of a device, in any thread. Raises: RuntimeError, if the device has failed."""
    with on_device(device):
        event.synchronize()


def buffer_if_any(size_bytes: int) -> torch.Tensor | None:
    """Return pinned memory of at least so many bytes; None, and a warning, where none is to be had."""
    try:
        return _take_buffer(size_bytes)
    except RuntimeError as error:
        warn_unpinned(error)
        return None


def _take_buffer(size_bytes: int) -> torch.Tensor:
    try:
        buffer, event = _free.popleft()
    except IndexError:
        return _pinned(size_bytes)
    if event is not None:
        if len(_free) + 1 < BUFFERS and not event.query():  # the oldest is on its way still: rather one more
            _free.appendleft((buffer, event))
            return _pinned(size_bytes)
        event.synchronize()
    return buffer if len(buffer) >= size_bytes else _pinned(size_bytes)


def give_buffer(buffer: torch.Tensor, event: Any = None) -> None:
    """Give pinned memory back, for use after an event."""
    if len(_free) < BUFFERS and len(buffer) <= BUFFER_BYTES:
        _free.append((buffer, event))
    elif event is not None:
        event.synchronize()


def warn_unpinned(why: object) -> None:
    """Warn, once in the life of a process, that copies go through memory that is not pinned."""
    global _warned
    if not _warned:
        _warned = True
        warn_only(
            f"host memory cannot be pinned ({why}): copies between device and host go through memory that is not, "
            f"which is slower and blocks training for longer. Raise the limit of locked memory (ulimit -l), or ask for "
            f"more memory"
        )


def _pinned(size_bytes: int) -> torch.Tensor:
    return torch.empty(max(size_bytes, BUFFER_BYTES), dtype=torch.uint8, device="cpu", pin_memory=True)
