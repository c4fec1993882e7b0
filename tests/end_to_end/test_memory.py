"""Runs that are killed go on from the memory of the nodes that are left; a rank, or two, is a node of its own."""

import json
import os
import re
import shutil
import signal
import threading
import time
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist

import ckptman
from ckptman.catalog import rollback
from ckptman.policies import EverySteps, OnStop
from ckptman.runtime.journal import read_journal
from ckptman.saving import memory_saves
from tests.helpers.apps import App
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
    found = run_ranks(world, _train, args, more)
    return found


def _train(args, more):
    return train(*args, **more)


def events(root, name):
    return [each for each in read_journal(root / ".ckptman" / "journal.jsonl")[0] if each["event"] == name]


def lose(shm, *nodes):
    """Have nodes forget what is in their memory, as after a power cut."""
    for node in nodes:
        for folder in shm.glob(f"ckptman-*/*-{node}"):
            shutil.rmtree(folder)


def node_folders(shm):
    return sorted(shm.glob("ckptman-*/*"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What three ranks come to that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return finished(3, folder / "root", folder)


def test_ranks_that_were_killed_go_on_from_memory_bit_for_bit(tmp_path, shm, undisturbed):
    killed_at(10, 3, tmp_path / "root", shm)
    assert not list((tmp_path / "root").glob("step-*"))
    results = finished(3, tmp_path / "root", shm)
    assert {start for start, _, _ in results} == {9}
    for (_, losses, digests), (_, known_losses, known) in zip(results, undisturbed):
        assert losses == known_losses[9:]
        assert digests == known
    assert not node_folders(shm), "what is finished leaves nothing behind"
    run_ids = {each["run_id"] for each in events(tmp_path / "root", "attempt_started")}
    assert len(run_ids) == 1


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["n0", "n1", "n2"])
def test_any_one_node_may_be_lost(tmp_path, shm, lost, undisturbed):
    killed_at(10, 3, tmp_path / "root", shm)
    lose(shm, lost)
    results = finished(3, tmp_path / "root", shm, nodes=["n0", "n1", "n2"])
    assert {start for start, _, _ in results} == {9}
    assert [digests for _, _, digests in results] == [digests for _, _, digests in undisturbed]


def test_nodes_may_be_lost_one_after_another_before_anything_new_counts(tmp_path, shm, undisturbed):
    killed_at(10, 3, tmp_path / "root", shm)
    for node in ("n0", "n1", "n2"):
        lose(shm, node)
        killed_at(10, 3, tmp_path / "root", shm)
    results = finished(3, tmp_path / "root", shm)
    assert {start for start, _, _ in results} == {9}
    assert [digests for _, _, digests in results] == [digests for _, _, digests in undisturbed]


@pytest.mark.slow
def test_a_spare_node_takes_the_place_of_one_that_is_lost(tmp_path, shm, undisturbed):
    killed_at(10, 3, tmp_path / "root", shm)
    lose(shm, "n1")
    results = finished(3, tmp_path / "root", shm, nodes=["n0", "n2", "spare"])
    assert {start for start, _, _ in results} == {9}
    assert [digests for _, _, digests in results] == [digests for _, _, digests in undisturbed]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "per_node"), [(2, 1), (4, 2), (1, 1)])
def test_other_numbers_of_ranks_and_nodes_go_on_from_memory(tmp_path, shm, world, per_node):
    killed_at(10, 3, tmp_path / "root", shm)
    lose(shm, "n2")
    results = finished(world, tmp_path / "root", shm, per_node=per_node)
    if world == 1:  # of three parts n0 has two
        assert {start for start, _, _ in results} == {0}
        assert "parts are on no node" in events(tmp_path / "root", "memory_refused")[0]["reason"]
    else:
        assert {start for start, _, _ in results} == {9}


@pytest.mark.slow
def test_two_nodes_lost_at_once_cost_what_the_disk_does_not_have(tmp_path, shm):
    killed_at(11, 3, tmp_path / "root", shm, disk_steps=5)
    lose(shm, "n0", "n1")
    results = finished(3, tmp_path / "root", shm, disk_steps=5)
    assert {start for start, _, _ in results} in ({10}, {5})
    said = events(tmp_path / "root", "memory_refused")
    assert said
    assert "on no node that is left" in said[0]["reason"]


