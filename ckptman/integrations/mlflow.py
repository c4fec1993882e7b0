"""MLflow: one run over all attempts, with one value of each metric at each step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ckptman.integrations.append_only import AppendOnlyTracker, Step, require
from ckptman.runtime.tracker import TrackedRun

_TAG = "ckptman.run_id"
_NOT_IN_NAMES = re.compile(r"[^\w\-. /:]")
_MOST_METRICS = 1000
"""MLflow takes no more in one call."""
_STATES = {"finished": "FINISHED", "stopped": "SCHEDULED", "failed": "FAILED"}


class MLflowTracker(AppendOnlyTracker):
    """Show a run in MLflow, as one run over all attempts; it has the tag `ckptman.run_id`.

    After a rollback a new run of MLflow takes its place, with what was before the step that the run went back to; the
    one from before is deleted, which MLflow can undo (`mlflow runs restore`).

    Args:
        experiment: The name of the experiment; it is made where it is missing.
        tracking_uri: Where MLflow keeps runs, such as `sqlite:////scratch/mlflow.db` or the address of a server. None:
            as MLFLOW_TRACKING_URI says, or MLflow's own default.
        live: Hand on each step at once, not only when a checkpoint that has it is durable; steps that are done again
            after a crash then stay as they were the first time.

    Raises:
        ConfigError: mlflow is not installed.
    """

    _name = "mlflow"

    def __init__(self, experiment: str, tracking_uri: str | None = None, *, live: bool = False) -> None:
        require("mlflow", "mlflow")
        super().__init__(live)
        self._experiment, self._tracking_uri = experiment, tracking_uri
        self._client: Any = None
        self.run_id = ""
        """The id that MLflow has for the run, once the first step has ended; on rank 0 alone."""

    def _open(self, run: TrackedRun, went_back: bool) -> bool:
        from mlflow import MlflowClient

        self._client = MlflowClient(self._tracking_uri)
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(self._experiment)
        identity = run.run_id.replace("'", "")
        runs = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{identity}'", max_results=1)
        if runs and went_back:
            self._client.delete_run(runs[0].info.run_id)
        if runs and not went_back:
            self.run_id = runs[0].info.run_id
            self._client.update_run(self.run_id, status="RUNNING")
        else:
            tags = {_TAG: identity, "ckptman.root": str(run.root)}
            self.run_id = self._client.create_run(experiment, tags=tags, run_name=run.root.name).info.run_id
        self._client.set_tag(self.run_id, "ckptman.attempt", run.attempt)
        return went_back

    def _hand_on(self, steps: Sequence[Step]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_NOT_IN_NAMES.sub("_", name), number, int(each.time * 1000), each.step)
            for each in steps
            for name, number in each.metrics.items()
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self.run_id, metrics=metrics[first : first + _MOST_METRICS])

    def _saved(self, step: int) -> None:
        self._client.set_tag(self.run_id, "ckptman.durable_step", step)

    def _close(self, end: str) -> None:
        self._client.set_terminated(self.run_id, status=_STATES[end])
