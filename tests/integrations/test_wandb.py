"""One run of Weights & Biases over six attempts, read by W&B's own reader; and what an upload of it gets."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptman.integrations.wandb import WandbTracker
from tests.helpers.tracked_run import six_attempts

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def make(root: Path) -> list[WandbTracker]:
    return [WandbTracker(project="tests")]


def records(folder: Path) -> list[dict[str, Any]]:
    """What W&B's own reader finds in the folder of an attempt."""
    [file] = folder.glob("*.wandb")
    core = [wandb.util.get_core_path(), "leet", "inspect", "--no-observability"]
    command = [*core, "--json", "--run-file", str(file), str(folder.parent)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert output.returncode == 0, output.stderr
    return [json.loads(line) for line in output.stdout.splitlines()]


def of_kind(found: list[dict[str, Any]], kind: str) -> Iterator[dict[str, Any]]:
    return (each[kind] for each in found if each["type"] == kind)


@pytest.mark.slow
def test_six_attempts_are_one_run_with_one_curve(tmp_path: Path) -> None:
    root = tmp_path / "run"
    counts = six_attempts(root, make)
    folders = sorted((root / "wandb").glob("offline-run-*"))
    attempts = sorted((records(each) for each in folders), key=lambda found: next(of_kind(found, "run"))["start_time"])
    runs = [next(of_kind(found, "run")) for found in attempts]
    assert {(each["run_id"], each["project"], each["resume"]) for each in runs} == {("tracked-1", "tests", True)}
    curve = [(each["step"]["num"], each["item"]["loss"]) for found in attempts for each in of_kind(found, "history")]
    assert curve == [*counts.items()]  # in the order in which an upload appends them
    assert (len(folders), len([*(root / "wandb/before-rollback").iterdir()])) == (2, 4)
