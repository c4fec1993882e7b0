"""Metrics by step: what comes back, however large, torn or wrong the file is."""

import itertools
import json

from ckptman.runtime import metrics_log
from ckptman.runtime.metrics_log import MetricsLog, metric_names, read_metric
from ckptman.storage.format.paths import metrics_path


def log_of(root, attempt=1):
    metrics_path(root).parent.mkdir(exist_ok=True)
    return MetricsLog(root, attempt)


def test_columns_with_gaps_come_back(tmp_path):
    log = log_of(tmp_path)
    log.flush()
    assert not metrics_path(tmp_path).exists()
    log.add(1, {"loss": 0.5})
    log.add(2, {})
    log.add(3, {"loss": 0.25, "eval": float("inf")})
    log.flush()
    assert read_metric(tmp_path, "loss") == ([1, 3], [0.5, 0.25])
    assert read_metric(tmp_path, "eval") == ([3], [float("inf")])
    assert read_metric(tmp_path, "none") is None
    assert metric_names(tmp_path) == ["eval", "loss"]


def test_of_very_many_steps_some_are_left_out_and_never_the_last(tmp_path):
    log = log_of(tmp_path)
    for step in range(1, 5001):
        log.add(step, {f"m{number}": float(step) for number in range(80)})
    log.flush()
    steps, values = read_metric(tmp_path, "m0")
    assert (steps[0], steps[-1], len(steps)) == (1, 5000, metrics_log.MOST_STEPS)
    assert values == [float(step) for step in steps]
    assert len(metric_names(tmp_path)) == metrics_log.MOST_METRICS


def test_a_file_that_is_too_large_is_halved_by_the_next_attempt(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_log, "MAX_BYTES", 1000)
    first = log_of(tmp_path)
    for begin in range(1, 201, 20):
        for step in range(begin, begin + 20):
            first.add(step, {"loss": 1.0})
        first.flush()
    assert read_metric(tmp_path, "loss")[0][-1] == 200
    second = log_of(tmp_path, 2)
    second.add(201, {"loss": 2.0})
    second.flush()
    steps, _ = read_metric(tmp_path, "loss")
    assert (steps[0], steps[-1]) == (1, 201)
    assert 20 < len(steps) < 110
    assert metrics_path(tmp_path).stat().st_size < 2000


def test_a_file_of_single_steps_is_halved_too_and_within_an_attempt(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_log, "MAX_BYTES", 5000)
    log = log_of(tmp_path)
    for step in range(1, 1001):
        log.add(step, {"loss": float(step)})
        log.flush()
    steps, values = read_metric(tmp_path, "loss")
    assert metrics_path(tmp_path).stat().st_size < 6000
    assert len(steps) > 20
    assert (steps[0], steps[-1]) == (1, 1000)
    gaps = [later - step for step, later in itertools.pairwise(steps)]
    assert max(gaps) < 150
    assert values == [float(step) for step in steps]


def test_lines_that_are_no_metrics_are_left_out(tmp_path):
    log = log_of(tmp_path)
    log.add(1, {"loss": 1.0})
    log.flush()
    wrong = [
        *("{", "[]", "1", "{}", "[" * 100_000, json.dumps({"steps": [], "metrics": {}})),
        *(json.dumps({"steps": [2], "metrics": {"loss": each}}) for each in ([], [1, 2], ["x"], 3)),
        json.dumps({"steps": ["2"], "metrics": {"loss": [1.0]}}),
    ]
    with metrics_path(tmp_path).open("a") as file:
        file.write("\n".join(wrong) + '{"steps": [3], "metr')
    log.add(4, {"loss": 4.0})
    log.flush()
    assert read_metric(tmp_path, "loss") == ([1, 4], [1.0, 4.0])


def test_what_cannot_be_written_is_left_out_in_silence(tmp_path):
    log = MetricsLog(tmp_path / "missing", 1)
    log.add(1, {"loss": 1.0})
    log.flush()
