"""The device of each rank, and who cannot train together: hardware that is not here is pretended."""

from types import SimpleNamespace

import pytest
import torch

from ckptman.errors import ConfigError
from ckptman.train import parallel as module
from ckptman.train.config import ParallelConfig
from ckptman.train.launch import Launch
from ckptman.train.parallel import Place, check_places, choose_device


def pretend(monkeypatch, gpus, capability=(9, 0)):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-16GB")


def launch(local_rank, local_world_size):
    return Launch(8 + local_rank, 16, local_rank, local_world_size, alone=False)


def test_each_rank_of_a_node_has_a_gpu(monkeypatch):
    pretend(monkeypatch, 4)
    assert [choose_device(ParallelConfig(), launch(rank, 4)).index for rank in range(4)] == [0, 1, 2, 3]
    pretend(monkeypatch, 1)  # each task sees its own
    assert {choose_device(ParallelConfig(), launch(rank, 4)) for rank in range(4)} == {torch.device("cuda", 0)}
    assert choose_device(ParallelConfig(device="cpu"), launch(0, 4)) == torch.device("cpu")


@pytest.mark.parametrize(("local_rank", "local_world_size"), [(0, 4), (1, 4), (3, 4), (2, 2)])
def test_more_ranks_than_gpus(monkeypatch, local_rank, local_world_size):
    """Every rank of the node says it, so that the one that prints errors does; in an uneven world the one beyond."""
    pretend(monkeypatch, 2)
    with pytest.raises(ConfigError, match="which has 2 GPUs for them: start one rank per GPU"):
        choose_device(ParallelConfig(), launch(local_rank, local_world_size))


def test_a_gpu_without_bfloat16(monkeypatch):
    pretend(monkeypatch, 4, capability=(7, 0))
    with pytest.raises(ConfigError, match=r'compute_dtype: Tesla V100-SXM2-16GB does not .* set it to "float32"'):
        choose_device(ParallelConfig(), launch(1, 4))
    assert choose_device(ParallelConfig(compute_dtype="float32"), launch(1, 4)) == torch.device("cuda", 1)
    monkeypatch.setattr(torch.version, "hip", "7.0")  # the numbers of AMD's are others, and all of them do
    assert choose_device(ParallelConfig(), launch(1, 4)) == torch.device("cuda", 1)


def test_two_ranks_that_have_one_gpu():
    gpus = [Place(2, "cuda", node, ("GPU-1", "0", bus, "0")) for node in "ab" for bus in ("17", "65")]
    check_places(gpus)
    with pytest.raises(ConfigError, match=r"ranks 1 and 4 have the same GPU of a: start one rank per GPU"):
        check_places([*gpus, gpus[1]])
    check_places([Place(2, "cpu", "a", ())] * 2)
    check_places([Place(2, "cuda", "a", ())] * 2)  # of which torch tells nothing


def test_nodes_without_gpus_are_named():
    with pytest.raises(ConfigError, match="those on b see none"):
        check_places([Place(1, "cuda", "a", ("GPU-1",)), Place(1, "cpu", "b", ())])


def test_what_tells_gpus_apart(monkeypatch):
    properties = SimpleNamespace(uuid="GPU-1", pci_bus_id=23, name="whatever")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert module._ids_of_gpu(torch.device("cuda", 0)) == ("GPU-1", "23")
    assert module._ids_of_gpu(torch.device("cpu")) == ()
