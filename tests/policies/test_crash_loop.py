"""A checkpoint after which a run crashed twice at the same step is not loaded a third time."""

import errno
import shutil
import signal

import pytest
import torch

import ckptman
from ckptman.policies.crash_loop import MOST_IN_VAIN, Crash, crashes_of, starts_in_vain, suspects
from ckptman.runtime.journal import read_journal
from ckptman.runtime.outcome import read_outcome
from ckptman.storage.format.paths import journal_path, outcome_path, step_folder

RESTORED = ("restored", 100)
CRASHED = ("failed", 120)
LOADED_AND_CRASHED = [RESTORED, CRASHED]


def journal(*attempts, cause="program"):
    """The events of attempts: the start of each, and pairs of a kind and a step."""
    events = []
    for number, told in enumerate(attempts, 1):
        fields = {"attempt": number, "reason": "ValueError: no", "cause": cause}
        events += [{"event": "attempt_started", "attempt": number}]
        events += [{"event": kind, "step": step, **fields} for kind, step in told]
    return events


@pytest.mark.parametrize(
    ("attempts", "steps"),
    [
        ([LOADED_AND_CRASHED], []),
        ([LOADED_AND_CRASHED] * 2, [100]),
        ([LOADED_AND_CRASHED, [RESTORED, ("failed", 121)]], []),
        ([[RESTORED, ("failed", 121)], *[LOADED_AND_CRASHED] * 2], [100]),
        ([LOADED_AND_CRASHED, [RESTORED], LOADED_AND_CRASHED], [100]),  # one was killed in between: nobody knows why
        ([LOADED_AND_CRASHED, [RESTORED, ("stopped", 130)], LOADED_AND_CRASHED], [100]),
        ([LOADED_AND_CRASHED, [RESTORED, ("save_durable", 110), CRASHED]], []),  # it got further
        ([*[LOADED_AND_CRASHED] * 2, [("restored", 50), CRASHED]], []),  # so it is not the checkpoint
        ([*[LOADED_AND_CRASHED] * 2, [("restored", 50), ("failed", 60)]], [100]),
        ([*[LOADED_AND_CRASHED] * 2, [("restored", 50), ("save_durable", 100)]], []),  # another one now
        ([*[LOADED_AND_CRASHED] * 2, [("rolled_back", 100)]], []),  # somebody wants it
        ([[CRASHED], [CRASHED]], []),  # a fresh start
        # Before a step has ended it is not the checkpoint's fault, and still clears another one.
        ([[RESTORED, ("failed", 100)]] * 3, []),
        ([[("restored", 50), ("failed", 100)]] * 2, [50]),
        ([[RESTORED, ("failed", 100)], *[[("restored", 50), ("failed", 100)]] * 2], []),
    ],
)
def test_who_is_suspected(attempts, steps):
    assert list(suspects(crashes_of(journal(*attempts)))) == steps


@pytest.mark.parametrize("cause", ["environment", None])
def test_what_lies_outside_of_the_state_is_nobodys_fault(cause):
    assert crashes_of(journal(*[LOADED_AND_CRASHED] * 3, cause=cause)) == []


def test_a_journal_of_other_shapes_is_read_all_the_same():
    assert crashes_of([{"event": "failed"}, {"event": "restored", "step": "7"}, {"event": 5}, {}]) == []


def test_the_reason_names_attempts_step_and_remedy():
    (reason,) = suspects([Crash(3, 100, 120), Crash(4, 100, 120)]).values()
    assert "attempts 3 and 4 loaded it and crashed both after step 120" in reason
    assert "allow_suspect=True" in reason


def train(root, until, poison=False, **options):
    """Save steps 2 and 3. With `poison`, a run that has loaded step 3 crashes at step 5."""
    state = {"x": {"w": torch.zeros(3)}}
    with ckptman.Checkpointer(root, state, save_policy=ckptman.AtStep(2, 3), deadline=None) as checkpointer:
        start = checkpointer.restore(**options)
        for step in range(start + 1, until + 1):
            if step == 5 and poison and start == 3:
                raise ValueError("loss is NaN")
            state["x"]["w"].fill_(step)
            checkpointer.step(step)
    return start


