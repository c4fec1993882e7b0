"""Ways in which a run could load or save something that is not what its name says, or stop saving."""

import copy
import errno
import os
import signal
import sys
import time

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckptman
from ckptman.catalog.catalog import Catalog
from ckptman.format.paths import outcome_path
from ckptman.io.durable_files import DISK, Disk
from ckptman.runtime.outcome import read_outcome
from tests.helpers.apps import App
from tests.helpers.faulty_disk import saving_to
from tests.helpers.ranks import run_ranks


def open_run(root, state, disk=DISK, **options):
    options.setdefault("save_policy", ckptman.EverySteps(1))
    options.setdefault("timeout_seconds", 20)
    with saving_to(disk):
        return ckptman.Checkpointer(root, state, deadline=None, **options)


class Best:
    """Keeps the best weights, at first by reference to the model, as many trackers do."""

    def __init__(self, model):
        self.weights = model.state_dict()

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights = state["weights"]


def test_an_object_that_shares_tensors_with_the_model_gets_its_own_back(tmp_path):
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1.0)
    best = Best(copy.deepcopy(model))
    nn.init.constant_(model.weight, 2.0)
    with open_run(tmp_path, {"best": best, "model": model}) as checkpointer:
        checkpointer.save(1)
    model = nn.Linear(2, 2)
    best = Best(model)
    with open_run(tmp_path, {"best": best, "model": model}) as checkpointer:
        checkpointer.restore()
    assert (model.weight == 2.0).all()
    assert (best.weights["weight"] == 1.0).all()


class Loader:
    """A data loader whose state differs on each rank and holds a tensor."""

    def __init__(self, per_rank):
        self.per_rank = per_rank
        self.offset, self.buffer = 10 * dist.get_rank(), torch.full((3,), dist.get_rank())

    def state_dict(self):
        return {"offset": self.offset, "buffer": self.buffer}

    def load_state_dict(self, state):
        self.offset, self.buffer = state["offset"], state["buffer"]


def save_loaders(root, per_rank):
    try:
        with open_run(root, {"loader": Loader(per_rank), "step": 1}) as checkpointer:
            checkpointer.step(1)
    except ckptman.ConfigError as error:
        return str(error)
    return ""


def restore_loaders(root):
    loader = Loader(per_rank=True)
    loader.offset, loader.buffer = -1, torch.zeros(3)
    with open_run(root, {"loader": loader, "step": 0}) as checkpointer:
        checkpointer.restore()
    return loader.offset, loader.buffer.tolist()


def test_state_that_differs_between_ranks_is_refused_in_the_first_step_unless_saved_per_rank(tmp_path):
    texts = run_ranks(2, save_loaders, str(tmp_path / "a"), False, fresh=True)
    assert texts[0] == texts[1]
    assert "loader.offset is 0 on rank 0 and 10 on rank 1" in texts[0]
    assert run_ranks(2, save_loaders, str(tmp_path / "b"), True) == ["", ""]
    assert run_ranks(2, restore_loaders, str(tmp_path / "b")) == [(0, [0, 0, 0]), (10, [1, 1, 1])]


def test_leaving_in_the_middle_of_a_step_does_not_save_under_the_name_of_the_one_before(tmp_path):
    app = App()
    with (
        pytest.warns(RuntimeWarning, match="an optimizer has made a step since"),
        open_run(tmp_path, app.state, save_policy=ckptman.EverySteps(2)) as checkpointer,
    ):
        for step in (1, 2, 3):
            app.train_step()
            checkpointer.step(step)
        app.train_step()
    assert [each.step for each in Catalog(tmp_path).complete()] == [2]


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


