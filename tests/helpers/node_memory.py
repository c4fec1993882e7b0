"""What nodes hold in memory, made by hand: parts of a checkpoint in a folder for each node. Torch-free."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ckptman.catalog.backends.node_memory import NodeMemory, Owner
from ckptman.catalog.tier_identity import make_identity
from ckptman.format.manifest import Manifest, read_manifest
from ckptman.format.paths import rank_of
from tests.helpers.checkpoints import commit


def memory_of(base: Path, root: Path, node: str, job_id: str | None = None, **of_owner: Any) -> NodeMemory:
    """The folder of a run that is over, or, if `of_owner` says so, of another one."""
    root.mkdir(parents=True, exist_ok=True)
    found = NodeMemory(base, make_identity(root, "run"), node)
    base.mkdir(exist_ok=True)
    owner = Owner(root_id=found.root_id, root=str(root.absolute()), node=node, run_id="run", job_id=job_id)
    found.open(owner.model_copy(update=of_owner))
    found.close()
    return found


def hold(
    memory: NodeMemory, checkpoint: Path, ranks: Collection[int], *, manifest: bool = True, **changes: Any
) -> Manifest:
    """Put the parts of some ranks of a checkpoint there, with all that belongs to no rank.

    `manifest` False: as when the node was killed before it had it. `changes`: to fields of the manifest.
    """
    found = read_manifest(checkpoint).model_copy(update={"attempt": 1, **changes})
    folder = memory.begin(found.step)
    for name in found.files:
        if rank_of(name) is None or rank_of(name) in ranks:
            shutil.copy(checkpoint / name, folder / name)
    if manifest:
        memory.commit(found.step, found.to_json())
    return found


def nodes_with(
    tmp_path: Path, step: int, parts: Mapping[str, Collection[int]], *, rows: int = 8, **changes: Any
) -> dict[str, NodeMemory]:
    """Nodes that hold parts of a step of the root `tmp_path / "root"`, whose ranks are 0 to 3."""
    checkpoint = commit(tmp_path / "made", step, ranks=4, rows=rows).path
    memories = {node: memory_of(tmp_path / "shm", tmp_path / "root", node) for node in parts}
    for node, ranks in parts.items():
        hold(memories[node], checkpoint, ranks, **changes)
    return memories
