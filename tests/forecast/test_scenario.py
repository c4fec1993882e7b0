"""The size of a checkpoint as it is planned, against real saves; and the sizes of a user's model."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptman
from ckptman.engine.state.meta_model import model_of
from ckptman.errors import ConfigError
from ckptman.storage.format.paths import step_folder
from tests.helpers.planned_run import scenario
from tests.helpers.ranks import run_ranks


class Sized(nn.Module):
    """9 million parameters in tensors of all sizes; tied, frozen and in half precision; and buffers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8000, 256)
        self.body = nn.Sequential(*(nn.TransformerEncoderLayer(256, 8) for _ in range(5)))
        self.norm = nn.BatchNorm1d(1111)
        self.head = nn.Linear(256, 8000, bias=False)
        self.head.weight = self.embedding.weight
        self.narrow = nn.Linear(16, 8, dtype=torch.bfloat16)
        self.frozen = nn.Linear(700, 500).requires_grad_(False)


def no_module():
    return 7


def broken():
    raise OSError("no weights\x1b[31m here")


def save(root, ranks):
    model = Sized()
    if ranks > 1:
        del model.narrow
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for each in trained:
        each.grad = torch.zeros_like(each)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "rng": ckptman.RNGState()}
    with ckptman.Checkpointer(root, state, save_policy=ckptman.AtStep(1), async_save=False) as checkpointer:
        checkpointer.restore()
        checkpointer.step(1)


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_size_of_a_real_save_is_within_two_percent(ranks, tmp_path):
    root = tmp_path / "run"
    if ranks == 1:
        save(root, 1)
    else:
        run_ranks(ranks, save, str(root), ranks)
    written = sum(each.stat().st_size for each in (root / step_folder(1)).iterdir())
    planned = scenario(model_of(f"{__name__}:Sized", 2), nodes=1, gpus_per_node=ranks)
    assert planned.checkpoint_bytes == pytest.approx(written, rel=0.02)
    assert planned.rank_bytes == -(-planned.checkpoint_bytes // ranks)


def test_a_model_is_counted_by_what_is_saved_of_it():
    model = model_of(f"{__name__}:Sized", 2)
    parts = Sized()
    still = sum(each.numel() for each in parts.frozen.parameters())
    trained = sum(each.numel() for each in parts.parameters()) - still
    assert (model.parameters, model.frozen) == (trained, still)
    assert model.parameter_bytes == 4 * trained - 2 * (16 * 8 + 8)
    assert model.moment_bytes == 2 * model.parameter_bytes
    # What is frozen, the tied head once more, and the buffers of the norm.
    assert model.other_bytes == 4 * (still + 256 * 8000 + 2 * 1111) + 8
    names = [name for name, each in parts.named_parameters() if each.requires_grad]
    assert (model.tensors, model.saved_tensors) == (len(names), 3 * len(names) + 2 + 1 + 3)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("Sized", "package.module:function"),
        (":f", "package.module:function"),
        ("no.such.package:f", "ModuleNotFoundError"),
        (f"{__name__}:nothing", "AttributeError"),
        (f"{__name__}:__name__", "'str' object is not callable"),
        (f"{__name__}:no_module", "returned a int: it has to return an nn.Module"),
        (f"{__name__}:broken", "takes no arguments, reads no files"),
        (f"{__name__}:save", "missing 2 required positional arguments"),
        ("torch.nn:Identity", "without a trainable parameter"),
    ],
)
def test_a_function_that_gives_no_model_is_one_clear_error(written, told):
    with pytest.raises(ConfigError) as caught:
        model_of(written, 2)
    assert told in str(caught.value)
    assert "\x1b" not in str(caught.value)
