"""The text file for Prometheus, read by the parser of its client."""

import math
from pathlib import Path

import pytest

from ckptman.errors import ConfigError
from ckptman.integrations import prometheus
from ckptman.integrations.prometheus import PrometheusTextfile
from ckptman.runtime.tracker import TrackedRun

parser = pytest.importorskip("prometheus_client.parser")
ROOT = 'runs/"9b"\\new\nline'


def samples(path):
    """The samples of a file, by series and metric."""
    families = list(parser.text_string_to_metric_families(path.read_text()))
    assert all(each.documentation and each.type in ("gauge", "counter") for each in families)
    found = [sample for family in families for sample in family.samples]
    assert all(each.labels["root"] == ROOT and each.labels["run_id"] == "a1" for each in found)
    return {(each.name, each.labels.get("name", "")): each.value for each in found}


def started(path):
    tracker = PrometheusTextfile(path)
    tracker.start(TrackedRun("a1", Path(ROOT), 3, 40, 8))
    return tracker


def test_it_tells_how_a_run_stands(tmp_path, monkeypatch):
    monkeypatch.setattr(prometheus, "WRITE_SECONDS", 0.0)
    path = tmp_path / "run.prom"
    tracker = started(path)
    assert samples(path) == {
        ("ckptman_training", ""): 1,
        ("ckptman_attempt", ""): 3,
        ("ckptman_restarts_total", ""): 2,
        ("ckptman_step", ""): 40,
        ("ckptman_stall_seconds_total", ""): 0,
    }
    tracker.log(41, {"loss": 0.25, 'a "b"\n': math.nan, "big": 1e300, "inf": -math.inf})
    saved = {"step": 41, "time": 1.7e9, "seconds": 2.5, "bytes": 4096, "stall_seconds": 1}
    tracker.event("save_durable", saved)
    tracker.event("progress", {"step": 41, "stall_seconds": 1.25})
    found = samples(path)
    assert found["ckptman_metric", "loss"] == 0.25
    assert math.isnan(found["ckptman_metric", 'a "b"\n'])
    assert (found["ckptman_metric", "big"], found["ckptman_metric", "inf"]) == (1e300, -math.inf)
    assert (found["ckptman_durable_step", ""], found["ckptman_durable_timestamp_seconds", ""]) == (41, 1.7e9)
    assert (found["ckptman_save_seconds", ""], found["ckptman_stall_seconds_total", ""]) == (2.5, 1.25)
    tracker.close()
    assert samples(path)["ckptman_training", ""] == 0
    assert [each.name for each in path.parent.iterdir()] == ["run.prom"]


def test_it_is_not_written_too_often(tmp_path):
    tracker = started(path := tmp_path / "run.prom")
    before = path.read_text()
    tracker.log(41, {"loss": 0.25})
    assert path.read_text() == before
    tracker.close()
    assert samples(path)["ckptman_step", ""] == 41


def test_a_name_that_is_not_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"end in \.prom"):
        PrometheusTextfile(tmp_path / "run.txt")


def test_a_folder_that_is_not_there_is_refused_on_rank_0(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"is not a folder: .*or make it first"):
        PrometheusTextfile(tmp_path / "new" / "run.prom")
    monkeypatch.setenv("RANK", "1")
    PrometheusTextfile(tmp_path / "new" / "run.prom")
    assert not [*tmp_path.iterdir()]
