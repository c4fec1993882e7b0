"""Plain DCP reads what ckptman wrote, and ckptman restores what plain DCP wrote."""

import io
import json
import pickle
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckptman
from ckptman.cli.app import main
from ckptman.engine.loading.restricted_unpickler import read_foreign_metadata
from ckptman.storage.catalog.catalog import Catalog
from tests.engine.dcp.test_values import REFUSAL, differing, emptied, load, save
from tests.helpers.apps import App
from tests.helpers.checkpoints import flip_byte
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.usefixtures("forked"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]


def save_with_ckptman(root, mesh):
    app = App(mesh)
    with ckptman.Checkpointer(root, app.state, save_policy=ckptman.EverySteps(2), deadline=None) as checkpointer:
        for step in (1, 2):
            app.train_step()
            checkpointer.step(step)
    return app.digests()


def nested_state(app, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return {
        "model": get_model_state_dict(app.model),
        "optimizer": get_optimizer_state_dict(app.model, app.optimizer, options=options),
        "scheduler": {"last_epoch": app.scheduler.last_epoch},
        "data": app.position.state_dict(),
        "epoch": app.state["epoch"],
    }


def load_with_dcp(path, mesh):
    """Everything by torch alone; values come back in the nested dict that was given."""
    app = App(mesh, seed=1)
    state = nested_state(app, flat=True)
    dcp.load(state, checkpoint_id=path)
    app.scheduler.last_epoch = state["scheduler"]["last_epoch"]
    app.position.load_state_dict(state["data"])
    app.state["epoch"] = state["epoch"]
    return {name: text for name, text in app.digests().items() if not name.startswith("scheduler.")}


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded"), [((2, 2), (3,)), ((3,), (2,))])
def test_plain_dcp_load_reads_our_checkpoints(tmp_path, saved, loaded):
    root = tmp_path / "run"
    ours = run_ranks(4 if len(saved) == 2 else saved[0], save_with_ckptman, str(root), saved)[0]
    theirs = run_ranks(loaded[0], load_with_dcp, str(root / "step-0000000002"), loaded)[0]
    assert theirs == {name: text for name, text in ours.items() if not name.startswith("scheduler.")}


def save_with_dcp(path, mesh, flat):
    app = App(mesh)
    app.train_step()
    app.train_step()
    state = nested_state(app, flat)
    state["scheduler"] = app.scheduler.state_dict()
    dcp.save(state, checkpoint_id=path)
    return app.digests()


def restore_with_ckptman(root, path, mesh):
    app = App(mesh, seed=1)
    del app.state["rng"]
    with ckptman.Checkpointer(root, app.state, deadline=None) as checkpointer:
        assert checkpointer.restore(path=path) == 0
        return app.digests()


@pytest.mark.slow
@pytest.mark.parametrize("flat", [True, False])
def test_restore_reads_what_plain_dcp_saved(tmp_path, flat):
    path = str(tmp_path / "plain")
    saved = run_ranks(2, save_with_dcp, path, (2,), flat)[0]
    restored = run_ranks(3, restore_with_ckptman, str(tmp_path / "run"), path, (3,))[0]
    # DCP turns the integer keys of the schedule's milestones into texts; everything else is what was saved.
    differ = {name for name in saved if saved[name] != restored.get(name)}
    assert all(name.startswith("scheduler.milestones") for name in differ), differ


def save_with_writer(path):
    state = {"weights": torch.arange(10.0) + 0 * dist.get_rank(), "step": 3, "nested": {"lr": [0.1, 0.2]}}
    save(state, path, "StorageWriter")
    load(fresh := emptied(state), path, "StorageReader")
    assert differing(fresh, state) == []
    with pytest.raises(dcp.api.CheckpointException, match="exists already"):
        save(state, path, "StorageWriter")


def test_writer_and_reader_stand_alone_in_dcp_save_and_load(tmp_path):
    path = tmp_path / "mine"
    run_ranks(2, save_with_writer, str(path))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mine"]
    for step in (200, 100):
        save({"x": torch.ones(2)}, tmp_path / f"step-{step:010d}", "StorageWriter")
    assert [(each.step, each.sequence) for each in Catalog(tmp_path).complete()] == [(200, 1), (100, 2)]
    flip_byte(path / "__0_0.distcp")
    state = {"weights": torch.zeros(10)}
    with pytest.raises(dcp.api.CheckpointException, match="does not match its digest"):
        load(state, path, "StorageReader")
    assert not state["weights"].any()


def test_dcp_and_ckptman_lay_out_a_data_file_alike(tmp_path):
    state = {"large": torch.ones(600, 600), "small": torch.ones(3), "epoch": 3, "name": "x"}
    for writer in ("ckptman.save", "StorageWriter"):
        save(state, tmp_path / writer, writer)
    ours, theirs = (json.loads((folder / "index.json").read_text())["objects"] for folder in tmp_path.iterdir())
    assert ours == theirs
    assert min(each["offset"] for each in ours.values()) % 4096 == 0
    assert len({(folder / "chunks.bin").read_bytes() for folder in tmp_path.iterdir()}) == 1


class Evil:
    def __reduce__(self):
        return sys.exit, (99,)


def test_a_hostile_value_is_refused_by_the_reader_with_torchs_own_planner(tmp_path):
    save({"weights": torch.ones(3), "value": Evil()}, tmp_path / "x", "dcp")
    state = {"weights": torch.zeros(3), "value": None}
    with pytest.raises(dcp.api.CheckpointException, match="the value value was refused"):
        load(state, tmp_path / "x", "StorageReader")
    assert state["value"] is None


def test_a_hostile_metadata_pickle_is_refused_by_name(tmp_path):
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ckptman.CorruptError, match=r"sys\.exit"):
        read_foreign_metadata(path)


