"""Runs of Lightning's Trainer, ended anywhere: they end as the run that nobody ended, loss by loss."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from xxhash import xxh3_128_hexdigest

import ckptman
from ckptman.engine.state.step_record import StepRecorder
from tests.helpers.ranks import run_ranks, start_ranks

SAMPLES, EPOCHS, ACCUMULATED = 47, 3, 2

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pl = pytest.importorskip("lightning.pytorch")
    torchmetrics = pytest.importorskip("torchmetrics")
    from ckptman.integrations.lightning import CkptmanCallback

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning",
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
)


class Noisy(Dataset[torch.Tensor]):
    """Draws for each sample, and tells which one it is in the first number."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([float(index), random.random(), float(torch.rand(())), index / SAMPLES])


@dataclass
class Plan:
    """What happens to a run: at a batch (counted in this process) it kills itself, gets a signal, or raises."""

    at: int | None = None
    how: signal.Signals | type[Exception] = signal.SIGTERM
    computed: dict[str, str] = field(default_factory=dict)
    """What was computed for each batch."""
    batches: int = 0

    def batch(self, key, told):
        self.computed[key] = told
        self.batches += 1
        if self.batches == self.at:
            if isinstance(self.how, signal.Signals):
                os.kill(os.getpid(), self.how)
            else:
                raise self.how(key)


class Model(pl.LightningModule):
    """Dropout, a schedule by step and one that looks at what validation found."""

    def __init__(self, plan):
        super().__init__()
        self.plan = plan
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        samples = torch.cat(list(batch.values())) if isinstance(batch, dict) else batch
        loss = self.layers(samples).square().mean()
        told = f"{loss.item().hex()} {samples[:, 0].int().tolist()} {self.trainer.global_step}"
        self.plan.batch(f"{self.current_epoch}/{batch_idx}", told)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layers(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 0  # has the loaders made, as in every second script
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, {"scheduler": plateau, "monitor": "val_loss"}]


class Adversarial(Model):
    """Two optimizers by hand, one of them at every second batch."""

    def __init__(self, plan):
        super().__init__(plan)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for number, optimizer in enumerate(self.optimizers()):
            if number and batch_idx % 2:
                continue
            loss = self.layers(batch).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.plan.batch(f"{self.current_epoch}/{batch_idx}", f"{loss.item().hex()} {self.trainer.global_step}")

    def configure_optimizers(self):
        return [torch.optim.AdamW(self.layers[0].parameters(), 0.01), torch.optim.SGD(self.layers[3].parameters(), 0.1)]


class Looking(Model):
    """Looks at the training data while it is set up."""

    def configure_optimizers(self):
        _ = self.trainer.estimated_stepping_batches
        batch = next(iter(self.trainer.train_dataloader))
        assert len(batch)
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Largest(torchmetrics.Metric):
    """Has states with names that a metric may give, and is never reset."""

    def __init__(self):
        super().__init__()
        self.add_state("count", torch.tensor(0))
        self.add_state("updates", torch.tensor(0.0))

    def update(self, value):
        self.count += 1
        self.updates = torch.maximum(self.updates, value.detach())

    def compute(self):
        return self.count + self.updates


class Averaging(Model):
    """Logs averages over epochs. They are known in the epoch that follows."""

    def __init__(self, plan):
        super().__init__(plan)
        self.mean, self.list, self.largest = torchmetrics.MeanMetric(), torchmetrics.CatMetric(), Largest()

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch).square().mean()
        known = sorted(self.trainer.callback_metrics.items())
        averages = {name: each.item().hex() for name, each in known if "epoch" in name}
        self.largest.update(loss)
        told = f"{loss.item().hex()} {averages} {self.largest.compute().item()!r} of {self.largest.update_count}"
        self.plan.batch(f"{self.current_epoch}/{batch_idx}", told)
        self.log("loss", loss, on_step=True, on_epoch=True)
        for reduce in ("sum", "max"):
            self.log(f"epoch_{reduce}", loss, on_step=False, on_epoch=True, reduce_fx=reduce)
        if batch_idx % 5 == 0:
            self.log("epoch_seldom", loss, on_step=False, on_epoch=True)
        self.mean(loss)
        self.log("epoch_mean", self.mean, on_step=False, on_epoch=True)
        self.list(loss)
        return loss

    def on_train_epoch_end(self):
        self.log("epoch_list", self.list.compute().sum())
        self.list.reset()


