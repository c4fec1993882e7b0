"""`ckptman simulate`: recorded and random failures, and what is said of them."""

import json
from pathlib import Path

import pytest

from ckptman.cli.app import main
from ckptman.cli.options import parse_seconds
from ckptman.errors import ConfigError, NotFoundError
from ckptman.runtime.failure_trace import Trace, read_trace, trace_of
from ckptman.runtime.journal import Journal
from ckptman.storage.format.paths import journal_path

HOUR = 3600.0


@pytest.fixture
def played(capsys):
    def run(*arguments):
        capsys.readouterr()
        assert main(["simulate", *map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def by_name(made):
    return {each["name"]: each for each in made["policies"]}


def read(path):
    return read_trace(path, lambda written: parse_seconds("a failure", written))


def test_what_is_derived_is_near_the_best_that_is_found(played):
    made = played("--mtbf", "10h", "--stall", "60s", "--save", "60s", "--restart", "10min")
    policies = by_name(made)
    assert made["failures"] > 3_000
    assert policies["best fixed"]["of_best"] == 1
    assert policies["derived"]["of_best"] >= 0.99
    assert max(each["of_best"] for each in made["policies"]) <= 1.002
    for each in made["policies"]:
        parts = sum(each[f"{what}_seconds"] for what in ("good", "lost", "stalled", "restarting"))
        assert parts == pytest.approx(made["runs"] * made["run_seconds"])
        assert each["goodput_low"] <= each["goodput"] <= each["goodput_high"] or made["runs"] < 20
    assert max(each["goodput"] for each in made["curve"]) == policies["best fixed"]["goodput"]


def test_the_same_seed_plays_the_same(played):
    one, again, other = (played("--mtbf", "5h", "--runs", "3", "--seed", seed) for seed in ("7", "7", "8"))
    assert one == again
    assert one["seed"] == 7
    assert one["policies"] != other["policies"]


def test_an_interval_shorter_than_a_save_is_named_as_it_is_played(ends):
    out = ends(0, "simulate", "--mtbf", "5h", "--stall", "30s", "--interval", "1s", "--seed", "3").out
    assert "(seed 3)" in out
    assert "\nevery 1 s, held to 60 s      60 s " in out


def test_a_trace_of_times(tmp_path, played, ends):
    trace = tmp_path / "failures.txt"
    trace.write_text("# a run in May\n\n9h  # a node\n3h20min\n7200\nend 1d\n")
    found = read(trace)
    assert found == Trace((7200.0, 12000.0, 9 * HOUR), 86400.0)
    assert found.mtbf_seconds == 8 * HOUR
    trace.write_text(trace.read_text(), encoding="utf-8-sig")  # as Windows writes it
    assert read(trace) == found
    made = played("--trace", trace, "--stall", "10s", "--restart", "5min")
    assert (made["failures"], made["runs"], made["seed"]) == (3, 1, None)
    shorter = played("--trace", trace, "--length", "5h")
    assert (shorter["failures"], shorter["run_seconds"]) == (2, 5 * HOUR)
    trace.write_text("0\n1h\n2h\n3h\n")  # without an end, the last failure counts
    assert "one in 45 min" in (out := ends(0, "simulate", "--trace", trace).out)
    assert "1 run of 3 h, 4 failures (as recorded)" in out


def test_a_trace_of_dates(tmp_path):
    trace = tmp_path / "failures.txt"
    trace.write_text("start 2026-05-01T10:00:00\n2026-05-01T12:00:00Z\n2026-05-01 15:00:00+01:00\nend 2026-05-02\n")
    assert read(trace) == Trace((2 * HOUR, 4 * HOUR), 14 * HOUR)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it contains no time"),
        ("# nothing\n", "it contains no time"),
        ("3h\nsoon\n", "line 2: soon: a failure: a time above 0"),
        ("-3h\n", "line 1"),
        ("nan\n", "line 1"),
        ("3h\nend 2h\n", "a failure after its end"),
        ("2026-05-01\n", "a date needs a first line such as: start 2026-05-01T10:00:00"),
        ("start 2026-05-01\n3h\n", "every line has to be one"),
        ("start 2026-05-02\n2026-05-01\nend 2026-05-04\n", "failures after its start"),
        ("start tomorrow\n", "start takes a date"),
        ("3h\nstart 2026-05-01\n", "line 2"),
        ("end 3h\nend 4h\n", "line 2"),
        ("\x1b[31m\n", "line 1: \\x1b[31m"),
        ("{}\n", "contains no attempts"),
        ("{torn", "contains no attempts"),
    ],
)
def test_what_is_no_trace_names_the_line(tmp_path, text, told):
    trace = tmp_path / "failures.txt"
    trace.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(trace)
    assert told in str(caught.value)


