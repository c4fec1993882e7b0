"""Loaders that Accelerate or Fabric has prepared."""

import os
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ckptman
from ckptman.errors import ConfigError
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
SAMPLES = TensorDataset(torch.arange(20.0))


@pytest.fixture(autouse=True, scope="module")
def _frameworks():
    import_frameworks()


def import_frameworks():
    """Here, as all workers collect this file, and one of them runs it."""
    global accelerate, lightning
    accelerate = pytest.importorskip("accelerate")
    lightning = pytest.importorskip("lightning.fabric")


def test_the_last_batch_is_told_apart(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    inputs = accelerator.prepare(DataLoader(SAMPLES, 2, shuffle=True))
    loader = ckptman.ResumableLoader(inputs)
    synchronised = []
    for _ in loader:
        with accelerator.accumulate():
            synchronised.append(accelerator.sync_gradients)
    assert [number for number, each in enumerate(synchronised, 1) if each] == [4, 8, 10]
    assert not accelerator.gradient_state.in_dataloader


def test_a_pass_that_is_left_is_over_for_accelerate(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    loader = ckptman.ResumableLoader(accelerator.prepare(DataLoader(SAMPLES, 2)))
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
    for config in (None, accelerate.DataLoaderConfiguration(use_stateful_dataloader=True)):
        loader = accelerate.Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(SAMPLES))
        refused = pytest.raises(ConfigError, match=r"data is a DataLoaderShard.*put ckptman.ResumableLoader")
        with ckptman.Checkpointer(tmp_path, {"data": loader}) as checkpointer, refused:
            checkpointer.step(1)


def test_another_seed_of_the_order_is_refused():
    config = accelerate.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1)
    loaders = []
    for seed in (1, 2):
        config.data_seed = seed
        prepared = accelerate.Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(SAMPLES, shuffle=True))
        loaders.append(ckptman.ResumableLoader(prepared))
    next(iter(loaders[0]))
    with pytest.raises(ConfigError, match=r"seeds \[1\], and this one has \[2\]"):
        loaders[1].load_state_dict(loaders[0].state_dict())


def test_an_elastic_sampler_is_not_shared_out_twice():
    loader = DataLoader(SAMPLES, 2, sampler=ckptman.ElasticSampler(20, rank=0, world_size=2))
    split = accelerate.data_loader.prepare_data_loader(loader, num_processes=2, process_index=0)
    with pytest.raises(ConfigError, match=r"leave it out of Accelerate's prepare\(\)"):
        ckptman.ResumableLoader(split)


def prepared(sampler=None, **settings):
    fabric = lightning.Fabric(accelerator="cpu", **settings)
    fabric.launch()
    samples = DataLoader(TensorDataset(torch.arange(20)), 3, shuffle=sampler is None, sampler=sampler)
    return fabric.setup_dataloaders(samples)


def seen(loader, batches=99):
    found = []
    for _, (batch,) in zip(range(batches), loader, strict=False):
        found += batch.tolist()
    return found


def orders():
    """Return the orders of three epochs, and those of a loader that is made anew in the second of them."""
    _be_quiet()
    settings = {"devices": 2, "strategy": "ddp"}
    torch.manual_seed(0)
    whole = ckptman.ResumableLoader(prepared(**settings))
    expected = [seen(whole) for _ in range(3)]
    torch.manual_seed(0)
    first, second = (ckptman.ResumableLoader(prepared(**settings)) for _ in range(2))
    found = [seen(first), seen(first, 2)]
    second.load_state_dict(first.state_dict())
    found[1] += seen(second)
    return expected, [*found, seen(second)]


def test_the_order_of_each_epoch_is_its_own_after_a_restore():
    ranks = run_ranks(2, orders)
    for expected, found in ranks:
        assert found == expected
        assert expected[0] != expected[1] != expected[2]
    assert {sample for expected, _ in ranks for sample in expected[0]} == set(range(20))


def _be_quiet():
    import_frameworks()
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # the ranks have met already


def twice_shared_out():
    _be_quiet()
    loader = prepared(ckptman.ElasticSampler(20, seed=0), devices=2, strategy="ddp")
    with pytest.raises(ConfigError) as refused:
        ckptman.ResumableLoader(loader)
    return str(refused.value)


def test_samples_are_shared_out_once():
    assert all("use_distributed_sampler=False" in told for told in run_ranks(2, twice_shared_out))


def test_a_batch_that_cannot_be_read_does_not_end_the_epoch():
    class Bad(Dataset[int]):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            if index == 2:
                raise OSError("cannot be read")
            return index

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    batches = iter(ckptman.ResumableLoader(fabric.setup_dataloaders(DataLoader(Bad(), 2))))
    assert next(batches).tolist() == [0, 1]
    with pytest.raises(OSError, match="cannot be read"):
        next(batches)
    assert [each.tolist() for each in batches] == [[4, 5]]


def test_a_loader_is_wrapped_to_be_in_the_state(tmp_path):
    with pytest.raises(ConfigError, match=r"data is a DataLoader.*put ckptman.ResumableLoader"):
        ckptman.Checkpointer(tmp_path, {"data": prepared(devices=1)})
