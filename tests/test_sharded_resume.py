"""A run that goes on, on the same world size and on others, is bit for bit the run that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptman
from tests.apps import App, Mesh
from tests.ranks import run_ranks


def train(root: str, mesh: Mesh | None, until: int, every: int = 3, async_save: bool = True) -> dict[str, Any]:
    app = App(mesh)
    losses = {}
    with ckptman.Checkpointer(
        root, app.state, save_policy=ckptman.EverySteps(every), async_save=async_save, deadline=None, timeout_seconds=30
    ) as checkpointer:
        start = checkpointer.restore()
        restored = app.digests()
        for step in range(start + 1, until + 1):
            losses[step] = app.train_step()
            checkpointer.step(step, {"loss": losses[step]})
        ended = app.digests()
    return {"start": start, "losses": losses, "restored": restored, "ended": ended}


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, mesh: Mesh, async_save: bool) -> None:
    world = 1
    for size in mesh:
        world *= size
    whole = run_ranks(world, train, str(tmp_path / "whole"), mesh, 8, 100, async_save)
    first = run_ranks(world, train, str(tmp_path / "parts"), mesh, 4, 3, async_save)
    second = run_ranks(world, train, str(tmp_path / "parts"), mesh, 8, 3, async_save)
    for rank in range(world):
        assert second[rank]["start"] == 4
        assert first[rank]["losses"] | second[rank]["losses"] == whole[rank]["losses"]
        assert second[rank]["ended"] == whole[rank]["ended"]
        assert second[rank]["restored"] == first[rank]["ended"]


def test_world_sizes_4_2_1_3_4_restore_bit_for_bit(tmp_path: Path) -> None:
    root, until, ended = str(tmp_path / "run"), 0, None
    for mesh in [(2, 2), (1, 2), (1,), (3,), (4,)]:
        world = mesh[0] * (mesh[1] if len(mesh) > 1 else 1)
        until += 2
        results = run_ranks(world, train, root, mesh, until)
        assert [each["start"] for each in results] == [until - 2] * world
        if ended is not None:
            assert all(each["restored"] == ended for each in results)
        assert all(each["ended"] == results[0]["ended"] for each in results)
        ended = results[0]["ended"]