@pytest.mark.parametrize("kind", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5)])
def test_a_save_before_the_first_step_changes_nothing(tmp_path, kind):
    def run(save):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = kind(model.parameters())
        with open_run(tmp_path / str(save), {"model": model, "optimizer": optimizer}) as checkpointer:
            if save:
                checkpointer.save(0)
                checkpointer.wait()
                assert not optimizer.state
            for step in (1, 2):
                model(torch.ones(3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step(step)
        return [each.detach().clone() for each in model.parameters()]

    for one, other in zip(run(True), run(False)):
        assert torch.equal(one, other)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters())
    with open_run(tmp_path / "True", {"model": model, "optimizer": optimizer}) as checkpointer:
        assert checkpointer.restore(step=0) == 0
        assert not optimizer.state


class Experts(nn.Module):
    """One of two experts never gets a gradient."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


def test_parameters_that_never_had_a_gradient_and_empty_groups(tmp_path):
    def make():
        model = Experts()
        groups = [{"params": list(model.parameters())}, {"params": [], "weight_decay": 0.0}]
        return {"model": model, "optimizer": torch.optim.AdamW(groups, lr=0.1)}

    state = make()
    with open_run(tmp_path, state) as checkpointer:
        state["model"](torch.ones(2)).sum().backward()
        state["optimizer"].step()
        checkpointer.step(1)
    fresh = make()
    with open_run(tmp_path, fresh) as checkpointer:
        assert checkpointer.restore() == 1
    model, optimizer = fresh["model"], fresh["optimizer"]
    assert set(optimizer.state) == set(model.used.parameters())
    assert torch.equal(
        optimizer.state[model.used.weight]["exp_avg"], state["optimizer"].state[state["model"].used.weight]["exp_avg"]
    )


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SparseAdam])
@pytest.mark.parametrize("left_by", ["a gradient", "a freeze"])
@pytest.mark.parametrize("way", ["restore", "load"])
def test_an_optimizer_gets_its_state_whatever_its_parameters_look_like(tmp_path, way, left_by, kind):
    def make():
        model = nn.ModuleList(nn.Embedding(5, 3, sparse=kind is torch.optim.SparseAdam) for _ in range(2))
        return {"model": model, "optimizer": kind(model.parameters())}

    def use(model, number):
        model[number](torch.tensor([1, 3])).sum().backward()

    saved, fresh = make(), make()
    use(saved["model"], 0)
    saved["optimizer"].step()
    with open_run(tmp_path, saved) as checkpointer:
        checkpointer.save(1)
    if left_by == "a gradient":
        use(fresh["model"], 1)  # to see whether it runs at all
    else:
        fresh["model"].requires_grad_(False)  # its layers are unfrozen one by one, when their steps come
    before = [(each.requires_grad, each.grad) for each in fresh["model"].parameters()]
    if way == "load":
        ckptman.load(fresh, tmp_path / "step-0000000001")
    else:
        with open_run(tmp_path, fresh) as checkpointer:
            checkpointer.restore()
    ours, theirs = (each["optimizer"].state_dict()["state"] for each in (fresh, saved))
    assert [*ours] == [*theirs] == [0]
    assert all(torch.equal(torch.as_tensor(ours[0][key]), torch.as_tensor(theirs[0][key])) for key in theirs[0])
    assert [(each.requires_grad, each.grad) for each in fresh["model"].parameters()] == before


@pytest.mark.parametrize("way", ["restore", "load"])
def test_a_checkpoint_that_does_not_fit_leaves_the_optimizer_as_it_was(tmp_path, way):
    def make(outputs):
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, outputs)])
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    saved, fresh, running = make(3), make(4), make(4)
    for layer in saved["model"]:
        layer(torch.ones(2)).sum().backward()
    saved["optimizer"].step()
    running["model"][0](torch.ones(2)).sum().backward()
    running["optimizer"].step()
    with open_run(tmp_path, saved) as checkpointer:
        checkpointer.save(1)
    for state in (fresh, running):
        before = copy.deepcopy(state["optimizer"].state_dict())
        assert not any(state["optimizer"].state[each] for each in state["model"][1].parameters())  # which makes it {}
        with pytest.raises(ckptman.MismatchError):
            if way == "load":
                ckptman.load(state, tmp_path / "step-0000000001")
            else:
                with open_run(tmp_path, state) as checkpointer:
                    checkpointer.restore()
        assert repr(state["optimizer"].state_dict()) == repr(before)


class Refusing(torch.optim.Adam):
    """Does not take what it is given."""

    def load_state_dict(self, state_dict):
        raise ZeroDivisionError("not this")


class Unwilling:
    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        raise ZeroDivisionError("not this")


def test_a_load_that_fails_later_leaves_the_optimizer_as_it_was_or_says_that_it_is_not_usable(tmp_path):
    def make(kind=torch.optim.Adam, **others):
        model = nn.Linear(2, 2)
        return {"model": model, "optimizer": kind(model.parameters()), **others}

    saved = make(other=Unwilling())
    saved["model"](torch.ones(2)).sum().backward()
    saved["optimizer"].step()
    with open_run(tmp_path, saved) as checkpointer:
        checkpointer.save(1)
    fresh, refusing = make(other=Unwilling()), make(Refusing, other={})
    before = copy.deepcopy(fresh["model"].state_dict())
    with pytest.raises(ckptman.CkptmanError, match="not this") as caught, open_run(tmp_path, fresh) as checkpointer:
        checkpointer.restore()
    assert "not usable" not in str(caught.value)
    assert not fresh["optimizer"].state
    assert repr(fresh["model"].state_dict()) == repr(before)
    for way in ("restore", "load"):
        with pytest.raises(ckptman.CkptmanError, match=r"not this.* is not usable"):
            if way == "load":
                ckptman.load(refusing, tmp_path / "step-0000000001")
            else:
                with open_run(tmp_path, refusing) as checkpointer:
                    checkpointer.restore()


class Single(torch.optim.Optimizer):
    """Keeps its state in float32, and counts in integers, whatever its parameters are."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state |= {"master": {"of": parameter.float()}, "seen": torch.zeros((), dtype=torch.int64)}
            state["master"]["of"] -= self.param_groups[0]["lr"] * parameter.grad.float()
            state["seen"] += 1
            parameter.copy_(state["master"]["of"])


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, Single])
@pytest.mark.parametrize("way", ["restore", "load"])
def test_state_of_another_dtype_than_its_parameter_keeps_it(tmp_path, way, kind):
    """torch casts it. Then the run is another one, and an attempt later none of its checkpoints fits the optimizer."""

    def make():
        torch.manual_seed(0)
        model = nn.Linear(3, 2, dtype=torch.bfloat16)
        return {"model": model, "optimizer": kind(model.parameters())}

    def train(state, step):
        state["optimizer"].zero_grad()
        state["model"](torch.full((3,), 1 / step, dtype=torch.bfloat16)).square().sum().backward()
        state["optimizer"].step()

    whole = state = make()
    for step in range(1, 4):
        train(whole, step)
    for step in range(1, 4):
        state = make()
        if step > 1 and way == "load":
            ckptman.load(state, tmp_path / str(step - 1))
        elif step > 1:
            with open_run(tmp_path / "run", state) as checkpointer:
                checkpointer.restore(path=tmp_path / str(step - 1))
        train(state, step)
        ckptman.save(state, tmp_path / str(step))
    for name in whole:
        assert repr(state[name].state_dict()) == repr(whole[name].state_dict())


