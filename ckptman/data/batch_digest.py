"""Whether a loader gives the same batches again, told by a digest of the last one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from xxhash import xxh3_64

_MAX_BYTES = 65536
"""Of each array. A batch is digested at each step."""


def digest_of(batch: object) -> str:
    """Return a digest of a batch: its numbers, texts, and the head of each array in host memory; "" if there is none.

    Of an array on a device only the form counts: to read it would make the device wait.
    """
    digest = xxh3_64()
    try:
        for part in _parts(batch):
            digest.update(part)
    except Exception:  # noqa: BLE001 whatever class a batch is of: that must not end the training
        return ""
    return digest.hexdigest()


def _parts(value: object) -> Iterator[bytes | memoryview]:
    if isinstance(value, torch.Tensor):
        if value.is_nested or value.is_quantized or value.is_conj() or value.is_neg():
            return
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        if value.device.type == "cpu" and value.layout == torch.strided and value.is_contiguous():
            flat = value.detach().reshape(-1)[:_MAX_BYTES].view(torch.uint8)[:_MAX_BYTES]
            yield flat.numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode()
        if value.flags.c_contiguous and value.dtype.kind != "O":
            yield value.reshape(-1)[:_MAX_BYTES].tobytes()[:_MAX_BYTES]
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _parts(key)
            yield from _parts(each)
    elif isinstance(value, list | tuple):
        yield str(len(value)).encode()
        for each in value:
            yield from _parts(each)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        yield repr(value).encode()
    else:
        yield type(value).__qualname__.encode()