class Counting(pl.LightningDataModule):
    """Counts what it transferred, and saves that."""

    seen = 0

    def train_dataloader(self):
        return {"a": DataLoader(Noisy(), 3, shuffle=True), "b": DataLoader(Noisy(), 8, shuffle=True)}

    def val_dataloader(self):
        return validation()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.seen += 1
        return batch

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Hooked(Model):
    """Saves something by hooks."""

    losses: float = 0.0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses += loss.item()
        return loss

    def on_save_checkpoint(self, checkpoint):
        checkpoint["losses"] = torch.tensor(self.losses, dtype=torch.float64)

    def on_load_checkpoint(self, checkpoint):
        self.losses = checkpoint["losses"].item()


class BeginsEpochs(pl.Callback):
    """Keeps sums of an epoch, and halves the learning rate as it begins."""

    def __init__(self):
        self.epochs, self.steps = 0, 0

    def on_train_epoch_start(self, trainer, module):
        self.epochs, self.steps = self.epochs + 1, 0
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 0.5

    def on_train_batch_end(self, *_):
        self.steps += 1

    def state_dict(self):
        return {"epochs": self.epochs, "steps": self.steps}

    def load_state_dict(self, state):
        self.epochs, self.steps = state["epochs"], state["steps"]


class Summing(Hooked):
    """Its sum, which it saves, and its buffer are of one epoch; and it computes with what each epoch sets."""

    def __init__(self, plan):
        super().__init__(plan)
        self.register_buffer("samples", torch.tensor(0))

    def on_train_epoch_start(self):
        self.losses, self.scale = 0.0, 1 + self.current_epoch
        self.samples.zero_()

    def training_step(self, batch, batch_idx):
        (begins,) = (each for each in self.trainer.callbacks if isinstance(each, BeginsEpochs))
        self.samples += len(batch)
        told = f"{self.losses.hex()} {self.samples} {begins.epochs} {begins.steps}"
        loss = super().training_step(batch, batch_idx) * self.scale
        self.plan.computed[f"{self.current_epoch}/{batch_idx}"] += told
        return loss


class Pruned(Model):
    """Changes its parameters as an epoch begins."""

    def on_train_epoch_start(self):
        with torch.no_grad():
            self.layers[0].weight[0] = 0.0


def validation(persistent=False):
    workers = {"num_workers": 1, "persistent_workers": True} if persistent else {}
    return DataLoader(torch.rand(8, 4, generator=torch.Generator().manual_seed(3)), 4, **workers)


def plain_loader():
    return DataLoader(Noisy(), 3, shuffle=True)


