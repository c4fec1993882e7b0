"""Every optimizer of the libraries that people use: a run that is cut goes on bit for bit, or is refused at its first
save. docs/optimizers.md has the table."""

import inspect
import os
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import ckptman

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]
LAST, CUT = 6, 3
REFUSED = {"conda": "GaLoreProjector", "scalableshampoo": "PreConditioner"}
"""They keep objects of a class of their own in their state."""
NOT_RUN = {
    "torch.optim": {"SparseAdam"},  # of sparse gradients: in test_optimizers
    "pytorch_optimizer": {
        *("adago", "adamuon", "distributedmuon", "muon", "muonclip", "normuon"),  # want groups of their own making
        *("adalomo", "adammini", "lomo"),  # want a module
        *("alig", "bsam", "ranger21"),  # want more arguments
        "demo",  # wants einops
    },
    "bitsandbytes.optim": {
        *("SGD", "SGD8bit", "SGD32bit", "LARS", "LARS8bit", "LARS32bit", "PytorchLARS"),  # want a momentum
        *("AdEMAMix32bit", "PagedAdEMAMix32bit", "GlobalOptimManager"),  # fail in their first step on a CPU
    },
    "schedulefree": {"ScheduleFreeWrapper", "ScheduleFreeWrapperReference"},  # go around another optimizer: below
    "torchao.optim": {"CPUOffloadOptimizer"},  # wants a GPU
}


@pytest.fixture(autouse=True)
def _environment():
    """torchao sets variables."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


class Net(nn.Module):
    def __init__(self, *, plain=False):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16, bias=False), nn.Identity() if plain else nn.LayerNorm(16)
        self.second, self.unused = nn.Linear(16, 8, bias=not plain), nn.Identity() if plain else nn.Linear(2, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.norm(self.first(x))))


def kinds_of(library):
    """What makes each of its optimizers, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip(library)
    if library == "pytorch_optimizer":
        return {name: module.load_optimizer(name) for name in module.get_supported_optimizers()}
    kinds = {name: each for name, each in vars(module).items() if inspect.isclass(each)}
    return {name: kind for name, kind in kinds.items() if kind is not torch.optim.Optimizer}


def made(kind, plain):
    torch.manual_seed(0)
    model = Net(plain=plain)
    try:
        return model, kind(model.parameters(), lr=0.01)
    except TypeError:  # some have no rate
        return model, kind(model.parameters())


def train(model, optimizer, graph, first=1, last=LAST, end_step=lambda step: None):
    """Returns the parameters. `graph`: with second derivatives."""
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    for step in range(first, last + 1):

        def loss(step=step):
            optimizer.zero_grad()
            found = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()
            found.backward(create_graph=graph)
            return found

        torch.manual_seed(step)
        np.random.seed(step)  # kron draws from it
        if "closure" in str(inspect.signature(optimizer.step)) and type(optimizer).__name__ in NEED_A_CLOSURE:
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()
        end_step(step)
    return torch.cat([each.detach().flatten() for each in model.parameters()])


NEED_A_CLOSURE = {
    *("LBFGS", "SGDScheduleFreeClosure", "AdamWScheduleFreeClosure", "RAdamScheduleFreeClosure"),
}


def runs(kind):
    """How the optimizer trains, and what a run that is never cut computes."""
    errors = []
    for plain in (False, True):
        for graph in (False, True):
            try:
                return plain, graph, train(*made(kind, plain), graph)
            except Exception as error:
                errors.append(error)
    raise errors[0]


def cut(kind, root, plain, graph):
    for last in (CUT, LAST):
        model, optimizer = made(kind, plain)
        state, policy = {"model": model, "optimizer": optimizer}, ckptman.EverySteps(CUT)
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()  # its wrappers do not save which weights the parameters are
        with ckptman.Checkpointer(root, state, save_policy=policy, deadline=None, signals=None) as checkpointer:
            start = checkpointer.restore()
            found = train(model, optimizer, graph, start + 1, last, checkpointer.step)
    assert start == CUT
    return found


@pytest.mark.leaves("tqdm_monitor", "ThreadPoolExecutor")
@pytest.mark.parametrize(
    "library",
    [
        "torch.optim",
        "pytorch_optimizer",
        "schedulefree",
        "prodigyopt",
        "dadaptation",
        "torchao.optim",
        "bitsandbytes.optim",
    ],
)
def test_every_optimizer_goes_on_bit_for_bit_or_is_refused_at_once(tmp_path, library):
    kinds, count = kinds_of(library), 0
    for name, kind in kinds.items():
        if name in NOT_RUN.get(library, ()):
            continue
        plain, graph, whole = runs(kind)
        if name in REFUSED:
            with pytest.raises(ckptman.ConfigError, match=rf"{REFUSED[name]}, which a checkpoint cannot hold"):
                cut(kind, tmp_path / name, plain, graph)
            assert not list(tmp_path.glob(f"{name}/step-*"))
            continue
        assert torch.equal(cut(kind, tmp_path / name, plain, graph), whole), name
        count += 1
    print(f"{library}: {count} of {len(kinds)} go on bit for bit")


def around(library, name):
    module = pytest.importorskip(library)
    return lambda parameters, lr: getattr(module, name)(torch.optim.SGD(parameters, lr, momentum=0.9))


@pytest.mark.leaves("tqdm_monitor", "ThreadPoolExecutor")
@pytest.mark.parametrize(
    ("library", "name"),
    [("schedulefree", "ScheduleFreeWrapper"), ("pytorch_optimizer", "Lookahead"), ("pytorch_optimizer", "OrthoGrad")],
)
def test_optimizers_around_another_one(tmp_path, library, name):
    kind = around(library, name)
    plain, graph, whole = runs(kind)
    assert torch.equal(cut(kind, tmp_path, plain, graph), whole)
