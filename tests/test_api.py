"""`ckptman.save` and `ckptman.load` of a state dict, on their own."""

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckptman
from ckptman.storage.format.manifest import read_manifest
from ckptman.storage.io.durable_files import Disk
from tests.helpers.faulty_disk import on_disk
from tests.helpers.ranks import run_ranks


def state(value=1.0):
    return {"w": torch.full((3, 4), value), "step": int(value), "nested": {"lr": [value, 2.0], "b": torch.ones(2)}}


def test_there_and_back_in_place(tmp_path):
    ckptman.save(state(), tmp_path / "deep" / "folder" / "x")
    fresh = state(0.0)
    before = fresh["w"], fresh["nested"], fresh["nested"]["b"]
    ckptman.load(fresh, str(tmp_path / "deep" / "folder" / "x"))
    assert fresh["w"] is before[0]
    assert fresh["nested"] is before[1]
    assert fresh["nested"]["b"] is before[2]
    assert torch.equal(fresh["w"], torch.ones(3, 4))
    assert fresh["step"] == 1
    assert fresh["nested"]["lr"] == [1.0, 2.0]
    assert [each.name for each in (tmp_path / "deep" / "folder").iterdir()] == ["x"]


def test_a_path_like_object_will_do(tmp_path):
    class Here(os.PathLike[str]):
        def __fspath__(self):
            return str(tmp_path / "x")

    ckptman.save(state(), Here())
    fresh = state(0.0)
    ckptman.load(fresh, Here())
    assert fresh["step"] == 1


class Going(Disk):
    """Takes the process to another folder while a save is being written."""

    def __init__(self, to):
        self._to = to

    def sync_file(self, fd):
        os.chdir(self._to)
        super().sync_file(fd)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", ["Checkpointer", "StorageWriter"])
def test_a_process_that_goes_to_another_folder_saves_where_it_was_told(tmp_path, monkeypatch, way):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    disk, here = Going(tmp_path / "there"), tmp_path / "here"
    if way == "StorageWriter":
        with on_disk(disk):
            dcp.save(state(), storage_writer=ckptman.StorageWriter("x"))
    else:
        with on_disk(disk), ckptman.Checkpointer("x", state(), deadline=None) as run:
            for step in (1, 2):
                run.save(step)
                run.wait()
        assert all((here / "x" / f"step-000000000{step}").is_dir() for step in (1, 2))
    assert list((tmp_path / "there").iterdir()) == []
    assert [each.name for each in here.iterdir()] == ["x"]


_FORKS = """
import atexit, os, sys
import torch
import torch.distributed.checkpoint as dcp
import ckptman
from ckptman.storage.io.durable_files import DISK

def fork_and_sync(fd):
    child = os.fork()
    if not child:
        atexit._run_exitfuncs()  # as sys.exit does
        os._exit(0)
    os.waitpid(child, 0)
    os.fsync(fd)

DISK.sync_file = fork_and_sync
dcp.save({"x": torch.ones(3)}, storage_writer=ckptman.StorageWriter(sys.argv[1]), no_dist=True)
"""


