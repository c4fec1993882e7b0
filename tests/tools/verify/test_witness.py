"""The second reader: it finds what the index, the chunk table, `.metadata` and the containers say against each other.

In all of these checkpoints every digest is right: no other level of `verify` finds a thing.
"""

import json
import pickle
import shutil
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptman
from ckptman.engine.loading.checkpoint_reader import SavedState
from ckptman.errors import CorruptError
from ckptman.storage.io.checksums import BlockDigester
from ckptman.tools.verify import witness as module
from ckptman.tools.verify.reshard_check import check
from ckptman.tools.verify.witness import Container, Witness, contradictions
from tests.engine.loading.test_damage import forge
from tests.faults.regions import flip
from tests.helpers.ranks import alone


def _save(folder):
    state = {name: torch.arange(40.0).reshape(8, 5) + start for start, name in enumerate(["a", "b"])}
    ckptman.save({**state, "half": torch.ones(6).bfloat16(), "epoch": 3}, folder)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "ours"
    alone(_save, folder)
    return folder


@pytest.fixture
def folder(ours, tmp_path):
    return shutil.copytree(ours, tmp_path / "ours")


def _problems(folder):
    (report,) = check(folder, [2])
    return report.problems


def _in_index(name, **change):
    def lie(folder):
        index = json.loads((folder / "index.json").read_bytes())
        index["tensors"][name] |= change
        forge(folder, "index.json", json.dumps(index).encode())

    return lie


def _records_swapped(folder):
    index = json.loads((folder / "index.json").read_bytes())
    tensors = index["tensors"]
    tensors["a"], tensors["b"] = tensors["b"], tensors["a"]
    forge(folder, "index.json", json.dumps(index).encode())


def _payload_late(folder):
    rows = np.fromfile(folder / "chunks.bin", "<i8")
    rows[json.loads((folder / "index.json").read_bytes())["tensors"]["a"]["start"] + 3] += 4
    forge(folder, "chunks.bin", rows.tobytes())


def _in_metadata(change):
    def lie(folder):
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata, {index.fqn: index for index in metadata.storage_data})
        forge(folder, ".metadata", pickle.dumps(metadata))

    return lie


def _swap(metadata, index):
    places = metadata.storage_data
    places[index["a"]], places[index["b"]] = places[index["b"]], places[index["a"]]


def _leave_out(metadata, index):
    del metadata.storage_data[index["a"]]
    metadata.state_dict_metadata["a"].chunks.clear()


def _forget(metadata, index):
    del metadata.storage_data[index["a"]], metadata.state_dict_metadata["a"]


def _move_value(metadata, index):
    metadata.storage_data[index["epoch"]].offset += 8


def _reshape(metadata, index):
    metadata.state_dict_metadata["half"].size = torch.Size([7])


def _in_container(folder):
    """The container says that it holds integers."""
    (chunk,) = SavedState.read(folder).all_chunks("a")
    data = bytearray((folder / chunk.file).read_bytes())
    at = data.index(b"FloatStorage", chunk.offset)
    data[at : at + 12] = b"Int16Storage"
    digester = BlockDigester()
    digester.update(memoryview(bytes(data)))
    digester.finish()
    forge(folder, "blocks-00000.bin", b"".join(digester.blocks))
    forge(folder, chunk.file, bytes(data))


def _flipped(folder):
    """Both readers find the same in the file: the load checks digests, as a restore does."""
    (chunk,) = SavedState.read(folder).all_chunks("a")
    flip(folder / chunk.file, chunk.payload + 1, 0)


