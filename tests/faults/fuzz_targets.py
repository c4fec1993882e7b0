"""What reads the files of a checkpoint, given any bytes: it returns, or refuses them as CorruptError. Nothing else.

Each target is a function of a `Stage`, a folder with one good checkpoint in it, and of the bytes that are put in the
place of one of its files, with every digest that could give them away made right.
"""

import io
import json
import pickle
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from xxhash import xxh3_128_hexdigest

from ckptman.engine.loading.checkpoint_reader import SavedState, resolve
from ckptman.engine.loading.restricted_unpickler import load_plain
from ckptman.engine.state.file_layout import payload_of
from ckptman.errors import CorruptError, FormatVersionError
from ckptman.runtime.journal import read_journal
from ckptman.runtime.outcome import read_outcome
from ckptman.storage.catalog.liveness import this_process
from ckptman.storage.catalog.verified import VERIFIED, identify, note_verified, read_verified
from ckptman.storage.catalog.writer_lock import read_owner
from ckptman.storage.format.manifest import FileRecord, read_manifest
from ckptman.storage.format.pickle_guard import HostilePickle, check_pickle
from ckptman.storage.format.value_codec import TensorRef, decode, encode, tensor_ref
from ckptman.storage.io.checksums import digest_bytes
from tests.faults.subject import content, save_versions

REFUSALS = (CorruptError, FormatVersionError)


class Stage:
    """A root with a good checkpoint of ours, and one of plain DCP beside it."""

    def __init__(self, home):
        self.root = home / "root"
        save_versions(self.root, {1: 1})
        self.ours = self.root / "step-0000000001"
        self.theirs = home / "plain"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(content(1), checkpoint_id=self.theirs, no_dist=True)
        self.manifest = read_manifest(self.ours)
        self.good = {path.name: path.read_bytes() for path in self.ours.iterdir()}

    def put(self, name, data):
        """Put bytes in place of a file of our checkpoint, and let the manifest vouch for them."""
        (self.ours / name).write_bytes(data)
        record = FileRecord(bytes=len(data), digest=digest_bytes(data))
        made = self.manifest.model_copy(update={"files": {**self.manifest.files, name: record}})
        (self.ours / "manifest.json").write_bytes(made.to_json())


@contextmanager
def stage():
    """A stage in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        yield Stage(Path(folder))


def bare_manifest(there, data):
    """Any bytes for a manifest: only one that vouches for itself is taken."""
    (there.ours / "manifest.json").write_bytes(data)
    read_manifest(there.ours)


def manifest(there, data):
    """These bytes, sealed with the digest that a manifest has to end with."""
    seal = b',\n "digest": "%s"\n}\n' % xxh3_128_hexdigest(data).encode()
    (there.ours / "manifest.json").write_bytes(data + seal)
    found = read_manifest(there.ours)
    assert all("/" not in name for name in found.files)


def _read_all(there):
    """Everything that a load and a look at a checkpoint read of its description."""
    saved = SavedState.read(there.ours)
    for name in saved.index.tensors:
        for chunk in saved.all_chunks(name):
            assert 0 <= chunk.offset <= chunk.offset + chunk.bytes <= len(there.good["__0_0.distcp"])
        saved.dtype(name)
    for value in saved.values.values():
        resolve(value)


def index(there, data):
    there.put("index.json", data)
    _read_all(there)


def chunk_table(there, data):
    there.put("chunks.bin", data)
    _read_all(there)


def values(there, data):
    there.put("values-00000.json", data)
    _read_all(there)


def plain_value(there, data):
    """An encoded value: what comes back can be encoded again, and comes back the same."""
    try:
        value = decode(json.loads(data))
    except (ValueError, RecursionError):
        return
    again = encode(value, "value", _reference)
    assert json.dumps(encode(decode(again), "value", _reference)) == json.dumps(again)


def _reference(value, _):
    return tensor_ref(value.name) if isinstance(value, TensorRef) else None


def verified(there, data):
    (there.ours / VERIFIED).write_bytes(data)
    note = read_verified(there.ours, there.manifest)
    assert note is None or note.manifest_digest


def owner(there, data):
    for path in (there.root / ".ckptman").glob("owner-*.json"):
        path.unlink()
    (there.root / ".ckptman" / "owner-000007.json").write_bytes(data)
    read_owner(there.root)


def journal(there, data):
    path = there.root / ".ckptman" / "journal.jsonl"
    path.write_bytes(data)
    events, torn = read_journal(path)
    assert len(events) + torn <= data.count(b"\n") + 1


def outcome(there, data):
    path = there.root / ".ckptman" / "outcome.json"
    path.write_bytes(data)
    read_outcome(path)


def metadata(there, data):
    """torch's description of a checkpoint, and all that is made of it."""
    (there.theirs / ".metadata").write_bytes(data)
    saved = SavedState.read(there.theirs)
    for name in saved.index.tensors:
        for chunk in saved.all_chunks(name):
            assert chunk.offset >= 0
    for value in saved.values.values():
        resolve(value)


def container(there, data):
    """A file of torch.save: a value, and the place of a payload."""
    place = payload_of(io.BytesIO(data), torch.float32, (4, 4))
    assert place is None or 0 <= place <= len(data) - 64
    load_plain(io.BytesIO(data), "a value of the fuzzer")


class _Nothing(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"{module}.{name}")


def instructions(there, data):
    """What `check_pickle` lets pass does no harm to an unpickler that gives no class away: no memory, no time."""
    try:
        check_pickle(data)
    except HostilePickle:
        return
    try:
        _Nothing(io.BytesIO(data)).load()
    except MemoryError:
        raise
    except Exception:
        return


TARGETS = {
    each.__name__: each
    for each in (
        *(bare_manifest, manifest, index, chunk_table, values, plain_value, verified, owner, journal, outcome),
        *(metadata, container, instructions),
    )
}


def seeds_of(there):
    """Good bytes for each target, to be changed from."""
    saved = io.BytesIO()
    torch.save(torch.zeros(4, 4), saved)
    value = io.BytesIO()
    torch.save({"a": [1, 2.5, (None, "x")], "b": {3, 4}}, value)
    return {
        "bare_manifest": [there.good["manifest.json"]],
        "manifest": [there.good["manifest.json"].rpartition(b',\n "digest"')[0]],
        "index": [there.good["index.json"]],
        "chunk_table": [there.good["chunks.bin"]],
        "values": [there.good.get("values-00000.json", b'{"format_version":1,"units":[]}')],
        "plain_value": [json.dumps(encode(each, "value")).encode() for each in _VALUES],
        "verified": [_verified(there)],
        "owner": [this_process("run", "4711").model_dump_json().encode() + b"\nreleased\n"],
        "journal": [(there.root / ".ckptman" / "journal.jsonl").read_bytes()],
        "outcome": [(there.root / ".ckptman" / "outcome.json").read_bytes()],
        "metadata": [(there.theirs / ".metadata").read_bytes()],
        "container": [saved.getvalue(), value.getvalue()],
        "instructions": [pickle.dumps(each, protocol) for each in _VALUES for protocol in (0, 2, 4)],
    }


def _verified(there):
    note_verified(there.ours, identify(there.ours, there.manifest), levels=["digests"])
    data = (there.ours / VERIFIED).read_bytes()
    (there.ours / VERIFIED).unlink()
    return data


_VALUES = [
    [1, 2.5, None, True, "text", (1, (2,)), {"a": {3: 4}}, {5, 6}, frozenset([7]), b"raw", 2**70, 1 - 2j],
    {"x": float("nan"), "y": [float("inf")], 3: bytearray(b"z")},
]