def test_what_cannot_be_read_as_a_trace(tmp_path):
    with pytest.raises(NotFoundError, match="there is no trace"):
        read(tmp_path / "none")
    with pytest.raises(NotFoundError, match="no journal"):
        read(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not text"):
        read(tmp_path / "binary")
    with pytest.raises(ConfigError, match=r"is not a regular file: .*; give a text file of failure times"):
        read(Path("/dev/zero"))


def attempt(number, start, *events):
    """Events of one attempt, at times counted from its start."""
    first = [{"time": start, "event": "attempt_started", "attempt": number}]
    return [*first, *({"time": start + at, "event": name, "attempt": number, **more} for at, name, more in events)]


def journal_of_a_run():
    """Killed after 100 s, stopped in order after 50 s, failed after 30 s; a fourth attempt is under way for 20 s."""
    saved = (90, "save_durable", {"seconds": 12.0})
    return [
        *attempt(1, 1000, (40, "first_step", {"init_seconds": 40.0}), (80, "save_staged", {"seconds": 2.0}), saved),
        *attempt(1, 1100)[1:],
        {"time": 1100, "event": "pruned", "attempt": 1},
        *attempt(2, 9000, (20, "first_step", {"init_seconds": 60.0}), (50, "stopped", {})),
        *attempt(3, 9100, (30, "failed", {})),
        *attempt(4, 9500, (20, "save_begun", {})),
    ]


def test_a_journal_tells_when_attempts_failed_and_what_saves_cost(tmp_path, played):
    events = journal_of_a_run()
    expected = Trace((100.0, 180.0), 200.0, save_seconds=12.0, stall_seconds=2.0, restart_seconds=50.0)
    path = journal_path(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in events) + '{"torn')
    assert read(tmp_path) == read(path) == expected
    made = played("--trace", tmp_path)
    assert (made["stall_seconds"], made["durable_seconds"], made["restart_seconds"]) == (2, 12, 50)
    assert played("--trace", tmp_path, "--restart", "9s")["restart_seconds"] == 9


def test_a_journal_that_ends_in_a_failure_and_one_with_nonsense(tmp_path):
    assert trace_of([*attempt(1, 0, (10, "failed", {}))], tmp_path).failures == (10.0,)
    assert trace_of([*attempt(1, 0, (10, "finished", {}))], tmp_path).failures == ()
    strange = [{"time": "x", "event": "failed"}, {"time": -5, "event": "failed"}, {"event": "failed"}]
    backwards = [*attempt(1, 50, (10, "save_begun", {})), {"time": 3, "event": "save_begun"}, *strange]
    assert trace_of(backwards, tmp_path) == Trace((), 10.0)
    with pytest.raises(ConfigError, match="contains no attempts yet"):
        trace_of(strange, tmp_path)


def test_the_journal_of_a_real_run_is_a_trace(tmp_path):
    clock = iter([0.0, 5.0, 30.0, 100.0, 160.0])
    journal = Journal(tmp_path / "journal.jsonl", clock=lambda: next(clock))
    for event in ("attempt_started", "first_step", "save_begun", "attempt_started", "finished"):
        journal.record(event)
    journal.close()
    assert read(tmp_path / "journal.jsonl") == Trace((30.0,), 90.0)


LARGE = ["--mtbf", "8h", "--stall", "0.2s", "--save", "84s", "--restart", "50min"]


def test_memory_and_restarts_in_place_are_played_on_the_same_failures(played):
    alone = played(*LARGE)
    made = played(*LARGE, "--memory", "--restart-in-place", "2min")
    policies = by_name(made)
    assert made["policies"][:5] == alone["policies"]
    assert made["memory"]["survived"] == 0.9
    ways = {each["name"]: each for each in made["memory"]["ways"]}
    assert ways["with memory"]["restart_seconds"] == 50 * 60 + 84
    assert ways["restarts in place"]["restart_seconds"] == 120
    assert {(each["interval_seconds"], each["counts_seconds"]) for each in ways.values()} == {(20, 10)}
    for name in ways:
        assert policies[name]["lost_seconds"] < policies["derived"]["lost_seconds"] / 2
    assert policies["restarts in place"]["goodput"] > 0.97 > 0.9 > policies["derived"]["goodput"]


def test_a_machine_that_fails_faster_than_it_starts_and_saves_that_cost_nothing(played):
    made = played("--mtbf", "1min", "--restart", "2h", "--length", "1d", "--runs", "2")
    assert by_name(made)["derived"]["goodput"] < 0.01
    assert by_name(played("--mtbf", "8h", "--stall", "0", "--save", "0", "--runs", "1"))["derived"]["goodput"] > 0.9
