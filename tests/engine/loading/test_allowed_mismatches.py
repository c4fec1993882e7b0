"""What may be missing in a checkpoint, and unexpected in it: state that changes between two attempts of a run."""

import json
import logging
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import ckptman
from ckptman.engine.loading.allowed_mismatches import matches, patterns_of
from ckptman.engine.state.snapshot import snapshot
from tests.helpers.ranks import run_ranks


def restore(state, path, **patterns):
    with ckptman.Checkpointer(path.parent, state, deadline=None) as checkpointer:
        checkpointer.restore(1, **patterns)


def restore_path(state, path, **patterns):
    with ckptman.Checkpointer(path.parent / "other", state, deadline=None) as checkpointer:
        checkpointer.restore(path=path, **patterns)


def load(state, path, **patterns):
    return ckptman.load(state, path, **{"unexpected": [], **patterns})


def accept(way, state, path, **patterns):
    """Load as the error says that it can be; what it said, and what was returned."""
    before = content(state)
    with pytest.raises(ckptman.MismatchError) as caught:
        way(state, path, **patterns)
    assert content(state) == before
    assert caught.value.call in str(caught.value)
    lists = caught.value.call.removeprefix("load").removeprefix("restore")
    return str(caught.value), way(state, path, **eval(f"dict{lists}"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step-0000000001"


def content(state):
    """Bit for bit what is in a state."""
    shot = snapshot(state, 0)
    return {name: (each.dtype, each.tolist()) for name, each in shot.tensors.items()} | shot.objects


class Net(nn.Module):
    """A trunk, and what some tests add to it."""

    def __init__(self, **more):
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        for name, each in more.items():
            self.add_module(name, each)

    def forward(self, x):
        x = self.trunk(x)
        return x + sum(each(x) for name, each in self.named_children() if name != "trunk")


def run(steps=0, groups=Net.parameters, **more):
    """A model and its Adam, after so many steps."""
    model = Net(**more)
    state = {"model": model, "optimizer": torch.optim.AdamW(groups(model), lr=0.1)}
    for _ in range(steps):
        model(torch.randn(2, 3)).square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
    return state


def test_patterns_name_entries_and_all_that_is_under_them():
    for pattern, name in ("ema", "ema.a.b"), ("ema.*", "ema"), ("*.lora", "m.0.lora.w"), ("epo?h", "epoch"):
        assert matches(pattern, name), (pattern, name)
    for pattern, name in ("ema", "ema2"), ("m.head", "m.header.w"), ("epoch.x", "epoch"):
        assert not matches(pattern, name), (pattern, name)


def test_patterns_are_short_and_name_nothing_else():
    mine, others = ["ema.a", "ema.b", "m.0.w", "m.0.b", "m.2.w"], ["m.1.w", "m.2.b", "m"]
    assert patterns_of(mine, others) == ("ema", "m.0.*", "m.2.w")
    layers = [f"m.{layer}.{part}.{each}" for layer in range(9) for part in "qv" for each in ("lora.a", "lora.b", "w")]
    new = [each for each in layers if "lora" in each]
    assert patterns_of(new, layers) == ("m.*.q.lora.*", "m.*.v.lora.*")
    assert patterns_of(["x[0]", "m"], ["x0", "m.1"]) == ("m", "x[[]0]")


@pytest.mark.parametrize("way", [restore, restore_path, load])
def test_what_was_added_to_the_state_stays_as_it_is(path, way, caplog):
    caplog.set_level(logging.INFO, "ckptman")
    ckptman.save(saved := run(2), path)
    fresh = run()
    fresh |= {
        "schedule": torch.optim.lr_scheduler.ExponentialLR(fresh["optimizer"], 0.5),
        "rng": ckptman.RNGState(),
        "data": ckptman.ResumableLoader(DataLoader(range(9), batch_size=2)),
        "ema": {name: torch.full_like(each, 7) for name, each in fresh["model"].named_parameters()},
        "average": nn.Linear(2, 2),
    }
    added = content({key: fresh[key] for key in ("schedule", "data", "ema", "average")})
    with pytest.warns(RuntimeWarning, match="initial_lr"):
        told, skipped = accept(way, fresh, path)
    assert 'missing=["average", "data", "ema", "rng", "schedule"])' in told
    assert "Bring the model 'average', 'data', the value 'ema', 'rng' and the schedule in line" in told
    after = content(fresh)
    assert {name: after[name] for name in content(saved)} == content(saved)
    assert {name: after[name] for name in added} == added
    if way is load:
        assert skipped == (("average", "data", "ema", "rng", "schedule"), ())
    else:
        assert "s; missing in it, and as before: average, data, ema, rng, schedule\n" in caplog.text


@pytest.mark.parametrize("groups", ["one", "first", "own"])
def test_an_adapter_starts_fresh_and_the_rest_goes_on(path, groups):
    saved = run(3)
    saved["optimizer"].param_groups[0]["lr"] = 0.025
    ckptman.save(saved, path)

    def parted(model):
        new, old = [*model.lora.parameters()], [*model.trunk.parameters()]
        own = [{"params": new, "lr": 0.5}, {"params": old}]
        return {"one": [*old, *new], "first": [*new, *old], "own": own}[groups]

    for way in restore, load:
        fresh = run(groups=parted, lora=nn.Linear(3, 3, bias=False))
        adapter = fresh["model"].lora.weight.clone()
        told, _ = accept(way, fresh, path)
        assert 'missing=["model.lora.weight", "optimizer.param_groups.lora.*"])' in told
        assert "the model and the optimizer" in told
        assert {name: each for name, each in content(fresh).items() if "lora" not in name} == content(saved)
        assert torch.equal(fresh["model"].lora.weight, adapter)
        assert fresh["model"].lora.weight not in fresh["optimizer"].state
        rates = [each["lr"] for each in fresh["optimizer"].param_groups]
        assert rates == ([0.5, 0.025] if groups == "own" else [0.025])


@pytest.mark.parametrize("way", [restore, load])
def test_another_head_and_a_group_that_is_gone(path, way):
    def parted(model):
        return [{"params": [*model.trunk.parameters()]}, {"params": [*model.old.parameters()], "lr": 0.5}]

    saved = run(2, parted, old=nn.Linear(3, 3)) | {"epoch": 3}
    ckptman.save(saved, path)
    fresh = run(new=nn.Linear(3, 3))
    told, skipped = accept(way, fresh, path)
    assert 'missing=["model.new.*", "optimizer.param_groups.new.*"], unexpected=["epoch", "model.old.*", ' in told
    assert "the model, the optimizer and 'epoch' in line" in told
    after, before = content(fresh), content(saved)
    common = after.keys() & before.keys()
    assert {name: after[name] for name in common} == {name: before[name] for name in common}
    assert [each["lr"] for each in fresh["optimizer"].param_groups] == [0.1]
    if way is load:
        assert {"epoch", "model.old.weight"} <= {*skipped.unexpected}
        assert {"model.new.bias", "model.new.weight"} < {*skipped.missing}


def test_state_of_a_new_parameter_that_has_some_stays(path):
    ckptman.save(run(2), path)
    fresh = run(1, lora=nn.Linear(3, 3))
    own = {name: each for name, each in content(fresh).items() if "state.lora" in name}
    assert len(own) == 6
    ckptman.load(fresh, path, missing=["*lora*"])
    assert {name: each for name, each in content(fresh).items() if "state.lora" in name} == own


@pytest.mark.parametrize("way", [restore, load])
def test_another_kind_of_optimizer_starts_without_state(path, way):
    model = Net()
    model(torch.ones(3)).sum().backward()
    saved = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)}
    saved["optimizer"].step()
    ckptman.save(saved, path)
    fresh = run()
    told, _ = accept(way, fresh, path)
    assert "Bring the optimizer in line" in told
    assert torch.equal(fresh["model"].trunk.weight, model.trunk.weight)
    assert not fresh["optimizer"].state
    assert fresh["optimizer"].param_groups[0]["lr"] == 0.25
    assert fresh["optimizer"].param_groups[0]["betas"] == (0.9, 0.999)


