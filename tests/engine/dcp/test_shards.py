"""Sharded tensors come back bit for bit on other ranks with other placements, whoever writes and whoever reads."""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard

import ckptman
from tests.engine.dcp.test_values import READERS, WAYS, WRITERS, bits, differing, emptied, load, noise, save
from tests.helpers.ranks import run_ranks

SHAPE = (3, 6, 2, 5, 4)
"""Divides by 4 in one dimension only; over 4 ranks, 3 and 2 leave some of them nothing."""

ONE = [("line", (Shard(dim),)) for dim in range(5)]
ONE += [("line", (Replicate(),)), ("line", (Shard(-1),))]
TWO = [("grid", (Shard(a), Shard(b))) for a, b in itertools.product(range(5), repeat=2)]
TWO += [("grid", (Replicate(), Shard(dim))) for dim in range(5)] + [("grid", (Shard(1), Replicate()))]
TWO += [("grid", (_StridedShard(dim, split_factor=2), Shard(dim))) for dim in (1, 3)]
LAYOUTS = {4: ONE + TWO, 3: ONE, 2: ONE, 1: ONE[:1]}


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parts(tensor):
    """The plain tensors that a rank holds of one of any kind."""
    if isinstance(held := local(tensor), LocalShardsWrapper):
        return held.local_shards()
    return [each.tensor for each in held.local_shards()] if hasattr(held, "local_shards") else [held]


def same(one, other):
    return len(parts(one)) == len(parts(other)) and all(
        torch.equal(bits(a), bits(b)) for a, b in zip(parts(one), parts(other))
    )


def save_in_all_ways(root, make, writers=WRITERS):
    """Save what `make(False)` gives on each rank."""
    warnings.simplefilter("default")  # torch warns of its own use of sharded tensors
    for writer in writers:
        save(make(False), f"{root}/{writer}", writer)


def what_does_not_come_back(root, make, ways=WAYS, *given):
    """Load into what `make(True)` gives on each rank; the ways and names of what is not as in `make(False)` then."""
    warnings.simplefilter("default")
    wrong, expected = [], make(False, *given)
    for writer, reader in ways:
        fresh = make(True, *given)
        load(fresh, f"{root}/{writer}", reader)
        wrong += [f"{writer} to {reader}: {name}" for name in expected if not same(fresh[name], expected[name])]
    return wrong


def save_and_load(root, make):
    save_in_all_ways(root, make)
    return what_does_not_come_back(root, make)


def wholes():
    """The tensors as one process has them: one for each way to lay them out, and some of awkward shapes."""
    found = {f"t{i}": noise(torch.int16, *SHAPE) + i for i in range(len(LAYOUTS[4]))}
    found["one row"] = noise(torch.bfloat16, 1, 7)
    found["three rows"] = noise(torch.float8_e5m2, 3, 5)
    found["no rows"] = torch.empty(0, 4)
    found["no columns"] = torch.empty(6, 0)
    found["vector"] = noise(torch.complex64, 11)
    found["flags"] = noise(torch.bool, 10, 3)
    found["large"] = noise(torch.float32, 1031, 257)
    found["wide"] = noise(torch.uint8, 7, 300_007)
    found["scalar"] = noise(torch.float64)
    return found


def meshes():
    world = dist.get_world_size()
    found = {"line": init_device_mesh("cpu", (world,))}
    if world == 4:
        found["grid"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    return found


def in_layouts(is_blank, shift=0):
    """The tensors laid out over this world; `shift` picks other layouts for the same names."""
    layouts, mesh, found = LAYOUTS[dist.get_world_size()], meshes(), {}
    for i, (name, tensor) in enumerate(wholes().items()):
        kind, placements = layouts[(i + shift) % len(layouts)]
        if not name.startswith("t") or not name[1:].isdigit():
            kind, placements = "line", (Shard((i + shift) % 2 if tensor.dim() > 1 else 0),)
        found[name] = torch.zeros_like(tensor) if is_blank else tensor
        if tensor.dim():
            found[name] = distribute_tensor(found[name], mesh[kind], placements, src_data_rank=None)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"), [(1, {3: 2}), (2, {4: 9}), (4, {4: 7, 2: 1})], ids=["1 to 3", "2 to 4", "4 to 4 and 2"]
)
def test_shards_come_back_on_other_ranks_in_other_layouts(tmp_path, saved, loaded):
    run_ranks(saved, save_in_all_ways, str(tmp_path), in_layouts, limit=100)
    for ranks, shift in loaded.items():
        wrong = run_ranks(ranks, what_does_not_come_back, str(tmp_path), in_layouts, WAYS, shift, limit=100)
        assert wrong == [[]] * ranks
    for writer, reader in WAYS:
        load(fresh := emptied(wholes()), tmp_path / writer, reader)
        assert differing(fresh, wholes()) == [], (writer, reader)


