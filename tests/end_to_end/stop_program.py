"""Loops as people write them first, with a loader of the kind that is named: python stop_program.py ROOT KIND LOOP."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import ckptman

KINDS = {
    "no workers": {},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "spawned": {"num_workers": 2, "multiprocessing_context": "spawn"},
    "forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver"},
}
NEVER = ckptman.EverySteps(100_000)


class Rows(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.full((8,), float(index))


class Named(Rows):
    def __getitem__(self, index):
        return {"rows": super().__getitem__(index)}


class Model(torch.nn.Linear):
    """As the Trainer of Hugging Face wants it."""

    def forward(self, rows):
        loss = super().forward(rows).square().mean()
        return {"loss": loss, "logits": loss.detach().reshape(1)}


def loop(root, kind):
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = ckptman.ResumableLoader(DataLoader(Rows(), batch_size=4, shuffle=True, **KINDS[kind]))
    state = {"model": model, "optimizer": optimizer, "data": loader, "rng": ckptman.RNGState()}
    with ckptman.Checkpointer(root, state, save_policy=NEVER) as checkpointer:
        step = checkpointer.restore()
        while not checkpointer.should_stop():
            for batch in loader:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                checkpointer.step(step)
                print(f"step {step}", flush=True)
                if checkpointer.should_stop():
                    break
    if dist.is_initialized():
        dist.destroy_process_group()
    return checkpointer.exit_code


def accelerate(root, kind):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 1)
    samples = DataLoader(Rows(), batch_size=4, shuffle=True, **KINDS[kind])
    model, optimizer, samples = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), samples)
    loader = ckptman.ResumableLoader(samples)
    state = {"model": model, "optimizer": optimizer, "data": loader, "rng": ckptman.RNGState()}
    with ckptman.Checkpointer(root, state, save_policy=NEVER) as checkpointer:
        step = checkpointer.restore()
        while not checkpointer.should_stop():
            for batch in loader:
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                checkpointer.step(step)
                print(f"step {step}", flush=True)
                if checkpointer.should_stop():
                    break
    return checkpointer.exit_code


def huggingface(root, kind):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from ckptman.integrations.huggingface import CkptmanTrainerMixin

    class ResumableTrainer(CkptmanTrainerMixin, Trainer):
        pass

    class Printer(TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            print(f"step {state.global_step}", flush=True)

    workers = KINDS[kind]
    args = TrainingArguments(
        output_dir=f"{root}-out",
        num_train_epochs=100,
        per_device_train_batch_size=4,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        dataloader_num_workers=workers.get("num_workers", 0),
        dataloader_persistent_workers=workers.get("persistent_workers", False),
    )
    trainer = ResumableTrainer(
        Model(8, 1), args, train_dataset=Named(), callbacks=[Printer()], checkpointer={"root": root}
    )
    trainer.train()
    return trainer.checkpointer.exit_code


def lightning(root, kind):
    import lightning

    from ckptman.integrations.lightning import CkptmanCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).square().mean()

        def on_train_batch_end(self, *_):
            print(f"step {self.global_step}", flush=True)

        def configure_optimizers(self):
            schedule = torch.optim.lr_scheduler.OneCycleLR
            optimizer = torch.optim.AdamW(self.parameters())
            return [optimizer], [schedule(optimizer, 0.01, self.trainer.estimated_stepping_batches)]

    saves = CkptmanCallback(root, save_policy=NEVER)
    trainer = lightning.Trainer(
        max_epochs=100,
        callbacks=[saves],
        accelerator="cpu",
        devices=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Module(), DataLoader(Rows(), batch_size=4, shuffle=True, **KINDS[kind]))
    return saves.exit_code


def bundled(root, kind):
    """The bundled loop. It reads its data without workers."""
    from ckptman.train.__main__ import main
    from ckptman.train.tokenize import tokenize

    folder = Path(f"{root}-data")
    if not folder.exists():
        tokenize(folder, [Path(__file__)], vocab_size=300, workers=1)
        (folder / "run.toml").touch()
    values = {
        "checkpoint.root": root,
        "checkpoint.every_steps": 100_000,
        "run.steps": 100_000,
        "run.log_every": 1,
        "data.path": folder,
        "data.sequence_tokens": 12,
        "data.global_batch": 2,
        "parallel.device": "cpu",
        "model.dim": 16,
        "model.layers": 1,
        "model.heads": 2,
        "model.kv_heads": 1,
    }
    return main(["--config", str(folder / "run.toml"), *(f"--set={name}={value}" for name, value in values.items())])


LOOPS = {each.__name__: each for each in (loop, accelerate, huggingface, lightning, bundled)}


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(LOOPS[sys.argv[3]](*sys.argv[1:3]))