def test_values_and_tensors_in_dicts_and_lists(path):
    progress = {"epoch": 3, "old": {"a": 1, "w": torch.ones(1)}, "gone": 5}
    ckptman.save({"progress": progress, "more": [torch.ones(1)], "n": 1}, path)
    best, second = torch.zeros(2), torch.zeros(1)
    fresh = {"progress": {"epoch": 0, "best": {"w": best, "step": 7}}, "more": [torch.zeros(1), second], "n": 0}
    told, _ = accept(restore, fresh, path)
    assert 'restore(missing=["more.1", "progress.best.w"])' in told
    assert fresh["progress"]["best"] == {"w": best, "step": 7}
    assert fresh["progress"]["best"]["w"] is best
    assert [each.item() for each in fresh["more"]] == [1, 0]
    assert fresh["progress"]["gone"] == 5

    fresh = {"progress": {"epoch": 0, "loss": 2.5}, "more": [], "n": 0}
    restore(fresh, path, missing=["progress.loss"], unexpected=["progress.old", "more.*"])
    assert fresh == {"progress": {"epoch": 3, "gone": 5, "loss": 2.5}, "more": [], "n": 1}


def test_each_attempt_of_a_chain_gives_the_same_patterns(path, caplog):
    """After the first save nothing is missing or unexpected any more."""
    caplog.set_level(logging.INFO, "ckptman")
    ckptman.save(run(1) | {"epoch": 4}, path)
    root = path.parent
    for attempt in 1, 2, 3:
        fresh = run() | {"ema": {"decay": 0.5}}
        with ckptman.Checkpointer(root, fresh, deadline=None) as checkpointer:
            assert checkpointer.restore(missing=["ema.*"], unexpected=["epoch"]) == attempt
            fresh["ema"]["decay"] /= 2
            checkpointer.save(attempt + 1)
    with ckptman.Checkpointer(root, fresh, deadline=None) as checkpointer:
        assert checkpointer.restore() == 4
    events = [json.loads(line) for line in (root / ".ckptman" / "journal.jsonl").read_text().splitlines()]
    restored = [each for each in events if each["event"] == "restored"]
    skipped = [(each.get("missing"), each.get("unexpected")) for each in restored]
    assert skipped == [(["ema"], ["epoch"]), (None, None), (None, None), (None, None)]
    (told,) = [each for each in caplog.messages if "missing in it" in each]
    assert told.endswith("; missing in it, and as before: ema; left in it: epoch")


