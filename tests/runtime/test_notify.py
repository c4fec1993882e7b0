"""What a notifier is told, and that a bad one costs nothing."""

import json
import os
import threading

import psutil
import pytest

from ckptman.runtime import notify
from ckptman.runtime.notify import AGAIN_SECONDS, MOST_AT_ONCE, Notifier


def notes_in(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_command_gets_json_on_standard_input_and_the_line_in_its_environment(tmp_path):
    failed = []
    command = f'cat > {tmp_path}/note; printf "$CKPTMAN_EVENT: %s" "$CKPTMAN_LINE" > {tmp_path}/line'
    notifier = Notifier(command, failed.append, clock=lambda: 12.0)
    assert notifier.tell("crashed", "it crashed\n\x1b[2J", reason="a\0b", step=3)
    notifier.wait()
    [note] = notes_in(tmp_path / "note")
    line = "it crashed\\n\\x1b[2J"
    assert note == {"event": "crashed", "line": line, "reason": "a\\x00b", "step": 3, "time": 12.0}
    assert (tmp_path / "line").read_text() == f"crashed: {line}"
    assert failed == []


def test_a_function_gets_the_note():
    notes = []
    notifier = Notifier(notes.append, pytest.fail)
    notifier.tell("finished", "it is done")
    notifier.wait()
    assert notes[0]["line"] == "it is done"
    assert notes[0]["reason"] == ""


def test_secrets_are_masked_and_long_reasons_cut(tmp_path):
    notifier = Notifier(f"cat > {tmp_path}/note", pytest.fail)
    notifier.tell("crashed", "PASSWORD=hunter22 " + "y" * 10**6, reason="HF_TOKEN=abcdef123456789 " + "é" * 10**6)
    notifier.wait()
    [note] = notes_in(tmp_path / "note")
    assert note["line"].startswith("PASSWORD=*** yyy")
    assert note["reason"].startswith("HF_TOKEN=*** ééé")
    assert (tmp_path / "note").stat().st_size < 65536, "what a pipe takes at once"


BAD = {
    "fails": ("echo no route >&2; exit 3", "exit code 3: no route"),
    "is not there": ("no-such-notifier", "exit code 127"),
    "hangs": ("sleep 1000", "did not end in time"),
    "ignores SIGTERM": ("trap '' TERM; while :; do sleep 0.1; done", "did not end in time"),
    "prints gigabytes": ("yes; true", "did not end in time"),
    "prints gigabytes of errors": ("yes >&2", "did not end in time"),
    "kills itself": ("kill -9 $$", "exit code -9"),
}


@pytest.mark.parametrize(("command", "why"), BAD.values(), ids=BAD)
def test_a_bad_command_is_told_of_once_and_leaves_no_process(command, why, tmp_path, monkeypatch):
    monkeypatch.setattr(notify, "WAIT_SECONDS", 1.0)
    failed = []
    notifier = Notifier(f"echo $$ >> {tmp_path}/pids; {command}", failed.append)
    for event in ("crashed", "stopped"):
        assert notifier.tell(event, "x" * 10**6, reason="x" * 10**6)
    notifier.wait()
    assert len(failed) == 1, failed
    assert why in failed[0]
    sessions = set(map(int, (tmp_path / "pids").read_text().split()))
    left = [each for each in psutil.process_iter() if session_of(each) in sessions]
    assert psutil.wait_procs(left, 60)[1] == [], "what was killed may take a moment to go"


def session_of(process):
    try:
        return os.getsid(process.pid) if process.status() != psutil.STATUS_ZOMBIE else None
    except (OSError, psutil.Error):
        return None


def test_a_command_that_takes_too_long_is_killed_while_the_run_goes_on(monkeypatch):
    monkeypatch.setattr(notify, "MOST_SECONDS", 0.2)
    why, told = [], threading.Event()
    notifier = Notifier("sleep 1000", lambda text: (why.append(text), told.set()))
    notifier.tell("crashed", "it crashed")
    assert told.wait(60)
    assert why == ["it did not end in time, and was killed"]


def test_a_command_that_reads_nothing_is_no_failure():
    notifier = Notifier("exec <&-; true", pytest.fail)
    notifier.tell("crashed", "it crashed", reason="x" * 1000)
    notifier.wait()


def test_a_function_that_raises_or_hangs(monkeypatch):
    monkeypatch.setattr(notify, "WAIT_SECONDS", 0.1)
    failed, freed = [], threading.Event()

    def target(note):
        freed.wait()
        raise SystemExit("Authorization: Bearer abcdefgh12345")

    notifier = Notifier(target, failed.append)
    threads = threading.active_count()
    for number in range(3 * MOST_AT_ONCE):
        notifier.tell(f"event {number}", "it happened")
    assert threading.active_count() - threads == MOST_AT_ONCE, "no more than these run at a time"
    assert notifier.tell("stopped", "an end has room of its own")
    notifier.wait()  # returns all the same
    freed.set()
    notifier.wait()
    assert failed == ["SystemExit: Authorization: ***"]


def test_an_event_is_not_told_again_soon_unless_it_is_an_end():
    notes, now = [], [1000.0]
    notifier = Notifier(notes.append, pytest.fail, {"stalled": 900.0}, lambda: now[0])

    def told(event):
        found = notifier.tell(event, event)
        notifier.wait()
        return found

    assert told("crashed")
    assert not told("crashed")
    assert told("bad_node"), "each event has its own time"
    assert not told("stalled"), "an earlier attempt told of it"
    assert told("stopped")
    assert told("stopped")
    now[0] += AGAIN_SECONDS
    assert told("crashed")
    now[0] -= 10 * AGAIN_SECONDS
    assert told("crashed"), "a clock that was set back silences nobody"
    assert [each["event"] for each in notes] == ["crashed", "bad_node", "stopped", "stopped", "crashed", "crashed"]


def test_where_no_thread_can_be_had(monkeypatch):
    failed = []
    monkeypatch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no threads")))
    assert not Notifier("true", failed.append).tell("crashed", "it crashed")
    assert failed == ["no threads"]