def rows():
    return {name: whole for name, whole in wholes().items() if whole.dim() in (1, 2)}


def on_rows(is_blank):
    """On a mesh of two axes, what is sharded over one of them: the ranks along the other hold replicas of it."""
    grid = meshes()["grid"]
    return {
        f"{axis} {name}": distribute_tensor(
            torch.zeros_like(whole) if is_blank else whole, grid[axis], [Shard(0)], src_data_rank=None
        )
        for axis in ("outer", "inner")
        for name, whole in rows().items()
    }


def test_tensors_on_one_axis_of_a_mesh(tmp_path):
    """As tensor parallelism has them where the replicas are the business of DistributedDataParallel."""
    assert run_ranks(4, save_and_load, str(tmp_path), on_rows) == [[]] * 4
    expected = {f"inner {name}": whole for name, whole in rows().items()}
    for writer in WRITERS:
        load(fresh := emptied(expected), tmp_path / writer, "ckptman.load")
        assert differing(fresh, expected) == []


def legacy_tensor(whole, first, last):
    """A tensor of the kind that FSDP1 has, of which this rank holds some rows."""
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    shards = [Shard.from_tensor_and_offsets(whole[first:last].clone(), [first, 0], dist.get_rank())]
    return init_from_local_shards(shards if last > first else [], list(whole.shape))


