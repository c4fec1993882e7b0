"""Who writes what: every element once, evenly, whatever the ranks have in common and whatever they do not."""

import math
import threading
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ckptman.engine.comm.control_group import Agreement, Failure, RankFailed, failure_of
from ckptman.engine.saving.write_plan import LocalShard, WritePlan, divide, plan_save
from ckptman.engine.state.file_layout import LARGE_BYTES
from ckptman.engine.state.local_shards import Box
from ckptman.engine.state.snapshot import snapshot
from ckptman.errors import ConfigError
from tests.helpers.ranks import run_ranks


def divided(boxes, ranks):
    """What each of the ranks writes of the boxes that it holds."""
    return [divide([each for each in boxes if rank in (each.box.holders or ())], rank) for rank in range(ranks)]


def flaws(boxes, pieces):
    """What is not written exactly once."""
    found = []
    for number, each in enumerate(boxes):
        offsets, sizes = each.box.offsets, each.box.sizes
        mine = [piece for rank in pieces for piece in rank if (piece.name, piece.part) == (each.name, number)]
        if each.box.is_empty:
            wanted = 0 if any(offsets) else 1
            if len(mine) != wanted:
                found.append(f"{each.name}: {len(mine)} pieces of an empty box at {offsets}")
            continue
        if not sizes:
            if len(mine) != 1:
                found.append(f"{each.name}: a scalar is written {len(mine)} times")
            continue
        end = offsets[0]
        for piece in sorted(mine, key=lambda piece: piece.offsets[0]):
            if piece.offsets[0] != end or piece.offsets[1:] != offsets[1:] or piece.sizes[1:] != sizes[1:]:
                found.append(f"{each.name}: {piece} comes after row {end} of {each.box}")
            if piece.row != piece.offsets[0] - offsets[0] or not all(piece.sizes):
                found.append(f"{each.name}: {piece} does not begin at its row, or has nothing in it")
            end = piece.offsets[0] + piece.sizes[0]
        if end != offsets[0] + sizes[0]:
            found.append(f"{each.name}: rows from {end} on are not written")
    return found


def bytes_of(pieces, boxes):
    item = {each.name: each.item_bytes for each in boxes}
    return sum(math.prod(piece.sizes) * item[piece.name] for piece in pieces)


RANKS = 6
box_sizes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 5_000_000)),
    st.tuples(st.integers(0, 4), st.integers(0, 700_000)),
    st.tuples(st.integers(0, 3000), st.integers(0, 2000)),
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 4000)),
)
holder_sets = st.sets(st.integers(0, RANKS - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))


@st.composite
def held_boxes(draw):
    found = []
    some = draw(st.lists(holder_sets, min_size=1, max_size=3))
    for number in range(draw(st.integers(1, 12))):
        sizes = draw(box_sizes)
        offsets = tuple(draw(st.sampled_from([0, 0, 7])) for _ in sizes)
        box = Box(offsets, sizes, draw(st.sampled_from(some)))
        item, cut = draw(st.sampled_from([1, 2, 4, 8, 16])), draw(st.sampled_from([True, True, True, False]))
        found.append(LocalShard(f"t{draw(st.integers(0, 99))}.{number}", box, item, number, cut))
    return found


@settings(max_examples=100)
@given(held_boxes())
def test_every_element_is_written_once_and_shares_are_even(boxes):
    pieces = divided(boxes, RANKS)
    assert flaws(boxes, pieces) == []
    number_of = {each.name: number for number, each in enumerate(boxes)}
    for rank, mine in enumerate(pieces):
        assert all(rank in (boxes[number_of[piece.name]].box.holders or ()) for piece in mine)
    for holders in {each.box.holders or () for each in boxes}:
        line = [each for each in boxes if each.box.holders == holders and each.cut and not each.box.is_empty]
        small = max((each.bytes for each in line if each.bytes < LARGE_BYTES), default=0)
        row = max((each.bytes // each.box.sizes[0] for each in line if each.bytes >= LARGE_BYTES), default=0)
        even = sum(each.bytes for each in line) / len(holders)
        if len(holders) > 1:
            names = {each.name for each in line}
            for rank in holders:
                share = bytes_of([piece for piece in pieces[rank] if piece.name in names], boxes)
                assert abs(share - even) <= row + small + 1, (holders, rank)


def test_pieces_do_not_depend_on_the_order_in_which_boxes_come():
    boxes = [LocalShard(f"t{i}", Box((0, 0), (100 + i, 4000), (0, 1, 2)), 4, i) for i in range(7)]
    for rank in range(3):
        forward, backward = divide(boxes, rank), divide(reversed(boxes), rank)
        assert forward == backward


class Line:
    """Stands for the channels of all ranks, each in a thread."""

    def __init__(self, ranks):
        self.ranks, self.sent = ranks, Counter[str]()
        self._box = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=240)

    def gather(self, rank, value):
        self._box[rank] = value
        self.sent[type(value).__name__] += 1
        self._barrier.wait()
        box = list(self._box)
        self._barrier.wait()
        return box


class End:
    """One rank's end of a line."""

    def __init__(self, line, rank):
        self._line, self.rank, self.world_size = line, rank, line.ranks

    def gather(self, value):
        return self._line.gather(self.rank, value)

    def agree(self, verb, work):
        try:
            value = work().value
        except Exception as error:
            value = failure_of(self.rank, error)
        values = self.gather(value)
        if failures := [each for each in values if isinstance(each, Failure)]:
            raise RankFailed(failures[0])
        return Agreement(values if len(set(values)) > 1 else None, (), None)


def plans_of(states):
    """The plans that ranks with these states agree on, and what was sent for it."""
    line = Line(len(states))
    found = [None] * len(states)

    def run(rank):
        try:
            found[rank] = plan_save(snapshot(states[rank], rank), End(line, rank)).plan
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found, line


def writers(plans, name):
    """Who writes which box of a tensor."""
    return [
        (rank, piece.offsets, piece.sizes)
        for rank, plan in enumerate(plans)
        for piece in plan.pieces
        if piece.name == name
    ]


class Own:
    """State of which each rank has its own."""

    per_rank = True

    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        return {"seen": torch.full((3,), self.rank), "count": self.rank}

    def load_state_dict(self, state):
        raise NotImplementedError


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 512))


