"""Checkpoints in the format of ckptman that do harm, all their digests right; and roots that do."""

import io
import json
import os
import pickle
import shutil
import zipfile
from functools import cache
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from tests.engine.loading.test_damage import forge
from tests.faults.hostile_pickles import BOMBS, COMMANDS
from tests.helpers.faulty_disk import rewrite

STEP = "step-0000000007"
OUTSIDE = "CKPTMAN_FAULTS_OUTSIDE"
"""The environment variable with a folder outside of the root, which nothing may touch."""
ESCAPES = "\x1b]0;owned\x07\x1b[2J\r\n\x9b31m\u202egnp.\u2066x\u2069\u200f\x00"
"""Text that clears a terminal, renames its window, and turns the direction of what follows."""


def _manifest(**changes):
    return lambda root: rewrite(root / STEP, **changes)


def _raw_manifest(body):
    """These bytes, with the digest that they have to end with."""

    def make(root):
        seal = b',\n "digest": "%s"\n}\n' % xxh3_128_hexdigest(body).encode()
        (root / STEP / "manifest.json").write_bytes(body + seal)

    return make


def _file_named(name):
    def make(root):
        files = json.loads((root / STEP / "manifest.json").read_bytes())["files"]
        rewrite(root / STEP, files={**files, name: files["index.json"]})

    return make


def _index(change, file="index.json"):
    def make(root):
        raw = json.loads((root / STEP / file).read_bytes())
        change(raw)
        forge(root / STEP, file, json.dumps(raw).encode())

    return make


def _unit(value, key="harm"):
    """A plain value of a state that nobody asks for, and of one that is loaded."""

    def change(raw):
        raw["units"].append({"state": "harm", "key": key, "whole": False, "value": value})
        for unit in raw["units"]:
            if unit["state"] == "text":
                unit["value"] = value

    return _index(change)


def _raw_index(data):
    return lambda root: forge(root / STEP, "index.json", data)


def _tensor_named(name):
    def change(raw):
        raw["tensors"][name] = raw["tensors"].pop("x.flags")
        raw["units"].append({"state": name, "key": name, "whole": False, "value": name})

    return _index(change)


def _as_pickle(container):
    """The container of a tensor is read as torch reads it (payload -1), and holds something else."""

    def make(root):
        folder = root / STEP
        record = json.loads((folder / "index.json").read_bytes())["tensors"]["x.one"]
        table = bytearray((folder / "chunks.bin").read_bytes())
        data = bytearray((folder / "__0_0.distcp").read_bytes())
        at = len(data)
        data += container + bytes(-len(container) % 4096)
        for column, number in ((1, at), (2, len(container)), (3, -1)):
            place = 8 * (record["start"] + column)
            table[place : place + 8] = number.to_bytes(8, "little", signed=True)
        forge(folder, "chunks.bin", bytes(table))
        forge(folder, "__0_0.distcp", bytes(data))
        from tests.helpers.checkpoints import blocks_of

        forge(folder, "blocks-00000.bin", blocks_of(bytes(data)))

    return make


def container_of(pickled, compression=zipfile.ZIP_STORED, payload=b""):
    """A file of torch.save around a pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        if payload:
            archive.writestr("archive/data/0", payload)
        archive.writestr("archive/version", b"3\n")
    return out.getvalue()


@cache
def zip_bomb(mebibytes=1024):
    """A pickle of so much in a thousandth of it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("archive/data.pkl", "w") as file:
        file.write(b"\x80\x02")
        for _ in range(mebibytes):
            file.write(b"N0" * (512 * 1024))
        file.write(b"K\x01.")
    return out.getvalue()


def claiming(pickled, size):
    """A container whose directory says that its payload has `size` bytes."""
    data = bytearray(container_of(pickled, payload=bytes(64)))
    for name, field in ((b"PK\x01\x02", 20), (b"PK\x03\x04", 18)):
        at = 0
        while (at := data.find(name, at)) >= 0:
            if b"data/0" in data[at : at + 80]:
                data[at + field : at + field + 8] = size.to_bytes(4, "little") * 2
            at += 4
    return bytes(data)


STORAGE = b"ctorch\nFloatStorage\n"


def tensor_pickle(numel, size, stride=1):
    """The pickle of a tensor that says how much it holds."""
    number = pickle.dumps
    claim = number(numel, 2)[2:-1]
    storage = b"(X\x07\x00\x00\x00storage" + STORAGE + b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + claim + b"tQ"
    shape = number((size,), 2)[2:-1].replace(b"q\x00", b"")
    strides = number((stride,), 2)[2:-1].replace(b"q\x00", b"")
    rebuilt = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + shape + strides
    return b"\x80\x02" + rebuilt + b"\x89ccollections\nOrderedDict\n)RtR."


def _sparse(name, size, honest):
    def make(root):
        path = root / STEP / name
        os.truncate(path, size)
        if honest:
            files = json.loads((root / STEP / "manifest.json").read_bytes())["files"]
            files[name]["bytes"] = size
            rewrite(root / STEP, files=files)

    return make