@pytest.mark.slow
def test_a_process_forked_during_a_save_takes_nothing_of_it_away(tmp_path):
    subprocess.run([sys.executable, "-W", "ignore", "-c", _FORKS, str(tmp_path / "x")], check=True, timeout=240)
    ckptman.load({"x": torch.zeros(3)}, tmp_path / "x")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupt_while_a_checkpoint_is_replaced_leaves_one(tmp_path, monkeypatch, at, when):
    """On a parallel file system a rename takes long enough for Ctrl-C."""
    ckptman.save(state(1.0), tmp_path / "x")
    renames, rename = list[str](), Disk.rename

    def interrupted(self, source, target):
        renames.append(target.name)
        if len(renames) != at or when == "after":
            rename(self, source, target)
        if len(renames) == at:
            raise KeyboardInterrupt

    monkeypatch.setattr(Disk, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ckptman.save(state(2.0), tmp_path / "x", overwrite=True)
    fresh = state(0.0)
    ckptman.load(fresh, tmp_path / "x")
    assert fresh["step"] in (1, 2)


def test_a_checkpoint_is_replaced_only_if_asked_for(tmp_path):
    path = tmp_path / "x"
    ckptman.save(state(1.0), path)
    with pytest.raises(ckptman.ExistsError, match="overwrite=True"):
        ckptman.save(state(2.0), path)
    fresh = state(0.0)
    ckptman.load(fresh, path)
    assert fresh["step"] == 1
    ckptman.save(state(2.0), path, overwrite=True)
    ckptman.load(fresh, path)
    assert fresh["step"] == 2
    assert torch.equal(fresh["w"], torch.full((3, 4), 2.0))
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def test_a_folder_of_others_is_not_replaced_though_it_has_a_manifest(tmp_path):
    """Many programs have a `manifest.json`."""
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "manifest.json").write_text('{"name": "a web page"}')
    (tmp_path / "page" / "index.html").touch()
    with pytest.raises(ckptman.ExistsError, match="is no checkpoint, and is not replaced by one"):
        ckptman.save({"epoch": 4}, tmp_path / "page", overwrite=True)
    assert (tmp_path / "page" / "index.html").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("writer", ["ckptman.save", "StorageWriter"])
@pytest.mark.parametrize("what", ["a folder of somebody's", "a file", "a link"])
def test_what_is_no_checkpoint_is_never_replaced(tmp_path, what, writer):
    """`overwrite=True` and a slip of the hand: the home folder in place of the checkpoint."""
    path = tmp_path / "x"
    if what == "a file":
        path.write_text("thesis")
    elif what == "a link":
        ckptman.save(state(1.0), tmp_path / "elsewhere")
        path.symlink_to("elsewhere")
    else:
        (path / "deep").mkdir(parents=True)
        (path / "deep" / "thesis.tex").write_text("thesis")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((ckptman.ExistsError, dcp.api.CheckpointException), match="is no checkpoint, and is not replac"):
        if writer == "ckptman.save":
            ckptman.save(state(2.0), path, overwrite=True)
        else:
            dcp.save(state(2.0), storage_writer=ckptman.StorageWriter(path, overwrite=True), no_dist=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_is_in_nobodys_way(tmp_path):
    (tmp_path / "x").mkdir()
    ckptman.save(state(2.0), tmp_path / "x", overwrite=True)
    fresh = state(0.0)
    ckptman.load(fresh, tmp_path / "x")
    assert fresh["step"] == 2


def test_what_is_refused_leaves_the_older_checkpoint(tmp_path):
    path = tmp_path / "x"
    ckptman.save(state(1.0), path)
    with pytest.raises(ckptman.ConfigError, match=r"nested\.b is on the meta device"):
        ckptman.save({"nested": {"b": torch.empty(2, device="meta")}}, path, overwrite=True)
    with pytest.raises(ckptman.ConfigError, match="flat name"):
        ckptman.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, path, overwrite=True)
    fresh = state(0.0)
    ckptman.load(fresh, path)
    assert fresh["step"] == 1
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


SPARSE = {
    "coo": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "mkldnn": lambda: torch.eye(4).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged),
}


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*prototype", "ignore:Sparse CSR")
def test_what_has_no_shards_is_refused_by_name(tmp_path, kind):
    """torch's own DCP cannot save these either."""
    tensor = SPARSE[kind]()
    with pytest.raises(ckptman.ConfigError, match=r"deep\.x is a nested or sparse tensor .*to_dense"):
        ckptman.save({"deep": {"x": tensor}}, tmp_path / "x")
    with pytest.raises((dcp.api.CheckpointException, NotImplementedError)):
        dcp.save({"deep": {"x": tensor}}, storage_writer=ckptman.StorageWriter(tmp_path / "x"))
    with (
        pytest.raises(ckptman.ConfigError, match="to_dense"),
        ckptman.Checkpointer(tmp_path / "run", {"deep": {"x": tensor}}, deadline=None) as checkpointer,
    ):
        checkpointer.step(1)
    assert not (tmp_path / "x").exists()


