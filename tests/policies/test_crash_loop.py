"""A checkpoint after which a run crashed twice at the same step is not loaded a third time."""

import errno
import json
import signal
import warnings

import pytest
import torch

import ckptman
from ckptman.format.paths import journal_path, outcome_path
from ckptman.policies.crash_loop import MOST_IN_VAIN, Crash, crashes_of, starts_in_vain, suspects
from ckptman.runtime.journal import read_journal
from ckptman.runtime.outcome import read_outcome


def attempt(number, *events, cause="program"):
    """The events of one attempt: its start, and pairs of a kind and a step."""
    said = [{"event": "attempt_started", "attempt": number}]
    told = {"attempt": number, "reason": "ValueError: no"} | ({"cause": cause} if cause is not None else {})
    return said + [{"event": kind, "step": step, **told} for kind, step in events]


RESTORED = ("restored", 100)
CRASHED = ("failed", 120)


@pytest.mark.parametrize(
    ("attempts", "steps"),
    [
        ([[RESTORED, CRASHED]], []),
        ([[RESTORED, CRASHED], [RESTORED, CRASHED]], [100]),
        ([[RESTORED, CRASHED], [RESTORED, ("failed", 121)]], []),
        ([[RESTORED, ("failed", 121)], [RESTORED, CRASHED], [RESTORED, CRASHED]], [100]),
        ([[RESTORED, CRASHED], [RESTORED], [RESTORED, CRASHED]], [100]),  # one was killed in between: nobody knows why
        ([[RESTORED, CRASHED], [RESTORED, ("stopped", 130)], [RESTORED, CRASHED]], [100]),
        ([[RESTORED, CRASHED], [RESTORED, ("save_durable", 110), CRASHED]], []),  # it got further
        ([[RESTORED, CRASHED], [RESTORED, CRASHED], [("restored", 50), CRASHED]], []),  # so it is not the checkpoint
        ([[RESTORED, CRASHED], [RESTORED, CRASHED], [("restored", 50), ("failed", 60)]], [100]),
        ([[RESTORED, CRASHED], [RESTORED, CRASHED], [("restored", 50), ("save_durable", 100)]], []),  # another one now
        ([[CRASHED], [CRASHED]], []),  # a fresh start
    ],
)
def test_who_is_suspected(attempts, steps):
    events = [event for number, told in enumerate(attempts, 1) for event in attempt(number, *told)]
    assert list(suspects(crashes_of(events))) == steps


@pytest.mark.parametrize("cause", ["environment", None], ids=["environment", "a journal without causes"])
def test_what_lies_outside_of_the_state_is_nobodys_fault(cause):
    events = [event for number in (1, 2, 3) for event in attempt(number, RESTORED, CRASHED, cause=cause)]
    assert suspects(crashes_of(events)) == {}


def test_a_crash_before_a_step_has_ended_is_not_the_checkpoints_and_still_clears_another_one():
    at_once = [attempt(number, RESTORED, ("failed", 100)) for number in (1, 2, 3)]
    assert suspects(crashes_of([event for told in at_once for event in told])) == {}
    later = [attempt(number, ("restored", 50), ("failed", 100)) for number in (4, 5)]
    assert list(suspects(crashes_of([event for told in later for event in told]))) == [50]
    assert suspects(crashes_of([event for told in [*at_once, *later] for event in told])) == {}, "it is the step"


def test_a_journal_of_other_shapes_is_read_all_the_same():
    strange = [{"event": "failed"}, {"event": "restored", "step": "7"}, {"event": 5}, {}]
    assert crashes_of(strange) == []


def test_the_reason_names_attempts_step_and_remedy():
    (reason,) = suspects([Crash(3, 100, 120), Crash(4, 100, 120)]).values()
    assert "attempts 3 and 4 loaded it and crashed both after step 120" in reason
    assert "allow_suspect=True" in reason


