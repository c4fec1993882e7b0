"""The Trainer of Hugging Face, killed at random steps: it ends as the run that nobody killed, loss by loss."""

from __future__ import annotations

import json
import os
import random
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState
from xxhash import xxh3_128_hexdigest

import ckptman
from ckptman.engine.state.step_record import StepRecorder
from ckptman.integrations.huggingface import CkptmanTrainerMixin
from tests.helpers import forkserver
from tests.helpers.ranks import run_ranks, start_ranks

SAMPLES, EPOCHS = 45, 3


class Augmented(Dataset[dict[str, torch.Tensor]]):
    """Draws from all generators for each sample."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return {"x": torch.tensor([float(index), *noise]) / SAMPLES, "labels": torch.tensor([index / SAMPLES])}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x, labels):
        found = self.layers(x)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


class ResumableTrainer(CkptmanTrainerMixin, Trainer):
    """Notes each loss, by the step that it belongs to."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        with open(Path(self.checkpointer.root, f"log-{self.args.process_index}"), "a") as log:
            print(f"{self.state.global_step}/{self._loader.batch}: {loss.item().hex()}", file=log, flush=True)
        return loss


class Dies(TrainerCallback):
    """Ends the process some steps after it began, by a signal."""

    trainer: ResumableTrainer

    def __init__(self, steps, signum):
        self.steps, self.signum = steps, signum

    def on_train_begin(self, args, state, control, **_):
        self.at = state.global_step + self.steps

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.at:
            self.trainer.checkpointer.wait()  # so that the run gets on
            os.kill(os.getpid(), self.signum)


def train(root, workers, die_after, signum):
    """Train, and return a digest of the parameters and the log."""
    warnings.simplefilter("default")
    os.environ["MASTER_ADDR"] = "localhost"  # Accelerate asks for it, and the ranks have met already
    callbacks = [Dies(die_after, signum)] if die_after is not None else []
    trainer = trainer_of(root, callbacks=callbacks, dataloader_num_workers=workers, gradient_accumulation_steps=2)
    trainer.train()
    if trainer.checkpointer.should_stop():
        raise SystemExit(trainer.checkpointer.exit_code)
    return digest(trainer), told(trainer)


def trainer_of(root, kind=ResumableTrainer, *, model=None, data=None, callbacks=(), more=None, **settings):
    """Make a Trainer. `more`: arguments of the Checkpointer."""
    for seed_all in (torch.manual_seed, random.seed, np.random.seed):
        seed_all(0)
    defaults = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 3,
        "learning_rate": 0.01,
        "save_steps": 2,
        "logging_steps": 3,
        "eval_strategy": "epoch",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "output_dir": f"{root}/out",
        "seed": 5,
    }
    extra = {"checkpointer": {"root": root, "deadline": None, **(more or {})}} if kind is not Trainer else {}
    trainer = kind(
        model or Net(),
        TrainingArguments(**{**defaults, **settings}),
        train_dataset=data or Augmented(),
        eval_dataset=Augmented(),
        callbacks=list(callbacks),
        **extra,
    )
    Dies.trainer = trainer
    return trainer


def digest(trainer):
    return xxh3_128_hexdigest(b"".join(each.detach().numpy().tobytes() for each in trainer.model.parameters()))


def told(trainer):
    """What was logged, but for times and for what was logged at the end."""
    times = ("_per_second", "_runtime")
    return [
        {name: value for name, value in each.items() if not name.endswith(times)}
        for each in trainer.state.log_history
        if "train_loss" not in each
    ]


def computed(root, rank):
    """The loss of each batch; of one that was computed again after a kill, the last time."""
    return dict(line.split(": ", 1) for line in (root / f"log-{rank}").read_text().splitlines())


def check(folder, world_size, workers, kills, rng):
    """Compare a run that is killed so often, or until it is finished, with a whole one. Returns how often it was."""
    whole, cut = folder / "whole", folder / "cut"
    whole.mkdir(parents=True)
    cut.mkdir()
    expected, found, killed = run_ranks(world_size, train, str(whole), workers, None, 0), None, 0
    while found is None and killed < kills:
        signum = rng.choice((signal.SIGKILL, signal.SIGTERM))
        with start_ranks(world_size, train, str(cut), workers, rng.randint(1, 6), signum) as world:
            print(signum, codes := world.join())
            if codes == [0] * world_size:
                found = world.results()
            else:
                killed += 1
    assert (found or run_ranks(world_size, train, str(cut), workers, None, 0)) == expected
    for rank in range(world_size):
        assert computed(cut, rank) == computed(whole, rank)
    return killed


