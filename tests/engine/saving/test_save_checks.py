"""NaN and infinity in a save: it is marked, or refused; the newest finite checkpoint outlives it, and is restored."""

import contextlib
import json
import math
import random
import shutil
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckptman
from ckptman.cli.app import main
from ckptman.engine.saving import save_checks
from ckptman.engine.saving.draft import Draft
from ckptman.errors import CommitError, ConfigError, CorruptError, NotFoundError, RootError
from ckptman.runtime.journal import read_journal
from ckptman.session.restorer import Restorer
from ckptman.session.run_session import RunSession
from ckptman.storage.catalog.catalog import Catalog, Entry
from ckptman.storage.format.paths import journal_path
from ckptman.storage.io.checksums import BLOCK_BYTES
from ckptman.storage.io.file_writer import is_finite
from tests.helpers.apps import App
from tests.helpers.ranks import run_ranks

NAN, INF = math.nan, math.inf
FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "complex64", "complex128")
LARGE = 5 * 1024 * 1024 // 4
"""Elements of float32: more than is written at a time."""


class Run:
    """A model with a mask of -inf among its buffers, and optimizer state. Training sets its weight to the step."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(5, 3)
        self.model.register_buffer("mask", torch.full((4, 4), -INF).triu(1))
        self.model.large = nn.Parameter(torch.zeros(LARGE))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        history = [torch.tensor([NAN, 1.0])]
        self.state = {"model": self.model, "optimizer": self.optimizer, "history": history}

    @property
    def step(self):
        return self.model.weight[0, 0].item()

    def moment(self, name):
        parameter = dict(self.model.named_parameters())[name]
        return self.optimizer.state[parameter]["exp_avg_sq"].view(-1)


def train(root, *losses, bad="", **options):
    """Restore, and save a step for each of the losses; one that is NaN spoils `model.large`. `bad`: spoil that
    ("parameter") or what the optimizer keeps of the bias ("optimizer") before the saves. Returns the step that was
    restored, and the warnings."""
    run = Run()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ckptman.Checkpointer(
            root, run.state, save_policy=ckptman.EverySteps(1), deadline=None, **options
        ) as checkpointer:
            start = checkpointer.restore()
            assert run.step == start or not start
            if bad:
                tensor = run.model.large.data if bad == "parameter" else run.moment("bias")
                tensor[-1] = NAN if bad == "parameter" else INF
            for step, loss in enumerate(losses, start + 1):
                run.model.weight.data.fill_(step)
                if math.isnan(loss):
                    run.model.large.data[-1] = NAN
                checkpointer.step(step, {"loss": torch.tensor(loss), "lr": 0.1})
    messages = [str(each.message) for each in caught]
    return start, [each for each in messages if "bit for bit" not in each and "KeepBest" not in each]


def marks(root):
    """What is not finite in each checkpoint, by step."""
    return {entry.step: entry.nonfinite for entry in Catalog(root).complete()}


def events(root, name):
    return [event for event in read_journal(journal_path(root))[0] if event["event"] == name]


@pytest.mark.parametrize("dtype", FLOATS)
def test_it_agrees_with_torch_wherever_a_number_is(dtype):
    """On all numbers there are of one byte or two, and on those at the limits of larger ones."""

    def check(numbers):
        return is_finite(memoryview(numbers.view(torch.uint8).numpy()).cast("B"), dtype)

    kind = getattr(torch, dtype)
    limits = [torch.finfo(kind).max, torch.finfo(kind).min, torch.finfo(kind).tiny, 0.0, -0.0]
    numbers = torch.tensor([*limits, NAN, -NAN], dtype=kind)
    if dtype != "float8_e4m3fn":
        numbers = torch.cat([numbers, torch.tensor([INF, -INF], dtype=kind)])
    for number, is_good in zip(numbers, numbers.to(torch.complex128).isfinite().tolist()):
        for place in (0, 22, 44):
            among = torch.tensor(limits * 9, dtype=kind)
            among[place] = number
            assert check(among) == is_good, (number, place)
    if (bits := kind.itemsize * 8) <= 16:
        every = torch.from_numpy(np.arange(2**bits, dtype=f"u{bits // 8}").view(f"i{bits // 8}")).view(kind)
        assert [check(every[i : i + 1]) for i in range(2**bits)] == every.to(torch.float64).isfinite().tolist()
    if kind.is_complex:
        assert not check(torch.tensor([0j, complex(1, NAN)], dtype=kind))


@pytest.mark.parametrize(
    ("loss", "bad", "found", "options"),
    [
        (0.5, "parameter", "tensor model.large", {"overlap": True}),
        (0.5, "optimizer", "tensor optimizer.state.bias.exp_avg_sq", {"async_save": False}),
        (NAN, "", "metric loss; tensor model.large", {}),
    ],
)
def test_a_save_that_is_not_finite_is_marked(tmp_path, loss, bad, found, options):
    train(tmp_path, 0.5, **options)
    _, told = train(tmp_path, loss, bad=bad, **options)
    assert marks(tmp_path) == {1: "", 2: found}, "neither the mask nor the history marks the first"
    (line,) = told
    assert line.startswith(f"the checkpoint of step 2 is not finite (NaN or infinity in {found.rpartition('; ')[2]})")
    assert [event["step"] for event in events(tmp_path, "nonfinite")] == [2]


@pytest.mark.parametrize(
    "retention", [ckptman.KeepLast(2), ckptman.KeepBest("lr"), ckptman.KeepLast(1) & ckptman.policies.AtMost(bytes=1)]
)
def test_no_rule_deletes_the_newest_finite_one_and_a_restore_goes_back_to_it(tmp_path, retention, capsys):
    train(tmp_path, 0.5, 0.4, 0.3, NAN, NAN, NAN, NAN, retention=retention)
    assert {3, 7} <= marks(tmp_path).keys()
    assert main(["prune", str(tmp_path), "--keep-last", "1"]) == 0
    assert "newest finite" in capsys.readouterr().out
    assert marks(tmp_path).keys() == {3, 7}
    start, told = train(tmp_path)
    assert start == 3
    assert told == [
        "skipping the checkpoint of step 7: NaN or infinity in tensor model.large. The run goes back to step 3, the "
        'newest that is finite. restore(step=7) loads the newest all the same, and nonfinite="ignore" always does'
    ]
    refused = events(tmp_path, "restore_refused")
    assert [(event["step"], event["reason"]) for event in refused] == [(7, "not finite: tensor model.large")]
    train(tmp_path, 0.2, retention=ckptman.KeepLast(1))
    assert marks(tmp_path) == {4: ""}, "once there is a newer finite one, the rules decide again"


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("nonfinite", ["keep", "refuse"])
def test_a_metric_marks_and_decides_nothing_but_the_best(tmp_path, value, nonfinite, capsys):
    """As of a validation loss until there is one."""
    with (
        warnings.catch_warnings(record=True) as caught,
        ckptman.Checkpointer(tmp_path, Run().state, save_policy=1, retention=1, nonfinite=nonfinite) as checkpointer,
    ):
        warnings.simplefilter("always")
        for step in (1, 2, 3):
            checkpointer.step(step, {"val_loss": value})
    told = [each for each in caught if "the metric 'val_loss' is NaN" in str(each.message)]
    assert [each.filename for each in told] == [__file__] * math.isnan(value)
    assert marks(tmp_path) == {3: "metric val_loss"}
    assert main(["list", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "complete, not finite: metric val_loss" in out
    assert "goes back" not in out
    with ckptman.Checkpointer(tmp_path, Run().state) as checkpointer:
        assert checkpointer.restore() == 3


def test_a_parameter_that_is_frozen_is_looked_at_too(tmp_path):
    run = Run()
    run.model.bias.requires_grad_(False).data[0] = NAN
    with ckptman.Checkpointer(tmp_path, run.state, deadline=None) as checkpointer:
        checkpointer.save(1)
    assert marks(tmp_path) == {1: "tensor model.bias"}


def test_one_that_diverges_from_the_same_step_again_says_so(tmp_path):
    train(tmp_path, 0.5, NAN)
    _, told = train(tmp_path, NAN, NAN)
    assert "It had gone on" not in told[0]
    start, told = train(tmp_path)
    assert start == 1
    assert "skipping the checkpoint of step 3 and 1 before it" in told[0]
    assert "It had gone on from step 1 before: expect the same unless something is changed" in told[0]


def test_the_best_is_none_whose_parameters_are_not_finite(tmp_path):
    train(tmp_path, 0.5, 0.4)
    train(tmp_path, 0.1, bad="parameter")
    assert marks(tmp_path)[3] == "tensor model.large"
    plan = ckptman.policies.retention_plan.plan(
        [each.record() for each in Catalog(tmp_path).complete()], ckptman.KeepBest("loss")
    )
    assert [(each.record.step, each.keep) for each in plan] == [(1, False), (2, True), (3, True)]
    assert plan[1].reasons == ("newest finite", "keep best 1 by loss (min): 0.4")
    assert plan[2].reasons == ("newest",)


def test_where_none_is_finite_the_newest_is_restored_with_a_warning(tmp_path):
    train(tmp_path, NAN, NAN)
    start, told = train(tmp_path)
    assert start == 2
    assert told[0].startswith(f"{tmp_path}: no checkpoint is finite (step 2: NaN or infinity in tensor model.large)")


def test_one_that_is_named_is_loaded_and_a_damaged_finite_one_leads_to_the_one_before(tmp_path):
    train(tmp_path, 0.5, 0.4, NAN)
    run = Run()
    with ckptman.Checkpointer(tmp_path, run.state, deadline=None) as checkpointer:
        assert checkpointer.restore(step=3) == 3
    spoil(tmp_path, 2)
    assert train(tmp_path)[0] == 1, "not the newest one, which is not finite"
    shutil.rmtree(Catalog(tmp_path).entry(1).path)
    start, told = train(tmp_path)
    assert start == 3, "which is better than nothing"
    assert "no other checkpoint is finite, so the run goes on from step 3 all the same" in told[-1]
    assert "(NaN or infinity in tensor model.large)" in told[-1]


def test_a_finite_one_that_cannot_be_fetched_now_is_no_reason_to_go_on_without_it(tmp_path, monkeypatch):
    train(tmp_path, 0.5, NAN)
    monkeypatch.setattr(Entry, "in_folder", property(lambda self: self.step != 1))
    trouble = [RootError(5, "the tier is away"), CorruptError("a block of it is not what was saved")]
    monkeypatch.setattr(Restorer, "_fetch", lambda self, entry: trouble.pop(0))
    with pytest.raises(RootError, match="the tier is away"):
        train(tmp_path)
    start, told = train(tmp_path)
    assert start == 2
    assert "no other checkpoint is finite, so the run goes on from step 2" in told[-1]


def spoil(root, step):
    data = Catalog(root).entry(step).path / "__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))


def test_a_tier_that_is_away_may_have_a_finite_one(tmp_path):
    root, tier = tmp_path / "root", tmp_path / "tier"
    tiers = [ckptman.Tier(tier)]
    train(root, 0.5, NAN, tiers=tiers)
    spoil(root, 1)
    tier.rename(tmp_path / "away")
    with pytest.raises(CorruptError, match="no checkpoint is good"):
        train(root, tiers=tiers)
    shutil.rmtree(Catalog(root).entry(1).path)
    with pytest.raises(NotFoundError, match="tier"):
        train(root, tiers=tiers)
    (tmp_path / "away").rename(tier)
    assert train(root, tiers=tiers)[0] == 1


def test_a_suspect_that_is_finite_is_no_reason_to_go_on_from_nan(tmp_path, monkeypatch):
    train(tmp_path, 0.5, 0.4, NAN)
    spoil(tmp_path, 1)
    monkeypatch.setattr(RunSession, "suspects", lambda self: {2: "two runs crashed behind it"})
    with pytest.raises(CorruptError, match="no checkpoint is good"):
        train(tmp_path)


def test_nobody_looks_where_that_is_not_wanted(tmp_path):
    options = {"nonfinite": "ignore", "retention": ckptman.KeepLast(1)}
    train(tmp_path, 0.5, NAN, bad="parameter", **options)
    assert marks(tmp_path) == {2: ""}
    manifest = json.loads((Catalog(tmp_path).entry(2).path / "manifest.json").read_text())
    assert "nonfinite" not in manifest, "as in checkpoints of before"
    train(tmp_path, NAN)
    assert train(tmp_path, nonfinite="ignore") == (3, []), "nor does a restore pass over what others have marked"


@pytest.mark.parametrize("is_async", [True, False])
def test_a_save_that_is_refused_leaves_nothing_and_the_run_may_go_on(tmp_path, is_async):
    run = Run()
    options = {"save_policy": 1, "nonfinite": "refuse", "async_save": is_async}
    with ckptman.Checkpointer(tmp_path, run.state, deadline=None, **options) as checkpointer:
        checkpointer.step(1, {"loss": 0.5})
        checkpointer.wait()
        run.model.large.data[-1] = NAN
        with pytest.raises(CommitError, match=r"NaN or infinite: tensor model\.large") as caught:
            checkpointer.step(2)
            checkpointer.wait()
        remedy = 'Earlier checkpoints are untouched; go back to one of them with restore(), or say nonfinite="keep"'
        assert remedy in str(caught.value)
        assert marks(tmp_path) == {1: ""}
        assert not [each for each in tmp_path.iterdir() if "tmp" in each.name]
        run.model.large.data[-1] = 1.0
        checkpointer.step(3, {"loss": 0.4})
    assert marks(tmp_path) == {1: "", 3: ""}


def test_an_argument_that_is_none_of_the_three(tmp_path):
    with pytest.raises(ConfigError, match='nonfinite is "keep", "refuse" or "ignore", not \'warn\''):
        ckptman.Checkpointer(tmp_path, Run().state, nonfinite="warn")


def test_it_is_shown_wherever_checkpoints_are(tmp_path, capsys):
    train(tmp_path, 0.5, 0.4)
    train(tmp_path, NAN, bad="parameter")
    assert main(["list", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "complete, not finite: metric loss; tensor model.large" in out
    assert "The newest is not finite: a restore goes back to step 2." in out
    assert main(["list", str(tmp_path), "--json"]) == 0
    found = [each["nonfinite"] for each in json.loads(capsys.readouterr().out)["checkpoints"]]
    assert found == [*[{"metrics": [], "tensors": []}] * 2, {"metrics": ["loss"], "tensors": ["model.large"]}]
    assert main(["verify", str(tmp_path)]) == 0
    assert "remark: NaN or infinity in metric loss; tensor model.large, as it was saved" in capsys.readouterr().out
    assert main(["verify", str(tmp_path), "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert report["nonfinite"] == {"metrics": ["loss"], "tensors": ["model.large"]}
    assert main(["show", str(tmp_path)]) == 0
    assert "not finite     metric loss; tensor model.large" in capsys.readouterr().out


def sharded(root, nonfinite):
    """Save twice, with a NaN in the shard of the last rank; what was raised, and what is restored afterwards."""
    app = App(mesh=(dist.get_world_size(),))
    raised = []
    warnings.simplefilter("ignore")
    try:
        with ckptman.Checkpointer(root, app.state, deadline=None, nonfinite=nonfinite) as checkpointer:
            app.train_step()
            checkpointer.save(1)
            checkpointer.wait()
            if dist.get_rank() == dist.get_world_size() - 1:
                app.model[0].weight.detach().to_local().fill_(NAN)
            checkpointer.save(2)
    except CommitError as error:
        raised.append(f"{error.rank}: {error.cause}")
    with ckptman.Checkpointer(root, app.state, deadline=None) as checkpointer:
        restored = checkpointer.restore()
    return raised, restored


@pytest.mark.parametrize("nonfinite", ["keep", "refuse"])
def test_a_shard_of_one_rank_counts_for_all_ranks(tmp_path, nonfinite):
    told = ["1: FloatingPointError: NaN or infinite: tensor model.0.weight"] if nonfinite == "refuse" else []
    assert run_ranks(2, sharded, tmp_path, nonfinite, fresh=True) == [(told, 1)] * 2
    assert marks(tmp_path) == ({1: ""} if told else {1: "", 2: "tensor model.0.weight"})


LARGE_ELEMENTS = 3 * BLOCK_BYTES // 4 + 5
"""Elements of float32: three blocks of a data file and a bit."""


class StaleRun:
    """A model with large and small parameters and a buffer, among an optimizer's state and plain values."""

    def __init__(self, *, optimizer=True, lr=0.1):
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.first = nn.Parameter(torch.randn(7))
        self.model.large = nn.Parameter(torch.randn(LARGE_ELEMENTS))
        self.model.last = nn.Parameter(torch.randn(3, 5))
        self.model.register_buffer("mean", torch.zeros(9))
        self.state = {"before": torch.zeros(11), "model": self.model, "counter": 0}
        if optimizer:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
            self.state["optimizer"] = self.optimizer
        self.state["rng"] = ckptman.RNGState()

    def go_on(self):
        """What changes at each step of any run, trained or not."""
        self.state["counter"] += 1
        self.state["before"] += 1
        self.model.mean += 1
        torch.rand(3)

    def train(self):
        self.go_on()
        self.model.zero_grad()
        sum(each.square().sum() for each in self.model.parameters()).backward()
        self.optimizer.step()

    def cache(self):
        """From now on the state dict of the model is a copy that is made once."""
        kept = {}

        def cached(module, state, prefix, _):
            for name in list(state) if not prefix else []:
                if name != "mean":
                    state[name] = kept.setdefault(name, state[name].detach().clone())

        self.model.register_state_dict_post_hook(cached)


