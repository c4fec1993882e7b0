"""SignalHandler, with real signals: to this process, and to processes of its own that tell us what they saw."""

import contextlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from ckptman import ConfigError, SignalHandler


def send(number):
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def _handlers_as_before():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    after = {number: signal.getsignal(number) for number in numbers}
    for number, previous in before.items():
        signal.signal(number, previous)
    assert after == before, "a SignalHandler was not undone"


class Script:
    """A Python process that prints what it sees, and waits for a line before it goes on."""

    def __init__(self, body, prefix=""):
        head = "import os, signal, sys, time\nfrom ckptman import SignalHandler\n"
        code = textwrap.dedent(prefix) + head + textwrap.dedent(body)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def reads(self, line):
        stream = self.process.stdout
        assert stream.readline().strip() == line, self.process.communicate()

    def signal(self, number):
        self.process.send_signal(number)

    def ends(self):
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


WAIT_TWICE = """
    with SignalHandler(repeat_seconds=0) as signals:
        print("ready", flush=True)
        while not signals.requested:
            time.sleep(0.01)
        print("saw", signals.received.name, flush=True)
        sys.stdin.readline()
        print("not reached")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_the_first_signal_sets_the_flag(number):
    with SignalHandler(repeat_seconds=0) as signals:
        assert not signals.requested
        assert signals.received is None
        send(number)
        assert signals.requested
        assert signals.received is number
    assert signals.received is number, "still readable after the block"


def test_the_first_one_is_kept():
    with SignalHandler(repeat_seconds=0) as signals:
        send(signal.SIGUSR2)
        send(signal.SIGTERM)
        assert signals.received is signal.SIGUSR2


def test_only_the_given_signals():
    with SignalHandler([signal.SIGUSR2], repeat_seconds=0):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_the_second_identical_signal_kills(number):
    script = Script(WAIT_TWICE)
    script.reads("ready")
    script.signal(number)
    script.reads(f"saw {number.name}")
    script.signal(number)
    code, out, err = script.ends()
    assert (code, out) == (-number, ""), err


def test_the_second_interrupt_raises_keyboard_interrupt():
    script = Script(WAIT_TWICE)
    script.reads("ready")
    script.signal(signal.SIGINT)
    script.reads("saw SIGINT")
    script.signal(signal.SIGINT)
    code, out, err = script.ends()
    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert out == ""


def test_a_second_other_signal_does_not_kill():
    script = Script(WAIT_TWICE)
    script.reads("ready")
    script.signal(signal.SIGTERM)
    script.reads("saw SIGTERM")
    script.signal(signal.SIGUSR1)
    code, out, _ = script.ends()
    assert (code, out) == (0, "not reached\n")


def test_the_second_signal_calls_the_handler_that_was_there():
    calls = []

    def mine(signum, frame):
        calls.append(signum)

    before = signal.signal(signal.SIGUSR1, mine)
    try:
        with SignalHandler(repeat_seconds=0) as signals:
            send(signal.SIGUSR1)
            assert calls == []
            assert signals.requested
            send(signal.SIGUSR1)
            assert calls == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_ignored_signal_stays_ignored():
    script = Script(
        """
        with SignalHandler(repeat_seconds=0) as signals:
            print(signal.getsignal(signal.SIGHUP).name, flush=True)
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGHUP)
            print(signals.received, flush=True)
        print(signal.getsignal(signal.SIGHUP).name, flush=True)
        """,
        prefix="import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n",
    )
    code, out, err = script.ends()
    assert code == 0, err
    assert out.split() == ["SIG_IGN", "None", "SIG_IGN"]


def test_restored_after_an_exception():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match="step 3"), SignalHandler(repeat_seconds=0):
        assert signal.getsignal(signal.SIGTERM) != before
        raise RuntimeError("step 3")
    assert signal.getsignal(signal.SIGTERM) == before


def test_restored_when_the_second_interrupt_leaves_the_block():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), SignalHandler(repeat_seconds=0):
        send(signal.SIGINT)
        send(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


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


def test_a_signal_before_the_first_statement_of_the_body_is_seen():
    class Early(SignalHandler):
        def __enter__(self):
            entered = super().__enter__()
            send(signal.SIGTERM)
            return entered

    with Early() as signals:
        assert signals.received is signal.SIGTERM


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


def test_used_again_it_starts_afresh():
    signals = SignalHandler(repeat_seconds=0)
    with signals:
        send(signal.SIGTERM)
    with signals:
        assert not signals.requested
        send(signal.SIGTERM)
        assert signals.requested


def test_entered_twice_is_refused():
    with SignalHandler(repeat_seconds=0) as signals:
        with pytest.raises(ConfigError, match="make a new one"):
            signals.__enter__()
        send(signal.SIGTERM)
        assert signals.requested


def test_not_in_another_thread():
    errors = []

    def enter():
        try:
            SignalHandler(repeat_seconds=0).__enter__()
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
    assert "hand it to the thread" in str(errors[0])


@pytest.mark.parametrize(
    ("signals", "message"),
    [([signal.SIGKILL], "SIGKILL cannot be caught"), ([signal.SIGSTOP], "SIGSTOP cannot"), ([4711], "4711")],
)
def test_signals_that_cannot_be_caught_are_refused(signals, message):
    with pytest.raises(ConfigError, match=message):
        SignalHandler(signals)


def test_the_handler_calls_nothing_that_can_block():
    # A signal in the middle of a print: a handler that writes raises "reentrant call" or deadlocks.
    lock = threading.Lock()
    with SignalHandler(repeat_seconds=0) as signals, lock:
        send(signal.SIGTERM)
        assert signals.requested


def _wait_for_ever():
    threading.Event().wait()


@pytest.mark.slow
def test_forked_workers_can_be_terminated_from_their_first_moment_on():
    with SignalHandler(repeat_seconds=0) as outer, SignalHandler(repeat_seconds=0) as inner:
        workers = [multiprocessing.get_context("fork").Process(target=_wait_for_ever) for _ in range(20)]
        try:
            for worker in workers:
                worker.start()
                worker.terminate()
            deadline = time.monotonic() + 20
            for worker in workers:
                worker.join(timeout=max(0.0, deadline - time.monotonic()))
            assert {worker.exitcode for worker in workers} == {-signal.SIGTERM}
        finally:
            for worker in workers:
                worker.kill()
        assert not outer.requested
        assert not inner.requested
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
        send(signal.SIGTERM)
        assert outer.requested
        assert inner.requested


def test_a_launcher_that_repeats_a_signal_at_once_asks_once():
    with SignalHandler() as signals:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received is signal.SIGTERM


def test_what_is_announced_is_said_at_once_and_never_blocks(monkeypatch):
    reader, writer = os.pipe()
    logger = logging.getLogger("ckptman")
    monkeypatch.setattr(logger, "level", logging.INFO)
    with open(reader, "rb", buffering=0) as read, open(writer, "w") as stream:
        monkeypatch.setattr(sys, "__stderr__", stream)
        with SignalHandler([signal.SIGTERM]) as signals, signals.announcing("saving"):
            send(signal.SIGTERM)
            said = b"ckptman: SIGTERM received: saving; a second one, 3 s later or more, ends the process at once\n"
            assert read.read(1000) == said
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)
        with SignalHandler([signal.SIGTERM]) as signals, signals.announcing("saving"):
            send(signal.SIGTERM)  # nobody reads the pipe, and it is full
            assert signals.requested
        os.set_blocking(reader, False)
        left = b"".join(iter(lambda: read.read(65536) or b"", b""))
        assert b"ckptman" not in left
        monkeypatch.setattr(logger, "level", logging.WARNING)
        with SignalHandler([signal.SIGTERM]) as signals, signals.announcing("saving"):
            send(signal.SIGTERM)
            assert signals.requested
        assert read.read(1000) is None, "whoever silences the logger silences this"
        monkeypatch.setattr(logger, "level", logging.INFO)
        with SignalHandler([signal.SIGTERM]) as signals:
            with signals.announcing("saving"):
                pass
            send(signal.SIGTERM)
            assert signals.requested
        assert read.read(1000) is None, "nobody saves any more"