class Blocked(torch.optim.Optimizer):
    """Keeps state by number, and goes by the numbers, as Shampoo does with its blocks."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            blocks = self.state[parameter].setdefault("blocks", {0: {}, 1: {}})
            for number, block in blocks.items():
                block[number] = block.get(number, torch.zeros(2)) + parameter.grad.sum() * (number + 1)


@pytest.mark.parametrize("way", ["restore", "load"])
def test_state_by_number_stays_so(tmp_path, way):
    """torch makes texts of the keys of nested state."""

    def make():
        model = nn.Linear(2, 2)
        return {"model": model, "optimizer": Blocked(model.parameters())}

    saved, fresh = make(), make()
    saved["model"](torch.ones(2)).sum().backward()
    saved["optimizer"].step()
    with open_run(tmp_path, saved) as checkpointer:
        checkpointer.save(1)
    if way == "load":
        ckptman.load(fresh, tmp_path / "step-0000000001")
    else:
        with open_run(tmp_path, fresh) as checkpointer:
            checkpointer.restore()
    assert repr(fresh["optimizer"].state_dict()) == repr(saved["optimizer"].state_dict())


class Closing(torch.optim.Adam):
    """Makes no step without a closure."""

    def step(self, closure):
        return super().step(lambda: closure())


def test_an_optimizer_that_makes_no_step_without_a_closure(tmp_path):
    def make():
        model = nn.Linear(2, 2)
        return {"model": model, "optimizer": Closing(model.parameters(), lr=0.25)}

    def loss():
        (total := saved["model"](torch.ones(2)).sum()).backward()
        return total

    saved, fresh = make(), make()
    ckptman.save(saved, tmp_path / "unused")
    assert saved["optimizer"].param_groups[0]["lr"] == 0.25
    assert all(each.grad is None for each in saved["model"].parameters())
    saved["optimizer"].step(loss)
    with open_run(tmp_path, saved) as checkpointer:
        checkpointer.save(1)
    with open_run(tmp_path, fresh) as checkpointer:
        checkpointer.restore()
    assert repr(fresh["optimizer"].state_dict()) == repr(saved["optimizer"].state_dict())


@pytest.mark.parametrize("name", ["model", "optimizer"])
@pytest.mark.parametrize("way", ["restore", "load"])
def test_a_value_where_there_is_an_object_now_does_not_fit_and_is_not_damaged(tmp_path, way, name):
    model = nn.Linear(2, 2)
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    with open_run(tmp_path, {name: "adam"}) as checkpointer:
        checkpointer.save(1)
    with pytest.raises(ckptman.MismatchError, match=rf"{name}\."):
        if way == "load":
            ckptman.load(state, tmp_path / "step-0000000001")
        else:
            with open_run(tmp_path, state) as checkpointer:
                checkpointer.restore()


class Adaptive(torch.optim.SGD):
    """Learns a rate of its own, and keeps it among the settings from its first step on with a gradient."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            if sum(each.grad.abs().sum() for each in group["params"] if each.grad is not None):
                group["estimate"] = group.get("estimate", 1.0) / 2


