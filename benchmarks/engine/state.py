"""The state that everything is measured on: fp32 tensors with the shapes of a transformer."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import torch

LAYERS = 12
ITEM_BYTES = 4

State = dict[str, torch.Tensor]


def shapes(total_bytes: int) -> dict[str, tuple[int, ...]]:
    """By name. Twelve layers of six tensors take about 4/5 of the bytes; the embedding takes the rest."""
    count = total_bytes // ITEM_BYTES
    width = max(16, int((0.8 * count / (12 * LAYERS)) ** 0.5) // 16 * 16)
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        found[f"{name}.norm.weight"] = (width,)
        found[f"{name}.attention.qkv.weight"] = (3 * width, width)
        found[f"{name}.attention.out.weight"] = (width, width)
        found[f"{name}.mlp.norm.weight"] = (width,)
        found[f"{name}.mlp.up.weight"] = (4 * width, width)
        found[f"{name}.mlp.down.weight"] = (width, 4 * width)
    taken = sum(torch.Size(shape).numel() for shape in found.values())
    found["embedding.weight"] = ((count - taken) // width, width)
    return found


def empty_state(total_bytes: int) -> State:
    """Memory that has been touched: a load into fresh memory measures the kernel."""
    return {name: torch.zeros(shape) for name, shape in shapes(total_bytes).items()}


def empty_shared_state(total_bytes: int) -> State:
    """The same, shared with the processes that are forked from this one. Begins off a page, as torch's memory does."""
    state: State = {}
    for name, shape in shapes(total_bytes).items():
        count = torch.Size(shape).numel()
        memory = mmap.mmap(-1, 64 + count * ITEM_BYTES)
        state[name] = torch.frombuffer(memory, dtype=torch.float32, count=count, offset=64).view(shape).zero_()
    return state


def fill(state: State) -> State:
    """Random values, the same in every process."""
    for name, values in values_of({name: tuple(tensor.shape) for name, tensor in state.items()}):
        state[name].copy_(values)
    return state


def values_of(wanted: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(20)
    for name, shape in wanted.items():
        yield name, torch.rand(shape, generator=generator)


def first_difference(state: State) -> str | None:
    """The first tensor that does not have the values of `fill`."""
    wanted = values_of({name: tuple(tensor.shape) for name, tensor in state.items()})
    return next((name for name, values in wanted if not torch.equal(state[name], values)), None)


def bytes_of(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def flat_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    flat: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)
