"""One curve of TensorBoard over six attempts, read by TensorBoard's own reader."""

import time

import pytest

from ckptman.integrations.tensorboard import TensorBoardTracker
from ckptman.runtime.tracker import TrackedRun
from tests.helpers.tracked_run import six_attempts

reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def make(root):
    return [TensorBoardTracker()]


@pytest.mark.slow
def test_six_attempts_are_one_curve(tmp_path):
    counts = six_attempts(tmp_path, make)
    found = reader.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    assert {each.step: each.value for each in found.Scalars("loss")} == counts
    assert len(found.Scalars("loss")) == len(counts), "one value of each step"


def test_clocks_that_differ_too_much_are_told_of(tmp_path, caplog):
    folder = tmp_path / "tensorboard"
    folder.mkdir()
    (folder / f"events.out.tfevents.{int(time.time()) + 3600}.node1.17.0").touch()
    tracker = TensorBoardTracker()
    tracker.start(TrackedRun("run", tmp_path, 2, 4, 1))
    tracker.close()
    assert "s after the clock of this node" in caplog.text
