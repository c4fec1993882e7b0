"""Runs that are killed go on from the memory of the nodes that are left; a rank, or two, is a node of its own."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckptman
from ckptman.engine.saving import memory_saves
from ckptman.engine.saving.staging import Slot
from ckptman.policies import EverySteps, OnStop
from ckptman.runtime.journal import read_journal
from ckptman.runtime.outcome import highest_attempt
from ckptman.storage.catalog import rollback
from tests.helpers.apps import App
from tests.helpers.checkpoints import flip_byte
from tests.helpers.node_memory import shm
from tests.helpers.ranks import run_ranks, say, start_ranks

__all__ = ["shm"]

STEPS = 24
INTERVAL = 3


def tier(shm, **options):
    return ckptman.MemoryTier(**{"save_policy": EverySteps(INTERVAL), "path": shm, **options})


def train(root, shm, per_node=1, stop_at=None, disk_steps=100, options=None, nodes=None):
    """Train, and wait to be killed at `stop_at`, when nothing is being saved to memory. Returns the step that it went
    on from, the losses and the final digests."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ["SLURMD_NODENAME"] = nodes[rank] if nodes else f"n{rank // per_node}"
    warnings.simplefilter("ignore")
    app = App((world,))
    losses = []
    with ckptman.Checkpointer(
        root, app.state, save_policy=EverySteps(disk_steps) | OnStop(), memory=tier(shm, **(options or {}))
    ) as checkpointer:
        start = checkpointer.restore()
        say(f"from {start}")
        for step in range(start + 1, STEPS + 1):
            losses.append((step, app.train_step()))
            checkpointer.step(step)
            if checkpointer._memory is not None:
                checkpointer._memory.saves.wait()
            if step == stop_at:
                dist.barrier()
                say("there")
                threading.Event().wait()
    return start, losses, app.digests()


def killed_at(step, world, *args, **more):
    """Have all ranks killed after a step."""
    with start_ranks(world, _train, args, {**more, "stop_at": step}) as ranks:
        for rank in range(world):
            ranks.await_message(rank, "there")
        for rank in range(world):
            ranks.kill(rank, signal.SIGKILL)
        ranks.join()


def finished(world, *args, **more):
    """The steps that the ranks went on from, and what they came to."""
    found = run_ranks(world, _train, args, more)
    return {start for start, _, _ in found}, [digests for _, _, digests in found]


def _train(args, more):
    return train(*args, **more)


def events(root, name):
    return [each for each in read_journal(root / ".ckptman" / "journal.jsonl")[0] if each["event"] == name]


def lose(shm, nodes):
    """Have nodes forget what is in their memory, as after a power cut."""
    for node in nodes:
        for folder in shm.glob(f"ckptman-*/*-{node}"):
            shutil.rmtree(folder)


def node_folders(shm):
    return sorted(shm.glob("ckptman-*/*"))


class Killed:
    """Three ranks, each a node, that were killed after step 10 and hold step 9 in memory. `again` makes it so again."""

    def __init__(self, folder, shm):
        self.root, self.shm = folder / "root", shm
        self._there = {self.root: folder / "kept", shm: folder / "kept memory"}
        killed_at(10, 3, self.root, shm)
        for here, kept in self._there.items():
            subprocess.run(["cp", "-a", here, kept], check=True)

    def again(self):
        for here, kept in self._there.items():
            shutil.rmtree(here, ignore_errors=True)
            subprocess.run(["cp", "-a", kept, here], check=True)
        return self


@pytest.fixture(scope="module")
def once_killed(tmp_path_factory):
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ckptman-test-") as folder:
        (memory := Path(folder, "memory")).mkdir()
        yield Killed(tmp_path_factory.mktemp("killed"), memory)


@pytest.fixture
def killed(once_killed):
    return once_killed.again()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What three ranks come to that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return run_ranks(3, _train, (folder / "root", folder), {})


@pytest.fixture
def same(undisturbed):
    """The digests that ranks have to come to."""
    return [digests for _, _, digests in undisturbed]


def test_ranks_that_were_killed_go_on_from_memory_bit_for_bit(killed, undisturbed):
    assert not list(killed.root.glob("step-*"))
    for (start, losses, digests), (_, known_losses, known) in zip(
        run_ranks(3, _train, (killed.root, killed.shm), {}), undisturbed
    ):
        assert start == 9
        assert losses == known_losses[9:]
        assert digests == known
    assert not node_folders(killed.shm), "what is finished leaves nothing behind"
    assert len({each["run_id"] for each in events(killed.root, "attempt_started")}) == 1
    on = events(killed.root, "memory_on")[-1]
    assert (on["nodes"], on["copies"], on["lost_nodes"]) == (3, 2, 1)


def before_the_manifest(shm):
    """A node is lost, and another one was killed before it had the manifest."""
    lose(shm, "n2")
    for manifest in shm.glob("ckptman-*/*-n1/step-*/manifest.json"):
        manifest.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "nodes"),
    [
        *((partial(lose, nodes=[name]), ["n0", "n1", "n2"]) for name in ("n0", "n1", "n2")),
        (partial(lose, nodes=["n1"]), ["n0", "n2", "spare"]),  # which takes the place of the one that is lost
        (before_the_manifest, None),
    ],
    ids=["n0", "n1", "n2", "spare", "before the manifest"],
)
def test_any_one_node_may_be_lost(killed, same, act, nodes):
    act(killed.shm)
    assert finished(3, killed.root, killed.shm, nodes=nodes) == ({9}, same)


