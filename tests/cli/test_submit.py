"""The chain is tested with its scheduler; here: what is written on the command line arrives, and what comes back."""

import json
import sys

import pytest

from ckptman.cli.app import main

LINES = """
import pathlib, sys
seen = pathlib.Path(sys.argv[1])
number = len(seen.read_text()) if seen.exists() else 0
seen.write_text("x" * (number + 1))
codes = [int(each) for each in sys.argv[2].split(",")]
sys.exit(codes[min(number, len(codes) - 1)])
"""


def _submit(folder, codes, *options):
    """Submit a command whose attempts end with these codes: the exit code, and how often it ran."""
    seen = folder / "seen"
    command = ["submit", "--scheduler", "local", "--chain-dir", str(folder / "chain"), *options]
    code = main([*command, "--", sys.executable, "-S", "-c", LINES, str(seen), codes])
    return code, len(seen.read_text()) if seen.exists() else 0


IN_A_ROW = "Error: the chain ends: 2 attempts in a row "


@pytest.mark.parametrize(
    ("codes", "options", "code", "ran", "why"),
    [
        ("75,1,0", [], 0, 3, ""),
        ("1", ["--crash-limit", "2"], 8, 2, f"{IN_A_ROW}crashed"),
        ("75", ["--stall-limit", "2"], 8, 2, f"{IN_A_ROW}ended within 10 min, with no known checkpoint"),
        ("75", ["--max-attempts", "2"], 75, 2, ""),
    ],
)
def test_a_stop_and_a_crash_start_the_next_attempt_until_a_limit(codes, options, code, ran, why, tmp_path, capsys):
    assert _submit(tmp_path, codes, *options) == (code, ran)
    told = capsys.readouterr()
    assert all(line.startswith("ckptman: ") for line in told.out.splitlines())
    assert told.err.startswith(why)


def test_options_behind_the_command_are_its_own(tmp_path):
    seen = tmp_path / "seen"
    program = [sys.executable, "-S", "-c", "import sys; open(sys.argv[1], 'w').write(' '.join(sys.argv[2:]))"]
    options = ["--scheduler", "local", "--chain-dir", str(tmp_path / "chain")]
    code = main(["submit", *options, *program, str(seen), "--crash-limit", "x", "--", "y"])
    assert code == 0
    assert seen.read_text() == "--crash-limit x -- y"


def test_the_chain_has_a_folder_of_its_own_unless_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["submit", "--scheduler", "local", "--", "true"]) == 0
    assert len(list((tmp_path / "ckptman-chains").glob("*-*"))) == 1


def test_a_command_that_does_not_exist_is_refused(tmp_path, capsys):
    arguments = ["submit", "--scheduler", "local", "--chain-dir", str(tmp_path / "chain"), "--", "no-such-program-here"]
    assert main(arguments) == 8
    assert "cannot start 'no-such-program-here'" in capsys.readouterr().err


def test_a_program_of_its_own_goes_on_as_long_as_it_saves(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = "mkdir -p ck; echo weights > ck/model_$CKPTMAN_ATTEMPT.pt; test $CKPTMAN_ATTEMPT = 4"
    options = ["--scheduler", "local", "--crash-limit", "1", "--progress", "ck"]
    assert main(["submit", *options, "--", "bash", "-c", line]) == 0
    assert "attempt 4 finished" in capsys.readouterr().out
    # One that begins anew each time saves nothing new.
    line = "echo weights > ck/model_1.pt; exit 1"
    assert main(["submit", *options, "--", "bash", "-c", line]) == 8
    told = capsys.readouterr()
    assert "attempt 1 crashed: exit code 1\n" in told.out
    assert "1 attempt crashed with no new checkpoint; attempt 2 crashed" in told.err


def test_done_says_what_finished_means(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = "test $CKPTMAN_ATTEMPT -lt 3 || touch all-done; exit 0"
    assert main(["submit", "--scheduler", "local", "--done", "all-*", "--", "bash", "-c", line]) == 0
    told = capsys.readouterr().out
    assert "attempt 1 stopped: exit code 0; not finished, as --done all-* is not there" in told
    assert "attempt 3 finished: exit code 0; --done all-* is there" in told


def test_reactions_are_read_from_a_file_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules").write_text("# ours\nexit = hold  # no second try\n\n")
    assert _submit(tmp_path, "1", "--on", "@rules")[0] == 8
    assert "the next one would most likely fail in the same way" in capsys.readouterr().err


NOTES = 'cat >> "$NOTES"'
"""A notifier."""


def _notes(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_notify_tells_of_a_crash_once_and_of_the_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    assert _submit(tmp_path, "1,1,75,0", "--notify", NOTES) == (0, 4)
    crashed, finished = sorted(_notes(tmp_path / "notes"), key=lambda note: note["event"])
    folder = tmp_path / "chain"
    assert finished.pop("time") >= crashed.pop("time")
    facts = {"chain": str(folder), "job_id": "", "step": 0, "root": ""}
    reason = {"reason": "exit code 1"}
    line = "attempt 1 of chain chain crashed: exit code 1"
    assert crashed == {"event": "crashed", "line": line, "attempt": 1, **facts, **reason}
    line = "chain chain has finished: exit code 0"
    assert finished == {"event": "finished", "line": line, "attempt": 4, **facts, "reason": "exit code 0"}
    assert "notify" not in capsys.readouterr().out


def test_notify_tells_of_a_chain_that_stops(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    assert _submit(tmp_path, "1", "--crash-limit", "1", "--notify", NOTES) == (8, 1)
    events = {note["event"]: note for note in _notes(tmp_path / "notes")}
    assert {*events} == {"crashed", "stopped"}
    assert events["stopped"]["line"].startswith("chain chain has stopped: 1 attempt crashed within 10 min")


def test_a_notifier_that_fails_is_a_line_and_no_more(tmp_path, capsys):
    assert _submit(tmp_path, "1,0", "--notify", "no-such-notifier") == (0, 2)
    told = capsys.readouterr().out
    assert told.count("no-such-notifier") == 1
    assert "--notify failed (exit code 127: " in told
