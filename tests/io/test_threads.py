"""Work that is shared out, and work in two halves: each piece once, the first error, no thread that stays."""

import errno
import os
import signal
import threading
import time

import pytest

from ckptman.io import threads as parallel
from ckptman.io.threads import relay, share_out

MIB = 1024 * 1024


def threads_of_ours():
    return [thread.name for thread in threading.enumerate() if thread.name == "ckptman-io"]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 100])
@pytest.mark.parametrize(("fetchers", "finishers"), [(1, 1), (3, 1), (2, 4)])
def test_each_piece_is_fetched_and_then_finished_once(count, fetchers, finishers):
    finished = []

    def fetch(number, scratch):
        assert len(scratch) >= MIB
        scratch[:4] = number.to_bytes(4, "little")
        return f"fetched {number}"

    def finish(number, scratch, fetched):
        assert scratch[:4] == number.to_bytes(4, "little"), "another piece lies in this memory"
        finished.append((number, fetched))

    relay(count, fetch, finish, first_threads=fetchers, then_threads=finishers, scratch_bytes=MIB)
    assert sorted(finished) == [(number, f"fetched {number}") for number in range(count)]
    assert not threads_of_ours()


def test_the_next_are_fetched_while_one_is_finished():
    others = threading.Barrier(4, timeout=60)

    def fetch(number, scratch):
        if number in (1, 2, 3):
            others.wait()

    def finish(number, scratch, fetched):
        if number == 0:
            others.wait()

    relay(4, fetch, finish, first_threads=3, then_threads=1, scratch_bytes=1)


def test_no_more_memory_than_there_are_threads():
    places = set()

    def fetch(number, scratch):
        places.add(id(scratch))

    relay(50, fetch, lambda number, scratch, fetched: None, first_threads=3, then_threads=2, scratch_bytes=1)
    assert len(places) <= 5


@pytest.mark.parametrize("half", ["fetch", "finish"])
@pytest.mark.parametrize("at", [0, 7, 39])
@pytest.mark.parametrize(("fetchers", "finishers"), [(1, 1), (3, 1), (2, 3)])
def test_the_first_error_ends_both_halves(half, at, fetchers, finishers):
    fetched = []

    def fail(which, number):
        if which == half and number == at:
            raise LookupError(f"{which} {number}")

    def fetch(number, scratch):
        fetched.append(number)
        fail("fetch", number)

    def finish(number, scratch, result):
        fail("finish", number)

    with pytest.raises(LookupError, match=f"{half} {at}"):
        relay(40, fetch, finish, first_threads=fetchers, then_threads=finishers, scratch_bytes=1)
    assert len(fetched) <= at + 1 + fetchers + finishers
    assert not threads_of_ours()


def test_an_error_everywhere_is_raised_once():
    def fail(*arguments):
        raise LookupError("no")

    for fetch in (fail, lambda number, scratch: None):
        with pytest.raises(LookupError, match="no"):
            relay(40, fetch, fail, first_threads=4, then_threads=4, scratch_bytes=1)
    assert not threads_of_ours()


def test_an_interrupt_ends_both_halves():
    def finish(number, scratch, fetched):
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        relay(1000, lambda number, scratch: None, finish, first_threads=3, then_threads=1, scratch_bytes=1)
    assert not threads_of_ours()


@pytest.mark.parametrize("interrupts", [1, 3])
def test_an_interrupt_while_the_last_piece_is_waited_for(interrupts):
    """Whoever is at it may write to a file that is closed then."""
    main, ended = threading.get_ident(), list[int]()

    def work(number, scratch):
        if threading.get_ident() == main:
            time.sleep(0.1)  # the other piece is another thread's
            return
        time.sleep(0.2)
        for _ in range(interrupts):
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.05)
        ended.append(number)

    with pytest.raises(KeyboardInterrupt):
        share_out(2, work, threads=2, scratch_bytes=1)
    assert len(ended) == 1


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_between_two_waits_leaves_no_thread_at_work(at, monkeypatch):
    """Where others compute, it waits there for its turn, and so Ctrl-C comes there more often than one would think."""
    asked, is_alive, ended = [], threading.Thread.is_alive, list[int]()

    def interrupted(self):
        asked.append(self)
        if len(asked) == at:
            raise KeyboardInterrupt
        return is_alive(self)

    def work(number, scratch):
        time.sleep(0.1 * number)
        ended.append(number)

    monkeypatch.setattr(threading.Thread, "is_alive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        share_out(4, work, threads=4, scratch_bytes=1)
    assert len(ended) == 4
    assert not threads_of_ours()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_while_threads_start_leaves_none_at_work(at, late, monkeypatch):
    """Else they write to a file that is closed: to whatever has its descriptor by then."""
    started, start, worked = [], threading.Thread.start, list[int]()

    def interrupted(self):
        started.append(self)
        if len(started) != at:
            start(self)
            return
        if not late:
            start(self)
        raise KeyboardInterrupt

    def work(number, scratch, *_):
        time.sleep(0.001)
        worked.append(number)

    def by_halves():
        relay(1000, work, work, first_threads=3, then_threads=2, scratch_bytes=1)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    for run in (by_halves, lambda: share_out(1000, work, threads=4, scratch_bytes=1)):
        started.clear()
        with pytest.raises(KeyboardInterrupt):
            run()
        assert not threads_of_ours()
        done = len(worked)
        if late:
            start(started[-1])
            started[-1].join(60)
        assert not started[-1].is_alive()
        assert len(worked) == done


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_with_fewer_threads_all_is_done(allowed, monkeypatch):
    started, start = [], threading.Thread.start

    def sometimes(self):
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", sometimes)
    finished = []
    relay(
        20,
        lambda number, scratch: number,
        lambda number, scratch, fetched: finished.append(fetched),
        first_threads=3,
        then_threads=2,
        scratch_bytes=1,
    )
    assert sorted(finished) == list(range(20))
    started.clear()
    finished.clear()
    share_out(20, lambda number, scratch: finished.append(number), threads=4, scratch_bytes=1)
    assert sorted(finished) == list(range(20))


def test_large_scratch_is_not_kept():
    relay(
        9, lambda *_: None, lambda *_: None, first_threads=3, then_threads=1, scratch_bytes=parallel.COLD_STRIDE_BYTES
    )
    assert all(len(buffer) <= 2 * parallel.STRIDE_BYTES for buffer in parallel._free)


@pytest.mark.parametrize("room", [1, 2, 3])
def test_with_less_memory_all_is_done(room, monkeypatch):
    made = list[memoryview]()

    def little(size):
        if len(made) == room:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        made.append(memoryview(bytearray(size)))
        return made[-1]

    monkeypatch.setattr(parallel, "_borrow", little)
    done = list[int]()
    relay(
        20,
        lambda number, scratch: number,
        lambda number, scratch, fetched: done.append(fetched),
        first_threads=3,
        then_threads=2,
        scratch_bytes=10,
    )
    assert sorted(done) == list(range(20))
    made.clear()
    share_out(20, lambda number, scratch: done.append(number), threads=4, scratch_bytes=10)
    assert sorted(done) == sorted([*range(20), *range(20)])


def test_without_any_memory_that_is_the_error(monkeypatch):
    def none(size):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(parallel, "_borrow", none)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        share_out(20, lambda number, scratch: None, threads=4, scratch_bytes=10)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        relay(
            20,
            lambda number, scratch: None,
            lambda number, scratch, fetched: None,
            first_threads=3,
            then_threads=2,
            scratch_bytes=10,
        )
