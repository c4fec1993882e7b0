"""Plain DCP reads what ckptman wrote, and ckptman restores what plain DCP wrote."""

from __future__ import annotations

import json
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckptman
from ckptman.sharded.foreign import read_foreign_metadata
from ckptman.store.catalogue import Catalogue
from tests.apps import App
from tests.ranks import run_ranks


def save_with_ckptman(root: str, mesh: tuple[int, ...]) -> dict[str, str]:
    app = App(mesh)
    with ckptman.Checkpointer(root, app.state, save_policy=ckptman.EverySteps(2), deadline=None) as checkpointer:
        for step in (1, 2):
            app.train_step()
            checkpointer.step(step)
    return app.digests()


def nested_state(app: App, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return {
        "model": get_model_state_dict(app.model),
        "optimizer": get_optimizer_state_dict(app.model, app.optimizer, options=options),
        "scheduler": {"last_epoch": app.scheduler.last_epoch},
        "data": app.position.state_dict(),
        "epoch": app.state["epoch"],
    }


def load_with_dcp(path: str, mesh: tuple[int, ...]) -> dict[str, str]:
    """Everything by torch alone; values come back in the nested dict that was given."""
    app = App(mesh, seed=1)
    state = nested_state(app, flat=True)
    dcp.load(state, checkpoint_id=path)
    app.scheduler.last_epoch = state["scheduler"]["last_epoch"]
    app.position.load_state_dict(state["data"])
    app.state["epoch"] = state["epoch"]
    return {name: text for name, text in app.digests().items() if not name.startswith("scheduler.")}


@pytest.mark.parametrize(("saved", "loaded"), [((2, 2), (3,)), ((3,), (2,))])
def test_plain_dcp_load_reads_our_checkpoints(tmp_path: Path, saved: tuple[int, ...], loaded: tuple[int, ...]) -> None:
    root = tmp_path / "run"
    ours = run_ranks(4 if len(saved) == 2 else saved[0], save_with_ckptman, str(root), saved)[0]
    theirs = run_ranks(loaded[0], load_with_dcp, str(root / "step-0000000002"), loaded)[0]
    assert theirs == {name: text for name, text in ours.items() if not name.startswith("scheduler.")}


def save_with_dcp(path: str, mesh: tuple[int, ...], flat: bool) -> dict[str, str]:
    app = App(mesh)
    app.train_step()
    app.train_step()
    state = nested_state(app, flat)
    state["scheduler"] = app.scheduler.state_dict()
    dcp.save(state, checkpoint_id=path)
    return app.digests()


def restore_with_ckptman(root: str, path: str, mesh: tuple[int, ...]) -> dict[str, str]:
    app = App(mesh, seed=1)
    del app.state["rng"]
    with ckptman.Checkpointer(root, app.state, deadline=None) as checkpointer:
        assert checkpointer.restore(path=path) == 0
        return app.digests()


@pytest.mark.parametrize("flat", [True, False])
def test_restore_reads_what_plain_dcp_saved(tmp_path: Path, flat: bool) -> None:
    path = str(tmp_path / "plain")
    saved = run_ranks(2, save_with_dcp, path, (2,), flat)[0]
    restored = run_ranks(3, restore_with_ckptman, str(tmp_path / "run"), path, (3,))[0]
    # DCP turns the integer keys of the schedule's milestones into texts; everything else is what was saved.
    differ = {name for name in saved if saved[name] != restored.get(name)}
    assert all(name.startswith("scheduler.milestones") for name in differ), differ


def save_with_writer(path: str) -> None:
    state = {"weights": torch.arange(10.0) + 0 * dist.get_rank(), "step": 3, "nested": {"lr": [0.1, 0.2]}}
    dcp.save(state, storage_writer=ckptman.StorageWriter(path))
    fresh = {"weights": torch.zeros(10), "step": 0, "nested": {"lr": []}}
    dcp.load(fresh, storage_reader=ckptman.StorageReader(path))
    assert fresh["step"] == 3
    assert fresh["nested"] == {"lr": [0.1, 0.2]}
    assert torch.equal(fresh["weights"], state["weights"])
    with pytest.raises(dcp.api.CheckpointException, match="exists already"):
        dcp.save(state, storage_writer=ckptman.StorageWriter(path))


def test_writer_and_reader_stand_alone_in_dcp_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    run_ranks(2, save_with_writer, str(path))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mine"]
    for step in (200, 100):
        with pytest.warns(UserWarning, match="single process"):
            dcp.save({"x": torch.ones(2)}, storage_writer=ckptman.StorageWriter(tmp_path / f"step-{step:010d}"))
    assert [(each.step, each.sequence) for each in Catalogue(tmp_path).complete()] == [(200, 1), (100, 2)]
    data = path / "__0_0.distcp"
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    state = {"weights": torch.zeros(10)}
    with (
        pytest.warns(UserWarning, match="single process"),
        pytest.raises(dcp.api.CheckpointException, match="does not match its digest"),
    ):
        dcp.load(state, storage_reader=ckptman.StorageReader(path))
    assert not state["weights"].any()


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (99,)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_and_ckptman_lay_out_a_data_file_alike(tmp_path: Path) -> None:
    state = {"large": torch.ones(600, 600), "small": torch.ones(3), "epoch": 3, "name": "x"}
    ckptman.save(state, tmp_path / "ours")
    dcp.save(state, storage_writer=ckptman.StorageWriter(tmp_path / "dcp"))
    ours, theirs = (json.loads((tmp_path / name / "index.json").read_text())["objects"] for name in ("ours", "dcp"))
    assert ours == theirs
    assert min(each["offset"] for each in ours.values()) % 4096 == 0
    assert (tmp_path / "ours" / "chunks.bin").read_bytes() == (tmp_path / "dcp" / "chunks.bin").read_bytes()


def test_a_hostile_value_is_refused_by_the_reader_with_torchs_own_planner(tmp_path: Path) -> None:
    path = tmp_path / "plain"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"weights": torch.ones(3), "value": Evil()}, checkpoint_id=path)
    state = {"weights": torch.zeros(3), "value": None}
    with (
        pytest.warns(UserWarning, match="single process"),
        pytest.raises(dcp.api.CheckpointException, match="the value value was refused"),
    ):
        dcp.load(state, storage_reader=ckptman.StorageReader(path))
    assert state["value"] is None


