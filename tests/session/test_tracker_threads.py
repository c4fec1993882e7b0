"""The thread of a tracker: what waits for it, and what becomes of it when it is left behind."""

import threading

import pytest

import ckptman
from ckptman.errors import ConfigError
from ckptman.session import tracker_threads
from ckptman.session.tracker_threads import Behind
from tests.helpers.tracked_run import settle


class NoTextError(Exception):
    def __str__(self):
        raise ValueError("no text")


class Raising(ckptman.Tracker):
    def log(self, step, metrics):
        raise NoTextError


def test_an_error_without_a_text_is_told_of_by_its_name(tmp_path, caplog):
    with ckptman.Checkpointer(tmp_path, {"step": 0}, signals=None, trackers=[Raising()]) as checkpointer:
        checkpointer.step(1, {"loss": 1.0})
    assert "NoTextError in log(). Training goes on without it" in caplog.text


def test_what_waits_is_bounded_by_its_numbers(monkeypatch):
    monkeypatch.setattr(tracker_threads, "MOST_NUMBERS", 10)
    thread, got = Behind("a test"), list[int]()
    thread.put(got.append, 0)  # no step: it is not dropped
    for step in (1, 2, 3, 4):
        thread.put(got.append, step, numbers=4)
    thread.start()
    settle(thread)
    assert (got, thread.dropped) == ([0, 3, 4], 2)
    thread.put(got.append, 5, numbers=10)
    thread.end()
    assert thread.wait(60)
    assert (got, thread.dropped) == ([0, 3, 4, 5], 2)


def test_a_thread_that_was_left_makes_no_further_call():
    thread, begun, leave, got = Behind("a test"), threading.Event(), threading.Event(), list[int]()

    def hang():
        begun.set()
        leave.wait(60)

    thread.put(hang)
    thread.put(got.append, 1)
    thread.start()
    assert begun.wait(60)
    thread.leave()
    thread.put(got.append, 2)
    leave.set()
    assert thread.wait(60)
    assert got == []


def test_a_tracker_is_given_once(tmp_path):
    tracker = Raising()
    with pytest.raises(ConfigError, match="trackers has the same Raising twice: each needs its own object"):
        ckptman.Checkpointer(tmp_path, {"step": 0}, trackers=[tracker, Raising(), tracker])
