"""A checkpoint that is not what was saved is refused: which file, which block, which tensor, and what to do."""

import contextlib
import errno
import json
import os
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckptman
from ckptman.io.checksums import digest_bytes
from tests.dcp.test_values import load, noise, save
from tests.helpers.faulty_disk import rewrite
from tests.helpers.ranks import run_ranks

DATA = "__0_0.distcp"
DESCRIPTIONS = ("index.json", "chunks.bin", "blocks-00000.bin")
with_both_readers = pytest.mark.parametrize("reader", ["StorageReader", "ckptman.load"])


def tensors():
    return {
        "first": noise(torch.float32, 1000),
        "large": noise(torch.bfloat16, 900, 1100),
        "last": noise(torch.int64, 50_000),
    }


def blank():
    return {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}


def unwrapped(error):
    """What DCP wraps: on each rank it raises the errors of all."""
    if isinstance(error, dcp.api.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    # What `read_metadata` raises, DCP catches: it keeps the text and not the class.
    if isinstance(error, AssertionError) and "metadata read failed: " in str(error):
        return ckptman.CorruptError(str(error))
    return error


def refusal(path, state, reader):
    """The text of the CorruptError that a load ends with; it must have left the tensors alone or say so."""
    try:
        load(state, path, reader)
    except (Exception, dcp.api.CheckpointException) as caught:
        error = unwrapped(caught)
    else:
        raise AssertionError("it was loaded")
    assert isinstance(error, ckptman.CorruptError), error
    text = str(error)
    if any(tensor.any() for tensor in state.values()):
        assert "is not usable" in text
    return text


def tells_what_to_do(text):
    return "older checkpoint" in text or "ckptman verify" in text


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def block_bytes(path):
    return int(json.loads((path / "manifest.json").read_bytes())["block_bytes"])


@with_both_readers
@pytest.mark.parametrize("place", ["first byte", "middle", "last byte"])
@pytest.mark.parametrize("name", ["first", "large", "last"])
def test_one_changed_bit(tmp_path, name, place, reader):
    path, payload = tmp_path / "x", bytes_of(tensors()[name])
    save(tensors(), path, "StorageWriter")
    begin = (path / DATA).read_bytes().index(payload)
    at = begin + {"first byte": 0, "middle": len(payload) // 2, "last byte": len(payload) - 1}[place]
    flip(path / DATA, at)
    text = refusal(path, blank(), reader)
    assert DATA in text
    assert re.search(rf"\bblock {at // block_bytes(path)}\b", text)
    assert re.search(rf"\b{name}\b", text)
    assert tells_what_to_do(text)


@with_both_readers
def test_a_changed_bit_in_what_nobody_asks_for_harms_nobody(tmp_path, reader):
    path, whole = tmp_path / "x", tensors()
    save(whole, path, "StorageWriter")
    flip(path / DATA, (path / DATA).read_bytes().index(bytes_of(whole["large"])) + 900 * 1100)
    state = {"first": torch.zeros(1000), "last": torch.zeros(50_000, dtype=torch.int64)}
    load(state, path, reader)
    assert bytes_of(state["first"]) == bytes_of(whole["first"])
    assert bytes_of(state["last"]) == bytes_of(whole["last"])


def resize(path, by):
    os.truncate(path, max(0, path.stat().st_size + by))


def put_folder(path):
    path.unlink()
    path.mkdir()


SIZES = {
    "a byte less": lambda path: resize(path, -1),
    "a block less": lambda path: resize(path, -4096),
    "empty": lambda path: os.truncate(path, 0),
    "a byte more": lambda path: resize(path, 1),
    "a block more": lambda path: resize(path, 4096),
    "missing": lambda path: path.unlink(),
    "a folder": put_folder,
}
in_all_sizes = pytest.mark.parametrize("size", SIZES)


@with_both_readers
@in_all_sizes
@pytest.mark.parametrize("file", [DATA, *DESCRIPTIONS])
def test_a_file_of_another_size(tmp_path, file, size, reader):
    path = tmp_path / "x"
    save(tensors(), path, "StorageWriter")
    SIZES[size](path / file)
    state = blank()
    text = refusal(path, state, reader)
    assert file in text
    assert tells_what_to_do(text)
    if file != DATA:
        assert not any(tensor.any() for tensor in state.values()), "it was known before a byte was read"


@with_both_readers
@pytest.mark.parametrize("file", [*DESCRIPTIONS, "manifest.json"])
def test_one_changed_bit_in_a_description(tmp_path, file, reader):
    path = tmp_path / "x"
    save(tensors(), path, "StorageWriter")
    size = (path / file).stat().st_size
    for at in {0, size // 3, size // 2, size - 2, size - 1}:
        flip(path / file, at)
        state = blank()
        assert file in refusal(path, state, reader), at
        assert not any(tensor.any() for tensor in state.values())
        flip(path / file, at)
    load(blank(), path, reader)


def forge(path, file, data):
    """Put other bytes in place of a file as a program does that keeps the manifest right."""
    files = json.loads((path / "manifest.json").read_bytes())["files"]
    (path / file).write_bytes(data)
    files[file] = {"bytes": len(data), "digest": digest_bytes(data, block_bytes(path))}
    rewrite(path, files=files)


@with_both_readers
@pytest.mark.parametrize("column", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("value", [-1, 2**40, -(2**63)])
def test_a_chunk_table_that_points_elsewhere(tmp_path, column, value, reader):
    """File, container, payload, offset, size: each impossible, with every digest right."""
    path = tmp_path / "x"
    save(tensors(), path, "StorageWriter")
    start = json.loads((path / "index.json").read_bytes())["tensors"]["first"]["start"]
    table = bytearray((path / "chunks.bin").read_bytes())
    table[8 * (start + column) : 8 * (start + column) + 8] = value.to_bytes(8, "little", signed=True)
    forge(path, "chunks.bin", bytes(table))
    state = blank()
    if (column, value) == (3, -1):  # "no known payload": the container is read as torch reads it
        load(state, path, reader)
        assert bytes_of(state["first"]) == bytes_of(tensors()["first"])
        return
    assert re.search(r"\bfirst\b", refusal(path, state, reader))


@with_both_readers
def test_an_index_that_does_not_fit_its_table(tmp_path, reader):
    path = tmp_path / "x"
    save(tensors(), path, "StorageWriter")
    original = (path / "index.json").read_bytes()
    changes = (
        *({"start": 10**9}, {"start": -1}, {"start": 2**70}),
        *({"count": 0}, {"count": 99}, {"count": 2**62}, {"count": -1}),
        *({"axis": 7}, {"axis": 2**65}, {"shape": [3]}, {"dtype": "complex128"}),
    )
    for change in changes:
        raw = json.loads(original)
        raw["tensors"]["first"] |= change
        forge(path, "index.json", json.dumps(raw).encode())
        dtype = torch.complex128 if "dtype" in change else torch.float32
        state = {"first": torch.zeros(3 if "shape" in change else 1000, dtype=dtype)}
        refusal(path, state, reader)


@with_both_readers
@pytest.mark.parametrize("shape", [[2**70], [2**40, 2**40], [2**62], [-1, -1000], [0, 2**80]])
def test_shapes_that_nobody_has(tmp_path, shape, reader):
    """Nothing is added up that wraps around, and no memory is taken for it."""
    path = tmp_path / "x"
    save(tensors(), path, "StorageWriter")
    raw = json.loads((path / "index.json").read_bytes())
    raw["tensors"]["first"]["shape"] = shape
    forge(path, "index.json", json.dumps(raw).encode())
    for state in (blank(), {"last": blank()["last"]}, {"first": torch.zeros(1000)}):
        with contextlib.suppress(ckptman.MismatchError):
            try:
                load(state, path, reader)
            except (Exception, dcp.api.CheckpointException) as caught:
                error = unwrapped(caught)
                assert isinstance(error, (ckptman.CkptmanError, ValueError, RuntimeError)), repr(error)
            else:
                assert "first" not in state


@with_both_readers
def test_an_error_of_the_disk(tmp_path, reader, monkeypatch):
    path = tmp_path / "x"
    save(tensors(), path, "StorageWriter")

    def broken(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    text = refusal(path, blank(), reader)
    assert DATA in text
    assert "Input/output error" in text


@with_both_readers
@pytest.mark.parametrize("size", ["a block less", "empty", "missing"])
def test_what_plain_dcp_wrote_may_be_cut_too(tmp_path, size, reader):
    path = tmp_path / "x"
    save(tensors(), path, "dcp")
    SIZES[size](path / DATA)
    assert DATA in refusal(path, blank(), reader)


def save_rows(path):
    save(rows(fill=True), path, "StorageWriter")


def rows(fill):
    whole = noise(torch.float32, 2048, 300) * fill
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"rows": distribute_tensor(whole.nan_to_num(1), mesh, [Shard(0)], src_data_rank=None)}


def be_refused(path, reader):
    """What this rank is told, and what all errors together say."""
    state = rows(fill=False)
    try:
        load(state, path, reader)
    except (Exception, dcp.api.CheckpointException) as error:
        failures = error.failures.values() if isinstance(error, dcp.api.CheckpointException) else [(error,)]
        texts = [f"{type(each[0]).__name__}: {each[0]}" for each in failures]
        assert not state["rows"].to_local().any() or "is not usable" in " ".join(texts)
        return type(unwrapped(error)).__name__, " ".join(texts)
    return "loaded", ""


@pytest.mark.slow
@with_both_readers
def test_what_one_rank_cannot_read_is_told_to_all(tmp_path, reader):
    path = tmp_path / "x"
    run_ranks(2, save_rows, str(path))
    flip(path / "__1_0.distcp", (path / "__1_0.distcp").stat().st_size // 2)
    for kind, text in run_ranks(2, be_refused, str(path), reader):
        assert kind == "CorruptError"
        assert "__1_0.distcp" in text
        assert re.search(r"\bblock \d+\b", text)
        assert tells_what_to_do(text)


def open_run(root, state):
    return ckptman.Checkpointer(root, state, deadline=None)


DAMAGES = {
    "payload": lambda path: flip(path / DATA, (path / DATA).stat().st_size // 2),
    "size": lambda path: resize(path / DATA, -1),
    "grown": lambda path: resize(path / DATA, 1),
    "missing": lambda path: (path / DATA).unlink(),
    "blocks": lambda path: flip(path / "blocks-00000.bin", 5),
    "table": lambda path: flip(path / "chunks.bin", 9),
    "index": lambda path: flip(path / "index.json", 30),
    "no table": lambda path: (path / "chunks.bin").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_goes_back_to_the_checkpoint_before(tmp_path, damage):
    state = {"x": tensors(), "epoch": 1}
    with open_run(tmp_path, state) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        state["x"]["large"].view(torch.uint8).add_(1)
        state["epoch"] = 2
        checkpointer.save(2)
    newest = tmp_path / "step-0000000002"
    DAMAGES[damage](newest)
    fresh = {"x": blank(), "epoch": 0}
    with (
        pytest.warns(RuntimeWarning, match="skipping the checkpoint of step 2") as warned,
        open_run(tmp_path, fresh) as run,
    ):
        assert run.restore() == 1
    file = {"blocks": "blocks-00000.bin", "table": "chunks.bin", "index": "index.json", "no table": "chunks.bin"}
    assert any(file.get(damage, DATA) in str(each.message) for each in warned)
    assert fresh["epoch"] == 1
    assert all(bytes_of(fresh["x"][name]) == bytes_of(tensor) for name, tensor in tensors().items())
    fresh = {"x": blank(), "epoch": 0}
    with pytest.raises(ckptman.CorruptError) as caught, open_run(tmp_path, fresh) as run:
        run.restore(step=2)
    assert file.get(damage, DATA) in str(caught.value)
    assert not any(tensor.any() for tensor in fresh["x"].values()) or "is not usable" in str(caught.value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_who_loads_what_has_lost_its_manifest_is_told_that_nothing_was_checked(tmp_path):
    ckptman.save({"x": torch.arange(5.0)}, tmp_path / "x")
    (tmp_path / "x" / "manifest.json").unlink()
    state = {"x": torch.zeros(5)}
    with pytest.warns(RuntimeWarning, match="no byte can be checked"):
        ckptman.load(state, tmp_path / "x")
    assert state["x"].tolist() == [0, 1, 2, 3, 4]
    with pytest.warns(RuntimeWarning, match="no byte can be checked"):
        dcp.load(state, storage_reader=ckptman.StorageReader(tmp_path / "x"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_mount_that_goes_away_under_a_reader_of_dcp(tmp_path, monkeypatch):
    ckptman.save({"x": torch.arange(5.0)}, tmp_path / "x")

    def gone(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "preadv", gone)
    with pytest.raises(dcp.api.CheckpointException) as raised:
        dcp.load({"x": torch.zeros(5)}, storage_reader=ckptman.StorageReader(tmp_path / "x"))
    assert "Stale file handle" in str(raised.value)
    assert "not usable" in str(raised.value)
