"""What several ranks need is read by one of them and sent to the others: the same bits, each byte read once."""

import contextlib
import os
import threading
import time
import warnings
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ckptman
import ckptman.api as api_module
import ckptman.loading.exchange as sharing_module
import ckptman.loading.loader as load_module
from ckptman.comm.control_group import Channel
from ckptman.loading.checkpoint_reader import SavedState
from ckptman.loading.exchange import read_together
from tests.dcp.test_shards import local
from tests.dcp.test_values import bits, load, noise, save
from tests.helpers.ranks import run_ranks

ROWS, COLUMNS, COUNT = 2048, 2048, 4
"""Four tensors of 16 MiB."""

LAYOUTS = {
    "hsdp": ((2, 2), (Replicate(), Shard(0))),
    "replicas": ((4,), (Replicate(),)),
    "columns": ((4,), (Shard(1),)),
    "rows and columns": ((2, 2), (Shard(0), Shard(1))),
    "columns and replicas": ((2, 2), (Shard(1), Replicate())),
    "rows": ((4,), (Shard(0),)),
}


def large():
    return {f"w{i}": noise(torch.int32, ROWS, COLUMNS) + i for i in range(COUNT)}


def odd():
    """Shapes that divide by nothing, dtypes, and tensors too small to be sent around."""
    return {
        "bf16": noise(torch.bfloat16, 333, 77),
        "fp8": noise(torch.float8_e4m3fn, 1031, 19),
        "flags": noise(torch.bool, 9001, 3),
        "three": noise(torch.complex64, 7, 31, 53),
        "vector": noise(torch.float32, 70_001),
        "few rows": noise(torch.float64, 3, 2049),
        "one row": noise(torch.int16, 1, 5000),
        "small": noise(torch.int64, 5, 3),
        "no rows": torch.empty(0, 4),
        "no columns": torch.empty(4, 0),
        "scalar": noise(torch.float32),
    }


def lay_out(whole, mesh, placements):
    """The tensors over a mesh; without one, whole on each rank."""
    if mesh is None:
        return {name: tensor.clone() for name, tensor in whole.items()}
    return {
        name: distribute_tensor(
            tensor,
            mesh,
            [Replicate() if isinstance(each, Shard) and each.dim >= tensor.dim() else each for each in placements],
            src_data_rank=None,
        )
        for name, tensor in whole.items()
    }


def wrong(found, expected):
    return [name for name in expected if not torch.equal(bits(local(found[name])), bits(local(expected[name])))]


def read_all(channel, path, targets):
    """Fill the targets; the bytes that this rank read."""
    return read_together(channel, SavedState.read(Path(path), channel.rank), targets, verify=True)


def data_bytes(path):
    return sum(each.stat().st_size for each in Path(path).glob("*.distcp"))


def read_in_layouts(path, odd_path):
    """For each layout, what differs, and the bytes that this rank read of the large tensors."""
    found = {}
    with closing(Channel(20)) as channel:
        names = [*LAYOUTS, None]
        for name in names:
            shape, placements = LAYOUTS[name] if name else ((), ())
            mesh = init_device_mesh("cpu", shape) if name else None
            differing, read = [], 0
            for whole, at in ((large(), path), (odd(), odd_path)):
                blank = {key: torch.zeros_like(tensor) for key, tensor in whole.items()}
                targets, expected = lay_out(blank, mesh, placements), lay_out(whole, mesh, placements)
                count = read_all(channel, at, targets)
                read = read or count
                differing += wrong(targets, expected)
            found[name or "no mesh"] = differing, read
    return found


@pytest.mark.slow
def test_each_byte_is_read_once_and_every_bit_is_right(tmp_path):
    ckptman.save(large(), tmp_path / "large")
    ckptman.save(odd(), tmp_path / "odd")
    ranks = run_ranks(4, read_in_layouts, str(tmp_path / "large"), str(tmp_path / "odd"))
    size = data_bytes(tmp_path / "large")
    assert size > 32 * 2**20
    for name in ranks[0]:
        assert [found[name][0] for found in ranks] == [[]] * 4, name
        counts = [found[name][1] for found in ranks]
        assert sum(counts) <= 1.05 * size, name
        assert max(counts) <= 1.2 * size / 4, name