def test_a_setting_that_an_optimizer_adds_in_its_first_step(tmp_path):
    def make():
        model = nn.Linear(2, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}]
        return {"model": model, "optimizer": Adaptive(groups, lr=0.1, momentum=0.9)}

    saved, fresh = make(), make()
    saved["model"](torch.ones(2)).sum().backward()
    saved["optimizer"].step()
    with open_run(tmp_path, saved) as checkpointer:
        checkpointer.save(1)
    with open_run(tmp_path, fresh) as checkpointer:
        checkpointer.restore()
    assert [each["estimate"] for each in fresh["optimizer"].param_groups] == [0.5, 0.5]
    assert [each["lr"] for each in fresh["optimizer"].param_groups] == [0.1, 0.5]
    ckptman.load(loaded := make(), tmp_path / "step-0000000001")
    assert [each["estimate"] for each in loaded["optimizer"].param_groups] == [0.5, 0.5]
    with (
        pytest.raises(ckptman.MismatchError, match=r"optimizer\.param_groups\.bias\.lr"),  # it updates other parameters
        open_run(tmp_path, {"model": fresh["model"], "optimizer": Adaptive([fresh["model"].weight])}) as checkpointer,
    ):
        checkpointer.restore()


@pytest.mark.parametrize("way", ["restore", "load"])
def test_parameters_of_two_groups_that_are_one_now(tmp_path, way):
    """It would have the settings of its first parameter for all of them."""
    model = nn.Linear(2, 2)
    for step, decay in (1, 0.0), (2, 0.5):
        groups = [{"params": [model.weight], "weight_decay": 0.5}, {"params": [model.bias], "weight_decay": decay}]
        ckptman.save({"model": model, "optimizer": torch.optim.AdamW(groups)}, tmp_path / f"step-{step:010}")

    def attempt(step):
        state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), weight_decay=0.25)}
        if way == "load":
            ckptman.load(state, tmp_path / f"step-{step:010}")
        else:
            with open_run(tmp_path, state) as checkpointer:
                checkpointer.restore(step=step)
        return float(state["optimizer"].param_groups[0]["weight_decay"])

    with pytest.raises(ckptman.MismatchError, match=r"bias\.weight_decay: checkpoint 0\.0, this run 0\.5 as of weight"):
        attempt(1)
    assert attempt(2) == 0.5


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_setting_that_a_newer_torch_has_and_the_checkpoint_has_not(tmp_path, scheduled):
    def make(kind, **settings):
        model = nn.Linear(2, 2)
        return {"model": model, "optimizer": kind(model.parameters(), **settings)}

    saved = make(torch.optim.Adam, lr=0.25)
    saved["model"](torch.ones(2)).sum().backward()
    saved["optimizer"].step()
    for group in saved["optimizer"].param_groups:
        del group["decoupled_weight_decay"], group["amsgrad"]
        if scheduled:  # by one that is not made yet in the next attempt
            group["initial_lr"] = 0.25
    with open_run(tmp_path, saved) as checkpointer:
        checkpointer.save(1)
    told = r"without {.*'amsgrad': True.*} in its groups: optimizer keeps them"
    fresh, loaded = (make(torch.optim.Adam, lr=0.5, amsgrad=each) for each in (False, True))
    with open_run(tmp_path, fresh) as checkpointer, pytest.warns(RuntimeWarning, match="'amsgrad': False"):
        checkpointer.restore()
    with pytest.raises(ckptman.MismatchError, match="max_exp_avg_sq"), pytest.warns(RuntimeWarning, match=told):
        ckptman.load(loaded, tmp_path / "step-0000000001")
    (group,) = fresh["optimizer"].param_groups
    assert (group["lr"], group["amsgrad"], group["decoupled_weight_decay"]) == (0.25, False, False)

    ckptman.save(make(torch.optim.Adam), tmp_path / "unused")
    with pytest.raises(ckptman.MismatchError, match="momentum"):  # another kind of optimizer, though it has no state
        ckptman.load(make(torch.optim.SGD), tmp_path / "unused")


