"""One run of Weights & Biases over six attempts, read by W&B's own reader; and what an upload of it gets."""

import json
import os
import subprocess
import sys

import pytest

from ckptman.integrations.wandb import WandbTracker
from ckptman.runtime.tracker import TrackedRun
from tests.helpers.fake_wandb import serving
from tests.helpers.tracked_run import settle, six_attempts

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setattr(sys, "exit", sys.exit)  # W&B puts its own in both places, and leaves them there
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


def make(root):
    return [WandbTracker(project="tests")]


def records(folder):
    """What W&B's own reader finds in the folder of an attempt."""
    [file] = folder.glob("*.wandb")
    core = [wandb.util.get_core_path(), "leet", "inspect", "--no-observability"]
    command = [*core, "--json", "--run-file", str(file), str(folder.parent)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert output.returncode == 0, output.stderr
    return [json.loads(line) for line in output.stdout.splitlines()]


def of_kind(found, kind):
    return (each[kind] for each in found if each["type"] == kind)


@pytest.mark.slow
@pytest.mark.leaves("wandb", "ServiceFinalizer")
def test_six_attempts_are_one_run_with_one_curve(tmp_path):
    root = tmp_path / "run"
    counts = six_attempts(root, make)
    folders = sorted((root / "wandb").glob("offline-run-*"))
    attempts = sorted((records(each) for each in folders), key=lambda found: next(of_kind(found, "run"))["start_time"])
    runs = [next(of_kind(found, "run")) for found in attempts]
    assert {(each["run_id"], each["project"], each["resume"]) for each in runs} == {("tracked-1", "tests", True)}
    curve = [(each["step"]["num"], each["item"]["loss"]) for found in attempts for each in of_kind(found, "history")]
    assert curve == [*counts.items()]  # in the order in which an upload appends them
    assert (len(folders), len([*(root / "wandb/before-rollback").iterdir()])) == (2, 4)
    with serving() as server:
        sync(server, root / "wandb")
        [(run_id, history)] = server.histories.items()
        assert run_id == "tracked-1"
        assert [(each["_step"], each["loss"]) for each in map(history.get, range(len(history)))] == [*counts.items()]
        sync(server, root / "wandb")
        assert len(history) == len(counts), "nothing is uploaded twice"


def sync(server, folder):
    """Upload as a user does, to a server that keeps what it gets."""
    own = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "0" * 40, "HOME": str(folder.parent)}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")} | own
    command = [sys.executable, "-m", "wandb", "sync", str(folder)]
    # In its folder: the command writes a log where it is called.
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, cwd=folder.parent)
    assert output.returncode == 0, output.stderr


def started(root, step):
    (root / ".ckptman").mkdir(exist_ok=True)
    tracker = WandbTracker(project="tests", settings={"silent": True, "console": "off"})
    tracker.start(TrackedRun("run", root, 1, step, 1))
    settle(tracker._thread)
    return tracker


@pytest.mark.slow
def test_what_was_uploaded_stays_after_a_rollback(tmp_path, caplog):
    tracker = started(tmp_path, 0)
    for step in (1, 2, 3, 4):
        tracker.log(step, {"loss": 1.0})
    tracker.event("save_durable", {"step": 4})
    tracker.close()
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    file.with_name(f"{file.name}.synced").touch()
    tracker = started(tmp_path, 2)
    assert "W&B has steps up to 4, and the run went back to 2" in caplog.text
    for step in (3, 4, 5):
        tracker.log(step, {"loss": 2.0})
    tracker.event("finished", {})
    tracker.close()
    assert file.exists()
    [folder] = [each for each in tmp_path.glob("wandb/offline-run-*") if each != file.parent]
    assert [(each["step"]["num"], each["item"]["loss"]) for each in of_kind(records(folder), "history")] == [(5, 2.0)]