def read_in_many_rounds(odd_path):
    """Bands of some rows, and families smaller than the number of replicas."""
    found = []
    sharing_module.BAND_BYTES, sharing_module.MEMBERS = 20_000, 3
    mesh = init_device_mesh("cpu", (4,))
    with closing(Channel(20)) as channel:
        for placements in ((Replicate(),), (Shard(1),), (Shard(0),)):
            targets = lay_out({key: torch.zeros_like(tensor) for key, tensor in odd().items()}, mesh, placements)
            read_all(channel, odd_path, targets)
            found.append(wrong(targets, lay_out(odd(), mesh, placements)))
    return found


def test_many_small_bands(tmp_path):
    ckptman.save(odd(), tmp_path / "odd")
    for found in run_ranks(4, read_in_many_rounds, str(tmp_path / "odd")):
        assert found == [[]] * len(found)


def one_tensor():
    return {"w": noise(torch.int32, 512, 1024)}


def read_on_two_nodes(path):
    """For each layout of four ranks on two nodes, what differs, the bytes that this one read, and whom it asked."""
    found, node = {}, {"SLURMD_NODENAME": f"node{dist.get_rank() // 2}"}
    with closing(Channel(20)) as channel, mock.patch.dict(os.environ, node):
        asked = set()
        exchange = channel.exchange

        def ask(sent, sizes):
            asked.update(sizes)
            return exchange(sent, sizes)

        channel.exchange = ask
        for name in ("hsdp", "replicas", "columns"):
            shape, placements = LAYOUTS[name]
            mesh = init_device_mesh("cpu", shape)
            targets = lay_out({"w": torch.zeros_like(one_tensor()["w"])}, mesh, placements)
            asked.clear()
            read = read_all(channel, path, targets)
            found[name] = wrong(targets, lay_out(one_tensor(), mesh, placements)), read, set(asked)
    return found


def test_nothing_is_exchanged_between_nodes(tmp_path):
    ckptman.save(one_tensor(), tmp_path / "x")
    ranks = run_ranks(4, read_on_two_nodes, str(tmp_path / "x"))
    assert [found[name][0] for found in ranks for name in found] == [[]] * 12
    for name in ("hsdp", "replicas"):  # once for each node, and evenly
        assert all(found[name][1] <= 1.3 * one_tensor()["w"].nbytes / 2 for found in ranks)
    neighbours = [{1}, {0}, {3}, {2}]
    assert [found["replicas"][2] for found in ranks] == neighbours
    assert [found["columns"][2] for found in ranks] == neighbours
    assert [found["hsdp"][2] for found in ranks] == [set()] * 4, "its replicas are on other nodes"


def read_three(path):
    """Uneven row shards: what differs, and bytes read for each byte that this rank has."""
    whole = {f"w{i}": noise(torch.float32, 1031, 1999) for i in range(4)}
    mesh = init_device_mesh("cpu", (3,))
    targets = lay_out({key: torch.zeros_like(tensor) for key, tensor in whole.items()}, mesh, (Shard(0),))
    with closing(Channel(20)) as channel:
        read = read_all(channel, path, targets)
    own = sum(local(each).nbytes for each in targets.values())
    return wrong(targets, lay_out(whole, mesh, (Shard(0),))), read / own


@pytest.mark.slow
def test_uneven_rows_are_read_by_who_has_them(tmp_path):
    ckptman.save({f"w{i}": noise(torch.float32, 1031, 1999) for i in range(4)}, tmp_path / "x")
    for differing, ratio in run_ranks(3, read_three, str(tmp_path / "x")):
        assert differing == []
        assert 1 <= ratio <= 1.05


# ---- ranks that have not the same ------------------------------------------------------------------------------------


