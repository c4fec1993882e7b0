"""The state of optimizers comes back by the names of their parameters, whatever kind they are of, or is refused."""

import copy
import logging
import warnings
from collections import deque

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.optim import lr_scheduler

import ckptman
from ckptman.engine.state.optimizers import asked_settings, replaced, texts_of
from ckptman.storage.format.paths import step_folder
from tests.engine.dcp.test_values import ordered
from tests.helpers.ranks import run_ranks

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


class Nested(torch.optim.AdamW):
    """Nests its moments under one more key, as bitsandbytes does."""

    def state_dict(self):
        whole = super().state_dict()
        states = {
            number: {"step": held["step"], "quant": {name: each for name, each in held.items() if name != "step"}}
            for number, held in whole["state"].items()
        }
        return {**whole, "state": states}

    def load_state_dict(self, state_dict):
        state = {number: {"step": held["step"], **held["quant"]} for number, held in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state})


class Warmed(torch.optim.AdamW):
    """Counts its steps beside its state, and calls what it is given by another name."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "count": self.count, "sizes": {(1, 2): torch.tensor(self.count)}}

    def load_state_dict(self, given):
        self.count = given["count"]
        assert given["sizes"] == {(1, 2): self.count}
        super().load_state_dict({name: given[name] for name in ("state", "param_groups")})


class Around(torch.optim.Optimizer):
    """Has the settings and the state of another one, and takes only that one's part in a load, as timm's Lookahead."""

    def __init__(self, parameters, **settings):
        self.base = torch.optim.AdamW(parameters, **settings)
        self.param_groups, self.state, self.defaults = self.base.param_groups, self.base.state, self.base.defaults

    def step(self, closure=None):
        self.base.step()
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self.base.state[each].setdefault("slow", each.detach().clone())
                    self.base.state[each]["slow"].lerp_(each.detach(), 0.5)

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, given):
        self.base.load_state_dict(given)
        self.param_groups = self.base.param_groups

    def zero_grad(self):
        self.base.zero_grad()


class Numbered(torch.optim.Adam):
    """Keeps its state in a form of its own."""

    def state_dict(self):
        whole = super().state_dict()
        return {
            "of": [(number, held) for number, held in whole["state"].items()],
            "param_groups": whole["param_groups"],
        }

    def load_state_dict(self, given):
        super().load_state_dict({"state": dict(given["of"]), "param_groups": given["param_groups"]})


@pytest.mark.parametrize("kind", [Nested, Warmed, Around, Numbered])
@in_both_ways
def test_whatever_the_form_of_its_state_dict_it_comes_back(tmp_path, way, kind):
    whole = made(kind, lr=0.1)
    for step in range(4):
        state = made(kind, lr=0.1)
        if step:
            bring_back(tmp_path / str(step - 1), state, way)
            train(whole)
            train(state)
        else:
            whole["model"].load_state_dict(state["model"].state_dict())
        save(tmp_path / str(step), state, way)
        assert ordered(state["model"].state_dict()) == ordered(whole["model"].state_dict())
        assert repr(state["optimizer"].state_dict()) == repr(whole["optimizer"].state_dict()), step


@pytest.mark.parametrize(
    "value",
    [
        *(None, [torch.ones(2)], (torch.ones(2), 1), {0: {"a": torch.ones(2)}}, deque([torch.ones(2)], 3)),
        *(torch.bfloat16, "warm", ("warm", b"up"), {"set": {1, 2}}, np.zeros(3), np.zeros((40, 40))),
    ],
    ids=lambda value: type(value).__name__,
)
@in_both_ways
def test_what_an_optimizer_keeps_comes_back_as_it_was(tmp_path, way, value):
    saved, fresh = made(torch.optim.SGD, lr=0.1), made(torch.optim.SGD, lr=0.1)
    saved["optimizer"].state[saved["model"].weight]["history"] = value
    saved["optimizer"].param_groups[0]["setting"] = value
    save(tmp_path, saved)
    bring_back(tmp_path, fresh, way)
    assert repr(fresh["optimizer"].state_dict()) == repr(saved["optimizer"].state_dict())


class Rich(Single):
    """Keeps what torch spoils in a load: another dtype than that of the parameter, a string, a deque with a limit."""

    def update(self, parameter, state):
        super().update(parameter, state)
        state.setdefault("mode", "warm")
        state.setdefault("last", deque(maxlen=2)).append(parameter.grad.float())


class Pair(torch.optim.Optimizer):
    """Two optimizers, with a state dict of each."""

    def __init__(self, parameters):
        first, *others = parameters
        self.inner = [Rich([first]), Rich(others)]
        super().__init__([group for each in self.inner for group in each.param_groups], {})

    def step(self, closure=None):
        for each in self.inner:
            each.step()

    def state_dict(self):
        return {"inner": [each.state_dict() for each in self.inner]}

    def load_state_dict(self, given):
        for each, held in zip(self.inner, given["inner"]):
            each.load_state_dict(held)


class Outer(torch.optim.Optimizer):
    """One around another, whose state dict is an entry of its own."""

    def __init__(self, parameters):
        self.base = Rich(parameters)
        super().__init__(self.base.param_groups, {})

    def step(self, closure=None):
        self.base.step()

    def state_dict(self):
        return {**super().state_dict(), "base": self.base.state_dict()}

    def load_state_dict(self, given):
        self.base.load_state_dict(given["base"])


class Plain:
    """No optimizer, but around one."""

    def __init__(self, parameters):
        self.base = Rich(parameters)
        self.zero_grad, self.step = self.base.zero_grad, self.base.step

    def state_dict(self):
        return {"base": self.base.state_dict()}

    def load_state_dict(self, given):
        self.base.load_state_dict(given["base"])


@pytest.mark.parametrize("kind", [Rich, Pair, Outer, Plain])
@pytest.mark.parametrize("around", [lambda each: each, ckptman.PerRank], ids=["plain", "PerRank"])
def test_state_comes_back_as_it_was_whoever_holds_the_optimizer(tmp_path, around, kind):
    def make():
        torch.manual_seed(0)
        model = nn.Linear(2, 2, dtype=torch.bfloat16)
        return {"model": model, "optimizer": kind([*model.parameters()])}

    def of_run(state):
        return {**state, "optimizer": around(state["optimizer"])}

    whole = make()
    for step in range(5):
        state = make()
        if step:
            bring_back(tmp_path / str(step - 1), of_run(state))
            train(whole)
            train(state)
        save(tmp_path / str(step), of_run(state))
        assert repr(state["optimizer"].state_dict()) == repr(whole["optimizer"].state_dict()), step
        assert ordered(state["model"].state_dict()) == ordered(whole["model"].state_dict())


class OneOfAGroup(Own):
    """Keeps state for the first parameter of its group alone, as the Muon of nanochat does."""

    def update(self, parameter, state):
        first = self.param_groups[0]["params"][0]
        held = self.state[first]
        held["buffer"] = held.get("buffer", torch.zeros(2)) + parameter.grad.sum()
        parameter -= held["buffer"].sum() * 0.01


def test_state_of_one_parameter_for_all_of_its_group(tmp_path):
    saved, fresh = made(OneOfAGroup), made(OneOfAGroup)
    train(saved)
    saved["optimizer"].state.pop(saved["model"].bias, None)
    save(tmp_path, saved)
    bring_back(tmp_path, fresh)
    assert repr(fresh["optimizer"].state_dict()) == repr(saved["optimizer"].state_dict())


def of_several():
    first, second, alone = nn.Linear(2, 2), nn.Linear(2, 1), torch.zeros(1, requires_grad=True)
    both = torch.optim.Adam([*first.parameters(), *second.parameters()])
    return {"first": first, "second": second, "both": both, "alone": alone, "own": torch.optim.Adam([alone])}


@pytest.mark.parametrize("way", ["Checkpointer", "save and load", "at the end"])
def test_parameters_in_several_entries_of_the_state(tmp_path, way):
    saved, fresh = of_several(), of_several()
    (saved["second"](saved["first"](torch.ones(2))) * saved["alone"].exp()).sum().backward()
    saved["both"].step()
    saved["own"].step()
    if way == "at the end":
        with ckptman.Checkpointer(tmp_path, saved, save_policy=100, deadline=None) as checkpointer:
            checkpointer.step(1)
    else:
        save(tmp_path, saved)
    alone = fresh["alone"]
    bring_back(tmp_path, fresh, "save and load" if way == "save and load" else "Checkpointer")
    assert fresh["alone"] is alone, "its optimizer has it, too"
    for name in ("first", "second", "both", "own"):
        assert repr(fresh[name].state_dict()) == repr(saved[name].state_dict())
    assert torch.equal(fresh["alone"], saved["alone"])
    names = ckptman.read(tmp_path / step_folder(1))["both"]
    assert "state.second.weight.exp_avg" in names


def test_an_optimizer_without_its_module_is_refused(tmp_path):
    state = made()
    del state["model"]
    with pytest.raises(
        ckptman.ConfigError, match=r"'optimizer' updates .*number 0 of group 0, \[2, 2\].*Add the module"
    ):
        save(tmp_path, state)


def test_an_optimizer_for_each_rank_needs_no_module(tmp_path):
    saved, fresh = made(), made()
    train(saved)
    for state in (saved, fresh):
        state["optimizer"] = ckptman.PerRank(state["optimizer"])
        del state["model"]
    save(tmp_path, saved)
    bring_back(tmp_path, fresh)
    assert repr(fresh["optimizer"].value.state_dict()) == repr(saved["optimizer"].value.state_dict())


class Forgetful(torch.optim.Adam):
    """Loses something of what it is given."""

    lost = staticmethod(lambda held: held.pop("exp_avg"))

    def load_state_dict(self, given):
        super().load_state_dict(given)
        self.lost(self.state[self.param_groups[0]["params"][0]])


@pytest.mark.parametrize(
    ("lose", "told"),
    [
        (lambda held: held.pop("exp_avg"), r"state\.0\.exp_avg is None, not \[2, 2\] torch\.float32, after"),
        (lambda held: held.update(exp_avg=torch.zeros(2, 2)), r"state\.0\.exp_avg has other values after"),
        (lambda held: held.update(step=torch.tensor(7.0)), r"state\.0\.step has other values after"),
    ],
)
@in_both_ways
def test_an_optimizer_that_does_not_take_what_was_saved_is_told(tmp_path, way, lose, told):
    saved = made()
    train(saved)
    save(tmp_path, saved)
    Forgetful.lost = staticmethod(lose)
    with pytest.raises(ckptman.ConfigError, match=f"Forgetful did not take what was saved of it: {told}"):
        bring_back(tmp_path, made(Forgetful), way)


@pytest.mark.parametrize("form", [Numbered, lambda each: ckptman.PerRank(torch.optim.Adam(each))])
@pytest.mark.parametrize("at", ["step()", "save()"])
def test_state_without_names_needs_the_same_order_of_parameters(tmp_path, form, at):
    def make(order):
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        return {"model": model, "optimizer": form([model[number].weight for number in order])}

    saved = make([0, 1])
    with ckptman.Checkpointer(tmp_path, saved, save_policy=100, deadline=None) as checkpointer:
        getattr(checkpointer, at[:-2])(1)
    bring_back(tmp_path, make([0, 1]))
    with pytest.raises(
        ckptman.MismatchError, match=r"parameter 0 .* is 0\.weight in the checkpoint, 1\.weight in this"
    ):
        bring_back(tmp_path, make([1, 0]))


@pytest.mark.parametrize("in_sequence", [False, True])
def test_groups_in_another_order_than_their_schedule_has_them_are_refused(tmp_path, in_sequence):
    """A schedule has its rates by the numbers of groups, the optimizer by the names of parameters."""

    def make(order):
        model = nn.Linear(2, 2)
        groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}]
        optimizer = torch.optim.SGD([groups[number] for number in order])
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        if in_sequence:
            schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [schedule], [])
        return {"model": model, "optimizer": optimizer, "schedule": schedule}

    save(tmp_path, make([0, 1]))
    bring_back(tmp_path, make([0, 1]))
    other = make([1, 0])
    with pytest.raises(ckptman.MismatchError, match=r"checkpoint base_lrs \[0\.5, 0\.25\], this run \[0\.25, 0\.5\]"):
        bring_back(tmp_path, other)
    del other["schedule"]
    with ckptman.Checkpointer(tmp_path, other, deadline=None) as checkpointer:
        checkpointer.restore(unexpected=["schedule"])
    assert [group["lr"] for group in other["optimizer"].param_groups] == [0.25, 0.5]


class Several(torch.optim.Optimizer):
    """Steps others, and leaves their state out of its own, as SAM does."""

    def __init__(self, parameters):
        first, *others = parameters
        self.inner = [torch.optim.Adam([first], lr=0.1), torch.optim.SGD(others, lr=0.1, momentum=0.5)]
        super().__init__([group for each in self.inner for group in each.param_groups], {})
        self.param_groups = [group for each in self.inner for group in each.param_groups]

    def step(self, closure=None):
        for each in self.inner:
            each.step()


def test_an_optimizer_whose_inner_ones_would_be_lost_is_refused_until_they_are_in_the_state_too(tmp_path):
    def make():
        torch.manual_seed(0)
        state = made(Several)
        schedule = torch.optim.lr_scheduler.ExponentialLR(state["optimizer"], 0.5)
        return {**state, "schedule": schedule, "adam": state["optimizer"].inner[0], "sgd": state["optimizer"].inner[1]}

    whole = make()
    for step in range(4):
        state = make()
        if step:
            bring_back(tmp_path / str(step - 1), state)
            for each in (whole, state):
                train(each)
                each["schedule"].step()
        save(tmp_path / str(step), state)
        for name in ("adam", "sgd"):
            assert repr(state[name].state_dict()) == repr(whole[name].state_dict()), step
    del state["sgd"]
    with pytest.raises(ckptman.ConfigError, match=r"'optimizer'\) lacks the state of its SGD: put each optimizer"):
        save(tmp_path / "refused", state)


class Resetting(torch.optim.SGD):
    """Has something else than it was given after a load."""

    def __init__(self, parameters, lost="", **settings):
        super().__init__(parameters, **{"lr": 0.1, **settings})
        self.lost, self.count = lost, 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
        return super().step()

    def state_dict(self):
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, given):
        rates = [group["lr"] for group in self.param_groups]
        super().load_state_dict({name: given[name] for name in ("state", "param_groups")})
        self.count = 0 if self.lost == "entry" else given["count"]
        for group, rate in zip(self.param_groups, rates):
            group |= {"counter": {"seen": 0}, "rate": {"lr": rate}}.get(self.lost, {})


@pytest.mark.parametrize("around", [lambda each: each, ckptman.PerRank], ids=["plain", "PerRank"])
@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("entry", "count is 0, not 1,"),
        ("counter", r"param_groups\.0\.seen is 0, not 1,"),
        ("rate", r"param_groups\.0\.lr is 0\.5, not 0\.1, .* set it after the restore"),
    ],
)
def test_settings_and_entries_that_an_optimizer_does_not_take_are_told(tmp_path, lost, told, around):
    saved = made(Resetting)
    train(saved)
    save(tmp_path, {**saved, "optimizer": around(saved["optimizer"])})
    fresh = made(Resetting, lost=lost, lr=0.5)
    with pytest.warns(RuntimeWarning, match=f"Resetting did not take what was saved of it: {told}"):
        bring_back(tmp_path, {**fresh, "optimizer": around(fresh["optimizer"])})


def test_a_group_stays_the_dict_that_others_hold(tmp_path):
    """Such as an optimizer around it, and its schedule."""
    saved, fresh = made(lr=torch.tensor(0.5), foreach=False), made(lr=torch.tensor(0.1), foreach=False)
    train(saved)
    save(tmp_path, saved)
    (group,) = fresh["optimizer"].param_groups
    rate, held = group["lr"], fresh["optimizer"].state
    bring_back(tmp_path, fresh)
    assert fresh["optimizer"].state is held
    assert len(held) == len(saved["optimizer"].state) > 0
    assert fresh["optimizer"].param_groups[0] is group
    assert group["lr"] is rate
    assert float(rate) == 0.5


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
    with pytest.raises(ckptman.MismatchError, match=r"optimizer\.param_groups\.bias"):  # it updated more
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
    with pytest.warns(RuntimeWarning, match=told):
        bring_back(tmp_path, loaded, "save and load")
    (group,) = fresh["optimizer"].param_groups
    assert (group["lr"], group["amsgrad"], group["decoupled_weight_decay"]) == (0.25, False, False)

    ckptman.save(made(), tmp_path / "unused")
    with pytest.raises(ckptman.MismatchError, match="momentum"):  # another kind of optimizer, though it has no state
        ckptman.load(made(torch.optim.SGD), tmp_path / "unused")


def zero_redundancy(root, last):
    """Trains up to a step on any number of ranks, which all see the same. Returns the parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with ckptman.Checkpointer(root, state, save_policy=2, deadline=None, signals=None) as checkpointer:
        for step in range(checkpointer.restore() + 1, last + 1):
            optimizer.zero_grad()
            model(torch.ones(2, 4) * step).square().sum().backward()
            optimizer.step()
            schedule.step()
            checkpointer.step(step)
    return [each.detach().tolist() for each in model.parameters()], optimizer.param_groups[0]["lr"]


