"""Loaders that a framework has prepared: what it does around the DataLoader within, without looking a batch ahead.

Looking ahead shifts what a dataset draws from the generators of the process against what the training draws from them.
What Accelerate wants to know by it, whether a batch is the last one, is known from the number of batches.
Fabric would begin to count epochs anew after a restore.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import repeat
from typing import Any, TypeVar

import torch

from ckptman.engine.state.modules import is_prepared_loader, unwrap
from ckptman.errors import ConfigError

T = TypeVar("T")


class AccelerateLoader:
    """A loader that Accelerate has prepared for this rank.

    Args:
        loader: What `Accelerator.prepare` has returned.

    Raises:
        ConfigError: Rank 0 reads for all ranks (`dispatch_batches`).
    """

    def __init__(self, loader: Any) -> None:
        if hasattr(loader, "slice_fn"):
            raise ConfigError(
                "ResumableLoader: rank 0 reads the batches of this loader for all ranks, which have no position then: "
                "leave it out of accelerator.prepare(), or say DataLoaderConfiguration(dispatch_batches=False)"
            )
        sampler = loader.get_sampler()
        if hasattr(sampler, "initial_seed") and sampler.generator is None:
            sampler.generator = torch.Generator()  # as it would itself: what the loader has is known from now on
        self._loader = loader
        self.inside: Any = loader.base_dataloader
        """The DataLoader that gives the batches of this rank."""

    def begin(self) -> None:
        """Begin a pass on all ranks: they draw the same order."""
        from accelerate.utils import synchronize_rng_states

        synchronize_rng_states(self._loader.rng_types or [], self._loader.synchronized_generator)

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset, too, as Accelerate does."""
        if callable(set_epoch := getattr(self.inside.dataset, "set_epoch", None)):
            set_epoch(epoch)

    def around(self, batches: Iterator[T], left: int) -> Iterator[T]:
        """Give these batches, of which there are `left`, on the device of this rank, and tell Accelerate about them."""
        return _AccelerateBatches(self._loader, batches, left)


class _AccelerateBatches(Iterator[T]):
    """Batches on the device of this rank. It goes on behind a batch that cannot be read."""

    def __init__(self, loader: Any, batches: Iterator[T], left: int) -> None:
        self._loader, self._batches, self._left = loader, batches, left
        self._is_open = False

    def __next__(self) -> T:
        from accelerate.utils import send_to_device

        loader = self._loader
        if not self._is_open:
            loader.begin()
            self._is_open = True
        self._left -= 1
        loader.end_of_dataloader = self._left == 0
        try:
            batch = next(self._batches)
        except StopIteration:
            self._end()
            raise
        if loader.device is None:
            return batch
        moved: T = send_to_device(batch, loader.device, non_blocking=loader._non_blocking)
        return moved

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loader.end()


class FabricLoader:
    """A loader that `Fabric.setup_dataloaders` has returned."""

    def __init__(self, loader: Any) -> None:
        self.inside: Any = unwrap(loader)
        """The DataLoader that gives the batches of this rank."""
        self._device = loader.device
        self._move = sys.modules[type(loader).__module__].move_data_to_device  # of lightning or of lightning_fabric

    def begin(self) -> None:
        """Begin a pass: its order is that of the samplers."""

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: Fabric tells the samplers alone, and they are told anyway."""

    def around(self, batches: Iterator[T], left: int) -> Iterator[T]:
        """Give these batches on the device of this rank."""
        if self._device is None:
            return batches
        return map(self._move, batches, repeat(self._device))  # goes on behind a batch that cannot be read


def prepared(loader: object) -> AccelerateLoader | FabricLoader | None:
    """Return a loader as one that Accelerate or Fabric has prepared; None: neither has."""
    if is_prepared_loader(loader):
        return AccelerateLoader(loader)
    return FabricLoader(loader) if unwrap(loader) is not loader else None
