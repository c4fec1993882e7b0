"""`ckptman.read`: what was saved, with nothing to fill, and no more of it than was asked for."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckptman
from ckptman.storage.format.paths import data_name


def _state():
    return {
        "model": {"0.weight": torch.arange(12.0).reshape(3, 4), "0.bias": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"state": {"0.weight": {"exp_avg": torch.full((3, 4), 2.0), "step": torch.tensor(5.0)}}},
        "history": [torch.zeros(2), {"lr": 0.5}],
        "epoch": 3,
        "pair": (1, "a"),
        "empty": {},
    }


def _equal(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and bool(one == other)


def test_everything_comes_back_nested_as_it_was_saved(tmp_path):
    ckptman.save(_state(), tmp_path / "x")
    assert _equal(ckptman.read(tmp_path / "x"), _state())


def test_what_plain_dcp_wrote_is_read_too(tmp_path):
    state = {name: value for name, value in _state().items() if name not in ("empty", "pair")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is saved by one process
        dcp.save(state, checkpoint_id=tmp_path / "step-5", no_dist=True)
    assert _equal(ckptman.read(str(tmp_path / "step-5")), state)
    assert _equal(ckptman.read(tmp_path / "step-5", only="epoch"), {"epoch": 3})


@pytest.mark.parametrize(
    ("only", "keys"),
    [
        ("model.*", {"model": ["0.weight", "0.bias"]}),
        ("model", {"model": ["0.weight", "0.bias"]}),
        (["*.exp_avg", "epoch"], {"optimizer": ["state"], "epoch": 3}),
        ("*.bias", {"model": ["0.bias"]}),
    ],
)
def test_only_takes_patterns_of_flat_names(tmp_path, only, keys):
    ckptman.save(_state(), tmp_path / "x")
    found = ckptman.read(tmp_path / "x", only)
    assert {key: list(each) if isinstance(each, dict) else each for key, each in found.items()} == keys


def test_in_a_list_none_stands_for_what_is_not_wanted(tmp_path):
    ckptman.save(_state(), tmp_path / "x")
    assert _equal(ckptman.read(tmp_path / "x", "history.1.*"), {"history": [None, {"lr": 0.5}]})


def test_a_pattern_that_matches_nothing_is_an_error_that_names_what_there_is(tmp_path):
    ckptman.save(_state(), tmp_path / "x")
    with pytest.raises(ckptman.ConfigError, match=r"only='modle\.\*' matches nothing in .*, which holds model\.0\."):
        ckptman.read(tmp_path / "x", ["model.*", "modle.*"])


def test_damage_is_found_in_what_is_read_and_only_there(tmp_path):
    state = {"good": torch.ones(300_000), "bad": torch.ones(3_000_000)}  # of two blocks of digests at least
    ckptman.save(state, tmp_path / "x")
    data = tmp_path / "x" / data_name(0)
    place = data.read_bytes().rindex(torch.ones(100_000).numpy().tobytes())
    with data.open("r+b") as file:
        file.seek(place)
        file.write(b"\x01")
    with pytest.raises(ckptman.CorruptError, match="bad") as caught:
        ckptman.read(tmp_path / "x")
    assert "was to be filled" not in str(caught.value)
    assert not torch.equal(ckptman.read(tmp_path / "x", verify=False)["bad"], state["bad"])


def test_a_root_means_its_newest_checkpoint(tmp_path):
    model = nn.Linear(2, 2)
    policy = ckptman.EverySteps(1)
    with ckptman.Checkpointer(tmp_path / "run", {"model": model, "rng": ckptman.RNGState()}, save_policy=policy) as run:
        for step in (1, 2):
            nn.init.constant_(model.weight, step)
            run.step(step)
    found = ckptman.read(tmp_path / "run")
    assert torch.equal(found["model"]["weight"], model.weight)
    assert list(found["rng"]) == ["rank-00000"]
    assert torch.equal(ckptman.read(tmp_path / "run" / "step-0000000001")["model"]["weight"], torch.ones(2, 2))
    model.load_state_dict(ckptman.read(tmp_path / "run", "model")["model"])


def test_where_there_is_no_checkpoint_it_says_so(tmp_path):
    with pytest.raises(ckptman.NotFoundError, match="holds none that counts"):
        ckptman.read(tmp_path)
    with pytest.raises(ckptman.NotFoundError):
        ckptman.read(tmp_path / "away")
    (tmp_path / "step-0000000001").mkdir()
    with pytest.raises(ckptman.NotFoundError, match=r"neither manifest\.json nor \.metadata"):
        ckptman.read(tmp_path / "step-0000000001")


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_tensor_comes_back_with_its_scales(tmp_path):
    quantized = torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.5, 1, torch.qint8)
    ckptman.save({"w": quantized}, tmp_path / "x")
    (found,) = ckptman.read(tmp_path / "x").values()
    assert (found.q_scale(), found.q_zero_point()) == (0.5, 1)
    assert torch.equal(found.int_repr(), quantized.int_repr())
