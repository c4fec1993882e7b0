"""The check of loading itself: it passes what loads, in any layout, and finds each way in which a load can go wrong."""

import functools
import math
import multiprocessing
import os
import signal
import time

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckptman
from ckptman.engine.loading import exchange as sharing
from ckptman.engine.loading import read_tensors as reading
from ckptman.errors import ConfigError
from ckptman.tools.verify import rank_processes
from ckptman.tools.verify import reshard_check as module
from ckptman.tools.verify.rank_processes import run_forked
from ckptman.tools.verify.reports import layout_for, shown, text_of, world_sizes_with
from ckptman.tools.verify.reshard_check import check, processes_for
from ckptman.tools.verify.saved_tensors import Saved
from tests.helpers.ranks import alone, run_ranks


def _save(folder):
    """On 4 ranks: tensors of all kinds, sharded in all ways, by ckptman in `ours` and by plain DCP in `plain`."""
    torch.manual_seed(7)
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))

    def cut(shape, mesh, *placements):
        return distribute_tensor(torch.randn(shape), mesh, list(placements))

    state = {
        "rows": cut((11, 6), line, Shard(0)),
        "columns": cut((11, 6), line, Shard(1)),
        "tiles": cut((13, 9, 5), square, Shard(0), Shard(1)),
        "inner": cut((7, 9, 5), square, Shard(1), Shard(2)),
        "sharded": cut((64, 96), square, Replicate(), Shard(0)),
        "few": cut((3, 4), line, Shard(0)),
        "all": torch.randn(9, 1100),
        "a.tall": torch.randn(80_000, 3),
        "zeros": torch.zeros(40, 50),
        "scalar": torch.tensor(2.5),
        "flag": torch.tensor(True),
        "line": torch.arange(10),
        "none": torch.empty(0, 4),
        "hollow": torch.empty(6, 0),
        "nan": torch.tensor([float("nan"), -0.0, 0.0]),
        "half": torch.randn(5, 3).bfloat16(),
        "eight": torch.randn(6, 4).to(torch.float8_e4m3fn),
        "scale": torch.rand(7).to(torch.float8_e8m0fnu),
        "flags": torch.rand(9) > 0.5,
        "wave": torch.randn(3, dtype=torch.complex64),
    }
    dcp.save(state, checkpoint_id=f"{folder}/plain")
    state["epoch"] = 3
    ckptman.save(state, f"{folder}/ours")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(4, _save, str(folder))
    return folder


