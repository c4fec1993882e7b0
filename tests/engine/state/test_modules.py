"""Of a model on a frozen base, only what is trained is saved; another base under it is refused."""

import copy
import importlib

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptman
from ckptman.engine.state import modules
from ckptman.engine.state.modules import UnwrappedState, identity_of, totals_of
from ckptman.errors import CkptmanError, ConfigError, MismatchError
from ckptman.storage.catalog.catalog import Catalog
from tests.helpers.ranks import run_ranks

TRAINED = {"adapter.weight", "adapter.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


class Adapted(nn.Module):
    """A frozen base with tied weights, and an adapter."""

    def __init__(self, base=0, adapter=0):
        super().__init__()
        torch.manual_seed(base)
        self.embedding, self.head = nn.Embedding(6, 5), nn.Linear(5, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(5)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        torch.manual_seed(adapter)
        self.adapter = nn.Linear(5, 5)

    def forward(self, inputs):
        found = self.norm(self.embedding(inputs))
        return self.head(found + self.adapter(found))


def state_of(model):
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
    return {"model": ckptman.Trainable(model), "optimizer": optimizer, "epoch": 0}


def loss_of(model):
    return model(torch.arange(6)).logsumexp(-1).sum()


def train(root, model, steps):
    """Train up to a step, from where the root is; the losses, and what identifies the frozen parameters."""
    state, losses = state_of(model), []
    with ckptman.Checkpointer(root, state, save_policy=ckptman.EverySteps(1)) as checkpointer:
        for step in range(checkpointer.restore() + 1, steps + 1):
            loss = loss_of(model)
            state["optimizer"].zero_grad()
            loss.backward()
            state["optimizer"].step()
            losses.append(loss.item())
            checkpointer.step(step)
    return losses, state["model"].frozen


def save(root, model, step=1):
    with ckptman.Checkpointer(root, state_of(model)) as checkpointer:
        checkpointer.save(step)


def test_a_run_goes_on_from_what_is_trained(tmp_path):
    whole, _ = train(tmp_path / "whole", Adapted(), 6)
    first, _ = train(tmp_path / "run", Adapted(), 3)
    resumed = Adapted(adapter=1)
    assert first + train(tmp_path / "run", resumed, 6)[0] == whole
    saved = ckptman.Trainable(resumed).state_dict()
    assert {name for name, each in saved.items() if isinstance(each, torch.Tensor)} == TRAINED


def test_another_base_is_refused_and_nothing_changed(tmp_path):
    save(tmp_path, Adapted())
    for other in (Adapted(base=1, adapter=1), Adapted(adapter=1).to(torch.float64)):
        before = {name: each.clone() for name, each in other.state_dict().items()}
        state = state_of(other)
        refused = pytest.raises(MismatchError, match=r"model: its frozen parameters are not those")
        with ckptman.Checkpointer(tmp_path, state) as checkpointer, refused:
            checkpointer.restore()
        assert all(torch.equal(each, before[name]) for name, each in other.state_dict().items())
        assert not state["optimizer"].state


def test_ckptman_load_checks_the_base_too(tmp_path):
    model, resumed = Adapted(), Adapted(adapter=1)
    ckptman.save({"model": ckptman.Trainable(model)}, tmp_path / "one")
    with pytest.raises(MismatchError, match="frozen"):
        ckptman.load({"model": ckptman.Trainable(Adapted(base=1))}, tmp_path / "one")
    ckptman.load({"model": ckptman.Trainable(resumed)}, tmp_path / "one")
    assert torch.equal(resumed.adapter.weight, model.adapter.weight)
    with pytest.raises(MismatchError, match=r"missing .*\n.*model.embedding.weight"):
        ckptman.load({"model": model}, tmp_path / "one")  # as a whole, it is not there


def test_a_base_that_is_changed_while_the_run_goes_on(tmp_path):
    model, resumed = Adapted(), Adapted()
    with ckptman.Checkpointer(tmp_path, state_of(model)) as checkpointer:
        checkpointer.save(1)
        model.embedding.weight.mul_(2)  # as a moving average is
        checkpointer.save(2)
    with ckptman.Checkpointer(tmp_path, state_of(resumed)) as checkpointer:
        assert checkpointer.restore(step=1) == 1
        assert checkpointer.restore() == 2
        assert torch.equal(resumed.embedding.weight, model.embedding.weight)
        checkpointer.save(3)
    with ckptman.Checkpointer(tmp_path, state_of(Adapted())) as checkpointer:
        assert checkpointer.restore() == 3
        with pytest.raises(MismatchError, match="frozen"):
            checkpointer.restore(step=1)  # which has the base of before


def run_with(root, step, *changes, trained):
    """Go on up to a step with an adapter that is trained at first or not, and change it before each step."""
    model = Adapted()
    model.adapter.requires_grad_(trained)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": ckptman.Trainable(model), "optimizer": optimizer}
    with ckptman.Checkpointer(root, state, save_policy=ckptman.EverySteps(1)) as checkpointer:
        for number in range(checkpointer.restore() + 1, step + 1):
            for change in changes:
                change(model.adapter, number)
            checkpointer.step(number)
    return model.adapter.weight.detach()


def is_trained_up_to(last):
    def change(adapter, step):
        adapter.requires_grad_(step <= last)
        if step <= last:
            with torch.no_grad():
                adapter.weight.add_(1)

    return change


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("at_first", [True, False])
def test_a_layer_that_is_frozen_while_the_run_goes_on(tmp_path, at_first, trained):
    """It is restored whether it is frozen again at the start of the next attempt or not, and saved by that, too."""
    expected = run_with(tmp_path, 4, is_trained_up_to(2), trained=at_first)
    assert torch.equal(run_with(tmp_path, 6, is_trained_up_to(2), trained=trained), expected)
    assert torch.equal(run_with(tmp_path, 6, trained=False), expected)
    assert not torch.equal(expected, Adapted().adapter.weight)


@pytest.mark.parametrize(
    ("kind", "fused", "ends_step"), [("Adam", False, False), ("Adam", True, False), ("SGD", True, True)]
)
def test_a_layer_that_was_unfrozen_for_a_moment_between_two_saves(tmp_path, kind, fused, ends_step):
    """Where torch counts no change, the optimizer has state of it; or a step ended while it asked for gradients."""

    def state_with(model):
        model.adapter.requires_grad_(False)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, fused=fused)
        return {"model": ckptman.Trainable(model), "optimizer": optimizer}

    model, resumed = Adapted(), Adapted()
    state = state_with(model)
    with ckptman.Checkpointer(tmp_path, state, save_policy=ckptman.EverySteps(100)) as checkpointer:
        checkpointer.save(1)
        model.adapter.requires_grad_(True)
        loss_of(model).backward()
        state["optimizer"].step()
        if ends_step:
            checkpointer.step(2)
        model.adapter.requires_grad_(False)
        checkpointer.save(3)
    with ckptman.Checkpointer(tmp_path, state_with(resumed)) as checkpointer:
        assert checkpointer.restore() == 3
    assert not torch.equal(model.adapter.weight, Adapted().adapter.weight)
    assert torch.equal(resumed.adapter.weight, model.adapter.weight)


def test_a_damaged_one_that_holds_more_leaves_the_base_to_the_one_before(tmp_path):
    def unfrozen(*layers):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
        for number, each in enumerate(model):
            each.requires_grad_(number in layers)
        return model, {"model": ckptman.Trainable(model)}

    model, state = unfrozen(2)
    with ckptman.Checkpointer(tmp_path, state) as checkpointer:
        for step, layer in ((1, 2), (2, 1)):
            model[layer].requires_grad_(True)
            with torch.no_grad():
                model[layer].weight.add_(1)
            checkpointer.save(step)
    data = Catalog(tmp_path).entry(2).path / "__0_0.distcp"
    with data.open("r+b") as file:
        file.seek(data.stat().st_size * 3 // 4)
        file.write(bytes(64))
    resumed, state = unfrozen(2)
    with (
        ckptman.Checkpointer(tmp_path, state) as checkpointer,
        pytest.warns(RuntimeWarning, match="skipping the checkpoint of step 2"),
    ):
        assert checkpointer.restore() == 1
    assert torch.equal(resumed[1].weight, unfrozen()[0][1].weight)
    assert torch.equal(resumed[2].weight, model[2].weight)


class Quantized(nn.Linear):
    """Saves the scales of its weight besides it, under names of no parameter, as bitsandbytes does."""

    def __init__(self):
        super().__init__(3, 3)
        self.weight.requires_grad_(False)
        self.scales = torch.ones(3)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scales"] = self.scales


def test_names_that_are_of_no_parameter(tmp_path):
    model, resumed, other = nn.Sequential(Quantized()), nn.Sequential(Quantized()), nn.Sequential(Quantized())
    for each in (resumed, other):
        each[0].weight.data.copy_(model[0].weight)
    other[0].scales = torch.zeros(3)
    ckptman.save({"model": ckptman.Trainable(model)}, tmp_path / "one")
    assert ckptman.Trainable(model).state_dict().keys() == {"0.bias", "_frozen_parameters"}
    ckptman.load({"model": ckptman.Trainable(resumed)}, tmp_path / "one")
    assert torch.equal(resumed[0].bias, model[0].bias)
    with pytest.raises(MismatchError, match="frozen"):
        ckptman.load({"model": ckptman.Trainable(other)}, tmp_path / "one")


@pytest.mark.parametrize("inference", [False, True])
def test_a_load_that_fails_puts_back_what_is_under_a_name_too(inference):
    with torch.inference_mode(inference):
        model = nn.Sequential(Quantized())
    before = {name: each.clone() for name, each in model.state_dict().items()}
    trainable = ckptman.Trainable(model)
    trainable.expect(trainable.state_dict() | {"0.weight": 0, "0.weight.scales": 0})
    with pytest.raises(OSError, match="damaged"), trainable.filled_or_as_before():
        for each in model.state_dict().values():
            with torch.inference_mode(inference):
                each.fill_(7)
        raise OSError("damaged")
    after = model.state_dict()
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert torch.equal(after["0.weight.scales"], before["0.weight.scales"])
    assert after["0.bias"].eq(7).all()


def test_what_is_not_a_module_is_refused():
    with pytest.raises(ConfigError, match="Trainable is for a module"):
        ckptman.Trainable({"weight": 1})


def identity(tensor):
    holder = nn.Module()
    holder.weight = nn.Parameter(tensor, requires_grad=False)
    return identity_of(totals_of([ckptman.Trainable(holder).digest_frozen()]))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e5m2]
)
def test_any_change_of_an_element_is_seen(dtype):
    tensor = torch.arange(24).reshape(2, 3, 4).to(torch.float32).to(dtype)
    seen = {identity(tensor), identity(tensor[:1]), identity(tensor.reshape(3, 2, 4))}
    for number in range(tensor.numel()):
        other = tensor.clone()
        other.view(torch.uint8).reshape(24, -1)[number, -1] ^= 1
        seen.add(identity(other))
    if dtype is not torch.bool:
        seen |= {identity(tensor.flip(axis)) for axis in range(3) if dtype is not torch.float8_e5m2}
    assert len(seen) == 27 + 3 * (dtype not in (torch.bool, torch.float8_e5m2))
    assert identity(tensor.transpose(0, 2).contiguous().transpose(0, 2)) == identity(tensor)
    assert identity(tensor[0, 0, 0].clone()) != identity(tensor[0, 0, 1].clone())


