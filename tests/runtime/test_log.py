"""What a run says: shown where nobody configured logging, once where somebody did, and never in the way of a run."""

import io
import logging
import sys
from contextlib import contextmanager

import pytest

from ckptman.runtime.log import LOGGER, is_shown, show_by_default, tell, tell_event

DURABLE = {"step": 60, "bytes": 2_000_000, "seconds": 1.5, "stall_seconds": 0.25, "reason": "every 20 steps"}


@contextmanager
def unconfigured():
    """Logging as in a fresh process: pytest itself has handlers on the root logger."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.root, "handlers", [])
        patch.setattr(LOGGER, "handlers", [])
        LOGGER.setLevel(logging.NOTSET)
        yield
    LOGGER.setLevel(logging.NOTSET)


class RecordedStep(logging.Handler):
    """A handler of a user, of the root logger or of ours."""

    def __init__(self, own):
        super().__init__()
        self.lines = []
        own.addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


of_any = pytest.mark.parametrize("own", [logging.root, LOGGER], ids=["root", "ckptman"])


@unconfigured()
def test_where_nobody_configured_logging_it_is_shown_once(capsys):
    for _ in range(2):  # two Checkpointers, one after the other
        show_by_default()
    assert is_shown()
    tell_event("save_durable", DURABLE)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "ckptman: saved step 60, 1.9 MiB in 1.5 s (training waited 250 ms): every 20 steps\n")


@of_any
@unconfigured()
def test_what_was_configured_before_is_left_alone(own, capsys):
    kept = RecordedStep(own)
    show_by_default()
    tell("news")
    assert not is_shown()
    assert kept.lines == [], "the level of the root logger is WARNING"
    LOGGER.setLevel(logging.INFO)
    tell("news")
    assert kept.lines == ["news"]
    assert capsys.readouterr().err == ""


@of_any
@unconfigured()
def test_what_is_configured_later_takes_over(own, capsys):
    show_by_default()
    tell("before")
    kept = RecordedStep(own)
    tell("after")
    assert capsys.readouterr().err == "ckptman: before\n"
    assert kept.lines == ["after"]


@unconfigured()
def test_it_can_be_silenced(capsys):
    LOGGER.setLevel(logging.WARNING)
    show_by_default()
    assert not is_shown()
    tell("news")
    tell("bad news", logging.WARNING)
    assert capsys.readouterr().err == "ckptman: bad news\n"
    logging.disable(logging.WARNING)
    try:
        assert not is_shown(logging.WARNING)
    finally:
        logging.disable(logging.NOTSET)


class Broken(io.StringIO):
    def write(self, text):
        raise OSError(5, "Input/output error")


@unconfigured()
def test_a_stream_or_a_handler_that_fails_and_a_field_that_is_missing_are_no_matter(monkeypatch):
    show_by_default()
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed, Broken()):
        monkeypatch.setattr(sys, "stderr", stream)
        tell("news")
    handler = logging.Handler()  # which raises NotImplementedError
    LOGGER.addHandler(handler)
    tell("bad news", logging.WARNING)
    tell_event("save_durable", {"step": 60})
    tell_event("an event of another version", {})


def test_what_it_says_is_safe_to_print(caplog):
    caplog.set_level(logging.INFO, "ckptman")
    tell_event("restored", {"step": 60, "path": "runs/\x1b[2J\n100 %s", "seconds": 0.5})
    assert caplog.messages == ["restored step 60 from runs/\\x1b[2J\\n100 %s in 500 ms"]


@pytest.mark.parametrize(
    ("event", "fields", "alone", "in_a_chain"),
    [
        ("finished", {}, "exit code 0", "exit code 0, and the chain ends"),
        ("stopped", {"reason": "SIGTERM on rank 2"}, "start it again to go on", "asks the chain for the next attempt"),
        ("failed", {"error": "ValueError"}, "with ValueError", "the chain decides whether there is a next attempt"),
    ],
)
def test_how_it_ends_and_what_comes_next(event, fields, alone, in_a_chain, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "ckptman")
    monkeypatch.delenv("CKPTMAN_OUTCOME", raising=False)
    tell_event(event, {"step": 7, **fields})
    monkeypatch.setenv("CKPTMAN_OUTCOME", "outcome-1.json")
    tell_event(event, {"step": 7, **fields})
    assert all(message.startswith(f"{event} after step 7") for message in caplog.messages)
    assert caplog.messages[0].endswith(alone)
    assert caplog.messages[1].endswith(in_a_chain)
