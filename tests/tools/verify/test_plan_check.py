"""Plans without ranks: they say what a load would read, and find every table that cannot be planned with."""

import shutil

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import ckptman
from ckptman.engine.loading import exchange as sharing
from ckptman.engine.loading.checkpoint_reader import SavedState
from ckptman.engine.loading.read_tensors import Cut, fills_for_box, read_fills
from ckptman.storage.format.index import Index
from ckptman.storage.format.manifest import read_manifest
from ckptman.storage.format.paths import CHUNKS, INDEX
from ckptman.storage.integrity.folder_check import check_coverage
from ckptman.tools.verify import plan_check, plan_ranges
from ckptman.tools.verify.plan_check import plan
from ckptman.tools.verify.saved_tensors import Saved
from tests.engine.dcp.test_values import save
from tests.helpers.ranks import alone
from tests.helpers.simulated import reseal, simulate

pytestmark = pytest.mark.usefixtures("forked")

TENSORS = [
    *((f"layers.{number}.weight", "bfloat16", (61 + 7 * number, 96)) for number in range(8)),
    ("a.large", "float32", (700, 600)),
    ("b.line", "float32", (29,)),
    ("c.few", "float32", (3, 5)),
    ("d.none", "float32", (0, 5)),
    ("e.hollow", "float32", (5, 0)),
    ("f.step", "float32", ()),
]
BYTES = sum(int(np.prod(shape)) * (2 if dtype == "bfloat16" else 4) for _, dtype, shape in TENSORS)
LAYOUTS = [(1,), (2,), (5,), (8,), (100,), (2, 4), (40, 3)]


def _simulate(folder):
    simulate(folder, TENSORS, 6)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulated") / "checkpoint"
    alone(_simulate, folder)
    return folder


def _plan(folder, layouts):
    return [report for layout in layouts for report in plan(folder, [], layout, 1e9, 1e8)]