def load_what_some_have(path):
    """Each pair of ranks has a mesh of its own and tensors of its own, as stages of a pipeline do."""
    rank = dist.get_rank()
    pairs = [DeviceMesh("cpu", pair) for pair in ([0, 1], [2, 3])]
    whole = large() | odd()
    mesh = pairs[rank // 2]
    expected = {
        f"w{rank // 2}": distribute_tensor(whole[f"w{rank // 2}"], mesh, [Replicate()], src_data_rank=None),
        f"w{2 + rank // 2}": distribute_tensor(whole[f"w{2 + rank // 2}"], mesh, [Shard(1)], src_data_rank=None),
        "vector": whole["vector"],
    }
    if rank == 1:
        expected |= {"bf16": whole["bf16"], "few rows": whole["few rows"]}
    if rank == 3:
        expected |= {"fp8": whole["fp8"]}
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    ckptman.load(found, path)
    return wrong(found, expected)


@pytest.mark.slow
def test_tensors_that_only_some_ranks_have(tmp_path):
    ckptman.save(large() | odd(), tmp_path / "x")
    assert run_ranks(4, load_what_some_have, str(tmp_path / "x")) == [[]] * 4


def load_whole_on_one(path):
    """One rank wants all of a tensor of which the others want columns."""
    mesh = init_device_mesh("cpu", (2,))
    expected = lay_out(odd(), None if dist.get_rank() == 0 else mesh, (Shard(1),))
    fresh = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    ckptman.load(fresh, path)
    return wrong(fresh, expected)


def test_ranks_that_want_different_parts_of_the_same_rows(tmp_path):
    ckptman.save(odd(), tmp_path / "x")
    assert run_ranks(2, load_whole_on_one, str(tmp_path / "x"), limit=30) == [[], []]


def load_again_and_again(path):
    api_module.TIMEOUT_SECONDS = 2
    mesh = init_device_mesh("cpu", (2, 2))
    expected = lay_out(odd(), mesh, (Replicate(), Shard(0)))
    found = []
    for verify in (True, False, True):
        fresh = lay_out({key: torch.zeros_like(each) for key, each in odd().items()}, mesh, (Replicate(), Shard(0)))
        ckptman.load(fresh, path, verify=verify)
        found += wrong(fresh, expected)
    return found


@pytest.mark.slow
def test_one_load_after_the_other(tmp_path):
    ckptman.save(odd(), tmp_path / "x")
    assert run_ranks(4, load_again_and_again, str(tmp_path / "x"), limit=30) == [[]] * 4


def load_while_it_is_replaced(path):
    """The other rank is late: it sees what was saved meanwhile."""
    api_module.TIMEOUT_SECONDS = 5
    state, read, root = {"position": 0}, load_module.read_to_load, Path(path).parent
    late = root / ("after" if dist.get_rank() else "before")
    with mock.patch.object(load_module, "read_to_load", lambda _, rank, **more: read(late, rank, **more)):
        try:
            ckptman.load(state, path)
        except ckptman.CkptmanError as error:
            return f"{type(error).__name__}: {error} {state}"
    return f"loaded {state}"


def test_ranks_that_see_different_checkpoints_load_none_of_them(tmp_path):
    for position, name in enumerate(("before", "after", "x")):
        ckptman.save({"position": 1 + position}, tmp_path / name)
    for told in run_ranks(2, load_while_it_is_replaced, str(tmp_path / "x"), limit=30):
        assert "CkptmanError" in told
        assert "see different checkpoints" in told
        assert "'position': 0" in told


def load_without_threads(path):
    api_module.TIMEOUT_SECONDS = 5
    mesh = init_device_mesh("cpu", (2, 2))
    fresh = lay_out({key: torch.zeros_like(each) for key, each in odd().items()}, mesh, (Replicate(), Shard(0)))
    with contextlib.ExitStack() as stack:
        if dist.get_rank() % 2 == 0:
            refusal = RuntimeError("can't start new thread")
            stack.enter_context(mock.patch.object(threading.Thread, "start", side_effect=refusal))
        ckptman.load(fresh, path)
    return wrong(fresh, lay_out(odd(), mesh, (Replicate(), Shard(0))))


@pytest.mark.slow
def test_ranks_that_can_start_no_thread_read_all_the_same(tmp_path):
    ckptman.save(odd(), tmp_path / "step-0000000001")
    assert run_ranks(4, load_without_threads, str(tmp_path / "step-0000000001"), limit=30) == [[]] * 4


def load_with_a_group_of_one(path):
    api_module.TIMEOUT_SECONDS = 2
    mesh = init_device_mesh("cpu", (2, 2))
    own = dist.new_group([0])
    fresh = lay_out({key: torch.zeros_like(each) for key, each in odd().items()}, mesh, (Replicate(), Shard(0)))
    ckptman.load(fresh, path)
    if dist.get_rank() == 0:
        dist.destroy_process_group(own)
    return wrong(fresh, lay_out(odd(), mesh, (Replicate(), Shard(0))))


@pytest.mark.slow
def test_a_rank_that_is_in_more_groups_than_the_others(tmp_path):
    ckptman.save(odd(), tmp_path / "x")
    assert run_ranks(4, load_with_a_group_of_one, str(tmp_path / "x"), limit=30) == [[]] * 4


def quantized(fill):
    return torch.quantize_per_tensor(torch.full((5000,), float(fill)), 0.125, 3, torch.qint8)


def load_quantized(path):
    warnings.simplefilter("ignore")  # torch warns of its own use of storages
    state = {"q": quantized(0)}
    ckptman.load(state, path)
    return torch.equal(state["q"].int_repr(), quantized(1.5).int_repr())


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:.*[Qq]uantiz")
def test_quantized_tensors_on_two_ranks(tmp_path):
    ckptman.save({"q": quantized(1.5)}, tmp_path / "x")
    assert run_ranks(2, load_quantized, str(tmp_path / "x"), limit=30) == [True, True]


def load_into_conjugates(path):
    state = {"c": torch.zeros(60, 70, dtype=torch.complex64).conj()}
    ckptman.load(state, path)
    return torch.equal(bits(state["c"]), bits(noise(torch.complex64, 60, 70)))


def test_targets_that_are_conjugate_views(tmp_path):
    ckptman.save({"c": noise(torch.complex64, 60, 70)}, tmp_path / "x")
    assert run_ranks(2, load_into_conjugates, str(tmp_path / "x"), limit=30) == [True, True]


# ---- damage ----------------------------------------------------------------------------------------------------------


def flip(path):
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 3)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def be_refused(path):
    """For each layout, the error and whether it came within seconds."""
    found = []
    for name in ("hsdp", "replicas", "columns"):
        shape, placements = LAYOUTS[name]
        mesh = init_device_mesh("cpu", shape)
        state = lay_out({key: torch.zeros_like(each) for key, each in large().items()}, mesh, placements)
        begun = time.monotonic()
        try:
            ckptman.load(state, path)
        except Exception as error:
            found.append((f"{type(error).__name__}: {error}", time.monotonic() - begun < 15))
        else:
            found.append(("loaded", False))
    return found


