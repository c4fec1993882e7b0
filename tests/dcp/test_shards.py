"""Sharded tensors come back bit for bit on other ranks with other placements, whoever writes and whoever reads."""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard

import ckptman
from tests.dcp.test_values import MAIN_WAYS, READERS, WAYS, WRITERS, bits, load, noise, save
from tests.helpers.ranks import run_ranks

SHAPE = (3, 6, 2, 5, 4)
"""Divides by 4 in one dimension only; over 4 ranks, 3 and 2 leave some of them nothing."""

Layout = tuple[str, tuple[Placement, ...]]
ONE = [("line", (Shard(dim),)) for dim in range(5)]
ONE += [("line", (Replicate(),)), ("line", (Shard(-1),))]
TWO = [("grid", (Shard(a), Shard(b))) for a, b in itertools.product(range(5), repeat=2)]
TWO += [("grid", (Replicate(), Shard(dim))) for dim in range(5)] + [("grid", (Shard(1), Replicate()))]
TWO += [("grid", (_StridedShard(dim, split_factor=2), Shard(dim))) for dim in (1, 3)]
LAYOUTS = {4: ONE + TWO, 3: ONE, 2: ONE, 1: ONE[:1]}


def meshes():
    world = dist.get_world_size()
    found = {"line": init_device_mesh("cpu", (world,))}
    if world == 4:
        found["grid"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    return found


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


def shard(whole, shift):
    """Lay the tensors out over this world; `shift` picks other layouts for the same names."""
    layouts, mesh = LAYOUTS[dist.get_world_size()], meshes()
    found = {}
    for i, (name, tensor) in enumerate(whole.items()):
        kind, placements = layouts[(i + shift) % len(layouts)]
        if not name.startswith("t") or not name[1:].isdigit():
            kind, placements = "line", (Shard((i + shift) % 2 if tensor.dim() > 1 else 0),)
        if tensor.dim() == 0:
            found[name] = tensor.clone()
        else:
            found[name] = distribute_tensor(tensor, mesh[kind], placements, src_data_rank=None)
    return found


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def blank_shards(whole, shift):
    return shard({name: torch.zeros_like(tensor) for name, tensor in whole.items()}, shift)


def save_shards(root):
    for writer in WRITERS:
        whole = wholes()
        save({**shard(whole, 0), "step": 3}, f"{root}/{writer}", writer)


def load_shards(root, shift):
    """Names of what did not come back, by way."""
    wrong, whole = [], wholes()
    expected = shard(whole, shift)
    for writer, reader in MAIN_WAYS:
        fresh = {**blank_shards(whole, shift), "step": 0}
        load(fresh, f"{root}/{writer}", reader)
        wrong += [
            f"{writer} to {reader}: {name} {getattr(tensor, 'placements', '')}"
            for name, tensor in expected.items()
            if not torch.equal(bits(local(fresh[name])), bits(local(tensor)))
        ]
        if fresh["step"] != 3:
            wrong.append(f"{writer} to {reader}: step")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"), [(1, {3: 2}), (2, {4: 9}), (4, {4: 7, 2: 1})], ids=["1 to 3", "2 to 4", "4 to 4 and 2"]
)
def test_shards_come_back_on_other_ranks_in_other_layouts(tmp_path, saved, loaded):
    run_ranks(saved, save_shards, str(tmp_path))
    for ranks, shift in loaded.items():
        assert run_ranks(ranks, load_shards, str(tmp_path), shift) == [[]] * ranks
    whole = wholes()
    for writer, reader in MAIN_WAYS:
        fresh = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
        load(fresh, tmp_path / writer, reader)
        assert [name for name in whole if not torch.equal(bits(fresh[name]), bits(whole[name]))] == [], (writer, reader)


def other_kinds(blank):
    """What DCP takes besides DTensors: legacy sharded tensors, and local tensors that are several shards."""
    from torch.distributed._shard.sharded_tensor import Shard as LegacyShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    rank, world = dist.get_rank(), dist.get_world_size()
    whole = noise(torch.int32, 35, 6).float() * (not blank)
    first, last = 35 * rank // world, 35 * (rank + 1) // world
    middle = (first + last) // 2
    mesh = init_device_mesh("cpu", (world,))
    pieces = LocalShardsWrapper([whole[first:middle].clone(), whole[middle:last].clone()], [(first, 0), (middle, 0)])
    legacy = LegacyShard.from_tensor_and_offsets(whole[first:last].clone(), [first, 0], rank)
    return {
        "legacy": init_from_local_shards([legacy], [35, 6]),
        "pieces": DTensor.from_local(pieces, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(6, 1)),
    }