def test_who_saves_what_load_refuses_is_told(tmp_path):
    refused = r"not be loaded: the value hook was refused: .*getcwd.*leave the value out"
    with pytest.warns(RuntimeWarning, match=refused):
        ckptman.save({"hook": os.getcwd, "x": torch.ones(2), "log": {"step": 3}}, tmp_path / "a")
    with pytest.raises(ckptman.CorruptError, match="value hook"):
        ckptman.load({"hook": None, "x": torch.zeros(2)}, tmp_path / "a")
    ckptman.save({"hook": os.getcwd}, tmp_path / "b")  # a warning is an error here, and fails no save

    ckptman.save({"kinds": frozenset({1})}, tmp_path / "c")  # pickled too, and no reason to warn
    state = {"kinds": None}
    ckptman.load(state, tmp_path / "c")
    assert state == {"kinds": frozenset({1})}


def test_nothing_to_load_from(tmp_path):
    with pytest.raises(ckptman.NotFoundError, match="is no checkpoint"):
        ckptman.load(state(), tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ckptman.NotFoundError, match="is not a checkpoint, and holds none that counts"):
        ckptman.load(state(), tmp_path / "empty")


def test_all_that_does_not_fit_is_told_at_once_and_nothing_is_filled(tmp_path):
    ckptman.save(state(), tmp_path / "x")
    asked = {
        "w": torch.zeros(4, 3),
        "nested": {"b": torch.zeros(2, dtype=torch.float64), "lr": "old", "none": torch.zeros(1)},
        "step": 0,
        "other": 5,
    }
    with pytest.raises(ckptman.MismatchError) as caught:
        ckptman.load(asked, tmp_path / "x")
    assert caught.value.missing == ("nested.none", "other")
    text = str(caught.value)
    assert "w: checkpoint [3, 4] float32, this run [4, 3] float32" in text
    assert "nested.b: checkpoint [2] float32, this run [2] float64" in text
    assert not asked["w"].any()
    assert asked["nested"]["lr"] == "old"
    assert asked["step"] == 0


def test_a_tensor_and_a_plain_value_are_not_taken_for_each_other(tmp_path):
    ckptman.save({"a": torch.ones(1), "b": 1.0}, tmp_path / "x")
    with pytest.raises(ckptman.MismatchError, match="a: checkpoint a tensor, this run a plain value"):
        ckptman.load({"a": 0.0}, tmp_path / "x")
    with pytest.raises(ckptman.MismatchError) as caught:
        ckptman.load({"b": torch.zeros(1)}, tmp_path / "x")
    assert caught.value.missing == ("b",)
    assert "b: checkpoint a plain value, this run a tensor" in str(caught.value)


class FixedKeys(dict[str, Any]):
    """A mapping whose keys cannot be changed."""

    def __delitem__(self, key):
        raise TypeError("its keys are fixed")

    clear = __delitem__

    def __setitem__(self, key, value):
        if key not in self:
            raise TypeError("its keys are fixed")
        super().__setitem__(key, value)


def flat(state):
    found = {}

    def walk(value, name):
        if isinstance(value, dict):
            for key, each in value.items():
                walk(each, f"{name}.{key!r}")
        elif isinstance(value, list):
            for number, each in enumerate(value):
                walk(each, f"{name}.{number}")
        else:
            found[name] = repr(value.tolist() if isinstance(value, torch.Tensor) else value)

    for key, value in state.items():
        walk(value.state_dict() if hasattr(value, "state_dict") else value, key)
    return found


def lists_and_dicts(one):
    layers = [{"w": torch.full((2,), one), "name": f"layer {one}"}, [torch.full((1,), one), {"deep": [one]}]]
    return {"layers": layers, "numbers": [one, one + 1], "empty": {}, "no list": []}


