import pytest
import torch

from ckptman.engine.state.tensor_digest import PIECE_ELEMENTS, Digester

SHAPES = [(7,), (3, 5), (2, 3, 4), (PIECE_ELEMENTS + 3,), (3, PIECE_ELEMENTS)]


def digest(tensor, offsets=None):
    return Digester().digest(tensor, offsets or [0] * tensor.dim()).item()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_digest_tells_where_content_is(shape):
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    for axis, size in enumerate(shape):
        order = torch.arange(size)
        order[[0, -1]] = order[[-1, 0]]
        assert digest(whole.index_select(axis, order)) != digest(whole), f"swapped along axis {axis}"
    assert digest(whole.flip(0).contiguous()) != digest(whole)


@pytest.mark.parametrize("shape", SHAPES)
def test_those_of_shards_add_up_to_that_of_the_whole(shape):
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int64).reshape(shape)
    for axis, size in enumerate(shape):
        shards, at, total = whole.split([size // 3, size - size // 3], axis), 0, 0
        for shard in shards:
            total += digest(shard, [at if each == axis else 0 for each in range(whole.dim())])
            at += shard.shape[axis]
        assert (total - digest(whole)) % 2**64 == 0
