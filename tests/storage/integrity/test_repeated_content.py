"""Freshness: a checkpoint whose parameters are all old is known, and no other."""

from pathlib import Path

import numpy as np
import pytest

from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.format.chunk_table import TensorRecord
from ckptman.storage.format.index import Index, read_index
from ckptman.storage.format.paths import METADATA, blocks_name, data_name, new_nonce, step_folder
from ckptman.storage.integrity.repeated_content import parameters_of, stale_parameters
from ckptman.storage.io.checksums import BLOCK_BYTES
from tests.helpers.checkpoints import QuickDisk, blocks_of, index_files
from tests.helpers.faulty_disk import manifest_of

ELEMENTS = {
    "model.weight": 2 * BLOCK_BYTES,
    "model.bias": 64,
    "model.norm": 4096,  # it is a parameter, and has no block of its own
    "optimizer.state.weight.exp_avg": 2 * BLOCK_BYTES,
}
PARAMETERS = ["model.weight", "model.norm"]


def _save(root, step, seeds=None, ranks=2, first=0, dtype="float32", flip=None):
    """Tensors whose bytes are told by their seeds. `first`: where the first of them begins in the data files. `flip`: a
    byte of them that is another."""
    place = LocalBackend(root, QuickDisk())
    root.mkdir(exist_ok=True)
    draft = Path(place.begin(step_folder(step), new_nonce()))
    files = {METADATA: b""}
    parts = []
    for rank in range(ranks):
        data, rows = bytearray(first), []
        for number, (name, elements) in enumerate(ELEMENTS.items()):
            share = elements // ranks
            rows.append([number, len(data), share * 4, len(data), rank * share, share])
            data += np.random.default_rng([(seeds or {}).get(name, 0), number, rank]).bytes(share * 4)
        data += step.to_bytes(8, "little")  # plain values come after it, and do change
        if flip is not None:
            data[flip] ^= 1
        files |= {data_name(rank): bytes(data), blocks_name(rank): blocks_of(bytes(data))}
        parts.append({1: np.array(rows)})
    files |= index_files([(name, dtype, (elements,)) for name, elements in ELEMENTS.items()], parts)
    for name, content in files.items():
        (draft / name).write_bytes(content)
    return place.commit(str(draft), manifest_of(root, step, files))


def _stale(older, newer):
    return stale_parameters(newer.path, newer.require_manifest(), older.path, older.require_manifest())


def test_parameters_that_all_stayed_are_told(tmp_path):
    one = _save(tmp_path, 1)
    assert _stale(one, _save(tmp_path, 2)) == PARAMETERS
    assert _stale(one, _save(tmp_path, 3, {"optimizer.state.weight.exp_avg": 1})) == PARAMETERS
    assert _stale(one, _save(tmp_path, 4, {"model.weight": 1})) == []
    assert _stale(one, _save(tmp_path, 5, {"model.norm": 1})) == []
    assert _stale(one, _save(tmp_path, 6, dict.fromkeys(ELEMENTS, 1))) == []
    assert _stale(one, one) == []  # the same step


SHARE_BYTES = ELEMENTS["model.weight"] // 2 * 4


@pytest.mark.parametrize(
    ("flip", "stale"),
    [(0, True), (64, False), (BLOCK_BYTES, False), (SHARE_BYTES + 63, False), (SHARE_BYTES + 64, True)],
)
def test_one_byte_of_a_parameter_makes_a_checkpoint_fresh_wherever_it_lies(flip, stale, tmp_path):
    """Bytes 64 to SHARE_BYTES + 64 of each file are of a parameter: it begins and ends in blocks of others too."""
    one = _save(tmp_path, 1, first=64)
    assert bool(_stale(one, _save(tmp_path, 2, first=64, flip=flip))) == stale


def test_what_is_gone_meanwhile_is_not_called_stale(tmp_path):
    one, other = _save(tmp_path, 1), _save(tmp_path, 2, {"optimizer.state.weight.exp_avg": 1})
    (one.path / data_name(0)).write_bytes(b"")
    assert _stale(one, other) == []
    (other.path / data_name(0)).write_bytes(b"")
    assert _stale(one, other) == []
    (one.path / data_name(0)).unlink()
    with pytest.raises(FileNotFoundError):
        _stale(one, other)


@pytest.mark.parametrize("change", [{"ranks": 1}, {"first": 64}, {"dtype": "int32"}])
def test_where_things_lie_elsewhere_nothing_is_told(change, tmp_path):
    one, other = _save(tmp_path, 1), _save(tmp_path, 2, **change)
    assert _stale(one, other) == []


def test_what_is_taken_for_parameters(tmp_path):
    entry = _save(tmp_path, 1)
    assert parameters_of(read_index(entry.path, entry.require_manifest())) == PARAMETERS
    assert parameters_of(Index()) == []


def test_the_largest_parameters_come_first():
    sizes = {"model.a": 2000, "model.b": 3000, "model.c": 100, "optimizer.state.b.exp_avg": 3000, "model.d": 2000}
    tensors = {
        name: TensorRecord(dtype="float32", shape=(size,), start=0, count=0, axis=0) for name, size in sizes.items()
    }
    assert parameters_of(Index(tensors=tensors)) == ["model.b", "model.a", "model.d"]