def all_refused(path, file):
    ranks = run_ranks(4, be_refused, str(path))
    assert ranks == [ranks[0]] * 4, "all are told the same"
    for text, in_time in ranks[0]:
        assert text.startswith("CorruptError: ")
        assert file in text
        assert in_time


def save_in_rows(path, writer):
    save(lay_out(large(), init_device_mesh("cpu", (4,)), (Shard(0),)), path, writer)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_what_one_reader_finds_damaged_every_rank_is_told(tmp_path, damage):
    run_ranks(4, save_in_rows, str(tmp_path / "x"), "ckptman.save")
    file = tmp_path / "x" / "__2_0.distcp"
    if damage == "flipped":
        flip(file)
    else:
        file.unlink()
    all_refused(tmp_path / "x", file.name)


@pytest.mark.slow
def test_a_file_of_plain_dcp_that_is_missing_is_told_to_every_rank(tmp_path):
    run_ranks(4, save_in_rows, str(tmp_path / "x"), "dcp")
    (tmp_path / "x" / "__1_0.distcp").unlink()
    all_refused(tmp_path / "x", "__1_0.distcp")


# ---- saving ----------------------------------------------------------------------------------------------------------


def save_replicated(folder):
    found = {}
    for name in ("hsdp", "replicas", "columns and replicas"):
        shape, placements = LAYOUTS[name]
        mesh = init_device_mesh("cpu", shape)
        state = lay_out(large() | odd(), mesh, placements)
        ckptman.save(state, f"{folder}/{name}")
        fresh = lay_out({key: torch.zeros_like(each) for key, each in (large() | odd()).items()}, mesh, placements)
        load(fresh, f"{folder}/{name}", "dcp")
        found[name] = wrong(fresh, state)
    return found


