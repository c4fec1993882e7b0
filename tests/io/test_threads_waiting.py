"""Waiting for another thread: wake-ups arrive, and Ctrl-C at any moment of a wait leaves nothing locked."""

import random
import signal
import threading
import time

import pytest

from ckptman.io.threads import Flag, Wakeup, Worker


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
    flag, woken = Flag(), list[int]()
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
    armed, interrupted = list[bool](), list[int]()

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

    worker, running = Worker("test"), list[int]()
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
