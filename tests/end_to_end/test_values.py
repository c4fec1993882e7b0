"""What goes in comes out: every kind of value, each rank's own generators, and the copy that training cannot touch."""

import random
import threading

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import ckptman
from ckptman.catalog.catalog import Catalog
from ckptman.io.durable_files import Disk
from tests.helpers.apps import App
from tests.helpers.faulty_disk import saving_to
from tests.helpers.ranks import run_ranks


def round_trip(root, state, fresh):
    with ckptman.Checkpointer(root, state, deadline=None) as checkpointer:
        checkpointer.save(1)
    with ckptman.Checkpointer(root, fresh, deadline=None) as checkpointer:
        assert checkpointer.restore() == 1
    return fresh


def test_tensors_in_dicts_and_lists_are_filled_where_they_are(tmp_path):
    """The model that they belong to trains on, and what is saved next is what it then has."""

    def made():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        bare, deep = torch.randn(3), nn.Parameter(torch.randn(2, 2))
        state = {"model": model.state_dict(), "bare": bare, "ema": {"decay": 0.9, "all": [1, {"w": [deep]}]}}
        return model, state, [*model.state_dict().values(), bare, deep]

    _, saved, theirs = made()
    model, state, mine = made()
    held = [state["bare"], state["ema"]["all"][1]["w"][0], *state["model"].values()]
    round_trip(tmp_path, saved, state)
    assert all(map(torch.equal, mine, theirs))
    found = [state["bare"], state["ema"]["all"][1]["w"][0], *state["model"].values()]
    assert all(one is other for one, other in zip(found, held))
    with ckptman.Checkpointer(tmp_path, state, deadline=None) as checkpointer:
        checkpointer.restore()
        nn.init.constant_(model[0].weight, 7.0)
        checkpointer.save(2)
    with ckptman.Checkpointer(tmp_path, state, deadline=None) as checkpointer:
        checkpointer.restore(step=2)
    assert (state["model"]["0.weight"] == 7.0).all()


