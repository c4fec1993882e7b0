"""What plain DCP wrote is read without trust: its pickles, its values of numpy, its tables, its archives, its links.

Each attack here did its harm once, to torch, to numpy or to us.
"""

import io
import os
import pickle
import pickletools
import shutil
import subprocess
import sys
import warnings
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import ckptman
from ckptman.engine.loading import restricted_unpickler as foreign
from ckptman.engine.loading.restricted_unpickler import load_plain, read_foreign_metadata
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.format.index import Index
from ckptman.storage.format.pickle_guard import HostilePickle, check_pickle
from ckptman.storage.format.torch_zip import records
from tests.faults import hostile_foreign
from tests.faults.hostile_ours import container_of, zip_bomb
from tests.faults.hostile_pickles import BOMBS, CANARY, COMMANDS, POINTERS, SLOW, array, call, dtype, latin, text, whole
from tests.helpers.checkpoints import commit


@pytest.fixture
def plain(tmp_path):
    path = tmp_path / "plain"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save({"x": {"one": torch.ones(5)}, "text": "good", "epoch": 3}, checkpoint_id=path, no_dist=True)
    return path


def saved(value):
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def loaded(value):
    return load_plain(io.BytesIO(saved(value)), "the value x")


def refused(data, why="was refused"):
    with pytest.raises(ckptman.CorruptError, match=why):
        load_plain(io.BytesIO(data), "the value x")


DTYPES = (
    npst.scalar_dtypes()
    | npst.byte_string_dtypes(max_len=9)
    | npst.unicode_string_dtypes(max_len=9)
    | st.sampled_from(["<f16", ">c32", "m8", "m8[25us]"]).map(np.dtype)
)
LAYOUTS = {
    "rows": np.ascontiguousarray,
    "columns": np.asfortranarray,
    "every other": lambda array: array[..., ::2] if array.ndim else array,
}


def older(container):
    """The same as numpy 1 has pickled it."""
    with zipfile.ZipFile(io.BytesIO(container)) as archive:
        pickled = archive.read("archive/data.pkl")
    assert b"numpy._core" in pickled
    return container_of(pickled.replace(b"numpy._core", b"numpy.core"))


@given(npst.arrays(DTYPES, npst.array_shapes(min_dims=0, min_side=0, max_side=4)), st.sampled_from(list(LAYOUTS)))
def test_an_array_comes_back_bit_for_bit(value, layout):
    value = LAYOUTS[layout](value)
    kept = pickle.loads(pickle.dumps(value, 2))
    for container in (saved(value), older(saved(value))):
        found = load_plain(io.BytesIO(container), "x")
        assert type(found) is np.ndarray
        assert (found.dtype.str, found.shape) == (kept.dtype.str, kept.shape)
        assert found.strides == kept.strides or not value.size
        assert found.tobytes("A") == kept.tobytes("A")
        assert found.flags.writeable
        assert found.flags.owndata


@given(npst.arrays(DTYPES, ()))
def test_a_number_of_numpy_comes_back_bit_for_bit(array):
    value = array[()]
    kept = pickle.loads(pickle.dumps(value, 2))
    for container in (saved(value), older(saved(value))):
        found = load_plain(io.BytesIO(container), "x")
        assert (type(found), found.dtype, found.tobytes()) == (type(value), kept.dtype, kept.tobytes())


def test_values_of_numpy_are_found_wherever_they_are():
    one = np.arange(3)
    holder = [one, (1, (one, [one])), {"a": one, 2: {"b": (one,)}}, np.dtype(">f4")]
    holder.append(holder)
    found = loaded(holder)
    first = found[0]
    assert type(first) is np.ndarray
    others = [found[1][1][0], found[1][1][1][0], found[2]["a"], found[2][2]["b"][0]]
    assert all(each is first for each in others)
    assert found[3] == np.dtype(">f4")
    assert found[4] is found
    state = np.random.RandomState(7).get_state()
    again = np.random.RandomState(0)
    again.set_state(loaded(state))
    assert again.rand() == np.random.RandomState(7).rand()
    weights = torch.nn.Parameter(torch.ones(2))
    weights.note = one
    assert type(loaded({"w": weights})["w"].note) is np.ndarray


@pytest.mark.parametrize(
    "value", [b"", b"raw\xff", bytearray(), bytearray(b"\0\xff"), "latin1", ("x", "latin1"), 2**99]
)
def test_other_values_are_as_before(value):
    assert loaded([value, {"a": value}]) == [value, {"a": value}]
    for protocol in range(6):
        check_pickle(pickle.dumps([value, value], protocol))


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_that_picklers_make_are_let_pass(protocol):
    shared = (1, (2, "x"))
    value = [shared] * 1000, {shared: {3}, "f": frozenset([4])}, 2.5, 2**100, b"raw", None, True, "\u00e4"
    check_pickle(pickle.dumps(value, protocol))
    check_pickle(pickle.dumps(list(range(10_000)), protocol))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", [*COMMANDS, *BOMBS])
