"""What ranks have under one name is compared before the first save: of small tensors, one is saved for all."""

import random
import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ckptman
from ckptman import api
from ckptman.engine.comm.control_group import Channel
from ckptman.engine.comm.replicas import compare_replicas
from ckptman.engine.saving.staging import Stager
from ckptman.engine.saving.write_plan import plan_save
from ckptman.engine.state.local_shards import local_parts
from ckptman.engine.state.snapshot import snapshot
from ckptman.engine.state.tensor_digest import Digester
from ckptman.runtime.journal import read_journal
from ckptman.storage.format.manifest import read_manifest
from ckptman.storage.format.paths import journal_path, step_folder
from tests.helpers.ranks import RankError, run_ranks

LARGE = 300_000


def outcome(save):
    """The text of a refusal, and the warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            save()
            text = ""
        except ckptman.ConfigError as error:
            text = str(error)
    return text, [str(each.message) for each in told if "differs between ranks" in str(each.message)]


class RecordedStep:
    """An object that keeps a tensor."""

    def __init__(self, value, per_rank=False):
        self.value, self.per_rank = value, per_rank

    def state_dict(self):
        return {"inner": [{"value": self.value}]}

    def load_state_dict(self, state):
        self.value = state["inner"][0]["value"]


def trained(rank):
    """A model that DistributedDataParallel has trained for a step, on other data on each rank."""
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def states(rank):
    mine, (model, optimizer) = torch.full((2, 3), float(rank)).T, trained(rank)
    apart, other = trained(rank)
    with torch.no_grad():
        apart.module[0].bias += rank
    drifting, adam = trained(rank)
    adam.state[drifting.module[0].weight]["exp_avg"][1, 2] += rank
    return {
        "same": {"x": torch.ones(2), "nan": torch.tensor([float("nan"), -0.0]), "n": torch.empty(0)},
        "bare": {"x": mine, "y": torch.tensor(rank)},
        "deep": {"a": 1, "x": {"list": [0, {"t": mine.to(torch.float8_e4m3fn)}]}},
        "object": {"kept": RecordedStep(mine)},
        "per rank": {"kept": RecordedStep(mine, per_rank=True)},
        "own names": {f"x.rank{rank}": mine, "n": 1},
        "large": {"x": torch.full((LARGE,), float(rank))},
        "ddp": {"model": model, "optimizer": optimizer},
        "ddp, as a dict": {"model": get_model_state_dict(model)},
        "parameter": {"model": apart, "optimizer": other},
        "optimizer": {"model": drifting, "optimizer": adam},
        "stages": {"model": nn.ModuleDict({f"stage{rank}": apart.module[0], "same": nn.LayerNorm(2)})},
    }


def save_by_run(run, state):
    """Refused in the first step, and again by a save."""
    with ckptman.Checkpointer(run, state, save_policy=ckptman.EverySteps(2), deadline=None) as checkpointer:
        try:
            checkpointer.step(1)
        except ckptman.ConfigError as error:
            with pytest.raises(ckptman.ConfigError, match=re.escape(str(error))):
                checkpointer.save(1)
            raise
        checkpointer.save(2)


def save_alone(run, state):
    api._COMPARED.clear()
    try:
        ckptman.save(state, run / "alone")
    except ckptman.ConfigError as error:
        with pytest.raises(ckptman.ConfigError, match=re.escape(str(error))):
            ckptman.save(state, run / "alone")
        raise


def save_all(root):
    found = {}
    for name, state in states(dist.get_rank()).items():
        run = Path(root, name)
        found[name] = tuple(outcome(partial(each, run, state)) for each in (save_by_run, save_alone))
    own = f"x.rank{dist.get_rank()}"
    with ckptman.Checkpointer(Path(root, "own names"), {own: None, "n": 0}, deadline=None) as checkpointer:
        checkpointer.restore()
        assert torch.equal(checkpointer.state[own], states(dist.get_rank())["own names"][own])
    return found


@pytest.mark.slow
def test_what_differs_between_ranks_is_refused_before_the_first_save(tmp_path):
    leader, other = run_ranks(2, save_all, str(tmp_path), fresh=True)
    for name, told in {
        "bare": r"x (and 1 more) differs between ranks 0 and 1",
        "deep": "x.list.1.t differs",
        "object": "kept.inner.0.value differs",
        "parameter": "model.0.bias differs",
        "optimizer": "optimizer.state.0.weight.exp_avg differs",
        "large": "x differs between ranks 0 and 1, and one is saved for all",
    }.items():
        for (text, warned), alone in (leader[name], other[name]):
            assert text.startswith(told)
            assert "one is saved for all: make it a DTensor over all ranks that hold parts of it, give it" in text
            assert warned == []
            assert alone == (text, [])
    for name in ("same", "per rank", "own names", "stages"):
        assert leader[name] == other[name] == (("", []), ("", [])), name
    for name in ("ddp", "ddp, as a dict"):
        (text, warned), alone = leader[name]
        assert (text, len(warned), alone) == ("", 1, ("", warned))
        assert warned[0].startswith("model.1.running_mean (and 1 more) differs between ranks 0 and 1: after a restore")
        assert other[name] == (("", []), ("", []))


def drift(root):
    """A counter that begins alike, and is each rank's own later: told at the first save, and not looked at again."""
    rank, counter = dist.get_rank(), torch.zeros(())
    with ckptman.Checkpointer(root, {"n": counter}, save_policy=ckptman.EverySteps(100), deadline=None) as checkpointer:
        first, _ = outcome(lambda: checkpointer.step(1))
        counter += rank
        second, _ = outcome(lambda: checkpointer.save(2))
        counter.zero_()
        checkpointer.save(3)
        counter += rank
        third, _ = outcome(lambda: checkpointer.save(4))
    return first, second, third