class Refusing:
    """An object that does not like what it is given."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise ValueError("not this one")


def test_what_cannot_be_filled_leaves_tensors_in_dicts_as_they_were(tmp_path):
    with ckptman.Checkpointer(tmp_path, {"a": {"t": torch.ones(2, 3)}, "z": Refusing()}, deadline=None) as checkpointer:
        checkpointer.save(1)
    expanded = torch.zeros(3).expand(2, 3)
    for target, told in ((expanded, r"a\.t is expanded: .*clone"), (torch.zeros(2, 3), "not this one")):
        state = {"a": {"t": target}, "z": Refusing()}
        with (
            pytest.raises(ckptman.CkptmanError, match=told),
            ckptman.Checkpointer(tmp_path, state, deadline=None) as checkpointer,
        ):
            checkpointer.restore()
        assert state["a"]["t"] is target
        assert not target.any()


def test_a_copy_of_a_parameter_that_is_the_parameter_itself_this_time(tmp_path):
    """Two saved tensors do not fit into one; tied ones, which are the same, do."""
    model = nn.Linear(2, 3)
    best = {name: torch.zeros_like(each) for name, each in model.state_dict().items()}
    with ckptman.Checkpointer(tmp_path, {"best": best, "model": model}) as checkpointer:
        checkpointer.save(1)
        best.update(model.state_dict())
        checkpointer.save(2)
    fresh = nn.Linear(2, 3)
    before = fresh.weight.clone()
    with ckptman.Checkpointer(tmp_path, {"best": fresh.state_dict(), "model": fresh}) as checkpointer:
        with pytest.raises(ckptman.MismatchError, match=r"model\.weight: .* same memory as best\.weight.*clone"):
            checkpointer.restore(step=1)
        assert torch.equal(fresh.weight, before)
        with pytest.raises(ckptman.MismatchError, match=r"same memory as best\.weight"):
            ckptman.load({"best": fresh.state_dict(), "model": fresh}, tmp_path / "step-0000000001")
        assert torch.equal(fresh.weight, before)
        assert checkpointer.restore(step=2) == 2
    assert torch.equal(fresh.weight, model.weight)


class StalledDisk(Disk):
    """Holds what the background thread flushes until it is let go."""

    def __init__(self):
        self.gate = threading.Event()

    def sync_file(self, fd):
        if threading.current_thread().name.startswith("ckptman-save"):
            self.gate.wait()
        super().sync_file(fd)


class Counting(nn.Module):
    """Keeps more than parameters and buffers, and not always as much, as layers that scale their numbers do."""

    def __init__(self, extra):
        super().__init__()
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.filterwarnings("ignore:.*in a single process")
@pytest.mark.parametrize("way", ["restore", "load", "of plain DCP"])
def test_what_a_module_keeps_besides_is_for_it_to_check(tmp_path, way):
    saved = [torch.arange(5), {"scale": torch.ones(2), "history": [torch.zeros(3), 7], "n": 1}]
    fresh = [torch.empty(0), None]
    model, other = (nn.ModuleList(map(Counting, each)) for each in (saved, fresh))
    if way == "of plain DCP":
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "step-0000000001", no_dist=True)
    else:
        with ckptman.Checkpointer(tmp_path, {"model": model}) as checkpointer:
            checkpointer.save(1)
    if way == "restore":
        with ckptman.Checkpointer(tmp_path, {"model": other}) as checkpointer:
            checkpointer.restore()
    else:
        ckptman.load({"model": other}, tmp_path / "step-0000000001")
    assert torch.equal(other[0].extra, torch.arange(5))
    assert repr(other[1].extra) == repr(saved[1])


def test_training_goes_on_while_the_private_copy_is_written(tmp_path):
    app, disk = App(), StalledDisk()
    with (
        saving_to(disk),
        ckptman.Checkpointer(tmp_path, app.state, save_policy=ckptman.AtStep(1), deadline=None) as checkpointer,
    ):
        app.train_step()
        assert checkpointer.step(1) == "at step 1"
        saved = app.digests()
        for step in range(2, 6):
            app.train_step()
            checkpointer.step(step)
        assert app.digests() != saved
        assert not list(tmp_path.glob("step-??????????"))
        disk.gate.set()
        checkpointer.wait()
    fresh = App(seed=5)
    with ckptman.Checkpointer(tmp_path, fresh.state, deadline=None) as checkpointer:
        assert checkpointer.restore(step=1) == 1
        assert fresh.digests() == saved


def draw():
    return [random.random(), float(numpy.random.rand()), torch.rand(1).item()]


def save_generators(root):
    rank = dist.get_rank()
    random.seed(rank)
    numpy.random.seed(rank)
    torch.manual_seed(rank)
    draw()
    with ckptman.Checkpointer(root, {"rng": ckptman.RNGState()}, deadline=None) as checkpointer:
        checkpointer.save(1)
        return draw()


def restore_generators(root):
    with ckptman.Checkpointer(root, {"rng": ckptman.RNGState()}, deadline=None) as checkpointer:
        checkpointer.restore()
        return draw()


@pytest.mark.slow
def test_each_rank_gets_its_own_generators_back_and_new_ranks_get_their_own(tmp_path):
    expected = run_ranks(2, save_generators, str(tmp_path))
    assert run_ranks(2, restore_generators, str(tmp_path)) == expected
    larger = run_ranks(4, restore_generators, str(tmp_path))
    assert larger[:2] == expected
    for source in range(3):
        assert len({draws[source] for draws in larger}) == 4
    assert run_ranks(4, restore_generators, str(tmp_path)) == larger


def save_hsdp(root):
    app = App((2, 2), width=16384)
    with ckptman.Checkpointer(root, app.state, deadline=None) as checkpointer:
        app.train_step()
        checkpointer.save(1)


def test_replicas_write_each_shard_once_and_share_the_work(tmp_path):
    run_ranks(4, save_hsdp, str(tmp_path))
    manifest = Catalog(tmp_path).entry(1).require_manifest()
    sizes = [manifest.files[f"__{rank}_0.distcp"].bytes for rank in range(4)]
    parameters = 16384 * 5 + 16384 + 3 * 16384
    assert sum(sizes) < 1.25 * parameters * 4 * 3
    assert min(sizes) > 0.1 * sum(sizes)
    assert manifest.mesh is not None
    assert (manifest.mesh.names, manifest.mesh.shape) == (("replicate", "shard"), (2, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_policy": 5}, "save_policy is a policy"),
        ({"retention": "all"}, "retention is a policy"),
        ({"timeout_seconds": -1}, "timeout_seconds is a positive number"),
        ({"state": {}}, "state is a dict"),
        ({"root": ""}, "root is the path"),
    ],
)
def test_wrong_arguments_are_refused_at_once(tmp_path, arguments, message):
    root = arguments.pop("root", tmp_path / "run")
    state = arguments.pop("state", {"epoch": 1})
    with pytest.raises(ckptman.ConfigError, match=message):
        ckptman.Checkpointer(root, state, **arguments)
    assert not (tmp_path / "run").exists()
