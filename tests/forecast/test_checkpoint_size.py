"""What a checkpoint and a GPU need, worked out; and held against real saves and real activations."""

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ckptman
from ckptman.engine.state.meta_model import tensors_of
from ckptman.errors import ConfigError, IntervalError
from ckptman.forecast.checkpoint_size import (
    SCHEDULED_VALUES,
    SavedTensor,
    SavedValues,
    checkpoint_size,
    frozen,
    parameter_count,
    rule_bytes,
    state_bytes,
    with_optimizer,
)
from ckptman.forecast.gpu_memory import (
    Batch,
    Shape,
    Weights,
    activation_figures,
    likely_shape,
    memory_figures,
    root_parameters,
)
from ckptman.storage.format.manifest import read_manifest
from ckptman.storage.format.paths import step_folder
from ckptman.train.config import ModelConfig, OptimizerConfig, ParallelConfig
from ckptman.train.loop import build_optimizer, build_scheduler
from ckptman.train.model import Decoder, token_loss_sum
from ckptman.train.parallel import World, build_model
from ckptman.train.setup import parameter_count as parameters_of
from ckptman.train.setup import parameter_shapes
from tests.helpers.ranks import run_ranks

STATED_BYTES = 4 * 1024
"""What the descriptions of a checkpoint may be off by, for each rank. Data files are exact."""
VOCAB = 600
LOOP = ModelConfig(dim=192, layers=3, heads=6, kv_heads=2, tied=False)
DEEP = ModelConfig(dim=32, layers=40, heads=2, kv_heads=1)
SCHEDULER = ("base_lrs", "last_epoch", "_step_count", "_is_initial", "_get_lr_called_within_step", "_last_lr")
OTHERS = tuple(f"scheduler.{each}" for each in (*SCHEDULER, "lr_lambdas"))

quick = settings(max_examples=60, deadline=None, print_blob=True)


def small_model():
    """Tied, frozen and half-precision parameters, a buffer, and sizes that fill no block."""
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(300, 37),
            "body": nn.Sequential(nn.Linear(37, 1111), nn.BatchNorm1d(1111), nn.Linear(1111, 411)),
            "head": nn.Linear(37, 300, bias=False),
            "narrow": nn.Linear(16, 8, dtype=torch.bfloat16),
            "frozen": nn.Linear(7, 5),
        }
    )
    model["head"].weight = model["embedding"].weight
    model["frozen"].requires_grad_(False)
    return model


def no_module():
    return 7


def broken():
    raise OSError("no weights\x1b[31m here")


def test_the_rule_gives_the_figure_of_the_practitioners():
    assert rule_bytes(7e9, 2) == 70e9
    assert state_bytes(7e9, 2, moments=2, moment_bytes=4) == 70e9
    assert state_bytes(9e9, 4) == 108e9


@pytest.mark.parametrize("count", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("size", [rule_bytes, state_bytes])
def test_no_parameters_are_refused(size, count):
    with pytest.raises(IntervalError, match="parameters must be a finite number above 0"):
        size(count, 4)


def test_the_shapes_of_the_bundled_model_are_those_it_has():
    for config in (LOOP, ModelConfig(dim=64, layers=2, heads=4, kv_heads=4, ffn_dim=100)):
        with torch.device("meta"):
            model = Decoder(config, VOCAB)
        assert parameter_shapes(config, VOCAB) == [(name, tuple(p.shape)) for name, p in model.named_parameters()]
        tensors = [SavedTensor(name, shape) for name, shape in parameter_shapes(config, VOCAB)]
        assert parameter_count(tensors) == parameters_of(config, VOCAB)


def written(folder):
    """The data files of a checkpoint and their bytes, and those of all its files."""
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    manifest = read_manifest(folder).files
    assert files.keys() - manifest.keys() == {"manifest.json"}
    return {name: size for name, size in files.items() if name.endswith(".distcp")}, sum(files.values())


def assert_as_planned(size, folder, ranks=1):
    data, total = written(folder)
    assert size.data == sum(data.values())
    assert size.largest == max(data.values())
    assert abs(size.total - total) <= STATED_BYTES * ranks, (size, total)


def save_all(root, state):
    state = state | {"rng": ckptman.RNGState()}
    with ckptman.Checkpointer(root, state, save_policy=ckptman.AtStep(1), async_save=False) as checkpointer:
        checkpointer.restore()
        checkpointer.step(1)


def test_the_size_for_a_function_is_that_of_a_real_save(tmp_path):
    model = small_model()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for each in trained:
        each.grad = torch.ones_like(each)
    optimizer.step()
    save_all(tmp_path / "run", {"model": model, "optimizer": optimizer})
    tensors = with_optimizer(tensors_of(f"{__name__}:small_model"))
    size = checkpoint_size(tensors, SavedValues())
    assert_as_planned(size, tmp_path / "run" / step_folder(1))
    held = [*model.state_dict().values(), *(each for own in optimizer.state.values() for each in own.values())]
    assert size.payload == sum(each.nbytes for each in held)


def save_of_the_loop(root, config, replicas, shards):
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    world = World(int(os.environ["RANK"]), replicas * shards, torch.device("cpu"), mesh)
    model = build_model(config, ParallelConfig(device="cpu"), VOCAB, 1, world)
    optimizer = build_optimizer(model, OptimizerConfig())
    scheduler = build_scheduler(optimizer, OptimizerConfig(), 10)
    token_loss_sum(model(torch.zeros(1, 4, dtype=torch.int64)), torch.zeros(1, 4, dtype=torch.int64)).backward()
    optimizer.step()
    save_all(root, {"model": model, "optimizer": optimizer, "scheduler": scheduler})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "replicas", "shards"), [(LOOP, 1, 1), (LOOP, 2, 2), (LOOP, 1, 3), (LOOP, 3, 1), (DEEP, 1, 1)]
)
def test_the_size_for_a_configuration_is_that_of_a_real_save(tmp_path, config, replicas, shards):
    run_ranks(replicas * shards, save_of_the_loop, str(tmp_path / "run"), config, replicas, shards)
    tensors = with_optimizer([SavedTensor(name, shape) for name, shape in parameter_shapes(config, VOCAB)])
    size = checkpoint_size(tensors, SavedValues(SCHEDULED_VALUES, OTHERS), replicas, shards)
    assert_as_planned(size, tmp_path / "run" / step_folder(1), replicas * shards)