def parts(tensor):
    if isinstance(tensor, DTensor):
        return list(tensor.to_local().local_shards())
    return [each.tensor for each in tensor.local_shards()]


def save_other_kinds(root):
    warnings.simplefilter("default")  # torch warns of its own use of sharded tensors
    for writer in WRITERS:
        save(other_kinds(blank=False), f"{root}/{writer}", writer)


def load_other_kinds(root):
    warnings.simplefilter("default")
    wrong, expected = [], other_kinds(blank=False)
    for writer, reader in WAYS:
        fresh = other_kinds(blank=True)
        load(fresh, f"{root}/{writer}", reader)
        wrong += [
            f"{writer} to {reader}: {name}"
            for name in expected
            if not all(map(torch.equal, parts(fresh[name]), parts(expected[name])))
        ]
    return wrong


@pytest.mark.slow
def test_other_kinds_of_shards_that_dcp_knows(tmp_path):
    run_ranks(3, save_other_kinds, str(tmp_path))
    assert run_ranks(2, load_other_kinds, str(tmp_path)) == [[], []]


def legacy_shards(blank):
    """As FSDP1 has them: a tensor that is smaller than the number of ranks leaves the last without a shard."""
    from torch.distributed._shard.sharded_tensor import Shard as LegacyShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    rank, whole = dist.get_rank(), noise(torch.int32, 1, 6) * (not blank)
    mine = [LegacyShard.from_tensor_and_offsets(whole.clone(), [0, 0], rank)] if rank == 0 else []
    return {"x": init_from_local_shards(mine, [1, 6])}


def legacy_shards_come_back(root):
    """The ways in which they do not."""
    warnings.simplefilter("default")  # torch warns of its own use of sharded tensors
    wrong, expected = [], legacy_shards(blank=False)
    for writer in WRITERS:
        save(legacy_shards(blank=False), f"{root}/{writer}", writer)
    for writer, reader in WAYS:
        fresh = legacy_shards(blank=True)
        load(fresh, f"{root}/{writer}", reader)
        if not all(map(torch.equal, parts(fresh["x"]), parts(expected["x"]))):
            wrong.append((writer, reader))
    return wrong


def test_a_rank_without_a_shard_of_a_legacy_tensor(tmp_path):
    assert run_ranks(2, legacy_shards_come_back, str(tmp_path)) == [[], []]


def described(blank):
    """A tensor that is the padded memory of two shards of a larger one, and says so. The last of several ranks holds
    what the first does."""
    rank, holders = dist.get_rank(), max(1, dist.get_world_size() - 1)
    whole, rows = noise(torch.int32, 12, 5), 6 // holders
    firsts = [rank % holders * rows, 6 + rank % holders * rows]
    memory = torch.zeros(2 * rows + 1, 6, dtype=torch.int32)
    memory.global_shape, memory.global_offsets = (12, 5), tuple((first, 0) for first in firsts)
    memory.local_offsets, memory.local_sizes = ((0, 1), (rows + 1, 1)), ((rows, 5),) * 2
    for (at, _), first in zip(memory.local_offsets, () if blank else firsts):
        memory[at : at + rows, 1:] = whole[first : first + rows]
    return {"described": memory}


def save_described(root):
    for writer in DESCRIBED_BY:
        save(described(blank=False), f"{root}/{writer}", writer)


def load_described(root):
    """The ways in which a tensor that describes its shards does not come back, or more of it is filled."""
    wrong, expected = [], described(blank=False)["described"]
    for writer, reader in itertools.product(DESCRIBED_BY, DESCRIBED_TO):
        fresh = described(blank=True)
        load(fresh, f"{root}/{writer}", reader)
        if not torch.equal(fresh["described"], expected):
            wrong.append((writer, reader))
    return wrong


IS_KNOWN = hasattr(dcp, "CheckpointableTensor")
"""Whether plain DCP knows tensors that describe their shards, as it does from torch 2.14 on."""
DESCRIBED_BY, DESCRIBED_TO = (WRITERS, READERS) if IS_KNOWN else (["ckptman.save"], ["ckptman.load"])


