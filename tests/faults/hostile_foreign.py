"""Checkpoints as plain DCP writes them that do harm: their description is a pickle, and so is every plain value."""

import dataclasses
import io
import os
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict
from functools import cache
from pathlib import PosixPath

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from tests.faults.hostile_ours import ESCAPES, claiming, container_of, outside, tensor_pickle, zip_bomb
from tests.faults.hostile_pickles import BOMBS, COMMANDS, call, text, whole

DATA = "__0_0.distcp"


def _metadata(data):
    return lambda folder: (folder / ".metadata").write_bytes(data)


def _changed(change):
    """The description with one thing changed."""

    def make(folder):
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return make


def _with_attribute(name, value):
    return _changed(lambda metadata: setattr(metadata, name, value))


def place(name, **changes):
    """Where a tensor or value is said to lie."""

    def change(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == name:
                for field, value in changes.items():
                    setattr(info, field, value)

    return _changed(change)


def _described(name, **changes):
    def change(metadata):
        for field, value in changes.items():
            object.__setattr__(metadata.state_dict_metadata[name], field, value)

    return _changed(change)


def _holds(name, container):
    """Other bytes for a tensor or value, at the end of the data file."""

    def make(folder):
        with (folder / DATA).open("ab") as file:
            at = file.tell()
            file.write(container)
        place(name, offset=at, length=len(container))(folder)

    return make


def _renamed(old, new):
    def change(metadata):
        metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(old)
        metadata.planner_data[new] = metadata.planner_data.pop(old)
        for index in [each for each in metadata.storage_data if each.fqn == old]:
            metadata.storage_data[MetadataIndex(new, index.offset, index.index)] = metadata.storage_data.pop(index)

    return _changed(change)


def _saved(value):
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _put(name, put):
    def make(folder):
        (folder / name).unlink()
        put(folder / name)

    return make


def _on_a_class(module, name, attribute, value):
    """BUILD on a class sets its attributes, for everybody who uses it in this process."""
    return (
        b"\x80\x02" + f"c{module}\n{name}\n".encode() + b"(N}" + text(attribute) + value + b"st" + b"\x86"[:0] + b"b."
    )


class _Made:
    """Is pickled as a call, what is put on what it gives, and what that holds."""

    def __init__(self, *reduced):
        self._reduced = reduced

    def __reduce__(self):
        return self._reduced


def _shown_empty(metadata):
    """A table whose `items` are none, to whoever asks it."""
    places = {
        index: dataclasses.replace(info, relative_path="../../outside/precious")
        for index, info in metadata.storage_data.items()
    }
    metadata.storage_data = _Made(OrderedDict, (), {"items": set}, None, iter(places.items()))


def _of_two_paths(metadata):
    """A path that is written in one way and opened in another."""
    parts = {"_str": DATA, "_parts": ["..", "..", "outside", "precious"], "_drv": "", "_root": ""}
    path = _Made(PosixPath, ("x",), (None, parts))
    metadata.storage_data = {
        index: dataclasses.replace(info, relative_path=path) for index, info in metadata.storage_data.items()
    }


def _through_a_linked_folder(folder):
    (folder / "sub").symlink_to(outside())
    place("x.one", relative_path="sub/precious")(folder)


def two_directories(mebibytes=1024):
    """Two archives in one file: zipfile finds a small one, and torch one that is a gigabyte when it is unpacked."""
    bomb, good = _hidden(mebibytes), container_of(b"\x80\x02K\x05.")
    (begins,), (begins_good,) = (struct.unpack("<L", each[-6:-2]) for each in (bomb, good))
    shown = bytearray(good[begins_good:-22])
    at = 0
    while at < len(shown):
        # zipfile takes the directory right ahead of the end, and shifts every place by what the end is wrong about.
        (place,) = struct.unpack_from("<L", shown, at + 42)
        struct.pack_into("<L", shown, at + 42, place + begins - begins_good)
        at += 46 + sum(struct.unpack_from("<HHH", shown, at + 28))
    assert len(shown) == len(bomb[begins:-22])
    return bomb[:-22] + good[:begins_good] + shown + bomb[-22:]


@cache
def _hidden(mebibytes):
    """A zip bomb with all records that torch wants."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("archive/data.pkl", "w") as file:
            file.write(b"\x80\x02" + pickle.BINUNICODE + struct.pack("<I", mebibytes << 20))
            for _ in range(mebibytes):
                file.write(b"a" * (1 << 20))
            file.write(pickle.STOP)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
    return out.getvalue()


def behind_a_pickle(pickled):
    """A good archive with a pickle ahead of it: torch reads what does not begin with an archive as it did of old."""
    archive = io.BytesIO(pickled)
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr("archive/data.pkl", b"\x80\x02K\x05.")
    return archive.getvalue()


def wild_sparse_tensors():
    """Indices far behind the tensor: torch writes there when it makes a dense one of it."""
    ones, far = torch.ones(2), torch.tensor([2**30, 2**30])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sparse CSR is in beta
        wild = [torch.sparse_coo_tensor(far[None], ones, (4,), check_invariants=False)]
        rows = torch.tensor([0, 1, 2])
        wild.append(torch.sparse_csr_tensor(rows, far, ones, (2, 4), check_invariants=False))
    return [_saved(each) for each in wild]


def _wild_inplace(folder):
    """Such a one where another of that shape is described."""
    size = pickle.loads((folder / ".metadata").read_bytes()).state_dict_metadata["x.large"].size
    index = torch.full((len(size), 1), 2**30)
    wild = torch.sparse_coo_tensor(index, torch.ones(1), size, check_invariants=False)
    _holds("x.large", _saved(wild))(folder)


_TUPLE = ()
for _ in range(60):
    _TUPLE = (_TUPLE, _TUPLE)

ENUM_CHANGED = whole(
    call("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", b"K\x00")
    + b"}"
    + text("_value_")
    + b"K\x03sb"
)
"""Every user of torch in this process has the one member that this changes."""

FOLDERS = {
    **{f".metadata: {name}": _metadata(data) for name, data in COMMANDS.items()},
    **{f".metadata: {name}": _metadata(data) for name, data in BOMBS.items()},
    **{f"a value: {name}": _holds("text", container_of(data)) for name, data in COMMANDS.items()},
    **{f"a value: {name}": _holds("text", container_of(data)) for name, data in BOMBS.items()},
    **{f"a bare value: {name}": _holds("text", data) for name, data in COMMANDS.items()},
    **{f"a tensor: {name}": _holds("x.one", container_of(data)) for name, data in COMMANDS.items()},
    "a value: a sparse tensor of wild indices": lambda folder: _holds("text", wild_sparse_tensors()[0])(folder),
    "a tensor: a sparse one of wild indices": lambda folder: _wild_inplace(folder),
    "a value: two directories": lambda folder: _holds("text", two_directories())(folder),
    "a tensor: two directories": lambda folder: _holds("x.one", two_directories())(folder),
    **{
        f"a value: {name} ahead of an archive": _holds("text", behind_a_pickle(BOMBS[name]))
        for name in ("a memo of 2^28 entries", "a tuple nested a million times")
    },
    "a value: a zip bomb": lambda folder: _holds("text", zip_bomb())(folder),
    "a tensor: a zip bomb": lambda folder: _holds("x.one", zip_bomb())(folder),
    "a tensor of 2^36 elements": _holds("x.one", container_of(tensor_pickle(2**36, 2**36), payload=bytes(64))),
    "a payload of four gigabytes": _holds("x.one", claiming(tensor_pickle(2**30, 2**30), 2**32 - 2)),
    "a value: a tensor of 2^36 elements": _holds("text", container_of(tensor_pickle(2**36, 2**36), payload=bytes(64))),
    "a value: another type": _holds("epoch", _saved({"not": "a number"})),
    "a value: escapes": _holds("text", _saved(ESCAPES)),
    "a value cut short": place("text", length=3),
    "a value of a terabyte": place("text", length=2**40),
    "a value before its file": place("text", offset=-4096),
    "a tensor of a terabyte": place("x.one", length=2**40),
    "a tensor before its file": place("x.one", offset=-4096),
    "offsets that are no numbers": place("x.one", offset="0", length="1"),
    "offsets beyond 64 bits": place("x.one", offset=2**70, length=2**70),
    **{
        f"a file named {path[:20]!r}": place(name, relative_path=path)
        for path in ("../../outside/precious", "/etc/passwd", "a/../../x", "", ".", ESCAPES, "x" * 5000)
        for name in ("x.one", "text")
    },
    "a file named 7": place("x.one", relative_path=7),
    "a file named by a list": place("x.one", relative_path=["a"]),
    "a tensor of 2^60 elements": _described("x.one", size=torch.Size([2**60])),
    "a size that is a list of texts": _described("x.one", size=["a", "b"]),
    "a size below zero": _described("x.large", size=(-1, 16)),
    "chunks that are none": _described("x.one", chunks=7),
    "no chunks": _described("x.large", chunks=[]),
    "chunks of something else": _described("x.one", chunks=[1, "a", None]),
    "properties that are none": _described("x.one", properties="float32"),
    "a description that is a number": _with_attribute("state_dict_metadata", 7),
    "a description of numbers": _changed(lambda metadata: metadata.state_dict_metadata.update({"x.one": 7})),
    "a description with numbers for names": _changed(lambda metadata: metadata.state_dict_metadata.update({7: 7})),
    "places that are a list": _with_attribute("storage_data", [1, 2]),
    "places of something else": _changed(lambda metadata: metadata.storage_data.update({"x": 7, 7: "x"})),
    "places in nothing": _changed(lambda metadata: metadata.storage_data.clear()),
    "places of what is not there": _changed(
        lambda metadata: metadata.storage_data.update({MetadataIndex("y", torch.Size([0])): _StorageInfo("x", 0, 1)})
    ),
    "paths that are a number": _with_attribute("planner_data", 7),
    "paths to nowhere": _changed(lambda metadata: metadata.planner_data.update({"x.one": ("x", None, ())})),
    "a path into a list of 2^40": _changed(lambda metadata: metadata.planner_data.update({"text": ("text", 2**40)})),
    "a path into a list of a million": _changed(
        lambda metadata: metadata.planner_data.update({"text": ("text", 999_999)})
    ),
    "a path of a million": _changed(lambda metadata: metadata.planner_data.update({"text": ("text",) * 10**6})),
    "a path through a tensor": _changed(lambda metadata: metadata.planner_data.update({"text": ("x", "one", "y")})),
    "a path that doubles sixty times": _changed(lambda metadata: metadata.planner_data.update({"text": _TUPLE})),
    "a name of escapes": _renamed("x.one", ESCAPES),
    "a value named by escapes": _renamed("text", ESCAPES),
    "a description without a field": _changed(lambda metadata: vars(metadata).pop("storage_data")),
    "a description of nothing": _metadata(pickle.dumps(TensorStorageMetadata.__new__(TensorStorageMetadata))),
    "a table that shows nothing of itself": _changed(_shown_empty),
    "a file of two paths": _changed(_of_two_paths),
    "a file in a folder that is a link": _through_a_linked_folder,
    "a member of an enumeration that is changed": _metadata(ENUM_CHANGED),
    "a module that torch loads late": _metadata(b"\x80\x02ctorch\n_inductor\n."),
    "a dtype that is a function": _metadata(b"\x80\x02ctorch\nload\n."),
    "an attribute put on a class": _metadata(
        _on_a_class("torch.distributed.checkpoint.metadata", "Metadata", "harm", b"K\x01")
    ),
    "an attribute put on a function": _metadata(_on_a_class("torch.serialization", "_get_layout", "harm", b"K\x01")),
    **{
        f"{what} in place of {name}": _put(name, put)
        for name in (".metadata", DATA)
        for what, put in {
            "a pipe": lambda path: os.mkfifo(path),
            "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
            "a link to a file outside": lambda path: path.symlink_to(outside() / "precious"),
            "a folder": lambda path: path.mkdir(),
        }.items()
    },
}
"""What is made of a folder that plain DCP has saved."""