def test_each_rank_gets_all_it_needs_once(simulated):
    for layout, report in zip(LAYOUTS, alone(_plan, simulated, LAYOUTS)):
        assert report.problems == []
        assert report.unproved == []
        assert report.world_size == np.prod(layout)
        # Up to 32 replicas read together, what is not too small for it; what has no rows is read by each rank.
        families = -(-layout[0] // 32) if len(layout) == 2 else 1
        assert report.wanted_bytes >= families * (BYTES - 4) + 4 * report.world_size
        if len(layout) == 1:
            assert report.wanted_bytes == BYTES - 4 + 4 * report.world_size
        assert report.wanted_bytes <= report.bytes_total
        assert report.bytes_per_rank_mean * report.world_size == pytest.approx(report.bytes_total)
        assert report.bytes_per_rank_mean <= report.bytes_per_rank_max
        assert report.load_seconds == max(report.bytes_total / 1e9, report.bytes_per_rank_max / 1e8)
    assert report.files_per_rank_max <= 6


def _figures(report):
    ranges = report.ranges_total, report.wanted_bytes
    return report.problems, report.bytes_total, report.bytes_per_rank_max, report.files_per_rank_max, ranges


def _plan_in_pieces(folder, layouts):
    plan_check.RANGES_AT_A_TIME = 10
    return _plan(folder, layouts)


def test_a_plan_is_made_in_pieces_where_it_is_large(simulated):
    whole = alone(_plan, simulated, LAYOUTS)
    pieces = alone(_plan_in_pieces, simulated, LAYOUTS)
    assert [_figures(each) for each in pieces] == [_figures(each) for each in whole]


# Tables that only a plan finds to lie: digests are right, and `format/` has those that are wrong in themselves.


def payload_late(rows):
    rows[1, 3] += 2
    return "layers.3.weight: chunk 1 has its payload at byte"


def container_of_another(rows):
    rows[1, :4] = rows[2, :4]
    return "belong to a chunk of layers.3.weight and to another of layers.3.weight"


def container_elsewhere(rows):
    rows[1, [1, 3]] -= 64
    return "belong to a chunk of layers.2.weight and to another of layers.3.weight"


def container_shorter(rows):
    rows[1, 2] -= 8
    return "is not a container that torch can read"


LIES = (payload_late, container_of_another, container_elsewhere, container_shorter)


def _lie(folder, scratch):
    """For each lie what should be found, and what is."""
    record = Index.model_validate_json((folder / INDEX).read_bytes()).tensors["layers.3.weight"]
    found = []
    for lie in LIES:
        lying = scratch / lie.__name__
        shutil.copytree(folder, lying)
        numbers = np.fromfile(folder / CHUNKS, "<i8")
        expected = lie(numbers[record.start : record.start + record.count * 8].reshape(-1, 8))
        reseal(lying, numbers)
        assert check_coverage(lying, read_manifest(lying), lists=False) == []
        found.append((expected, [why for report in plan(lying, [4]) for why in report.problems]))
    return found


def test_a_table_that_lies_is_found(simulated, tmp_path):
    for expected, problems in alone(_lie, simulated, tmp_path):
        assert any(expected in problem for problem in problems), (expected, problems)
        assert all("layers.3.weight" in problem for problem in problems), problems


def _without_a_chunk(folder):
    real = plan_check.overlaps

    def fewer(chunks, readers):
        found = real(chunks, readers)
        return type(found)(*(each[1:] for each in found)) if len(chunks) > 1 else found

    plan_check.overlaps = fewer
    return [why for report in plan_check.plan(folder, [4]) for why in report.problems]


def test_ranks_that_miss_something_are_named(simulated):
    problems = alone(_without_a_chunk, simulated)
    assert "on 4 ranks: rank 0: of 2016 elements of layers.3.weight that are needed, 672 were saved" in problems


def _read_by_a_restore(state, saved, low, high):
    """Which bytes of which files a restore reads for rows [low, high)."""
    shape = (high - low, *saved.shape[1:]) if saved.shape else ()
    memory = torch.empty(shape, dtype=torch.uint8, device="meta")
    found = []
    for fill in fills_for_box(state, saved.name, (low, *[0] * (len(shape) - 1))[: len(shape)], memory):
        ranges = list(Cut(fill, saved.dtype, lambda target, source: None).from_payload(fill.chunk.payload))
        assert sum(each.bytes for each in ranges) == fill.target.numel() * saved.dtype.itemsize
        first, last = min(each.offset for each in ranges), max(each.offset + each.bytes for each in ranges)
        found.append((fill.chunk.file, first, last))
    return sorted(found)


def _compare_with_a_restore(folder, layouts):
    state, compared = SavedState.read(folder), 0
    tensors = [Saved(name, each.shape, state.dtype(name)) for name, each in state.index.tensors.items()]
    for layout in layouts:
        for saved, parts in plan_ranges.readers_of(tensors, layout, range(layout[-1])):
            chunks = state.table.chunks(saved.name)
            for readers in parts:
                found = plan_ranges.overlaps(chunks, readers)
                start, end = plan_ranges.bytes_of(saved, chunks, found, True)
                files = [state.index.files[number] for number in chunks.file[found.chunk]]
                planned = {}
                for number, *place in zip(found.reader.tolist(), files, start.tolist(), end.tolist()):
                    planned.setdefault(number, []).append((place[0], place[1], place[2]))
                for number, (low, high) in enumerate(zip(readers.low.tolist(), readers.high.tolist())):
                    expected = _read_by_a_restore(state, saved, low, high) if low < high else []
                    assert sorted(planned.get(number, [])) == expected, (layout, saved.name, number)
                    compared += 1
    return compared


def test_each_rank_reads_what_a_restore_reads(simulated):
    assert alone(_compare_with_a_restore, simulated, LAYOUTS) > 1000


def _planned_and_read(folder, world_sizes):
    """For each world size the bytes that a plan counts, in all and at most for a rank, and those really read."""
    ckptman.save({f"rows.{number}": torch.randn(301 + number, 700) for number in range(4)}, folder)
    found, state = [], SavedState.read(folder)
    for report in plan(folder, world_sizes):
        read = []
        for rank in range(report.world_size):
            fills = []
            for name, record in state.index.tensors.items():
                share = -(-record.shape[0] // report.world_size)
                low, high = rank * share, min((rank + 1) * share, record.shape[0])
                fills += fills_for_box(state, name, (low, 0), torch.empty(high - low, 700))
            read.append(read_fills(state, fills))
        found.append((report.bytes_total, report.bytes_per_rank_max, sum(read), max(read)))
    return found


def test_what_is_planned_is_what_is_read(tmp_path):
    for planned, planned_most, read, most in alone(_planned_and_read, tmp_path / "x", [1, 3]):
        assert planned == pytest.approx(read, rel=0.02)
        assert planned_most == pytest.approx(most, rel=0.02)


def _plan_of_plain_dcp(folder):
    save({f"{number}": torch.ones(9) for number in range(149)}, folder, "dcp")
    return _plan(folder, [(2, 3)])


def test_of_plain_dcp_it_is_said_what_is_not_known(tmp_path):
    (report,) = alone(_plan_of_plain_dcp, tmp_path / "plain")
    assert report.problems == []
    (unproved,) = report.unproved
    assert unproved.startswith("where the elements of 149 of 149 saved chunks begin: ")


def _shares(layout, most):
    """Compare the rows that each rank of a layout reads together with others with what `sharing` gives it."""
    tensors = [Saved(name, shape, getattr(torch, dtype)) for name, dtype, shape in TENSORS]
    tensors += [Saved("g.wide", (6, 20_000_000), torch.uint8), Saved("h.long", (9_000_001, 3), torch.int16)]
    for module in (sharing, plan_ranges):
        module.MEMBERS = most
    replicas, shards = layout
    world_size, compared = replicas * shards, 0
    theirs = {}
    for rank in range(world_size):
        mesh = DeviceMesh("cpu", torch.arange(world_size).view(layout), _init_backend=False, _rank=rank)
        group = ()
        line = []
        for saved in sorted(tensors, key=lambda each: each.name):
            share = -(-saved.rows // shards) if saved.shape else 1
            low, high = (min((rank % shards + n) * share, saved.rows) for n in (0, 1)) if saved.shape else (0, 1)
            local = torch.empty((high - low, *saved.shape[1:]) if saved.shape else (), dtype=saved.dtype, device="meta")
            theirs[saved.name, rank] = low, high
            if not saved.shape:
                continue
            meta = TensorMeta(torch.Size(saved.shape), torch.empty(saved.shape, device="meta").stride(), saved.dtype)
            spec = DTensorSpec(mesh, (Replicate(), Shard(0)), meta)
            tensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
            found = sharing._shared(saved.name, tensor, tuple(range(world_size)), rank)
            if found is not None:
                group, shared = found
                line.append(shared)
                theirs[saved.name, rank] = 0, 0
        for band in sharing._bands(line, group.index(rank), len(group)) if line else ():
            for part in band:
                first = part.shared.offsets[0] + part.first
                begin, end = theirs[part.shared.name, rank]
                assert begin == end or end == first
                theirs[part.shared.name, rank] = (first if begin == end else begin), first + part.rows
    mine = {}
    for saved, parts in plan_ranges.readers_of(tensors, layout, range(shards)):
        for readers in parts:
            for row in readers.ranks:
                for rank, low, high in zip(row.tolist(), readers.low.tolist(), readers.high.tolist()):
                    assert (saved.name, rank) not in mine
                    mine[saved.name, rank] = low, high
    assert mine.keys() == theirs.keys()
    for key, (low, high) in theirs.items():
        assert mine[key] == (low, high) or (low >= high and mine[key][0] >= mine[key][1]), (key, mine[key], low, high)
        compared += low < high
    return compared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "most"), [((1, 3), 32), ((2, 4), 32), ((3, 1), 32), ((5, 3), 32), ((7, 2), 3), ((4, 1), 3)]
)
def test_replicas_read_the_rows_that_a_restore_gives_them(layout, most):
    assert alone(_shares, layout, most) > 10