NESTED = {
    "lists and dicts": ({"top": lists_and_dicts(7)}, {"top": lists_and_dicts(0)}),
    "keys that are numbers": ({"x": {1: 2.5, 2: {3: torch.ones(2)}}}, {"x": {1: 0.0, 2: {3: torch.zeros(2)}}}),
    "values that have grown": (
        {"seen": [1, 2], "counts": {"a": 1}, "text": "new"},
        {"seen": [], "counts": {}, "text": None},
    ),
    "keys that are fixed": (state(), FixedKeys(state(0.0) | {"nested": FixedKeys(state(0.0)["nested"])})),
}


@pytest.mark.parametrize(("saved", "fresh"), NESTED.values(), ids=NESTED)
def test_what_is_nested_comes_back(tmp_path, saved, fresh):
    ckptman.save(saved, tmp_path / "x")
    ckptman.load(fresh, tmp_path / "x")
    assert flat(fresh) == flat(saved)


def test_what_the_checkpoint_holds_besides_is_left_there(tmp_path):
    ckptman.save(state() | {"more": torch.ones(9)}, tmp_path / "x")
    fresh = {"nested": {"b": torch.zeros(2)}}
    ckptman.load(fresh, tmp_path / "x")
    assert torch.equal(fresh["nested"]["b"], torch.ones(2))
    assert list(fresh) == ["nested"]
    assert list(fresh["nested"]) == ["b"]


# ---- objects ---------------------------------------------------------------------------------------------------------


class Position:
    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def trained(seed, steps, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    position = Position()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        schedule.step()
        position.at += 5
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "data": position, "epoch": steps}


def test_modules_optimizers_and_what_else_has_a_state(tmp_path):
    saved = trained(0, 5)
    ckptman.save(saved, tmp_path / "x")
    fresh = trained(1, 0)
    objects = {name: value for name, value in fresh.items() if name != "epoch"}
    ckptman.load(fresh, tmp_path / "x")
    assert flat(fresh) == flat(saved)
    assert all(fresh[name] is value for name, value in objects.items())


def test_a_module_that_does_not_fit_is_left_alone(tmp_path):
    ckptman.save({"model": nn.Linear(3, 3)}, tmp_path / "x")
    other = nn.Sequential(nn.Linear(3, 3))
    before = other[0].weight.detach().clone()
    with pytest.raises(ckptman.MismatchError) as caught:
        ckptman.load({"model": other}, tmp_path / "x")
    assert caught.value.missing == ("model.0.bias", "model.0.weight")
    assert torch.equal(other[0].weight, before)


# ---- other writers, and checking -------------------------------------------------------------------------------------


