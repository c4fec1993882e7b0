"""Ways in which a run could load or save something that is not what its name says, or stop saving."""

import copy
import errno
import os
import signal
import time

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckptman
from ckptman.catalog.catalog import Catalog
from ckptman.format.paths import outcome_path
from ckptman.io.durable_files import DISK, Disk
from ckptman.runtime.outcome import read_outcome
from tests.helpers.apps import App
from tests.helpers.faulty_disk import saving_to
from tests.helpers.ranks import run_ranks


def open_run(root, state, disk=DISK, **options):
    options.setdefault("save_policy", ckptman.EverySteps(1))
    options.setdefault("timeout_seconds", 20)
    with saving_to(disk):
        return ckptman.Checkpointer(root, state, deadline=None, **options)


class Best:
    """Keeps the best weights, at first by reference to the model, as many trackers do."""

    def __init__(self, model):
        self.weights = model.state_dict()

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights = state["weights"]


def test_an_object_that_shares_tensors_with_the_model_gets_its_own_back(tmp_path):
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1.0)
    best = Best(copy.deepcopy(model))
    nn.init.constant_(model.weight, 2.0)
    with open_run(tmp_path, {"best": best, "model": model}) as checkpointer:
        checkpointer.save(1)
    model = nn.Linear(2, 2)
    best = Best(model)
    with open_run(tmp_path, {"best": best, "model": model}) as checkpointer:
        checkpointer.restore()
    assert (model.weight == 2.0).all()
    assert (best.weights["weight"] == 1.0).all()


def test_going_back_and_leaving_does_not_save_the_old_state_under_a_new_name(tmp_path):
    app = App()
    with open_run(tmp_path, app.state) as checkpointer:
        for step in (1, 2, 3):
            app.train_step()
            checkpointer.step(step)
        digests = app.digests()
        checkpointer.wait()
        checkpointer.restore(step=1)
    with open_run(tmp_path, app.state) as checkpointer:
        assert checkpointer.restore() == 3
        assert app.digests() == digests


def test_an_object_that_was_empty_when_saved(tmp_path):
    with open_run(tmp_path, {"callback": {}, "epoch": 1}) as checkpointer:
        checkpointer.save(1)
    state = {"callback": {"best": None}, "epoch": 0}
    with open_run(tmp_path, state) as checkpointer:
        assert checkpointer.restore() == 1
    assert state == {"callback": {}, "epoch": 1}


class Failing:
    def state_dict(self):
        raise ZeroDivisionError("a bug of the user's")

    def load_state_dict(self, state): ...


def test_a_bug_in_a_state_dict_is_not_called_corruption(tmp_path):
    with open_run(tmp_path, {"thing": {"a": 1}}) as checkpointer:
        checkpointer.save(1)
    with (
        pytest.raises(ckptman.CkptmanError, match="a bug of the user's") as caught,
        open_run(tmp_path, {"thing": Failing()}) as checkpointer,
    ):
        checkpointer.restore()
    assert not isinstance(caught.value, ckptman.CorruptError)


class SlowOnce(Disk):
    """One flush on this rank takes longer than the others wait."""

    slow = False

    def sync_file(self, fd):
        if self.slow:
            self.slow = False
            time.sleep(5)  # longer than the timeout: the delay itself is what is tested
        super().sync_file(fd)


def lose_contact(root):
    app, disk, events = App((2,)), SlowOnce(), []
    policy = ckptman.AtStep(1, 2, 3, 4)
    with open_run(root, app.state, disk=disk, timeout_seconds=3, save_policy=policy) as checkpointer:
        checkpointer.restore()
        for step in range(1, 5):
            disk.slow = step == 2 and dist.get_rank() == 1
            app.train_step()
            try:
                checkpointer.step(step)
                checkpointer.wait()
                events.append(f"{step} saved")
            except ckptman.CommitError as error:
                events.append(f"{error.step} failed")
                dist.barrier()
    return events


@pytest.mark.slow
def test_after_a_timeout_the_run_saves_again(tmp_path):
    first, second = run_ranks(2, lose_contact, str(tmp_path), fresh=True)
    assert first == second
    assert "2 failed" in first
    assert first[-1] == "4 saved"


class Hoarder(Disk):
    """Refuses to write files when the disk is full of leftovers."""

    def __init__(self, root):
        self.root = root

    def write_file(self, path, data):
        if any(".tmp-deadbeef-" in each.name for each in self.root.iterdir()):
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write_file(path, data)


def test_leftovers_of_killed_saves_make_room_for_the_next_attempt(tmp_path):
    (tmp_path / "step-0000000007.tmp-deadbeef-1").mkdir()
    with open_run(tmp_path, {"epoch": 1}, disk=Hoarder(tmp_path)) as checkpointer:
        checkpointer.restore()
        checkpointer.step(1)
    assert [each.step for each in Catalog(tmp_path).complete()] == [1]


def test_a_metric_that_is_no_number_does_not_cost_the_save(tmp_path):
    metrics = {"loss": torch.tensor(0.5), "none": None, "text": "x", "many": torch.ones(2), "nan": float("nan")}
    with (
        pytest.warns(RuntimeWarning, match="left out") as warned,
        pytest.warns(RuntimeWarning, match="not finite .*metric nan"),
        open_run(tmp_path, {"epoch": 1}) as checkpointer,
    ):
        checkpointer.step(1, metrics)
    assert len([each for each in warned if "left out" in str(each.message)]) == 3
    found = Catalog(tmp_path).entry(1).require_manifest().metrics
    assert sorted(found) == ["loss", "nan"]