def test_nodes_may_be_lost_one_after_another_before_anything_new_counts(killed, same):
    for node in ("n0", "n1", "n2"):
        lose(killed.shm, [node])
        killed_at(10, 3, killed.root, killed.shm)
    assert finished(3, killed.root, killed.shm) == ({9}, same)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "per_node"), [(2, 1), (4, 2), (1, 1)])
def test_other_numbers_of_ranks_and_nodes_go_on_from_memory(killed, world, per_node):
    lose(killed.shm, ["n2"])
    starts, _ = finished(world, killed.root, killed.shm, per_node=per_node)
    assert starts == {0 if world == 1 else 9}
    if world == 1:  # of three parts n0 has two
        assert "parts are on no node" in events(killed.root, "memory_refused")[0]["reason"]


@pytest.mark.slow
def test_two_nodes_lost_at_once_cost_what_the_disk_does_not_have(tmp_path, shm):
    killed_at(11, 3, tmp_path / "root", shm, disk_steps=5)
    lose(shm, ["n0", "n1"])
    starts, _ = finished(3, tmp_path / "root", shm, disk_steps=5)
    assert starts in ({10}, {5})
    assert "on no node that is left" in events(tmp_path / "root", "memory_refused")[0]["reason"]


@pytest.mark.slow
def test_the_disk_is_taken_where_it_is_newer(killed):
    finished(3, killed.root, killed.shm)
    assert not node_folders(killed.shm)
    left = killed.root.rename(killed.root.with_name("finished"))
    killed.again()  # as if a node had come back with what it held long ago
    shutil.rmtree(killed.root)
    left.rename(killed.root)
    assert finished(3, killed.root, killed.shm)[0] == {STEPS}


@pytest.mark.slow
def test_a_rollback_leaves_memory_behind(tmp_path, shm):
    root = tmp_path / "root"
    killed_at(11, 2, root, shm, disk_steps=4)
    plan = partial(rollback.plan_rollback, root, 4)
    rollback.execute(root, plan, why="a test", by="pytest", time_seconds=time.time(), highest=highest_attempt)
    assert finished(2, root, shm, disk_steps=4)[0] == {4}
    assert "rollback" in events(root, "memory_refused")[0]["reason"]


# ---- one process alone: nothing goes before something newer counts ---------------------------------------------------


class Crash(Exception):
    pass


def open_run(root, shm, app, copies=1, **options):
    return ckptman.Checkpointer(root, app.state, memory=tier(shm, copies=copies), **options)


def step_alone(checkpointer, step, metrics=None):
    """A step that is in memory when this returns, if it is saved there."""
    checkpointer.step(step, metrics)
    checkpointer._memory.saves.wait()


@contextlib.contextmanager
def crashing():
    with warnings.catch_warnings(), pytest.raises(Crash):
        warnings.simplefilter("ignore")
        yield


def crashed_at(root, shm, step, app=None, **options):
    """Train, and crash after a step; the checkpoint of every third is in memory."""
    app = app or App()
    with crashing(), open_run(root, shm, app, **options) as checkpointer:
        for number in range(checkpointer.restore() + 1, step + 1):
            app.train_step()
            step_alone(checkpointer, number, {"eval": app.position.next_sample})
        raise Crash
    return app


def restored(root, shm, app=None, **options):
    """The step that a new process goes on from, which then ends."""
    with open_run(root, shm, app or App(seed=1), **options) as checkpointer:
        return checkpointer.restore()