def test_patterns_that_cannot_be_meant(path):
    ckptman.save({"schedule": 1, "epoch": 2}, path)
    for way in restore, load:
        for patterns, told in (
            ({"missing": ["shedule"]}, r'missing=\["shedule"\] names nothing .* did you mean schedule\?'),
            ({"missing": "schedule"}, r"missing is a list of patterns .*, not 'schedule'"),
            ({"unexpected": [""]}, "unexpected is a list of patterns"),
        ):
            state = {"schedule": 0, "epoch": 0}
            with pytest.raises(ckptman.ConfigError, match=told):
                way(state, path, **patterns)
            assert state == {"schedule": 0, "epoch": 0}
        way(state, path, missing=["schedule"], unexpected=["epohc", "epoch"])
        assert state == {"schedule": 1, "epoch": 2}


def test_a_typing_error_is_told_on_a_fresh_start(tmp_path):
    state = {"model": Net(), "progress": {"epoch": 0}}
    with ckptman.Checkpointer(tmp_path, state, deadline=None) as checkpointer:
        with pytest.raises(ckptman.ConfigError, match=r'missing=\["prgress.best"\] names nothing .* mean progress\?'):
            checkpointer.restore(missing=["prgress.best"])
        assert checkpointer.restore(missing=["*.lora_A", "progress.best"], unexpected=["old"]) == 0


