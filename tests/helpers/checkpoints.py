"""Checkpoints made without torch, for tests of what only reads names, manifests, digests and indexes."""

from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
from xxhash import xxh3_128_digest

from ckptman.runtime.journal import Journal
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.verified import read_verified
from ckptman.storage.format.chunk_table import assemble
from ckptman.storage.format.index import Index, Unit
from ckptman.storage.format.manifest import FileRecord, Manifest, Mesh, read_manifest
from ckptman.storage.format.paths import (
    CHUNKS,
    INDEX,
    METADATA,
    blocks_name,
    data_name,
    journal_path,
    new_nonce,
    step_folder,
)
from ckptman.storage.format.value_codec import encode
from ckptman.storage.io.checksums import BLOCK_BYTES, digest_bytes
from ckptman.storage.io.durable_files import DISK


@contextmanager
def quick_disk():
    """While this lasts, nothing waits for storage: a test that makes a thousand checkpoints has no power cut."""
    with patch.multiple(DISK, write_file=Path.write_bytes, sync_folder=lambda path: None):
        yield


@quick_disk()
def commit(
    root,
    step,
    *,
    ranks=2,
    rows=8,
    metrics=None,
    values=None,
    time_seconds=1_790_000_000.0,
    sequence=None,
    restored_from=None,
    mesh=None,
    nonfinite=None,
):
    """Commit a checkpoint of one tensor `model.weight` [rows, 4] in float32, sharded by rows over the ranks.

    The bytes of a chunk are no container of torch's: digests hold, loading would not work. `values` are plain values.
    """
    place = LocalBackend(root)
    root.mkdir(parents=True, exist_ok=True)
    draft = Path(place.begin(step_folder(step), new_nonce()))
    files = {METADATA: b"nothing that anybody should unpickle"}
    share = -(-rows // ranks)
    parts = []
    for rank in range(ranks):
        first, last = min(rank * share, rows), min((rank + 1) * share, rows)
        data = bytes([rank]) * ((last - first) * 16)
        files |= {data_name(rank): data, blocks_name(rank): blocks_of(data)}
        parts.append({2: np.array([[0, 0, len(data), 0, first, 0, last - first, 4]])})
    files |= index_files([("model.weight", "float32", (rows, 4))], parts, _units(values or {}))
    for name, data in files.items():
        (draft / name).write_bytes(data)
    manifest = Manifest(
        step=step,
        sequence=sequence or 1 + max((entry.sequence for entry in Catalog(root).scan(abandoned=True)), default=0),
        time_seconds=time_seconds,
        reason="every 100 steps",
        world_size=ranks,
        mesh=mesh or Mesh(names=("shard",), shape=(ranks,)),
        torch_version="2.13.0",
        ckptman_version="0.1.0",
        run_id="run-of-a-test",
        job_id="4711",
        attempt=1,
        restored_from=restored_from,
        metrics=dict(metrics or {}),
        nonfinite=nonfinite,
        block_bytes=BLOCK_BYTES,
        files={name: FileRecord(bytes=len(data), digest=digest_bytes(data)) for name, data in files.items()},
    )
    return place.commit(str(draft), manifest)


def index_files(tensors, parts, units=()):
    """The chunk table and the index of tensors (name, dtype, shape) whose chunks the ranks wrote, part by part."""
    records, table = assemble(tensors, parts)
    index = Index(files=[data_name(rank) for rank in range(len(parts))], tensors=records, units=list(units))
    return {CHUNKS: table.astype("<i8").tobytes(), INDEX: index.to_json()}


def blocks_of(data):
    """The digests of the blocks of a data file, as they are kept beside it."""
    return b"".join(xxh3_128_digest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES))


def flip_byte(path):
    """Damage a file as a bad disk does: one byte changes, the size stays."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


def note_in(folder):
    """What was proved about the checkpoint in a folder."""
    return read_verified(folder, read_manifest(folder))


def steps_of(entries):
    """The steps, in order."""
    return [entry.step for entry in entries]


def _units(values):
    units = [Unit(state="model", key="weight", value={"~": "tensor", "v": "model.weight"})]
    for name, value in values.items():
        if isinstance(value, dict):
            units += [Unit(state=name, key=encode(key, name), value=encode(each, name)) for key, each in value.items()]
        else:
            units.append(Unit(state=name, whole=True, value=encode(value, name)))
    return units


def make_suspect(root, step):
    """Have the journal of a root say that two attempts crashed alike after loading a step."""
    journal = Journal(journal_path(Path(root)))
    for attempt in (1, 2):
        journal.record("attempt_started", attempt=attempt)
        journal.record("restored", attempt=attempt, step=step)
        journal.record("failed", attempt=attempt, step=step + 3, cause="program")
    journal.close()