def test_a_tensor_that_begins_to_differ_before_the_first_save(tmp_path):
    for first, second, third in run_ranks(2, drift, str(tmp_path), fresh=True):
        assert (first, third) == ("", "")
        assert second.startswith("n differs between ranks 0 and 1")


def drifted(rank, how):
    """What two replicas have after a while, if something is wrong with one of them."""
    torch.manual_seed(0)
    x = torch.randn(600, 1000)
    if rank == 0:
        return x
    if how == "a bit":
        x[412, 7] *= 2.0**100
    elif how == "all":
        x *= 1 + 1e-6
    elif how == "too far":
        x *= 1.5
    elif how == "NaN":
        x[599, :9] = float("nan")
    return x


def filled(rank, how):
    """What each rank fills for itself, such as a replay buffer: most of it is still empty."""
    torch.manual_seed(rank)
    x = torch.zeros(600, 1000)
    x[:3] = torch.randn(3, 1000)
    return x if how == "floats" else (x * 100).to(torch.uint8)


def save_twice(root, make, how):
    root = Path(root, how)
    x = make(dist.get_rank(), how)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with ckptman.Checkpointer(root, {"x": x}, save_policy=ckptman.EverySteps(1), deadline=None) as checkpointer:
            checkpointer.step(1)
            checkpointer.step(2)
    return [str(each.message) for each in told]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "size"), [("a bit", "1"), ("all", "9.5e-07"), ("NaN", "inf")])
def test_replicas_that_drift_are_saved_with_a_warning_of_how_far(tmp_path, how, size):
    text, nothing = run_ranks(2, save_twice, str(tmp_path), drifted, how, fresh=True)
    assert nothing == []
    assert len(text) == 1
    assert re.match(rf"x differs between ranks 0 and 1, in [\d,]+ of [\d,]+ elements, by {size} of", text[0]), text
    root = tmp_path / how
    [event] = [each for each in read_journal(journal_path(root))[0] if each["event"] == "replicas_differ"][:1]
    assert (event["names"], event["ranks"], event["count"]) == (["x"], [0, 1], 1)
    for step in (1, 2):
        assert read_manifest(root / step_folder(step)).replicas == "differ"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "how"), [(drifted, "too far"), (filled, "floats"), (filled, "bytes")], ids=["apart", "floats", "bytes"]
)
def test_other_content_is_refused_however_little_of_it_there_is(tmp_path, make, how):
    with pytest.raises(RankError, match="x differs between ranks 0 and 1, and one is saved for all"):
        run_ranks(2, save_twice, str(tmp_path), make, how, fresh=True)
    assert not list((tmp_path / how).glob("step-*"))