def test_an_object_that_was_empty_when_saved(tmp_path):
    with open_run(tmp_path, {"callback": {}, "epoch": 1}) as checkpointer:
        checkpointer.save(1)
    state = {"callback": {"best": None}, "epoch": 0}
    with open_run(tmp_path, state) as checkpointer:
        assert checkpointer.restore() == 1
    assert state == {"callback": {}, "epoch": 1}


class Failing:
    def state_dict(self):
        raise ZeroDivisionError("a bug of the user's")

    def load_state_dict(self, state): ...


def test_a_bug_in_a_state_dict_is_not_called_corruption(tmp_path):
    with open_run(tmp_path, {"thing": {"a": 1}}) as checkpointer:
        checkpointer.save(1)
    with (
        pytest.raises(ckptman.CkptmanError, match="a bug of the user's") as caught,
        open_run(tmp_path, {"thing": Failing()}) as checkpointer,
    ):
        checkpointer.restore()
    assert not isinstance(caught.value, ckptman.CorruptError)


class SlowOnce(Disk):
    """One flush on this rank takes longer than the others wait."""

    slow = False

    def sync_file(self, fd):
        if self.slow:
            type(self).slow = False
            time.sleep(5)  # longer than the timeout: the delay itself is what is tested
        super().sync_file(fd)


def lose_contact(root):
    app, disk, events = App((2,)), SlowOnce(), []
    policy = ckptman.AtStep(1, 2, 3, 4)
    with open_run(root, app.state, disk=disk, timeout_seconds=3, save_policy=policy) as checkpointer:
        checkpointer.restore()
        for step in range(1, 5):
            SlowOnce.slow = step == 2 and dist.get_rank() == 1
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
    with open_run(tmp_path, {"epoch": 1}, disk=Hoarder(tmp_path)) as checkpointer:
        checkpointer.restore()
        checkpointer.step(1)
    assert [each.step for each in Catalog(tmp_path).complete()] == [1]


