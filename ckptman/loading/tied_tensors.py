"""Tensors that have several names in this run, and can be loaded only if the same was saved under each of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

import torch

from ckptman.loading.checkpoint_reader import SavedState
from ckptman.loading.read import fills_for_box, read_fills
from ckptman.state.file_layout import as_bytes
from ckptman.state.local_shards import Box, local_parts
from ckptman.state.tensor_container import is_plain


def apart_in_one_memory(
    saved: SavedState, targets: Mapping[str, torch.Tensor], plain: Iterable[str], *, verify: bool = True
) -> list[str]:
    """What is one tensor in this run and was saved as two that differ: a copy that was kept of a parameter, say.

    `plain`: entries of the state that are dicts, lists or tensors. Only where one of these has a part in it is it
    looked at: what modules tie is theirs to say. Raises: CorruptError.
    """
    prefixes = tuple(f"{name}." for name in plain)
    if not any(f"{name}.".startswith(prefixes) for name in targets):
        return []
    names: dict[Hashable, list[tuple[str, Box, torch.Tensor]]] = {}
    for name, tensor in targets.items():
        for box, memory in local_parts(tensor, name):
            if is_plain(memory) and memory.numel():
                place = (memory.device, memory.data_ptr(), memory.shape, memory.stride(), memory.dtype)
                names.setdefault(place, []).append((name, box, memory))
    found = []
    for (first, box, memory), *others in names.values():
        if not others or not any(f"{name}.".startswith(prefixes) for name in (first, *(each[0] for each in others))):
            continue
        known = _saved_bytes(saved, first, box, memory, verify)
        found += [
            f"{name}: in this run the same memory as {first}, in the checkpoint another tensor: clone() one of them"
            for name, box, memory in others
            if not torch.equal(_saved_bytes(saved, name, box, memory, verify), known)
        ]
    return found


def _saved_bytes(saved: SavedState, name: str, box: Box, like: torch.Tensor, verify: bool) -> torch.Tensor:
    read = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    read_fills(saved, fills_for_box(saved, name, box.offsets, read), verify=verify)
    return as_bytes(read)