@pytest.fixture
def far():
    """A policy that saves nothing to disk."""
    return {"save_policy": EverySteps(10**6)}


def test_restore_of_a_step_takes_it_from_where_it_is(tmp_path, shm):
    app = App()
    with open_run(tmp_path, shm, app, save_policy=EverySteps(4), signals=None) as checkpointer:
        checkpointer.restore()
        for step in range(1, 8):
            app.train_step()
            step_alone(checkpointer, step)
        for step in (4, 6):
            assert checkpointer.restore(step=step) == step
        with pytest.raises(ckptman.NotFoundError, match="no checkpoint of step 5"):
            checkpointer.restore(step=5)


def test_the_newest_is_known_without_a_journal(tmp_path, shm, far):
    """The journal and the outcome are gone, as after a purge of a scratch file system."""
    for step in (3, 6, 9):
        crashed_at(tmp_path, shm, step, **far)
    for name in ("journal.jsonl", "outcome.json"):
        (tmp_path / ".ckptman" / name).unlink()
    with open_run(tmp_path, shm, App(seed=1), **far) as checkpointer:
        assert checkpointer.restore() == 9
        assert checkpointer.attempt == 4, "memory has one of the third"
    assert [each["attempt"] for each in events(tmp_path, "attempt_started")][-1] == 4


def test_memory_of_long_ago_is_no_match_for_the_disk(tmp_path, shm, far):
    for step in (3, 6, 9):
        crashed_at(tmp_path, shm, step, **far)
    (held,) = node_folders(shm)
    shutil.move(held, away := tmp_path.with_name("away"))
    with open_run(tmp_path, shm, App(seed=1), save_policy=EverySteps(1)) as checkpointer:
        checkpointer.restore()
        for step in range(1, 13):
            step_alone(checkpointer, step)
    for folder in node_folders(shm):
        shutil.rmtree(folder)
    shutil.move(away, held)
    assert restored(tmp_path, shm, **far) == 12


@pytest.mark.parametrize("skew_seconds", [-3600, 0, 3600])
def test_a_rollback_leaves_memory_behind_whatever_clocks_say(tmp_path, shm, skew_seconds):
    crashed_at(tmp_path, shm, 10, save_policy=EverySteps(4))
    plan, now = partial(rollback.plan_rollback, tmp_path, 4), time.time() + skew_seconds
    rollback.execute(tmp_path, plan, why="a test", by="pytest", time_seconds=now, highest=highest_attempt)
    crashed_at(tmp_path, shm, 6, save_policy=EverySteps(100))  # from step 4, and step 6 is in memory
    assert [each["step"] for each in events(tmp_path, "restored")][-1] == 4
    assert restored(tmp_path, shm, save_policy=EverySteps(100)) == 6, "what came after it counts"


def test_a_run_that_has_nothing_left_to_do_saves_what_was_in_memory_alone(tmp_path, shm, far):
    crashed_at(tmp_path, shm, 9, **far)
    assert restored(tmp_path, shm, copies=2, **far) == 9
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000009"]
    assert not node_folders(shm)


