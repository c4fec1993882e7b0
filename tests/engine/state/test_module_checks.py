import warnings

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


class Queue(nn.Module):
    """Features of the last batches, which get their shape with the first one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(0, 1))

    def push(self, rows):
        self.rows = torch.cat([self.rows, rows]) if len(self.rows) else rows.clone()


class RoomyQueue(Queue):
    """Makes room for what is loaded."""

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        if (saved := state_dict.get(f"{prefix}rows")) is not None:
            self.rows = torch.empty_like(saved)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def run_with_buffers(root, kind, last):
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(4), "queue": kind()})
    with ckptman.Checkpointer(root, {"model": model}, save_policy=1, deadline=None) as checkpointer:
        for step in range(checkpointer.restore() + 1, last + 1):
            model["queue"].push(torch.full((2, 4), float(step)))
            checkpointer.step(step)
    return model["queue"].rows


def test_a_buffer_that_grows_is_named_once_and_told_at_its_first_save(tmp_path):
    with pytest.warns(RuntimeWarning, match=r"model\.queue\.rows has grown from \[0, 1\] to \[2, 4\]; a new") as told:
        run_with_buffers(tmp_path, Queue, 3)
    assert len([each for each in told if "a new module" in str(each.message)]) == 1
    with pytest.raises(ckptman.MismatchError, match=r"queue\.rows: checkpoint \[6, 4\] float32, this run \[0, 1\]"):
        run_with_buffers(tmp_path, Queue, 4)


def test_a_module_that_makes_room_itself_is_accepted(tmp_path):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run_with_buffers(tmp_path, RoomyQueue, 2)
        rows = run_with_buffers(tmp_path, RoomyQueue, 3)
    assert rows[:, 0].tolist() == [1, 1, 2, 2, 3, 3]
    assert not [each for each in told if "a new module" in str(each.message)]
    with pytest.raises(ckptman.MismatchError, match="checkpoint"):
        run_with_buffers(tmp_path, Queue, 4)


class Watched(nn.Module):
    """Has something of each kind that may change."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", None)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("queue", torch.zeros(0, 2))
        self.register_buffer("cache", None, persistent=False)


def grow_queue(module):
    module.queue = torch.cat([module.queue, torch.ones(1, 2)])


CHANGES = {
    "model.mean was None at the start and is [2] float32 now; a new module cannot load it": lambda module: setattr(
        module, "mean", torch.ones(2)
    ),
    "model.count has changed from [] int64 to [] float32; a new": lambda module: setattr(
        module, "count", module.count + 0.5
    ),
    "model.queue has grown from [0, 2] to [1, 2]; a new": grow_queue,
    "model.layer.weight has changed from [2, 2] to [3, 2], model.layer.bias has changed from [2] to [3]; a new module "
    "cannot load them": lambda module: setattr(module, "layer", nn.Linear(2, 3)),
    "model.head.weight was not there at the start and is [1, 1] float32 now": lambda module: module.add_module(
        "head", nn.Linear(1, 1, bias=False)
    ),
    "": lambda module: setattr(module, "cache", torch.ones(2)),
}


def warnings_of(root, change_at, change, module):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with ckptman.Checkpointer(root, {"model": module}, save_policy=1, deadline=None) as checkpointer:
            for step in range(4):
                if step == change_at:
                    change(module)
                checkpointer.step(step + 1) if step else checkpointer.restore()
    return [str(each.message) for each in told if "a new module" in str(each.message)]


@pytest.mark.parametrize("told", CHANGES)
def test_each_change_of_form_is_named_once(tmp_path, told):
    found = warnings_of(tmp_path / "changes", 2, CHANGES[told], Watched())
    assert len(found) == bool(told)
    assert not told or found[0].replace("grown", "changed").startswith(told.replace("grown", "changed"))
    assert warnings_of(tmp_path / "made", 0, CHANGES[told], Watched()) == [], "before restore()"


def test_a_lazy_module_gets_its_shapes(tmp_path):
    run_with_buffers = lambda module: module(torch.ones(1, 3))  # noqa: E731
    assert (
        warnings_of(
            tmp_path, 1, run_with_buffers, nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False).eval())
        )
        == []
    )
