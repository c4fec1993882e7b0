"""One run over six attempts in each tracker, with one value of the loss at each step, read by the reader of its own."""

import json
import os
import subprocess
import sys
import time

import pytest

from ckptman.integrations.mlflow import MLflowTracker
from ckptman.integrations.tensorboard import TensorBoardTracker
from ckptman.integrations.wandb import WandbTracker
from ckptman.runtime.tracker import TrackedRun
from tests.helpers.fake_wandb import serving
from tests.helpers.tracked_run import settle, six_attempts


def to_wandb(root):
    return [WandbTracker(project="tests")]


def to_mlflow(root):
    return [MLflowTracker("tests", uri_of(root))]


def to_tensorboard(root):
    return [TensorBoardTracker()]


def uri_of(root):
    return f"sqlite:///{root.parent}/mlflow.db"


@pytest.fixture
def wandb(monkeypatch):
    """The library, which knows nothing of other runs of this process."""
    for name in ("WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setattr(sys, "exit", sys.exit)  # W&B puts its own in both places, and leaves them there
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return pytest.importorskip("wandb")


def records(wandb, folder):
    """What W&B's own reader finds in the folder of an attempt."""
    [file] = folder.glob("*.wandb")
    core = [wandb.util.get_core_path(), "leet", "inspect", "--no-observability"]
    command = [*core, "--json", "--run-file", str(file), str(folder.parent)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert output.returncode == 0, output.stderr
    return [json.loads(line) for line in output.stdout.splitlines()]


def of_kind(found, kind):
    return (each[kind] for each in found if each["type"] == kind)


@pytest.mark.slow
@pytest.mark.leaves("wandb", "ServiceFinalizer")
def test_wandb_has_one_run_with_one_curve(tmp_path, wandb):
    root = tmp_path / "run"
    counts = six_attempts(root, to_wandb)
    folders = sorted((root / "wandb").glob("offline-run-*"))
    attempts = sorted(
        (records(wandb, each) for each in folders), key=lambda found: next(of_kind(found, "run"))["start_time"]
    )
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
    output = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environ, cwd=folder.parent)
    assert output.returncode == 0, output.stderr


def started(root, step):
    (root / ".ckptman").mkdir(exist_ok=True)
    tracker = WandbTracker(project="tests", settings={"silent": True, "console": "off"})
    tracker.start(TrackedRun("run", root, 1, step, 1))
    settle(tracker._thread)
    return tracker


@pytest.mark.slow
def test_what_was_uploaded_stays_after_a_rollback(tmp_path, wandb, caplog):
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
    history = of_kind(records(wandb, folder), "history")
    assert [(each["step"]["num"], each["item"]["loss"]) for each in history] == [(5, 2.0)]


@pytest.mark.slow
@pytest.mark.leaves("mlflow.db")
def test_mlflow_has_one_run_with_one_curve(tmp_path, monkeypatch):
    """In a database without a server."""
    mlflow, uri = pytest.importorskip("mlflow"), uri_of(tmp_path / "run")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    client = mlflow.MlflowClient(uri)
    experiment = client.create_experiment("tests")
    counts = six_attempts(tmp_path / "run", to_mlflow)
    [run] = client.search_runs([experiment])
    assert (run.data.tags["ckptman.run_id"], run.data.tags["ckptman.attempt"]) == ("tracked/1", "6")
    assert run.info.status == "FINISHED"
    found = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in found] == [*counts.items()]


@pytest.mark.slow
def test_tensorboard_has_one_curve(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    counts = six_attempts(tmp_path, to_tensorboard)
    found = reader.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    assert {each.step: each.value for each in found.Scalars("loss")} == counts
    assert len(found.Scalars("loss")) == len(counts), "one value of each step"


def test_clocks_that_differ_too_much_are_told_of(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    folder = tmp_path / "tensorboard"
    folder.mkdir()
    (folder / f"events.out.tfevents.{int(time.time()) + 3600}.node1.17.0").touch()
    tracker = TensorBoardTracker()
    tracker.start(TrackedRun("run", tmp_path, 2, 4, 1))
    tracker.close()
    assert "s after the clock of this node" in caplog.text
