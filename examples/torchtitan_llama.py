"""A small Llama in torchtitan's trainer, on random tokens: killed anywhere, it goes on as if nobody had stopped it.

torchrun --nproc-per-node=1 examples/torchtitan_llama.py outputs --steps=20
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger

from ckptman.integrations.torchtitan import CkptmanCheckpointManager


class RandomTokens(IterableDataset):
    """Samples of random tokens, each a function of its number alone; its position is the number of the next."""

    def __init__(self, length: int, rank: int, ranks: int) -> None:
        self.length, self.rank, self.ranks, self.next = length, rank, ranks, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(self.next * self.ranks + self.rank)
            self.next += 1
            tokens = torch.randint(0, 2048, (self.length + 1,), generator=generator)
            yield {"input": tokens[:-1], "positions": torch.arange(self.length)}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class RandomLoader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, **settings: Any) -> None:
        tokens = RandomTokens(settings["seq_len"], dp_rank, dp_world_size)
        batch = settings["local_batch_size"]
        super().__init__(tokens, dp_rank, dp_world_size, batch_size=batch, snapshot_every_n_steps=1)


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    encode = decode = get_vocab_size = NotImplemented


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    init_logger()
    config = llama3_debugmodel()
    config.tokenizer, config.dataloader = NoTokenizer.Config(), RandomLoader.Config()
    config.training.steps, config.training.seq_len, config.training.local_batch_size = arguments.steps, 64, 2
    config.training.disable_cuda_graphs, config.debug.seed = True, 1
    config.dump_folder = arguments.folder
    config.checkpoint = CkptmanCheckpointManager.Config(enable=True, interval=5, keep_latest_k=2)
    trainer = config.build()
    try:
        trainer.train()
    finally:
        trainer.close()
