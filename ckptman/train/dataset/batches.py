"""The data of a run: a memory-mapped token file and one number, how many samples the run has consumed.

That number is global. A global batch is the samples [position, position + global_batch) in the order of
`data.shuffle`; each data-parallel rank takes its share of them, and shares need not be even. So the position
is all there is to save, it is the same on every rank, and it means the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ckptman.data.shuffle import largest_share, sample_ids, share
from ckptman.errors import ConfigError
from ckptman.train.config import DataConfig
from ckptman.train.dataset.tokenfile import map_tokens, read_meta, sample_count


class TokenData:
    """One rank's view of the data; a `Stateful`. One sample is `sequence_tokens` inputs and the targets one further."""

    def __init__(self, config: DataConfig, seed: int, rank: int = 0, world_size: int = 1) -> None:
        """Opens the token folder. Raises what `read_meta` and `sample_count` raise."""
        self.meta = read_meta(config.path)
        self.position = 0
        self.samples = sample_count(config.path, self.meta, config.sequence_tokens)
        self._config, self._seed = config, seed
        self._rank, self._world_size = rank, world_size
        self._tokens = map_tokens(config.path, self.meta)

    def next_batch(self) -> list[torch.Tensor]:
        """Return this rank's share of the next global batch: int64 micro-batches [at most micro_batch, sequence + 1].

        All ranks get the same number of micro-batches, because collectives must match. The last ones can be smaller or
        have no sample at all.
        """
        whole, size, length = self._config.global_batch, self._config.micro_batch, self._config.sequence_tokens
        start, end = share(whole, self._rank, self._world_size)
        ids = sample_ids(self.position + start, end - start, self.samples, self._seed)
        self.position += whole
        rows = np.empty((len(ids), length + 1), np.int64)
        for row, start in zip(rows, (ids * np.uint64(length)).tolist()):
            row[:] = self._tokens[start : start + length + 1]
        batch, count = torch.from_numpy(rows), -(-largest_share(whole, self._world_size) // size)
        return [batch[index * size : (index + 1) * size] for index in range(count)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "seed": self._seed,
            "global_batch": self._config.global_batch,
            "sequence_tokens": self._config.sequence_tokens,
            "digest": self.meta.digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Another `global_batch` is fine: the position counts samples.

        Raises ConfigError when the position would mean other samples: another data set, seed or sequence length.
        """
        mine = self.state_dict()
        for key, name in (
            ("digest", "another data set (data.path)"),
            ("seed", "another run.seed"),
            ("sequence_tokens", "another data.sequence_tokens"),
        ):
            if state[key] != mine[key]:
                raise ConfigError(
                    f"the checkpoint was made with {name}: {state[key]}, and this run has {mine[key]}, so samples "
                    f"would be seen twice or never; use what the checkpoint was made with, or give this run a new "
                    f"checkpoint.root"
                )
        self.position = int(state["position"])
