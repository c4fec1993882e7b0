"""The reader: the position is global, and means the same on any number of ranks."""

import itertools
import json

import numpy as np
import pytest
import torch

from ckptman.errors import ConfigError, CorruptError, FormatVersionError, NotFoundError
from ckptman.train.config import DataConfig
from ckptman.train.dataset.batches import TokenData
from ckptman.train.dataset.tokenfile import META, TOKENS, TokenMeta, read_meta

SEQUENCE = 4


def write_tokens(folder, count, digest="d"):
    folder.mkdir()
    np.arange(count, dtype="<u2").tofile(folder / TOKENS)
    meta = TokenMeta(dtype="uint16", count=count, vocab_size=count, eos_id=0, sources=1, digest=digest)
    (folder / META).write_text(meta.model_dump_json())
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_tokens(tmp_path / "tokens", 53)  # 13 samples of 4


def reader(folder, rank=0, world_size=1, batch=8, micro=3, seed=1):
    config = DataConfig(path=folder, sequence_tokens=SEQUENCE, global_batch=batch, micro_batch=micro)
    return TokenData(config, seed, rank, world_size)


def firsts(batches):
    """Each token of the test file is its own place, so the first token of a row says which sample it is."""
    return [int(row[0]) // SEQUENCE for batch in batches for row in batch]


def test_samples_are_inputs_and_the_target_after_the_last(folder):
    data = reader(folder)
    assert data.samples == 13
    for batch in data.next_batch():
        assert batch.dtype == torch.int64
        assert batch.shape[1] == SEQUENCE + 1
        assert torch.equal(batch - batch[:, :1], torch.arange(SEQUENCE + 1).expand_as(batch))


def test_ranks_have_equally_many_micro_batches_even_if_some_are_empty(folder):
    shapes = [[len(batch) for batch in reader(folder, rank, 3, batch=7, micro=2).next_batch()] for rank in range(3)]
    assert shapes == [[2, 0], [2, 0], [2, 1]]
    assert [len(reader(folder, rank, 9, batch=7).next_batch()) for rank in range(9)] == [1] * 9


def test_every_chain_of_world_sizes_sees_each_sample_once_in_the_same_order(folder):
    steps = 5
    alone = reader(folder)
    expected = [firsts(alone.next_batch()) for _ in range(steps)]
    flat = [sample for step in expected for sample in step]
    assert sorted(flat[:13]) == list(range(13))
    for chain in itertools.product((1, 2, 3, 4), repeat=3):
        state = reader(folder).state_dict()
        seen = []
        for world_size, attempt_steps in zip(chain, (2, 1, 2)):
            ranks = [reader(folder, rank, world_size) for rank in range(world_size)]
            for data in ranks:
                data.load_state_dict(state)
            for _ in range(attempt_steps):
                seen.append([sample for data in ranks for sample in firsts(data.next_batch())])
            states = [data.state_dict() for data in ranks]
            assert all(each == states[0] for each in states), "the position is the same on every rank"
            state = states[0]
        assert seen == expected, chain


def test_the_state_is_plain_and_another_global_batch_goes_on_at_the_same_sample(folder):
    data = reader(folder, batch=8)
    data.next_batch()
    state = json.loads(json.dumps(data.state_dict()))
    other = reader(folder, batch=3)
    other.load_state_dict(state)
    assert firsts(other.next_batch()) == firsts(data.next_batch())[:3]


def test_another_data_set_seed_or_sequence_is_refused(folder, tmp_path):
    state = reader(folder).state_dict() | {"position": 8}
    data = reader(write_tokens(tmp_path / "other", 53, digest="e"))
    with pytest.raises(ConfigError, match="another data set"):
        data.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"run\.seed"):
        reader(folder, seed=2).load_state_dict(state)
    shorter = TokenData(DataConfig(path=folder, sequence_tokens=3), 1)
    with pytest.raises(ConfigError, match=r"data\.sequence_tokens"):
        shorter.load_state_dict(state)
    assert data.position == 0


def test_token_folders_that_cannot_be_used(folder, tmp_path):
    with pytest.raises(NotFoundError, match=r"ckptman\.train\.tokenize"):
        read_meta(tmp_path / "none")
    with pytest.raises(ConfigError, match="needs one more"):
        TokenData(DataConfig(path=folder, sequence_tokens=53), 1)
    (folder / TOKENS).write_bytes((folder / TOKENS).read_bytes() + b"x")
    with pytest.raises(CorruptError, match="107 bytes and should have 106"):
        read_meta(folder)
    (folder / TOKENS).unlink()
    for text, kind, told in (
        (None, CorruptError, r"no tokens\.bin"),
        ('{"format_version": 2, "zip": 1}', FormatVersionError, "version"),
        ("{", CorruptError, "cannot be read"),
    ):
        if text is not None:
            (folder / META).write_text(text)
        with pytest.raises(kind, match=told):
            read_meta(folder)
