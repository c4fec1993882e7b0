"""Loaders that Accelerate has prepared."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ckptman
from ckptman.errors import ConfigError

accelerate = pytest.importorskip("accelerate")


def test_the_last_batch_is_told_apart(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    inputs = accelerator.prepare(DataLoader(TensorDataset(torch.arange(20.0)), 2, shuffle=True))
    loader = ckptman.ResumableLoader(inputs)
    synchronised = []
    for _ in loader:
        with accelerator.accumulate():
            synchronised.append(accelerator.sync_gradients)
    assert [number for number, each in enumerate(synchronised, 1) if each] == [4, 8, 10]
    assert not accelerator.gradient_state.in_dataloader


def test_a_pass_that_is_left_is_over_for_accelerate(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    loader = ckptman.ResumableLoader(accelerator.prepare(DataLoader(TensorDataset(torch.arange(20.0)), 2)))
    for _ in loader:
        assert accelerator.gradient_state.in_dataloader
        break
    assert not accelerator.gradient_state.in_dataloader


class WithEpochs(Dataset[int]):
    """One whose samples depend on the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return 100 * self.epoch + index


def test_the_dataset_is_told_the_epoch_as_accelerate_does():
    plain, wrapped = (accelerate.Accelerator(cpu=True).prepare(DataLoader(WithEpochs(), 4)) for _ in range(2))
    loader = ckptman.ResumableLoader(wrapped)
    seen = [[batch.tolist() for _ in range(3) for batch in each] for each in (plain, loader)]
    assert seen[0] == seen[1] == [[0, 1, 2, 3], [100, 101, 102, 103], [200, 201, 202, 203]]


@pytest.mark.filterwarnings("ignore")  # of what torch deprecates, and torchdata calls
def test_a_prepared_loader_is_refused_in_the_state_itself(tmp_path):
    samples = TensorDataset(torch.arange(20.0))
    for config in (None, accelerate.DataLoaderConfiguration(use_stateful_dataloader=True)):
        loader = accelerate.Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(samples))
        refused = pytest.raises(ConfigError, match=r"data is a DataLoaderShard.*put ckptman.ResumableLoader")
        with ckptman.Checkpointer(tmp_path, {"data": loader}) as checkpointer, refused:
            checkpointer.step(1)


def test_another_seed_of_the_order_is_refused():
    config = accelerate.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1)
    samples = TensorDataset(torch.arange(20.0))
    loaders = []
    for seed in (1, 2):
        config.data_seed = seed
        prepared = accelerate.Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(samples, shuffle=True))
        loaders.append(ckptman.ResumableLoader(prepared))
    next(iter(loaders[0]))
    with pytest.raises(ConfigError, match=r"seeds \[1\], and this one has \[2\]"):
        loaders[1].load_state_dict(loaders[0].state_dict())


def test_an_elastic_sampler_is_not_shared_out_twice():
    samples = TensorDataset(torch.arange(20.0))
    loader = DataLoader(samples, 2, sampler=ckptman.ElasticSampler(20, rank=0, world_size=2))
    split = accelerate.data_loader.prepare_data_loader(loader, num_processes=2, process_index=0)
    with pytest.raises(ConfigError, match=r"leave it out of Accelerate's prepare\(\)"):
        ckptman.ResumableLoader(split)