def test_a_metric_that_is_no_number_does_not_cost_the_save(tmp_path):
    metrics = {"loss": torch.tensor(0.5), "none": None, "text": "x", "many": torch.ones(2), "nan": float("nan")}
    with (
        pytest.warns(RuntimeWarning, match="left out") as warned,
        pytest.warns(RuntimeWarning, match="not finite .*metric nan"),
        open_run(tmp_path, {"epoch": 1}) as checkpointer,
    ):
        checkpointer.step(1, metrics)
    assert len([each for each in warned if "left out" in str(each.message)]) == 3
    found = Catalog(tmp_path).entry(1).require_manifest().metrics
    assert sorted(found) == ["loss", "nan"]


def test_a_start_from_elsewhere_is_for_the_first_attempt_only(tmp_path):
    with open_run(tmp_path / "base", {"epoch": 7}) as checkpointer:
        checkpointer.save(7)
    state = {"epoch": 0}
    for expected in (7, 8, 9):
        with open_run(tmp_path / "run", state) as checkpointer:
            assert checkpointer.restore(path=tmp_path / "base" / "step-0000000007") == expected
            checkpointer.step(expected + 1)


def test_forgetting_restore_is_told_before_good_checkpoints_are_buried(tmp_path):
    with open_run(tmp_path, {"epoch": 1}) as checkpointer:
        checkpointer.save(100)
    with (
        pytest.raises(ckptman.ConfigError, match=r"restore\(\) was not called"),
        open_run(tmp_path, {"epoch": 0}, retention=ckptman.KeepLast(1)) as checkpointer,
    ):
        checkpointer.step(1)
    assert [each.step for each in Catalog(tmp_path).complete()] == [100]


def test_a_damaged_checkpoint_does_not_push_out_the_good_one(tmp_path):
    with open_run(tmp_path, {"epoch": 1}) as checkpointer:
        for step in (2, 3):
            checkpointer.step(step)
    index = tmp_path / "step-0000000003" / "index.json"
    index.write_bytes(index.read_bytes()[:-1] + b"?")
    with open_run(tmp_path, {"epoch": 1}, retention=ckptman.KeepLast(2)) as checkpointer:
        with pytest.warns(RuntimeWarning, match="skipping the checkpoint"):
            assert checkpointer.restore() == 2
        checkpointer.step(5)
    assert [each.step for each in Catalog(tmp_path).complete()] == [2, 3, 5]


@pytest.mark.parametrize("code", [None, 0, 75])
def test_sys_exit_inside_the_block_is_a_regular_end(tmp_path, code):
    with pytest.raises(SystemExit), open_run(tmp_path, {"epoch": 1}, save_policy=ckptman.AtStep(9)) as checkpointer:
        checkpointer.step(1)
        sys.exit(code)
    outcome = read_outcome(outcome_path(tmp_path))
    assert outcome is not None
    assert outcome.state == ("stopped" if code == 75 else "finished")
    assert [each.step for each in Catalog(tmp_path).complete()] == [1]


def test_a_loop_that_looks_at_the_signal_itself_is_run_again(tmp_path):
    with ckptman.SignalHandler() as signals:
        with open_run(tmp_path, {"epoch": 1}, signals=signals, save_policy=ckptman.OnStop()) as checkpointer:
            checkpointer.step(1)
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signals.requested
        assert checkpointer.exit_code == 75
    outcome = read_outcome(outcome_path(tmp_path))
    assert outcome is not None
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
    disk = SometimesFull()
    with open_run(tmp_path, {"weight": torch.zeros(3)}, disk, async_save=False) as checkpointer:
        checkpointer.step(1)
        disk.full = True
        with pytest.raises(ckptman.CommitError):
            checkpointer.step(2)
        assert checkpointer.last_saved == 1
        disk.full = False
    assert checkpointer.last_saved == 2


class SometimesFull(Disk):
    """A disk that is full while it is told to be."""

    full = False

    def sync_folder(self, path):
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super().sync_folder(path)