class Poisoned:
    """An application whose state of some steps makes it crash at step 5, whatever happens before."""

    def __init__(self, poison):
        self.state = {"x": {"w": torch.zeros(3)}}
        self.poison = poison

    def run(self, root, until, **options):
        policy = ckptman.AtStep(2, 3)
        with ckptman.Checkpointer(root, self.state, save_policy=policy, deadline=None) as checkpointer:
            start = checkpointer.restore(**options)
            for step in range(start + 1, until + 1):
                if step == 5 and self.poison and self.state["x"]["w"].max() >= 3:
                    raise ValueError("loss is NaN")
                self.state["x"]["w"].fill_(step if step <= 3 else 0)
                if start == 3:
                    self.state["x"]["w"].fill_(3)
                checkpointer.step(step)
        return start


def test_a_run_goes_back_behind_a_checkpoint_that_crashed_it_twice(tmp_path):
    assert Poisoned(False).run(tmp_path, 3) == 0
    for _ in range(2):
        with pytest.raises(ValueError, match="loss is NaN"):
            Poisoned(True).run(tmp_path, 8)
    with pytest.warns(
        RuntimeWarning, match="skipping the checkpoint of step 3: attempts 2 and 3 loaded it and crashed both after"
    ):
        assert Poisoned(True).run(tmp_path, 8) == 2
    refused = [each for each in read_journal(journal_path(tmp_path))[0] if each["event"] == "restore_refused"]
    assert [each["step"] for each in refused] == [3]
    assert "crashed both" in refused[0]["reason"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Poisoned(False).run(tmp_path, 8) == 8


def test_saved_anew_it_is_another_one_for_a_second_restore_too(tmp_path):
    Poisoned(False).run(tmp_path, 3)
    for _ in range(2):
        with pytest.raises(ValueError, match="loss is NaN"):
            Poisoned(True).run(tmp_path, 8)
    state = {"x": {"w": torch.zeros(3)}}
    with ckptman.Checkpointer(tmp_path, state, save_policy=ckptman.AtStep(3), deadline=None) as checkpointer:
        with pytest.warns(RuntimeWarning, match="skipping the checkpoint of step 3"):
            assert checkpointer.restore() == 2
        state["x"]["w"].fill_(7)
        checkpointer.step(3)
        checkpointer.wait()
        assert checkpointer.restore() == 3
    assert torch.equal(state["x"]["w"], torch.full((3,), 7.0))


def test_it_is_loaded_if_asked_for(tmp_path):
    Poisoned(False).run(tmp_path, 3)
    for _ in range(2):
        with pytest.raises(ValueError, match="loss is NaN"):
            Poisoned(True).run(tmp_path, 8)
    with pytest.raises(ValueError, match="loss is NaN"):
        Poisoned(True).run(tmp_path, 8, step=3)
    with pytest.raises(ValueError, match="loss is NaN"):
        Poisoned(True).run(tmp_path, 8, allow_suspect=True)


def test_a_run_never_goes_back_to_step_0(tmp_path):
    state = {"x": {"w": torch.zeros(3)}}
    with ckptman.Checkpointer(tmp_path, state, save_policy=ckptman.AtStep(1), deadline=None) as checkpointer:
        checkpointer.step(1)
    for _ in range(2):
        with (
            pytest.raises(ValueError, match="no"),
            ckptman.Checkpointer(tmp_path, state, deadline=None) as checkpointer,
        ):
            assert checkpointer.restore() == 1
            checkpointer.step(2)
            raise ValueError("no")
    with (
        pytest.raises(ckptman.SuspectError, match="step 1 is all there is to go on from, and attempts 2 and 3"),
        ckptman.Checkpointer(tmp_path, state, deadline=None) as checkpointer,
    ):
        checkpointer.restore()
    with ckptman.Checkpointer(tmp_path, state, deadline=None) as checkpointer:
        assert checkpointer.restore(allow_suspect=True) == 1


@pytest.mark.parametrize("steps", [0, 1], ids=["at the first step", "later"])
def test_two_outages_of_a_mount_leave_the_checkpoint_what_it_is(steps, tmp_path):
    Poisoned(False).run(tmp_path, 3)
    for _ in range(2):
        with (
            pytest.raises(OSError, match="Input/output"),
            ckptman.Checkpointer(tmp_path, {"x": {"w": torch.zeros(3)}}, deadline=None) as checkpointer,
        ):
            start = checkpointer.restore()
            assert start == 3
            for step in range(steps):
                checkpointer.step(start + 1 + step)
            raise OSError(errno.EIO, "Input/output error", "/datasets/tokens.bin")
    failed = [each for each in read_journal(journal_path(tmp_path))[0] if each["event"] == "failed"]
    assert [(each["error"], each["cause"]) for each in failed] == [("OSError", "environment")] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Poisoned(False).run(tmp_path, 4) == 3


@pytest.mark.parametrize("number", [None, "2", "x", 1.5, [1], {}, True])
def test_an_attempt_that_is_no_number_does_not_keep_a_run_from_its_checkpoints(number, tmp_path):
    events = [{**event, "attempt": number} for _ in range(2) for event in attempt(0, RESTORED, CRASHED)]
    assert crashes_of(events) == []
    Poisoned(False).run(tmp_path, 3)
    with journal_path(tmp_path).open("a") as file:
        file.writelines(json.dumps({**event, "step": 3}) + "\n" for event in events)
    assert Poisoned(False).run(tmp_path, 4) == 3


def start(launch, *events):
    """The events of one start of the ranks, and pairs of a kind and a step."""
    return [{"event": "attempt_started", "launch": launch}, *({"event": kind, "step": step} for kind, step in events)]


SAVED = ("save_durable", 110)


@pytest.mark.parametrize(
    ("starts", "count"),
    [
        ([], 0),
        ([start("a")], 1),
        ([start("a"), start("a")], 2),  # from 0, where there is no checkpoint
        ([start("a", RESTORED), start("a", RESTORED), start("a", RESTORED)], 3),
        ([start("a", RESTORED), start("a", ("restored", 50))], 2),  # the newest one is suspect
        (
            [start("a", RESTORED), start("a", RESTORED), start("a", ("restored", 104))],
            1,
        ),  # in memory it got on
        ([start("a", RESTORED), start("a", RESTORED, SAVED), start("a", ("restored", 110))], 1),
        ([start("a", RESTORED), start("a", RESTORED), start("b", RESTORED)], 0),
        ([start("b", RESTORED), start("b", RESTORED), start("a", RESTORED)], 1),
        ([start(None, RESTORED), start("a", RESTORED), start("a", RESTORED)], 2),
    ],
)
def test_starts_of_one_launch_that_come_to_nothing(starts, count):
    assert starts_in_vain([event for told in starts for event in told], "a") == count


def test_a_launch_ends_that_comes_to_nothing(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr("ckptman.checkpointer.end_launcher_at_exit", ended.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "4711")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "100")
    state = {"x": {"w": torch.zeros(3)}}

    def killed(**options):
        """As a rank that was killed from outside: it is the program's fault for all that anybody knows."""
        checkpointer = ckptman.Checkpointer(tmp_path, state, deadline=None)
        with checkpointer:
            checkpointer.restore(**options)
            checkpointer.step(1)
            raise OSError(errno.EIO, "Input/output error", "/datasets/tokens.bin")

    for _ in range(MOST_IN_VAIN):
        with pytest.raises(OSError, match="Input/output"):
            killed()
    assert ended == []
    with pytest.raises(ckptman.SuspectError, match="started the ranks 3 times in a row from the same step"):
        killed()
    assert len(ended) == 1
    with pytest.raises(OSError, match="Input/output"):
        killed(allow_suspect=True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "4712")  # the next job of the chain
    with pytest.raises(OSError, match="Input/output"):
        killed()


def test_a_planned_stop_ends_with_0_where_ranks_are_restarted(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "4711")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    state = {"x": {"w": torch.zeros(3)}}
    with ckptman.SignalHandler() as signals:
        with ckptman.Checkpointer(tmp_path, state, signals=signals, deadline=None) as checkpointer:
            checkpointer.restore()
            signal.raise_signal(signal.SIGTERM)
            checkpointer.step(1)
            checkpointer.step(2)
        assert checkpointer.exit_code == 0
        outcome = read_outcome(outcome_path(tmp_path))
        assert outcome is not None
        assert (outcome.state, outcome.exit_code) == ("stopped", 75)
        with (
            pytest.raises(SystemExit) as caught,
            ckptman.Checkpointer(tmp_path, state, signals=signals) as checkpointer,
        ):
            checkpointer.restore()
        assert caught.value.code == 0
    outcome = read_outcome(outcome_path(tmp_path))
    assert outcome is not None
    assert outcome.state == "stopped"
