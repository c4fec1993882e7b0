"""What several ranks need is read by one of them and sent to the others: the same bits, each byte read once."""

import contextlib
import os
import threading
import warnings
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ckptman
import ckptman.api as api_module
import ckptman.engine.loading.exchange as sharing_module
import ckptman.engine.loading.loader as load_module
from ckptman.engine.comm.control_group import Channel, Contribution
from ckptman.engine.loading.checkpoint_reader import SavedState
from ckptman.engine.loading.exchange import SHARED_BYTES, SharedReads, read_together
from tests.engine.dcp.test_shards import local
from tests.engine.dcp.test_values import bits, noise, save
from tests.helpers.checkpoints import flip_byte
from tests.helpers.ranks import run_ranks

LAYOUTS = {
    "hsdp": ((2, 2), (Replicate(), Shard(0))),
    "replicas": ((4,), (Replicate(),)),
    "columns": ((4,), (Shard(1),)),
    "rows and columns": ((2, 2), (Shard(0), Shard(1))),
    "columns and replicas": ((2, 2), (Shard(1), Replicate())),
    "rows": ((4,), (Shard(0),)),
    "no mesh": None,
}
HALVES = ((2,), (Shard(1),))


def large():
    """Four tensors of 2 MiB."""
    return {f"w{i}": noise(torch.int32, 512, 1024) + i for i in range(4)}


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


def lay_out(whole, layout):
    """The tensors over the mesh of a layout; without one, whole on each rank."""
    if layout is None:
        return {name: tensor.clone() for name, tensor in whole.items()}
    mesh = init_device_mesh("cpu", layout[0])

    def spread(tensor):
        fit = [Replicate() if isinstance(each, Shard) and each.dim >= tensor.dim() else each for each in layout[1]]
        return distribute_tensor(tensor, mesh, fit, src_data_rank=None)

    return {name: spread(tensor) for name, tensor in whole.items()}


def wrong(found, expected):
    return [name for name in expected if not torch.equal(bits(local(found[name])), bits(local(expected[name])))]


def fill(expected, path, read=ckptman.load):
    """Read into blank tensors like the expected ones: what differs then, and what the reader returned."""
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    result = read(found, path)
    return wrong(found, expected), result


def read_on(channel, targets, path):
    """Fill the targets; the bytes that this rank read, which with digests would be whole blocks."""
    return read_together(channel, SavedState.read(Path(path), channel.rank), targets, verify=False)


def read_in_layouts(path, odd_path):
    """For each layout what differs, and the bytes that this rank read of the large tensors, in several rounds."""
    found = {}
    sharing_module.BAND_BYTES = 1 << 20
    with closing(Channel(20)) as channel:
        read = partial(read_on, channel)
        for name, layout in LAYOUTS.items():
            differing, count = fill(lay_out(large(), layout), path, read)
            found[name] = differing + fill(lay_out(odd(), layout), odd_path, read)[0], count
    return found


@pytest.mark.slow
def test_each_byte_is_read_once_and_every_bit_is_right(tmp_path):
    ckptman.save(large(), tmp_path / "large")
    ckptman.save(odd(), tmp_path / "odd")
    ranks = run_ranks(4, read_in_layouts, str(tmp_path / "large"), str(tmp_path / "odd"))
    size = sum(tensor.nbytes for tensor in large().values())
    for name in LAYOUTS:
        assert [found[name][0] for found in ranks] == [[]] * 4, name
        counts = [found[name][1] for found in ranks]
        assert size <= sum(counts) <= 1.05 * size, name
        assert max(counts) <= 1.2 * size / 4, name


def read_in_many_rounds(odd_path):
    """Bands of some rows, and families smaller than the number of replicas."""
    sharing_module.BAND_BYTES, sharing_module.MEMBERS = 20_000, 3
    with closing(Channel(20)) as channel:
        names = ("replicas", "columns", "rows")
        return [fill(lay_out(odd(), LAYOUTS[name]), odd_path, partial(read_on, channel))[0] for name in names]


def test_many_small_bands(tmp_path):
    ckptman.save(odd(), tmp_path / "odd")
    assert run_ranks(4, read_in_many_rounds, str(tmp_path / "odd")) == [[[]] * 3] * 4


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
            asked.clear()
            found[name] = *fill(lay_out(one_tensor(), LAYOUTS[name]), path, partial(read_on, channel)), set(asked)
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


