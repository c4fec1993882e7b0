"""A checkpoint that is not what was saved is refused at each door: which file, which block, which tensor, what to do.

Every position of the format is changed in the tests of what reads it: blocks in `io/test_checked_reader.py`, the index
and the table in `format/test_index.py`. `faults/damage.py` draws from all bytes of a checkpoint, for every door.
"""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptman
from ckptman.storage.io.checksums import BLOCK_BYTES, digest_bytes
from tests.engine.dcp.test_values import bits, differing, load, noise, save
from tests.faults.damage import unwrapped
from tests.faults.regions import flip
from tests.helpers.checkpoints import flip_byte
from tests.helpers.faulty_disk import rewrite

DATA = "__0_0.distcp"
with_both_readers = pytest.mark.parametrize("reader", ["StorageReader", "ckptman.load"])
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def tensors():
    return {
        "first": noise(torch.float32, 1000),
        "large": noise(torch.bfloat16, 500, 400),
        "last": noise(torch.int64, 20_000),
    }


def blank():
    return {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "x"
    save(tensors(), path, "StorageWriter")
    return path


@pytest.fixture
def path(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "x"))


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
    assert "older checkpoint" in text or "ckptman verify" in text
    if any(tensor.any() for tensor in state.values()):
        assert "is not usable" in text
    return text


@with_both_readers
def test_a_changed_bit_is_found_where_it_is_asked_for(path, reader):
    whole = tensors()
    large = bits(whole.pop("large")).numpy().tobytes()
    at = (path / DATA).read_bytes().index(large) + len(large) // 2
    flip(path / DATA, at, 4)
    text = refusal(path, blank(), reader)
    assert re.search(rf"{DATA}.*\bblock {at // BLOCK_BYTES}\b.*\blarge\b", text)
    state = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    load(state, path, reader)
    assert differing(state, whole) == []


def put_folder(path):
    path.unlink()
    path.mkdir()


HARMS = {
    "a bit": flip_byte,
    "a byte less": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "a byte more": lambda path: os.truncate(path, path.stat().st_size + 1),
    "missing": lambda path: path.unlink(),
    "a folder": put_folder,
}


@with_both_readers
@pytest.mark.parametrize("file", [DATA, "index.json", "chunks.bin", "blocks-00000.bin", "manifest.json"])
def test_a_harmed_file_is_named(saved, tmp_path, file, reader):
    for harm in HARMS if file != "manifest.json" else ["a bit"]:
        path = Path(shutil.copytree(saved, tmp_path / harm))
        HARMS[harm](path / file)
        state = blank()
        assert file in refusal(path, state, reader), harm
        if file != DATA:
            assert not any(tensor.any() for tensor in state.values()), "it was known before a byte was read"


@with_both_readers
@pytest.mark.parametrize("harm", ["empty", "missing"])
def test_what_plain_dcp_wrote_may_be_cut_too(tmp_path, harm, reader):
    path = tmp_path / "x"
    save(tensors(), path, "dcp")
    HARMS[harm](path / DATA)
    assert DATA in refusal(path, blank(), reader)


def forge(path, file, data):
    """Put other bytes in place of a file as a program does that keeps the manifest right."""
    raw = json.loads((path / "manifest.json").read_bytes())
    (path / file).write_bytes(data)
    digest = digest_bytes(data, int(raw["block_bytes"]))
    rewrite(path, files={**raw["files"], file: {"bytes": len(data), "digest": digest}})


FORGED = [
    *({"start": -1}, {"start": 2**70}, {"count": 0}, {"count": 2**62}, {"axis": 7}, {"axis": 2**65}),
    *({"shape": [3]}, {"shape": [2**70]}, {"shape": [2**40, 2**40]}, {"shape": [-1, -1000]}, {"dtype": "complex128"}),
]


