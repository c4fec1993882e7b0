"""Work that is shared out, work in two halves, and waiting for another thread: nothing is lost, locked or left."""

import errno
import os
import random
import signal
import sys
import threading
import time

import pytest

from ckptman.errors import ConfigError
from ckptman.storage.io import threads as parallel
from ckptman.storage.io.threads import THREADS_ENV, Flag, Wakeup, Worker, io_threads, relay, share_out


def threads_of_ours():
    return [thread.name for thread in threading.enumerate() if thread.name == "ckptman-io"]


def test_the_number_of_threads(monkeypatch):
    monkeypatch.delenv(THREADS_ENV, raising=False)
    assert io_threads() == 4
    monkeypatch.setenv(THREADS_ENV, "7")
    assert io_threads() == 7
    for text in ("0", "-1", "two", "1.5"):
        monkeypatch.setenv(THREADS_ENV, text)
        with pytest.raises(ConfigError, match=THREADS_ENV):
            io_threads()


@pytest.mark.parametrize(
    ("mine", "machine", "environment", "expected"),
    [
        (1, 1, {}, 4),
        (2, 256, {}, 4),
        (12, 64, {"SLURM_NTASKS_PER_NODE": "4"}, 12),  # bound to its own
        (64, 64, {"SLURM_NTASKS_PER_NODE": "4"}, 16),
        (64, 64, {"SLURM_NTASKS_PER_NODE": "8"}, 8),
        (64, 64, {"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 8),
        (64, 64, {"OMPI_COMM_WORLD_LOCAL_SIZE": "16"}, 4),
        (32, 64, {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4"}, 8),
        (64, 64, {"LOCAL_WORLD_SIZE": "x", "SLURM_NTASKS_PER_NODE": "0"}, 16),
        (256, 256, {}, 16),
        (64, 64, {THREADS_ENV: "300"}, 300),
    ],
)
def test_a_load_has_a_thread_for_each_core_of_the_rank(mine, machine, environment, expected, monkeypatch):
    for name in (THREADS_ENV, "TORCHELASTIC_RUN_ID", *parallel._LOCAL_RANKS):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(parallel, "cores", lambda: mine)
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    assert parallel.loading_threads() == expected


HALVES = {"first_threads": 3, "then_threads": 2, "scratch_bytes": 10}
WAYS = (
    lambda count, work: relay(count, work, lambda *_: None, **HALVES),
    lambda count, work: relay(count, lambda *_: None, lambda number, scratch, _: work(number, scratch), **HALVES),
    lambda count, work: share_out(count, work, threads=4, scratch_bytes=10),
)


def done_by(way):
    done = []
    way(20, lambda number, scratch: done.append(number))
    return done


@pytest.mark.parametrize("count", [0, 1, 2, 3, 100])
@pytest.mark.parametrize(("fetchers", "finishers"), [(1, 1), (3, 1), (2, 4)])
def test_each_piece_is_fetched_and_then_finished_once(count, fetchers, finishers):
    finished = []

    def fetch(number, scratch):
        assert len(scratch) >= 1 << 20
        scratch[:4] = number.to_bytes(4, "little")
        return f"fetched {number}"

    def finish(number, scratch, fetched):
        assert scratch[:4] == number.to_bytes(4, "little"), "another piece lies in this memory"
        finished.append((number, fetched))

    relay(count, fetch, finish, first_threads=fetchers, then_threads=finishers, scratch_bytes=1 << 20)
    assert sorted(finished) == [(number, f"fetched {number}") for number in range(count)]
    assert not threads_of_ours()


def test_the_next_are_fetched_while_one_is_finished():
    others = threading.Barrier(4, timeout=240)

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
    def fail(*_):
        raise LookupError("no")

    for run in WAYS:
        with pytest.raises(LookupError, match="no"):
            run(40, fail)
    with pytest.raises(LookupError, match="no"):
        relay(40, fail, fail, **HALVES)
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
    main, ended = threading.get_ident(), []

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
    asked, is_alive, ended, main = [], threading.Thread.is_alive, [], threading.get_ident()

    def interrupted(self):
        if threading.get_ident() != main:
            return is_alive(self)
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
    started, start, worked = [], threading.Thread.start, []

    def interrupted(self):
        started.append(self)
        if len(started) != at:
            start(self)
            return
        if not late:
            start(self)
        raise KeyboardInterrupt

    def work(number, scratch):
        time.sleep(0.001)
        worked.append(number)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    for run in WAYS:
        started.clear()
        with pytest.raises(KeyboardInterrupt):
            run(1000, work)
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
    for run in WAYS:
        started.clear()
        assert sorted(done_by(run)) == list(range(20))


def test_large_scratch_is_not_kept():
    relay(9, lambda *_: None, lambda *_: None, **{**HALVES, "scratch_bytes": parallel.COLD_STRIDE_BYTES})
    assert all(len(buffer) <= 2 * parallel.STRIDE_BYTES for buffer in parallel._free)


@pytest.mark.parametrize("room", [1, 2, 3])
def test_with_less_memory_all_is_done(room, monkeypatch):
    made = []

    def little(_, size):
        if len(made) == room:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        made.append(memoryview(bytearray(size)))
        return made[-1]

    monkeypatch.setattr(parallel.Scratch, "borrow", little)
    for run in WAYS:
        made.clear()
        assert sorted(done_by(run)) == list(range(20))


def test_without_any_memory_that_is_the_error(monkeypatch):
    def none(_, size):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(parallel.Scratch, "borrow", none)
    for run in WAYS:
        with pytest.raises(OSError, match="Cannot allocate memory"):
            done_by(run)


def test_threads_that_compute_give_way_while_a_load_reads():
    before = sys.getswitchinterval()
    with parallel.preferred():
        with parallel.preferred():
            assert sys.getswitchinterval() < before / 10
        assert sys.getswitchinterval() < before / 10
    assert sys.getswitchinterval() == before
    with parallel.preferred():
        child = os.fork()
        if not child:
            os._exit(sys.getswitchinterval() != before or parallel._preferring != [])
        assert os.waitpid(child, 0)[1] == 0, "a fork computes as before"
    assert sys.getswitchinterval() == before
    with pytest.raises(ValueError, match="x"), parallel.preferred():
        raise ValueError("x")
    assert sys.getswitchinterval() == before


def test_a_worker_does_one_task_after_the_other_and_hands_on_what_they_raise():
    seen = []
    with Worker("test") as worker:
        tasks = [worker.submit(seen.append, number) for number in range(10)]
        failing = worker.submit(lambda: 1 // 0)
        assert worker.submit(lambda: 7).result() == 7
        assert all(task.done() and task.error is None for task in tasks)
        with pytest.raises(ZeroDivisionError):
            failing.result()
    assert seen == list(range(10))
    with pytest.raises(RuntimeError):
        worker.submit(int)


def test_several_threads_that_wait_are_all_woken():
    flag, woken = Flag(), []
    threads = [threading.Thread(target=lambda n=n: flag.wait() and woken.append(n)) for n in range(4)]
    for each in threads:
        each.start()
    flag.set()
    for each in threads:
        each.join(10)
    assert sorted(woken) == [0, 1, 2, 3]
    flag.clear()
    assert not flag.wait(0.01)


def test_a_wakeup_that_came_before_the_wait_is_not_lost():
    wakeup, ready = Wakeup(), [True]
    wakeup.notify()
    wakeup.notify()
    assert wakeup.wait_for(lambda: ready[0], 0.0)


def test_interrupts_at_any_moment_of_a_wait_leave_nothing_locked():
    """A thread interrupts the main one again and again while it waits for tasks; each is waited for to its end."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng, over, main = random.Random(seed), threading.Event(), threading.get_ident()
    armed, interrupted = [], []

    def interrupt():
        while not over.is_set():
            time.sleep(rng.uniform(0, 0.001))
            signal.pthread_kill(main, signal.SIGINT)

    def handler(signum, _frame):
        """Raise within the block that catches it only: once, and not between two of its rounds."""
        if armed:
            armed.clear()
            interrupted.append(signum)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    worker, flag = Worker("test"), Flag()
    worker.start()
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        for _ in range(500):
            task = None
            while task is None or not task.done():
                try:
                    armed.append(True)
                    task = task or worker.submit(time.sleep, rng.uniform(0, 0.002))
                    task.wait()
                    flag.set()
                    armed.clear()
                except KeyboardInterrupt:
                    pass
    finally:
        over.set()
        thread.join(10)
        signal.signal(signal.SIGINT, before)
    last = worker.submit(lambda: "here")
    assert last.wait(10)
    assert last.result() == "here"
    assert flag.wait(10)
    worker.close()
    assert interrupted


@pytest.mark.parametrize("before", [True, False], ids=["before the thread runs", "after"])
def test_an_interrupt_while_the_thread_starts_leaves_one_that_works(before, monkeypatch):
    start = threading.Thread.start

    def interrupted(thread):
        if not before:
            start(thread)
        raise KeyboardInterrupt

    worker, running = Worker("test"), []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.submit(lambda: None)

    def alone():
        running.append(1)
        time.sleep(0.01)
        return len(running) == running.pop() == 1

    tasks = [worker.submit(alone) for _ in range(20)]
    assert all(each.wait(10) and each.result() for each in tasks)
    closing = threading.Thread(target=worker.close)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
