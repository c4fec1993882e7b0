"""Writes golden checkpoints: `python -m tests.golden.make tests/golden/format-1.tar.xz`.

An archive that is there stays as it is. A new format gets an archive beside it, made by the version that introduces it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import sys
import tarfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from xxhash import xxh3_128_hexdigest

import ckptman
from tests.helpers.ranks import run_ranks

HOST = "node001"
FOLDER = Path("/tmp/golden")
"""Where they are made: the same place each time, as it is named in some of the files."""
SHARDED = {"ranks-4": (4,), "hsdp-2x2": (2, 2)}
"""Roots that ranks on a mesh of this shape saved."""
_NO_STORAGE = {"bits16", "bits1x8", "bits2x4", "bits4x2", "bits8", "bcomplex32"}


class App:
    """A model whose rows divide by no world size, AdamW, a schedule, and a value of each kind."""

    def __init__(self, mesh: tuple[int, ...] | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, bias=False))
        if mesh is not None:
            names = ("shard",) if len(mesh) == 1 else ("replicate", "shard")
            device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)
            for layer in (self.model[0], self.model[2], self.model):
                fully_shard(layer, mesh=device_mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "values": values(),
            "rng": ckptman.RNGState(),
        }

    def step(self, number: int) -> None:
        batch = torch.randn(12, 5, generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()
        self.state["values"]["step"] = number

    def blank(self) -> None:
        """Forget everything, so that only a load can bring it back."""
        with torch.no_grad():
            for each in (*self.model.parameters(), *self.model.buffers()):
                each.fill_(0)
        self.state["values"] = {}

    def digests(self) -> dict[str, str]:
        """Of each tensor as a whole, on every rank alike; values as texts."""
        found = {f"model.{name}": digest(each) for name, each in self.model.state_dict().items()}
        names = {id(each): name for name, each in self.model.named_parameters()}
        for parameter, moments in self.optimizer.state.items():
            found |= {f"optimizer.{names[id(parameter)]}.{name}": digest(each) for name, each in moments.items()}
        found["lr"] = repr([float(group["lr"]) for group in self.optimizer.param_groups])
        found["schedule"] = repr((self.schedule.last_epoch, self.schedule.get_last_lr()))
        return found | {f"values.{name}": text(each) for name, each in self.state["values"].items()}


def values() -> dict[str, Any]:
    """A plain value of each kind."""
    return {
        "step": 0,
        "large": 2**80,
        "negative": -(2**63),
        "floats": [0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324],
        "complex": 1.5 - 2j,
        "text": 'ä\n\u2028"\\',
        "bytes": bytes(range(256)),
        "none": None,
        "flags": (True, False),
        "nested": {"a": [{"b": (1, [2, (3,)])}], "empty": {}, "list": []},
        "keys": {1: "flag", "two": "text", (2, 3): "pair", None: "none", 0.5: "half"},
        "sets": {"set": {1, 2}, "frozen": frozenset({"x"})},
        "tensor": torch.arange(6, dtype=torch.int16).reshape(2, 3),
    }


def text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return digest(value)
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{key!r}: {text(each)}" for key, each in value.items())) + "}"
    return repr(sorted(value)) if isinstance(value, set) else repr(value)


def digest(tensor: torch.Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    data = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
    return f"{list(whole.shape)} {whole.dtype} {xxh3_128_hexdigest(data)}"


def tensors() -> dict[str, torch.Tensor]:
    """One of each dtype that has a storage, and one of each layout."""
    found = {}
    for dtype in sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str):
        name = str(dtype).removeprefix("torch.")
        if not (name in _NO_STORAGE or name.startswith("q") or name.removeprefix("u") in map("int{}".format, range(8))):
            found[name] = noise(dtype, 5, 7)
    base = noise(torch.float32, 6, 8)
    found |= {
        "scalar": noise(torch.float64),
        "no rows": torch.empty(0, 4),
        "no columns": torch.empty(3, 0, dtype=torch.int8),
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "expanded": noise(torch.float32, 1, 3).expand(4, 3),
        "channels last": noise(torch.float32, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "shared 1": base,
        "shared 2": base[2:4],
        "several blocks": noise(torch.uint8, 3, 40_000),
    }
    return found


def noise(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    flat = tensor.reshape(-1).view(torch.uint8)
    generator = torch.Generator().manual_seed(len(flat))
    flat.copy_(torch.randint(0, 2 if dtype == torch.bool else 256, flat.shape, generator=generator, dtype=torch.uint8))
    return tensor


def _train(root: str, mesh: tuple[int, ...]) -> dict[str, str]:
    app = App(mesh)
    with ckptman.Checkpointer(root, app.state, save_policy=ckptman.EverySteps(2), deadline=None) as run:
        run.restore()
        for step in (1, 2):
            app.step(step)
            run.step(step, {"loss": 1.0 / step})
    return app.digests()


def _save_by_dcp(folder: str) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = {"columns": noise(torch.float32, 3, 10), "rows": noise(torch.bfloat16, 9, 4)}
    state = {name: distribute_tensor(each, mesh, [Shard(name == "columns")]) for name, each in whole.items()}
    state |= {"whole": noise(torch.int64, 3), "value": torch.tensor(1)}
    dcp.save({**state, "plain": {"n": 3}}, storage_writer=ckptman.StorageWriter(folder))
    return {name: digest(each) for name, each in state.items()}


def _make_run(folder: Path) -> dict[str, Any]:
    """A root with a tier, a pin, a proof, rules, and steps that a rollback left behind."""
    from ckptman.cli.app import main

    root, app, found = folder / "run", App(), {}
    options: Any = {
        "save_policy": ckptman.EverySteps(1),
        "retention": ckptman.KeepLast(4) | ckptman.KeepBest("loss"),
        "tiers": [ckptman.Tier(folder / "tier", every=2)],
        "deadline": None,
        "run_id": "golden",
    }
    for last in (4, 4):
        with ckptman.Checkpointer(root, app.state, **options) as run:
            for step in range(run.restore() + 1, last + 1):
                app.step(step)
                run.step(step, {"loss": 1.0 / step, "odd": math.nan})
                run.wait()
                found[str(step)] = app.digests()
        if main(["rollback", str(root), "--to-step", "2", "--why", "a spike"]):
            raise SystemExit("the rollback failed")
    for command in (["pin", f"{root}/step-0000000001", "--why", "for the paper"], ["verify", str(root), "--step", "2"]):
        if main(command):
            raise SystemExit(f"{command} failed")
    return found


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def main(out: Path) -> None:
    socket.gethostname = lambda: HOST
    warnings.simplefilter("ignore")
    expected: dict[str, Any] = {}
    shutil.rmtree(FOLDER, ignore_errors=True)
    ckptman.save({**tensors(), "values": values()}, FOLDER / "one-rank" / "step-0000000001")
    expected["one-rank"] = {name: digest(each) for name, each in tensors().items()}
    for name, mesh in SHARDED.items():
        expected[name] = run_ranks(math.prod(mesh), _train, str(FOLDER / name), mesh)[0]
    expected["dcp-4"] = run_ranks(4, _save_by_dcp, str(FOLDER / "dcp-4" / "step-0000000001"))[0]
    expected["run"] = _make_run(FOLDER)
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    with tarfile.open(out, "x:xz") as archive:
        for each in sorted(FOLDER.rglob("*")):
            archive.add(each, each.relative_to(FOLDER), recursive=False, filter=_anonymous)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(Path(sys.argv[1]))
