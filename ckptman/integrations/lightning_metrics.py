"""What a Trainer of Lightning has accumulated in an epoch: it saves none of it, and a resumed epoch would lose it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torchmetrics import Metric


class EpochMetrics:
    """Averages of what was logged with `on_epoch=True`, and the states of metrics of torchmetrics in the module.

    Each rank has its own.
    """

    per_rank = True
    """Tells the Checkpointer to save this object once for each rank."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._saved: dict[str, Any] = {"epoch": 0, "logged": {}, "metrics": {}}

    @property
    def _epoch(self) -> int:
        return int(self._trainer.fit_loop.epoch_progress.current.ready)

    @property
    def _results(self) -> Any:
        return self._trainer.fit_loop.epoch_loop._results

    def state_dict(self) -> dict[str, Any]:
        """Return the accumulated values."""
        logged = {key: each.metric_state for key, each in self._results.items() if each.is_tensor}
        metrics = {name: {"updates": each.update_count, "state": each.metric_state} for name, each in self._metrics()}
        unclaimed = self._saved["logged"] if self._saved["epoch"] == self._epoch else {}
        return {"epoch": self._epoch, "logged": {**unclaimed, **logged}, "metrics": metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take accumulated values, for `put_back`."""
        self._saved = {**state, "logged": dict(state["logged"])}

    def load_from_other_rank(self, state: Mapping[str, Any], rank: int) -> None:
        """Begin without any, on a rank that did not exist at save time."""

    def put_back(self) -> None:
        """Continue with loaded values. In the epoch that they are of, a name has its own once it is logged again."""
        if self._saved["epoch"] == self._epoch:
            results = self._results
            results.saved = self._saved["logged"]
            results.__class__ = type("Resumed", (_FilledIn, type(results)), {})
        for name, metric in self._metrics():
            if (saved := self._saved["metrics"].get(name)) is not None:
                metric._update_count = saved["updates"]
                for key, value in saved["state"].items():
                    setattr(metric, key, _on(metric.device, value))

    def _metrics(self) -> Iterator[tuple[str, Metric]]:
        for name, module in self._trainer.lightning_module.named_modules():
            if isinstance(module, Metric):
                yield name, module


class _FilledIn(dict[str, Any]):
    """Results of an epoch in which a name that is logged for the first time begins with its saved values."""

    saved: dict[str, dict[str, Any]]

    def __setitem__(self, key: str, metric: Any) -> None:
        for name, value in self.saved.pop(key, {}).items():
            setattr(metric, name, value)
        super().__setitem__(key, metric)


def _on(device: Any, value: Any) -> Any:
    return [each.to(device) for each in value] if isinstance(value, list) else value.to(device)
