"""DCP's planners over a snapshot and its staged copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

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

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Leader only. What ranks may differ in is taken from the lowest rank that has it, all of it from that one."""
        taken: set[str] = set()
        plans = []
        for plan in all_plans:
            items = [each for each in plan.items if each.index.fqn not in taken or self._is_shard(each)]
            taken |= {each.index.fqn for each in items if each.index.fqn in self.snapshot.from_lowest}
            plans.append(replace(plan, items=items))
        return super().create_global_plan(plans)

    @staticmethod
    def _is_shard(item: WriteItem) -> bool:
        return item.type == WriteItemType.SHARD

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._staged[index.fqn]


class TargetPlanner(DefaultLoadPlanner):
    """Loads into tensors given by flat name. Plain values do not come this way."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