def test_tensors_that_describe_their_shards(tmp_path):
    run_ranks(3, save_described, str(tmp_path))
    assert run_ranks(2, load_described, str(tmp_path)) == [[], []]
    for writer, reader in itertools.product(DESCRIBED_BY, READERS):
        fresh = {"described": torch.zeros(12, 5, dtype=torch.int32)}
        load(fresh, tmp_path / writer, reader)
        assert torch.equal(fresh["described"], noise(torch.int32, 12, 5)), (writer, reader)


class Table:
    """Loads itself, as a table of embeddings of a library may: what it is given has to be sharded as its own."""

    def __init__(self, blank):
        self.held = described(blank)

    def state_dict(self):
        return self.held

    def load_state_dict(self, state):
        assert state["described"].global_offsets == self.held["described"].global_offsets
        self.held = state


def table_comes_back(root):
    with ckptman.Checkpointer(root, {"table": Table(blank=False)}) as checkpointer:
        checkpointer.save(1)
    fresh = Table(blank=True)
    with ckptman.Checkpointer(root, {"table": fresh}) as checkpointer:
        assert checkpointer.restore() == 1
    return torch.equal(fresh.held["described"], described(blank=False)["described"])


def test_an_object_whose_tensors_describe_their_shards(tmp_path):
    assert run_ranks(2, table_comes_back, str(tmp_path)) == [True, True]


def save_with_one_that_lies(root, attribute, value):
    table = Table(blank=False)
    if dist.get_rank() == 1:
        setattr(table.held["described"], attribute, value)
    with ckptman.Checkpointer(root, {"table": table}) as checkpointer:
        try:
            checkpointer.save(1)
        except ckptman.errors.ConfigError as error:
            return str(error)
    return "saved"


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


def on_rows(blank):
    """On a mesh of two axes, what is sharded over one of them: the ranks along the other hold replicas of it."""
    grid = meshes()["grid"]
    return {
        f"{axis} {name}": distribute_tensor(
            torch.zeros_like(whole) if blank else whole, grid[axis], [Shard(0)], src_data_rank=None
        )
        for axis in ("outer", "inner")
        for name, whole in rows().items()
    }


def rows():
    return {name: whole for name, whole in wholes().items() if whole.dim() in (1, 2)}


def rows_come_back(root):
    """Those that do not."""
    expected, wrong = on_rows(blank=False), []
    for writer in WRITERS:
        save(on_rows(blank=False), f"{root}/{writer}", writer)
    for writer, reader in MAIN_WAYS:
        fresh = on_rows(blank=True)
        load(fresh, f"{root}/{writer}", reader)
        wrong += [
            f"{writer} to {reader}: {name}"
            for name, tensor in expected.items()
            if not torch.equal(bits(local(fresh[name])), bits(local(tensor)))
        ]
    return wrong


def test_tensors_on_one_axis_of_a_mesh(tmp_path):
    """As tensor parallelism has them where the replicas are the business of DistributedDataParallel."""
    assert run_ranks(4, rows_come_back, str(tmp_path)) == [[]] * 4
    for writer in WRITERS:
        fresh = {f"inner {name}": torch.zeros_like(whole) for name, whole in rows().items()}
        load(fresh, tmp_path / writer, "ckptman.load")
        assert all(torch.equal(bits(fresh[f"inner {name}"]), bits(whole)) for name, whole in rows().items())


def save_what_differs(root):
    """DCP saves a name that only one rank has; of one that all have, it takes one rank's."""
    rank = dist.get_rank()
    for writer in WRITERS[:2]:
        state = {"all": torch.arange(5), f"only {rank}": torch.full((3,), rank), "value": 7, f"value {rank}": rank}
        save(state, f"{root}/{writer}", writer)


def load_what_differs(root):
    """Each rank wants what the other one saved."""
    found = []
    for writer, reader in itertools.product(WRITERS[:2], READERS[:2]):
        other = 1 - dist.get_rank()
        state = {"all": torch.zeros(5, dtype=torch.int64), f"only {other}": torch.zeros(3, dtype=torch.int64)}
        state |= {"value": 0, f"value {other}": -1}
        load(state, f"{root}/{writer}", reader)
        assert torch.equal(state["all"], torch.arange(5))
        assert torch.equal(state[f"only {other}"], torch.full((3,), other))
        found.append({name: each for name, each in state.items() if name.startswith("value")})
    return found


def test_ranks_may_save_and_want_different_names(tmp_path):
    run_ranks(2, save_what_differs, str(tmp_path))
    first, second = run_ranks(2, load_what_differs, str(tmp_path))
    assert first == [{"value": 7, "value 1": 1}] * 4
    assert second == [{"value": 7, "value 0": 0}] * 4
