"""Whole trainings on a GPU, stopped and gone on: sharded, on two ranks, scaled, compiled, and by the bundled loop."""

import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckptman
from ckptman.runtime.journal import read_journal
from ckptman.storage.format.manifest import read_manifest
from ckptman.storage.format.paths import step_folder
from tests.engine.dcp.test_values import differing
from tests.gpu.bundled import EXIT_AGAIN, STEPS, make_tokens, start_ranks
from tests.gpu.device import open_run, values_of
from tests.helpers.ranks import alone, run_ranks

LIMIT = 100.0


class Sharded:
    """A model sharded over one GPU by FSDP2, and AdamW."""

    def __init__(self, mesh, offload, seed=0):
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(24, 1031), nn.GELU(), nn.Linear(1031, 5))
        policy = CPUOffloadPolicy() if offload else OffloadPolicy()
        for module in (self.model[0], self.model[2], self.model):
            fully_shard(module, mesh=mesh, offload_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def train_step(self, number):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(number)).cuda()
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()

    def values(self):
        """Copies of this rank's parts, which are all there is."""
        found = dict(self.model.state_dict())
        for number, entries in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{key}": each for key, each in entries.items()}
        parts = {name: each.to_local() if hasattr(each, "to_local") else each for name, each in found.items()}
        return {name: each.detach().cpu().clone() for name, each in parts.items()}