@quick
@given(
    shapes=st.lists(st.lists(st.integers(1, 700), max_size=3), min_size=1, max_size=8),
    replicas=st.integers(1, 7),
    shards=st.integers(1, 64),
)
def test_however_it_is_cut_each_byte_is_written_once(shapes, replicas, shards):
    tensors = with_optimizer([SavedTensor(f"p{number}", tuple(shape)) for number, shape in enumerate(shapes)])
    alone = checkpoint_size(tensors, SavedValues())
    size = checkpoint_size(tensors, SavedValues(), replicas, shards)
    assert size.payload == alone.payload == sum(each.bytes for each in tensors)
    assert size.chunks >= len(tensors) == alone.chunks
    # Around a piece lie at most two pages, around a file three, and what ranks add of their own.
    most = size.payload + 2 * 4096 * size.chunks + 1300 * 11 * len(shapes) + replicas * shards * (23_000 + 3 * 4096)
    assert size.payload < size.data <= most
    assert size.largest <= size.data


def test_a_checkpoint_of_sixteen_thousand_ranks_is_laid_out_at_once():
    large = ModelConfig(dim=16384, layers=126, heads=128, kv_heads=8, ffn_dim=53248, tied=False)
    tensors = with_optimizer([SavedTensor(name, shape) for name, shape in parameter_shapes(large, 128_256)])
    for replicas, shards in ((2048, 8), (16, 1024)):
        size = checkpoint_size(tensors, SavedValues(SCHEDULED_VALUES), replicas, shards)
        assert size.payload == 12 * 405_853_388_800 + 4 * (126 * 9 + 3)
        assert size.payload < size.total < 1.006 * size.payload


@pytest.mark.parametrize(
    ("written_so", "told"),
    [
        ("small_model", "package.module:function"),
        (":f", "package.module:function"),
        ("no.such.package:f", "ModuleNotFoundError"),
        (f"{__name__}:nothing", "AttributeError"),
        (f"{__name__}:VOCAB", "is not a function, but a int"),
        (f"{__name__}:no_module", "returned a int: it has to return an nn.Module"),
        (f"{__name__}:broken", "takes no arguments, reads no files"),
        (f"{__name__}:written", "missing 1 required positional argument"),
    ],
)
def test_a_function_that_gives_no_model_is_one_clear_error(written_so, told):
    with pytest.raises(ConfigError) as caught:
        tensors_of(written_so)
    assert told in str(caught.value)
    assert "\x1b" not in str(caught.value)


