"""A fault of the program is not the checkpoint's: nothing is held against it, and a restore tells whose it is."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckptman
from tests.helpers.checkpoints import flip_byte

STEPS = [1, 2]


def save(root, state):
    with ckptman.Checkpointer(root, state, save_policy=1, deadline=None) as checkpointer:
        checkpointer.restore()
        for step in STEPS:
            checkpointer.step(step)


def restored(root, state):
    with ckptman.Checkpointer(root, state, deadline=None) as checkpointer:
        return checkpointer.restore()


class Failing(torch.Tensor):
    """A tensor of a class of the program's that fails at one of the functions of torch."""

    fails_at = ""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if cls.fails_at and cls.fails_at in getattr(function, "__name__", str(function)):
            raise ArithmeticError("a bug of the program")
        return super().__torch_function__(function, types, args, kwargs or {})


def fragile(fails_at=""):
    """A state with a tensor that fails."""
    kind = type("Fragile", (Failing,), {"fails_at": fails_at})
    tensor = torch.ones(3000).as_subclass(kind) if fails_at else torch.ones(3000)
    return {"weights": nn.Linear(3, 3), "fragile": {"tensor": tensor}}


@pytest.mark.parametrize("fails_at", ["dim", "detach", "numel", "copy_"])
def test_an_object_that_fails_is_to_blame_and_no_checkpoint(tmp_path, fails_at):
    save(tmp_path, fragile())
    with pytest.raises(ckptman.ConfigError, match=r"failed on rank 0 while .*a bug of the program.*is good"):
        restored(tmp_path, fragile(fails_at))
    assert restored(tmp_path, fragile()) == STEPS[-1]
    assert [each.step for each in ckptman.Run(tmp_path).checkpoints] == STEPS


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("fails_at", ["dim", "detach"])
def test_an_object_that_fails_before_a_byte_is_read_is_to_blame_without_digests_too(tmp_path, fails_at):
    dcp.save(fragile(), checkpoint_id=tmp_path / "plain")
    with pytest.raises(ckptman.ConfigError, match=r"failed on rank 0 while .*a bug of.*nothing was read yet"):
        ckptman.load(fragile(fails_at), tmp_path / "plain")


def test_what_fails_over_bytes_that_have_changed_is_damage(tmp_path):
    save(tmp_path, fragile())
    [folder] = [each.path for each in ckptman.Run(tmp_path).checkpoints if each.step == STEPS[-1]]
    flip_byte(folder / "__0_0.distcp")
    with (
        pytest.warns(RuntimeWarning, match=r"skipping the checkpoint of step 2.*a bug"),
        pytest.raises(ckptman.ConfigError, match=r"step-0000000001.*in fragile.* of the state.*a bug of the program"),
    ):
        restored(tmp_path, fragile("dim"))
    with pytest.warns(RuntimeWarning, match="skipping the checkpoint of step 2"):
        assert restored(tmp_path, fragile()) == STEPS[0]


def test_a_module_without_shapes_is_named_with_what_to_do(tmp_path):
    def lazy():
        return nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))

    model = lazy()
    with pytest.raises(ckptman.ConfigError, match=r"model\.0\.weight has no shape yet.*first forward pass"):
        ckptman.save({"model": model}, tmp_path / "alone")
    model(torch.ones(1, 8))
    save(tmp_path / "run", {"model": model})
    with pytest.raises(ckptman.ConfigError, match=r"model\.0\.weight has no shape yet.*before restore\(\)"):
        restored(tmp_path / "run", {"model": lazy()})
    again = lazy()
    again(torch.ones(1, 8))
    assert restored(tmp_path / "run", {"model": again}) == STEPS[-1]
    assert torch.equal(again[0].weight, model[0].weight)


class Averages:
    """Keeps an average of its own; `drops`: how its load loses it."""

    def __init__(self, drops=""):
        self.shown, self.drops = {"average": torch.ones(3), "count": 2}, drops

    def state_dict(self):
        return dict(self.shown)

    def load_state_dict(self, state):
        self.shown = dict(state)
        if self.drops == "name":
            del self.shown["average"]
        elif self.drops == "shape":
            self.shown["average"] = torch.ones(4)


@pytest.mark.parametrize(
    ("drops", "told"), [("name", "average is not there"), ("shape", r"average is \[4\] float32, not \[3\] float32,")]
)
def test_an_object_that_loses_what_it_is_given_is_named(tmp_path, drops, told):
    save(tmp_path, {"averages": Averages()})
    with pytest.warns(
        RuntimeWarning, match=rf"averages has not taken all .*averages\.{told} after load_state_dict\(\)"
    ):
        restored(tmp_path, {"averages": Averages(drops)})
    assert restored(tmp_path, {"averages": Averages()}) == STEPS[-1]