@with_both_readers
def test_what_cannot_be_is_refused_though_every_digest_is_right(path, reader):
    """Nothing is added up that wraps around, and no memory is taken. `test_chunk_table.py` has all that cannot be."""
    index, table = json.loads((path / "index.json").read_bytes()), (path / "chunks.bin").read_bytes()
    for change in FORGED:
        shape, dtype = change.get("shape", [1000]), torch.complex128 if "dtype" in change else torch.float32
        first = {**index["tensors"]["first"], **change}
        forge(path, "index.json", json.dumps({**index, "tensors": {**index["tensors"], "first": first}}).encode())
        target = torch.zeros(3 if shape == [3] else 1000, dtype=dtype)
        with pytest.raises((Exception, dcp.api.CheckpointException)) as caught:
            load({"first": target}, path, reader)
        assert isinstance(unwrapped(caught.value), (ckptman.CorruptError, ckptman.MismatchError, ValueError)), change
        assert not target.any()
    forge(path, "index.json", json.dumps(index).encode())
    for column, value in ((0, 2**40), (1, -1), (3, -(2**63)), (4, 2**40), (5, -1), (3, -1)):
        changed = np.frombuffer(table, "<i8").copy()
        changed[index["tensors"]["first"]["start"] + column] = value
        forge(path, "chunks.bin", changed.tobytes())
        if (column, value) != (3, -1):
            assert re.search(r"\bfirst\b", refusal(path, blank(), reader))
    state = blank()
    load(state, path, reader)  # "no known payload": the container is read as torch reads it
    assert differing(state, tensors()) == []


@pytest.mark.parametrize(
    ("reader", "code", "told"),
    [
        ("ckptman.load", errno.EIO, "Input/output error"),
        ("StorageReader", errno.EIO, "Input/output error"),
        ("StorageReader", errno.ESTALE, "Stale file handle"),
    ],
)
def test_an_error_of_the_disk(path, reader, code, told, monkeypatch):
    def broken(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises((ckptman.CorruptError, dcp.api.CheckpointException)) as raised:
        load(blank(), path, reader)
    assert told in str(raised.value)
    assert DATA in str(raised.value)
    assert "not usable" in str(raised.value)


def open_run(root, state):
    return ckptman.Checkpointer(root, state, deadline=None)


@pytest.mark.parametrize(("file", "harm"), [(DATA, "a bit"), (DATA, "missing"), ("index.json", "a bit")])
def test_a_run_goes_back_to_the_checkpoint_before(tmp_path, file, harm):
    state = {"x": tensors(), "epoch": 1}
    with open_run(tmp_path, state) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        state["x"]["large"].view(torch.uint8).add_(1)
        state["epoch"] = 2
        checkpointer.save(2)
    HARMS[harm](tmp_path / "step-0000000002" / file)
    fresh = {"x": blank(), "epoch": 0}
    with (
        pytest.warns(RuntimeWarning, match="skipping the checkpoint of step 2") as warned,
        open_run(tmp_path, fresh) as run,
    ):
        assert run.restore() == 1
    assert any(file in str(each.message) for each in warned)
    assert fresh["epoch"] == 1
    assert differing(fresh["x"], tensors()) == []
    fresh = {"x": blank(), "epoch": 0}
    with pytest.raises(ckptman.CorruptError, match=file) as caught, open_run(tmp_path, fresh) as run:
        run.restore(step=2)
    assert not any(tensor.any() for tensor in fresh["x"].values()) or "is not usable" in str(caught.value)


@pytest.mark.parametrize("lost", [DATA, "manifest.json", "index.json"])
def test_behind_one_that_is_damaged_what_is_incomplete_is_passed_over(tmp_path, lost):
    """Nobody has looked into it until then."""
    state = {"x": {"weight": torch.ones(100)}, "epoch": 0}
    with open_run(tmp_path, state) as checkpointer:
        for step in (1, 2, 3):
            state["epoch"] = step
            checkpointer.save(step)
    flip_byte(tmp_path / "step-0000000003" / DATA)
    with open_run(tmp_path, state) as checkpointer, pytest.warns(RuntimeWarning, match="skipping") as warned:
        (tmp_path / "step-0000000002" / lost).unlink()
        assert checkpointer.restore() == 1
        assert state["epoch"] == 1
    assert [re.search(r"of step (\d)", str(each.message))[1] for each in warned] == ["3", "2"]
    assert not (tmp_path / "step-0000000002" / "verified.json").exists(), "it is incomplete, and not damaged"


@with_both_readers
def test_who_loads_what_has_lost_its_manifest_is_told_that_nothing_was_checked(path, reader):
    (path / "manifest.json").unlink()
    state = blank()
    with pytest.warns(RuntimeWarning, match="no byte can be checked"):
        load(state, path, reader)
    assert differing(state, tensors()) == []