def test_a_signal_while_it_restores_costs_nothing(tmp_path, shm, far):
    crashed_at(tmp_path, shm, 9, **far)
    with (
        pytest.raises(SystemExit),
        ckptman.SignalHandler() as signals,
        open_run(tmp_path, shm, App(seed=1), signals=signals, **far) as checkpointer,
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.restore()
    assert list(tmp_path.glob("step-*")) or node_folders(shm)
    assert restored(tmp_path, shm, **far) == 9


def test_restarts_from_memory_do_not_put_off_the_save_to_disk(tmp_path, shm):
    for step in (7, 9, 10, 11):
        crashed_at(tmp_path, shm, step, save_policy=EverySteps(8))
    assert [path.name for path in tmp_path.glob("step-*")]


@pytest.mark.parametrize("name", ["__0_0.distcp", "manifest.json"])
def test_what_was_found_damaged_is_no_fresh_start(tmp_path, shm, far, name):
    crashed_at(tmp_path, shm, 9, **far)
    (path,) = shm.glob(f"ckptman-*/*/step-*/{name}")
    flip_byte(path)
    with warnings.catch_warnings(), pytest.raises(ckptman.CorruptError, match="step 9 in memory"):
        warnings.simplefilter("ignore")
        restored(tmp_path, shm, **far)
    assert node_folders(shm)


def test_an_error_of_the_users_own_says_nothing_about_the_checkpoint(tmp_path, shm, far):
    app = crashed_at(tmp_path, shm, 9, **far)

    def refuse(state):
        raise RuntimeError("no connection")

    other, last = App(seed=1), App(seed=2)
    other.position.load_state_dict = refuse
    with pytest.raises(ckptman.CkptmanError, match="no connection"):
        restored(tmp_path, shm, other, copies=2, **far)
    assert restored(tmp_path, shm, last, **far) == 9
    assert last.position.next_sample == app.position.next_sample


def test_a_copy_of_a_root_does_not_share_its_memory(tmp_path, shm):
    policy = {"save_policy": EverySteps(4)}
    crashed_at(tmp_path / "a", shm, 5, **policy)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    crashed_at(tmp_path / "a", shm, 7, **policy)
    with (
        pytest.warns(RuntimeWarning, match="goes on as the same run"),
        pytest.warns(RuntimeWarning, match="one of them is a copy of the other"),
    ):
        assert restored(tmp_path / "b", shm, **policy) == 4
    assert node_folders(shm)


def test_another_run_neither_reads_nor_clears_what_a_crashed_one_may_go_on_from(tmp_path, shm, far):
    crashed_at(tmp_path / "a", shm, 9, **far)
    assert restored(tmp_path / "b", shm, **far) == 0
    crashed_at(tmp_path / "b", shm, 3, **far)
    assert len(node_folders(shm)) == 2


def test_nan_in_memory_is_better_than_nothing_and_takes_no_finite_one_away(tmp_path, shm, far):
    app = App()
    crashed_at(tmp_path, shm, 6, app, **far)
    nan = float("nan")

    def fill(value):
        with torch.no_grad():
            app.model[0].bias.fill_(value)

    fill(nan)
    with crashing(), open_run(tmp_path, shm, app, **far) as checkpointer:
        checkpointer.restore()
        for step, value in ((9, 0.5), (12, nan), (15, nan), (18, nan)):
            fill(value)
            step_alone(checkpointer, step)
        raise Crash
    assert restored(tmp_path, shm, **far) == 9


# ---- what cannot be used ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told", "event"),
    [
        ({"path": "/not/there"}, "goes on with disk alone.*is not there", "memory_off"),
        ({"path": "/proc/self"}, "goes on with disk alone.*(cannot be made|not this user's)", "memory_off"),
        ({}, "1 copy instead of 2", "memory_on"),
        ({"copies": 1, "max_bytes": 1000}, r"max_bytes allows 0\.0 GiB", "memory_off"),
    ],
)
def test_what_cannot_be_used_is_said_and_the_disk_has_all(tmp_path, shm, options, told, event):
    app, root = App(), tmp_path / "root"
    with (
        pytest.warns(RuntimeWarning, match=f"(?s){told}"),
        ckptman.Checkpointer(root, app.state, save_policy=EverySteps(4), memory=tier(shm, **options)) as checkpointer,
    ):
        checkpointer.restore()
        for step in range(1, 9):
            app.train_step()
            checkpointer.step(step)
    assert sorted(path.name for path in root.glob("step-*")) == ["step-0000000004", "step-0000000008"]
    assert events(root, event)
    assert event == "memory_on" or not events(root, "memory_saved")


def test_saves_that_fail_turn_it_off_and_training_goes_on(tmp_path, shm, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Slot, "become", full)
    monkeypatch.setattr(memory_saves, "RETRY_SECONDS", 0.0)
    app = App()
    with (
        pytest.warns(RuntimeWarning, match="goes on with disk alone: .*No space left"),
        open_run(tmp_path, shm, app, save_policy=EverySteps(4)) as checkpointer,
    ):
        for step in range(1, 20):
            app.train_step()
            step_alone(checkpointer, step)
    assert len(events(tmp_path, "memory_save_failed")) == 3
    assert events(tmp_path, "memory_off")


def _private(root, shm):
    own = shm / str(dist.get_rank())
    os.environ["SLURMD_NODENAME"] = "n0"
    own.mkdir()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        app = App((2,))
        with ckptman.Checkpointer(root, app.state, memory=tier(own)):
            app.train_step()
    return [str(each.message) for each in said]


def test_memory_that_is_private_to_each_container_is_said(tmp_path, shm):
    said, _ = run_ranks(2, _private, tmp_path / "root", shm)
    assert any("private to each container" in each for each in said), said