@pytest.mark.slow
def test_zero_redundancy_goes_on_with_other_numbers_of_ranks(tmp_path):
    whole = run_ranks(2, zero_redundancy, str(tmp_path / "whole"), 6)
    assert whole[0] == whole[1]
    for world_size, last in (2, 2), (3, 4), (1, 6):
        found = run_ranks(world_size, zero_redundancy, str(tmp_path / "cut"), last)
    assert found == whole[:1]


class Factored(Own):
    """Keeps sums over rows, which are sharded as its parameters are, and over columns, which are on all ranks."""

    def update(self, parameter, state):
        if not state:
            state |= {"rows": 0.0, "columns": 0.0}
        squares = parameter.grad.square()
        state["rows"] = state["rows"] + squares.sum(1, keepdim=True)
        state["columns"] = state["columns"] + squares.sum(0, keepdim=True).redistribute(placements=[Replicate()])
        parameter.sub_(parameter.grad / (state["rows"] * state["columns"]).sqrt(), alpha=self.param_groups[0]["lr"])


def sharded(root, kind, last):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False))
    if kind is Counting:
        model.append(nn.Linear(6, 1))
    fully_shard(model, mesh=DeviceMesh("cpu", range(dist.get_world_size())))
    optimizer = kind(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with ckptman.Checkpointer(root, state, save_policy=2, deadline=None, signals=None) as checkpointer:
        for step in range(checkpointer.restore() + 1, last + 1):
            optimizer.zero_grad()
            model(torch.ones(2, 6) * step).square().sum().backward()
            optimizer.step()
            checkpointer.step(step)
    placed = {
        name: str(getattr(each, "placements", "plain"))
        for held in optimizer.state.values()
        for name, each in held.items()
    }
    return [each.full_tensor().tolist() for each in model.parameters()], placed


class Counting(Own):
    """Counts in a tensor of one element, which is no DTensor, also where the parameter has one element."""

    def update(self, parameter, state):
        state.setdefault("count", torch.zeros(1)).add_(1)
        state["mean"] = state.get("mean", torch.zeros_like(parameter)) * 0.5 + parameter.grad
        parameter.to_local().sub_(state["mean"].to_local() / state["count"], alpha=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Factored, Counting])
