"""A save whose parameters are those of the save before is told, at once; one that trained is not."""

import contextlib
import random
import warnings

import pytest
import torch
from torch import nn

import ckptman
from ckptman.engine.saving import stale_saves
from ckptman.engine.saving.draft import Draft
from ckptman.runtime.journal import read_journal
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.format.paths import journal_path
from ckptman.storage.io.checksums import BLOCK_BYTES
from tests.helpers.apps import App
from tests.helpers.ranks import run_ranks

LARGE = 3 * BLOCK_BYTES // 4 + 5
"""Elements of float32: three blocks of a data file and a bit."""


class Run:
    """A model with large and small parameters and a buffer, among an optimizer's state and plain values."""

    def __init__(self, *, optimizer=True, lr=0.1):
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.first = nn.Parameter(torch.randn(7))
        self.model.large = nn.Parameter(torch.randn(LARGE))
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
    run = Run()
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
    run = Run()
    assert save_after(tmp_path, run.state, *[run.train] * 4, **options) == []


def test_one_element_of_any_parameter_is_enough_and_nothing_else_counts(tmp_path):
    """Wherever a parameter lies in the file: its first and its last element, and those at the borders of blocks."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    sizes = [*random.Random(seed).choices(range(1, 40_000), k=7), LARGE]
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
    run = Run()
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
    run = Run(optimizer=False)
    assert save_after(tmp_path, run.state, run.go_on, run.go_on) == [2]
    assert stale_events(tmp_path)[0]["updates"] is None


def test_a_frozen_module_and_none_at_all(tmp_path):
    run = Run(optimizer=False)
    run.model.requires_grad_(False)
    for name, state in {"frozen": run.state, "none": {"x": {"w": torch.ones(4)}, "n": 1}}.items():
        assert save_after(tmp_path / name, state, run.go_on, run.go_on) == []


def test_steps_that_were_counted_and_not_made(tmp_path):
    run = Run()
    run.train()
    with told() as texts, ckptman.Checkpointer(tmp_path, run.state, deadline=None) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2)
    assert len(texts) == 1
    assert "no optimizer step was made since" in texts[0]
    assert stale_events(tmp_path)[0]["updates"] == 0


def test_a_learning_rate_of_zero_changes_nothing_and_is_no_alarm(tmp_path):
    """A warm-up begins at zero: its first step leaves the parameters as they were."""
    run = Run(lr=1.0)
    run.train()
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: min(1.0, step / 10))
    assert run.optimizer.param_groups[0]["lr"] == 0

    def step():
        run.train()
        schedule.step()

    assert save_after(tmp_path, run.state, lambda: None, step, step, step) == []


def test_the_same_step_saved_again(tmp_path):
    run = Run()
    run.train()
    with ckptman.Checkpointer(tmp_path, run.state, deadline=None) as checkpointer:
        checkpointer.save(5)
        checkpointer.save(5)
        checkpointer.save(3)
    assert stale_events(tmp_path) == []


def test_told_again_after_one_that_was_fresh(tmp_path):
    run = Run()
    run.train()
    with told() as texts, ckptman.Checkpointer(tmp_path, run.state, deadline=None) as checkpointer:
        for step, change in enumerate([run.train, run.go_on, run.go_on, run.train, run.go_on], 1):
            change()
            checkpointer.save(step)
    assert [text.split(" has ")[0] for text in texts] == ["the checkpoint of step 2", "the checkpoint of step 5"]
    assert [event["step"] for event in stale_events(tmp_path)] == [2, 3, 5]


def test_after_a_resume_there_is_nothing_to_compare_with(tmp_path):
    run = Run()
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

    run = Run()
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

    run = Run()
    run.train()
    with monkeypatch.context() as patched:
        patched.setattr(stale_saves, "_find", broken)
        assert save_after(tmp_path / "one", run.state, run.train, run.train) == []
    monkeypatch.setattr("ckptman.engine.saving.stale_saves._digest_of", broken)
    assert save_after(tmp_path / "two", run.state, run.train, run.train) == []


def test_a_warning_that_is_an_error_fails_no_save(tmp_path):
    run = Run()
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
