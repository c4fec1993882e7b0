"""Bringing bytes that were read to a device: through a few pinned buffers that are used again and again."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch

from ckptman.sharded.image import put

BUFFER_BYTES = 8 * 1024 * 1024
BUFFERS = 8

_free: deque[tuple[torch.Tensor, Any]] = deque()
"""Pinned buffers, each with the event after which it may be used again. Kept: pinning memory is slow."""


class Uploader:
    """Copies host memory into tensors of one device, from several threads at a time, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
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
            buffer, event = torch.empty(0, dtype=torch.uint8, device="cpu"), None
        if event is not None:
            event.synchronize()
        if len(buffer) < size:
            buffer = torch.empty(max(size, BUFFER_BYTES), dtype=torch.uint8, device="cpu", pin_memory=True)
        return buffer