@pytest.fixture
def rng():
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_twice(tmp_path, world_size, rng):
    check(tmp_path, world_size, rng.choice((0, 2)), 2, rng)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_twenty_times(tmp_path, world_size, workers, rng):
    killed = 0
    while killed < 20:  # in several runs: one is finished before
        killed += check(tmp_path / str(killed), world_size, workers, 20 - killed, rng)


class Plain(Dataset[dict[str, torch.Tensor]]):
    """The samples of `Augmented`, without noise."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"x": torch.arange(4.0) * index / SAMPLES, "labels": torch.tensor([index / SAMPLES])}


class At(TrainerCallback):
    """Does something after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            self.act(control)


class Halts(At):
    """Ends the training, as early stopping does."""

    def act(self, control):
        control.should_training_stop = True


class Interrupts(At):
    """Asks the process to stop."""

    def act(self, control):
        os.kill(os.getpid(), signal.SIGTERM)


def steps_in(root):
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def checkpoint(root, step):
    return root / f"step-{step:010}"


def test_it_computes_what_the_trainer_computes(tmp_path):
    found = []
    for kind in (Trainer, ResumableTrainer):
        trainer = trainer_of(tmp_path / kind.__name__, kind, data=Plain(), save_strategy="no")
        trainer.train()
        found.append((told(trainer), digest(trainer)))
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody stops."""
    trainer = trainer_of(tmp_path_factory.mktemp("whole"), eval_strategy="steps", eval_steps=4)
    trainer.train()
    return trainer


@pytest.mark.parametrize("at", [4, 15, 17, 45])
def test_a_signal_in_and_between_epochs(tmp_path, whole, at):
    cut = trainer_of(tmp_path, eval_strategy="steps", eval_steps=4, callbacks=[Interrupts(at)])
    cut.train()
    assert cut.checkpointer.exit_code == (75 if at < 45 else 0)  # all steps were done
    again = trainer_of(tmp_path, eval_strategy="steps", eval_steps=4)
    assert again.train().global_step == 45
    assert told(again) == told(whole)
    assert digest(again) == digest(whole)


@pytest.mark.slow
@pytest.mark.leaves("QueueFeederThread")  # of workers that the Trainer keeps
def test_persistent_workers_of_evaluations(tmp_path):
    settings = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "eval_steps": 4}
    settings |= {"eval_strategy": "steps", "data": Plain()}
    whole = trainer_of(tmp_path / "whole", **settings)
    whole.train()
    trainer_of(tmp_path / "cut", callbacks=[Interrupts(17)], **settings).train()
    again = trainer_of(tmp_path / "cut", **settings)
    assert again.train().global_step == 45
    assert [each.get("loss") for each in told(again)] == [each.get("loss") for each in told(whole)]
    assert digest(again) == digest(whole)


def test_steps_limit_and_best_are_those_of_the_arguments(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4, "save_total_limit": 3}
    trainer = trainer_of(tmp_path, load_best_model_at_end=True, learning_rate=0.2, **settings)
    trainer.train()
    evaluated = {each["step"]: each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each}
    best = min(evaluated, key=lambda step: (evaluated[step], -step))
    assert set(steps_in(tmp_path)) == {best, 44, 45}
    assert trainer.state.best_model_checkpoint == str(checkpoint(tmp_path, best))
    saved = {"model": Net()}
    ckptman.load(saved, checkpoint(tmp_path, best))
    for mine, theirs in zip(trainer.model.parameters(), saved["model"].parameters()):
        assert torch.equal(mine, theirs)
    trainer.save_model(str(tmp_path / "final"))
    assert (tmp_path / "final" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("settings", "more", "expected"),
    [
        ({"save_strategy": "epoch"}, {}, [15, 30, 45]),
        ({"save_strategy": "no"}, {}, [45]),
        ({"save_steps": 20}, {}, [20, 40, 45]),
        ({"save_steps": 2}, {"save_policy": ckptman.AtStep(7)}, [7, 45]),
        ({"save_steps": 9}, {"retention": ckptman.KeepLast(1)}, [45]),
        ({"save_steps": 9, "save_total_limit": 2}, {}, [36, 45]),
    ],
)
def test_when_it_saves(tmp_path, settings, more, expected):
    trainer_of(tmp_path, more=more, **settings).train()
    assert steps_in(tmp_path) == expected


def test_the_last_step_is_saved_also_where_steps_take_too_long_to_note(tmp_path, monkeypatch):
    def record(_, found, __):
        found.unknown = "it takes too long"

    monkeypatch.setattr(StepRecorder, "_record", record)
    trainer_of(tmp_path, callbacks=[Halts(7)], save_steps=5).train()
    assert steps_in(tmp_path) == [5, 7]
    trainer_of(tmp_path, save_steps=20).train(resume_from_checkpoint=True)
    assert steps_in(tmp_path) == [5, 7, 20, 40, 45]
    before = checkpoint(tmp_path, 45).stat()
    trainer_of(tmp_path, save_steps=20).train()
    assert checkpoint(tmp_path, 45).stat() == before


def test_a_run_that_has_ended_is_over_unless_it_is_asked_for_more(tmp_path):
    assert trainer_of(tmp_path, callbacks=[Halts(7)]).train().global_step == 7
    assert trainer_of(tmp_path).train().global_step == 7
    assert trainer_of(tmp_path).train(resume_from_checkpoint=True).global_step == 45
    assert trainer_of(tmp_path).train().global_step == 45
    assert trainer_of(tmp_path, num_train_epochs=4).train().global_step == 60
    metrics = json.loads((checkpoint(tmp_path, 60) / "manifest.json").read_text())["metrics"]
    assert "loss" in metrics
    assert "grad_norm" not in metrics, "it is of a step, and not of the checkpoint"


def test_callbacks_get_their_state_back(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
    first = EarlyStoppingCallback(3, early_stopping_threshold=1.0)
    trainer_of(tmp_path, callbacks=[first, Interrupts(5)], **settings).train()
    assert first.early_stopping_patience_counter == 2
    second = EarlyStoppingCallback(3, early_stopping_threshold=1.0)
    assert trainer_of(tmp_path, callbacks=[second], **settings).train().global_step == 8


class Counts(TrainerCallback):
    """Counts steps, as people write it, and keeps what never changes."""

    def __init__(self):
        self.every, self.steps, self.losses = 10, 0, []

    def on_step_end(self, args, state, control, **_):
        self.steps += 1
        self.losses.append(0.5)


class CountsWithState(Counts, ExportableState):
    def state(self):
        return {"args": {}, "attributes": {"steps": self.steps, "losses": self.losses}}


def test_a_callback_whose_counts_are_not_saved_is_named(tmp_path):
    with pytest.warns(RuntimeWarning, match=r"Counts\.steps, Counts\.losses change .*Exportable") as told:
        trainer_of(tmp_path / "bare", callbacks=[Counts(), Interrupts(9)]).train()
    assert len(told) == 1, [str(each.message) for each in told]
    trainer_of(tmp_path / "saved", callbacks=[CountsWithState(), Interrupts(9)]).train()
    resumed = CountsWithState()
    steps = trainer_of(tmp_path / "saved", callbacks=[resumed, Interrupts(12)]).train().global_step
    assert (resumed.steps, len(resumed.losses)) == (steps, steps)


def test_what_a_trainer_of_ones_own_keeps_is_named(tmp_path):
    class Counting(ResumableTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.seen = 0

        def compute_loss(self, *args, **kwargs):
            self.seen += 1
            return super().compute_loss(*args, **kwargs)

    with pytest.warns(RuntimeWarning, match=r"Counting\.seen changes .*checkpointer\['state'\]") as told:
        trainer_of(tmp_path, Counting, callbacks=[Interrupts(9)]).train()
    assert len(told) == 1, [str(each.message) for each in told]


class Epochs(CountsWithState):
    """Counts epochs and the steps of one, with its state, and halves a setting that no schedule sets."""

    def __init__(self):
        super().__init__()
        self.epochs, self.events = 0, []

    def on_epoch_begin(self, args, state, control, optimizer, **_):
        self.epochs, self.steps = self.epochs + 1, 0
        optimizer.param_groups[0]["weight_decay"] = 0.1 + optimizer.param_groups[0]["weight_decay"] * 0.5
        self.events.append("begin")

    def on_epoch_end(self, args, state, control, **_):
        self.events.append("end")

    def on_step_begin(self, args, state, control, optimizer, **_):
        decay = optimizer.param_groups[0]["weight_decay"]
        self.seen[state.global_step] = (self.epochs, self.steps, decay)

    def state(self):
        return {"args": {}, "attributes": {"steps": self.steps, "epochs": self.epochs}}


@pytest.mark.parametrize("at", [1, 17, 30])
def test_an_epoch_begins_once_and_ends_once(tmp_path, monkeypatch, at):
    def run(folder, *callbacks):
        mine = Epochs()
        trainer = trainer_of(folder, callbacks=[mine, *callbacks])
        step = trainer.train().global_step
        return mine.events, digest(trainer), step

    monkeypatch.setattr(Epochs, "seen", whole := {}, raising=False)
    _, expected, _ = run(tmp_path / "whole")
    monkeypatch.setattr(Epochs, "seen", cut := {}, raising=False)
    before, _, stopped = run(tmp_path / "cut", Interrupts(at))
    after, found, _ = run(tmp_path / "cut")
    assert cut == whole
    assert found == expected
    assert before == ["begin", "end"] * (stopped // 15) + ["begin"] * (stopped % 15 > 0), "none ends twice"
    assert after == ["begin", "end"] * (3 - stopped // 15)
    assert run(tmp_path / "cut")[0] == [], "nothing is left"


def test_other_checkpoints_and_folders_are_refused(tmp_path):
    bare = Net()
    state = {"model": bare, "optimizer": torch.optim.AdamW(bare.parameters())}
    with ckptman.Checkpointer(tmp_path / "bare", state, deadline=None) as checkpointer:
        checkpointer.save(3)
    with pytest.raises(ckptman.ConfigError, match=r"not saved by a Trainer.*root of its own"):
        trainer_of(tmp_path / "bare").train()
    assert steps_in(tmp_path / "bare") == [3]
    with pytest.raises(ckptman.ConfigError, match=r"out/checkpoint-5.*by itself\. Leave it out"):
        trainer_of(tmp_path / "new").train(resume_from_checkpoint="out/checkpoint-5")
    assert steps_in(tmp_path / "new") == []


@pytest.mark.parametrize("settings", [{}, {"rot": "x"}, "runs/first"])
def test_settings_without_a_root_are_refused(settings):
    with pytest.raises(ckptman.ConfigError, match=r'dict\(root="runs/first", \.\.\.\)'):
        ResumableTrainer(Net(), checkpointer=settings)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"more": {"save_every": 3}}, "has save_every, which no Checkpointer takes"),
        ({"more": {"state": {"model": Net()}}}, "the state of the Trainer has model"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size.*Remedy"),
        ({"save_only_model": True}, "save_only_model.*Remedy"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint.*Remedy"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, settings, told):
    with pytest.raises(ckptman.ConfigError, match=told):
        trainer_of(tmp_path, **settings).train()


def test_a_loader_without_a_position_is_refused(tmp_path):
    class Own(ResumableTrainer):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, 3)

    with pytest.raises(ckptman.ConfigError, match=r"Own returned a DataLoader.*ckptman\.ResumableLoader"):
        trainer_of(tmp_path, Own).train()


def test_an_iterable_dataset_without_a_length(tmp_path):
    class Endless(IterableDataset[dict[str, torch.Tensor]]):
        def __iter__(self):
            return iter([Plain()[index] for index in range(SAMPLES)])

    settings = {"max_steps": 35, "eval_strategy": "no"}
    whole = trainer_of(tmp_path / "whole", data=Endless(), **settings)
    whole.train()
    for at in (8, 15, 99):
        cut = trainer_of(tmp_path / "cut", data=Endless(), callbacks=[Interrupts(at)], **settings)
        cut.train()
    assert told(cut) == told(whole)
    assert digest(cut) == digest(whole)


def adapted():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["layers.0", "layers.3"], lora_dropout=0.2))


def test_of_adapters_only_what_is_trained_is_saved(tmp_path):
    whole = trainer_of(tmp_path / "whole", model=adapted())
    whole.train()
    trainer_of(tmp_path / "cut", model=adapted(), callbacks=[Interrupts(20)]).train()
    again = trainer_of(tmp_path / "cut", model=adapted())
    again.train()
    assert digest(again) == digest(whole)
    trained = {"model": {"base_model.model.layers.0.lora_A.default.weight": torch.empty(2, 4)}}
    ckptman.load(trained, checkpoint(tmp_path / "cut", 45))
    frozen = {"model": {"base_model.model.layers.0.base_layer.weight": torch.empty(16, 4)}}
    with pytest.raises(ckptman.MismatchError, match="missing"):
        ckptman.load(frozen, checkpoint(tmp_path / "cut", 45))


class ElasticTrainer(ResumableTrainer):
    def get_train_dataloader(self):
        sampler = ckptman.ElasticSampler(SAMPLES, seed=1)
        return ckptman.ResumableLoader(DataLoader(self.train_dataset, 3, sampler=sampler))

    def training_step(self, model, inputs, *args):
        told = " ".join(str(round(each.item() * SAMPLES)) for each in inputs["labels"])
        with open(Path(self.checkpointer.root, f"seen-{self.args.process_index}"), "a") as seen:
            print(self._loader.epoch, told, file=seen)
        return super().training_step(model, inputs, *args)


def elastic(root, accumulated, stop):
    warnings.simplefilter("default")
    os.environ["MASTER_ADDR"] = "localhost"
    trainer = trainer_of(
        root, ElasticTrainer, callbacks=[Interrupts(stop)], gradient_accumulation_steps=accumulated, data=Plain()
    )
    return int(trainer.train().global_step)


@pytest.mark.slow
def test_each_sample_once_on_two_ranks_one_and_two(tmp_path):
    assert run_ranks(2, elastic, str(tmp_path), 1, 4) in ([4, 4], [5, 5])
    assert run_ranks(1, elastic, str(tmp_path), 2, 11) in ([11], [12])
    steps = run_ranks(2, elastic, str(tmp_path), 1, 99)
    seen = [line.split() for rank in (0, 1) for line in (tmp_path / f"seen-{rank}").read_text().splitlines()]
    samples = [int(sample) for _, *batch in seen for sample in batch]
    counts = {sample: samples.count(sample) for sample in range(SAMPLES)}
    assert sum(counts.values()) >= EPOCHS * SAMPLES - 1
    assert set(counts.values()) <= {EPOCHS, EPOCHS - 1}
    assert steps[0] == steps[1]


class FullyShardedTrainer(ResumableTrainer):
    """Shards by FSDP2 as Accelerate does on GPUs: on a CPU it does not offer that."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.state.distributed_type = DistributedType.FSDP
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
        self.accelerator.state.fsdp_plugin = plugin
        self.is_fsdp_enabled = True


