"""A digest of tensors that is computed where they lie: the same on every device, and for every sharding.

It is a sum of 64 bits with a product for each element: its bits, times an odd number for each coordinate of where it is
in the whole tensor. So the digests of the shards of a tensor add up to that of the whole, however it is sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ckptman._torch_compat import is_traceable_wrapper_subclass

PIECE_ELEMENTS = 1 << 18
"""So many elements are digested at a time: as many as stay in the cache of a core."""
PIECE_ELEMENTS_ON_DEVICE = 1 << 22
"""On a device so many: the start of a kernel costs more than what it does with less."""


class Digester:
    """Digests the parts of tensors. It keeps the numbers of the last coordinates: layers of a model are alike."""

    def __init__(self) -> None:
        self._factors: dict[tuple[int, int, int, torch.device], torch.Tensor] = {}
        self._held = 0

    def digest(self, part: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
        """Return the digest of a part that lies at these offsets of its tensor: a tensor without dimensions, of int64,
        on the device of the part. Of a tensor that is made of others, that of the others."""
        totals = [self._total(each, offsets) for each in components(part)]
        # Their sum modulo 2**64: multiplied and added on the device, where int64 wraps around.
        return sum((total * (2 * number + 1) for number, total in enumerate(totals[1:], 1)), totals[0])

    def digest_or_none(self, part: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor | None:
        """Return the same; None for a tensor of a class that tells nothing of what it is made of."""
        try:
            return self.digest(part, offsets)
        except torch.OutOfMemoryError:
            return self.digest(part.to("cpu"), offsets)
        except (RuntimeError, TypeError, NotImplementedError):
            return None

    def piece_digests(self, part: torch.Tensor, offsets: Sequence[int]) -> list[int]:
        """Return the digest of each of the `pieces` of a part."""
        found = [self._piece(each, at) for each, at in pieces(part, offsets)]
        return torch.stack(found).tolist() if found else []

    def _total(self, part: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.int64, device=part.device)
        offsets = [*[0] * (part.dim() - len(offsets)), *offsets][: part.dim()]
        most = PIECE_ELEMENTS if part.device.type == "cpu" else PIECE_ELEMENTS_ON_DEVICE
        for piece, at in pieces(part, offsets, most):
            total += self._piece(piece, at)
        return total

    def _piece(self, part: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
        part, offsets = (part, offsets) if part.dim() else (part.reshape(1), [0])
        bits = part.contiguous().view({1: torch.uint8, 2: torch.int16}.get(part.dtype.itemsize, torch.int32))
        wider = bits.shape[-1] // part.shape[-1]
        columns = self._numbers(bits.dim(), offsets[-1] * wider, bits.shape[-1], bits.device)
        sums = (bits.reshape(-1, bits.shape[-1]).to(torch.int64) * columns).sum(1)
        for axis in reversed(range(bits.dim() - 1)):
            numbers = self._numbers(axis, offsets[axis], bits.shape[axis], bits.device)
            sums = (sums.reshape(-1, bits.shape[axis]) * numbers).sum(1)
        return sums.reshape(())

    def _numbers(self, axis: int, offset: int, size: int, device: torch.device) -> torch.Tensor:
        """Return odd numbers of 64 bits, which look random, for positions along an axis."""
        key = axis, offset, size, device
        if key not in self._factors:
            if self._held + size > PIECE_ELEMENTS_ON_DEVICE:
                self._factors, self._held = {}, 0
            numbers = torch.arange(offset + 1, offset + 1 + size, dtype=torch.int64, device=device) + (axis << 48)
            for shift, factor in ((31, -0x61C8864680B583EB), (29, -0x40A7B892E31B1A47), (32, -0x6B2FB644ECCEEE15)):
                numbers = (numbers ^ (numbers >> shift)) * factor
            self._factors[key], self._held = numbers | 1, self._held + size
        return self._factors[key]


def components(part: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that a tensor is made of, such as the numbers and scales of a quantized one."""
    if is_traceable_wrapper_subclass(part):
        names, _ = part.__tensor_flatten__()
        return [piece for name in names for piece in components(getattr(part, name))]
    plain = part.detach().as_subclass(torch.Tensor)
    if plain.is_quantized:
        return [plain.int_repr()]
    if plain.layout == torch.sparse_coo:
        plain = plain.coalesce()
        return [plain.indices(), plain.values()]
    return [plain.resolve_conj().resolve_neg()]


def pieces(
    part: torch.Tensor, offsets: Sequence[int], most: int = PIECE_ELEMENTS
) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Yield a part in boxes of at most so many elements, views of it, each with its offsets in the whole tensor."""
    if part.numel() <= most:
        if part.numel():
            yield part, list(offsets)
        return
    axis = next(axis for axis, size in enumerate(part.shape) if size > 1)
    step = max(1, most * part.shape[axis] // part.numel())
    for begin in range(0, part.shape[axis], step):
        few = part.narrow(axis, begin, min(step, part.shape[axis] - begin))
        yield from pieces(few, [*offsets[:axis], offsets[axis] + begin, *offsets[axis + 1 :]], most)
