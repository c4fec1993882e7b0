"""`.metadata` written as instructions: what unpickles from it is what DCP's own classes would have made."""

import io
import pickle
import pickletools
import random
import time
import tracemalloc

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptman.engine.loading.restricted_unpickler import read_foreign_metadata
from ckptman.engine.saving import index_writer as module
from ckptman.engine.saving.index_writer import end_of_metadata, write_metadata
from ckptman.storage.format.chunk_table import HEAD, ChunkTable, TensorRecord, item_bytes
from ckptman.storage.format.index import Location

DTYPES = sorted(
    name
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and str(value) == f"torch.{name}" and not name.startswith("bits")
)


def a_table(rng, count, files):
    """Tensors of 0 to 5 dimensions with any numbers in their rows: small ones, and ones that need 64 bits."""
    numbers = np.random.default_rng(rng.randrange(2**32))
    records, rows, start = {}, [np.empty(0, np.int64)], 0
    for number in range(count):
        dims, chunks = rng.randint(0, 5), rng.choice([0, 1, 1, 2, 7, 40])
        body = np.empty((chunks, HEAD + 2 * dims), np.int64)
        body[:, 0] = numbers.integers(0, files, chunks)
        for place in range(1, body.shape[1]):
            body[:, place] = numbers.integers(0, 2 ** rng.choice([1, 8, 9, 16, 17, 31, 32, 40, 63]) - 1, chunks)
        if dims and rng.random() < 0.5:
            body[:, HEAD + dims :] = [rng.randint(1, 300) for _ in range(dims)]
        shape = tuple(rng.choice([0, 1, 300, 2**40]) for _ in range(dims))
        record = TensorRecord(dtype=rng.choice(DTYPES), shape=shape, start=start, count=chunks, axis=0)
        records[f"model.layers.{number}.wèight\n"] = record
        rows.append(body.reshape(-1))
        start += body.size
    return records, ChunkTable(records, np.concatenate(rows))


def by_objects(records, table, files, objects, paths):
    """The same out of DCP's own classes."""
    state = {}
    storage = {}
    for name, record in records.items():
        rows = table.chunks(name)
        boxes = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in zip(rows.offsets.tolist(), rows.sizes.tolist())
        ]
        properties = TensorProperties(dtype=getattr(torch, record.dtype))
        state[name] = TensorStorageMetadata(properties, torch.Size(record.shape), boxes)
        for index, box in enumerate(boxes):
            place = _StorageInfo(files[int(rows.file[index])], int(rows.offset[index]), int(rows.bytes[index]))
            storage[MetadataIndex(name, box.offsets, index)] = place
    for name, each in objects.items():
        state[name] = BytesStorageMetadata()
        storage[MetadataIndex(name)] = _StorageInfo(each.file, each.offset, each.bytes)
    meta = StorageMeta(checkpoint_id="/ckpt/step-1", save_id="abc")
    return Metadata(state, paths, storage, meta, "1.0.0")


def exact(metadata):
    """What equality does not look at: types, order, and the hints in the indexes."""
    facts = [list(metadata.state_dict_metadata), type(metadata.planner_data)]
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            facts += [type(entry.size), *((type(box.offsets), type(box.sizes)) for box in entry.chunks)]
    for index, info in metadata.storage_data.items():
        facts += [index.fqn, type(index.offset), index.index, type(info.offset), info.transform_descriptors]
    return facts


OBJECTS = {
    "optim.lr": Location(file="__0_0.distcp", offset=2**40, bytes=300),
    "rng": Location(file="__1_0.distcp", offset=0, bytes=2**33),
    "": Location(file="ü", offset=1, bytes=2),
}


def written(records, table, files, paths):
    out = io.BytesIO()
    write_metadata(out, records, table, files, OBJECTS, paths)
    out.write(end_of_metadata("/ckpt/step-1", "abc"))
    return out.getvalue()