def test_no_pickle_runs_anything_or_takes_for_ever(tmp_path, name, monkeypatch):
    monkeypatch.setenv(CANARY, str(tmp_path / "canary"))
    data = {**COMMANDS, **BOMBS}[name]
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(ckptman.CorruptError, match="nothing of it was run"):
        read_foreign_metadata(tmp_path / ".metadata")
    in_a_list = [container_of(whole(b"]" + data[2:-1] + b"a"))] if name in POINTERS else []
    for container in (container_of(data), data, *in_a_list):
        refused(container, "nothing of it was run")
    assert not (tmp_path / "canary").exists()


def test_what_the_attacks_are_made_of_does_load():
    """A test of the tests above: with a state that numpy writes, the same instructions make an array."""
    state = b"K\x03" + text(">") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00"
    found = load_plain(io.BytesIO(container_of(whole(array(dtype("i4", state), b"\0\0\1\0")))), "x")
    assert found == np.array([256], ">i4")


def test_what_others_call_safe_of_numpy_is_not_safe_here():
    """torch has one list for the whole process. It is as it was afterwards, and in force for what is not of numpy."""
    theirs = [np.dtype, np.ndarray, (np.dtype, "numpy.dtype"), type(np.dtype("O")), type(np.dtype("V8")), Fraction]
    with torch.serialization.safe_globals(theirs):
        before = {*map(str, torch.serialization.get_safe_globals())}
        for name in POINTERS:
            refused(container_of(POINTERS[name]), "nothing of it was run")
        assert loaded(np.ones(3)).sum() == 3
        assert loaded({"a": Fraction(np.ones(2))})["a"].part.sum() == 2
        assert {*map(str, torch.serialization.get_safe_globals())} == before
    refused(saved(Fraction(1)))


class Fraction:
    """Something that a user has called safe."""

    def __init__(self, part):
        self.part = part


def test_a_unit_of_time_is_one_of_numpys():
    numbers = b"K\x04" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00"
    for unit, count in ((b"ns]f8", b"K\x01"), (b"parsecs", b"K\x01"), (b"s", b"J\xff\xff\xff\xff"), (b"s", text("1"))):
        times = b"(N(" + latin(unit) + count + b"K\x01K\x01tt"
        refused(container_of(whole(array(dtype("M8", numbers + times), bytes(8)))))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_tensor_points_to_none_but_its_own_elements():
    good = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    for value in (good.to_sparse_coo(), good.to_sparse_csr()):
        assert torch.equal(loaded(value).to_dense(), good)
    assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()
    for value in hostile_foreign.wild_sparse_tensors():
        refused(value, "nothing of it was run")
    assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()


@pytest.mark.parametrize("path", ["../../x", "/etc/passwd", "a/../../x", "", "a//b"])
def test_what_is_described_is_in_the_folder(plain, path):
    hostile_foreign.place("x.one", relative_path=path)(plain)
    with pytest.raises(ckptman.CorruptError, match="outside the checkpoint folder"):
        read_foreign_metadata(plain / ".metadata")


def test_a_pickle_can_change_nothing_but_what_it_makes():
    """Whatever else it can get hold of has no attributes: so it stays, whoever writes a new version of it."""
    module = "torch.distributed.checkpoint.metadata"
    made = {
        "a layout": call("torch.serialization", "_get_layout", text("torch.strided")),
        "a size": call("torch", "Size", b"(K\x01t"),
        "an ordered dict": call("collections", "OrderedDict"),
        "a set": call("builtins", "set"),
        "a frozen set": call("builtins", "frozenset"),
        "a path": call("pathlib", "PosixPath", text("a")),
        "a member": call(module, "_MEM_FORMAT_ENCODING", b"K\x00"),
        **{
            f"a path {number}": b"c" + f"{module}\n{name}\n".encode()
            for number, (module, name) in enumerate(foreign._ALLOWED)
        },
        "a dtype": b"ctorch\nfloat32\n",
    }
    for name, instructions in made.items():
        data = whole(instructions + b"}" + text("harm") + b"K\x01sb")
        with pytest.raises((AttributeError, HostilePickle)):
            check_pickle(data)
            foreign._Restricted(io.BytesIO(data)).load()
            pytest.fail(name)


