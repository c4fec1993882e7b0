"""Loaders that Fabric has prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ckptman
from ckptman.errors import ConfigError
from tests.helpers.ranks import run_ranks

lightning = pytest.importorskip("lightning.fabric")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def prepared(sampler: Any = None, **settings: Any) -> Any:
    fabric = lightning.Fabric(accelerator="cpu", **settings)
    fabric.launch()
    samples = DataLoader(TensorDataset(torch.arange(20)), 3, shuffle=sampler is None, sampler=sampler)
    return fabric.setup_dataloaders(samples)


def seen(loader: Any, batches: int = 99) -> list[int]:
    found = []
    for _, (batch,) in zip(range(batches), loader, strict=False):
        found += batch.tolist()
    return found


def orders() -> tuple[list[list[int]], list[list[int]]]:
    """Return the orders of three epochs, and those of a loader that is made anew in the second of them."""
    settings: dict[str, Any] = {"devices": 2, "strategy": "ddp"}
    torch.manual_seed(0)
    whole = ckptman.ResumableLoader(prepared(**settings))
    expected = [seen(whole) for _ in range(3)]
    torch.manual_seed(0)
    first, second = (ckptman.ResumableLoader(prepared(**settings)) for _ in range(2))
    found = [seen(first), seen(first, 2)]
    second.load_state_dict(first.state_dict())
    found[1] += seen(second)
    return expected, [*found, seen(second)]


def test_the_order_of_each_epoch_is_its_own_after_a_restore() -> None:
    ranks = run_ranks(2, _quietly)
    for expected, found in ranks:
        assert found == expected
        assert expected[0] != expected[1] != expected[2]
    assert {sample for expected, _ in ranks for sample in expected[0]} == set(range(20))


def _quietly() -> tuple[list[list[int]], list[list[int]]]:
    import os
    import warnings

    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # the ranks have met already
    return orders()


def test_a_loader_is_wrapped_to_be_in_the_state(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match=r"data is a DataLoader.*put ckptman.ResumableLoader")
    with ckptman.Checkpointer(tmp_path, {"data": prepared(devices=1)}) as checkpointer, refused:
        checkpointer.step(1)
