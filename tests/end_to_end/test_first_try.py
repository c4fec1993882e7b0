"""What people write first: it works, or is refused in a line before its first step ends."""

import argparse
import gc
import signal
import threading
import traceback
import warnings
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest
import torch

import ckptman
from ckptman import Checkpointer, ConfigError, MismatchError
from ckptman.runtime.outcome import read_outcome
from ckptman.storage.format.paths import outcome_path
from tests.helpers.ranks import run_ranks


def state():
    return {"model": torch.nn.Linear(2, 2)}


def saved(root):
    return sorted(int(each.name[5:]) for each in root.glob("step-*"))


def loop(root, until=12, stop_at=4, asks=lambda step: False, **options):
    """A loop that is asked to stop at a step, and asks at some. Returns its last step and the exit code."""
    with warnings.catch_warnings(record=True) as caught, Checkpointer(root, state(), deadline=None, **options) as run:
        warnings.simplefilter("always")
        for step in range(run.restore() + 1, until + 1):
            if step == stop_at:
                signal.raise_signal(signal.SIGTERM)
            run.step(step)
            if asks(step) and run.should_stop():
                break
    return step, run.exit_code, [str(each.message) for each in caught if "but the loop goes on" in str(each.message)]


# ---- stop requests ---------------------------------------------------------------------------------------------------


def test_a_stop_is_saved_whatever_the_policy(tmp_path):
    assert loop(tmp_path, asks=lambda step: True, save_policy=ckptman.EverySteps(1000)) == (5, 75, [])
    assert saved(tmp_path) == [5]
    assert loop(tmp_path, asks=lambda step: True, save_policy=1000) == (12, 0, [])


def test_a_stop_is_not_saved_where_that_is_switched_off_by_name(tmp_path):
    options = {"save_policy": 1000, "save_on_stop": False}
    assert loop(tmp_path / "a", asks=lambda step: True, **options) == (5, 75, [])
    assert saved(tmp_path / "a") == []
    options["save_policy"] = ckptman.EverySteps(1000) | ckptman.OnStop()
    assert loop(tmp_path / "b", asks=lambda step: True, **options) == (5, 75, [])
    assert saved(tmp_path / "b") == [5]


def test_a_loop_that_never_asks_is_saved_once_and_finished_at_its_end(tmp_path):
    step, code, told = loop(tmp_path, save_policy=10)
    assert (step, code, len(told)) == (12, 0, 1)
    assert saved(tmp_path) == [5, 10, 12]
    assert read_outcome(outcome_path(tmp_path)).state == "finished"


def test_a_loop_that_asks_once_an_epoch_stops_there(tmp_path):
    step, code, told = loop(tmp_path, asks=lambda step: step % 8 == 0, save_policy=1000)
    assert (step, code, len(told)) == (8, 75, 1)
    assert saved(tmp_path) == [5, 8], "nothing that was done is lost"


def test_a_deadline_that_nobody_looks_at_saves_once(tmp_path):
    with warnings.catch_warnings(), Checkpointer(tmp_path, state(), save_policy=8, deadline=0.0) as run:
        warnings.simplefilter("ignore")
        for step in range(1, 12):
            run.step(step)
    assert saved(tmp_path) == [1, 8, 11]


def test_a_handler_that_asks_itself_is_told(tmp_path):
    with ckptman.SignalHandler() as signals, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Checkpointer(tmp_path, state(), signals=signals, deadline=None) as run:
            for step in range(1, 12):
                if step == 3:
                    signal.raise_signal(signal.SIGTERM)
                run.step(step)
                if step == 8 and signals.requested:
                    break
    assert (run.exit_code, saved(tmp_path)) == (75, [4, 8])