@pytest.mark.slow
def test_replicas_write_each_byte_once_and_share_evenly(tmp_path):
    ranks = run_ranks(4, save_replicated, str(tmp_path))
    unique = sum(tensor.nbytes for tensor in (large() | odd()).values())
    for name in ranks[0]:
        assert [found[name] for found in ranks] == [[]] * 4
        sizes = [each.stat().st_size for each in (tmp_path / name).glob("*.distcp")]
        assert len(sizes) == 4
        assert sum(sizes) <= 1.02 * unique, name
        assert max(sizes) <= 1.2 * unique / 4, name


def save_what_one_has(path, writer):
    api_module.TIMEOUT_SECONDS = 10
    mesh = init_device_mesh("cpu", (2,))
    state = {"both": distribute_tensor(noise(torch.int32, 900, 900), mesh, [Replicate()], src_data_rank=None)}
    if dist.get_rank() == 0:
        state["one"] = distribute_tensor(noise(torch.int32, 1900, 900), mesh, [Replicate()], src_data_rank=None)
    save(state, path, writer)


@pytest.mark.parametrize("writer", ["dcp", "StorageWriter", "ckptman.save"])
def test_a_replicated_tensor_that_one_rank_of_its_mesh_has(tmp_path, writer):
    run_ranks(2, save_what_one_has, str(tmp_path / "x"), writer, limit=30)
    state = {"one": torch.zeros(1900, 900, dtype=torch.int32), "both": torch.zeros(900, 900).int()}
    load(state, tmp_path / "x", "ckptman.load")
    assert torch.equal(state["one"], noise(torch.int32, 1900, 900))
    assert torch.equal(state["both"], noise(torch.int32, 900, 900))


def save_a_sum(path):
    api_module.TIMEOUT_SECONDS = 5
    state = {"x": torch.ones(3)}
    mesh = DeviceMesh("cpu", [1])
    if dist.get_rank() == 1:
        state["sum"] = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    try:
        ckptman.save(state, path)
    except Exception as error:
        return type(error).__name__
    return "saved"


def test_what_one_rank_cannot_plan_is_told_to_all(tmp_path):
    assert run_ranks(2, save_a_sum, str(tmp_path / "x"), limit=30) == ["ConfigError"] * 2


def be_told_of(path, what):
    """An error of this library's own on one rank, in the middle of an exchange."""
    original = getattr(sharing_module, what)

    def broken(*args, **options):
        if dist.get_rank() == 2:
            raise TypeError("what nobody thought of")
        return original(*args, **options)

    setattr(sharing_module, what, broken)
    sharing_module.BAND_BYTES = 1 << 20
    mesh = init_device_mesh("cpu", (4,))
    state = lay_out({key: torch.zeros_like(each) for key, each in large().items()}, mesh, (Shard(1),))
    begun = time.monotonic()
    try:
        ckptman.load(state, path)
    except Exception as error:
        return str(error), time.monotonic() - begun
    return "loaded", 0


@pytest.mark.slow
@pytest.mark.parametrize("what", ["put", "as_bytes", "read_fills", "fills_for_box"])
def test_an_error_that_nobody_thought_of_is_told_and_does_not_hang(tmp_path, what):
    ckptman.save(large(), tmp_path / "x")
    for text, seconds in run_ranks(4, be_told_of, str(tmp_path / "x"), what):
        assert "rank 2" in text
        assert "TypeError: what nobody thought of" in text
        assert seconds < 15


def load_columns_of_halves(path):
    """A dtype that can be stored and not copied, cut into columns."""
    mesh = init_device_mesh("cpu", (2,))
    whole = noise(torch.uint8, 600, 64)
    state = {"x": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)], src_data_rank=None)}
    state["x"] = DTensor.from_local(state["x"].to_local().view(torch.float4_e2m1fn_x2), mesh, [Shard(1)])
    ckptman.load(state, path)
    expected = distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None).to_local()
    return torch.equal(state["x"].to_local().view(torch.uint8), expected)


def test_columns_of_a_dtype_that_cannot_be_copied(tmp_path):
    ckptman.save({"x": noise(torch.uint8, 600, 64).view(torch.float4_e2m1fn_x2)}, tmp_path / "x")
    assert run_ranks(2, load_columns_of_halves, str(tmp_path / "x"), limit=30) == [True, True]