def test_state_that_is_sharded_otherwise_than_its_parameter(tmp_path, kind):
    whole = run_ranks(2, sharded, str(tmp_path / "whole"), kind, 6)
    run_ranks(2, sharded, str(tmp_path / "cut"), kind, 2)
    assert run_ranks(2, sharded, str(tmp_path / "cut"), kind, 6) == whole
    run_ranks(2, sharded, str(tmp_path / "less"), kind, 2)
    (found, _), *_ = run_ranks(1, sharded, str(tmp_path / "less"), kind, 6)
    for one, other in zip(found, whole[0][0]):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other))


def refused_shards(root, form):
    model = nn.Linear(6, 4)
    fully_shard(model, mesh=DeviceMesh("cpu", range(dist.get_world_size())))
    optimizer = form(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    getattr(optimizer, "value", optimizer).step()
    state = {"model": model, "optimizer": optimizer}
    with (
        pytest.raises(ckptman.ConfigError, match=r"'optimizer'\) holds sharded tensors .* without ckptman\.PerRank"),
        ckptman.Checkpointer(root, state, deadline=None, signals=None) as checkpointer,
    ):
        checkpointer.step(1)


@pytest.mark.slow
@pytest.mark.parametrize("form", [Numbered, "PerRank"])
def test_shards_without_names_are_refused_at_the_first_save(tmp_path, form):
    run_ranks(2, refused_shards, str(tmp_path), for_each_rank if form == "PerRank" else form, fresh=True)


def for_each_rank(parameters):
    return ckptman.PerRank(torch.optim.Adam(parameters))


class Seeded(torch.optim.SGD):
    """Has an entry of its own that each rank has otherwise."""

    def state_dict(self):
        return {**super().state_dict(), "seed": dist.get_rank()}


def of_each_rank(root, where):
    state = made(Seeded if where == "seed" else torch.optim.SGD, lr=0.1)
    if where == "param_groups":
        state["optimizer"].param_groups[0]["dampening"] = dist.get_rank()
    elif where == "state":
        state["optimizer"].state[state["model"].weight]["count"] = dist.get_rank()
    torch.nn.init.ones_(state["model"].weight)
    torch.nn.init.ones_(state["model"].bias)
    with (
        pytest.raises(ckptman.ConfigError, match=rf"optimizer\.{where}.* is 0 on rank 0 and 1 on rank 1, and only one"),
        ckptman.Checkpointer(root, state, deadline=None, signals=None) as checkpointer,
    ):
        checkpointer.step(1)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["param_groups", "state", "seed"])