def test_a_hostile_metadata_pickle_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ckptman.CorruptError, match=r"sys\.exit"):
        read_foreign_metadata(path)


def test_a_writer_that_was_sent_to_another_process(tmp_path: Path) -> None:
    """`dcp.async_save` with a process of its own pickles the writer."""
    writer = pickle.loads(pickle.dumps(ckptman.StorageWriter(tmp_path / "x")))
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"x": torch.ones(5)}, storage_writer=writer)
    state = {"x": torch.zeros(5)}
    ckptman.load(state, tmp_path / "x")
    assert torch.equal(state["x"], torch.ones(5))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_plan_that_dcp_kept_from_an_earlier_save_is_refused_with_a_remedy(tmp_path: Path) -> None:
    state, planner = {"x": torch.ones(5)}, DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(state, storage_writer=ckptman.StorageWriter(tmp_path / "one"), planner=planner, no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match="enable_plan_caching=False"):
        dcp.save(state, storage_writer=ckptman.StorageWriter(tmp_path / "two"), planner=planner, no_dist=True)
    assert [each.name for each in tmp_path.iterdir()] == ["one"], "nothing is left of it"


def save_with_unlike_tensors(path: str) -> str:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    dtype = torch.float32 if rank else torch.int32
    local = DTensor.from_local(torch.ones(3, dtype=dtype), mesh, [Shard(0)])
    try:
        dcp.save({"x": local}, storage_writer=ckptman.StorageWriter(path))
    except (Exception, dcp.api.CheckpointException) as error:
        return str(error)
    return "saved"


def test_ranks_that_do_not_mean_the_same_tensor_are_told(tmp_path: Path) -> None:
    texts = run_ranks(2, save_with_unlike_tensors, str(tmp_path / "x"))
    assert all("float32" in text and "int32" in text for text in texts), texts
    assert list(tmp_path.iterdir()) == []


class Casting(DefaultSavePlanner):
    """Casts what is written, and leaves the plan as it was."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        made = super().transform_object(write_item, object)
        return made.to(self.dtype) if isinstance(made, torch.Tensor) else made


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_a_planner_casts_on_its_way_is_what_is_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.arange(24.0).reshape(4, 6)
    dcp.save({"x": values}, storage_writer=ckptman.StorageWriter(tmp_path / "x"), planner=Casting(dtype))
    for reader in (ckptman.StorageReader(tmp_path / "x"), FileSystemReader(tmp_path / "x")):
        state = {"x": torch.zeros(4, 6)}
        dcp.load(state, storage_reader=reader)
        assert torch.equal(state["x"], values)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_reader_sees_what_took_the_place_of_what_it_read(tmp_path: Path) -> None:
    reader, state = ckptman.StorageReader(tmp_path / "x"), {"x": torch.zeros(5), "step": 0}
    for step in (1, 2):
        writer = ckptman.StorageWriter(tmp_path / "x", overwrite=True)
        dcp.save({"x": torch.full((5,), float(step)), "step": step}, storage_writer=writer)
        dcp.load(state, storage_reader=reader)
        assert (state["step"], state["x"].tolist()) == (step, [step] * 5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_value_that_moves_and_keeps_its_flat_name(tmp_path: Path) -> None:
    """Who builds the state from the checkpoint is told where it is now."""
    state: dict[str, Any] = {"x": {"k": {"a.b": torch.ones(2), "0": 1}}}
    with ckptman.Checkpointer(tmp_path, state, deadline=None) as checkpointer:
        checkpointer.save(1)
        state["x"]["k"] = {"a": {"b": torch.ones(2)}, "0": 1}
        checkpointer.save(2)
    for step, paths in ((1, ("x", "k", "a.b")), (2, ("x", "k", "a", "b"))):
        metadata = FileSystemReader(tmp_path / f"step-{step:010d}").read_metadata()
        assert metadata.planner_data["x.k.a.b"] == paths


def save_a_part(path: str) -> str:
    warnings.simplefilter("default")
    local = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Shard(0)])
    try:
        dcp.save({"x": local}, storage_writer=ckptman.StorageWriter(f"{path}-{dist.get_rank()}"), no_dist=True)
    except (Exception, dcp.api.CheckpointException) as error:
        return str(error)
    return "saved"


def test_a_part_of_a_tensor_is_no_checkpoint(tmp_path: Path) -> None:
    texts = run_ranks(2, save_a_part, str(tmp_path / "x"))
    assert all("3 elements of 6" in text and "save it together" in text for text in texts), texts
    assert list(tmp_path.iterdir()) == []


def save_without_collectives(path: str) -> str:
    try:
        dcp.save({f"x {dist.get_rank()}": 1}, storage_writer=ckptman.StorageWriter(path), use_collectives=False)
    except ckptman.ConfigError as error:
        return str(error)
    return "saved"


def test_one_checkpoint_is_not_written_by_ranks_that_do_not_speak(tmp_path: Path) -> None:
    texts = run_ranks(2, save_without_collectives, str(tmp_path / "x"))
    assert all("use_collectives=False" in text for text in texts), texts
    assert list(tmp_path.iterdir()) == []