def _check(folder, world_sizes, mesh=None):
    return [(each.world_size, each.problems, each.notes) for each in check(folder, world_sizes, mesh)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ours", "plain"])
def test_every_kind_of_tensor_loads_in_every_layout(saved, name):
    assert alone(_check, saved / name, [1, 2, 5]) == [(1, [], []), (2, [], []), (5, [], [])]
    assert alone(_check, saved / name, [], (2, 2)) == [(4, [], [])]
    assert alone(_check, saved / name, [3], (3, 1)) == [(3, [], [])]


def _in_waves(folder, processes, mesh):
    """What is found with so many processes at a time, and how many there really were at most."""
    counts = []
    real = module.run_forked

    def spy(work, world_size, silence_seconds, at_once, **more):
        counts.append(at_once)
        return real(work, world_size, silence_seconds, at_once, **more)

    module.processes_for = lambda *_: processes
    module.run_forked = spy
    return _check(folder, [], mesh), max(counts)


@pytest.mark.parametrize("name", ["ours", "plain"])
def test_more_ranks_than_fit_load_in_waves_and_it_is_said_what_that_leaves_open(saved, name):
    ((world_size, problems, notes),), most = alone(_in_waves, saved / name, 2, (2, 6))
    assert (world_size, problems, most) == (12, [], 2)
    assert notes == [
        "that the ranks fit into memory together, and the exchange between replicas: they loaded 2 at a time, as more "
        "do not fit"
    ]


# Ways to harm a load: each is done before ranks are forked, and undone before the next.


def in_fills(harm):
    """Put what `harm` makes of the fills of one tensor in their place, on the rank with the highest number."""

    @functools.wraps(harm)
    def do(patch):
        real = reading.fills_for_box

        def fills_for_box(state, name, offsets, memory):
            fills = list(real(state, name, offsets, memory))
            is_harmed = name == "sharded" and _is_last_rank()
            yield from (harm(state, fills) or ()) if is_harmed else fills

        for each in (reading, sharing):
            patch.setattr(each, "fills_for_box", fills_for_box)

    return do


_now = {"rank": 0, "last": 0}
"""In a rank: its number, and the highest there is."""


def _is_last_rank():
    return _now["rank"] == _now["last"]


def _know_the_rank(patch, everywhere):
    """Let harms know which rank they are in; `everywhere`: as if each were the last."""
    real = module.check_rank

    def check_rank(job, rank, tell):
        _now.update(rank=rank, last=rank if everywhere else math.prod(job.layout) - 1)
        return real(job, rank, tell)

    patch.setattr(module, "check_rank", check_rank)


def _part(fill, first, last, target):
    """Rows [first, last) of what a fill reads, put into `target`."""
    return type(fill)(fill.name, fill.chunk, (fill.start[0] + first, *fill.start[1:]), target[: last - first])


@in_fills
def rows_swapped(state, fills):
    fill, *rest = fills
    swapped = [_part(fill, 0, 1, fill.target[1:]), _part(fill, 1, 2, fill.target)]
    return [*swapped, _part(fill, 2, len(fill.target), fill.target[2:]), *rest]


@in_fills
def row_dropped(state, fills):
    *rest, fill = fills
    return [*rest, _part(fill, 0, len(fill.target) - 1, fill.target)]


@in_fills
def neighbour_read(state, fills):
    fill, *rest = fills
    others = [each for each in state.all_chunks(fill.name) if each.offsets != fill.chunk.offsets]
    near = next(each for each in others if each.sizes == fill.chunk.sizes)
    return [type(fill)(fill.name, near, fill.start, fill.target), *rest]


@in_fills
def nothing_read(state, fills):
    return []


@in_fills
def read_refused(state, fills):
    raise ValueError("this one is refused")


@in_fills
def rank_killed(state, fills):
    os.kill(os.getpid(), signal.SIGKILL)


@in_fills
def rank_gone(state, fills):
    os._exit(3)


@in_fills
def rank_hung(state, fills):
    time.sleep(100)


def nothing_received(patch):
    patch.setattr(sharing._Exchange, "_take", lambda self, number, pieces, received: None)


def too_little_sent(patch):
    real = sharing._bands

    def bands(line, member, members):
        for band in real(line, member, members):
            yield [each._replace(rows=each.rows - 1) if member else each for each in band]

    patch.setattr(sharing, "_bands", bands)


def one_element_wrong(patch):
    real = module._read_into

    def read(state, tensors, channel):
        real(state, tensors, channel)
        if "all" in tensors and _is_last_rank():
            tensors["all"].to_local().view(-1)[-1:].mul_(-1)

    patch.setattr(module, "_read_into", read)


WRONG_PLANS = (rows_swapped, row_dropped, neighbour_read, nothing_read)
WRONG_EXCHANGES = (nothing_received, too_little_sent)
DEATHS = {rank_killed: "SIGKILL (out of memory?)", rank_gone: "exit code 3", rank_hung: "was silent for 3 s"}


def _harmed(folder, harms, layouts, waves):
    """What is found of each harm, in each layout."""
    found = {}
    for harm in harms:
        with pytest.MonkeyPatch.context() as patch:
            harm(patch)
            _know_the_rank(patch, everywhere=waves)
            if waves:
                patch.setattr(module, "processes_for", lambda *_: 2)
            for layout in layouts:
                (report,) = module.check(folder, [], layout, silence_seconds=3.0 if harm is rank_hung else 60.0)
                found[harm.__name__, layout] = report.problems
                assert not psutil.Process().children()
    return found


@pytest.mark.parametrize(("name", "layout"), [("ours", (2, 2)), ("plain", (2,))])
def test_what_is_wrong_is_named_with_rank_tensor_and_rows(saved, name, layout):
    """With replicas, what one rank reads wrongly it also sends to the other."""
    found = alone(_harmed, saved / name, [*WRONG_PLANS, one_element_wrong, read_refused], [layout], False)
    ranks = math.prod(layout)
    for harm in WRONG_PLANS:
        for rank, problem in zip([1, 3] if ranks == 4 else [1], found[harm.__name__, layout], strict=True):
            assert problem.startswith(f"rank {rank} of {ranks}: sharded: rows ")
            assert problem.endswith(" elements")
    (problem,) = found["one_element_wrong", layout]
    assert problem.startswith(f"rank {ranks - 1} of {ranks}: all: rows 5 to 8 differ from what is in __")
    assert problem.endswith(": 1 of 4400 elements")
    why = "sharded: it does not load: ValueError: this one is refused"
    assert found["read_refused", layout] == [f"rank {ranks - 1} of {ranks}: {why}"]


def test_a_wrong_plan_is_found_in_waves(saved):
    found = alone(_harmed, saved / "ours", list(WRONG_PLANS), [(3, 2)], True)
    for problems in found.values():
        assert {problem.partition(":")[0] for problem in problems} == {f"rank {rank} of 6" for rank in range(6)}


def test_a_wrong_exchange_between_replicas_is_found(saved):
    found = alone(_harmed, saved / "ours", list(WRONG_EXCHANGES), [(2, 2)], False)
    for problems in found.values():
        assert any(": sharded: rows " in problem for problem in problems), found


@pytest.mark.slow
@pytest.mark.parametrize("waves", [False, True])
def test_a_rank_that_dies_or_hangs_ends_the_check_with_its_name(saved, waves):
    found = alone(_harmed, saved / "ours", list(DEATHS), [(2, 2)], waves, limit_seconds=60)
    for harm, why in DEATHS.items():
        problems = found[harm.__name__, (2, 2)]
        assert any(why in each and (waves or "rank 3 of 4 " in each) for each in problems), problems
        assert len(problems) <= 4


def test_nothing_that_was_forked_is_left(saved):
    assert alone(_children_left, saved / "ours") == []


def _children_left(folder):
    assert [each.problems for each in check(folder, [3])] == [[]]
    reports = check(folder, [2, 3])
    next(reports)
    reports.close()
    return [child.pid for child in psutil.Process().children(recursive=True)]


def test_memory_is_that_of_the_largest_shard_or_a_batch():
    tensors = [Saved(str(rows), (rows, 256), torch.float32) for rows in (1, 70_000, 8, 300_000, 5)]
    tensors.append(Saved("scalar", (), torch.float32))
    batches = list(module._batches(tensors, 2))
    assert [saved for batch in batches for saved in batch] == tensors
    held = [sum(saved.shard_bytes(2) for saved in batch) for batch in batches]
    assert max(held) == 300_000 * 256 * 4 // 2
    assert sum(each > module.BATCH_BYTES for each in held) == 2


@pytest.mark.parametrize(
    ("world_size", "shard_bytes", "free_bytes", "cores", "processes"),
    [
        (8, 2**20, 2**36, 2, 8),
        (64, 2**20, 2**36, 2, 2),  # more ranks than a laptop should have
        (64, 2**20, 2**40, 64, 64),
        (8, 2**33, 2**34, 4, 1),  # one shard at a time
        (8, 2**30, 2**33, 4, 4),
        (4, 2**40, 2**30, 4, 1),
        (1, 1, 2**30, 4, 1),
    ],
)
def test_as_many_processes_as_fit(world_size, shard_bytes, free_bytes, cores, processes):
    assert processes_for(world_size, shard_bytes, free_bytes, cores) == processes


def _tight(folder):
    module.available_bytes = lambda: module.PROCESS_BYTES
    (report,) = module.check(folder, [2])
    return [*report.problems, report.not_tried]


def test_a_shard_that_does_not_fit_into_memory_is_not_tried(saved):
    (why,) = alone(_tight, saved / "ours")
    assert why.startswith("each rank needs ")
    assert "take more ranks" in why


def test_layouts():
    assert layout_for(8) == (8,)
    assert layout_for(8, (2, 4)) == (2, 4)
    assert layout_for(4, (2, 4)) == (4,)
    assert text_of((1,)) == "1 rank"
    assert text_of((2, 4)) == "8 ranks (2 replicas x 4 shards)"
    assert world_sizes_with([1, 2], (2, 4)) == [1, 2, 8]
    assert world_sizes_with([8, 2], (2, 4)) == [8, 2]
    for mesh in [(2, 2, 2), (0, 4), ()]:
        with pytest.raises(ConfigError, match="such as 2x4"):
            world_sizes_with([1], mesh)
    assert shown(list("abcd"), 2) == ["a", "b", "and 2 more"]


@pytest.mark.slow
def test_a_rank_that_reads_is_not_silent_though_it_tells_nothing():
    assert alone(_slow_disk, 1.0) == []


def _slow_disk(silence_seconds):
    def work(rank, tell):
        with open("/dev/zero", "rb", buffering=0) as disk:
            for _ in range(30):
                disk.read(1)
                time.sleep(silence_seconds / 10)  # as long as a read takes on such a disk
        return []

    return run_forked(work, 2, silence_seconds)


def test_how_much_is_done_is_told():
    assert alone(_told) == [0.25, 0.25]


def _told():
    told = []
    told_enough = multiprocessing.get_context("fork").Event()
    rank_processes._TOLD_SECONDS = 0.05

    def work(rank, tell):
        tell("half of it", 0.5 if rank else 0.0)
        told_enough.wait()
        return []

    def done(part):
        if part > 0:
            told.append(part)
        if len(told) == 2:
            told_enough.set()

    assert rank_processes.run_forked(work, 2, 60.0, done=done) == []
    return told[:2]
