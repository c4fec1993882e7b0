"""The thread that samples: what is broken is told once, what hangs is left behind, and training goes on."""

import logging
import threading
from contextlib import contextmanager

from ckptman.policies.health import HealthThresholds
from ckptman.runtime.health import sampler as sampling
from ckptman.runtime.health.devices import DeviceLost, open_device
from ckptman.runtime.health.sampler import Sampler
from ckptman.runtime.outcome import OUTCOME_ENV, reported_nodes

FAST = HealthThresholds(period_seconds=0.001)
WAIT = 20.0


class Recorded:
    """Gives one reading after the other, the last one again and again; an error is raised."""

    def __init__(self, *readings, after=0):
        self._readings, self._after, self._count = readings, after, 0
        self.done = threading.Event()

    def read(self):
        number, self._count = self._count, self._count + 1
        if number >= len(self._readings) + self._after:
            self.done.set()
        found = self._readings[min(number, len(self._readings) - 1)]
        if isinstance(found, Exception):
            self.done.set()
            raise found
        return found


def steps():
    step = iter(range(10**9))
    return lambda: (next(step), 0.001)


@contextmanager
def sampled(sources, thresholds=FAST, **options):
    sampler = Sampler(thresholds, "rank 3 on n7", "n7", sources, steps(), **options)
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.close()


def test_a_breach_is_one_line_and_goes_to_the_leader(caplog):
    caplog.set_level(logging.INFO, "ckptman")
    # An hour is so many periods that these are soon more than its share.
    card = Recorded({"throttled": ("power brake",), "utilisation": 0.99}, after=100)
    thresholds = HealthThresholds(period_seconds=0.001, share=1e-5)
    with sampled({"the GPU": lambda: card}, thresholds) as sampler:
        assert card.done.wait(WAIT)
    summary, breaches = sampler.take()
    assert summary.samples > 50
    assert [(each.what, each.ended) for each in breaches] == [("throttled", False)]
    [line] = [each.message for each in caplog.records]
    assert line.startswith("health of rank 3 on n7: GPU slowed down (power brake), in 100% of the samples of ")
    assert sampler.take()[1] == ()


def test_a_device_with_errors_puts_its_node_on_the_list(tmp_path, monkeypatch, caplog):
    outcome = tmp_path / "outcome.json"
    monkeypatch.setenv(OUTCOME_ENV, str(outcome))
    card = Recorded({"xids": (31,)}, {"ecc_errors": 1}, DeviceLost("GPU is lost"))
    other = Recorded({}, after=5)
    with sampled({"the GPU": lambda: card, "the host": lambda: other}):
        assert card.done.wait(WAIT)
        assert other.done.wait(WAIT)
    assert reported_nodes(outcome) == {"n7": "the GPU cannot be read any more: GPU is lost"}
    warned = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert warned == [
        "health of rank 3 on n7: 1 uncorrected ECC error of the GPU",
        "health of rank 3 on n7: the GPU cannot be read any more: GPU is lost",
    ]


def test_a_broken_library_is_told_once_and_the_rest_goes_on(caplog):
    def opening():
        raise ImportError("libnvidia-ml.so.1: bad ELF")

    later, good = Recorded({}, RuntimeError("unknown\nerror")), Recorded({"host_available_bytes": 5.0}, after=20)
    with sampled({"the GPU": opening, "the card": lambda: later, "the host": lambda: good}) as sampler:
        assert good.done.wait(WAIT)
    lines = [each.message for each in caplog.records]
    assert len(lines) == 2
    assert all("does not work" in each and "training goes on" in each and "\n" not in each for each in lines)
    assert sampler.take()[0].figures["host_available_bytes"][0] > 5


def test_a_library_that_is_missing_is_no_warning(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "ckptman")
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    for quiet, lines in ((True, 0), (False, 1)):
        good = Recorded({}, after=3)
        with sampled({"the GPU": lambda: open_device("nvidia", "0000:01:00.0"), "the host": lambda: good}, quiet=quiet):  # noqa: B023
            assert good.done.wait(WAIT)
        assert [each.levelno for each in caplog.records] == [logging.INFO] * lines
    assert "ckptman[nvidia]" in caplog.records[0].message


def test_a_library_that_hangs_is_left_behind(monkeypatch, caplog):
    monkeypatch.setattr(sampling, "_HANGS_SECONDS", 0.0)
    monkeypatch.setattr(sampling, "_CLOSE_SECONDS", 0.01)
    hangs, go = threading.Event(), threading.Event()

    class Dead:
        def read(self):
            hangs.set()
            go.wait(WAIT)
            return {}

    with sampled({"the GPU": Dead}) as sampler:
        assert hangs.wait(WAIT)
        for _ in range(3):
            sampler.take()
    assert [each.message for each in caplog.records] == [
        "health of rank 3 on n7: the GPU has not answered for a minute: no figures until it does"
    ]
    assert sampler._thread.is_alive()
    go.set()
    sampler._thread.join(WAIT)
