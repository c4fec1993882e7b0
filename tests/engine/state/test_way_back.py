import pytest
import torch
from torch import nn

import ckptman


class Packed(nn.Linear):
    """Gives more than it has, as quantized layers do."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scales"] = torch.ones(2)


class Loading(Packed):
    """Takes it, too."""

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.scales = state_dict.pop(f"{prefix}weight.scales")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def run(root, kind, wrap=lambda module: module):
    model = nn.Sequential(kind(2, 2), nn.LayerNorm(2))
    model[0].requires_grad_(False)
    with ckptman.Checkpointer(root, {"model": wrap(model)}, save_policy=1, deadline=None) as checkpointer:
        start = checkpointer.restore()
        checkpointer.step(start + 1)
    return start


def test_a_module_that_does_not_load_what_it_gives_is_refused_before_it_is_saved(tmp_path):
    with pytest.raises(ckptman.ConfigError, match=r"model\.0 \(Packed\) saves 'weight\.scales'.*Trainable"):
        run(tmp_path, Packed)
    assert not list(tmp_path.glob("step-*"))


class Renamed(nn.Linear):
    """Saves its parameters under other names, and does not know these."""

    def state_dict(self, *args, **kwargs):
        return {name.replace("weight", "w"): each for name, each in super().state_dict(*args, **kwargs).items()}


def test_what_is_not_frozen_is_not_told_of_trainable(tmp_path):
    with (
        ckptman.Checkpointer(tmp_path, {"model": Renamed(2, 2)}, deadline=None) as checkpointer,
        pytest.raises(ckptman.ConfigError, match=r"^model \(Renamed\) saves 'w'.* takes it$"),
    ):
        checkpointer.step(1)


class Wrapped(nn.Sequential):
    """Saves more as a whole, which torch lets only the outermost module load."""

    def state_dict(self, *args, prefix="", **kwargs):
        values = super().state_dict(*args, prefix=prefix, **kwargs)
        values[f"{prefix}calls"] = torch.ones(())
        return values

    def load_state_dict(self, state_dict, strict=True, assign=False):
        return super().load_state_dict({name: each for name, each in state_dict.items() if name != "calls"}, strict)


def test_a_load_of_the_whole_counts_in_the_outermost_module(tmp_path):
    for _ in range(2):
        with ckptman.Checkpointer(tmp_path / "whole", {"model": Wrapped(nn.Linear(2, 2))}, deadline=None) as saves:
            saves.step(saves.restore() + 1)
    with pytest.raises(ckptman.ConfigError, match=r"model\.0 \(Wrapped\) saves 'calls'"):
        run(tmp_path / "part", lambda *_: Wrapped(nn.Linear(2, 2)))


class Restarted(Loading):
    """Its load does more."""

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        self.weight.data.zero_()


def test_nothing_is_loaded_to_find_out(tmp_path):
    model = nn.Sequential(Restarted(2, 2))
    before = model[0].weight.clone()
    with ckptman.Checkpointer(tmp_path, {"model": model}, save_policy=1, deadline=None) as checkpointer:
        checkpointer.step(1)
    assert torch.equal(model[0].weight, before)


class WithState(Loading):
    """Saves plain values as torch asks for."""

    def get_extra_state(self):
        return {"calls": 1, "nested": {"tensor": torch.ones(2)}}

    def set_extra_state(self, state):
        assert torch.equal(state["nested"]["tensor"], torch.ones(2))


@pytest.mark.parametrize("kind", [nn.Linear, Loading, WithState])
def test_one_that_loads_it_is_accepted(tmp_path, kind):
    assert [run(tmp_path, kind) for _ in range(2)] == [0, 1]


def test_layers_of_bitsandbytes(tmp_path):
    layers = pytest.importorskip("bitsandbytes").nn

    def of_8_bits(*_):
        return layers.Linear8bitLt(2, 2, has_fp16_weights=False).to("cpu")

    assert [run(tmp_path / "8", of_8_bits) for _ in range(2)] == [0, 1]
    with pytest.raises(ckptman.ConfigError, match="Trainable"):
        run(tmp_path / "4", lambda *_: layers.Linear4bit(2, 2).to("cpu"))
