"""One run of MLflow over six attempts, with one value of the loss at each step, in a database without a server."""

import pytest

from ckptman.integrations.mlflow import MLflowTracker
from tests.helpers.tracked_run import six_attempts

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")


def uri_of(root):
    return f"sqlite:///{root.parent}/mlflow.db"


def make(root):
    return [MLflowTracker("tests", uri_of(root))]


@pytest.mark.slow
@pytest.mark.leaves("mlflow.db")
def test_six_attempts_are_one_run_with_one_curve(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    client = mlflow.MlflowClient(uri_of(tmp_path / "run"))
    experiment = client.create_experiment("tests")
    counts = six_attempts(tmp_path / "run", make)
    [run] = client.search_runs([experiment])
    assert (run.data.tags["ckptman.run_id"], run.data.tags["ckptman.attempt"]) == ("tracked/1", "6")
    assert run.info.status == "FINISHED"
    found = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in found] == [*counts.items()]