@pytest.fixture
def root(tmp_path):
    """Step 3 is suspect."""
    assert train(tmp_path, 3) == 0
    for _ in range(2):
        with pytest.raises(ValueError, match="loss is NaN"):
            train(tmp_path, 8, poison=True)
    return tmp_path


def test_a_run_goes_back_behind_a_checkpoint_that_crashed_it_twice(root):
    told = "skipping the checkpoint of step 3: attempts 2 and 3 loaded it and crashed both after"
    with pytest.warns(RuntimeWarning, match=told):
        assert train(root, 8, poison=True) == 2
    (refused,) = [each for each in read_journal(journal_path(root))[0] if each["event"] == "restore_refused"]
    assert refused["step"] == 3
    assert "crashed both" in refused["reason"]
    assert train(root, 8) == 8


def test_saved_anew_it_is_another_one_for_a_second_restore_too(root):
    state = {"x": {"w": torch.zeros(3)}}
    with ckptman.Checkpointer(root, state, save_policy=ckptman.AtStep(3), deadline=None) as checkpointer:
        with pytest.warns(RuntimeWarning, match="skipping the checkpoint of step 3"):
            assert checkpointer.restore() == 2
        state["x"]["w"].fill_(7)
        checkpointer.step(3)
        checkpointer.wait()
        assert checkpointer.restore() == 3
    assert torch.equal(state["x"]["w"], torch.full((3,), 7.0))


@pytest.mark.parametrize("options", [{"step": 3}, {"allow_suspect": True}])
def test_it_is_loaded_if_asked_for(root, options):
    with pytest.raises(ValueError, match="loss is NaN"):
        train(root, 8, poison=True, **options)


def test_a_run_never_goes_back_to_step_0(root):
    shutil.rmtree(root / step_folder(2))
    with pytest.raises(ckptman.SuspectError, match="step 3 is all there is to go on from, and attempts 2 and 3"):
        train(root, 4)
    assert train(root, 4, allow_suspect=True) == 3


def test_two_outages_of_a_mount_leave_the_checkpoint_what_it_is(tmp_path):
    train(tmp_path, 3)
    for _ in range(2):
        with (
            pytest.raises(OSError, match="Input/output"),
            ckptman.Checkpointer(tmp_path, {"x": {"w": torch.zeros(3)}}, deadline=None) as checkpointer,
        ):
            assert checkpointer.restore() == 3
            checkpointer.step(4)
            raise OSError(errno.EIO, "Input/output error", "/datasets/tokens.bin")
    failed = [each for each in read_journal(journal_path(tmp_path))[0] if each["event"] == "failed"]
    assert [(each["error"], each["cause"]) for each in failed] == [("OSError", "environment")] * 2
    assert train(tmp_path, 4) == 3


@pytest.mark.parametrize("number", [None, "2", "x", 1.5, [1], {}, True])
def test_an_attempt_that_is_no_number_is_of_no_crash(number):
    assert crashes_of([{**event, "attempt": number} for event in journal(*[LOADED_AND_CRASHED] * 2)]) == []


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
        ([start("a", RESTORED), start("a", RESTORED), start("a", ("restored", 104))], 1),  # in memory it got on
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
        with ckptman.Checkpointer(tmp_path, state, deadline=None) as checkpointer:
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
            assert checkpointer.should_stop()
        assert checkpointer.exit_code == 0
        outcome = read_outcome(outcome_path(tmp_path))
        assert (outcome.state, outcome.exit_code) == ("stopped", 75)
        with (
            pytest.raises(SystemExit) as caught,
            ckptman.Checkpointer(tmp_path, state, signals=signals) as checkpointer,
        ):
            checkpointer.restore()
        assert caught.value.code == 0
    assert read_outcome(outcome_path(tmp_path)).state == "stopped"
