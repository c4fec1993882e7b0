"""The state of optimizers comes back by the names of their parameters, whatever kind they are of, or is refused."""

import copy

import pytest
import torch
from torch import nn

import ckptman
from ckptman.format.paths import step_folder
from tests.dcp.test_values import ordered

in_both_ways = pytest.mark.parametrize("way", ["Checkpointer", "save and load"])


def save(root, state, way="Checkpointer"):
    if way != "Checkpointer":
        return ckptman.save(state, root / step_folder(1))
    with ckptman.Checkpointer(root, state, deadline=None) as checkpointer:
        checkpointer.save(1)


def bring_back(root, state, way="Checkpointer", step=1):
    if way != "Checkpointer":
        return ckptman.load(state, root / step_folder(step))
    with ckptman.Checkpointer(root, state, deadline=None) as checkpointer:
        checkpointer.restore(step)


def made(kind=torch.optim.Adam, outputs=2, **settings):
    model = nn.Linear(2, outputs)
    return {"model": model, "optimizer": kind(model.parameters(), **settings)}


def train(state):
    """One step."""

    def loss():
        state["optimizer"].zero_grad()
        total = state["model"](torch.ones(2, dtype=next(state["model"].parameters()).dtype)).square().sum()
        total.backward()
        return total

    loss()
    state["optimizer"].step(loss)


class Experts(nn.Module):
    """One of two experts never gets a gradient."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = (nn.Linear(2, 2, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x):
        return self.used(x)


class Own(torch.optim.Optimizer):
    """An optimizer of a user."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.update(parameter, self.state[parameter])


class Single(Own):
    """Keeps its state in float32, and counts in integers, whatever its parameters are."""

    def update(self, parameter, state):
        if not state:
            state |= {"master": {"of": parameter.float()}, "seen": torch.zeros((), dtype=torch.int64)}
        state["master"]["of"] -= self.param_groups[0]["lr"] * parameter.grad.float()
        state["seen"] += 1
        parameter.copy_(state["master"]["of"])


class Blocked(Own):
    """Keeps state by number, and goes by the numbers, as Shampoo does with its blocks. torch makes texts of them."""

    def update(self, parameter, state):
        for number, block in state.setdefault("blocks", {0: {}, 1: {}}).items():
            block[number] = block.get(number, torch.zeros(2)) + parameter.grad.sum() * (number + 1)


class Closing(torch.optim.Adam):
    """Makes no step without a closure."""

    def step(self, closure):
        return super().step(lambda: closure())