def _in_place_of(name, put):
    def make(root):
        (root / STEP / name).unlink()
        put(root / STEP / name)

    return make


def outside():
    return Path(os.environ[OUTSIDE])


def _link_outside(name):
    return lambda root: (root / name).symlink_to(outside())


def _run_file(name, put):
    """Something in the place of a file of the run, and a leftover that makes prune look at the owner."""

    def make(root):
        (root / ".ckptman").mkdir()
        put(root / ".ckptman" / name)
        (root / "step-0000000009.tmp-deadbeef").mkdir()

    return make


def _links_within(root):
    for kind in ("tmp", "trash", "old"):
        folder = root / f"step-0000000009.{kind}-deadbeef"
        folder.mkdir()
        (folder / "away").symlink_to(outside())
        (folder / "precious").symlink_to(outside() / "precious")
    (root / STEP / "away").symlink_to(outside())
    shutil.copytree(root / STEP, root / "step-0000000008", symlinks=True)
    rewrite(root / "step-0000000008", step=8, sequence=8)


def _half_outside(root):
    (outside() / "outcome.json.tmp-1-0123abcd").symlink_to("precious")
    (outside() / "lease-0a1b2c3d.json").symlink_to("nowhere")  # which counts as one that is over
    (root / ".ckptman").symlink_to(outside())


_DEEP = 200_000
_NUMBER = "9" * 4000
_BASE = b'{"format_version": 1, "step": 7, '
TENSOR_GIB = tensor_pickle(2**36, 2**36)