def _shard_and_train(root, steps):
    model = Adapted()
    model.head.weight = nn.Parameter(model.head.weight.clone(), requires_grad=False)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in (model.embedding, model.head, model.adapter, model):
        fully_shard(layer, mesh=mesh)
    return train(root, model, steps)


@pytest.mark.slow
def test_a_sharded_base_is_the_same_on_any_number_of_ranks(tmp_path):
    found = [run_ranks(ranks, _shard_and_train, str(tmp_path), steps) for ranks, steps in ((3, 2), (2, 4), (1, 6))]
    assert [len(losses) for each in found for losses, _ in each] == [2] * 6
    assert len({frozen for each in found for _, frozen in each}) == 1


def _differing_bases(root):
    with pytest.raises(ConfigError) as caught:
        save(root, Adapted(base=torch.distributed.get_rank()))
    return str(caught.value)


def test_bases_that_differ_between_ranks(tmp_path):
    for said in run_ranks(2, _differing_bases, str(tmp_path), fresh=True):
        assert "embedding.weight is frozen, and it differs between ranks" in said


def _without_memory_on_rank_1(root):
    def out_of_memory(_):
        raise MemoryError("no room for a copy")

    state = {"model": ckptman.Trainable(Adapted())}
    ckptman.save(state, f"{root}/one")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CkptmanError) as caught:
        if torch.distributed.get_rank() == 1:
            patch.setattr(ckptman.Trainable, "filled_or_as_before", out_of_memory)
        ckptman.load(state, f"{root}/one")
    return str(caught.value)