@pytest.mark.slow
def test_what_torch_loads_late_stays_unloaded(tmp_path):
    """In a process of its own: the others may have it already."""
    (tmp_path / ".metadata").write_bytes(b"\x80\x02ctorch\n_inductor\n.")
    lines = [
        "import sys, pathlib, ckptman",
        "from ckptman.engine.loading.restricted_unpickler import read_foreign_metadata",
        "from ckptman.engine.loading.checkpoint_reader import SavedState",
        "from ckptman.storage.format.chunk_table import TensorRecord",
        "path = pathlib.Path(sys.argv[1])",
        "before = set(sys.modules)",
        "try: read_foreign_metadata(path / '.metadata')",
        "except ckptman.CorruptError as error: assert 'torch._inductor' in str(error), error",
        "class Index: tensors = {'x': TensorRecord.model_construct(dtype='_inductor')}",
        "try: SavedState(path, Index, None, None).dtype('x')",
        "except ckptman.CorruptError as error: assert 'does not know' in str(error), error",
        "print(sorted(name for name in set(sys.modules) - before if name.startswith('torch')))",
    ]
    command = [sys.executable, "-W", "ignore", "-c", "\n".join(lines), str(tmp_path)]
    assert subprocess.run(command, check=True, capture_output=True, text=True, timeout=240).stdout.strip() == "[]"


def test_torch_and_zipfile_read_the_same_archive():
    """Of two archives in one file torch would read the one that zipfile does not, and a pickle ahead of one."""
    deceiving = hostile_foreign.two_directories(2)
    assert len(torch.load(io.BytesIO(deceiving), weights_only=True)) == 2 << 20, "it must be able to deceive"
    for data in (deceiving, hostile_foreign.behind_a_pickle(whole(b"K\x07"))):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.read("archive/data.pkl") == b"\x80\x02K\x05."
        refused(data, "not an archive from its first byte")


def test_an_archive_is_as_torch_writes_it():
    data = saved({"a": (1, 2.5)})
    refused(zip_bomb(4), "compressed")
    twice = io.BytesIO(data)
    with warnings.catch_warnings(), zipfile.ZipFile(twice, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr(next(each for each in archive.namelist() if each.endswith("data.pkl")), b"N.")
    refused(twice.getvalue(), "names that")


def test_an_archive_ends_where_its_directory_does():
    data = saved({"a": torch.ones(3)})
    assert len(records(io.BytesIO(data))) == 7
    end, locator = len(data) - 22, len(data) - 42
    changes = {
        "a byte behind it": data + b"\0",
        "a byte ahead of it": b"\0" + data,
        "a comment": data[:-2] + b"\x01\x00a",
        "another place of the large end": data[: locator + 8] + bytes(8) + data[locator + 16 :],
        "no large end": data[: locator - 56] + bytes(56) + data[locator:],
        "no locator": data[:locator] + bytes(20) + data[end:],
        "another count": data[: locator - 56 + 32] + b"\x06" + data[locator - 56 + 33 :],
        "bytes within it": data[: locator - 56] + b"\0" + data[locator - 56 :],
        "its end alone": data[-22:],
        "nothing": b"",
    }
    for name, changed in changes.items():
        with pytest.raises((ValueError, zipfile.BadZipFile)):
            records(io.BytesIO(changed))
            pytest.fail(name)
        refused(changed)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_no_link_is_followed_out_of_the_folder(plain, name):
    """A copy of another checkpoint would be loaded: of somebody who may not read it, by a run that may."""
    secret = plain.parent / "secret"
    shutil.copytree(plain, secret)
    (plain / name).unlink()
    (plain / name).symlink_to(secret / name)
    with pytest.raises(ckptman.CorruptError, match=r"outside of the checkpoint folder.*cp -rL"):
        ckptman.load({"x": {"one": torch.zeros(5)}}, plain)
    (plain / name).unlink()
    (plain / name).symlink_to(f"../plain/{name}-here")
    (secret / name).rename(plain / f"{name}-here")
    state = {"x": {"one": torch.zeros(5)}, "text": "", "epoch": 0}
    ckptman.load(state, plain)
    assert (state["text"], state["epoch"]) == ("good", 3)
    (plain.parent / "link").symlink_to(plain)
    ckptman.load(state, plain.parent / "link")


@pytest.mark.timeout(20)
def test_a_place_opens_files_and_nothing_else(tmp_path):
    entry = commit(tmp_path, 1)
    original = LocalBackend(tmp_path).open(entry)
    file, size = original.open("index.json"), original.facts.sizes["index.json"]
    assert Index.model_validate_json(bytes(file.read(0, memoryview(bytearray(size))))).tensors
    file.close()
    (entry.path / "index.json").unlink()
    os.mkfifo(entry.path / "index.json")
    with pytest.raises(ckptman.CorruptError, match="not a regular file"):
        original.open("index.json")


def test_the_attacks_are_pickles():
    """A test of the tests: what is refused is refused for what it asks, and not for being cut short."""
    for data in {**SLOW, **POINTERS}.values():
        pickletools.dis(data, io.StringIO())
    pickletools.dis(hostile_foreign.ENUM_CHANGED, io.StringIO())
