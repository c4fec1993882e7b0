"""DCP's planners over a snapshot and its staged copy."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from ckptman.sharded.foreign import load_plain
from ckptman.sharded.state import Snapshot


class SnapshotPlanner(DefaultSavePlanner):
    """Plans with the live tensors (their sharding), and hands out the staged bytes (their values)."""

    def __init__(self, snapshot: Snapshot, staged: Mapping[str, Any]) -> None:
        super().__init__()
        self.snapshot = snapshot
        self._staged = staged

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = self.snapshot.flat
        self.mappings = dict(self.snapshot.paths)
        self.is_coordinator = is_coordinator

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._staged[index.fqn]


class TargetPlanner(DefaultLoadPlanner):
    """Loads into tensors given by flat name. Plain values do not come this way, so nothing here unpickles."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = state_dict

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = load_plain(value, read_item.dest_index.fqn)
