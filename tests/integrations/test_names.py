"""One model has the same names in a checkpoint, whatever a framework wraps it in: each loads what the others saved."""

import itertools
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckptman
from tests.helpers.ranks import run_ranks


class Parts:
    """What the model is made of, as a plain module and as one of transformers."""

    def build(self):
        self.embed = nn.Embedding(8, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.norm = nn.BatchNorm1d(6)
        self.module = nn.Linear(6, 1)  # the name that DDP has for what it wraps

    def forward(self, inputs):
        found = self.embed(inputs)
        for layer in self.layers:
            found = torch.tanh(layer(found))
        return self.module(self.norm(found))


class Plain(Parts, nn.Module):
    def __init__(self):
        super().__init__()
        self.build()


def optimized(model):
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def compiled():
    return torch.compile(Plain(), backend="eager")


def with_a_layer_compiled():
    model = Plain()
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    return model


def pretrained():
    transformers = pytest.importorskip("transformers")

    class Pretrained(Parts, transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.build()
            self.post_init()

    return Pretrained(transformers.PretrainedConfig())


def fsdp2():
    model = Plain()
    for each in (*model.layers, model):
        fully_shard(each)
    return model


def fabric():
    lightning = pytest.importorskip("lightning.fabric")
    many = {}
    if dist.is_initialized():
        many = {"strategy": "ddp", "plugins": [lightning.plugins.environments.TorchElasticEnvironment()]}
    made = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size() if many else 1, **many)
    made.launch()
    return made.setup(*optimized(compiled()))


def accelerated():
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(*optimized(Plain()))


ALONE = [Plain, compiled, with_a_layer_compiled, pretrained, fabric, accelerated]
RANKS = [
    *(Plain, compiled, pretrained, fabric, accelerated, fsdp2),
    lambda: DistributedDataParallel(Plain()),
    lambda: DistributedDataParallel(compiled()),
]


def state_of(kind, seed):
    """Return a model and its optimizer after a step. `kind`: makes the model, or both."""
    torch.manual_seed(seed)
    made = kind()
    model, optimizer = optimized(made) if isinstance(made, nn.Module) else made
    model(torch.arange(8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def tensors_of(path):
    """Return all tensors of a checkpoint, by their names."""
    from torch.distributed.checkpoint import FileSystemReader

    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: each for name, each in entries.items() if hasattr(each, "size")}
    found = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in tensors.items()}
    ckptman.load(found, path)
    return found


def exchange(saver, loader, path, root):
    """Restore what another kind has saved, strictly, save it again beside it, and compare the two."""
    state = state_of(loader, seed=9)
    with ckptman.Checkpointer(root / "run", state) as checkpointer:
        checkpointer.restore(path=path)
    ckptman.save(state, root / "again")
    first, second = tensors_of(path), tensors_of(root / "again")
    assert first.keys() == second.keys(), (saver.__name__, loader.__name__)
    assert all(torch.equal(each, second[name]) for name, each in first.items()), (saver.__name__, loader.__name__)
    assert {"model.module.weight", "model.norm.running_mean", "optimizer.state.module.weight.exp_avg"} <= first.keys()


def ring(kinds):
    """Each with the one after it: as both sides have the same names, and the names are compared, all have them."""
    return [(number, (number + 1) % len(kinds)) for number in range(len(kinds))]


def exchange_all(kinds, pairs, root):
    for number, kind in enumerate(kinds):
        ckptman.save(state_of(kind, seed=number), root / f"{number}")
    for saver, loader in pairs:
        exchange(kinds[saver], kinds[loader], root / f"{saver}", root / f"{saver}-{loader}")


@pytest.mark.filterwarnings("ignore")  # what the frameworks warn of
def test_each_loads_what_the_one_before_it_saved(tmp_path):
    exchange_all(ALONE, ring(ALONE), tmp_path)


def _exchange_on_ranks(pairs, root):
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # asked for, and not used
    exchange_all(RANKS, pairs, Path(root))


@pytest.mark.slow
def test_ranks_load_what_the_one_before_it_saved(tmp_path):
    run_ranks(2, _exchange_on_ranks, ring(RANKS), str(tmp_path), limit=110)


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_ranks_load_what_any_other_saved(tmp_path):
    pairs = [*itertools.product(range(len(RANKS)), repeat=2)]
    run_ranks(2, _exchange_on_ranks, pairs, str(tmp_path), limit=500)