def other_kinds(is_blank):
    """What DCP takes besides DTensors: legacy sharded tensors, and local tensors that are several shards."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = noise(torch.int32, 35, 6).float() * (not is_blank)
    first, last = 35 * rank // world, 35 * (rank + 1) // world
    middle = (first + last) // 2
    mesh = init_device_mesh("cpu", (world,))
    pieces = LocalShardsWrapper([whole[first:middle].clone(), whole[middle:last].clone()], [(first, 0), (middle, 0)])
    return {
        "legacy": legacy_tensor(whole, first, last),
        "pieces": DTensor.from_local(pieces, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(6, 1)),
    }


@pytest.mark.slow
def test_other_kinds_of_shards_that_dcp_knows(tmp_path):
    run_ranks(3, save_in_all_ways, str(tmp_path), other_kinds)
    assert run_ranks(2, what_does_not_come_back, str(tmp_path), other_kinds) == [[], []]


def one_row(is_blank):
    """Smaller than the number of ranks, which leaves the last without a shard."""
    return {"x": legacy_tensor(noise(torch.int32, 1, 6) * (not is_blank), 0, int(dist.get_rank() == 0))}


def test_a_rank_without_a_shard_of_a_legacy_tensor(tmp_path):
    assert run_ranks(2, save_and_load, str(tmp_path), one_row) == [[], []]


IS_KNOWN = hasattr(dcp, "CheckpointableTensor")
"""Whether plain DCP knows tensors that describe their shards, as it does from torch 2.14 on."""
DESCRIBED_BY, DESCRIBED_TO = (WRITERS, READERS) if IS_KNOWN else (["ckptman.save"], ["ckptman.load"])


def described(is_blank):
    """A tensor that is the padded memory of two shards of a larger one, and says so. The last of several ranks holds
    what the first does."""
    rank, holders = dist.get_rank(), max(1, dist.get_world_size() - 1)
    whole, rows = noise(torch.int32, 12, 5), 6 // holders
    firsts = [rank % holders * rows, 6 + rank % holders * rows]
    memory = torch.zeros(2 * rows + 1, 6, dtype=torch.int32)
    memory.global_shape, memory.global_offsets = (12, 5), tuple((first, 0) for first in firsts)
    memory.local_offsets, memory.local_sizes = ((0, 1), (rows + 1, 1)), ((rows, 5),) * 2
    for (at, _), first in zip(memory.local_offsets, () if is_blank else firsts):
        memory[at : at + rows, 1:] = whole[first : first + rows]
    return {"described": memory}


def test_tensors_that_describe_their_shards(tmp_path):
    run_ranks(3, save_in_all_ways, str(tmp_path), described, DESCRIBED_BY)
    ways = [*itertools.product(DESCRIBED_BY, DESCRIBED_TO)]
    assert run_ranks(2, what_does_not_come_back, str(tmp_path), described, ways) == [[], []]
    for writer, reader in itertools.product(DESCRIBED_BY, READERS):
        load(fresh := {"described": torch.zeros(12, 5, dtype=torch.int32)}, tmp_path / writer, reader)
        assert torch.equal(fresh["described"], noise(torch.int32, 12, 5)), (writer, reader)


class Table:
    """Loads itself, as a table of embeddings of a library may: what it is given has to be sharded as its own."""

    def __init__(self, is_blank):
        self.held = described(is_blank)

    def state_dict(self):
        return self.held

    def load_state_dict(self, state):
        assert state["described"].global_offsets == self.held["described"].global_offsets
        self.held = state


def table_comes_back(root):
    with ckptman.Checkpointer(root, {"table": Table(is_blank=False)}) as checkpointer:
        checkpointer.save(1)
    fresh = Table(is_blank=True)
    with ckptman.Checkpointer(root, {"table": fresh}) as checkpointer:
        assert checkpointer.restore() == 1
    return torch.equal(fresh.held["described"], described(is_blank=False)["described"])


def test_an_object_whose_tensors_describe_their_shards(tmp_path):
    assert run_ranks(2, table_comes_back, str(tmp_path)) == [True, True]


def save_with_one_that_lies(root, attribute, value):
    table = Table(is_blank=False)
    if dist.get_rank() == 1:
        setattr(table.held["described"], attribute, value)
    with ckptman.Checkpointer(root, {"table": table}) as checkpointer, pytest.raises(ckptman.ConfigError) as caught:
        checkpointer.save(1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("attribute", "value", "told"),
    [
        ("global_offsets", ((0, 0),), "lists of [1, 2, 2] entries"),
        ("global_offsets", ((0, 0), (7, 0)), "at [7, 0] of [12, 5]: that is outside"),
        ("local_offsets", ((0, 1), (0, 0, 1)), "at [0, 0, 1] of [13, 6]"),
    ],
)
def test_a_tensor_that_describes_its_shards_wrongly_on_one_rank(tmp_path, attribute, value, told):
    first, second = run_ranks(2, save_with_one_that_lies, str(tmp_path), attribute, value)
    assert first == second
    assert "table.described" in first
    assert told in first


def save_what_differs(root):
    """DCP saves a name that only one rank has; of one that all have, it takes one rank's."""
    rank = dist.get_rank()
    for writer in WRITERS[:2]:
        state = {"all": torch.arange(5), f"only {rank}": torch.full((3,), rank), "value": 7, f"value {rank}": rank}
        save(state, f"{root}/{writer}", writer)


def load_what_differs(root):
    """Each rank wants what the other one saved."""
    other, wrong = 1 - dist.get_rank(), []
    expected = {"all": torch.arange(5), f"only {other}": torch.full((3,), other), "value": 7, f"value {other}": other}
    for writer, reader in itertools.product(WRITERS[:2], READERS[:2]):
        load(found := emptied(expected), f"{root}/{writer}", reader)
        wrong += differing(found, expected)
    return wrong


def test_ranks_may_save_and_want_different_names(tmp_path):
    run_ranks(2, save_what_differs, str(tmp_path))
    assert run_ranks(2, load_what_differs, str(tmp_path)) == [[], []]