def load_what_some_have(path):
    """Each pair of ranks has a mesh of its own and tensors of its own, as stages of a pipeline do."""
    rank = dist.get_rank()
    mesh = [DeviceMesh("cpu", pair) for pair in ([0, 1], [2, 3])][rank // 2]
    whole = large() | odd()
    names = {f"w{rank // 2}": Replicate(), f"w{2 + rank // 2}": Shard(1)}
    expected = {name: distribute_tensor(whole[name], mesh, [at], src_data_rank=None) for name, at in names.items()}
    more = {1: ["bf16", "few rows"], 3: ["fp8"]}
    expected |= {name: whole[name] for name in ["vector", *more.get(rank, [])]}
    return fill(expected, path)[0]


@pytest.mark.slow
def test_tensors_that_only_some_ranks_have(tmp_path):
    ckptman.save(large() | odd(), tmp_path / "x")
    assert run_ranks(4, load_what_some_have, str(tmp_path / "x")) == [[]] * 4


def load_whole_on_one(path):
    """One rank wants all of a tensor of which the others want columns."""
    columns = lay_out(odd(), HALVES)
    return fill(columns if dist.get_rank() else odd(), path)[0]


def test_ranks_that_want_different_parts_of_the_same_rows(tmp_path):
    ckptman.save(odd(), tmp_path / "x")
    assert run_ranks(2, load_whole_on_one, str(tmp_path / "x"), limit=30) == [[], []]


def load_again_and_again(path):
    api_module.TIMEOUT_SECONDS = 5
    expected = lay_out(odd(), LAYOUTS["hsdp"])
    found = [fill(expected, path, partial(ckptman.load, verify=verify))[0] for verify in (True, False, True)]
    # A rank that is in more groups than the others.
    own = dist.new_group([0])
    found.append(fill(expected, path)[0])
    if dist.get_rank() == 0:
        dist.destroy_process_group(own)
    # Ranks that can start no thread.
    with contextlib.ExitStack() as stack:
        if dist.get_rank() % 2 == 0:
            refusal = RuntimeError("can't start new thread")
            stack.enter_context(mock.patch.object(threading.Thread, "start", side_effect=refusal))
        found.append(fill(expected, path)[0])
    return found


@pytest.mark.slow
def test_one_load_after_the_other(tmp_path):
    ckptman.save(odd(), tmp_path / "step-0000000001")
    found = run_ranks(4, load_again_and_again, str(tmp_path / "step-0000000001"))
    assert found == [[[]] * 5] * 4


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


def quantized(fill):
    return torch.quantize_per_tensor(torch.full((5000,), float(fill)), 0.125, 3, torch.qint8)


def halves(whole):
    """Columns of a dtype that can be stored and not copied."""
    mine = lay_out({"x": whole}, HALVES)["x"]
    return DTensor.from_local(mine.to_local().view(torch.float4_e2m1fn_x2), mine.device_mesh, [Shard(1)])


def load_what_is_not_plain(path):
    """Quantized, conjugate, and without a way to copy its elements: which of them are as they were saved."""
    warnings.simplefilter("ignore")  # torch warns of its own use of storages
    bytes_of_x = noise(torch.uint8, 600, 64)
    conjugate = torch.zeros(60, 70, dtype=torch.complex64).conj()
    state = {"q": quantized(0), "c": conjugate, "x": halves(torch.zeros_like(bytes_of_x))}
    ckptman.load(state, path)
    return [
        torch.equal(state["q"].int_repr(), quantized(1.5).int_repr()),
        torch.equal(bits(state["c"]), bits(noise(torch.complex64, 60, 70))),
        torch.equal(local(state["x"]).view(torch.uint8), local(halves(bytes_of_x)).view(torch.uint8)),
    ]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:.*[Qq]uantiz")
def test_tensors_that_are_not_plain(tmp_path):
    four_bits = noise(torch.uint8, 600, 64).view(torch.float4_e2m1fn_x2)
    ckptman.save({"q": quantized(1.5), "c": noise(torch.complex64, 60, 70), "x": four_bits}, tmp_path / "x")
    assert run_ranks(2, load_what_is_not_plain, str(tmp_path / "x"), limit=30) == [[True] * 3] * 2


def be_refused(path):
    """For each layout, the error."""
    found = []
    for name in ("hsdp", "replicas", "columns"):
        try:
            fill(lay_out(large(), LAYOUTS[name]), path)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("loaded")
    return found


def save_in_rows(path, writer):
    save(lay_out(large(), LAYOUTS["rows"]), path, writer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "damage"), [("ckptman.save", flip_byte), ("ckptman.save", Path.unlink), ("dcp", Path.unlink)]
)
def test_what_one_reader_finds_damaged_every_rank_is_told(tmp_path, writer, damage):
    run_ranks(4, save_in_rows, str(tmp_path / "x"), writer)
    damage(tmp_path / "x" / "__2_0.distcp")
    ranks = run_ranks(4, be_refused, str(tmp_path / "x"))
    assert ranks == [ranks[0]] * 4, "all are told the same"
    for text in ranks[0]:
        assert text.startswith("CorruptError: ")
        assert "__2_0.distcp" in text


def be_told_of(path, broken):
    """An error of this library's own on one rank, in the middle of an exchange, for each function that may have it."""
    sharing_module.BAND_BYTES = 1 << 18
    expected, found = lay_out(large(), LAYOUTS["columns"]), []
    for what in broken:
        error = TypeError("what nobody thought of") if dist.get_rank() == 2 else None
        with mock.patch.object(sharing_module, what, wraps=getattr(sharing_module, what), side_effect=error):
            try:
                fill(expected, path)
            except Exception as caught:
                found.append(str(caught))
            else:
                found.append("loaded")
    return found


@pytest.mark.slow
def test_an_error_that_nobody_thought_of_is_told_and_does_not_hang(tmp_path):
    ckptman.save(large(), tmp_path / "x")
    for told in run_ranks(4, be_told_of, str(tmp_path / "x"), ["put", "as_bytes", "read_fills", "fills_for_box"]):
        assert len(told) == 4
        assert all("rank 2" in text and "TypeError: what nobody thought of" in text for text in told)


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


def share():
    channel = Channel(60)
    own = {f"own-{channel.rank}": torch.zeros(SHARED_BYTES)}
    together = SharedReads(channel)
    shared = together.find({"in place": {"weight": torch.zeros(SHARED_BYTES)}, "objects": own})
    together.keep_known(channel.agree("load()", lambda: Contribution(shared)).unlike)
    channel.close()
    return [(part, [each.name for each in group]) for (part, _), group in together._groups.items()]


def test_what_each_rank_has_for_itself_keeps_the_model_from_nothing():
    assert run_ranks(2, share) == [[("in place", ["weight"])]] * 2
