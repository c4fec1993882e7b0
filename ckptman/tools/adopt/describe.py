"""What ckptman keeps about a checkpoint, made for one that plain DCP wrote."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import ckptman
from ckptman.engine.loading.checkpoint_reader import SavedState, resolve
from ckptman.engine.saving.write_plan import make_rows
from ckptman.engine.state.file_layout import PlacedBytes
from ckptman.errors import ConfigError, CorruptError
from ckptman.policies.retention_rules import time_to_store
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.format.chunk_table import FRAME_BYTES, assemble, item_bytes
from ckptman.storage.format.index import Index, Unit
from ckptman.storage.format.manifest import FileRecord, Manifest
from ckptman.storage.format.paths import CHUNKS, INDEX, METADATA, digests_name, parse_data, parse_step
from ckptman.storage.format.value_codec import TensorRef, encode, tensor_ref
from ckptman.storage.io.checksums import BLOCK_BYTES, digest_bytes, digest_file, digest_of_blocks
from ckptman.storage.io.safe_open import read_regular
from ckptman.tools.verify.witness import Witness

REASON = "adopted: plain DCP wrote it"
_THREADS = 2
_MOST_BYTES = 2**40


def describe(
    saved: SavedState,
    data_names: list[str],
    step: int,
    final: Path,
    done: Callable[[int], None] | None,
) -> tuple[dict[str, bytes], Manifest]:
    """Read all files of a complete checkpoint of plain DCP. Return the files to put beside them, and the manifest that
    names all of them.

    The same bytes give the same files. `data_names`: by rank and number; `final`: the name that the folder will have.

    Raises: CorruptError (a value that is not loaded), OSError.
    """
    records: dict[str, FileRecord] = {}
    files: dict[str, bytes] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        paths = [saved.folder / name for name in data_names]
        for name, (size, blocks) in zip(data_names, pool.map(partial(digest_file, done=done), paths)):
            records[name] = FileRecord(bytes=size, digest=digest_of_blocks(blocks))
            files[digests_name(name) or ""] = b"".join(blocks)
    index, table = _indexed(saved, data_names)
    files |= {CHUNKS: table, INDEX: index.to_json()}
    described = {METADATA: read_regular(saved.folder / METADATA, _MOST_BYTES), **files}
    records |= {name: FileRecord(bytes=len(data), digest=digest_bytes(data)) for name, data in described.items()}
    ranks = [parsed[0] for name in data_names if (parsed := parse_data(name))]
    manifest = Manifest(
        step=step,
        sequence=1,
        time_seconds=0,
        reason=REASON,
        world_size=1 + max(ranks, default=0),
        torch_version="unknown",
        ckptman_version=ckptman.__version__,
        run_id="",
        block_bytes=BLOCK_BYTES,
        files=records,
    )
    return files, placed(manifest, saved.folder, final)


def _indexed(saved: SavedState, data_names: list[str]) -> tuple[Index, bytes]:
    numbers = {name: number for number, name in enumerate(data_names)}
    tensors = [(name, record.dtype, record.shape) for name, record in saved.index.tensors.items()]
    saved.check(saved.index.tensors)
    witness = Witness(saved, None)
    entries: list[list[tuple[int, tuple[int, ...], tuple[int, ...], PlacedBytes]]] = [[] for _ in data_names]
    for number, (name, dtype, _) in enumerate(tensors):
        for chunk in saved.all_chunks(name):
            payload = saved.payload(name, chunk)
            item = item_bytes(dtype)
            if payload is None:
                # Only torch.load can tell whether it is what the description says, as it is of a transposed tensor.
                try:
                    witness.container(chunk.file, chunk.offset, chunk.bytes).load(saved.dtype(name), chunk.sizes)
                except CorruptError as error:
                    raise CorruptError(f"{saved.folder}: {name}: {error}; bring it back from a copy") from error
            if payload is None or item is None or chunk.bytes - item * prod(chunk.sizes) > FRAME_BYTES:
                payload = -1
            place = PlacedBytes(chunk.offset, chunk.bytes, payload)
            entries[numbers[chunk.file]].append((number, chunk.offsets, chunk.sizes, place))
    records, table = assemble(tensors, [make_rows(each) for each in entries])
    index = Index(files=data_names, tensors=records, objects=saved.index.objects, units=_units(saved))
    return index, table.astype("<i8").tobytes()


def _units(saved: SavedState) -> list[Unit]:
    """Return the plain values by which ckptman restores a state. What has no form in JSON is left to its pickle."""

    def ref(value: Any, path: str) -> Any:
        return tensor_ref(value.name) if isinstance(value, TensorRef) else None

    units = []
    for state, value in saved.values.items():
        value = resolve(value)
        entries = [(key, each, False) for key, each in value.items()] if isinstance(value, dict) else []
        for key, each, whole in entries or [(None, value, True)]:
            where = state if whole else f"{state}.{key}"
            try:
                units.append(Unit(state=state, key=key, whole=whole, value=encode(each, where, ref)))
            except ConfigError:
                continue
    return units


def placed(manifest: Manifest, folder: Path, final: Path) -> Manifest:
    """Return the manifest with the sequence and the time that put its step in order among the checkpoints beside
    `final`.

    DCP keeps no order of commits, and copies have new dates. Checkpoints of one sequence are ordered by time, then by
    step.
    """
    entries = Catalog(final.parent).scan(abandoned=True) if parse_step(final.name) else []
    others = [each.manifest for each in entries if each.manifest is not None and not each.abandoned]
    step, time_seconds = manifest.step, time_to_store((folder / METADATA).stat().st_mtime)
    last = max((each.sequence for each in entries), default=0)  # abandoned checkpoints keep their sequences
    sequence = min((each.sequence for each in others if each.step > step), default=1 + last)
    alike = [each for each in others if each.sequence == sequence]
    earliest = max((each.time_seconds for each in alike if each.step < step), default=0.0)
    latest = min((each.time_seconds for each in alike if each.step > step), default=time_seconds)
    time_seconds = max(earliest, min(time_seconds, latest))
    return Manifest.model_validate(dict(manifest) | {"sequence": sequence, "time_seconds": time_seconds})