def test_a_writer_that_was_sent_to_another_process(tmp_path):
    """`dcp.async_save` with a process of its own pickles the writer."""
    writer = pickle.loads(pickle.dumps(ckptman.StorageWriter(tmp_path / "x")))
    dcp.save({"x": torch.ones(5)}, storage_writer=writer, no_dist=True)
    ckptman.load(state := {"x": torch.zeros(5)}, tmp_path / "x")
    assert torch.equal(state["x"], torch.ones(5))


def test_a_plan_that_dcp_kept_from_an_earlier_save_is_refused_with_a_remedy(tmp_path):
    state, planner = {"x": torch.ones(5)}, DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(state, storage_writer=ckptman.StorageWriter(tmp_path / "one"), planner=planner, no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match="enable_plan_caching=False"):
        dcp.save(state, storage_writer=ckptman.StorageWriter(tmp_path / "two"), planner=planner, no_dist=True)
    assert [each.name for each in tmp_path.iterdir()] == ["one"], "nothing is left of it"


def refused(state, path, **options):
    """What DCP says of a save by this rank that has to be refused."""
    warnings.simplefilter("default")
    with pytest.raises(REFUSAL) as caught:
        dcp.save(state, storage_writer=ckptman.StorageWriter(path), **options)
    return str(caught.value)


def half(dtype):
    """A tensor of 6 elements, of which each of two ranks holds 3."""
    return {"x": DTensor.from_local(torch.ones(3, dtype=dtype), init_device_mesh("cpu", (2,)), [Shard(0)])}


def unlike_tensors(path):
    return refused(half(torch.float32 if dist.get_rank() else torch.int32), path)


def a_part(path):
    return refused(half(torch.float32), f"{path}-{dist.get_rank()}", no_dist=True)


def without_collectives(path):
    return refused({f"x {dist.get_rank()}": 1}, path, use_collectives=False)


@pytest.mark.parametrize(
    ("save_on_ranks", "words"),
    [
        (unlike_tensors, ["float32", "int32"]),
        (a_part, ["3 elements of 6", "save it together"]),
        (without_collectives, ["use_collectives=False"]),
    ],
)
def test_what_is_no_checkpoint_of_all_ranks_is_refused_by_each(tmp_path, save_on_ranks, words):
    for text in run_ranks(2, save_on_ranks, str(tmp_path / "x")):
        assert all(word in text for word in words), text
    assert list(tmp_path.iterdir()) == []