@pytest.mark.parametrize("seed", range(12))
def test_equal_to_the_real_one(seed, tmp_path):
    rng = random.Random(seed)
    files = [f"__{rank}_0.distcp" for rank in range(rng.choice([1, 3, 300]))]
    records, table = a_table(rng, rng.choice([0, 1, 20]), len(files))
    paths = {name: ("model", number, name) for number, name in enumerate(records)}
    expected = by_objects(records, table, files, OBJECTS, paths)
    data = written(records, table, files, paths)
    found = pickle.loads(data)
    assert found == expected
    assert exact(found) == exact(expected)
    pickletools.dis(data, io.StringIO())  # every instruction is sound, and the stack ends empty

    (tmp_path / ".metadata").write_bytes(data)
    restricted = read_foreign_metadata(tmp_path / ".metadata")
    assert restricted == expected
    own = FileSystemReader(tmp_path).read_metadata()
    assert own.storage_meta is not None
    own.storage_meta.load_id = None
    assert own == expected
    assert pickle._Unpickler(io.BytesIO(data)).load() == expected


def test_more_chunks_than_are_written_at_a_time(monkeypatch):
    rng = random.Random(99)
    records, table = a_table(rng, 12, 5)
    files = list("abcde")
    whole = pickle.loads(written(records, table, files, {}))
    monkeypatch.setattr(module, "_SLAB", 16)
    assert exact(pickle.loads(written(records, table, files, {}))) == exact(whole)
    assert pickle.loads(written(records, table, files, {})) == whole == by_objects(records, table, files, OBJECTS, {})


def test_the_bytes_of_an_element_are_those_of_torch():
    for name in {*DTYPES, "bits8", "bits16"} - {"quint4x2", "quint2x4"}:  # two and four to a byte
        assert item_bytes(name) == getattr(torch, name).itemsize, name
    assert item_bytes("quint4x2") is item_bytes("of_tomorrow") is None


def test_no_class_is_in_it_that_is_not_expected():
    records, table = a_table(random.Random(3), 40, 2)
    instructions = pickletools.genops(written(records, table, ["a", "b"], {}))
    named = {str(argument) for opcode, argument, _ in instructions if "GLOBAL" in opcode.name}
    classes = (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    )
    assert named == {
        *(f"torch {record.dtype}" for record in records.values()),
        *(f"torch.distributed.checkpoint.metadata {name}" for name in classes),
        *("torch Size", "torch.serialization _get_layout"),
        "torch.distributed.checkpoint.filesystem _StorageInfo",
    }


def test_memory_and_time_do_not_go_by_the_object():
    """A quarter of a million chunks of 50 tensors: what is held at a time is small, and so is what is written."""
    ranks, count = 5000, 50
    rows = np.zeros((count, ranks, 8), np.int64)
    rows[:, :, 0] = np.arange(ranks)
    rows[:, :, 1] = 2**33
    rows[:, :, 2] = 2**20
    rows[:, :, 4] = 16 * np.arange(ranks)
    rows[:, :, 6:] = 16, 4096
    records = {
        f"layers.{number}": TensorRecord(
            dtype="bfloat16", shape=(16 * ranks, 4096), start=number * ranks * 8, count=ranks, axis=0
        )
        for number in range(count)
    }
    table = ChunkTable(records, rows.reshape(-1))
    files = [f"__{rank}_0.distcp" for rank in range(ranks)]
    out = Counter()
    begin = time.perf_counter()
    tracemalloc.start()
    try:
        write_metadata(out, records, table, files, {}, {})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    print(f"{out.bytes / (ranks * count):.1f} bytes a chunk, {time.perf_counter() - begin:.2f} s, peak {peak} bytes")
    assert peak < 8 * 2**20
    assert out.bytes < 80 * ranks * count


class Counter(io.RawIOBase):
    """A stream that only counts."""

    bytes = 0

    def write(self, data):
        size = memoryview(data).nbytes
        self.bytes += size
        return size