def test_ranks_that_are_alike_send_a_digest_and_share_the_parameters():
    plans, line = plans_of([{"model": module(), "epoch": 3, "extra": {"x": torch.zeros(600_000)}} for _ in range(4)])
    assert line.sent == {"str": 4, "NoneType": 4}, "and that all have a plan"
    assert len({plan.tensors for plan in plans}) == 1
    for name, rows in (("model.0.weight", 1024), ("model.2.weight", 512)):
        written = writers(plans, name)
        assert sum(sizes[0] for _, _, sizes in written) == rows
        assert len({offsets for _, offsets, _ in written}) == len(written) > 1
    shares = [sum(math.prod(p.sizes) for p in plan.pieces if p.name != "extra.x") for plan in plans]
    assert max(shares) <= 1.2 * sum(shares) / 4
    # Ranks may differ in these: all of one comes from one rank.
    assert writers(plans, "extra.x") == [(0, (0,), (600_000,))]
    for buffer in ("running_mean", "running_var", "num_batches_tracked"):
        assert [rank for rank, _, _ in writers(plans, f"model.1.{buffer}")] == [0]
    assert [plan.objects for plan in plans] == [("epoch",), (), (), ()]
    assert [bool(plan.units) for plan in plans] == [True, False, False, False]


def test_ranks_that_differ_send_one_table_of_each_kind():
    def state(rank):
        common = {"all": torch.zeros(5), "one": {"k": 1}}
        return {**common, "odd": torch.zeros(7), "odd value": 1} if rank % 2 else common | {"even": torch.zeros(3, 2)}

    plans, line = plans_of([state(rank) for rank in range(5)])
    assert line.sent == {"str": 5, "NameTable": 2, "NoneType": 3 + 5}
    names = [name for name, _, _ in plans[0].tensors]
    assert names == sorted(names) == ["all", "even", "odd"]
    assert all(plan.tensors == plans[0].tensors for plan in plans)
    assert writers(plans, "all") == [(0, (0,), (5,))]
    assert writers(plans, "even") == [(0, (0, 0), (3, 2))]
    assert writers(plans, "odd") == [(1, (0,), (7,))]
    assert [plan.objects for plan in plans] == [("one.k",), ("odd value",), (), (), ()]
    assert all(set(plan.paths) == {"all", "even", "odd", "odd value", "one.k"} for plan in plans)


def test_parameters_that_some_ranks_have_are_shared_among_these():
    states = [{"model": module()} for _ in range(4)]
    for rank in (1, 3):
        states[rank]["second"] = nn.Linear(1024, 1024, bias=False)
    plans, _ = plans_of(states)
    written = writers(plans, "second.weight")
    assert [rank for rank, _, _ in written] == [1, 3]
    assert sorted((offsets[0], sizes[0]) for _, offsets, sizes in written) == [(0, 512), (512, 512)]
    assert sum(sizes[0] for _, _, sizes in writers(plans, "model.0.weight")) == 1024


def test_what_is_a_ranks_own_is_written_by_each_and_shared_by_none():
    plans, _ = plans_of([{"own": Own(rank), "shared": torch.ones(2)} for rank in range(3)])
    assert [name for name, _, _ in plans[0].tensors] == ["shared"]
    for rank, plan in enumerate(plans):
        assert isinstance(plan, WritePlan)
        name = f"own.rank-{rank:05d}.seen"
        assert plan.own_tensors == ((name, "int64", (3,)),)
        assert set(plan.own_paths) == {name, f"own.rank-{rank:05d}.count"}
        assert writers(plans, name) == [(rank, (0,), (3,))]
        assert f"own.rank-{rank:05d}.count" in plan.objects
        assert plan.own_units
        assert not any(path.startswith("own") for path in plan.paths)


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(2, dtype=torch.int32)], ids=["shape", "dtype"])
def test_one_name_for_two_things_is_refused_on_every_rank_alike(other):
    plans, _ = plans_of([{"x": torch.ones(2)}, {"x": torch.ones(2)}, {"x": other}])
    assert all(isinstance(plan, ConfigError) for plan in plans)
    assert len({str(plan) for plan in plans}) == 1
    assert "x is float32 [2] on one rank" in str(plans[0])


class Marked(torch.nn.Parameter):
    """A class of somebody's own: it is saved as torch.save does it, and not as bytes alone."""


def layouts():
    """What one tensor of eight numbers may be on this rank, of two: each needs a plan of its own."""
    mesh, other = init_device_mesh("cpu", (2,)), DeviceMesh("cpu", [1, 0])
    whole = torch.arange(8.0)
    return [
        whole,
        Marked(whole),
        distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None),
        distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None),
        distribute_tensor(whole, other, [Shard(0)], src_data_rank=None),
        whole.double(),
        whole[:7],
    ]


def signatures():
    rank = dist.get_rank()
    return [[snapshot({"x": each}, rank, strict=False).signature for each in layouts()] for _ in range(2)]


@pytest.mark.slow
def test_another_layout_is_another_plan():
    for first, second in run_ranks(2, signatures):
        assert first == second, "the same state, the same plan"
        assert len(set(first)) == len(first)