@pytest.mark.slow
def test_the_disk_is_taken_where_it_is_newer(tmp_path, shm):
    root = tmp_path / "root"
    killed_at(10, 2, root, shm)
    kept = tmp_path / "kept"
    shutil.copytree(shm, kept)
    finished(2, root, shm)
    assert not node_folders(shm)
    shutil.copytree(kept, shm, dirs_exist_ok=True)  # as if a node had come back with what it held long ago
    assert {start for start, _, _ in finished(2, root, shm)} == {STEPS}


@pytest.mark.slow
def test_what_another_run_left_in_memory_is_not_read(tmp_path, shm):
    killed_at(10, 2, tmp_path / "one", shm)
    assert {start for start, _, _ in finished(2, tmp_path / "two", shm)} == {0}


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["__0_0.distcp", "blocks-00000.bin", "index.json", "chunks.bin", "manifest.json"])
def test_a_flipped_byte_in_memory_is_never_loaded(tmp_path, shm, name, undisturbed):
    killed_at(10, 3, tmp_path / "root", shm, disk_steps=4)
    for folder in node_folders(shm):
        for path in folder.glob(f"step-*/{name}"):
            flip(path, path.stat().st_size // 2)
    results = finished(3, tmp_path / "root", shm, disk_steps=4)
    assert {start for start, _, _ in results} in ({8}, {4})
    assert [digests for _, _, digests in results] == [digests for _, _, digests in undisturbed]


@pytest.mark.slow
def test_a_save_to_memory_that_was_cut_short_is_none(tmp_path, shm, undisturbed):
    killed_at(10, 3, tmp_path / "root", shm)
    for folder in node_folders(shm):
        newest = max(folder.glob("step-*"))
        later = newest.with_name("step-0000000012")
        shutil.copytree(newest, later)
        (later / "manifest.json").unlink()
    results = finished(3, tmp_path / "root", shm)
    assert {start for start, _, _ in results} == {9}
    assert [digests for _, _, digests in results] == [digests for _, _, digests in undisturbed]


@pytest.mark.slow
def test_a_node_that_was_killed_before_it_had_the_manifest_is_asked_for_its_parts(tmp_path, shm):
    killed_at(10, 3, tmp_path / "root", shm)
    lose(shm, "n2")
    for folder in shm.glob("ckptman-*/*-n1"):
        for manifest in folder.glob("step-*/manifest.json"):
            manifest.unlink()
    assert {start for start, _, _ in finished(3, tmp_path / "root", shm)} == {9}


@pytest.mark.slow
def test_a_rollback_leaves_memory_behind(tmp_path, shm):
    root = tmp_path / "root"
    killed_at(11, 2, root, shm, disk_steps=4)
    plan = partial(rollback.plan_rollback, root, 4)
    rollback.execute(root, plan, why="a test", by="pytest", time_seconds=time.time())
    results = finished(2, root, shm, disk_steps=4)
    assert {start for start, _, _ in results} == {4}
    assert "rollback" in events(root, "memory_refused")[0]["reason"]


def test_restore_of_a_step_takes_it_from_where_it_is(tmp_path, shm):
    root = tmp_path / "root"
    app = App()
    with ckptman.Checkpointer(
        root, app.state, save_policy=EverySteps(4), memory=tier(shm, copies=1), signals=None
    ) as checkpointer:
        checkpointer.restore()
        for step in range(1, 8):
            app.train_step()
            checkpointer.step(step)
            assert checkpointer._memory is not None
            checkpointer._memory.saves.wait()
        assert checkpointer.restore(step=4) == 4
        assert checkpointer.restore(step=6) == 6
        with pytest.raises(ckptman.NotFoundError, match="no checkpoint of step 5"):
            checkpointer.restore(step=5)


# ---- nothing goes before something newer counts --------------------------------------------------------------------


class Crash(Exception):
    pass


def crashed_at(root, shm, step, app=None, **options):
    """Train alone, and crash after a step; the checkpoint of every third is in memory."""
    app = app or App()
    with (
        warnings.catch_warnings(),
        pytest.raises(Crash),
        ckptman.Checkpointer(root, app.state, memory=tier(shm, copies=1), **options) as checkpointer,
    ):
        warnings.simplefilter("ignore")
        for number in range(checkpointer.restore() + 1, step + 1):
            app.train_step()
            checkpointer.step(number, {"eval": app.position.next_sample} if "nonfinite" not in options else None)
            assert checkpointer._memory is not None
            checkpointer._memory.saves.wait()
        raise Crash
    return app


@pytest.fixture
def far():
    """A policy that saves nothing to disk."""
    return {"save_policy": EverySteps(10**6)}


def test_a_run_that_has_nothing_left_to_do_saves_what_was_in_memory_alone(tmp_path, shm, far):
    crashed_at(tmp_path, shm, 9, **far)
    app = App(seed=1)
    with ckptman.Checkpointer(tmp_path, app.state, memory=tier(shm, copies=2), **far) as checkpointer:
        assert checkpointer.restore() == 9
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000009"]
    assert not node_folders(shm)


def test_a_signal_while_it_restores_costs_nothing(tmp_path, shm, far):
    crashed_at(tmp_path, shm, 9, **far)
    app = App(seed=1)
    with (
        pytest.raises(SystemExit),
        ckptman.SignalHandler() as signals,
        ckptman.Checkpointer(tmp_path, app.state, memory=tier(shm, copies=1), signals=signals, **far) as checkpointer,
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.restore()
    assert list(tmp_path.glob("step-*")) or node_folders(shm)
    with ckptman.Checkpointer(tmp_path, App(seed=2).state, memory=tier(shm, copies=1), **far) as checkpointer:
        assert checkpointer.restore() == 9


def test_restarts_from_memory_do_not_put_off_the_save_to_disk(tmp_path, shm):
    policy = {"save_policy": EverySteps(8)}
    crashed_at(tmp_path, shm, 7, **policy)
    for step in (9, 10, 11):
        crashed_at(tmp_path, shm, step, **policy)
    assert [path.name for path in tmp_path.glob("step-*")]


@pytest.mark.parametrize("name", ["__0_0.distcp", "manifest.json"])
def test_what_was_found_damaged_is_no_fresh_start(tmp_path, shm, far, name):
    crashed_at(tmp_path, shm, 9, **far)
    (path,) = shm.glob(f"ckptman-*/*/step-*/{name}")
    flip(path, path.stat().st_size // 2)
    with (
        warnings.catch_warnings(),
        pytest.raises(ckptman.CorruptError, match="step 9 in memory"),
        ckptman.Checkpointer(tmp_path, App(seed=1).state, memory=tier(shm, copies=1), **far) as checkpointer,
    ):
        warnings.simplefilter("ignore")
        checkpointer.restore()
    assert node_folders(shm)


def test_an_error_of_the_users_own_says_nothing_about_the_checkpoint(tmp_path, shm, far):
    app = crashed_at(tmp_path, shm, 9, **far)

    def refuse(state):
        raise RuntimeError("no connection")

    other = App(seed=1)
    other.position.load_state_dict = refuse
    with (
        pytest.raises(ckptman.CkptmanError, match="no connection"),
        ckptman.Checkpointer(tmp_path, other.state, memory=tier(shm, copies=2), **far) as checkpointer,
    ):
        checkpointer.restore()
    with ckptman.Checkpointer(tmp_path, (last := App(seed=2)).state, memory=tier(shm, copies=1), **far) as checkpointer:
        assert checkpointer.restore() == 9
        assert last.position.next_sample == app.position.next_sample


def test_a_copy_of_a_root_does_not_share_its_memory(tmp_path, shm):
    policy = {"save_policy": EverySteps(4)}
    crashed_at(tmp_path / "a", shm, 5, **policy)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    crashed_at(tmp_path / "a", shm, 7, **policy)
    app = App(seed=1)
    with (
        pytest.warns(RuntimeWarning, match="one of them is a copy of the other"),
        ckptman.Checkpointer(tmp_path / "b", app.state, memory=tier(shm, copies=1), **policy) as checkpointer,
    ):
        assert checkpointer.restore() == 4
    assert node_folders(shm)


def test_the_start_of_another_run_leaves_alone_what_a_crashed_one_may_go_on_from(tmp_path, shm, far):
    crashed_at(tmp_path / "a", shm, 9, **far)
    crashed_at(tmp_path / "b", shm, 3, **far)
    assert len(node_folders(shm)) == 2


def test_nan_in_memory_is_better_than_nothing_and_takes_no_finite_one_away(tmp_path, shm, far):
    app = crashed_at(tmp_path, shm, 6, **far)
    with torch.no_grad():
        app.model[0].bias.fill_(float("nan"))
    app.train_step = lambda: 0.0
    with (
        warnings.catch_warnings(),
        pytest.raises(Crash),
        ckptman.Checkpointer(tmp_path, app.state, memory=tier(shm, copies=1), **far) as checkpointer,
    ):
        warnings.simplefilter("ignore")
        checkpointer.restore()
        with torch.no_grad():
            app.model[0].bias.fill_(0.5)
        checkpointer.step(9)
        checkpointer._memory.saves.wait()
        with torch.no_grad():
            app.model[0].bias.fill_(float("nan"))
        for step in (12, 15, 18):
            checkpointer.step(step)
            checkpointer._memory.saves.wait()
        raise Crash
    with ckptman.Checkpointer(tmp_path, App(seed=2).state, memory=tier(shm, copies=1), **far) as checkpointer:
        assert checkpointer.restore() == 9


# ---- what cannot be used ---------------------------------------------------------------------------------------------


def run_alone(root, memory):
    """Train a few steps, and return what was warned of."""
    app = App()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with ckptman.Checkpointer(root, app.state, save_policy=EverySteps(4), memory=memory) as checkpointer:
            checkpointer.restore()
            for step in range(1, 9):
                app.train_step()
                checkpointer.step(step)
    assert sorted(path.name for path in root.glob("step-*")) == ["step-0000000004", "step-0000000008"]
    return [str(each.message) for each in said]


@pytest.mark.parametrize(
    ("path", "message"), [("/not/there", "is not there"), ("/proc/self", "cannot be made|not this user's")]
)
def test_a_path_that_cannot_be_used_is_said_and_the_disk_has_all(tmp_path, path, message):
    said = run_alone(tmp_path / "root", ckptman.MemoryTier(path=path))
    assert any("goes on with disk alone" in each and re.search(message, each) for each in said), said
    assert events(tmp_path / "root", "memory_off")


def test_one_node_keeps_one_copy_and_says_so(tmp_path, shm):
    said = run_alone(tmp_path / "root", tier(shm))
    assert any("1 copy instead of 2" in each for each in said), said


def test_too_little_memory_is_said_before_anything_is_saved_there(tmp_path, shm):
    said = run_alone(tmp_path / "root", tier(shm, copies=1, max_bytes=1000))
    assert any("max_bytes allows 0.0 GiB" in each for each in said), said
    assert not events(tmp_path / "root", "memory_saved")


@pytest.mark.slow
def test_a_disk_of_each_node_takes_the_place_of_memory(tmp_path, undisturbed):
    (disk := tmp_path / "disk").mkdir()
    killed_at(10, 3, tmp_path / "root", disk)
    lose(disk, "n1")
    results = finished(3, tmp_path / "root", disk)
    assert {start for start, _, _ in results} == {9}
    assert [digests for _, _, digests in results] == [digests for _, _, digests in undisturbed]


def test_saves_that_fail_turn_it_off_and_training_goes_on(tmp_path, shm, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory_saves._MemoryWriter, "_write_data", full)
    monkeypatch.setattr(memory_saves, "RETRY_SECONDS", 0.0)
    app = App()
    with (
        pytest.warns(RuntimeWarning, match="goes on with disk alone: .*No space left"),
        ckptman.Checkpointer(
            tmp_path / "root", app.state, save_policy=EverySteps(4), memory=tier(shm, copies=1)
        ) as checkpointer,
    ):
        for step in range(1, 20):
            app.train_step()
            checkpointer.step(step)
            assert checkpointer._memory is not None
            checkpointer._memory.saves.wait()
    assert len(events(tmp_path / "root", "memory_save_failed")) == 3
    assert events(tmp_path / "root", "memory_off")


def _private(root, shm):
    rank = dist.get_rank()
    os.environ["SLURMD_NODENAME"] = "n0"
    (shm / str(rank)).mkdir()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        app = App((2,))
        with ckptman.Checkpointer(root, app.state, memory=tier(shm / str(rank))):
            app.train_step()
    return [str(each.message) for each in said]


def test_memory_that_is_private_to_each_container_is_said(tmp_path, shm):
    said, _ = run_ranks(2, _private, tmp_path / "root", shm)
    assert any("private to each container" in each for each in said), said


def test_a_journal_has_what_was_agreed_on(tmp_path, shm):
    finished(3, tmp_path / "root", shm)
    (on,) = events(tmp_path / "root", "memory_on")
    assert (on["nodes"], on["copies"], on["lost_nodes"]) == (3, 2, 1)
    assert json.dumps(on)
