"""`verify` of what plain DCP wrote: what can be proved is, and what cannot is said."""

import errno
import json
import os
import pickle
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptman
from ckptman.cli.app import main
from ckptman.engine.loading.checkpoint_reader import SavedState
from ckptman.engine.state.file_layout import frame_of
from ckptman.tools.verify import foreign_check
from ckptman.tools.verify.foreign_check import check_foreign
from tests.faults.regions import flip

pytestmark = pytest.mark.usefixtures("forked")

STATE = {
    "model": {"weight": torch.arange(30_000.0).reshape(300, 100), "bias": torch.ones(7, dtype=torch.bfloat16)},
    "scalar": torch.tensor(3.0),
    "epoch": 3,
    "names": ["a", "b"],
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "checkpoint"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is saved by one process
        dcp.save(STATE, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture
def folder(plain, tmp_path):
    return Path(shutil.copytree(plain, tmp_path / "checkpoint"))


def _place(folder, name):
    """The file that a tensor is in, and where in it: the place of its container, and of its first element."""
    state = SavedState.read(folder)
    (chunk,) = state.all_chunks(name)
    payload = state.payload(name, chunk)
    assert payload is not None
    return folder / chunk.file, chunk.offset, payload


@pytest.mark.slow
def test_what_is_whole_is_proved_as_far_as_it_goes(plain, capsys):
    assert main(["verify", str(plain)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{plain}: written by plain DCP, without digests: ")
    assert "KiB match their checksums; 2 files, " in lines[0]
    assert lines[0].endswith("; 3 tensors, all complete")
    assert "  digests   plain DCP keeps none; only what has a checksum of torch.save was compared" in lines
    assert "  digests   every byte of every file is the byte that was saved" not in lines
    found = check_foreign(plain)
    assert (found.problems, found.remarks, found.unread) == ([], [], [])
    assert found.checked_bytes >= 120_000
    assert not list(plain.glob("verified.json"))


def test_what_is_damaged_is_told_with_a_remedy_that_helps(folder, capsys):
    path, _, payload = _place(folder, "scalar")
    flip(path, payload, 0)
    assert main(["verify", str(folder)]) == 4
    told = capsys.readouterr()
    assert re.search(r"  __0_0.distcp: the container of scalar \(.* does not match its checksum: its bytes", told.out)
    assert f"1 of 1 checkpoint damaged or incomplete: {folder}" in told.err
    os.truncate(folder / "__0_0.distcp", 1000)
    assert main(["verify", str(folder)]) == 4
    told = capsys.readouterr()
    assert re.search("lies outside of its file.*bring this one back from a copy", told.out)
    assert "ckptman verify" not in told.out + told.err


def test_a_flip_anywhere_is_damage_or_hits_what_nobody_reads(folder):
    state = SavedState.read(folder)
    places = [chunk for name in state.index.tensors for chunk in state.all_chunks(name)]
    unnoticed = []
    for each in (*places, *state.index.objects.values()):
        for place in range(each.offset, each.offset + each.bytes, max(1, each.bytes // 25)):
            flip(folder / each.file, place, 0)
            if not check_foreign(folder).problems:
                unnoticed.append(place)
                assert _same(_load(folder))
            flip(folder / each.file, place, 0)
    assert len(unnoticed) < 100  # names, dates and padding
    assert not check_foreign(folder).problems


def _same(state):
    model = all(torch.equal(each, STATE["model"][name]) for name, each in state["model"].items())
    return model and all(state[name] == STATE[name] for name in ("scalar", "epoch", "names"))


def _load(folder):
    state = {
        "model": {name: torch.zeros_like(each) for name, each in STATE["model"].items()},
        "scalar": torch.tensor(0.0),
        "epoch": 0,
        "names": ["", ""],
    }
    ckptman.load(state, folder)
    return state


@pytest.fixture
def bare(tmp_path):
    """A checkpoint for which torch was told to write no checksums."""
    torch.serialization.set_crc32_options(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            dcp.save(STATE, checkpoint_id=tmp_path / "bare", no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    return tmp_path / "bare"


@pytest.mark.slow
def test_without_checksums_that_is_said(bare, capsys):
    path = bare / "__0_0.distcp"
    flip(path, path.read_bytes().index(STATE["model"]["weight"].numpy().tobytes()), 0)
    assert main(["verify", str(bare)]) == 0
    out = capsys.readouterr().out
    elements = "120,018 of 120,018 bytes of the elements of tensors"
    assert f"  remark: not proved: {elements} have no checksum: changed ones cannot be found there\n" in out
    assert "bytes of descriptions and plain values have no checksum: changed ones cannot be found there" in out
    assert check_foreign(bare).checked_bytes == 0


def test_a_part_without_checksums_is_counted_and_the_rest_compared(folder):
    """A container of ckptman has a checksum on all but the elements, which are written past torch."""
    path, offset, payload = _place(folder, "scalar")
    frame, data = frame_of(torch.float32, ()), bytearray(path.read_bytes())
    ours = frame.head + data[payload : payload + frame.payload_bytes] + frame.tail
    data[offset : offset + len(ours)] = ours
    path.write_bytes(data)
    found = check_foreign(folder)
    assert found.problems == []
    assert [remark.partition(":")[0] for remark in found.remarks] == [
        "4 of 120,018 bytes of the elements of tensors have no checksum"
    ]
    _, _, payload = _place(folder, "model.weight")
    flip(path, payload, 0)
    assert len(check_foreign(folder).problems) == 1


def test_what_was_transformed_is_not_looked_into_and_all_else_is(folder):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == "epoch")
    info.transform_descriptors = ["zstd"]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    path = folder / info.relative_path
    data = bytearray(path.read_bytes())
    data[info.offset : info.offset + info.length] = bytes(info.length)
    path.write_bytes(data)
    found = check_foreign(folder)
    assert found.problems == []
    assert found.remarks == ["1 of 5 containers were transformed, such as compressed: nobody looked inside"]
    path, offset, _ = _place(folder, "model.weight")
    path.write_bytes(data[:offset] + bytes(1000) + data[offset + 1000 :])
    (problem,) = check_foreign(folder).problems
    assert "the container of model.weight (" in problem


def test_a_plan_needs_no_container_opened(folder, monkeypatch):
    monkeypatch.setattr(foreign_check, "open_container", None)
    found = check_foreign(folder, open_containers=False)
    assert (found.problems, found.tensors, found.checked_bytes) == ([], 3, 0)
    assert found.remarks == ["containers were not opened: changed bytes cannot be found"]


@pytest.mark.parametrize(("code", "damaged"), [(errno.EACCES, False), (errno.ESTALE, False), (errno.EIO, True)])
def test_only_what_the_disk_cannot_read_is_damage(code, damaged, folder, monkeypatch):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", refuse)
    found = check_foreign(folder)
    assert bool(found.problems) == damaged
    assert found.unread == ([] if damaged else [f"__0_0.distcp cannot be read: {os.strerror(code)}"])
    assert found.checked_bytes == 0


def test_a_file_that_is_missing_or_full_of_zeros_is_damage(folder):
    path, offset, _ = _place(folder, "model.weight")
    size = path.stat().st_size
    os.truncate(path, offset)
    os.truncate(path, size)
    assert any("the container of model.weight" in problem for problem in check_foreign(folder).problems)
    path.unlink()
    assert "__0_0.distcp is missing" in check_foreign(folder).problems


def test_one_that_may_not_be_read_is_not_proved(folder, monkeypatch, capsys):
    def refuse(path, *_, **more):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("ckptman.engine.loading.restricted_unpickler.read_regular", refuse)
    assert main(["verify", str(folder), "--json"]) == 10
    (report,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert not report["good"]
    assert "Permission denied" in report["not_checked"][0]