def change_until_the_copy(root):
    """One rank changes its replica at the last moment, when the state was looked at and is copied."""
    x, stage = torch.ones(1000), Stager.stage

    def change_and_stage(*args):
        if dist.get_rank() == 1:
            x.fill_(5.0)
        return stage(*args)

    with ckptman.Checkpointer(root, {"x": x}, save_policy=ckptman.EverySteps(2), deadline=None) as checkpointer:
        checkpointer.step(1)
        Stager.stage = change_and_stage
        checkpointer.step(2)


@pytest.mark.slow
def test_what_is_compared_is_what_was_copied(tmp_path):
    with pytest.raises(RankError, match="x differs between ranks 0 and 1, and one is saved for all"):
        run_ranks(2, change_until_the_copy, str(tmp_path), fresh=True)
    assert not list(tmp_path.glob("step-*"))


def save_equal(root):
    """By a run, by ckptman.save, and by plain DCP, which compares nothing."""
    state = {"x": torch.arange(10.0)}
    save_by_run(Path(root, "run"), state)
    ckptman.save(state, Path(root, "alone"))
    ckptman.save(state, Path(root, "again"))
    dcp.save(state, storage_writer=ckptman.StorageWriter(Path(root, "dcp")))


@pytest.mark.slow
def test_a_checkpoint_tells_whether_its_replicas_were_compared(tmp_path):
    run_ranks(2, save_equal, str(tmp_path), fresh=True)
    found = {
        name: read_manifest(tmp_path / name).replicas for name in (f"run/{step_folder(2)}", "alone", "again", "dcp")
    }
    assert found == {f"run/{step_folder(2)}": "equal", "alone": "equal", "again": "equal", "dcp": None}


def compare_opaque():
    def digest(*_):
        raise NotImplementedError("of a class that tells nothing of what it is made of")

    Digester.digest = digest
    state, control = {"x": torch.ones(3)}, Channel(60)
    shot = snapshot(state, control.rank)
    found = compare_replicas(control, shot, plan_save(shot, control).plan.shared, state)
    control.close()
    return found.replicas, found.warnings


@pytest.mark.slow
def test_what_cannot_be_compared_is_not_called_equal():
    assert run_ranks(2, compare_opaque, fresh=True) == [(None, ())] * 2


def train_batch_norm(root):
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    fully_shard(model, mesh=DeviceMesh("cpu", range(2)))
    model(torch.randn(8, 3))
    return outcome(partial(save_by_run, Path(root), {"model": model}))


@pytest.mark.slow
def test_buffers_under_fsdp2_are_told_what_happens_there(tmp_path):
    (text, warned), other = run_ranks(2, train_batch_norm, str(tmp_path), fresh=True)
    assert (text, other) == ("", ("", []))
    assert len(warned) == 1
    assert "FSDP2 does not keep buffers alike" in warned[0]
    assert "SyncBatchNorm" in warned[0]


# ---- any layout --------------------------------------------------------------------------------------------------

MESHES = ([0, 1, 2, 3], [[0, 1], [2, 3]], [[3, 2], [1, 0]], [0, 1, 2], [0, 1], [2, 3], [0, 2], [1, 3])
TWO_MESHES = (([0, 1], [2, 3]), ([0, 2], [1, 3]), ([2, 3], [0, 1]))
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)
LAYOUTS = 60


