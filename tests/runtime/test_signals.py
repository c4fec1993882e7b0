"""SignalHandler, with real signals: to this process, and to processes of its own that tell us what they saw."""

import contextlib
import faulthandler
import logging
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptman import ConfigError, SignalHandler
from ckptman.runtime.signals import free_signals

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def send(number):
    os.kill(os.getpid(), number)


@pytest.fixture
def restoring():
    """Puts back the handlers that a test sets; that a SignalHandler is undone is looked at after every test."""
    before = {number: signal.getsignal(number) for number in ALL}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


WAIT_TWICE = """
import sys, time
from ckptman import SignalHandler
with SignalHandler(repeat_seconds=0) as signals:
    print("ready", flush=True)
    while not signals.requested:
        time.sleep(0.01)
    print("saw", signals.received.name, flush=True)
    sys.stdin.readline()
    print("not reached")
"""


@pytest.mark.parametrize("number", ALL)
def test_the_first_signal_sets_the_flag(number):
    with SignalHandler(repeat_seconds=0) as signals:
        assert not signals.requested
        assert signals.received is None
        send(number)
        assert signals.requested
        assert signals.received is number
        send(signal.SIGTERM if number != signal.SIGTERM else signal.SIGUSR1)
        assert signals.received is number, "the first one is kept"
    assert signals.received is number, "still readable after the block"


def test_only_the_given_signals():
    with SignalHandler([signal.SIGUSR2], repeat_seconds=0):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL


@pytest.mark.parametrize(
    ("first", "second", "code", "told"),
    [
        *((number, number, -number, "") for number in ALL if number != signal.SIGINT),
        (signal.SIGINT, signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt"),
        (signal.SIGTERM, signal.SIGUSR1, 0, ""),
    ],
)
def test_the_second_identical_signal_does_what_it_would_have_done(first, second, code, told):
    command, pipes = [sys.executable, "-c", WAIT_TWICE], dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(first)
        assert process.stdout.readline() == f"saw {first.name}\n"
        process.send_signal(second)
        out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (code, "" if code else "not reached\n"), err
    assert told in err


def test_the_second_signal_calls_the_handler_that_was_there(restoring):
    calls = []

    def mine(signum, frame):
        calls.append(signum)

    signal.signal(signal.SIGUSR1, mine)
    with SignalHandler(repeat_seconds=0) as signals:
        send(signal.SIGUSR1)
        assert calls == []
        assert signals.requested
        send(signal.SIGUSR1)
        assert calls == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is mine


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_what_nohup_and_background_shells_ignore_stays_ignored(restoring, number):
    signal.signal(number, signal.SIG_IGN)
    with SignalHandler(repeat_seconds=0) as signals:
        for _ in range(3):
            send(number)
        assert signals.received is None
    assert signal.getsignal(number) is signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_what_a_trap_in_a_batch_script_ignores_is_noted_and_still_kills_nothing(restoring, number):
    signal.signal(number, signal.SIG_IGN)
    with SignalHandler(repeat_seconds=0) as signals:
        send(number)
        assert signals.received == number
        send(number)
    assert signal.getsignal(number) is signal.SIG_IGN


def test_handlers_are_restored_whatever_leaves_the_block():
    before = [signal.getsignal(number) for number in ALL]
    with pytest.raises(RuntimeError, match="step 3"), SignalHandler(repeat_seconds=0):
        assert signal.getsignal(signal.SIGTERM) != before[0]
        raise RuntimeError("step 3")
    with pytest.raises(KeyboardInterrupt), SignalHandler(repeat_seconds=0):
        send(signal.SIGINT)
        send(signal.SIGINT)
    assert [signal.getsignal(number) for number in ALL] == before


def test_what_was_installed_is_undone_if_installing_fails(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    real, calls = signal.signal, []

    def fails_once(number, handler):
        calls.append(number)
        if len(calls) == 3:
            raise OSError("no")
        return real(number, handler)

    monkeypatch.setattr(signal, "signal", fails_once)
    with pytest.raises(OSError, match="no"):
        SignalHandler(repeat_seconds=0).__enter__()
    monkeypatch.undo()
    assert len(calls) > 3
    assert signal.getsignal(signal.SIGTERM) == before


def test_nested_blocks_both_see_it_and_come_back_in_order():
    with SignalHandler(repeat_seconds=0) as outer:
        outer_handler = signal.getsignal(signal.SIGTERM)
        with SignalHandler(repeat_seconds=0) as inner:
            send(signal.SIGTERM)
            assert inner.received is outer.received is signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) == outer_handler
        with SignalHandler(repeat_seconds=0) as later:
            assert not later.requested
        assert outer.requested


def test_nested_blocks_the_second_signal_reaches_the_outermost_disposition():
    with (
        pytest.raises(KeyboardInterrupt),
        SignalHandler(repeat_seconds=0) as outer,
        SignalHandler(repeat_seconds=0) as inner,
    ):
        send(signal.SIGINT)
        assert inner.requested
        assert outer.requested
        send(signal.SIGINT)


def test_a_signal_between_two_handlers_being_set_is_seen(monkeypatch):
    real = signal.signal

    def sends_at_once(number, handler):
        result = real(number, handler)
        if number == signal.SIGTERM and callable(handler):
            send(signal.SIGTERM)
        return result

    monkeypatch.setattr(signal, "signal", sends_at_once)
    with SignalHandler(repeat_seconds=0) as signals:
        assert signals.received is signal.SIGTERM


def test_used_again_it_starts_afresh_but_not_inside_its_own_block():
    signals = SignalHandler(repeat_seconds=0)
    for _ in range(2):
        with signals:
            assert not signals.requested
            with pytest.raises(ConfigError, match="make a new one"):
                signals.__enter__()
            send(signal.SIGTERM)
            assert signals.requested


def test_not_in_another_thread():
    with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigError, match=r"main thread.*hand it to the thread"):
        pool.submit(SignalHandler(repeat_seconds=0).__enter__).result()