class Adaptive(torch.optim.SGD):
    """Learns a rate of its own, and keeps it among the settings from its first step on with a gradient."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            if sum(each.grad.abs().sum() for each in group["params"] if each.grad is not None):
                group["estimate"] = group.get("estimate", 1.0) / 2


def of_two_groups(kind, **settings):
    def make(model):
        weights = [each for each in model.parameters() if each.dim() > 1]
        others = [each for each in model.parameters() if each.dim() == 1]
        return kind([{"params": weights}, {"params": others, "lr": 0.5}, {"params": []}], lr=0.1, **settings)

    return make


KINDS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters()),
    "dampening": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5),
    "of named parameters": lambda model: torch.optim.AdamW(model.named_parameters(), lr=0.5),
    "an empty group": of_two_groups(torch.optim.AdamW),
    "state of another dtype": lambda model: torch.optim.NAdam(model.parameters()),
    "averages": lambda model: torch.optim.ASGD(model.parameters()),
    "state in float32": lambda model: Single(model.parameters()),
    "state by number": lambda model: Blocked(model.parameters()),
    "closure": lambda model: Closing(model.parameters(), lr=0.25),
    "settings of its own": of_two_groups(Adaptive, momentum=0.9),
}


@pytest.mark.parametrize("kind", KINDS)
@in_both_ways
def test_a_run_in_attempts_is_the_run_in_one(tmp_path, way, kind):
    """Also where torch casts what it loads, so that an attempt later no checkpoint would fit; and a save before the
    first step changes nothing."""

    def make():
        torch.manual_seed(0)
        model = Experts()
        return {"model": model, "optimizer": KINDS[kind](model)}

    whole = make()
    for step in range(4):
        state = make()
        if step:
            bring_back(tmp_path / str(step - 1), state, way)
            train(whole)
            train(state)
        save(tmp_path / str(step), state, way)
        if not step:
            assert not state["optimizer"].state
            assert all(each.grad is None for each in state["model"].parameters())
        for name in whole:
            assert ordered(state[name].state_dict()) == ordered(whole[name].state_dict()), step
    assert {*state["optimizer"].state} == {*state["model"].used.parameters()}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SparseAdam])
@pytest.mark.parametrize("left_by", ["a gradient", "a freeze"])
@in_both_ways
def test_an_optimizer_gets_its_state_whatever_its_parameters_look_like(tmp_path, way, left_by, kind):
    def make():
        model = nn.ModuleList(nn.Embedding(5, 3, sparse=kind is torch.optim.SparseAdam) for _ in range(2))
        return {"model": model, "optimizer": kind(model.parameters())}

    def use(model, number):
        model[number](torch.tensor([1, 3])).sum().backward()

    saved, fresh = make(), make()
    use(saved["model"], 0)
    saved["optimizer"].step()
    save(tmp_path, saved)
    if left_by == "a gradient":
        use(fresh["model"], 1)  # to see whether it runs at all
    else:
        fresh["model"].requires_grad_(False)  # its layers are unfrozen one by one, when their steps come
    before = [(each.requires_grad, each.grad) for each in fresh["model"].parameters()]
    bring_back(tmp_path, fresh, way)
    ours, theirs = (each["optimizer"].state_dict()["state"] for each in (fresh, saved))
    assert [*ours] == [*theirs] == [0]
    assert repr(ours) == repr(theirs)
    assert [(each.requires_grad, each.grad) for each in fresh["model"].parameters()] == before


class Whole:
    """An optimizer that is saved as it is."""

    def __init__(self, optimizer):
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict


@pytest.mark.parametrize("value", [None, [torch.ones(2)]])
def test_an_optimizer_with_a_state_of_its_own_kind_is_refused_with_a_remedy(tmp_path, value):
    saved, fresh = made(torch.optim.SGD, lr=0.1), made(torch.optim.SGD, lr=0.1)
    saved["optimizer"].state[saved["model"].weight]["history"] = value
    with pytest.raises(ckptman.ConfigError, match=r"SGD cannot be saved by the names .*: put an object"):
        ckptman.save(saved, tmp_path / "x")
    save(tmp_path, {"model": saved["model"], "whole": Whole(saved["optimizer"])})
    bring_back(tmp_path, {"model": fresh["model"], "whole": Whole(fresh["optimizer"])})
    assert repr(fresh["optimizer"].state_dict()) == repr(saved["optimizer"].state_dict())


def test_an_optimizer_without_its_module_is_refused(tmp_path):
    state = made()
    del state["model"]
    with pytest.raises(ckptman.ConfigError, match="not the module whose parameters it updates"):
        save(tmp_path, state)


@in_both_ways
def test_a_checkpoint_that_does_not_fit_leaves_the_optimizer_as_it_was(tmp_path, way):
    def make(outputs):
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, outputs)])
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    saved, fresh, running = make(3), make(4), make(4)
    for layer in (*saved["model"], running["model"][0]):
        layer(torch.ones(2)).sum().backward()
    saved["optimizer"].step()
    running["optimizer"].step()
    save(tmp_path, saved)
    for state in (fresh, running):
        before = copy.deepcopy(state["optimizer"].state_dict())
        assert not any(state["optimizer"].state[each] for each in state["model"][1].parameters())  # which makes it {}
        with pytest.raises(ckptman.MismatchError):
            bring_back(tmp_path, state, way)
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
    saved = {**made(), "other": Unwilling()}
    train(saved)
    save(tmp_path, saved)
    fresh = {**made(), "other": Unwilling()}
    before = copy.deepcopy(fresh["model"].state_dict())
    with pytest.raises(ckptman.CkptmanError, match="not this") as caught:
        bring_back(tmp_path, fresh)
    assert "not usable" not in str(caught.value)
    assert not fresh["optimizer"].state
    assert repr(fresh["model"].state_dict()) == repr(before)
    for way in ("Checkpointer", "save and load"):
        with pytest.raises(ckptman.CkptmanError, match=r"not this.* is not usable"):
            bring_back(tmp_path, {**made(Refusing), "other": {}}, way)


@pytest.mark.parametrize("name", ["model", "optimizer"])
@in_both_ways
def test_a_value_where_there_is_an_object_now_does_not_fit_and_is_not_damaged(tmp_path, way, name):
    save(tmp_path, {name: "adam"})
    with pytest.raises(ckptman.MismatchError, match=rf"{name}\."):
        bring_back(tmp_path, made(), way)


@in_both_ways
def test_parameters_of_two_groups_that_are_one_now(tmp_path, way):
    """It would have the settings of its first parameter for all of them."""
    model = nn.Linear(2, 2)
    for step, decay in (1, 0.0), (2, 0.5):
        groups = [{"params": [model.weight], "weight_decay": 0.5}, {"params": [model.bias], "weight_decay": decay}]
        ckptman.save({"model": model, "optimizer": torch.optim.AdamW(groups)}, tmp_path / step_folder(step))
    state = made(torch.optim.AdamW, weight_decay=0.25)
    with pytest.raises(ckptman.MismatchError, match=r"bias\.weight_decay: checkpoint 0\.0, this run 0\.5 as of weight"):
        bring_back(tmp_path, state, way, 1)
    bring_back(tmp_path, state, way, 2)
    assert float(state["optimizer"].param_groups[0]["weight_decay"]) == 0.5
    fewer = {"model": model, "optimizer": torch.optim.AdamW([model.weight])}
    with pytest.raises(ckptman.MismatchError, match=r"optimizer\.param_groups\.bias\.lr"):  # it updated more
        bring_back(tmp_path, fewer, step=2)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_setting_that_a_newer_torch_has_and_the_checkpoint_has_not(tmp_path, scheduled):
    saved = made(lr=0.25)
    train(saved)
    for group in saved["optimizer"].param_groups:
        del group["decoupled_weight_decay"], group["amsgrad"]
        if scheduled:  # by one that is not made yet in the next attempt
            group["initial_lr"] = 0.25
    save(tmp_path, saved)
    told = r"without {.*'amsgrad': True.*} in its groups: optimizer keeps them"
    fresh, loaded = (made(lr=0.5, amsgrad=each) for each in (False, True))
    with pytest.warns(RuntimeWarning, match="'amsgrad': False"):
        bring_back(tmp_path, fresh)
    with pytest.raises(ckptman.MismatchError, match="max_exp_avg_sq"), pytest.warns(RuntimeWarning, match=told):
        bring_back(tmp_path, loaded, "save and load")
    (group,) = fresh["optimizer"].param_groups
    assert (group["lr"], group["amsgrad"], group["decoupled_weight_decay"]) == (0.25, False, False)

    ckptman.save(made(), tmp_path / "unused")
    with pytest.raises(ckptman.MismatchError, match="momentum"):  # another kind of optimizer, though it has no state
        ckptman.load(made(torch.optim.SGD), tmp_path / "unused")