def test_signals_that_somebody_else_handles_are_left_to_them(tmp_path, caplog):
    def mine(*_):
        pass

    before = signal.signal(signal.SIGUSR1, mine)
    try:
        with caplog.at_level("INFO", "ckptman"), Checkpointer(tmp_path, state()) as run:
            assert signal.getsignal(signal.SIGUSR1) is mine
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            run.step(1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    (line,) = [each.getMessage() for each in caplog.records if "SIGUSR1" in each.getMessage()]
    assert "SIGUSR1 is handled by" in line
    assert "mine: it is left to that" in line


@pytest.mark.parametrize("typed", [False, True])
def test_where_somebody_types_an_interrupt_stays_one(tmp_path, monkeypatch, typed):
    if typed:
        monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    with Checkpointer(tmp_path, state()):
        assert (signal.getsignal(signal.SIGINT) is signal.default_int_handler) == typed


def test_in_another_thread_no_signal_is_noted(tmp_path):
    codes = []

    def work():
        with Checkpointer(tmp_path, state()) as run:
            run.step(1)
        codes.append(run.exit_code)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert codes == [0]


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_a_step_that_is_not_above_the_last_is_refused(tmp_path):
    with Checkpointer(tmp_path, state()) as run:
        with pytest.raises(ConfigError, match=r"step\(0\): steps are counted from 1, so continue with 1"):
            run.step(0)
        run.save(0)
        run.step(1)
        run.step(3)
        for step in (3, 2):
            with pytest.raises(ConfigError, match=rf"step\({step}\): step 3 has ended already, so continue with 4"):
                run.step(step)
        run.save(3)
        with pytest.raises(ConfigError, match="continue with 4"):
            run.save(2)
    assert saved(tmp_path) == [0, 3]
    with Checkpointer(tmp_path, state()) as run:
        first = run.restore()
        with pytest.raises(ConfigError, match=r"step 3 was restored, so continue with 4.*calls step\(i \+ 1\)"):
            run.step(first)
        run.step(first + 1)


# ---- values and arguments --------------------------------------------------------------------------------------------


class Phase(Enum):
    WARM_UP = "warm-up"
    MAIN = "main"


@dataclass
class Progress:
    best: float = float("inf")
    phase: Phase = Phase.WARM_UP
    out: Path = Path("out")


def test_paths_enums_and_dataclasses_are_saved_and_filled_in_place(tmp_path):
    progress = Progress()
    with Checkpointer(tmp_path, {**state(), "progress": progress, "all": {"phase": Phase.MAIN}}) as run:
        progress.best = 0.5
        run.step(1)
    progress, others = Progress(), {"phase": None}
    with Checkpointer(tmp_path, {**state(), "progress": progress, "all": others}) as run:
        assert run.restore() == 1
        assert progress == Progress(best=0.5)
        assert others == {"phase": Phase.MAIN}


def test_a_dataclass_that_has_changed_is_named_and_can_be_left_out(tmp_path, monkeypatch):
    with Checkpointer(tmp_path, {**state(), "progress": Progress()}) as run:
        run.step(1)

    @dataclass
    class Changed:
        best: float = 0.0

    Changed.__qualname__ = "Progress"
    monkeypatch.setitem(globals(), "Progress", Changed)
    why = r"progress: .*other fields than when it was saved: out, phase"
    with Checkpointer(tmp_path, {**state(), "progress": Changed()}) as run, pytest.raises(MismatchError, match=why):
        run.restore()
    with Checkpointer(tmp_path, state()) as run:
        assert run.restore(unexpected=["progress"]) == 1
    assert ckptman.read(tmp_path, only="progress")["progress"]["phase"] is Phase.WARM_UP


class Stopper:
    """Early stopping as many write it: an object that is called."""

    def __init__(self):
        self.best = 0.0

    def __call__(self, loss):
        self.best = loss


@pytest.mark.parametrize(
    ("value", "way_out"),
    [
        (argparse.Namespace(lr=1), r"args is a argparse\.Namespace.*: save vars\(args\)"),
        (lambda: 1, "args is a builtins.function.*: save what it is made from, or leave it out"),
        ({"deep": [object()]}, r"args\.deep\.0 is a builtins\.object"),
        (Stopper(), r"args is a .*Stopper.*: save vars\(args\), or give its class state_dict"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(tmp_path, value, way_out):
    with pytest.raises(ConfigError, match=way_out):
        Checkpointer(tmp_path / "new", {**state(), "args": value})
    assert not (tmp_path / "new").exists()


def test_metrics_without_names_are_refused_at_the_first_step(tmp_path):
    with Checkpointer(tmp_path, state()) as run:
        with pytest.raises(ConfigError, match=r"metrics are numbers by name, such as .*, not a Tensor"):
            run.step(1, torch.tensor(1.0))
        run.step(1)


@pytest.mark.parametrize(
    ("root", "function"), [("$SCRATCH/x", "expandvars"), ("a/${USER}", "expandvars"), ("~/x", "expanduser")]
)
def test_a_root_that_no_shell_expanded_is_refused(tmp_path, monkeypatch, root, function):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"would be a folder named .*os\.path\.{function} first"):
        Checkpointer(root, state())
    assert list(tmp_path.iterdir()) == []


def test_numbers_stand_for_policies(tmp_path):
    with Checkpointer(tmp_path, state(), save_policy=2, retention=1) as run:
        for step in range(1, 6):
            run.step(step)
    assert saved(tmp_path) == [5]
    with pytest.raises(ckptman.IntervalError):
        Checkpointer(tmp_path, state(), save_policy=0)


# ---- notebooks -------------------------------------------------------------------------------------------------------


def test_one_that_is_lost_gives_its_root_back(tmp_path):
    run = Checkpointer(tmp_path, state())
    run.step(1)
    run.save(1)
    del run
    gc.collect()
    with Checkpointer(tmp_path, state()) as run:
        assert run.restore() == 1
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_cell_that_runs_again_and_again_makes_no_checkpoint_a_suspect(tmp_path):
    with Checkpointer(tmp_path, state()) as run:
        run.step(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            run = Checkpointer(tmp_path, state(), save_policy=1000)
            assert run.restore() == 1
            run.step(2)
        with Checkpointer(tmp_path, state()) as run:
            assert run.restore() == 1


def test_a_newer_one_of_the_same_process_takes_over(tmp_path):
    older = Checkpointer(tmp_path, state(), save_policy=1)
    older.step(1)
    with pytest.warns(RuntimeWarning, match="an earlier Checkpointer of this process was not closed"):
        newer = Checkpointer(tmp_path, state())
    with newer:
        assert newer.restore() == 1
        with pytest.raises(ConfigError, match="is closed"):
            older.step(2)
    assert read_outcome(outcome_path(tmp_path)).state == "finished"


# ---- tracebacks ------------------------------------------------------------------------------------------------------


class Failing:
    def state_dict(self):
        return self.deep()

    def deep(self):
        raise TypeError("mine")

    def load_state_dict(self, state):
        pass


def frames(error):
    return [(Path(each.filename).name, each.name) for each in traceback.extract_tb(error.__traceback__)]


def test_a_traceback_ends_at_the_users_line(tmp_path, monkeypatch):
    here = (Path(__file__).name, "test_a_traceback_ends_at_the_users_line")
    for full in ("", "1"):
        monkeypatch.setenv("CKPTMAN_TRACEBACK", full)
        with pytest.raises(ConfigError) as refused:
            Checkpointer(tmp_path, {**state(), "f": lambda: 1})
        with pytest.raises(ckptman.NotFoundError) as missing:
            ckptman.read(tmp_path / "missing")
        for error in (refused.value, missing.value):
            assert frames(error)[0] == here
            assert (len(frames(error)) == 2) != bool(full)
            assert "".join(traceback.format_exception(error)).count("Traceback") == 1 or full


def test_an_error_of_the_users_own_code_is_shown_with_its_frames_alone(tmp_path):
    with (
        pytest.raises(ckptman.CkptmanError, match="TypeError: mine") as caught,
        Checkpointer(tmp_path, {**state(), "failing": Failing()}) as run,
    ):
        run.step(1)
    assert [name for _, name in frames(caught.value.__cause__)] == ["state_dict", "deep"]
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 2


def differ(root):
    with pytest.raises(ConfigError, match=r"f is a builtins\.function") as caught:
        Checkpointer(root, {**state(), "f": (lambda: 1) if torch.distributed.get_rank() else 1})
    return len(frames(caught.value))


def test_what_one_rank_cannot_save_is_refused_on_all(tmp_path):
    assert run_ranks(2, differ, tmp_path, fresh=True) == [2, 2]
