"""What goes in comes out, and nothing is loaded or saved that is not what its name says."""

import copy
import errno
import os
import random
import signal
import threading
import time
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckptman
from ckptman.runtime.outcome import read_outcome
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.format.paths import outcome_path
from ckptman.storage.io.durable_files import Disk
from tests.engine.dcp.test_values import save
from tests.helpers.apps import App
from tests.helpers.faulty_disk import on_disk
from tests.helpers.ranks import run_ranks


def open_run(root, state, **options):
    options.setdefault("save_policy", ckptman.EverySteps(1))
    options.setdefault("timeout_seconds", 20)
    return ckptman.Checkpointer(root, state, deadline=None, **options)


# ---- values ----------------------------------------------------------------------------------------------------------


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
    saved["ema"]["new"] = torch.arange(3)
    round_trip(tmp_path, saved, state)
    assert all(map(torch.equal, mine, theirs))
    assert torch.equal(state["ema"]["new"], torch.arange(3))
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


@pytest.mark.parametrize(
    ("target", "told"),
    [(torch.zeros(3).expand(2, 3), r"a\.t is expanded: .*clone"), (torch.zeros(2, 3), "not this one")],
)
def test_what_cannot_be_filled_leaves_tensors_in_dicts_as_they_were(tmp_path, target, told):
    state = {"a": {"t": target}, "z": Refusing()}
    with pytest.raises(ckptman.CkptmanError, match=told):
        round_trip(tmp_path, {"a": {"t": torch.ones(2, 3)}, "z": Refusing()}, state)
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


class LanguageModel(nn.Module):
    """Its head may have the weights of its embedding, which are more than are compared at a time."""

    def __init__(self, tie):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5000, 64), nn.Linear(64, 5000, bias=False)
        if tie:
            self.head.weight = self.embedding.weight


def test_weights_that_were_saved_apart_do_not_fit_where_they_are_tied(tmp_path):
    tied, apart = LanguageModel(tie=True), LanguageModel(tie=False)
    with torch.no_grad():
        apart.head.weight.copy_(apart.embedding.weight)
        apart.head.weight[-1, -1] += 1  # all else is the same
    round_trip(tmp_path / "tied", {"model": tied}, {"model": LanguageModel(tie=True)})
    before = tied.embedding.weight.clone()
    told = r"model\.head\.weight: in this run the same memory as .*untie"
    with pytest.raises(ckptman.MismatchError, match=told):
        round_trip(tmp_path / "apart", {"model": apart}, {"model": tied})
    with pytest.raises(ckptman.MismatchError, match=told):
        ckptman.load({"model": tied}, tmp_path / "apart")
    assert torch.equal(tied.embedding.weight, before)
    untied = LanguageModel(tie=False)
    ckptman.load({"model": untied}, tmp_path / "tied")
    assert torch.equal(untied.head.weight, tied.head.weight)


def test_weights_that_were_tied_and_are_not_any_more_are_named(tmp_path):
    round_trip(tmp_path, {"model": LanguageModel(tie=True)}, {"model": LanguageModel(tie=True)})
    told = (
        r"model\.embedding\.weight and model\.head\.weight were one parameter .*trained apart.*tie them before restore"
    )
    with (
        pytest.warns(RuntimeWarning, match=told),
        ckptman.Checkpointer(tmp_path, {"model": LanguageModel(tie=False)}, deadline=None) as checkpointer,
    ):
        checkpointer.restore()


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


@pytest.mark.parametrize("way", ["restore", "ckptman.save", "dcp"])
def test_what_a_module_keeps_besides_is_for_it_to_check(tmp_path, way):
    saved = [torch.arange(5), {"scale": torch.ones(2), "history": [torch.zeros(3), 7], "n": 1}]
    fresh = [torch.empty(0), None]
    model, other = (nn.ModuleList(map(Counting, each)) for each in (saved, fresh))
    if way == "restore":
        round_trip(tmp_path, {"model": model}, {"model": other})
    else:
        save({"model": model.state_dict() if way == "dcp" else model}, tmp_path / "x", way)
        ckptman.load({"model": other}, tmp_path / "x")
    assert torch.equal(other[0].extra, torch.arange(5))
    assert repr(other[1].extra) == repr(saved[1])


