"""Requests to a run: each is answered once, none reaches another attempt, and rubbish goes."""

import json
import logging
from unittest import mock

import pytest

import ckptman.storage.catalog.writer_lock as lock
from ckptman.runtime import requests as requests_module
from ckptman.runtime.journal import Journal
from ckptman.runtime.requests import Requests, answer, leave
from ckptman.storage.catalog.writer_lock import claim, read_owner
from ckptman.storage.format.paths import journal_path, run_folder
from ckptman.storage.io.durable_files import DISK


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Begin an attempt on a root. Its own thread does not look: tests do."""
    monkeypatch.setattr(requests_module, "LOOK_SECONDS", 3600.0)
    monkeypatch.setattr(lock, "BEAT_SECONDS", 3600.0)
    held = []

    def attempt():
        held.append((claim(tmp_path, "run", None), Journal(journal_path(tmp_path))))
        return Requests(*held[-1]), held[-1][1]

    yield attempt
    for mine, journal in held:
        monkeypatch.setattr(lock, "BEAT_SECONDS", 60.0)
        mine.release()
        journal.close()


def ask(root, what):
    return leave(root, what, read_owner(root))


def left(root):
    return [each.name for each in run_folder(root).iterdir() if each.name.startswith("ask-")]


def answered(root):
    lines = map(json.loads, journal_path(root).read_text().splitlines())
    return [(each["what"], each["done"], each["step"]) for each in lines if each["event"] == "answered"]


def test_a_hundred_requests_have_one_effect_of_each_kind(tmp_path, begin):
    requests, journal = begin()
    ids = {ask(tmp_path, what) for what in ["save", "stop", "hold"] * 40}
    requests.look()
    assert (requests.save, requests.stop, left(tmp_path)) == (True, "hold", [])
    requests.look()
    journal.record("save_begun", step=7, reason="stop asked: ckptman ask hold")
    assert not requests.save
    journal.record("save_durable", step=7)
    journal.record("stopped", step=7)
    assert requests.stop is None
    assert answered(tmp_path) == [("save", "saved", 7), ("stop", "stopped", 7), ("hold", "stopped", 7)]
    assert all(answer(tmp_path, each)["step"] == 7 for each in ids)


def test_a_step_that_is_saved_twice_at_once_answers_all(tmp_path, begin):
    requests, journal = begin()
    request = ask(tmp_path, "save")
    requests.look()
    for _ in range(2):
        journal.record("save_begun", step=5, reason="twice")
    journal.record("save_durable", step=5)
    assert answer(tmp_path, request)["done"] == "saved"
    journal.record("finished", step=5)
    ask(tmp_path, "save")
    requests.look()
    assert len(left(tmp_path)) == 1, "after the end nobody takes a request"


def test_a_save_that_had_begun_before_does_not_carry_it_out(tmp_path, begin):
    requests, journal = begin()
    journal.record("save_begun", step=1, reason="every step")
    ask(tmp_path, "save")
    requests.look()
    journal.record("save_durable", step=1)
    assert requests.save
    for step, event in [(2, "save_failed"), (3, "save_durable")]:
        journal.record("save_begun", step=step, reason="ckptman ask save")
        ask(tmp_path, "save")
        requests.look()
        journal.record(event, step=step)
    journal.record("finished", step=3)
    assert answered(tmp_path) == [("save", "failed", 2), ("save", "saved", 3), ("save", "finished", 3)]


def test_requests_to_another_attempt_and_rubbish_are_dropped_with_one_line(tmp_path, begin, caplog):
    first, _ = begin()
    ask(tmp_path, "stop")
    first._claim.release()
    second, _ = begin()
    (run_folder(tmp_path) / "ask-rubbish").write_bytes(b"\xff" * 1000)
    (run_folder(tmp_path) / "ask-save-1-2").touch()
    (run_folder(tmp_path) / "ask-x\n\x1b[2J").mkdir()
    with caplog.at_level(logging.INFO, "ckptman"):
        for _ in range(3):
            second.look()
    assert (second.save, second.stop) == (False, None)
    assert left(tmp_path) == ["ask-x\n\x1b[2J"]
    assert len(caplog.records) == 1
    assert "dropped ask-" in caplog.text


def test_an_attempt_that_lost_its_root_leaves_the_requests_to_the_next_one(tmp_path, begin):
    first, _ = begin()
    first._claim.release()
    begin()
    ask(tmp_path, "stop")
    first.look()
    assert len(left(tmp_path)) == 1


def test_a_request_that_cannot_be_removed_is_taken_once(tmp_path, begin):
    requests, journal = begin()
    ask(tmp_path, "save")
    with mock.patch.object(DISK, "remove_file", side_effect=PermissionError):
        requests.look()
        journal.record("save_begun", step=1, reason="ckptman ask save")
        requests.look()
    assert not requests.save