def fit(root, plan=None, model=Model, data=None, callback=None, ckpt_path=None, persistent=False, **options):
    """One attempt of a run; returns the trainer, and the callback."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    module = model(plan or Plan())
    torch.manual_seed(100 + rank)
    random.seed(rank)
    saves = CkptmanCallback(root, **{"save_policy": ckptman.EverySteps(2) | ckptman.OnStop(), **(callback or {})})
    defaults = {
        "max_epochs": EPOCHS,
        "val_check_interval": 0.5,
        "accumulate_grad_batches": ACCUMULATED,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "accelerator": "cpu",
        "devices": world_size,
        "strategy": "ddp" if world_size > 1 else "auto",
    }
    options = {**defaults, **options}
    trainer = pl.Trainer(**{**options, "callbacks": [*options.get("callbacks", ()), saves]})
    if isinstance(data, pl.LightningDataModule):
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    else:
        trainer.fit(module, data if data is not None else plain_loader(), validation(persistent), ckpt_path=ckpt_path)
    return trainer, saves


def digest(trainer):
    """Of all tensors of the model and its optimizers, and the learning rates."""
    tensors = [*trainer.lightning_module.state_dict().values()]
    for optimizer in trainer.optimizers:
        tensors += [each for state in optimizer.state_dict()["state"].values() for each in state.values()]
    tensors = [each for each in tensors if isinstance(each, torch.Tensor)]
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return xxh3_128_hexdigest(b"".join(each.numpy().tobytes() for each in tensors) + repr(rates).encode())


@pytest.fixture
def rng():
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


# ---- in one process: signals and errors ------------------------------------------------------------------------------


def ends_alike(folder, ends, make=dict):
    """Check that a run with these ends computes what the whole one does. `make`: what to call `fit` with, made anew for
    each. Returns both trainers."""
    whole = Plan()
    trainer, saves = fit(folder / "whole", whole, **make())
    assert saves.exit_code == 0
    computed = {}
    for end in [*ends, Plan()]:
        with contextlib.suppress(ArithmeticError):
            again, saves = fit(folder / "cut", end, **make())
            assert saves.exit_code == (75 if end.at is not None and end.batches >= end.at else 0)
        computed |= end.computed
    assert computed == whole.computed
    assert digest(again) == digest(trainer)
    return trainer, again


def test_stopped_and_failed_anywhere(tmp_path, rng):
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    ends = [Plan(rng.randint(3, 12)), Plan(rng.randint(1, 12), ArithmeticError), Plan(rng.randint(1, 12))]
    ends_alike(tmp_path, ends)
    assert handlers == {each: signal.getsignal(each) for each in handlers}


@pytest.mark.slow
@pytest.mark.parametrize("model", [Model, Averaging])
@pytest.mark.parametrize("batch", [15, 16, 17])
def test_stopped_about_the_end_of_an_epoch(tmp_path, batch, model):
    ends_alike(tmp_path, [Plan(batch), Plan(1), Plan(15)], lambda: {"model": model})


def hooked():
    from lightning.pytorch.callbacks import EarlyStopping, WeightAveraging

    return {"model": Hooked, "callbacks": [EarlyStopping("val_loss", patience=9), WeightAveraging()]}


RUNS = {
    "two optimizers by hand": lambda: {"model": Adversarial, "accumulate_grad_batches": 1},
    "looks at its data first": lambda: {"model": Looking},
    "averages over epochs": lambda: {"model": Averaging},
    "persistent workers in validation": lambda: {"persistent": True},
    "a datamodule and two loaders": lambda: {"data": Counting()},
    "hooks and averaged weights": lambda: {**hooked(), "val_check_interval": 1.0},
    "sums of an epoch": lambda: {"model": Summing, "callbacks": [BeginsEpochs()]},
    "epochs cut short and loaders made anew": lambda: {
        "limit_train_batches": 10,
        "reload_dataloaders_every_n_epochs": 1,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_all_kinds_of_runs(tmp_path, name, rng):
    # Not at the very last step: a fit() that has nothing to train calls no on_train_end, which puts averages in place.
    ends = [Plan(3), Plan(rng.randint(1, 12), ArithmeticError), Plan(rng.randint(1, 12))]
    whole, cut = ends_alike(tmp_path, ends, RUNS[name])
    if name == "a datamodule and two loaders":
        assert cut.datamodule.seen == whole.datamodule.seen
    if name == "hooks and averaged weights":
        assert cut.lightning_module.losses == whole.lightning_module.losses
        assert cut.callbacks[1].best_score == whole.callbacks[1].best_score


@pytest.mark.parametrize("batch", [3, 15, 16, 17])
def test_the_start_of_an_epoch_is_no_news_to_what_is_saved(tmp_path, batch):
    ends_alike(tmp_path, [Plan(batch), Plan(2)], RUNS["sums of an epoch"])


def test_parameters_that_the_start_of_an_epoch_changes_are_told(tmp_path):
    for plan in (Plan(5), Plan(2)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fit(tmp_path, plan, Pruned)
        texts = [str(each.message) for each in told if "changes parameters" in str(each.message)]
    assert texts
    assert "on_train_epoch_end()" in texts[0]


@pytest.mark.slow
@pytest.mark.parametrize("is_noted", [True, False])
@pytest.mark.parametrize(
    ("shorter", "longer"),
    [({"max_steps": 5}, {"max_steps": 13}), ({"max_epochs": 1}, {"max_epochs": 2})],
)
def test_a_run_that_is_finished_trains_no_more_unless_it_is_made_longer(
    tmp_path, shorter, longer, is_noted, monkeypatch
):
    def record(_, found, __):
        found.unknown = "it takes too long"

    if not is_noted:
        monkeypatch.setattr(StepRecorder, "_record", record)
    whole, first, none, rest = (Plan() for _ in range(4))
    trainer, _ = fit(tmp_path / "whole", whole, **longer)
    fit(tmp_path / "run", first, **shorter)
    fit(tmp_path / "run", none, **shorter)
    assert not none.computed
    again, _ = fit(tmp_path / "run", rest, **longer)
    assert not first.computed.keys() & rest.computed.keys()
    assert first.computed | rest.computed == whole.computed
    assert digest(again) == digest(trainer)


class Counted(Model):
    """Counts and collects in plain attributes, as many modules do."""

    def __init__(self, plan):
        super().__init__(plan)
        self.width, self.seen, self.losses = 16, 0, []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen += len(batch)
        self.losses.append(loss.item())
        return loss


class CountsSteps(pl.Callback):
    def __init__(self):
        self.steps = 0

    def on_train_batch_end(self, *_):
        self.steps += 1


class KeepsSteps(CountsSteps):
    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_counters_that_are_not_saved_are_named(tmp_path):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(tmp_path / "counted", Plan(9), Counted, callbacks=[CountsSteps(), KeepsSteps()])
        fit(tmp_path / "hooked", Plan(9), Hooked)
    texts = sorted(str(each.message) for each in told if "during training but" in str(each.message))
    named = [text.partition(" change")[0] for text in texts]
    assert named == ["Counted.seen, Counted.losses", "CountsSteps.steps"]
    assert "on_save_checkpoint() and on_load_checkpoint()" in texts[0]
    assert "state_dict(), and take them in load_state_dict()" in texts[1]


def test_persistent_workers_of_the_training_loader_are_no_news(tmp_path):
    loader = DataLoader(Noisy(), 3, shuffle=True, num_workers=1, persistent_workers=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(tmp_path, Plan(4), data=loader, persistent=True)
    assert [str(each.message) for each in told if "persistent_workers" in str(each.message)] == []


@pytest.mark.slow
def test_a_metric_of_validation_belongs_to_one_step(tmp_path):
    for plan in (Plan(17), Plan()):
        policy = {"save_policy": ckptman.EverySteps(4)}
        fit(tmp_path, plan, callback=policy, accumulate_grad_batches=1, val_check_interval=1.0)
    saved = {
        path.parent.name: json.loads(path.read_text())["metrics"] for path in tmp_path.glob("step-*/manifest.json")
    }
    assert all("loss" in metrics for metrics in saved.values())
    assert {int(name[5:]) for name, metrics in saved.items() if "val_loss" in metrics} == {16, 32, 48}


@pytest.mark.slow
def test_the_best_by_a_metric_are_kept(tmp_path):
    fit(tmp_path / "run", callback={"monitor": "val_loss", "save_top_k": 2})
    found = {int(each.name[5:]) for each in (tmp_path / "run").glob("step-*")}
    assert 2 <= len(found) <= 3
    assert max(found) == 24
    with pytest.raises(ckptman.ConfigError, match="validation has logged no such metric, but loss, val_loss"):
        fit(tmp_path / "other", callback={"monitor": "val_los"})


# ---- names -----------------------------------------------------------------------------------------------------------


def test_other_programs_load_the_model_by_its_bare_names(tmp_path):
    trainer, _ = fit(tmp_path / "run", max_steps=4)
    other = Model(Plan())
    ckptman.load({"model": other}, tmp_path / "run/step-0000000004")
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), trainer.lightning_module.parameters()))


# ---- bad input -------------------------------------------------------------------------------------------------------


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self):
        while True:
            yield torch.ones(4)


def test_bad_input_is_refused_and_changes_nothing(tmp_path):
    from lightning.pytorch.callbacks import LearningRateFinder

    saved = str(tmp_path / "some.ckpt")
    fit(tmp_path / "other", max_steps=1)[0].save_checkpoint(saved)
    with pytest.raises(ckptman.ConfigError, match=r"fit\(ckpt_path='.*some.ckpt'\): with a CkptmanCallback"):
        fit(tmp_path / "run", ckpt_path=saved)
    with pytest.raises(ckptman.ConfigError, match="CkptmanCallback cannot save a run with LearningRateFinder"):
        fit(tmp_path / "run", callbacks=[LearningRateFinder()])
    with pytest.raises(ckptman.ConfigError, match="does not know how many batches it has"):
        fit(tmp_path / "run", data=DataLoader(Endless(), 3))
    with pytest.raises(ckptman.ConfigError, match="monitor= and retention= say the same thing"):
        CkptmanCallback(tmp_path / "run", monitor="loss", retention=ckptman.KeepLast(1))
    with pytest.raises(ckptman.ConfigError, match="unexpected keyword argument 'tier'"):
        CkptmanCallback(tmp_path / "run", tier=())
    with pytest.raises(ckptman.ConfigError, match=r"fit\(\) did not run in this process"):
        print(CkptmanCallback(tmp_path / "run").exit_code)
    assert not (tmp_path / "run").exists()


class Foreign:
    """A trainer of another framework."""

    def state_dict(self):
        return {"global_step": 5}

    def load_state_dict(self, state):
        self.global_step = state["global_step"]


def test_a_root_of_another_program_is_refused(tmp_path):
    loader = ckptman.ResumableLoader(plain_loader())
    state = {"model": Model(Plan()), "data": loader, "rng": ckptman.RNGState()}
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters())
    others = {f"lr_scheduler_{number}": Foreign() for number in range(2)}
    for name, more in (("bare", {}), ("hf", {**others, "trainer": Foreign()})):
        with ckptman.Checkpointer(tmp_path / name, {**state, **more}) as checkpointer:
            checkpointer.save(2)
    before = sorted(tmp_path.rglob("step-*"))
    with pytest.raises(ckptman.ConfigError, match="was not saved by a Trainer of Lightning, but by another program"):
        fit(tmp_path / "bare")
    with pytest.raises(ckptman.ConfigError, match="was not saved by a Trainer of Lightning, but by another program"):
        fit(tmp_path / "hf")
    assert sorted(tmp_path.rglob("step-*")) == before
    fit(tmp_path / "lightning", max_steps=2)
    with (
        pytest.raises(ckptman.MismatchError, match="trainer"),
        ckptman.Checkpointer(tmp_path / "lightning", state) as checkpointer,
    ):
        checkpointer.restore()


# ---- in processes that are killed ------------------------------------------------------------------------------------


def train(root, kind, workers, plan):
    """A run that is killed by its plan. What it computes is noted in a file, too, for those that are killed."""
    warnings.simplefilter("ignore")
    loader = DataLoader(Noisy(), 3, shuffle=True, num_workers=workers)
    if kind == "elastic":
        sampler = ckptman.ElasticSampler(SAMPLES, seed=5)
        loader = ckptman.ResumableLoader(DataLoader(Noisy(), 3, sampler=sampler, num_workers=workers))
    with open(Path(root, f"log-{dist.get_rank()}"), "a") as log:

        class Noted(Plan):
            def batch(self, key, told):
                print(f"{key}: {told}", file=log, flush=True)
                super().batch(key, told)

        noted = Noted() if plan is None else Noted(plan.at, signal.SIGKILL)
        callback = {"monitor": "val_loss"} if kind == "elastic" else {}
        trainer, _ = fit(root, noted, data=loader, callback=callback)
    return digest(trainer)


def computed(root, rank):
    """What the run computed for each batch; of one that was computed again after a kill, the last time."""
    lines = (root / f"log-{rank}").read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines)


def check(folder, world_size, kind, workers, kills):
    """Compare a run that is killed so many batches after each start with a whole one. Returns how often it was killed
    before it was finished."""
    whole, cut = folder / "whole", folder / "cut"
    whole.mkdir(parents=True)
    cut.mkdir()
    expected, found, times = run_ranks(world_size, train, str(whole), kind, workers, None), None, 0
    while found is None and times < len(kills):
        with start_ranks(world_size, train, str(cut), kind, workers, Plan(kills[times])) as world:
            if world.join() == [0] * world_size:
                found = world.results()
            else:
                times += 1
    assert (found or run_ranks(world_size, train, str(cut), kind, workers, None)) == expected
    for rank in range(world_size):
        assert computed(cut, rank) == computed(whole, rank)
    return times


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "kind", "workers"), [(1, "plain", 2), (1, "elastic", 0), (2, "plain", 0), (2, "elastic", 2)]
)
def test_killed_twice(tmp_path, world_size, kind, workers, rng):
    check(tmp_path, world_size, kind, workers, [rng.randint(4, 12) for _ in range(2)])


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["plain", "elastic"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_twenty_times(tmp_path, world_size, kind, workers, rng):
    times = 0
    while times < 20:  # in several runs: one is finished before
        kills = [rng.randint(3, 8) for _ in range(20 - times)]
        times += check(tmp_path / str(times), world_size, kind, workers, kills)
