"""A script that uses what users call, checked by `make check` (mypy --strict). It is never run."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import ckptman

data = TensorDataset(torch.ones(8, 4))
loader: ckptman.ResumableLoader[list[torch.Tensor]] = ckptman.ResumableLoader(DataLoader(data, batch_size=2))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
stopper = ckptman.FromRank0({"best": 1.0})
state = {"model": model, "optimizer": optimizer, "data": loader, "rng": ckptman.RNGState(), "stopper": stopper}


def train(root: str) -> int:
    """Train, as people do."""
    with ckptman.Checkpointer(root, state, save_policy=100, retention=3, metadata={"lr": 0.1}) as checkpointer:
        step: int = checkpointer.restore(path="other", only="model", rename=[("^a", "b")])
        for (batch,) in loader:
            step += 1
            loss: torch.Tensor = model(batch).sum()
            reason: str | None = checkpointer.step(step, {"loss": loss, "best": stopper.value["best"]})
            if checkpointer.should_stop() or (reason and checkpointer.saving):
                break
        last: int | None = checkpointer.last_saved
        print(last, checkpointer.run_id.upper(), checkpointer.attempt + 1)
    return checkpointer.exit_code


def look(root: str) -> None:
    """Look at a run, as a notebook does."""
    run = ckptman.Run(root)
    steps, values = run.metrics("loss")
    print(steps[0] + 1, values[0] + 0.5)
    checkpoint = run.best("loss", "max")
    while checkpoint := run.wait_for_new(checkpoint, timeout_seconds=10):
        model.load_state_dict(ckptman.read(checkpoint, only="model")["model"])
        skipped = ckptman.load({"model": model}, checkpoint, missing=["model.head"])
        print(skipped.missing, checkpoint.step, checkpoint.metadata["lr"], ckptman.export(checkpoint, "out").bytes)
        if not ckptman.verify(checkpoint, world_sizes=[1, 2]).good:
            ckptman.unpin(checkpoint)
        ckptman.pin(checkpoint, "good")
        changed: list[str] = [each.name for each in ckptman.diff(run.checkpoints[0], checkpoint).tensors]
        copied: int = sum(each.bytes for each in ckptman.copy(checkpoint, "there"))
        freed: int = ckptman.prune(root, ckptman.KeepLast(3) | ckptman.KeepBest("loss"), dry_run=True).freed_bytes
        print(changed, copied, freed)