ROOTS = {
    **{
        f"a manifest that names {name[:20]!r}": _file_named(name)
        for name in ("../x", "/etc/passwd", "a/b", "..", ".", "", "x\0y", ESCAPES, "x" * 100_000, "\ud800", "\u202ex")
    },
    "a manifest nested deeply": _raw_manifest(_BASE + b'"mesh": ' + b"[" * _DEEP + b"]" * _DEEP),
    "a manifest that never closes": _raw_manifest(_BASE + b'"mesh": ' + b'{"a":' * _DEEP),
    "a manifest of a million files": _raw_manifest(
        _BASE
        + b'"files": {'
        + b",".join(b'"f%d": {"bytes": 0, "digest": "%032x"}' % (n, n) for n in range(10**5))
        + b"}"
    ),
    "a manifest with a number of 4,000 digits": _raw_manifest(_BASE + f'"sequence": {_NUMBER}'.encode()),
    "a manifest with a number of 5,000 digits": _raw_manifest(_BASE + f'"sequence": 1{_NUMBER}{_NUMBER}'.encode()),
    "a sequence of 4,000 digits": _manifest(sequence=int(_NUMBER)),
    "a step of 4,000 digits": _manifest(step=int(_NUMBER)),
    "a world of 4,000 digits": _manifest(world_size=int(_NUMBER)),
    "an attempt of 4,000 digits": _manifest(attempt=int(_NUMBER), restored_from=int(_NUMBER)),
    "a year that no calendar has": _manifest(time_seconds=1e300),
    "a time before all others": _manifest(time_seconds=-1e300),
    "a time that is no number": _manifest(time_seconds=float("nan")),
    "blocks of a gigabyte": _manifest(block_bytes=2**30),
    "blocks of no bytes": _manifest(block_bytes=0),
    "format version -1": _manifest(format_version=-1),
    "format version 10^4000": _manifest(format_version=int(_NUMBER)),
    "a format version of a megabyte": _manifest(format_version="x" * 2**20),
    "a mesh of escapes": _manifest(mesh={"names": [ESCAPES], "shape": [2**70]}),
    "a mesh of escapes that may be": _manifest(mesh={"names": [ESCAPES], "shape": [2]}),
    "metrics of escapes": _manifest(metrics={ESCAPES: float("inf"), "y": float("nan"), "z": 1e308}),
    "everything of escapes": _manifest(
        reason=ESCAPES, run_id=ESCAPES, job_id=ESCAPES, torch_version=ESCAPES, ckptman_version=ESCAPES
    ),
    "a field of escapes": _manifest(**{ESCAPES: 1}),
    "a manifest of a gigabyte of nothing": _sparse("manifest.json", 2**30, honest=False),
    "an index of a gigabyte of nothing": _sparse("index.json", 2**30, honest=False),
    "an index that claims a gigabyte": _sparse("index.json", 2**30, honest=True),
    "an index of eight gigabytes": _sparse("index.json", 2**33, honest=True),
    "block digests of eight gigabytes": _sparse("blocks-00000.bin", 2**33, honest=True),
    "an index nested deeply": _raw_index(b'{"format_version": 1, "units": ' + b"[" * _DEEP + b"]" * _DEEP + b"}"),
    "an index of escapes": _tensor_named(ESCAPES),
    "a tensor with a long name": _tensor_named("x" * 2**20),
    "an index that names files outside": _index(lambda raw: raw.update(files=["../../x", "/etc/passwd"])),
    "objects in files outside": _index(
        lambda raw: raw["objects"].update(epoch={"file": "../x", "offset": 0, "bytes": 10})
    ),
    "objects of a terabyte": _index(
        lambda raw: raw["objects"].update(epoch={"file": "__0_0.distcp", "offset": 0, "bytes": 2**40})
    ),
    "a tensor of 2^60 elements": _index(lambda raw: raw["tensors"]["x.one"].update(shape=[2**60])),
    "a tensor of a million dimensions": _index(lambda raw: raw["tensors"]["x.one"].update(shape=[1] * 10**6)),
    "2^40 chunks": _index(lambda raw: raw["tensors"]["x.one"].update(count=2**40)),
    "a dtype of escapes": _index(lambda raw: raw["tensors"]["x.one"].update(dtype=ESCAPES)),
    "a dtype that is a function": _index(lambda raw: raw["tensors"]["x.one"].update(dtype="load")),
    **{
        f"a value: {name}": _unit(value)
        for name, value in {
            "an array of a terabyte": {"~": "numpy", "v": ["<i8", [2**37], "", True]},
            "an array of objects": {"~": "numpy", "v": ["O", [1], "AAAAAAAAAAA=", True]},
            "an array of a wide type": {"~": "numpy", "v": ["V2000000000", [1], "", True]},
            "a number of a megabyte": {"~": "int", "v": "0x" + "f" * 2**20},
            "a number of no base": {"~": "int", "v": "z"},
            "bytes that are none": {"~": "bytes", "v": "%%%"},
            "a kind that is none": {"~": ESCAPES, "v": 1},
            "a set of lists": {"~": "set", "v": [[1], [2]]},
            "a dict with lists for keys": {"~": "dict", "v": [[[1], 2]]},
            "a tensor that is not there": {"~": "tensor", "v": ESCAPES},
            "nested 3,000 deep": json.loads('{"~":"tuple","v":[' * 300 + "1" + "]}" * 300),
            "escapes": ESCAPES,
            "a text of ten megabytes": "x" * 10**7,
        }.items()
    },
    "a key that is a list": _unit(1, key=[1]),
    "a key of escapes": _unit(1, key=ESCAPES),
    **{f"a pickle in a tensor: {name}": _as_pickle(container_of(data)) for name, data in COMMANDS.items()},
    **{f"a pickle in a tensor: {name}": _as_pickle(container_of(data)) for name, data in BOMBS.items()},
    **{f"a bare pickle for a tensor: {name}": _as_pickle(data) for name, data in list(COMMANDS.items())[:3]},
    "a zip bomb for a tensor": lambda root: _as_pickle(zip_bomb())(root),
    "a payload that claims four gigabytes": _as_pickle(claiming(TENSOR_GIB, 2**32 - 2)),
    "a tensor of 2^36 elements in 64 bytes": _as_pickle(container_of(TENSOR_GIB, payload=bytes(64))),
    "a tensor that reaches beyond its storage": _as_pickle(
        container_of(tensor_pickle(16, 1, 2**40), payload=bytes(64))
    ),
    **{
        f"{what} in place of {name}": _in_place_of(name, put)
        for name in ("manifest.json", "index.json", "chunks.bin", "blocks-00000.bin", "__0_0.distcp", ".metadata")
        for what, put in {
            "a pipe": lambda path: os.mkfifo(path),
            "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
            "a link to /dev/tty": lambda path: path.symlink_to("/dev/tty"),
            "a link to itself": lambda path: path.symlink_to(path.name),
            "a link to a file outside": lambda path: path.symlink_to(outside() / "precious"),
        }.items()
    },
    "a step that is a link outside": _link_outside("step-0000000009"),
    "a tmp folder that is a link outside": _link_outside("step-0000000009.tmp-deadbeef"),
    "a trash folder that is a link outside": _link_outside("step-0000000009.trash-deadbeef"),
    "an old folder that is a link outside": _link_outside("step-0000000009.old-deadbeef"),
    "a tmp folder that is a link to everything": lambda root: (root / "step-0000000009.tmp-deadbeef").symlink_to("/"),
    "links inside of what is pruned": _links_within,
    "the run's folder is a link outside": _half_outside,
    "the owner is a pipe": _run_file("owner-000001.json", os.mkfifo),
    "the owner is a link to /dev/zero": _run_file("owner-000001.json", lambda path: path.symlink_to("/dev/zero")),
    "the journal is a pipe": _run_file("journal.jsonl", os.mkfifo),
    "the journal is a link to /dev/zero": _run_file("journal.jsonl", lambda path: path.symlink_to("/dev/zero")),
    "the journal is a link outside": _run_file("journal.jsonl", lambda path: path.symlink_to(outside() / "precious")),
    "the lock is a link outside": _run_file("prune.lock", lambda path: path.symlink_to(outside() / "precious")),
    "the outcome is a link outside": _run_file("outcome.json", lambda path: path.symlink_to(outside() / "precious")),
    "the note of verify is a link outside": lambda root: (root / STEP / "verified.json").symlink_to(
        outside() / "precious"
    ),
    "the note of verify is a pipe": lambda root: os.mkfifo(root / STEP / "verified.json"),
}
"""What is made of a root that holds one good checkpoint, of step 7."""
