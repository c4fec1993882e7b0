import math

import numpy
import pytest
import torch
from torch import nn

import ckptman
from ckptman.engine.state.unsaved_values import UnsavedValues, modules_of_user


class Annealed(nn.Module):
    """Counts its calls, as people write it."""

    def __init__(self):
        super().__init__()
        self.layer, self.width = nn.Linear(2, 2), 2
        self.calls, self._last, self.history, self.lowest = 0, 0, [], math.nan

    def forward(self, x):
        self.calls += 1
        self._last = self.calls
        self.history.append(0.5)
        return self.layer(x) / self.calls


class RecordedStep(Annealed):
    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


@pytest.mark.parametrize("depth", [0, 2])
def test_counters_of_a_module_are_named_once(tmp_path, recwarn, depth):
    model = Annealed()
    for _ in range(depth):
        model = nn.Sequential(model)
    with ckptman.Checkpointer(tmp_path, {"model": model}, save_policy=ckptman.EverySteps(2), deadline=None) as saves:
        for step in range(1, 7):
            model(torch.ones(2))
            saves.step(step)
    texts = [str(each.message) for each in recwarn if "during training but" in str(each.message)]
    assert len(texts) == 1
    assert texts[0].startswith(
        "Annealed.calls, Annealed.history change during training but are not saved: a resumed run"
    )
    assert "get_extra_state()" in texts[0]


def test_what_is_saved_or_of_torch_is_not_named(recwarn):
    model = nn.Sequential(RecordedStep(), nn.BatchNorm1d(2), nn.LSTM(2, 2))
    watched = UnsavedValues(lambda: modules_of_user([model]))
    for _ in range(3):
        model(torch.ones(3, 2))
        model.train(not model.training)
        watched.end_step(is_saved=True)
    assert not recwarn.list


class SavedWhole(Annealed):
    def state_dict(self, *args, prefix="", **kwargs):
        values = super().state_dict(*args, prefix=prefix, **kwargs)
        values[f"{prefix}number"] = torch.tensor(self.calls)
        return values | {f"{prefix}history": self.history}

    def load_state_dict(self, state_dict, strict=True):
        values = dict(state_dict)
        self.calls, self.history = int(values.pop("number")), values.pop("history")
        return super().load_state_dict(values, strict)


class SavedPart(Annealed):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination |= {f"{prefix}calls": torch.tensor(self.calls), f"{prefix}history": self.history}

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.calls, self.history = (state_dict.pop(f"{prefix}{name}") for name in ("calls", "history"))
        super()._load_from_state_dict(state_dict, prefix, *rest)


def hooked():
    module = Annealed()
    module.register_state_dict_post_hook(
        lambda own, state, prefix, _: state.update({f"{prefix}calls": own.calls, f"{prefix}history": own.history})
    )
    module.register_load_state_dict_pre_hook(lambda own, state, prefix, *_: state.pop(f"{prefix}calls"))
    return module


class Momentum(torch.optim.SGD):
    """Counts its steps in an attribute, as people write it."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self._count = 0

    def step(self, closure=None):
        self._count += 1
        return super().step(closure)


class InGroups(Momentum):
    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["_count"] = self._count


def warnings_of(root, recwarn, model, kind=torch.optim.SGD, more=None, each_step=lambda model, state: None):
    optimizer = kind(model.parameters())
    state = {"model": model, "optimizer": optimizer} | (more or {})
    with ckptman.Checkpointer(root, state, save_policy=ckptman.EverySteps(2), deadline=None) as saves:
        for step in range(1, 7):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            each_step(model, state)
            saves.step(step)
    return [str(each.message) for each in recwarn if "during training but" in str(each.message)]


@pytest.mark.parametrize("make", [SavedWhole, SavedPart, hooked])
def test_what_a_module_adds_to_its_state_dict_is_seen_there(tmp_path, recwarn, make):
    assert warnings_of(tmp_path, recwarn, make()) == []


def test_what_the_loop_saves_itself_is_seen_there(tmp_path, recwarn):
    def note(model, state):
        state["progress"] |= {"calls": model.calls, "history": list(model.history)}

    assert warnings_of(tmp_path, recwarn, Annealed(), more={"progress": {}}, each_step=note) == []


def test_another_value_of_that_name_is_not_believed(tmp_path, recwarn):
    (told,) = warnings_of(tmp_path, recwarn, Annealed(), more={"progress": {"calls": numpy.zeros(3), "history": []}})
    assert told.startswith(
        "Annealed.calls changes during training but is not saved: a resumed run starts with its value"
    )


@pytest.mark.parametrize(("kind", "is_told"), [(torch.optim.Adam, False), (Momentum, True), (InGroups, False)])
def test_counters_of_an_optimizer(tmp_path, recwarn, kind, is_told):
    told = warnings_of(tmp_path, recwarn, nn.Linear(2, 2), kind)
    assert [text.partition(":")[0] for text in told] == [
        "Momentum._count changes during training but is not saved"
    ] * is_told
    assert all("param_groups" in text for text in told)


@pytest.mark.parametrize("name", ["prodigyopt.Prodigy", "pytorch_optimizer.Lookahead"])
def test_optimizers_of_libraries_are_believed(tmp_path, recwarn, name):
    package, _, kind = name.partition(".")
    of_library = getattr(pytest.importorskip(package), kind)
    make = (lambda each: of_library(torch.optim.SGD(each, 0.1))) if kind == "Lookahead" else of_library
    assert warnings_of(tmp_path, recwarn, nn.Linear(2, 2), make) == []