LIES = [
    (_in_index("a", dtype="int32"), "a: .metadata describes float32 [8, 5], and the index int32 [8, 5]"),
    (_in_index("a", dtype="int32"), "rank 0 of 2: a: what begins at byte"),
    (_in_index("half", dtype="float16"), "half: .metadata describes bfloat16 [6], and the index float16 [6]"),
    (_records_swapped, "rank 1 of 2: b: rows 4 to 7 differ from what is in __0_0.distcp: 20 of 20 elements"),
    (_payload_late, "rank 0 of 2: a: rows 0 to 3 differ from what is in __0_0.distcp: 20 of 20 elements"),
    (_in_metadata(_swap), "rank 0 of 2: a: rows 0 to 3 differ from what is in __0_0.distcp: 20 of 20 elements"),
    (_in_metadata(_leave_out), "FOLDER/.metadata: a [8, 5] is not filled exactly by its chunks"),
    (_in_metadata(_forget), "a: .metadata describes nothing of that name, and the index float32 [8, 5]"),
    (_in_metadata(_move_value), "epoch: .metadata describes a plain value in __0_0.distcp, bytes "),
    (_in_metadata(_reshape), "FOLDER/.metadata: half [7] is not filled exactly by its chunks"),
    (_in_container, "rank 0 of 2: a: what begins at byte"),
    (_flipped, "rank 0 of 2: a: it does not load: CorruptError: "),
]


def _found(ours, scratch):
    """What is found of each lie."""
    found = [_problems(ours)]
    for number, (lie, _) in enumerate(LIES):
        folder = shutil.copytree(ours, scratch / str(number))
        lie(folder)
        found.append([problem.replace(str(folder), "FOLDER") for problem in _problems(folder)])
    return found


def test_what_contradicts_something_else_is_found(ours, tmp_path):
    good, *found = alone(_found, ours, tmp_path)
    assert good == []
    for (_, told), problems in zip(LIES, found, strict=True):
        assert any(problem.startswith(told) for problem in problems), (told, problems)


def test_a_hostile_description_is_not_run(folder, tmp_path):
    forge(folder, ".metadata", f"cos\nsystem\n(S'touch {tmp_path}/ran'\ntR.".encode())
    with pytest.raises(CorruptError, match=r"asks for os\.system"):
        contradictions(SavedState.read(folder))
    assert not (tmp_path / "ran").exists()


def _with_few_chunks(folder):
    module.MOST_CHUNKS = 2
    reports = list(check(folder, [2]))
    _payload_late(folder)
    return [*reports, *check(folder, [2])]


def test_of_very_many_chunks_the_table_says_where_they_are(folder):
    good, late = alone(_with_few_chunks, folder)
    assert (good.problems, good.notes) == (
        [],
        ["that .metadata, which plain DCP reads, names the same places: there are too many chunks"],
    )
    assert late.problems[0].startswith("rank 0 of 2: a: rows 0 to 3 differ from what is in __0_0.distcp: 20 of 20")


def _save_special(folder):
    torch.manual_seed(1)
    wave = torch.randn(5, dtype=torch.complex64).conj()
    state = {"turned": torch.randn(6, 9).t(), "wide": torch.randn(1, 4).expand(3, 4), "wave": wave}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is saved by one process
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return _problems(folder)


def test_what_only_torch_can_read_is_read_by_torch(tmp_path):
    assert alone(_save_special, tmp_path / "special") == []


def test_a_tensor_of_any_size_is_compared_in_pieces(tmp_path, monkeypatch):
    tensors = {"long": torch.randn(70_001), "wide": torch.randn(3, 50_000), "deep": torch.randn(2, 3, 9_000)}
    ckptman.save(tensors, tmp_path / "large")
    state, sizes, real = SavedState.read(tmp_path / "large"), [], Container.read
    monkeypatch.setattr(module, "PIECE_BYTES", 4096)
    monkeypatch.setattr(Container, "read", lambda self, at, size: (sizes.append(size), real(self, at, size))[1])
    witness = Witness(state, contradictions(state)[2])
    assert list(witness.problems(tensors)) == []
    assert max(sizes) <= 4096
    assert sum(sizes) == sum(each.nbytes for each in tensors.values())
    tensors["wide"][2, -1] += 1
    (problem,) = witness.problems(tensors)
    assert problem.startswith("wide: rows 0 to 2 differ from what is in ")
    assert problem.endswith(": 1 of 150000 elements")