def test_what_has_another_shape_cannot_be_accepted(path):
    ckptman.save(run(1), path)
    for way in restore, load:
        fresh = run()
        fresh["model"].trunk = nn.Linear(3, 4)
        fresh["optimizer"] = torch.optim.AdamW(fresh["model"].parameters())
        before = content(fresh)
        with pytest.raises(ckptman.MismatchError) as caught:
            way(fresh, path, missing=["*"], unexpected=["*"])
        assert content(fresh) == before
        assert not caught.value.call
        assert "Differences in shape or dtype cannot be accepted" in str(caught.value)


def test_load_says_what_it_skipped(path):
    ckptman.save({"a": {"x": 1, "y": 2}, "b": torch.ones(1), "c": [1]}, path)
    state = {"a": {"x": 0}}
    skipped = ckptman.load(state, path)
    assert (skipped.missing, skipped.unexpected) == ((), ("a.y", "b", "c"))
    assert not ckptman.load({"a": {"x": 0, "y": 0}, "b": torch.zeros(1), "c": []}, path)
    with pytest.raises(ckptman.MismatchError) as caught:
        ckptman.load(state, path, unexpected=["b"])
    assert caught.value.unexpected == ("a.y", "c")
    assert caught.value.call == 'load(unexpected=["b", "a.y", "c"])'


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", [restore_path, load])
def test_what_plain_dcp_saved(path, way):
    saved = run(2) | {"epoch": 3, "seen": {5: 1}}
    flat = {"model": saved["model"].state_dict(), **{name: saved[name] for name in ("epoch", "seen")}}
    flat["optimizer"] = dcp.state_dict.get_optimizer_state_dict(saved["model"], saved["optimizer"])
    dcp.save(flat, checkpoint_id=path, no_dist=True)
    fresh = run(lora=nn.Linear(3, 3)) | {"ema": {"w": torch.zeros(1)}}
    accept(way, fresh, path)
    after = content(fresh)
    expected = content({name: saved[name] for name in ("model", "optimizer")})
    assert {name: after[name] for name in expected} == expected
    assert fresh["model"].lora.weight not in fresh["optimizer"].state
    assert not fresh["ema"]["w"].any()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_model_without_a_name_as_torchtitan_saves_it(path):
    saved = Net(old=nn.Linear(3, 3))
    dcp.save(dict(saved.state_dict()), checkpoint_id=path, no_dist=True)
    fresh = {"model": Net(new=nn.Linear(3, 3)), "epoch": 5}
    with pytest.warns(RuntimeWarning, match="without that name"):
        told, _ = accept(restore_path, fresh, path)
    assert 'restore(missing=["epoch", "model.new.*"], unexpected=["model.old.*"])' in told
    assert torch.equal(fresh["model"].trunk.weight, saved.trunk.weight)
    assert fresh["epoch"] == 5


def on_two_ranks(folder):
    """Ranks with other patterns, and a name that only one of them has."""
    rank, path, told = dist.get_rank(), Path(folder, "step-0000000001"), []
    ckptman.save({f"stage{rank}": {"w": torch.full((2,), rank)}, "epoch": 1}, path)

    def attempt(way, **patterns):
        state = {f"stage{rank}": {"w": torch.full((2,), 7)}, "epoch": 0, **({"ema": {"w": 5}} if rank else {})}
        try:
            way(state, path, **patterns)
        except ckptman.CkptmanError as error:
            told.append(f"{type(error).__name__}: {error}")
        return state

    for way in restore, load:
        attempt(way, missing=["ema"] if rank else [])
        attempt(way, missing="ema" if rank else ["ema"])
        attempt(way)
        attempt(way, missing=["emma"])
        expected = {f"stage{rank}.w": (torch.int64, [rank, rank]), "epoch": 1, **({"ema.w": 5} if rank else {})}
        assert content(attempt(way, missing=["ema"])) == expected
    return told


def test_ranks_accept_the_same(tmp_path):
    first, second = run_ranks(2, on_two_ranks, str(tmp_path), fresh=True)
    assert first == second
    errors = ["ConfigError", "ConfigError", "MismatchError", "ConfigError"]
    assert [each.partition(":")[0] for each in first] == 2 * errors
    assert 'rank 0 accepts () and rank 1 (missing=["ema"])' in first[0]