def stale_events(root):
    events, _ = read_journal(journal_path(root))
    return [event for event in events if event["event"] == "stale"]


@contextlib.contextmanager
def told():
    """The texts of the warnings inside."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught]


def save_after(root, state, *changes, **options):
    """Save at steps 1, 2, 3..., each after one of the changes. The steps of the saves that were stale."""
    with told(), ckptman.Checkpointer(root, state, deadline=None, **options) as checkpointer:
        checkpointer.restore()
        for step, change in enumerate(changes, 1):
            change()
            checkpointer.save(step)
    assert len(Catalog(root).complete()) == len(changes), "a stale save is a save"
    return [event["step"] for event in stale_events(root)]


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"async_save": False}])
def test_weights_that_are_saved_from_a_cached_copy(tmp_path, options):
    run = StaleRun()
    run.cache()
    policy = ckptman.EverySteps(2)
    with (
        pytest.warns(RuntimeWarning) as caught,
        ckptman.Checkpointer(tmp_path, run.state, save_policy=policy, deadline=None, **options) as checkpointer,
    ):
        for step in range(1, 9):
            run.train()
            checkpointer.step(step)
    assert [str(each.message) for each in caught] == [
        "the checkpoint of step 4 has the parameters of that of step 2, bit for bit (model.large, model.last, "
        "model.first), although 2 optimizer steps were made since. Is a copy saved that training does not update, or "
        "does the optimizer update other tensors than those of the model? `ckptman diff` shows what does change"
    ], "it is told once for saves that follow each other"
    events = stale_events(tmp_path)
    assert [(event["previous_step"], event["step"]) for event in events] == [(2, 4), (4, 6), (6, 8)]
    assert events[0]["count"] == 3
    assert events[0]["updates"] == 2
    assert events[0]["names"] == ["model.large", "model.last", "model.first"]
    assert [entry.step for entry in Catalog(tmp_path).complete()] == [2, 4, 6, 8]


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"async_save": False}])
def test_a_run_that_trains_is_not_stale(tmp_path, options):
    run = StaleRun()
    assert save_after(tmp_path, run.state, *[run.train] * 4, **options) == []


def test_one_element_of_any_parameter_is_enough_and_nothing_else_counts(tmp_path):
    """Wherever a parameter lies in the file: its first and its last element, and those at the borders of blocks."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    sizes = [*random.Random(seed).choices(range(1, 40_000), k=7), LARGE_ELEMENTS]
    model, other = nn.Module(), {}
    for place, size in enumerate(sizes):
        if place % 2:
            setattr(model, f"p{place}", nn.Parameter(torch.zeros(size)))
        else:
            other[f"o{place}"] = torch.zeros(size)
            model.register_buffer(f"b{place}", torch.zeros(size))
    # Names are sorted where ranks share them, so others come before, after and between.
    state = {"a": other, "model": model, "z": {name: each.clone() for name, each in other.items()}, "n": 0}

    def rest():
        for each in (*state["a"].values(), *state["z"].values(), *model.buffers()):
            each += 1
        state["n"] += 1

    changes = [rest]
    for parameter in model.parameters():
        for place in {0, -1, *(at for at in (BLOCK_BYTES // 4, BLOCK_BYTES // 8) if at < parameter.numel())}:
            changes.append(lambda element=parameter.data[place : place + 1 or None]: (rest(), element.add_(1)))
    assert save_after(tmp_path, state, *changes, rest) == [len(changes) + 1]


def test_what_no_optimizer_updates_does_not_count(tmp_path):
    run = StaleRun()
    for parameter in run.model.parameters():
        parameter.requires_grad_(False)
    run.model.adapter = nn.Parameter(torch.ones(2))
    run.optimizer = torch.optim.AdamW([run.model.adapter], lr=0.1)
    run.state["optimizer"] = run.optimizer
    run.train()

    def thaw():
        run.model.large.data += 1

    assert save_after(tmp_path, run.state, run.train, run.train, thaw) == [3]
    assert stale_events(tmp_path)[0]["names"] == ["model.adapter"]


def test_a_module_without_an_optimizer(tmp_path):
    run = StaleRun(optimizer=False)
    assert save_after(tmp_path, run.state, run.go_on, run.go_on) == [2]
    assert stale_events(tmp_path)[0]["updates"] is None


def test_a_frozen_module_and_none_at_all(tmp_path):
    run = StaleRun(optimizer=False)
    run.model.requires_grad_(False)
    for name, state in {"frozen": run.state, "none": {"x": {"w": torch.ones(4)}, "n": 1}}.items():
        assert save_after(tmp_path / name, state, run.go_on, run.go_on) == []


def test_steps_that_were_counted_and_not_made(tmp_path):
    run = StaleRun()
    run.train()
    with told() as texts, ckptman.Checkpointer(tmp_path, run.state, deadline=None) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2)
    assert len(texts) == 1
    assert "no optimizer step was made since" in texts[0]
    assert stale_events(tmp_path)[0]["updates"] == 0


def test_a_learning_rate_of_zero_changes_nothing_and_is_no_alarm(tmp_path):
    """A warm-up begins at zero: its first step leaves the parameters as they were."""
    run = StaleRun(lr=1.0)
    run.train()
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: min(1.0, step / 10))
    assert run.optimizer.param_groups[0]["lr"] == 0

    def step():
        run.train()
        schedule.step()

    assert save_after(tmp_path, run.state, lambda: None, step, step, step) == []


def test_the_same_step_saved_again(tmp_path):
    run = StaleRun()
    run.train()
    with ckptman.Checkpointer(tmp_path, run.state, deadline=None) as checkpointer:
        checkpointer.save(5)
        checkpointer.save(5)
        checkpointer.save(3)
    assert stale_events(tmp_path) == []


def test_told_again_after_one_that_was_fresh(tmp_path):
    run = StaleRun()
    run.train()
    with told() as texts, ckptman.Checkpointer(tmp_path, run.state, deadline=None) as checkpointer:
        for step, change in enumerate([run.train, run.go_on, run.go_on, run.train, run.go_on], 1):
            change()
            checkpointer.save(step)
    assert [text.split(" has ")[0] for text in texts] == ["the checkpoint of step 2", "the checkpoint of step 5"]
    assert [event["step"] for event in stale_events(tmp_path)] == [2, 3, 5]


def test_after_a_resume_there_is_nothing_to_compare_with(tmp_path):
    run = StaleRun()
    run.train()
    assert save_after(tmp_path, run.state, run.train) == []
    with ckptman.Checkpointer(tmp_path, run.state, deadline=None) as checkpointer:
        assert checkpointer.restore() == 1
        checkpointer.save(2)
        run.train()
        checkpointer.save(3)
    assert stale_events(tmp_path) == []


def test_what_failed_to_be_saved_is_not_compared_with(tmp_path, monkeypatch):
    def failing(*_):
        raise OSError("no space")

    def fail(step):
        with monkeypatch.context() as patched, pytest.raises(ckptman.CommitError):
            patched.setattr(Draft, "commit", failing)
            checkpointer.save(step)

    run = StaleRun()
    run.train()
    first = run.model.first.data
    before = first.clone()
    with told(), ckptman.Checkpointer(tmp_path, run.state, deadline=None, async_save=False) as checkpointer:
        checkpointer.save(1)
        first += 1
        fail(2)
        first += 1
        checkpointer.save(3)
        first.copy_(before)
        fail(4)
        checkpointer.save(5)
        assert stale_events(tmp_path) == []
        first += 1
        fail(6)
        first.copy_(before)
        checkpointer.save(7)
    assert [(event["previous_step"], event["step"]) for event in stale_events(tmp_path)] == [(5, 7)]


class Marked(torch.Tensor):
    """A tensor of a class of its own, which is written as a pickle."""


def test_parameters_of_a_class_of_their_own(tmp_path):
    model = nn.Module()
    model.marked = nn.Parameter(torch.ones(5).as_subclass(Marked))
    assert type(model.marked) is Marked
    state = {"model": model, "n": "a"}

    def change():
        model.marked.data += 1

    def rest():
        state["n"] += "a value that gets longer"

    with torch.serialization.safe_globals([Marked]):
        assert save_after(tmp_path, state, change, change, rest, change) == [3]


def test_a_check_that_fails_fails_no_save(tmp_path, monkeypatch):
    def broken(*_):
        raise ValueError("broken")

    run = StaleRun()
    run.train()
    with monkeypatch.context() as patched:
        patched.setattr(save_checks, "_find_parameters", broken)
        assert save_after(tmp_path / "one", run.state, run.train, run.train) == []
    monkeypatch.setattr("ckptman.engine.saving.save_checks._digest_of", broken)
    assert save_after(tmp_path / "two", run.state, run.train, run.train) == []


def test_a_warning_that_is_an_error_fails_no_save(tmp_path):
    run = StaleRun()
    run.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ckptman.Checkpointer(tmp_path, run.state, deadline=None, async_save=False) as checkpointer:
            checkpointer.save(1)
            checkpointer.save(2)
    assert len(Catalog(tmp_path).complete()) == 2
    assert len(stale_events(tmp_path)) == 1


def save_sharded(root, mesh, changes):
    """Each change names the ranks that change an element of their shard. The texts of the warnings of this rank."""
    import torch.distributed as dist

    app = App(mesh)
    if mesh:  # without, each rank would train a model of its own
        app.train_step()
    with told() as texts, ckptman.Checkpointer(root, app.state, deadline=None) as checkpointer:
        for step, ranks in enumerate(changes, 1):
            app.position.next_sample += 1
            if dist.get_rank() in ranks:
                weight = app.model[0].weight.data
                (weight.to_local() if mesh else weight).view(-1)[0] += 1
            checkpointer.save(step)
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2,), (1, 2)])
def test_a_change_on_one_rank_is_a_change(tmp_path, mesh):
    texts = run_ranks(2, save_sharded, str(tmp_path), mesh, [[0, 1], [1], [0], [], [0, 1]])
    assert [event["step"] for event in stale_events(tmp_path)] == [4]
    assert stale_events(tmp_path)[0]["count"] == 3
    assert [len(each) for each in texts] == [1, 0], "the leader tells it"


@pytest.mark.slow
def test_replicas_share_the_work(tmp_path):
    """As with DDP: each parameter is written by one of the ranks."""
    run_ranks(2, save_sharded, str(tmp_path), None, [[0, 1], [0, 1], [], []])
    assert [event["step"] for event in stale_events(tmp_path)] == [3, 4]
    assert stale_events(tmp_path)[0]["count"] == 3
