"""Staging: a private copy in host memory, so that training may go on while the copy is written."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptman.sharded.state import Snapshot


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds, detached."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()


def borrow(snapshot: Snapshot) -> dict[str, Any]:
    """Local parts by flat name, not copied: for a save that training waits for."""
    return {name: local_part(tensor) for name, tensor in snapshot.tensors.items()} | snapshot.objects


class Stager:
    """Keeps one host buffer per tensor and fills it again for each save: fresh memory is several times slower."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def stage(self, snapshot: Snapshot) -> dict[str, Any]:
        """A private copy by flat name. The copy of the save before must be written by then: its buffers are reused."""
        staged: dict[str, Any] = {}
        on_device = False
        for name, tensor in snapshot.tensors.items():
            part = local_part(tensor)
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != part.shape or buffer.dtype != part.dtype:
                buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.device.type == "cuda")
            buffer.copy_(part, non_blocking=True)
            on_device = on_device or part.device.type not in ("cpu", "meta")
            staged[name] = buffer
        if on_device:
            torch.accelerator.synchronize()
        self._buffers = dict(staged)
        staged.update(_copy_objects(snapshot.objects))
        return staged


def _copy_objects(objects: Mapping[str, Any]) -> dict[str, Any]:
    immutable = (int, float, str, bool, bytes, type(None))
    return {name: each if isinstance(each, immutable) else copy.deepcopy(each) for name, each in objects.items()}
