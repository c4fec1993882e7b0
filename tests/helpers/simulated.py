"""A checkpoint of many ranks whose tables are there and whose tensors are holes: for plans, which read no values."""

import os

import numpy as np
import torch

from ckptman.engine.state.file_layout import frame_of
from ckptman.storage.format.chunk_table import assemble
from ckptman.storage.format.index import Index
from ckptman.storage.format.manifest import FileRecord, Manifest
from ckptman.storage.format.paths import CHUNKS, INDEX, data_name
from ckptman.storage.io.checksums import BLOCK_BYTES, digest_bytes

Described = tuple[str, str, tuple[int, ...]]


def simulate(folder, tensors, ranks, *, frames=True):
    """Each tensor sharded by rows over the ranks, as `torch.chunk` cuts; scalars on rank 0. `frames`: write what
    `torch.save` writes around each payload."""
    folder.mkdir(parents=True)
    names = [data_name(rank) for rank in range(ranks)]
    files = [(folder / name).open("wb") for name in names] if frames else []
    parts = [{} for _ in range(ranks)]
    ends = np.zeros(ranks, np.int64)
    for number, (_, dtype, shape) in enumerate(tensors):
        rows = shape[0] if shape else 1
        share = -(-rows // ranks)
        for rank in range(ranks if shape else 1):
            low, high = min(rank * share, rows), min((rank + 1) * share, rows)
            sizes = (high - low, *shape[1:]) if shape else ()
            if low == high and (rank or rows):
                continue
            frame = frame_of(getattr(torch, dtype), sizes)
            align = 4096 if frame.payload_bytes >= 2**20 else 64
            payload = -(-(int(ends[rank]) + len(frame.head)) // align) * align
            offset = payload - len(frame.head)
            ends[rank] = offset + frame.size_bytes
            if frames:
                os.pwrite(files[rank].fileno(), frame.head, offset)
                os.pwrite(files[rank].fileno(), frame.tail, payload + frame.payload_bytes)
            offsets = [low, *[0] * (len(shape) - 1)] if shape else []
            row = [number, offset, frame.size_bytes, payload, *offsets, *sizes]
            parts[rank].setdefault(len(shape), []).append(row)
    rows_of = [{dims: np.array(each, np.int64) for dims, each in part.items()} for part in parts]
    records, table = assemble(tensors, rows_of)
    for file in files:
        file.close()
    sizes_of = {}
    for name, end in zip(names, (-(-ends // 4096) * 4096).tolist()):
        with (folder / name).open("ab") as file:
            file.truncate(end)
        sizes_of[name] = FileRecord(bytes=end, digest="0" * 32)
    _seal(folder, Index(files=names, tensors=records), table, sizes_of)


def reseal(folder, table):
    """Put another chunk table in a checkpoint, with digests that are right: what no digest can find."""
    from ckptman.storage.format.manifest import read_manifest

    manifest = read_manifest(folder)
    data = table.astype("<i8").tobytes()
    (folder / CHUNKS).write_bytes(data)
    files = {**manifest.files, CHUNKS: FileRecord(bytes=len(data), digest=digest_bytes(data))}
    (folder / "manifest.json").write_bytes(manifest.model_copy(update={"files": files}).to_json())


def _seal(folder, index, table, files):
    for name, data in ((INDEX, index.to_json()), (CHUNKS, table.astype("<i8").tobytes())):
        (folder / name).write_bytes(data)
        files[name] = FileRecord(bytes=len(data), digest=digest_bytes(data))
    manifest = Manifest(
        step=1,
        sequence=1,
        time_seconds=1_790_000_000.0,
        reason="simulated",
        world_size=len(index.files),
        torch_version=torch.__version__,
        ckptman_version="0.1.0",
        run_id="simulated",
        block_bytes=BLOCK_BYTES,
        files=files,
    )
    (folder / "manifest.json").write_bytes(manifest.to_json())