def test_what_plain_dcp_saved(tmp_path):
    saved = state(3.0) | {"layers": [{"w": torch.full((4,), 3)}, {"w": torch.full((4,), 4)}], "keys": {5: 6}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(saved, checkpoint_id=tmp_path / "x")
    fresh = state(0.0) | {"layers": [{"w": torch.zeros(4).long()}, {"w": torch.zeros(4).long()}], "keys": {5: 0}}
    ckptman.load(fresh, tmp_path / "x")
    assert torch.equal(fresh["w"], saved["w"])
    assert torch.equal(fresh["layers"][1]["w"], saved["layers"][1]["w"])
    assert (fresh["step"], fresh["nested"]["lr"], fresh["keys"]) == (3, [3.0, 2.0], {5: 6})
    with pytest.raises(ckptman.MismatchError):
        ckptman.load({"v": torch.zeros(1)}, tmp_path / "x")


def test_a_block_that_has_changed_is_found_if_checked(tmp_path):
    weights = torch.arange(100_000.0)
    ckptman.save({"w": weights, "small": torch.ones(3)}, tmp_path / "x")
    file = tmp_path / "x" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    at = data.index(weights[50_000:50_004].numpy().tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    fresh = {"w": torch.zeros(100_000)}
    with pytest.raises(ckptman.CorruptError, match="is not usable"):
        ckptman.load(fresh, tmp_path / "x")
    ckptman.load(fresh, tmp_path / "x", verify=False)
    assert torch.equal(fresh["w"] != weights, torch.arange(100_000) == 50_000)


def test_a_step_of_a_run_is_known_by_its_name(tmp_path):
    path = tmp_path / "step-0000000042"
    ckptman.save(state(), path)
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert (manifest["step"], manifest["world_size"]) == (42, 1)
    with ckptman.Checkpointer(tmp_path, fresh := {"w": torch.zeros(3, 4), **state(0.0)}, deadline=None) as run:
        assert run.restore() == 42
    assert fresh["step"] == 1


def test_the_manifest_does_not_say_that_dcp_saved_it(tmp_path):
    ckptman.save(state(), tmp_path / "x")
    assert "dcp" not in json.loads((tmp_path / "x" / "manifest.json").read_bytes())["reason"]


def on_two_ranks(folder):
    """Errors that one rank alone would meet come on both."""
    rank, told = dist.get_rank(), []
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)], src_data_rank=None)
    ckptman.save({"x": sharded, "step": 1}, f"{folder}/x")

    def attempt(work):
        try:
            work()
        except ckptman.CkptmanError as error:
            told.append(f"{type(error).__name__} {error}")
        else:
            told.append("done")

    fresh = distribute_tensor(torch.zeros(10), mesh, [Shard(0)], src_data_rank=None)
    attempt(lambda: ckptman.save({"x": sharded}, f"{folder}/x"))
    attempt(lambda: ckptman.load({"x": fresh, **({"mine": 1} if rank == 1 else {})}, f"{folder}/x"))
    assert not fresh.to_local().any()
    meta = torch.empty(3, device="meta" if rank == 1 else "cpu")
    attempt(lambda: ckptman.save({"y": torch.ones(2), f"m{rank}": meta}, f"{folder}/y"))
    attempt(lambda: ckptman.load({"x": fresh}, f"{folder}/none"))
    whole = torch.zeros(10)
    attempt(lambda: ckptman.load({"x": whole}, f"{folder}/x"))
    assert torch.equal(whole, torch.arange(10.0))
    return told


def test_errors_are_the_same_on_every_rank(tmp_path):
    first, second = run_ranks(2, on_two_ranks, str(tmp_path))
    assert first == second
    kinds = [text.split()[0] for text in first]
    assert kinds == ["ExistsError", "MismatchError", "ConfigError", "NotFoundError", "done"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["x"]


def test_what_is_in_the_state_twice_stays_one(tmp_path):
    def twice(value):
        shared = {"lr": value, "steps": [value]}
        return {"a": shared, "b": {"m": shared}}

    ckptman.save(twice(1.0), tmp_path / "x")
    fresh = twice(0.0)
    ckptman.load(fresh, tmp_path / "x")
    assert fresh["a"] is fresh["b"]["m"]
    assert fresh["a"] == {"lr": 1.0, "steps": [1.0]}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", ["save", "StorageWriter"])
def test_a_step_that_is_named_is_in_the_manifest(tmp_path, way):
    def save(path, step=None):
        if way == "save":
            ckptman.save(state(), path, step=step)
        else:
            dcp.save(state(), storage_writer=ckptman.StorageWriter(path, step=step))

    save(tmp_path / "final", 5)
    save(tmp_path / "step-0000000007", np.int64(7))
    save(tmp_path / "step-0000000008")
    assert [each.step for each in ckptman.Run(tmp_path).checkpoints] == [7, 8]
    assert read_manifest(tmp_path / "final").step == 5
    with ckptman.Checkpointer(tmp_path / "run", state(0.0)) as run:
        assert run.restore(path=tmp_path / "final") == 5
        assert run.restored_from == 5
    for step, why in ((9, "is the name of step 10, not of step=9"), (-1, "a number from 0"), ("9", "a whole number")):
        with pytest.raises(ckptman.ConfigError, match=why):
            save(tmp_path / "step-0000000010", step)
    assert not (tmp_path / "step-0000000010").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_step_of_a_writer_is_that_of_its_own_path_only(tmp_path):
    writer = ckptman.StorageWriter(tmp_path / "one", step=5)
    dcp.save(state(), storage_writer=writer)
    dcp.save(state(), storage_writer=writer, checkpoint_id=tmp_path / "two")
    assert [read_manifest(tmp_path / name).step for name in ("one", "two")] == [5, 0]
