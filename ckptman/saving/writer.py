"""One save from end to end: begin, write on all ranks, describe, commit."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ckptman._torch_compat import is_traceable_wrapper_subclass, transform_subclass
from ckptman.comm.control import Channel
from ckptman.format.paths import METADATA
from ckptman.format.table_assembly import pack
from ckptman.io.filesystem import Disk
from ckptman.saving.draft import Draft
from ckptman.saving.index_writer import IndexWriter, Part, write_part
from ckptman.saving.rank_file import RankFile, memory_of
from ckptman.saving.staging import Staged
from ckptman.saving.stale_saves import Memory, Seen, Watch, seen_by_all
from ckptman.state.file_layout import Image, Layout, Placed, pickled
from ckptman.state.named_state import Snapshot


@dataclass
class Content:
    """What one rank writes in one save: its tensors, staged or live, and what has to be pickled."""

    file: RankFile
    tensors: Staged | Sequence[torch.Tensor]
    pickled: list[torch.Tensor] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    units: list[dict[str, Any]] = field(default_factory=list)
    own_units: list[dict[str, Any]] = field(default_factory=list)
    watch: Watch | None = None

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        file: RankFile,
        tensors: Staged | Sequence[torch.Tensor],
        watch: Watch | None = None,
    ) -> Content:
        """The content of a snapshot. Nothing in it but `tensors` changes with the state, if they are staged."""
        private = isinstance(tensors, Staged)
        objects = {name: snapshot.objects[name] for name in file.plan.objects}
        special = memory_of(file.pickled, snapshot.tensors)
        return cls(
            file,
            tensors,
            [_cloned(each) if private else each for each in special],
            {name: _copied(each) if private else each for name, each in objects.items()},
            [snapshot.units[number].as_unit() for number in file.plan.units],
            [snapshot.units[number].as_unit() for number in file.plan.own_units],
            watch,
        )


class Saved(NamedTuple):
    """A save that is durable: why some bytes did not go by direct I/O, or None; and what was seen of the parameters."""

    buffered_because: str | None
    seen: Seen | None


class CheckpointWriter:
    """Takes contents to storage, one after the other. Every rank has one."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._describer = IndexWriter()
        self._memory = Memory()
        self._sent = b""
        """The rows that the leader has from the save before; empty: none."""

    def save(self, channel: Channel, draft: Draft, content: Content | Exception) -> Saved:
        """Write one checkpoint. `content` may be the reason why this rank has nothing to write. Every rank calls it.

        Raises: RankFailed on every rank, RankLostError where a peer is gone or silent for longer than the timeout.
        """

        def begin(_: list[None]) -> list[str]:
            return [draft.begin()] * channel.world_size

        def may_begin() -> None:
            if isinstance(content, Exception):
                raise content

        folder = Path(channel.gather_on_leader(may_begin, begin))
        assert isinstance(content, Content)
        rows = b""

        def write() -> Part:
            nonlocal rows
            part, rows = self._write(folder, channel.rank, content, sent)
            return part

        def finish(parts: list[Part]) -> list[Saved]:
            self._finish(draft, content.file, parts)
            because = next((each.buffered_because for each in parts if each.buffered_because), None)
            return [Saved(because, seen_by_all(each.seen for each in parts))] * len(parts)

        sent, self._sent = self._sent, b""
        self._memory.begin()
        saved = channel.gather_on_leader(write, finish)
        self._sent = rows
        self._memory.committed()
        return saved

    def _write(self, folder: Path, rank: int, content: Content, sent: bytes) -> tuple[Part, bytes]:
        image, places, objects = _image(content)
        look = None if content.watch is None else partial(self._memory.look, content.watch, image, places)
        part = write_part(folder, rank, image, content.own_units, self._disk, look)
        rows = pack(content.file.rows(places))
        plan = content.file.plan
        part.rows = rows if rows != sent else None
        part.own_tensors, part.paths = plan.own_tensors, dict(plan.own_paths)
        part.objects, part.units = objects, content.units
        return part, rows

    def _finish(self, draft: Draft, file: RankFile, parts: Sequence[Part]) -> None:
        index = self._describer.describe(draft.folder, file.plan.tensors, parts, self._disk)
        paths = dict(file.plan.paths)
        for part in parts:
            paths |= part.paths
        files = {name: record for part in parts for name, record in part.files.items()}
        files[METADATA] = self._describer.write_metadata(
            draft.folder, index, paths, draft.final, str(uuid.uuid4()), self._disk
        )
        draft.commit(files, len(parts))


def _image(content: Content) -> tuple[Image, list[Placed], dict[str, tuple[int, int]]]:
    """The file as it will be, with the places of the pickled tensors and objects in it."""
    file = content.file
    layout = Layout(file.end)
    places = [layout.add_bytes(pickled(each)) for each in content.pickled]
    objects = {}
    for name, value in content.objects.items():
        place = layout.add_bytes(pickled(value))
        objects[name] = (place.offset, place.bytes)
    if isinstance(content.tensors, Staged):
        content.tensors.wait()
        return Image(layout.literals, content.tensors.slot.memory), places, objects
    tensors = [(place.payload, each) for place, each in zip(file.places, content.tensors)]
    return Image([*file.literals, *tensors, *layout.literals]), places, objects


def _copied(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, bytes, type(None))) else copy.deepcopy(value)


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy. A tensor that is made of others may not know how to clone itself: they do."""
    if is_traceable_wrapper_subclass(tensor):
        return transform_subclass(tensor, lambda _, inner: _cloned(inner))
    return tensor.clone()
