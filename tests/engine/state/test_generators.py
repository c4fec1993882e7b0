"""The generators of a rank: that of a device is saved where the device is used, and put back in any case."""

import json

import pytest
import torch

from ckptman.engine.state.generators import RNGState


class Cuda:
    """The module of a pretended device. As torch.cuda does, it puts off what is set before the first use, and does the
    seeds last."""

    def __init__(self):
        self.initialized = False
        self.state = torch.zeros(16, dtype=torch.uint8)
        self._sets = []
        self._seeds = []

    def is_available(self):
        return True

    def is_initialized(self):
        return self.initialized

    def init(self):
        if not self.initialized:
            self.initialized = True
            for call in (*self._sets, *self._seeds):
                call()

    def manual_seed(self, seed):
        self._later(self._seeds, lambda: self.state.fill_(seed))

    def get_rng_state(self):
        self.init()
        return self.state.clone()

    def set_rng_state(self, state):
        self._later(self._sets, lambda: self.state.copy_(state))

    def _later(self, queue, call):
        if self.initialized:
            call()
        else:
            queue.append(call)


class Mps:
    """The module of a device that needs no initialisation."""

    def __init__(self):
        self.state = torch.full((4,), 3, dtype=torch.uint8)

    def is_available(self):
        return True

    def get_rng_state(self):
        return self.state.clone()

    def set_rng_state(self, state):
        self.state = state


@pytest.fixture
def pretend(monkeypatch):
    def use(module):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)

    return use


def names(state):
    return set(json.loads(state["generators"]))


def test_a_run_on_the_cpu_leaves_the_device_alone(pretend):
    device = Cuda()
    pretend(device)
    saved = RNGState().state_dict()
    expected = torch.rand(3)
    RNGState().load_state_dict(saved)
    assert torch.equal(torch.rand(3), expected)
    assert "device" not in names(saved)
    assert not device.initialized


def test_a_device_in_use_goes_on_from_where_it_was(pretend):
    device = Cuda()
    pretend(device)
    device.manual_seed(7)
    device.init()
    saved = RNGState().state_dict()
    device.manual_seed(8)
    RNGState().load_state_dict(saved)
    assert device.get_rng_state().tolist() == [7] * 16


def test_a_device_that_is_first_used_after_the_restore_goes_on_too(pretend):
    before, after = Cuda(), Cuda()
    pretend(before)
    before.manual_seed(7)
    before.init()
    saved = RNGState().state_dict()
    pretend(after)
    after.manual_seed(1)  # as a script does at its start
    RNGState().load_state_dict(saved)
    assert after.get_rng_state().tolist() == [7] * 16
    assert RNGState().state_dict() == saved, "also what is saved before the first use"


def test_a_device_that_needs_no_initialisation(pretend):
    device = Mps()
    pretend(device)
    saved = RNGState().state_dict()
    device.state = torch.zeros(4, dtype=torch.uint8)
    RNGState().load_state_dict(saved)
    assert device.state.tolist() == [3] * 4


def test_what_a_device_has_drawn_is_no_matter_where_there_is_none(pretend, monkeypatch):
    device = Cuda()
    pretend(device)
    device.init()
    saved = RNGState().state_dict()
    monkeypatch.undo()
    assert "device" in names(saved)
    expected = torch.rand(3)
    RNGState().load_state_dict(saved)
    assert torch.equal(torch.rand(3), expected)
