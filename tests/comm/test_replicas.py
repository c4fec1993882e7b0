"""What ranks have under one name is compared before the first save: of small tensors, one is saved for all."""

import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

import ckptman
from ckptman import api
from ckptman.comm import replicas
from tests.helpers.ranks import run_ranks


def outcome(save):
    """The text of a refusal, and the warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            save()
            text = ""
        except ckptman.ConfigError as error:
            text = str(error)
    return text, [str(each.message) for each in told if "differs between ranks" in str(each.message)]


class Kept:
    """An object that keeps a tensor."""

    def __init__(self, value, per_rank=False):
        self.value, self.per_rank = value, per_rank

    def state_dict(self):
        return {"inner": [{"value": self.value}]}

    def load_state_dict(self, state):
        self.value = state["inner"][0]["value"]


def trained(rank):
    """A model that DistributedDataParallel has trained for a step, on other data on each rank."""
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def states(rank):
    mine, (model, optimizer) = torch.full((2, 3), float(rank)).T, trained(rank)
    apart, other = trained(rank)
    with torch.no_grad():
        apart.module[0].bias += rank
    drifting, adam = trained(rank)
    adam.state[drifting.module[0].weight]["exp_avg"][1, 2] += rank
    return {
        "same": {"x": torch.ones(2), "nan": torch.tensor([float("nan"), -0.0]), "n": torch.empty(0)},
        "bare": {"x": mine, "y": torch.tensor(rank)},
        "deep": {"a": 1, "x": {"list": [0, {"t": mine.to(torch.float8_e4m3fn)}]}},
        "object": {"kept": Kept(mine)},
        "per rank": {"kept": Kept(mine, per_rank=True)},
        "own names": {f"x.rank{rank}": mine, "n": 1},
        "large": {"x": torch.full((replicas.SMALL_BYTES,), float(rank))},
        "ddp": {"model": model, "optimizer": optimizer},
        "ddp, as a dict": {"model": get_model_state_dict(model)},
        "parameter": {"model": apart, "optimizer": other},
        "optimizer": {"model": drifting, "optimizer": adam},
        "stages": {"model": nn.ModuleDict({f"stage{rank}": apart.module[0], "same": nn.LayerNorm(2)})},
    }


def save_by_run(run, state):
    """Refused in the first step, and again by a save."""
    with ckptman.Checkpointer(run, state, save_policy=ckptman.EverySteps(2), deadline=None) as checkpointer:
        try:
            checkpointer.step(1)
        except ckptman.ConfigError as error:
            with pytest.raises(ckptman.ConfigError, match=re.escape(str(error))):
                checkpointer.save(1)
            raise
        checkpointer.save(2)


def save_alone(run, state):
    api._COMPARED.clear()
    try:
        ckptman.save(state, run / "alone")
    except ckptman.ConfigError as error:
        with pytest.raises(ckptman.ConfigError, match=re.escape(str(error))):
            ckptman.save(state, run / "alone")
        raise


def save_all(root):
    found = {}
    for name, state in states(dist.get_rank()).items():
        run = Path(root, name)
        found[name] = tuple(outcome(partial(each, run, state)) for each in (save_by_run, save_alone))
    own = f"x.rank{dist.get_rank()}"
    with ckptman.Checkpointer(Path(root, "own names"), {own: None, "n": 0}, deadline=None) as checkpointer:
        checkpointer.restore()
        assert torch.equal(checkpointer.state[own], states(dist.get_rank())["own names"][own])
    return found


@pytest.mark.slow
def test_what_differs_between_ranks_is_refused_before_the_first_save(tmp_path):
    leader, other = run_ranks(2, save_all, str(tmp_path), fresh=True)
    for name, told in {
        "bare": r"x (and 1 more) differs between ranks 0 and 1",
        "deep": "x.list.1.t differs",
        "object": "kept.inner.0.value differs",
        "parameter": "model.0.bias differs",
        "optimizer": "optimizer.state.0.weight.exp_avg differs",
    }.items():
        for (text, warned), alone in (leader[name], other[name]):
            assert text.startswith(told)
            assert "one is saved for all: make it a DTensor, or put it into ckptman.PerRank" in text
            assert warned == []
            assert alone == (text, [])
    for name in ("same", "per rank", "own names", "large", "stages"):
        assert leader[name] == other[name] == (("", []), ("", [])), name
    for name in ("ddp", "ddp, as a dict"):
        (text, warned), alone = leader[name]
        assert (text, len(warned), alone) == ("", 1, ("", warned))
        assert warned[0].startswith("model.1.running_mean (and 1 more) differs between ranks 0 and 1: after a restore")
        assert other[name] == (("", []), ("", []))


def drift(root):
    """A counter that begins alike, and is each rank's own later: told at the first save, and not looked at again."""
    rank, counter = dist.get_rank(), torch.zeros(())
    with ckptman.Checkpointer(root, {"n": counter}, save_policy=ckptman.EverySteps(100), deadline=None) as checkpointer:
        first, _ = outcome(lambda: checkpointer.step(1))
        counter += rank
        second, _ = outcome(lambda: checkpointer.save(2))
        counter.zero_()
        checkpointer.save(3)
        counter += rank
        third, _ = outcome(lambda: checkpointer.save(4))
    return first, second, third


def test_a_tensor_that_begins_to_differ_before_the_first_save(tmp_path):
    for first, second, third in run_ranks(2, drift, str(tmp_path), fresh=True):
        assert (first, third) == ("", "")
        assert second.startswith("n differs between ranks 0 and 1")