def adapt(root, patterns):
    """Go on with a sharded model, with an adapter where there are patterns. What it holds after restore, and after."""
    torch.manual_seed(len(patterns or ()))
    model = Net(**({} if patterns is None else {"lora": nn.Linear(3, 3)}))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in (*model.children(), model):
        fully_shard(each, mesh=mesh)  # three rows
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}
    state |= {} if patterns is None else {"ema": {"w": torch.ones(3)}}

    def whole():
        found = snapshot(state, 0).tensors.items()
        return {name: (each.full_tensor() if isinstance(each, DTensor) else each).tolist() for name, each in found}

    found = []
    with ckptman.Checkpointer(root, state, save_policy=ckptman.OnStop(), deadline=None) as checkpointer:
        start = checkpointer.restore(**patterns or {})
        found.append(whole())
        model(torch.ones(2, 3)).square().sum().backward()
        state["optimizer"].step()
        checkpointer.step(start + 1)
        found.append(whole())
    return found


def adapt_unless_it_fits(root):
    with pytest.raises(ckptman.MismatchError) as caught:
        adapt(root, {})
    return caught.value.call


@pytest.mark.slow
def test_a_sharded_model_gets_an_adapter(tmp_path):
    """From two ranks to two, and with the same patterns on to one."""
    root, patterns = str(tmp_path), {"missing": ["*.lora", "ema"]}
    _, saved = run_ranks(2, adapt, root, None)[0]
    call = 'restore(missing=["ema", "model.lora.*", "optimizer.param_groups.lora.*"])'
    assert run_ranks(2, adapt_unless_it_fits, root, fresh=True) == [call, call]
    restored, adapted = run_ranks(2, adapt, root, patterns)[1]
    assert {name: each for name, each in restored.items() if "lora" not in name} == {**saved, "ema.w": [1.0] * 3}
    assert len([name for name in saved if ".state." in name]) == 6
    assert not [name for name in restored if "state.lora" in name]
    assert len([name for name in adapted if "state.lora" in name]) == 6
    assert run_ranks(1, adapt, root, patterns)[0][0] == adapted


# ---- groups of an optimizer that are others now --------------------------------------------------------------------


def test_a_group_that_was_added_while_training(tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
    grown = torch.optim.Adam([{"params": list(each.parameters())} for each in model])
    with ckptman.Checkpointer(tmp_path, {"model": model, "optimizer": grown}, deadline=None) as checkpointer:
        checkpointer.save(1)
    fresh = torch.optim.Adam(model[0].parameters())
    with pytest.raises(ckptman.MismatchError) as caught:
        restore({"model": model, "optimizer": fresh}, tmp_path / "step-0000000001")
    told = str(caught.value).splitlines()
    assert "    optimizer.param_groups.1.bias.* (11)" in told
    assert (
        "  These parameters were in a group of the optimizer then: 1.bias, 1.weight of 'optimizer'. Add them "
        "(add_param_group) before restore()." in told
    )
    assert len(told) < 10
    assert len(caught.value.unexpected) == 22
    assert pickle.loads(pickle.dumps(caught.value)).hint == caught.value.hint
    fresh.add_param_group({"params": list(model[1].parameters())})
    restore({"model": model, "optimizer": fresh}, tmp_path / "step-0000000001")


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_groups_of_unlike_settings_that_are_one_now(tmp_path, kind):
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
    apart = [{"params": list(each.parameters()), "lr": kind(lr)} for each, lr in zip(model, (0.01, 0.25))]
    with ckptman.Checkpointer(tmp_path, {"model": model, "optimizer": torch.optim.Adam(apart, foreach=False)}) as saves:
        saves.save(1)
    one = torch.optim.Adam(model.parameters(), lr=kind(0.01), foreach=False)
    with (
        ckptman.Checkpointer(tmp_path, {"model": model, "optimizer": one}) as saves,
        pytest.raises(
            ckptman.MismatchError, match=r"\.1\.bias\.lr: checkpoint 0\.25, this run 0\.01 as of 0.* its group"
        ),
    ):
        saves.restore()
