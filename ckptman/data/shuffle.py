"""In which order the samples are seen: pure functions of the seed and the global sample index.

Nothing is shuffled in memory and nothing is remembered. Sample i of the run is `order(seed, n)(i)`, which any rank
computes for any i, so a run that goes on with another number of ranks goes on in the same global order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.uint64]]

_ROUNDS = 4
_GOLDEN = 0x9E3779B97F4A7C15


def sample_ids(first: int, count: int, samples: int, seed: int) -> Indices:
    """Which samples of the data set are the global samples first ... first + count - 1. Shape [count].

    Each epoch (every `samples` global samples) is another permutation of 0 ... samples - 1.
    """
    ids = np.empty(count, np.uint64)
    done = 0
    while done < count:  # once, or once more for each epoch boundary inside the range
        epoch, start = divmod(first + done, samples)
        length = min(count - done, samples - start)
        ids[done : done + length] = permute(np.arange(start, start + length, dtype=np.uint64), samples, seed, epoch)
        done += length
    return ids


def permute(indices: Indices, samples: int, seed: int, epoch: int) -> Indices:
    """The permutation of 0 ... samples - 1 that belongs to (seed, epoch), at these indices.

    A balanced Feistel network (Luby and Rackoff, 1988) on the smallest even number of bits that holds `samples`; what
    falls outside is sent through again until it falls inside (cycle walking; Black and Rogaway, 2002), at most four
    rounds on average.
    """
    half = np.uint64(max(1, (max(samples - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    first = seed * 0xD1342543DE82EF95 + epoch * 0x2545F4914F6CDD1D
    keys = _mix(np.array([(first + turn * _GOLDEN) % 2**64 for turn in range(1, _ROUNDS + 1)], np.uint64))
    result = indices.astype(np.uint64)
    outside = np.ones(result.shape, bool)
    while outside.any():
        left, right = result[outside] >> half, result[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        result[outside] = (left << half) | right
        outside = result >= np.uint64(samples)
    return result


def share(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """The part [start, end) of `count` items that a rank takes; parts are neighbours and differ by at most one item."""
    return rank * count // world_size, (rank + 1) * count // world_size


def largest_share(count: int, world_size: int) -> int:
    """The most items that `share` gives to any rank."""
    return -(-count // world_size)


def _mix(values: Indices) -> Indices:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014); arithmetic modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Indices = values ^ (values >> np.uint64(31))
    return mixed