def test_plain_values_of_an_optimizer_that_differ_between_ranks_are_refused(tmp_path, where):
    run_ranks(2, of_each_rank, str(tmp_path), where, fresh=True)


def run(root, caplog, last, schedule=None, kind=torch.optim.AdamW, by_hand=None, after=None, **settings):
    """The line of the log that tells what a restore replaced."""
    caplog.set_level(logging.INFO, "ckptman")
    caplog.clear()
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), **settings)
    made = schedule(optimizer) if schedule else None
    state = {"model": model, "optimizer": optimizer, **({"schedule": made} if made else {})}
    with ckptman.Checkpointer(root, state, save_policy=5, deadline=None) as checkpointer:
        start = checkpointer.restore()
        optimizer.param_groups[0].update(after or {})
        for step in range(start + 1, last + 1):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            if made:
                made.step(*(1.0,) * isinstance(made, lr_scheduler.ReduceLROnPlateau))
            if by_hand:
                by_hand(step, optimizer.param_groups[0])
            checkpointer.step(step)
    return [line for line in caplog.messages if "as saved" in line]


SCHEDULES = {
    "none": None,
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "warm-up": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1),
    "by steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 8]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_script_that_asks_for_the_same_hears_nothing(tmp_path, caplog, name):
    for last in (5, 10):
        assert run(tmp_path, caplog, last, SCHEDULES[name], lr=0.1) == []


