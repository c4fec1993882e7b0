import warnings

import pytest
import torch
from torch import nn

import ckptman


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


def run(root, kind, last):
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(4), "queue": kind()})
    with ckptman.Checkpointer(root, {"model": model}, save_policy=1, deadline=None) as checkpointer:
        for step in range(checkpointer.restore() + 1, last + 1):
            model["queue"].push(torch.full((2, 4), float(step)))
            checkpointer.step(step)
    return model["queue"].rows


def test_a_buffer_that_grows_is_named_once_and_told_at_its_first_save(tmp_path):
    with pytest.warns(RuntimeWarning, match=r"model\.queue\.rows has grown from \[0, 1\] to \[2, 4\]; a new") as told:
        run(tmp_path, Queue, 3)
    assert len([each for each in told if "a new module" in str(each.message)]) == 1
    with pytest.raises(ckptman.MismatchError, match=r"queue\.rows: checkpoint \[6, 4\] float32, this run \[0, 1\]"):
        run(tmp_path, Queue, 4)


def test_a_module_that_makes_room_itself_is_accepted(tmp_path):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(tmp_path, RoomyQueue, 2)
        rows = run(tmp_path, RoomyQueue, 3)
    assert rows[:, 0].tolist() == [1, 1, 2, 2, 3, 3]
    assert not [each for each in told if "a new module" in str(each.message)]
    with pytest.raises(ckptman.MismatchError, match="checkpoint"):
        run(tmp_path, Queue, 4)


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
    run = lambda module: module(torch.ones(1, 3))  # noqa: E731
    assert warnings_of(tmp_path, 1, run, nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False).eval())) == []
