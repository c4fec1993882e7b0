"""Values that ranks do not have alike: each rank's own, or that of rank 0."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckptman
from tests.engine.dcp.test_values import differing
from tests.helpers.ranks import run_ranks


class Counter:
    """An object with a state."""

    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Position(Counter):
    """One of a user, which says itself that each rank has its own."""

    per_rank = True


def state_of(rank):
    return {
        "position": Position(rank),
        "seen": ckptman.PerRank({"samples": rank * 10, "at": torch.full((3,), rank)}),
        "counter": ckptman.PerRank(Counter(rank)),
        "log": ckptman.FromRank0(
            {"best": rank + 0.5, "history": list(range(rank + 2)), "mean": torch.full((2,), rank)}
        ),
        "last": ckptman.FromRank0(Counter(rank)),
    }


def save(root):
    with ckptman.Checkpointer(root, state_of(dist.get_rank()), deadline=None) as checkpointer:
        checkpointer.step(1)
        checkpointer.save(1)


def restore(root):
    state = state_of(7)
    with ckptman.Checkpointer(root, state, deadline=None) as checkpointer:
        checkpointer.restore()
    values = {name: getattr(each, "value", each) for name, each in state.items()}
    return {name: getattr(value, "count", value) for name, value in values.items()}


def refused(root):
    with pytest.raises(ckptman.ConfigError) as caught:
        restore(root)
    return str(caught.value)


def save_and_restore(root):
    save(root)
    return restore(root)


def test_each_rank_gets_its_own_back_and_all_that_of_rank_0(tmp_path):
    found = run_ranks(2, save_and_restore, str(tmp_path))
    for rank, values in enumerate(found):
        expected = {
            "position": rank,
            "seen": {"samples": rank * 10, "at": torch.full((3,), rank)},
            "counter": rank,
            "log": {"best": 0.5, "history": [0, 1], "mean": torch.zeros(2, dtype=torch.int64)},
            "last": 0,
        }
        assert differing(values, expected) == []


def test_on_another_number_of_ranks(tmp_path):
    run_ranks(2, save, str(tmp_path))
    for world_size in (1, 3):
        for text in run_ranks(world_size, refused, str(tmp_path), fresh=True):
            assert f"each of 2 ranks has for itself (PerRank) cannot be given to {world_size}" in text


def restore_from_rank0(root):
    state = {name: value for name, value in state_of(7).items() if name in ("log", "last")}
    ckptman.load(state, Path(root) / "step-0000000001")
    return state["log"].value["best"], state["last"].value.count


def test_rank_0_s_on_any_number_of_ranks(tmp_path):
    run_ranks(2, save, str(tmp_path))
    for world_size in (1, 3):
        assert run_ranks(world_size, restore_from_rank0, str(tmp_path)) == [(0.5, 0)] * world_size


def save_unlike(root):
    rank, texts = dist.get_rank(), []
    states = ({"n": rank}, {"log": {"same": 1, "deep": {"count": rank}}}, {"log": {"names": ["x" * 200] * (rank + 1)}})
    for number, state in enumerate(states):
        with (
            pytest.raises(ckptman.ConfigError) as caught,
            ckptman.Checkpointer(Path(root, str(number)), state, deadline=None) as checkpointer,
        ):
            checkpointer.step(1)
        texts.append(str(caught.value))
    return texts


def test_a_value_that_differs_is_told_with_its_path_its_ranks_and_its_values(tmp_path):
    found = run_ranks(2, save_unlike, str(tmp_path), fresh=True)
    assert found[0] == found[1]
    number, deep, long = found[0]
    assert number.startswith("n is 0 on rank 0 and 1 on rank 1, and only one would be saved")
    assert "ckptman.FromRank0(...) around 'n'" in number
    assert "ckptman.PerRank(...)" in number
    assert deep.startswith("log.deep.count is 0 on rank 0 and 1 on rank 1")
    assert long.startswith("log.names is ['xxx")
    assert len(long) < 500


@pytest.mark.parametrize("kind", [ckptman.PerRank, ckptman.FromRank0])
def test_dicts_lists_and_tensors_are_filled_where_they_are(tmp_path, kind):
    def value(number):
        return {"buffers": [torch.full((2,), number), torch.full((3,), number)], "log": {"best": number}, "more": 1}

    with ckptman.Checkpointer(tmp_path, {"own": kind(value(1.0))}) as checkpointer:
        checkpointer.save(1)
    held = value(0.0)
    log, (first, second), wrapped = held["log"], held["buffers"], kind(held)
    held["buffers"][1] = expanded = torch.zeros(1).expand(3)
    with ckptman.Checkpointer(tmp_path, {"own": wrapped}) as checkpointer:
        checkpointer.restore()
    assert wrapped.value is held
    assert held["log"] is log
    assert log == {"best": 1.0}
    assert held["buffers"][0] is first
    assert torch.equal(first, torch.ones(2))
    assert torch.equal(held["buffers"][1], torch.ones(3)), "in place of one that cannot be filled"
    assert not expanded.any()
    assert not second.any()