def test_what_a_restore_replaces_is_told_in_a_line(tmp_path, caplog):
    run(tmp_path, caplog, 5, SCHEDULES["cosine"], lr=0.1, weight_decay=0.01)
    longer = lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)  # noqa: E731
    (line,) = run(tmp_path, caplog, 10, longer, lr=0.01, weight_decay=0.001, betas=(0.5, 0.9))
    told = "betas (0.5, 0.9) -> (0.9, 0.999), lr 0.01 -> 0.1, weight_decay 0.001 -> 0.01, T_max 40 -> 10, as saved"
    assert told in line
    assert "after restore()" in line


def test_what_an_optimizer_finds_out_itself_is_no_news(tmp_path, caplog):
    prodigy = pytest.importorskip("prodigyopt").Prodigy
    for last in (5, 10):
        assert run(tmp_path, caplog, last, kind=prodigy) == []


def test_what_training_changed_is_no_news(tmp_path, caplog):
    plateau = lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)  # noqa: E731
    by_hand = lambda step, group: group.update(weight_decay=0.1 * step, betas=(0.9, 1 - 0.1**step))  # noqa: E731
    for last in (5, 10, 15):
        assert run(tmp_path, caplog, last, plateau, by_hand=by_hand, lr=0.1) == []
    for last in (20, 25):  # as long as the script asks for something else
        (line,) = run(tmp_path, caplog, last, plateau, by_hand=by_hand, lr=0.2)
        assert "lr 0.2 -> " in line
        assert "weight_decay" not in line
    assert run(tmp_path, caplog, 30, plateau, by_hand=by_hand, lr=0.1) == []


def test_what_is_set_after_the_restore_is_no_news_later(tmp_path, caplog):
    run(tmp_path, caplog, 5, lr=0.1)
    (line,) = run(tmp_path, caplog, 10, lr=0.2, after={"lr": 0.2})
    assert "lr 0.2 -> 0.1, as saved" in line
    assert run(tmp_path, caplog, 15, lr=0.2, after={"lr": 0.2}) == []


def test_what_many_groups_ask_for_is_a_digest():
    def texts(last):
        groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": 1 / number} for number in range(2, 60)]
        groups[-1]["lr"] = last
        return texts_of(asked_settings({"optimizer": torch.optim.SGD(groups, lr=0.1)}))

    assert texts(1.0)["optimizer.momentum"] == "0"
    assert texts(1.0) == texts(1.0) != texts(2.0)
    assert len(texts(1.0)["optimizer.lr"]) == 32


def test_without_a_note_of_the_start_what_schedules_drive_is_left_out():
    asked = {("optimizer", 0, "lr"): 0.1, ("optimizer", 0, "weight_decay"): 0.1}
    now = dict.fromkeys(asked, 0.2)
    assert replaced(asked, now, {}) == "weight_decay 0.1 -> 0.2"
