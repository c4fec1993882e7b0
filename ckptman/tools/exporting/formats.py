"""The files of each format: what lies where in them, known before a byte of a tensor is read."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ckptman._torch_compat import fake_tensors
from ckptman.engine.loading.box_reader import boxes
from ckptman.engine.loading.restricted_unpickler import load_plain
from ckptman.engine.saving.index_writer import end_of_metadata, write_metadata
from ckptman.engine.saving.write_plan import make_rows
from ckptman.engine.state.file_layout import Layout, WriteRecorder, in_order, pickled
from ckptman.engine.state.named_state import replace_refs
from ckptman.errors import ConfigError, CorruptError, NotFoundError, plain
from ckptman.storage.format import safetensors
from ckptman.storage.format.chunk_table import ChunkTable, assemble
from ckptman.storage.format.index import Location
from ckptman.storage.format.paths import METADATA, data_name
from ckptman.storage.format.value_codec import Keys, TensorRef
from ckptman.storage.io.safe_open import read_regular
from ckptman.tools.exporting.choice import Choice, Item, leaves
from ckptman.tools.exporting.target import CONFIG, commented, save_id
from ckptman.tools.exporting.write import FilePlan, parts_of

_MOST_CONFIG_BYTES = 64 * 1024 * 1024
_WHICH_CONFIG = "name the config.json that transformers wrote"
CHUNK_BYTES = 64 * 1024 * 1024
"""A larger tensor is cut into chunks of that size: plain DCP takes the memory of a chunk to read any part of it."""


def safetensors_files(choice: Choice, max_shard_bytes: int) -> list[FilePlan]:
    """Plan the files that Hugging Face loads. They have no place for plain values. Raises: ConfigError."""
    items = {item.name: item for item in choice.items}
    tensors = [safetensors.Tensor(item.name, _name(item.as_dtype), item.shape) for item in choice.items]
    safetensors.check(tensors)
    shards = safetensors.share_out(tensors, max_shard_bytes)
    files = dict(zip(safetensors.file_names(len(shards)), shards))
    plans = []
    for name, shard in files.items():
        head, places = safetensors.lay_out(shard)
        plan = FilePlan(name, len(head) + sum(each.bytes for each in shard), [(0, head)])
        for tensor, place in sorted(places.items(), key=lambda each: each[1]):
            plan.parts += parts_of(items[tensor], place)
        plans.append(plan)
    if len(files) > 1:
        index = safetensors.index_json(files)
        plans.append(FilePlan(safetensors.INDEX_NAME, len(index), [(0, index)]))
    return plans


def torch_file(choice: Choice, name: str) -> FilePlan:
    """Plan the file that `torch.load` reads. Raises: ConfigError (a value that `weights_only` refuses)."""
    for path, value in choice.values.items():
        _check_plain(path, value, lambda data: torch.load(data, weights_only=True))
    items = {item.source: item for item in choice.items}
    # Tensors of torch's own that have no memory: torch.save describes them, and leaves room for their bytes.
    with fake_tensors(), torch.serialization.skip_data(materialize_fake_tensors=True):

        def fake(ref: TensorRef) -> torch.Tensor:
            return torch.empty(items[ref.name].shape, dtype=items[ref.name].as_dtype, device="cpu")

        if choice.renamed:
            tree: Any = {item.name: fake(TensorRef(item.source)) for item in choice.items} | choice.values
        else:
            tree = replace_refs(choice.tree, fake, as_arrays=False)
        order = [item for item in choice.items if item.bytes]
        recorder = WriteRecorder()
        torch.save(tree, recorder)  # type: ignore[arg-type]
    *literals, (place, end) = recorder.literals
    end = commented(end)
    plan = FilePlan(name, place + len(end), [*literals, (place, end)])
    holes = recorder.holes()
    if len(holes) != len(order):
        held = next(name for name, value in choice.values.items() if _has_payload(value))
        raise ConfigError(
            f"the value {plain(held)} has tensors within a {type(choice.values[held]).__name__}, which are exported to "
            f"--format dcp alone: leave it out (--exclude)"
        )
    assert [size for _, size in holes] == [item.bytes for item in order]
    for item, (place, _) in zip(order, holes):
        plan.parts += parts_of(item, place)
    return plan


def dcp_files(choice: Choice, final: Path) -> list[FilePlan]:
    """Plan the files that plain DCP reads: one data file and its description. Raises: ConfigError."""
    layout = Layout()
    plan = FilePlan(data_name(0), 0)
    pieces = [(number, *box) for number, item in enumerate(choice.items) for box in _chunks(item)]
    placed = []
    for which in in_order([(choice.items[number].as_dtype, sizes) for number, _, sizes in pieces]):
        number, offsets, sizes = pieces[which]
        item = choice.items[number]
        at = layout.add_tensor(item.as_dtype, sizes)
        placed.append((number, offsets, sizes, at))
        plan.parts += parts_of(item, at.payload, (offsets, sizes))
    objects = {}
    for name, value in choice.values.items():
        _check_plain(name, value, lambda data: load_plain(data, "it"))
        where = layout.add_bytes(pickled(value))
        objects[name] = Location(file=data_name(0), offset=where.offset, bytes=where.bytes)
    plan.literals, plan.size_bytes = layout.literals, layout.end
    described = [(item.name, _name(item.as_dtype), item.shape) for item in choice.items]
    records, table = assemble(described, [make_rows(placed)])
    out = io.BytesIO()
    write_metadata(out, records, ChunkTable(records, table), [data_name(0)], objects, _paths(choice))
    out.write(end_of_metadata(str(final), save_id()))
    return [plan, FilePlan(METADATA, len(out.getvalue()), [(0, out.getvalue())])]


def config_file(path: Path) -> tuple[FilePlan, bool]:
    """Return a copy of a model's `config.json`, and whether it ties the output embedding to the input embedding.

    Raises: NotFoundError, ConfigError, CorruptError (too large, or not a regular file), OSError.
    """
    try:
        data = read_regular(path, _MOST_CONFIG_BYTES, follow=True, remedy=_WHICH_CONFIG)
    except FileNotFoundError:
        raise NotFoundError(f"there is no {path}: {_WHICH_CONFIG}") from None
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}): {_WHICH_CONFIG}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object: {_WHICH_CONFIG}")
    text = config.get("text_config")
    tied = [
        each["tie_word_embeddings"]
        for each in (config, text)
        if isinstance(each, dict) and "tie_word_embeddings" in each
    ]
    return FilePlan(CONFIG, len(data), [(0, data)]), bool(tied and tied[0])


def _chunks(item: Item) -> Sequence[tuple[tuple[int, ...], tuple[int, ...]]]:
    whole = (0,) * len(item.shape), item.shape
    return list(boxes(item.shape, CHUNK_BYTES // item.as_dtype.itemsize)) or [whole]


def _paths(choice: Choice) -> dict[str, Keys]:
    if choice.renamed:
        return {name: (name,) for name in (*(item.name for item in choice.items), *choice.values)}
    paths = ((*choice.prefix, *path) for path, _ in leaves(choice.tree))
    return {".".join(map(str, path)): path for path in paths}


def _check_plain(name: str, value: Any, load: Callable[[io.BytesIO], Any]) -> None:
    """Raise ConfigError if a value cannot be read again by a restricted unpickler."""
    try:
        load(io.BytesIO(pickled(value)))
    except (CorruptError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"the value {plain(name)} is a {type(value).__module__}.{type(value).__qualname__}, which torch.load reads "
            f"only without restriction: leave it out (--exclude)"
        ) from error


def _has_payload(value: Any) -> bool:
    """Whether a plain value has tensors in it, so that it is more than its pickle."""
    recorder = WriteRecorder()
    with torch.serialization.skip_data():
        torch.save(value, recorder)  # type: ignore[arg-type]
    return bool(recorder.holes())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