def saved_bytes(model, tokens):
    """Bytes that the backward pass of the layers needs, parameters left out."""
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage  # held, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens)
    return sum(each.nbytes() for each in seen.values())


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("hidden", [704, 1000])
def test_activations_are_those_that_the_bundled_model_keeps(kv_heads, hidden):
    batch = Batch(tokens=2 * 64, item_bytes=4)
    per_layer = {}
    for recompute in (False, True):
        kept = []
        for layers in (1, 3):
            config = ModelConfig(dim=256, layers=layers, heads=8, kv_heads=kv_heads, ffn_dim=hidden)
            kept.append(saved_bytes(Decoder(config, VOCAB, recompute), torch.zeros(2, 64, dtype=torch.int64)))
        per_layer[recompute] = (kept[1] - kept[0]) / 2 / batch.tokens / batch.item_bytes
    planned = []
    for layers in (10, 11):
        figures = activation_figures(Shape(256, layers, VOCAB, hidden, kv_heads / 8), batch)
        planned.append([each.value / batch.tokens / batch.item_bytes for each in figures])
    kept_each, again_each = (after - before for before, after in zip(*planned))
    # Here each norm is made of two steps, and the heads are copied side by side: GPUs have kernels that keep neither.
    # Besides, a number for each norm, and one for each head.
    assert per_layer[False] == kept_each + 3 * 256 + 2 + 8
    assert per_layer[True] == again_each == 256


def test_memory_is_cut_by_the_ranks_that_share_a_copy():
    shape = Shape(4096, 32, 128_256, 14_336, 0.25)
    alone, shared = (
        {each.name: each.value for each in memory_figures(Weights(8_000_000_000, 4, 8, shards), shape, Batch(8192))}
        for shards in (1, 8)
    )
    for name, bytes_each in (("parameters", 4), ("gradients", 4), ("optimizer", 8)):
        assert alone[name] == 8 * shared[name] == bytes_each * 8_000_000_000
    assert alone["activations"] == shared["activations"] > 4 * shared["activations_checkpointed"]
    assert shared["total_checkpointed"] < shared["total_plain"] < alone["total_plain"]


def test_gradients_are_whole_where_micro_batches_are_accumulated():
    shape = Shape(1024, 8, 1000, 2816)
    figures = memory_figures(Weights(10**9, 4, 8, 8, accumulates=True), shape, Batch(512))
    (gradients,) = (each for each in figures if each.name == "gradients")
    assert gradients.value == 4e9
    assert "whole on each GPU" in gradients.formula


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_in_no_layer_is_gathered_all_the_time_with_its_gradients(tied):
    """As `build_model` wraps it: each block by itself, and the rest with the root."""
    config = ModelConfig(dim=192, layers=3, heads=6, kv_heads=2, tied=tied)
    sizes = [(name, math.prod(each)) for name, each in parameter_shapes(config, VOCAB)]
    root = sum(size for name, size in sizes if not name.startswith("blocks."))
    layer = sum(size for name, size in sizes if name.startswith("blocks.0."))
    shape = Shape(192, 3, VOCAB, config.hidden_dim, 2 / 6, tied=tied)
    assert root_parameters(shape) == root
    figures = memory_figures(Weights(sum(size for _, size in sizes), 4, 8, 2), shape, Batch(64))
    (gathered,) = (each for each in figures if each.name == "gathered")
    assert gathered.value == 2 * layer * 2 + root * (2 + 2) + layer * (2 + 4)
    assert ("(embedding)" if tied else "(embedding and head)") in gathered.formula


def test_frozen_parameters_have_neither_gradients_nor_moments():
    found = tensors_of(f"{__name__}:small_model")
    assert [each.name for each in frozen(found)] == ["frozen.weight", "frozen.bias"]  # and not the tied head
    shape = Shape(4096, 32, 32_000, 14_336)
    weights = Weights(65_536, 4, 8, 8, frozen=7_000_000_000, frozen_bytes=14_000_000_000)
    made = {each.name: each for each in memory_figures(weights, shape, Batch(512))}
    assert made["parameters"].value == (65_536 * 4 + 14_000_000_000) / 8
    assert "14 GB of 7,000,000,000 that are frozen" in made["parameters"].formula
    assert made["gradients"].value == 65_536 * 4 / 8
    assert made["optimizer"].value == 65_536 * 8 / 8
    assert made["gathered"].value > 2 * root_parameters(shape)  # all of it is gathered, frozen or not


@pytest.mark.parametrize(
    ("parameters", "dim", "layers"), [(6.7e9, 4096, 32), (70e9, 8192, 80), (405e9, 16384, 126), (13e9, 5120, 40)]
)
def test_a_likely_shape_is_near_that_of_known_models(parameters, dim, layers):
    shape = likely_shape(parameters, 32_000)
    assert shape.assumed
    assert shape.dim == pytest.approx(dim, rel=0.15)
    assert shape.layers == pytest.approx(layers, rel=0.15)
    assert likely_shape(parameters, 32_000, dim=dim, layers=layers).layers == layers
    with pytest.raises(IntervalError, match="layers must be a whole number of at least 1"):
        likely_shape(parameters, 32_000, layers=0)