def layout(draw, meshes, rank):
    """A tensor as one rank holds it, if it does: plain, on a mesh, or on two meshes that do not know of each other."""
    shape = [draw.choice((1, 2, 3, 7, 60)) for _ in range(draw.randrange(3))]
    shape.insert(
        draw.randrange(len(shape) + 1), max(1, draw.choice((1, 5, 1000, 10**6)) // max(1, torch.Size(shape).numel()))
    )
    dtype = draw.choice(DTYPES)
    content = torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(2**31))).mul(50).to(dtype)
    kind = draw.choice(("plain", "mesh", "two meshes"))
    if kind == "plain":
        having = draw.sample(range(4), draw.randrange(1, 5))
        return content if rank in having else None
    chosen = [draw.choice(MESHES)] if kind == "mesh" else draw.choice(TWO_MESHES)
    found = None
    for ranks in chosen:
        mesh = meshes[str(ranks)]
        placements = [draw.choice((Replicate(), Shard(draw.randrange(len(shape))))) for _ in range(mesh.ndim)]
        if mesh.get_coordinate() is not None:
            found = distribute_tensor(content, mesh, placements, src_data_rank=None)
    return found


def change_one(draw, tensor, control):
    """Flip a bit of one element on one of the ranks that hold it, if several do. Return what was changed."""
    numbers = None
    if tensor is not None:
        shape = list(tensor.shape)
        numbers = torch.arange(tensor.numel()).reshape(shape)
        if isinstance(tensor, DTensor):
            numbers = distribute_tensor(numbers, tensor.device_mesh, tensor.placements, src_data_rank=None)
        [(_, numbers)] = local_parts(numbers)
    counts = control.gather(None if numbers is None else numbers.numel())
    sizes = {rank: count for rank, count in enumerate(counts) if count}
    rank = draw.choice(sorted(sizes))
    at = draw.randrange(sizes[rank])
    element = control.gather(int(numbers.reshape(-1)[at]) if rank == control.rank else None)[rank]
    holders = sum(control.gather(numbers is not None and bool((numbers == element).any())))
    bit = draw.randrange(8)
    if holders > 1 and rank == control.rank:
        [(_, local)] = local_parts(tensor)
        size = local.dtype.itemsize
        changed = local.contiguous().clone()
        flat = changed.view(-1).view(torch.uint8)
        flat[at * size + draw.randrange(size)] ^= 1 if local.dtype == torch.bool else 1 << bit
        local.copy_(changed)
    return holders > 1


def compare_layouts(seed):
    rank, control = dist.get_rank(), Channel(60)
    meshes = {str(ranks): DeviceMesh("cpu", ranks) for ranks in MESHES}
    quiet, noticed = [], []
    for number in range(LAYOUTS):
        draw = random.Random(f"{seed} {number}")
        tensor = layout(draw, meshes, rank)
        state = {"other": torch.ones(3)} | ({"x": tensor} if tensor is not None else {})
        shot = snapshot(state, rank)
        shared = plan_save(shot, control).plan.shared
        found = compare_replicas(control, shot, shared, state)
        quiet.append((number, found.drift is None and not found.warnings))
        if not change_one(random.Random(f"{seed} {number}"), tensor, control):
            continue
        try:
            found = compare_replicas(control, shot, shared, state)
        except ckptman.ConfigError as error:
            noticed.append((number, str(error).startswith("x differs between ranks")))
        else:
            noticed.append((number, found.drift is not None and len(found.warnings) == 1))
    control.close()
    return quiet, noticed


@pytest.mark.slow
def test_one_element_on_one_rank_is_noticed_in_any_layout():
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    for quiet, noticed in run_ranks(4, compare_layouts, seed, fresh=True):
        assert [number for number, each in quiet if not each] == [], "equal replicas"
        assert [number for number, each in noticed if not each] == [], "one bit of one rank differs"
        assert len(noticed) > LAYOUTS / 4, "layouts in which several ranks hold an element"