def test_a_rank_without_memory_for_a_copy_of_what_is_frozen(tmp_path):
    for said in run_ranks(2, _without_memory_on_rank_1, str(tmp_path)):
        assert "rank 1 has not enough memory" in said


@pytest.mark.filterwarnings("ignore")  # what peft warns of while it is imported
def test_an_adapter_of_peft(tmp_path):
    peft = pytest.importorskip("peft")

    def adapted(seed):
        torch.manual_seed(0)
        base = nn.Sequential(nn.Embedding(6, 5), nn.Linear(5, 6))
        torch.manual_seed(seed)
        config = peft.LoraConfig(target_modules=["1"], r=2, init_lora_weights=False)
        return peft.get_peft_model(base, config)

    model, resumed = adapted(1), adapted(2)
    ckptman.save({"model": ckptman.Trainable(model)}, tmp_path / "one")
    ckptman.load({"model": ckptman.Trainable(resumed)}, tmp_path / "one")
    saved = ckptman.Trainable(model).state_dict()
    assert sorted(saved)[1:] == [f"base_model.model.1.lora_{each}.default.weight" for each in "AB"]
    assert all(torch.equal(each, resumed.state_dict()[name]) for name, each in model.state_dict().items())


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


def train_wrapped(root, made, steps):
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
    whole = train_wrapped(tmp_path / "whole", make(), 6)
    first = train_wrapped(tmp_path / "run", wrap(), 2)
    second = train_wrapped(tmp_path / "run", make(1), 4)
    assert first + second + train_wrapped(tmp_path / "run", wrap(2), 6) == whole


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", modules._INSIDE)
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