def test_a_start_from_elsewhere_is_for_the_first_attempt_only(tmp_path):
    with open_run(tmp_path / "base", {"epoch": 7}) as checkpointer:
        checkpointer.save(7)
    state = {"epoch": 0}
    for expected in (7, 8, 9):
        with open_run(tmp_path / "run", state) as checkpointer:
            assert checkpointer.restore(path=tmp_path / "base" / "step-0000000007") == expected
            checkpointer.step(expected + 1)


def test_forgetting_restore_is_told_before_good_checkpoints_are_buried(tmp_path):
    with open_run(tmp_path, {"epoch": 1}) as checkpointer:
        checkpointer.save(100)
    with (
        pytest.raises(ckptman.ConfigError, match=r"restore\(\) was not called"),
        open_run(tmp_path, {"epoch": 0}, retention=ckptman.KeepLast(1)) as checkpointer,
    ):
        checkpointer.step(1)
    assert [each.step for each in Catalog(tmp_path).complete()] == [100]


def test_a_damaged_checkpoint_does_not_push_out_the_good_one(tmp_path):
    with open_run(tmp_path, {"epoch": 1}) as checkpointer:
        for step in (2, 3):
            checkpointer.step(step)
    index = tmp_path / "step-0000000003" / "index.json"
    index.write_bytes(index.read_bytes()[:-1] + b"?")
    with open_run(tmp_path, {"epoch": 1}, retention=ckptman.KeepLast(2)) as checkpointer:
        with pytest.warns(RuntimeWarning, match="skipping the checkpoint"):
            assert checkpointer.restore() == 2
        checkpointer.step(5)
    assert [each.step for each in Catalog(tmp_path).complete()] == [2, 3, 5]


def test_a_loop_that_looks_at_the_signal_itself_is_run_again(tmp_path):
    with ckptman.SignalHandler() as signals:
        with open_run(tmp_path, {"epoch": 1}, signals=signals, save_policy=ckptman.OnStop()) as checkpointer:
            checkpointer.step(1)
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signals.requested
        assert checkpointer.exit_code == 75
    outcome = read_outcome(outcome_path(tmp_path))
    assert outcome is not None
    assert (outcome.state, outcome.reason) == ("stopped", "SIGUSR2 on rank 0")
    assert [each.step for each in Catalog(tmp_path).complete()] == [1]


def test_step_numbers_of_other_types(tmp_path):
    with open_run(tmp_path, {"epoch": 1}) as checkpointer:
        checkpointer.step(numpy.int64(5))
        checkpointer.wait()
        for wrong in ("6", 6.5, -1, 10**10):
            with pytest.raises(ckptman.ConfigError, match="a step is a"):
                checkpointer.step(wrong)
            with pytest.raises(ckptman.ConfigError, match="a step is a"):
                checkpointer.save(wrong)
    assert [each.step for each in Catalog(tmp_path).complete()] == [5]


def test_a_process_that_is_one_of_several_but_not_joined_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ckptman.ConfigError, match="init_process_group"):
        open_run(tmp_path, {"epoch": 1})


class Picky(ckptman.RetentionPolicy):
    def keeps(self, records):
        raise IndexError("a bug of the user's")


def test_a_retention_policy_that_raises_costs_no_save(tmp_path):
    with (
        pytest.warns(RuntimeWarning, match="could not be pruned"),
        open_run(tmp_path, {"epoch": 1}, retention=Picky()) as checkpointer,
    ):
        for step in (1, 2):
            checkpointer.step(step)
    assert [each.step for each in Catalog(tmp_path).complete()] == [1, 2]


def test_a_run_says_which_attempt_it_is_where_it_came_from_and_what_is_durable(tmp_path):
    said = []
    for _ in range(2):
        state = {"weight": torch.zeros(3)}
        with open_run(tmp_path, state, save_policy=ckptman.EverySteps(2), run_id="italia") as checkpointer:
            said.append(
                (checkpointer.run_id, checkpointer.attempt, checkpointer.restored_from, checkpointer.last_saved)
            )
            start = checkpointer.restore()
            for step in range(start + 1, start + 4):
                checkpointer.step(step)
            checkpointer.wait()
            said.append((checkpointer.restored_from, checkpointer.last_saved))
        said.append(checkpointer.last_saved)  # the end of the block saved the last step
    assert said == [("italia", 1, None, None), (None, 2), 3, ("italia", 2, None, None), (3, 6), 6]
    assert ckptman.Run(tmp_path).run_id == "italia"


def test_a_save_that_failed_is_not_the_last_saved(tmp_path):
    disk = SometimesFull()
    with open_run(tmp_path, {"weight": torch.zeros(3)}, disk, async_save=False) as checkpointer:
        checkpointer.step(1)
        disk.full = True
        with pytest.raises(ckptman.CommitError):
            checkpointer.step(2)
        assert checkpointer.last_saved == 1
        disk.full = False
    assert checkpointer.last_saved == 2


class SometimesFull(Disk):
    """A disk that is full while it is told to be."""

    full = False

    def sync_folder(self, path):
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super().sync_folder(path)