def train_sharded(root, offload):
    """What differs after each of three saves."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.cuda.set_device(0)
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("replicate", "shard"))
    run, kept = Sharded(mesh, offload), {}
    run.train_step(0)
    assert next(run.model.parameters()).to_local().device.type == ("cpu" if offload else "cuda")
    with open_run(root, run.state, overlap=True) as checkpointer:
        for step in (1, 2, 3):
            run.train_step(step)
            kept[step] = run.values()
            checkpointer.save(step)
    found = []
    for step, values in kept.items():
        fresh = Sharded(mesh, offload, seed=1)
        ckptman.load(fresh.state, root / step_folder(step))
        found.append(differing(fresh.values(), values))
    return found


@pytest.mark.parametrize("offload", [False, True], ids=["on the GPU", "offloaded to the CPU"])
def test_fsdp2_on_one_gpu(tmp_path, cuda, offload):
    """A model that FSDP2 shards over a mesh of (1, 1), with its parameters on the GPU or offloaded to the CPU, trained
    with a save with overlap at each of three steps: each checkpoint, loaded into another model that is sharded in the
    same way, holds the parameters and moments of its step, bit for bit."""
    assert alone(train_sharded, tmp_path, offload, limit_seconds=LIMIT) == [[], [], []]


def train_on_a_shared_gpu(root):
    """What differs on this rank after a restore, and how many ranks wrote."""
    torch.cuda.set_device(0)

    def make(seed):
        torch.manual_seed(seed)
        model = nn.Linear(700, 900).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, {"model": model, "optimizer": optimizer, "rng": ckptman.RNGState()}

    def step(model, optimizer, number):
        x = torch.randn(4, 700, generator=torch.Generator().manual_seed(number)).cuda()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for parameter in model.parameters():
            gradient = parameter.grad.cpu()
            dist.all_reduce(gradient)
            parameter.grad.copy_(gradient)
        optimizer.step()

    def values(model, optimizer):
        found = {name: each.cpu() for name, each in model.state_dict().items()}
        for number, entries in optimizer.state_dict()["state"].items():
            found |= {f"{number}.{key}": each.cpu().clone() for key, each in entries.items()}
        return found

    model, optimizer, state = make(seed=0)
    with open_run(Path(root), state, overlap=True) as checkpointer:
        for number in range(1, 4):
            step(model, optimizer, number)
            kept = values(model, optimizer)
            checkpointer.save(number)
    drawn = torch.rand(3, device="cuda").tolist()
    model, optimizer, state = make(seed=1)
    with open_run(Path(root), state) as checkpointer:
        assert checkpointer.restore() == 3
    wrong = differing(values(model, optimizer), kept)
    assert torch.rand(3, device="cuda").tolist() == drawn
    return wrong, read_manifest(Path(root) / step_folder(3)).world_size


def test_two_ranks_on_one_gpu(tmp_path, cuda):
    """Two ranks that talk over gloo and share a GPU train replicas, with a save with overlap at each step. The newest
    checkpoint was written by both, and a restore gives each rank all of it, bit for bit, and its own generators."""
    assert run_ranks(2, train_on_a_shared_gpu, str(tmp_path), limit=LIMIT) == [([], 2), ([], 2)]


@pytest.mark.parametrize("fused", [False, True], ids=["in the scaler", "in the optimizer"])
def test_a_step_that_the_scaler_skips(tmp_path, cuda, fused):
    """One of four steps has an infinite gradient, and is skipped: by `GradScaler`, which does not call the optimizer,
    or by a fused optimizer, which is called and does nothing. With overlap and a save after each step, each checkpoint
    holds parameters, moments and scale of its step; that of the skipped step has the parameters of the one before."""
    torch.manual_seed(0)
    model = nn.Linear(700, 900).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    state = {"model": model, "optimizer": optimizer, "scaler": scaler}

    def step(number):
        optimizer.zero_grad()
        x = torch.randn(4, 700, generator=torch.Generator().manual_seed(number)).cuda()
        scaler.scale(model(x).square().mean()).backward()
        if number == 2:
            model.weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()

    def tensors():
        found = dict(model.state_dict())
        for number, entries in optimizer.state_dict()["state"].items():
            found |= {f"{number}.{key}": each for key, each in entries.items()}
        return found

    step(0)
    kept = {}
    scales = {}
    with open_run(tmp_path, state, overlap=True) as checkpointer:
        for number in range(1, 5):
            step(number)
            kept[number] = {name: each.detach().clone() for name, each in tensors().items()}
            checkpointer.save(number)
            scales[number] = scaler.get_scale()
    assert scales == {1: 1024.0, 2: 512.0, 3: 512.0, 4: 512.0}
    expected = {number: values_of(cuda, each) for number, each in kept.items()}
    assert torch.equal(expected[1]["weight"], expected[2]["weight"])
    assert not torch.equal(expected[2]["weight"], expected[3]["weight"])
    for number, values in expected.items():
        ckptman.load(state, tmp_path / step_folder(number))
        assert differing(values_of(cuda, tensors()), values) == [], f"step {number}"
        assert scaler.get_scale() == scales[number]


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiled_model(tmp_path, cuda):
    """A model is compiled and trained with a save with overlap at each step. The checkpoints have the names of the
    model that is not compiled, and give one, and another compiled one, the bits of their steps."""
    # Without a compiler for the host, or Triton, what inductor makes cannot be built.
    has_tools = any(shutil.which(each) for each in ("cc", "gcc", "clang"))
    has_tools = has_tools and Path(sysconfig.get_path("include"), "Python.h").exists()
    try:
        import triton  # noqa: F401
    except ImportError:
        has_tools = False
    backend = "inductor" if has_tools else "aot_eager"

    def make(seed, compiled):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 331), nn.GELU(), nn.Linear(331, 8)).cuda()
        return torch.compile(model, backend=backend) if compiled else model

    model = make(0, compiled=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    kept = {}
    with open_run(tmp_path, {"model": model, "optimizer": optimizer}, overlap=True) as checkpointer:
        for step in (1, 2, 3):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).cuda()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            kept[step] = {
                name.removeprefix("_orig_mod."): each.detach().clone() for name, each in model.state_dict().items()
            }
            checkpointer.save(step)
    for step, copies in kept.items():
        expected = values_of(cuda, copies)
        for compiled in (False, True):
            fresh = make(1, compiled)
            ckptman.load({"model": fresh}, tmp_path / step_folder(step))
            found = {name.removeprefix("_orig_mod."): each for name, each in fresh.state_dict().items()}
            assert differing(values_of(cuda, found), expected) == [], f"step {step}"


def losses(folder):
    events, torn = read_journal(folder / "steps.jsonl")
    assert not torn
    return [(each["step"], each["loss_hex"], each["grad_norm"], each["position"]) for each in events]


@pytest.mark.timeout(400)
def test_the_bundled_loop_interrupted_and_continued(tmp_path, cuda):
    """`python -m ckptman.train` on the GPU, asked to stop by SIGTERM after step 3 and started again: it exits with 75
    and then with 0, and repeats an uninterrupted run bit by bit: losses, gradient norms, data positions, and the files
    of the last checkpoint."""
    tokens = make_tokens(tmp_path / "tokens")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with start_ranks(1, tokens, whole) as run:
        assert run.wait(LIMIT) == 0, run.output()
    with start_ranks(1, tokens, parts, "stop=3") as run:
        assert run.wait(LIMIT) == EXIT_AGAIN, run.output()
    with start_ranks(1, tokens, parts) as run:
        assert run.wait(LIMIT) == 0, run.output()
    assert [step for step, *_ in losses(whole)] == list(range(1, STEPS + 1))
    assert losses(parts) == losses(whole)
    files = [read_manifest(each / "ck" / step_folder(STEPS)).files for each in (whole, parts)]
    for each in files:
        del each[".metadata"]  # it holds the path it was written to
    assert files[0] == files[1]
