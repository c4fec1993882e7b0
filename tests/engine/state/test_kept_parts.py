"""A snapshot that takes over what has not changed is the snapshot of a walk through everything, whatever changes."""

import gc
import random
import sys
import weakref

import pytest
import torch
from torch import nn

from ckptman.engine.state.kept_parts import PartKeeper
from ckptman.engine.state.local_shards import memory_order
from ckptman.engine.state.snapshot import Digested, snapshot
from ckptman.errors import ConfigError
from tests.helpers.state_changes import CHANGES, bits, make_state, train


def facts(shot, state):
    """What a save takes from a snapshot, without the order of what is alike."""
    return {
        "tensors": [
            (name, bits(each), each.stride(), each.device, memory_order(each)) for name, each in shot.tensors.items()
        ],
        "objects": [(name, repr(each)) for name, each in shot.objects.items()],
        "units": [(each.state, each.key, each.names, each.text) for each in shot.units],
        "paths": list(shot.paths.items()),
        "from_lowest": shot.from_lowest,
        "own": shot.own,
        "tied": sorted(map(sorted, shot.tied)),
        "digests": {
            key: each for part in shot.parts for key, each in Digested(part, state[part.key]).digests(part).items()
        },
        "signature": shot.signature,
    }


def check(keeper, state):
    try:
        walked = snapshot(state, 0)
    except ConfigError:
        with pytest.raises(ConfigError):
            keeper.snapshot(state, 0)
        return
    kept = keeper.snapshot(state, 0)
    assert facts(kept, state) == facts(walked, state)
    assert keeper.digests(kept) == facts(walked, state)["digests"]


@pytest.mark.parametrize("change", CHANGES)
def test_one_change(change):
    state, keeper = make_state(), PartKeeper()
    check(keeper, state)
    check(keeper, state)
    CHANGES[change](state)
    check(keeper, state)
    check(keeper, state)


@pytest.mark.parametrize("seed", range(60))
def test_changes_upon_changes(seed):
    rng, state, keeper = random.Random(seed), make_state(seed), PartKeeper()
    done = []
    for _ in range(8):
        name = rng.choice(list(CHANGES))
        try:
            CHANGES[name](state)
        except (KeyError, RuntimeError, AttributeError, TypeError, ValueError):  # after others, it may make no sense
            done.append(f"not {name}")
        else:
            done.append(name)
        print(f"seed {seed}: {done}")
        check(keeper, state)


def test_what_did_not_change_is_not_walked():
    state, keeper = make_state(), PartKeeper()
    walked = []
    for change in (lambda: None, lambda: train(state), lambda: CHANGES["a learning rate"](state)):
        change()
        keeper.snapshot(state, 0)
        walked.append(keeper.walked)
    assert walked == [[*state], ["plain"], ["plain"]]


def test_a_change_walks_what_it_concerns():
    state, keeper = make_state(), PartKeeper()
    keeper.snapshot(state, 0)
    CHANGES["state is replaced"](state)
    keeper.snapshot(state, 0)
    assert keeper.walked == ["first", "plain"]
    CHANGES["a buffer is registered"](state)
    keeper.snapshot(state, 0)
    assert keeper.walked == ["net", "first", "second", "plain"]


def test_it_keeps_nothing_alive():
    state, keeper = make_state(), PartKeeper()
    keeper.snapshot(state, 0)
    gone = [weakref.ref(state["net"].square.weight), weakref.ref(state["net"].mask), weakref.ref(state["net"].layers)]
    gone += [weakref.ref(each["exp_avg"]) for each in state["first"].state.values()]
    state["first"].state.clear()
    state["first"].param_groups.clear()
    state["net"].square.weight = state["net"].mask = None
    del state["net"].layers
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)


def test_torch_can_swap_parameters():
    """Which it does to DTensors, and to all if it is told to; it swaps none that has a weak reference."""
    state, keeper = make_state(), PartKeeper()
    check(keeper, state)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        state["net"].double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    check(keeper, state)
    check(keeper, state)


@pytest.mark.parametrize("layers", [50])
def test_calls_for_each_tensor_of_a_snapshot_that_changes_bytes(layers):
    """Calls of Python functions, which cost what they cost on any machine."""

    def counted(count):
        net = nn.ModuleList([nn.Linear(4, 4) for _ in range(count)])
        optimizer = torch.optim.AdamW(net.parameters())
        for each in net.parameters():
            each.grad = torch.ones_like(each)
        optimizer.step()
        state, keeper, calls = {"net": net, "optimizer": optimizer}, PartKeeper(), 0
        keeper.snapshot(state, 0)
        optimizer.param_groups[0]["lr"] *= 0.5

        def count_calls(frame, event, argument):
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count_calls)
        try:
            shot = keeper.snapshot(state, 0)
            keeper.digests(shot)
        finally:
            sys.setprofile(None)
        return calls, len(shot.tensors)

    (few, small), (many, large) = counted(layers), counted(2 * layers)
    assert (many - few) / (large - small) < 1.5