class Casting(DefaultSavePlanner):
    """Casts what is written, and leaves the plan as it was."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def transform_object(self, write_item, object):
        made = super().transform_object(write_item, object)
        return made.to(self.dtype) if isinstance(made, torch.Tensor) else made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_a_planner_casts_on_its_way_is_what_is_loaded(tmp_path, dtype):
    values = torch.arange(24.0).reshape(4, 6)
    dcp.save({"x": values}, storage_writer=ckptman.StorageWriter(tmp_path / "x"), planner=Casting(dtype))
    for reader in (ckptman.StorageReader(tmp_path / "x"), FileSystemReader(tmp_path / "x")):
        state = {"x": torch.zeros(4, 6)}
        dcp.load(state, storage_reader=reader)
        assert torch.equal(state["x"], values)


def test_a_reader_sees_what_took_the_place_of_what_it_read(tmp_path):
    reader, state = ckptman.StorageReader(tmp_path / "x"), {"x": torch.zeros(5), "step": 0}
    for step in (1, 2):
        writer = ckptman.StorageWriter(tmp_path / "x", overwrite=True)
        dcp.save({"x": torch.full((5,), float(step)), "step": step}, storage_writer=writer)
        dcp.load(state, storage_reader=reader)
        assert (state["step"], state["x"].tolist()) == (step, [step] * 5)


def test_a_value_that_moves_and_keeps_its_flat_name(tmp_path):
    """Who builds the state from the checkpoint is told where it is now."""
    state = {"x": {"k": {"a.b": torch.ones(2), "0": 1}}}
    with ckptman.Checkpointer(tmp_path, state, deadline=None) as checkpointer:
        checkpointer.save(1)
        state["x"]["k"] = {"a": {"b": torch.ones(2)}, "0": 1}
        checkpointer.save(2)
    for step, paths in ((1, ("x", "k", "a.b")), (2, ("x", "k", "a", "b"))):
        metadata = FileSystemReader(tmp_path / f"step-{step:010d}").read_metadata()
        assert metadata.planner_data["x.k.a.b"] == paths


# ---- checkpoints that others left --------------------------------------------------------------------------------

OF_TORCH_2_2 = Path(__file__).parents[2] / "golden" / "torch_2_2"
"""Written by torch 2.2.2: `dcp.save` of a linear layer, a bfloat16 tensor, plain values and an `io.BytesIO`."""


def test_what_torch_2_2_wrote_is_loaded():
    state = {
        "model": torch.nn.Linear(3, 2),
        "half": torch.zeros(4, dtype=torch.bfloat16),
        "epoch": 0,
        "list": [0, {"a": 0}],
        "raw": None,
    }
    ckptman.load(state, OF_TORCH_2_2)
    assert torch.equal(state["half"], torch.arange(4).to(torch.bfloat16))
    assert (state["epoch"], state["list"]) == (3, [1, {"a": 2}])
    assert (type(state["raw"]), state["raw"].getvalue()) == (io.BytesIO, b"raw bytes")
    again = {"model.weight": torch.zeros(2, 3)}
    dcp.load(again, checkpoint_id=OF_TORCH_2_2, no_dist=True)
    assert torch.equal(state["model"].weight, again["model.weight"])


OF_TORCH_2_15 = OF_TORCH_2_2.with_name("torch_2_15")
"""Written by torch 2.15.0: `dcp.save` of a tensor that describes two shards, a transposed one, and a number. Its
metadata says strides, which is more than older versions unpickle."""


def test_what_torch_2_15_wrote_is_loaded_on_older_versions_too():
    rows = torch.arange(12.0).reshape(4, 3)
    state = {"table": torch.zeros(4, 3), "transposed": torch.zeros(3, 4), "step": 0}
    fresh = {**state, "table": torch.ones(4, 3)}
    ckptman.load(state, OF_TORCH_2_15)
    dcp.load(fresh, storage_reader=ckptman.StorageReader(OF_TORCH_2_15), no_dist=True)
    for each in (state, fresh):
        assert torch.equal(each["table"], rows)
        assert torch.equal(each["transposed"], 2 * rows.T)
        assert each["step"] == 3


class OfAnOlderTorch(pickle.Unpickler):
    """Unpickles metadata as plain DCP does that knows nothing of strides."""

    def find_class(self, module, name):
        return FiveProperties if name == "TensorProperties" else super().find_class(module, name)


class FiveProperties:
    def __setstate__(self, state):
        self.dtype, self.layout, self.requires_grad, self.memory_format, self.pin_memory = state


def test_what_is_saved_on_any_torch_is_read_by_plain_dcp_of_an_older_one(tmp_path):
    ckptman.save({"x": torch.zeros(2, 3)}, tmp_path / "x")
    with open(tmp_path / "x" / ".metadata", "rb") as file:
        metadata = OfAnOlderTorch(file).load()
    assert metadata.state_dict_metadata["x"].properties.dtype == torch.float32


def test_bytes_io_is_read_as_what_it_is(tmp_path):
    shared, path = io.BytesIO(b"0123"), tmp_path / "x"
    shared.seek(2)
    save({"one": io.BytesIO(b"abc"), "many": [shared, (shared, 1)], "w": torch.ones(2)}, path, "dcp")
    ckptman.load(state := {"one": None, "many": None, "w": torch.zeros(2)}, path)
    assert state["one"].read() == b"abc"
    assert state["many"][0] is state["many"][1][0]
    assert state["many"][0].read() == b"23"
    load(fresh := {"one": None, "w": torch.zeros(2)}, path, "StorageReader")
    assert fresh["one"].read() == b"abc"


def test_a_very_long_number_is_refused_in_words(tmp_path):
    save({"n": 2**3000}, tmp_path / "x", "dcp")
    with pytest.raises(ckptman.CorruptError, match="a whole number of more than 255 bytes"):
        ckptman.load({"n": 0}, tmp_path / "x")


@pytest.mark.slow
def test_a_compressed_checkpoint_is_refused_in_words(tmp_path, capsys):
    path = tmp_path / "x"
    save({"w": torch.ones(2)}, path, "dcp")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.zstd"]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ckptman.CorruptError, match=r"is compressed.*\(stream.zstd\).*load it by dcp.load"):
        ckptman.load({"w": torch.zeros(2)}, path)
    with pytest.raises(dcp.api.CheckpointException, match="is compressed"):
        load({"w": torch.zeros(2)}, path, "StorageReader")
    for command in (["verify", path, "--world-size", 1], ["export", path, tmp_path / "out.safetensors"]):
        assert main([str(word) for word in command]) != 0
        assert "stream.zstd" in "".join(capsys.readouterr())
    assert main(["show", str(path)]) == 0
    assert "compressed, or transformed otherwise (stream.zstd)" in capsys.readouterr().out


@pytest.mark.parametrize("writer", ["StorageWriter", "dcp"])
def test_the_reader_gives_what_torchs_reader_gives(tmp_path, writer):
    save({"w": torch.ones(2), "n": 1}, tmp_path / "x", writer)
    reader = ckptman.StorageReader(tmp_path / "x")
    found, theirs = reader.read_metadata(), FileSystemReader(tmp_path / "x").read_metadata()
    assert found.version == theirs.version
    assert found.storage_meta.load_id == reader.load_id
    assert found.storage_meta.save_id == theirs.storage_meta.save_id
    assert str(found.storage_meta.checkpoint_id) == str(theirs.storage_meta.checkpoint_id)


# ---- a model at the top ------------------------------------------------------------------------------------------


def small():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters())


@pytest.fixture
def of_torchtitan(tmp_path):
    model, optimizer = small()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    torch.save([1.0], losses := io.BytesIO())
    state = {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "lr_scheduler": {"last_epoch": 3},
        "dataloader": {"dp_rank_0": b"position"},
        "train_state": {"step": torch.tensor(5), "losses": losses},
    }
    save(state, tmp_path / "titan", "dcp")
    return tmp_path / "titan", model


def test_a_run_goes_on_from_a_model_without_a_name(tmp_path, of_torchtitan):
    path, saved = of_torchtitan
    model, optimizer = small()
    state = {"model": model, "optimizer": optimizer, "lr_scheduler": {}}
    with ckptman.Checkpointer(tmp_path / "run", state, deadline=None) as checkpointer:
        with pytest.warns(RuntimeWarning, match="without that name.*no such keys: dataloader, train_state$"):
            assert checkpointer.restore(path=path) == 0
        checkpointer.save(6)
    assert torch.equal(model[0].weight, saved[0].weight)
    assert optimizer.state[model[0].weight]["step"] == 1
    assert state["lr_scheduler"] == {"last_epoch": 3}
    (entry,) = Catalog(tmp_path / "run").complete()
    names = json.loads((entry.path / "index.json").read_bytes())["tensors"]
    assert {name for name in names if name.startswith("model.")} == {f"model.{name}" for name in saved.state_dict()}


def restore(root, state, path):
    with ckptman.Checkpointer(root, state, deadline=None) as checkpointer:
        checkpointer.restore(path=path)


@pytest.mark.filterwarnings("ignore:.*without that name:RuntimeWarning")
def test_a_model_without_a_name_has_to_fit_and_is_that_of_one_only(tmp_path, of_torchtitan):
    path, _ = of_torchtitan
    smaller = torch.nn.Sequential(torch.nn.Linear(3, 4))
    with pytest.raises(ckptman.MismatchError) as caught:
        restore(tmp_path / "run", {"model": smaller}, path)
    assert caught.value.unexpected == ("model.1.bias", "model.1.weight")
    with pytest.raises(ckptman.CkptmanError, match="could be those of 'model' or 'average'"):
        restore(tmp_path / "run", {"model": small()[0], "average": small()[0]}, path)


def test_in_our_own_checkpoints_a_model_has_its_name(tmp_path):
    model = small()[0]
    ckptman.save(dict(model.state_dict()), tmp_path / "ours")
    with pytest.raises(ckptman.MismatchError) as caught:
        restore(tmp_path / "run", {"model": model}, tmp_path / "ours")
    assert caught.value.missing == ("model",)


# ---- a checkpoint that was saved over ----------------------------------------------------------------------------


@pytest.mark.parametrize("writer", ["ckptman.save", "StorageWriter"])
def test_what_plain_dcp_saved_over_is_not_loaded_as_before(tmp_path, writer, capsys):
    state, path = {"w": torch.ones(2), "epoch": 3}, tmp_path / "step-0000000001"
    save(state, path, writer)
    save({**state, "epoch": 4}, path, "dcp")
    with pytest.raises(ckptman.CorruptError, match=r"plain DCP saved over it\. Restore an older.*dcp\.load loads"):
        ckptman.load({"epoch": 0}, path)
    with pytest.raises(dcp.api.CheckpointException, match="plain DCP saved over"):
        load({"epoch": 0}, path, "StorageReader")
    assert main(["verify", str(path)]) == 4
    assert "if plain DCP saved over it" in "".join(capsys.readouterr())
    for each in path.iterdir():
        if each.name.startswith(("manifest", "index", "chunks", "blocks-", "values-")):
            each.unlink()
    assert main(["adopt", str(path)]) == 0
    fresh = {"w": torch.zeros(2), "epoch": 0}
    ckptman.load(fresh, path)
    assert fresh["epoch"] == 4


def test_a_file_of_another_size_is_noticed_before_anything_is_read(tmp_path):
    path = tmp_path / "x"
    ckptman.save({"w": torch.ones(2), "epoch": 3}, path)
    (data,) = path.glob("*.distcp")
    data.write_bytes(data.read_bytes() + b"more")
    with pytest.raises(ckptman.CorruptError, match=rf"is not what was saved: {data.name} has \d+ bytes instead of"):
        ckptman.load({"epoch": 0}, path)
