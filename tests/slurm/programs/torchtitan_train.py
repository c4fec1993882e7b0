"""A training by torchtitan alone, on tokens of its own: `torchtitan_train.py DUMP_FOLDER STEPS`."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import IterableDataset
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger


class Tokens(IterableDataset):
    def __init__(self, length):
        self.length, self.next = length, 0

    def __iter__(self):
        while True:
            time.sleep(0.5 * Path("slow").exists())  # two samples a step
            self.next += 1
            tokens = torch.arange(self.next, self.next + self.length + 1) % 2048
            yield {"input": tokens[:-1], "positions": torch.arange(self.length)}, tokens[1:]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config, *, dp_rank, dp_world_size, seq_len, local_batch_size, **_):
        super().__init__(Tokens(seq_len), dp_rank, dp_world_size, batch_size=local_batch_size, snapshot_every_n_steps=1)


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    encode = decode = get_vocab_size = NotImplemented


init_logger()
config = llama3_debugmodel()
config.tokenizer, config.dataloader = NoTokenizer.Config(), Loader.Config()
config.training.steps, config.training.seq_len, config.training.local_batch_size = int(sys.argv[2]), 64, 2
config.training.disable_cuda_graphs, config.debug.seed = True, 1
config.dump_folder = sys.argv[1]
config.checkpoint = CheckpointManager.Config(enable=True, interval=25)
trainer = config.build()
try:
    trainer.train()
finally:
    trainer.close()