def test_training_goes_on_while_the_private_copy_is_written(tmp_path):
    app, disk = App(), StalledDisk()
    with (
        on_disk(disk),
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
    assert (manifest.mesh.names, manifest.mesh.shape) == (("replicate", "shard"), (2, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_policy": "often"}, "save_policy is a policy"),
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


# ---- saves, restores and the end of a run ----------------------------------------------------------------------------


class Best:
    """Keeps the best weights, at first by reference to the model, as many trackers do."""

    def __init__(self, model):
        self.weights = model.state_dict()

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights = state["weights"]


def test_an_object_that_shares_tensors_with_the_model_gets_its_own_back(tmp_path):
    model, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1.0)
    best, tracked = Best(copy.deepcopy(model)), Best(fresh)
    nn.init.constant_(model.weight, 2.0)
    round_trip(tmp_path, {"best": best, "model": model}, {"best": tracked, "model": fresh})
    assert (fresh.weight == 2.0).all()
    assert (tracked.weights["weight"] == 1.0).all()


def test_going_back_and_leaving_does_not_save_the_old_state_under_a_new_name(tmp_path):
    app = App()
    with open_run(tmp_path, app.state) as checkpointer:
        for step in (1, 2, 3):
            app.train_step()
            checkpointer.step(step)
        digests = app.digests()
        checkpointer.wait()
        checkpointer.restore(step=1)
    with open_run(tmp_path, app.state) as checkpointer:
        assert checkpointer.restore() == 3
        assert app.digests() == digests


def test_an_object_that_was_empty_when_saved(tmp_path):
    fresh = round_trip(tmp_path, {"callback": {}, "epoch": 1}, {"callback": {"best": None}, "epoch": 0})
    assert fresh == {"callback": {}, "epoch": 1}


class Failing:
    def state_dict(self):
        raise ZeroDivisionError("a bug of the user's")

    def load_state_dict(self, state): ...


def test_a_bug_in_a_state_dict_is_not_called_corruption(tmp_path):
    with pytest.raises(ckptman.CkptmanError, match="a bug of the user's") as caught:
        round_trip(tmp_path, {"thing": {"a": 1}}, {"thing": Failing()})
    assert not isinstance(caught.value, ckptman.CorruptError)


class SlowOnce(Disk):
    """One flush on this rank takes longer than the others wait."""

    slow = False

    def sync_file(self, fd):
        if self.slow:
            self.slow = False
            time.sleep(5)  # longer than the timeout: the delay itself is what is tested
        super().sync_file(fd)


def lose_contact(root):
    app, disk, events = App((2,)), SlowOnce(), []
    policy = ckptman.AtStep(1, 2, 3, 4)
    with on_disk(disk), open_run(root, app.state, timeout_seconds=3, save_policy=policy) as checkpointer:
        checkpointer.restore()
        for step in range(1, 5):
            disk.slow = step == 2 and dist.get_rank() == 1
            app.train_step()
            try:
                checkpointer.step(step)
                checkpointer.wait()
                events.append(f"{step} saved")
            except ckptman.CommitError as error:
                events.append(f"{error.step} failed")
                dist.barrier()
    return events


@pytest.mark.slow
def test_after_a_timeout_the_run_saves_again(tmp_path):
    first, second = run_ranks(2, lose_contact, str(tmp_path), fresh=True)
    assert first == second
    assert "2 failed" in first
    assert first[-1] == "4 saved"


class Hoarder(Disk):
    """Refuses to write files when the disk is full of leftovers."""

    def __init__(self, root):
        self.root = root

    def write_file(self, path, data):
        if any(".tmp-deadbeef-" in each.name for each in self.root.iterdir()):
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write_file(path, data)


def test_leftovers_of_killed_saves_make_room_for_the_next_attempt(tmp_path):
    (tmp_path / "step-0000000007.tmp-deadbeef-1").mkdir()
    with on_disk(Hoarder(tmp_path)), open_run(tmp_path, {"epoch": 1}) as checkpointer:
        checkpointer.restore()
        checkpointer.step(1)
    assert [each.step for each in Catalog(tmp_path).complete()] == [1]


def test_a_loop_that_looks_at_the_signal_itself_is_run_again(tmp_path):
    with ckptman.SignalHandler() as signals:
        with open_run(tmp_path, {"epoch": 1}, signals=signals, save_policy=ckptman.OnStop()) as checkpointer:
            checkpointer.step(1)
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signals.requested
        assert checkpointer.exit_code == 75
    outcome = read_outcome(outcome_path(tmp_path))
    assert (outcome.state, outcome.reason) == ("stopped", "SIGUSR2 on rank 0")
    assert [each.step for each in Catalog(tmp_path).complete()] == [1]


def test_step_numbers_of_other_types(tmp_path):
    with open_run(tmp_path, {"epoch": 1}) as checkpointer:
        checkpointer.step(numpy.int64(5))
        checkpointer.wait()
        for wrong in ("6", 6.5, -1, 10**10):
            with pytest.raises(ckptman.ConfigError, match="a step is a"):
                checkpointer.step(wrong)
            with pytest.raises(ckptman.ConfigError, match="a step is a"):
                checkpointer.save(wrong)
    assert [each.step for each in Catalog(tmp_path).complete()] == [5]


def test_a_process_that_is_one_of_several_but_not_joined_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ckptman.ConfigError, match="init_process_group"):
        open_run(tmp_path, {"epoch": 1})


class Picky(ckptman.RetentionPolicy):
    def keeps(self, records):
        raise IndexError("a bug of the user's")


def test_a_retention_policy_that_raises_costs_no_save(tmp_path):
    with (
        pytest.warns(RuntimeWarning, match="could not be pruned"),
        open_run(tmp_path, {"epoch": 1}, retention=Picky()) as checkpointer,
    ):
        for step in (1, 2):
            checkpointer.step(step)
    assert [each.step for each in Catalog(tmp_path).complete()] == [1, 2]


def test_a_run_says_which_attempt_it_is_where_it_came_from_and_what_is_durable(tmp_path):
    said = []
    for _ in range(2):
        state = {"weight": torch.zeros(3)}
        with open_run(tmp_path, state, save_policy=ckptman.EverySteps(2), run_id="italia") as checkpointer:
            said.append(
                (checkpointer.run_id, checkpointer.attempt, checkpointer.restored_from, checkpointer.last_saved)
            )
            start = checkpointer.restore()
            for step in range(start + 1, start + 4):
                checkpointer.step(step)
            checkpointer.wait()
            said.append((checkpointer.restored_from, checkpointer.last_saved))
        said.append(checkpointer.last_saved)  # the end of the block saved the last step
    assert said == [("italia", 1, None, None), (None, 2), 3, ("italia", 2, None, None), (3, 6), 6]
    assert ckptman.Run(tmp_path).run_id == "italia"


def test_a_save_that_failed_is_not_the_last_saved(tmp_path):
    full = mock.patch.object(Disk, "sync_folder", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with open_run(tmp_path, {"weight": torch.zeros(3)}, async_save=False) as checkpointer:
        checkpointer.step(1)
        with full, pytest.raises(ckptman.CommitError):
            checkpointer.step(2)
        assert checkpointer.last_saved == 1
    assert checkpointer.last_saved == 2
