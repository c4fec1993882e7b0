"""Digests of blocks: the same however the bytes come in."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from ckptman.errors import CorruptError
from ckptman.storage.io.checksums import (
    BLOCK_BYTES,
    LARGE_BLOCK_BYTES,
    BlockDigester,
    Digests,
    digest_bytes,
    digest_file,
    digest_of_blocks,
    large_block_bytes,
)


def by_hand(data, block_bytes):
    """The digests of `data`, straight from the definition."""
    blocks = [xxh3_128_digest(data[start : start + block_bytes]) for start in range(0, len(data), block_bytes)]
    return blocks, xxh3_128_hexdigest(b"".join(blocks))


@given(st.binary(max_size=200), st.integers(1, 64), st.lists(st.integers(0, 200), max_size=8))
def test_a_stream_in_any_pieces(data, block_bytes, cuts):
    digester = BlockDigester(block_bytes)
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(places):
        digester.update(data[begin:end])
    blocks, whole = by_hand(data, block_bytes)
    assert digester.finish() == whole
    assert digester.blocks == blocks
    assert digester.size_bytes == len(data)
    assert digest_of_blocks(blocks) == digest_bytes(data, block_bytes) == whole


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 31, 32, 33, 100])
def test_a_file(tmp_path, size):
    data = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(data)
    assert digest_file(tmp_path / "file", 16) == (size, by_hand(data, 16)[0])


def test_blocks_of_the_real_size(tmp_path):
    data = random.Random(0).randbytes(2 * BLOCK_BYTES + 1)
    (tmp_path / "file").write_bytes(data)
    size, blocks = digest_file(tmp_path / "file")
    assert (size, len(blocks)) == (len(data), 3)
    assert digest_of_blocks(blocks) == digest_bytes(data) == by_hand(data, BLOCK_BYTES)[1]


def test_views_of_any_shape():
    array = np.arange(24, dtype="<f4").reshape(2, 3, 4)
    empty = np.zeros((0, 3), dtype="<f4")
    digester = BlockDigester(7)
    for each in (empty.data, array.data, empty.data):
        digester.update(each)
    assert digester.finish() == digest_bytes(array.tobytes(), 7)


@pytest.mark.parametrize("size", [0, 1, 32, 33, 64, 65, 100])
def test_digests_come_back_as_they_were_kept(size):
    data = random.Random(size).randbytes(size)
    blocks, large = (b"".join(by_hand(data, each)[0]) for each in (16, 32))
    for digests in (Digests(16, blocks, size), Digests(16, blocks, size, 32, large)):
        assert Digests.from_bytes(digests.to_bytes(), 16, size) == digests
        assert digests.to_bytes().startswith(blocks), "as earlier versions want them"
    assert Digests.from_bytes(blocks + large, 16, size) == Digests(16, blocks, size), "what early versions wrote behind"


@pytest.mark.parametrize("block", [0, 1, 24, 2**30 + 16, 2**60, 2**64 - 1])
def test_large_blocks_that_cannot_be_are_refused(block):
    data = Digests(16, bytes(7 * 16), 100, 32, bytes(4 * 16)).to_bytes()
    at = 7 * 16 + 8
    with pytest.raises(CorruptError, match="no large blocks"):
        Digests.from_bytes(data[:at] + block.to_bytes(8, "little") + data[at + 8 :], 16, 100)
    for short in (data[:-1], data + b"x", data[: at + 8]):
        with pytest.raises(CorruptError, match="no large blocks"):
            Digests.from_bytes(short, 16, 100)


def test_only_files_of_more_than_one_large_block_have_digests_of_them():
    assert large_block_bytes(LARGE_BLOCK_BYTES) == 0
    assert large_block_bytes(LARGE_BLOCK_BYTES + 1) == LARGE_BLOCK_BYTES
    assert large_block_bytes(2**40, 100_000) == 0, "they are whole blocks"
