"""Frameworks put their objects around those of a state; a checkpoint has the names of what is inside."""

import copy
import importlib

import pytest
import torch
from torch import nn

import ckptman
from ckptman.engine.state import wrappers
from ckptman.engine.state.wrappers import UnwrappedState


def make(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


def accelerated(seed=0):
    accelerate = pytest.importorskip("accelerate")
    model, optimizer, schedule = accelerate.Accelerator(cpu=True).prepare(*make(seed))
    return torch.compile(model, backend="eager"), optimizer, schedule


def fabric(seed=0):
    lightning = pytest.importorskip("lightning")
    model, optimizer, schedule = make(seed)
    model, optimizer = lightning.Fabric(accelerator="cpu", devices=1).setup(model, optimizer)
    return model, optimizer, schedule


def train(root, made, steps):
    """Train up to a step, from where the root is, and return the losses."""
    model, optimizer, schedule = made
    losses = []
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with ckptman.Checkpointer(root, state, save_policy=ckptman.EverySteps(1)) as checkpointer:
        for step in range(checkpointer.restore() + 1, steps + 1):
            inputs = torch.arange(12.0).reshape(4, 3) + step
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            checkpointer.step(step)
    return losses


@pytest.mark.filterwarnings("ignore")  # what the frameworks warn of while they are imported
@pytest.mark.parametrize("wrap", [accelerated, fabric])
def test_a_run_goes_on_inside_and_outside_a_framework(wrap, tmp_path):
    whole = train(tmp_path / "whole", make(), 6)
    first = train(tmp_path / "run", wrap(), 2)
    second = train(tmp_path / "run", make(1), 4)
    assert first + second + train(tmp_path / "run", wrap(2), 6) == whole


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", wrappers._INSIDE)
def test_wrappers_are_where_they_are_looked_for(name):
    module, _, kind = name.rpartition(".")
    pytest.importorskip(module.partition(".")[0])
    assert hasattr(importlib.import_module(module), kind)


def test_what_is_set_gets_into_the_state_itself():
    model, optimizer, _ = make()
    compiled = torch.compile(model, backend="eager")
    state = {"model": compiled, "step": 1}
    view = UnwrappedState(state)
    view["step"] = 2
    state["optimizer"] = optimizer
    assert dict(view) == {"model": model, "step": 2, "optimizer": optimizer}
    del view["optimizer"]
    assert state == {"model": compiled, "step": 2}
    assert dict(copy.copy(view)) == dict(view)


def test_load_fills_what_is_wrapped(tmp_path):
    model, _, _ = make()
    ckptman.save({"model": torch.compile(model, backend="eager"), "step": 3}, tmp_path / "one")
    other, _, _ = make(1)
    state = {"model": torch.compile(other, backend="eager"), "step": 0}
    ckptman.load(state, tmp_path / "one")
    assert state["step"] == 3
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))
