"""Bringing bytes that were read to a device: through a few pinned buffers that are used again and again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from ckptman.state.file_layout import put

BUFFER_BYTES = 8 * 1024 * 1024
BUFFERS = 8

_free: deque[tuple[torch.Tensor, Any]] = deque()
"""Pinned buffers, each with the event after which it may be used again. Kept: pinning memory is slow."""


class Uploader:
    """Copies host memory into tensors of one device, from several threads at a time, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        # What was done to the targets before must be over before they are written.
        self._stream.wait_stream(self._module.current_stream(device))

    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source`, whose memory may change when this returns. It is there after `finish`."""
        size = math.prod(source.shape) * source.dtype.itemsize
        buffer = self._buffer(size)
        pinned = buffer[:size].view(source.dtype).view(source.shape)
        put(pinned, source)
        with self._module.stream(self._stream):
            put(target, pinned, non_blocking=True)
            event = self._stream.record_event()
        if len(_free) < BUFFERS:
            _free.append((buffer, event))
        else:
            event.synchronize()

    def finish(self) -> None:
        """Wait until everything is on the device."""
        self._stream.synchronize()

    def _buffer(self, size: int) -> torch.Tensor:
        try:
            buffer, event = _free.popleft()
        except IndexError:
            return _pinned(size)
        if len(_free) + 1 < BUFFERS and not event.query():  # the oldest is on its way still: rather one more
            _free.appendleft((buffer, event))
            return _pinned(size)
        event.synchronize()
        return buffer if len(buffer) >= size else _pinned(size)


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(max(size, BUFFER_BYTES), dtype=torch.uint8, device="cpu", pin_memory=True)


class Uploads:
    """Puts host memory into tensors wherever they are; those of a device are there after `finish`."""

    def __init__(self) -> None:
        self._uploaders: dict[torch.device, Uploader] = {}

    def to(self, device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """How to put memory into a tensor of a device, for any thread. The memory may change when that returns."""
        if device.type == "cpu":
            return put
        if device not in self._uploaders:
            self._uploaders[device] = Uploader(device)
        return self._uploaders[device].put

    def finish(self) -> None:
        """Wait until everything is where it belongs."""
        for uploader in self._uploaders.values():
            uploader.finish()