def sharded(root, stop):
    warnings.simplefilter("default")
    os.environ["MASTER_ADDR"] = "localhost"
    settings = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4}
    trainer = trainer_of(
        root, FullyShardedTrainer, callbacks=[Interrupts(stop)], load_best_model_at_end=True, **settings
    )
    trainer.train()
    whole = [each.full_tensor().detach().numpy().tobytes() for each in trainer.model.parameters()]
    return xxh3_128_hexdigest(b"".join(whole)), told(trainer), trainer.checkpointer.exit_code


@pytest.mark.slow
def test_sharded_by_fsdp2(tmp_path):
    whole = run_ranks(2, sharded, str(tmp_path / "whole"), 99)
    assert [code for _, _, code in run_ranks(2, sharded, str(tmp_path / "cut"), 11)] == [75, 75]
    assert run_ranks(2, sharded, str(tmp_path / "cut"), 99) == whole
    model = {"model": Net()}
    ckptman.load(model, checkpoint(tmp_path / "cut", 24))


@pytest.mark.slow
def test_the_example_killed_and_started_again(tmp_path):
    script = Path(__file__).parents[2] / "examples" / "huggingface_trainer.py"

    def run(root, die_at):
        env = {**os.environ, "DIE_AT": str(die_at), "PYTHONPATH": str(script.parents[1])}
        return int(forkserver.run(script, root, env=env, cwd=tmp_path, timeout=110).returncode)

    assert [run("whole", -1), run("cut", 18), run("cut", -1)] == [0, -signal.SIGKILL, 0]
    whole, cut = (tmp_path / f"{name}-out" / "model.safetensors" for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()
