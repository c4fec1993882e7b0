"""Modules are saved by the names that they give."""

import pytest
import torch
from torch import nn

import ckptman


class Fused(nn.Module):
    """Has one weight where its state dict has two, as a fused projection of attention may."""

    def __init__(self, value):
        super().__init__()
        self.both = nn.Parameter(torch.arange(12.0).reshape(4, 3) + value)
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._merge)

    @staticmethod
    def _split(module, state, prefix, _):
        state[f"{prefix}first"], state[f"{prefix}second"] = state.pop(f"{prefix}both").clone().chunk(2)

    @staticmethod
    def _merge(module, state, prefix, *_):
        state[f"{prefix}both"] = torch.cat([state.pop(f"{prefix}first"), state.pop(f"{prefix}second")])


def test_a_module_whose_state_dict_has_other_names_than_its_parameters(tmp_path):
    model = nn.Sequential(Fused(0), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    (model[1](model[0].both).sum()).backward()
    optimizer.step()
    with ckptman.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as checkpointer:
        checkpointer.save(1)
    assert {"model.0.first", "model.0.second"} < {*saved_names(tmp_path / "step-0000000001")}

    again = nn.Sequential(Fused(7), nn.Linear(3, 1))
    fresh = torch.optim.AdamW(again.parameters())
    with ckptman.Checkpointer(tmp_path, {"model": again, "optimizer": fresh}) as checkpointer:
        assert checkpointer.restore() == 1
    assert torch.equal(again[0].both, model[0].both)
    assert torch.equal(fresh.state[again[0].both]["exp_avg"], optimizer.state[model[0].both]["exp_avg"])


def saved_names(path):
    return list(ckptman.StorageReader(path).read_metadata().state_dict_metadata)


class Loaded(nn.Linear):
    """Counts its own loads: a restore is one."""

    loads = 0


class Short(Loaded):
    def load_state_dict(self, state_dict, strict=True):
        self.loads += 1
        return super().load_state_dict(state_dict, strict)


class Renamed(Loaded):
    def load_state_dict(self, d, strict=True, assign=False):
        self.loads += 1
        return super().load_state_dict(d, strict, assign)


class Shortest(Loaded):
    def load_state_dict(self, values):
        self.loads += 1
        return super().load_state_dict(values)


class Open(Loaded):
    def load_state_dict(self, *args, **kwargs):
        self.loads += 1
        return super().load_state_dict(*args, **kwargs)


def patched():
    module = Loaded(2, 2)
    own = module.load_state_dict

    def load_state_dict(values):
        module.loads += 1
        return own(values)

    module.load_state_dict = load_state_dict
    return module


WRAPS = {
    "nothing": lambda module: module,
    "compile": lambda module: torch.compile(module, backend="eager"),
    "Trainable": ckptman.Trainable,
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", [Short, Renamed, Shortest, Open, patched])
def test_a_load_state_dict_of_the_users_is_called_whatever_it_takes(tmp_path, kind, wrap):
    weights = []
    for _ in range(2):
        module = kind() if kind is patched else kind(2, 2)
        module.bias.requires_grad_(wrap != "Trainable")
        torch.nn.init.zeros_(module.bias)
        own = vars(module).get("load_state_dict")
        with ckptman.Checkpointer(tmp_path, {"model": WRAPS[wrap](module)}, deadline=None) as checkpointer:
            start = checkpointer.restore()
            checkpointer.step(start + 1)
        weights.append(module.weight)
        assert module.loads == start
        assert vars(module).get("load_state_dict") is own
    assert torch.equal(*weights)