@pytest.mark.parametrize(
    ("signals", "message"),
    [([signal.SIGKILL], "SIGKILL cannot be caught"), ([signal.SIGSTOP], "SIGSTOP cannot"), ([4711], "4711")],
)
def test_signals_that_cannot_be_caught_are_refused(signals, message):
    with pytest.raises(ConfigError, match=message):
        SignalHandler(signals)


def test_a_launcher_that_repeats_a_signal_at_once_asks_once():
    with SignalHandler() as signals:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received is signal.SIGTERM


@contextlib.contextmanager
def announced(level=logging.INFO):
    """A signal that comes while it would be announced."""
    logging.getLogger("ckptman").setLevel(level)
    with SignalHandler([signal.SIGTERM]) as signals, signals.announcing("saving"):
        send(signal.SIGTERM)
        yield
        assert signals.requested


def test_what_is_announced_is_said_at_once_and_never_blocks(monkeypatch):
    reader, writer = os.pipe()
    monkeypatch.setattr(logging.getLogger("ckptman"), "level", logging.INFO)
    with open(reader, "rb", buffering=0) as read, open(writer, "w") as stream:
        monkeypatch.setattr(sys, "__stderr__", stream)
        with announced():
            said = b"ckptman: SIGTERM received: saving; a second one, 3 s later or more, ends the process at once\n"
            assert read.read(1000) == said
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)
        with announced():
            pass  # nobody reads the pipe, and it is full
        os.set_blocking(reader, False)
        assert b"ckptman" not in b"".join(iter(lambda: read.read(65536) or b"", b""))
        with announced(logging.WARNING):
            assert read.read(1000) is None, "whoever silences the logger silences this"
        logging.getLogger("ckptman").setLevel(logging.INFO)
        with SignalHandler([signal.SIGTERM]) as signals:
            with signals.announcing("saving"):
                pass
            send(signal.SIGTERM)
            assert signals.requested
        assert read.read(1000) is None, "nobody saves any more"


def test_one_that_is_left_in_another_thread_passes_signals_on(restoring):
    calls = []
    signal.signal(signal.SIGUSR1, lambda *_: calls.append("mine"))
    mine, signals = signal.getsignal(signal.SIGUSR1), SignalHandler([signal.SIGUSR1])
    signals.__enter__()
    thread = threading.Thread(target=signals.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    assert not signals.entered
    send(signal.SIGUSR1)
    assert (calls, signals.received) == (["mine"], None)
    assert signal.getsignal(signal.SIGUSR1) is mine


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("order", [0, 1])
def test_blocks_that_end_in_any_order(restoring, count, order):
    calls = []
    signal.signal(signal.SIGUSR1, lambda *_: calls.append("mine"))
    mine = signal.getsignal(signal.SIGUSR1)
    blocks = [SignalHandler([signal.SIGUSR1]) for _ in range(count)]
    for each in blocks:
        each.__enter__()
    left = blocks[:]
    while left:
        left.pop(0 if order else len(left) // 2).__exit__(None, None, None)
        send(signal.SIGUSR1)
        assert all(each.requested for each in left)
        assert calls == ([] if left else ["mine"])
        for each in left:
            each.received = None
    assert signal.getsignal(signal.SIGUSR1) is mine


def test_blocks_under_the_handler_of_somebody_else(restoring):
    calls = []
    with SignalHandler([signal.SIGUSR1]) as outer:
        inner = SignalHandler([signal.SIGUSR1])
        inner.__enter__()
        before = signal.signal(signal.SIGUSR1, lambda *arguments: (calls.append("theirs"), before(*arguments)))
        inner.__exit__(None, None, None)
        send(signal.SIGUSR1)
        assert (calls, inner.requested, outer.requested) == (["theirs"], False, True)
        signal.signal(signal.SIGUSR1, before)  # as whoever leaves in order does
        with SignalHandler([signal.SIGUSR1]) as later:
            send(signal.SIGUSR1)
            assert later.requested
            assert not inner.requested


def test_one_that_was_left_in_another_thread_does_not_disturb_the_next(restoring):
    signals, thread = SignalHandler([signal.SIGUSR1]), None
    for _ in range(2):  # the same one again, too
        signals.__enter__()
        thread = threading.Thread(target=signals.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
        with SignalHandler([signal.SIGUSR1]) as later:
            send(signal.SIGUSR1)
            send(signal.SIGUSR1)
            assert later.requested
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_signals_that_are_handled_in_c_are_not_free(tmp_path):
    with (tmp_path / "trace").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        try:
            free, taken = free_signals()
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert signal.SIGUSR1 not in free
    assert "SIGUSR1 is handled by a C library, such as faulthandler" in taken
