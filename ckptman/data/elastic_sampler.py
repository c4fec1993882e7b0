"""A sampler whose order does not depend on the number of ranks, so that an epoch may be finished on another number."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

from ckptman.data.shuffle import Indices, permute
from ckptman.errors import ConfigError

_AT_ONCE = 4096


class ElasticSampler(Sampler[int]):
    """Share out the samples of a data set over ranks, each once an epoch, on any number of ranks.

    The global order is a function of seed and epoch. Of `world_size` samples in a row each rank takes one, so that all
    ranks have as many. At most `world_size - 1` samples are left over at the end of an epoch: the next one begins with
    them, so none is dropped and none is seen twice.

        loader = ckptman.ResumableLoader(DataLoader(data, 32, sampler=ckptman.ElasticSampler(len(data), seed=0)))

    Within a `ResumableLoader` it needs nothing else. In a plain DataLoader, call `set_epoch` at the start of each
    epoch; what is left over is then left out.

    Args:
        size: The number of samples in the data set.
        seed: Decides the order.
        shuffle: Each epoch in another order; False: in the order of the data set.
        rank: The rank among those that read different data. Default: that of the default process group, 0 without one.
        world_size: The number of ranks that read different data. Default: that of the default process group.

    Raises:
        ConfigError: There are fewer samples than ranks, or the rank is not below `world_size`.
    """

    def __init__(
        self, size: int, *, seed: int = 0, shuffle: bool = True, rank: int | None = None, world_size: int | None = None
    ) -> None:
        self._rank, self._world_size = rank, world_size
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"ElasticSampler: rank {self.rank} is not below world_size={self.world_size}: give both")
        if size < self.world_size:
            raise ConfigError(
                f"ElasticSampler: {size} samples cannot be shared out over {self.world_size} ranks: use fewer ranks"
            )
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self.epoch = 0
        self.position = 0
        """The samples that all ranks together have taken since the start of epoch 0, when an iterator is made."""

    @property
    def rank(self) -> int:
        """The rank among those that read different data."""
        return self._rank if self._rank is not None else dist.get_rank() if _joined() else 0

    @property
    def world_size(self) -> int:
        """The number of ranks that read different data."""
        return self._world_size if self._world_size is not None else dist.get_world_size() if _joined() else 1

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch (from 0), if this is not the epoch that it is in already."""
        if epoch != self.epoch:
            self.seek(epoch, epoch * self.size)

    def seek(self, epoch: int, position: int) -> None:
        """Let the next iterator begin at a position, counted as `position` is, and end with `epoch`."""
        self.epoch, self.position = epoch, position

    def __len__(self) -> int:
        """Return how many samples this rank takes from the position to the end of the epoch."""
        return max(0, ((self.epoch + 1) * self.size - self.position) // self.world_size)

    def __iter__(self) -> Iterator[int]:
        first = self.position + self.rank
        count = len(self)
        for start in range(0, count, _AT_ONCE):
            taken = np.arange(start, min(start + _AT_ONCE, count), dtype=np.uint64)
            yield from self._samples(np.uint64(first) + taken * np.uint64(self.world_size)).tolist()

    def _samples(self, positions: Indices) -> Indices:
        """Return which samples of the data set are at these positions of the run."""
        epochs, within = np.divmod(positions, np.uint64(self.size))
        if not self.shuffle:
            return within
        for epoch in np.unique(epochs):
            here = epochs == epoch
            within[here] = permute(within[here], self.size, self.seed, int(epoch))
        return within


def _joined() -> bool:
    return dist.is_available() and dist.is_initialized()
