"""The bundled loop, which tells what it restored and what it stopped with: `python digests.py FILE` and its options.

The state is gathered to full tensors, so it has one digest on any number of ranks. Generators of random numbers are
left out: each rank has its own.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import ckptman
from ckptman.train.__main__ import main


class Telling(ckptman.Checkpointer):
    told = Path()

    def restore(self, *arguments, **options):
        step = super().restore(*arguments, **options)
        self._tell("restored", step)
        return step

    def step(self, step, metrics=None):
        reason = super().step(step, metrics)
        if self.should_stop():
            self._tell("stopped", step)
        return reason

    def _tell(self, event, step):
        found = digest(self.state)
        if dist.get_rank() == 0:
            line = {"event": event, "step": step, "ranks": dist.get_world_size(), "digest": found}
            with self.told.open("a") as file:
                file.write(json.dumps(line) + "\n")


def digest(state):
    """Of parameters, moments, learning rates, the schedule and the position in the data. Every rank calls it."""
    found = hashlib.sha256()
    model, optimizer = state["model"], state["optimizer"]
    for name, value in model.state_dict().items():
        _add(found, name, value)
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            _add(found, f"{name}.{key}", value)
    for group in optimizer.param_groups:
        _add(found, "group", {key: value for key, value in group.items() if key != "params"})
    for name in ("scheduler", "data"):
        _add(found, name, state[name].state_dict())
    return found.hexdigest()


def _add(found, name, value):
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    else:
        found.update(f"{name} {sorted(value.items())!r}\n".encode())


if __name__ == "__main__":
    Telling.told = Path(sys.argv[1])
    ckptman.Checkpointer = Telling
    sys.exit(main(sys.argv[2:]))
