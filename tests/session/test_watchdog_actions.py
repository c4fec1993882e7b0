"""The watchdog among ranks: one that hangs is noticed by all that can still act, and the run goes on from its newest
checkpoint with the same values."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import ckptman
from ckptman._torch_compat import group_timeouts
from ckptman.checkpointer import Checkpointer
from ckptman.engine.comm.hang_report import HangReport
from ckptman.errors import EXIT_STALLED, ConfigError
from ckptman.policies import hang_timeout
from ckptman.policies.crash_loop import crashes_of
from ckptman.policies.hang_timeout import HangTimeout
from ckptman.runtime.journal import read_journal
from ckptman.runtime.outcome import read_outcome
from ckptman.runtime.watchdog import Watchdog
from ckptman.session import watchdog_actions
from ckptman.session.watchdog_actions import hang_timeout_of
from ckptman.storage.format.paths import journal_path, outcome_path, stacks_path
from ckptman.storage.io.durable_files import Disk
from ckptman.train.launch import Launch
from ckptman.train.rendezvous import meet
from tests.helpers.apps import App
from tests.helpers.faulty_disk import on_disk
from tests.helpers.other_client import other_client
from tests.helpers.ranks import run_ranks, say, start_ranks

FLOOR_SECONDS = 3.0
PATIENCE = HangTimeout(FLOOR_SECONDS)
STATED_SECONDS = PATIENCE.notice_seconds("step") + 2 + 4 * PATIENCE.look_seconds
"""Until it is noticed, and until all ranks that can answer have."""
SLACK_SECONDS = 15.0
UNTIL = 8


def stop_myself():
    os.kill(os.getpid(), signal.SIGSTOP)


def read_from_a_dead_mount():
    read, _ = os.pipe()
    os.read(read, 1)


HANGS = {"stopped": stop_myself, "mount": read_from_a_dead_mount}


def train(root, rank, how):
    """Train to the end, saving every second step; that rank hangs at step 6."""
    app, losses = App((2,)), {}
    options = {"save_policy": ckptman.EverySteps(2), "async_save": False, "watchdog": FLOOR_SECONDS}
    with Checkpointer(root, app.state, deadline=None, **options) as checkpointer:
        for step in range(checkpointer.restore() + 1, UNTIL + 1):
            if step == 6 and dist.get_rank() == rank:
                say("hangs")
                HANGS[how]()
            losses[step] = app.train_step()
            checkpointer.step(step)
    return losses


def await_end(world, rank):
    """The exit code of one rank."""
    return world.wait(rank, STATED_SECONDS + SLACK_SECONDS)


def outcome_of(root):
    outcome = read_outcome(outcome_path(root))
    assert outcome is not None
    return outcome


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of a run that nothing hangs in."""
    return run_ranks(2, train, str(tmp_path_factory.mktemp("whole")), None, "")


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1], ids=["leader", "other"])
def test_a_stopped_rank_is_noticed_by_its_peer_and_the_run_goes_on(tmp_path, whole, stopped):
    peer = 1 - stopped
    with start_ranks(2, train, str(tmp_path), stopped, "stopped") as world:
        world.await_message(stopped, "hangs")
        begun = time.monotonic()
        assert await_end(world, peer) == 13
        assert time.monotonic() - begun < STATED_SECONDS + SLACK_SECONDS
        assert await_end(world, stopped) == -signal.SIGKILL, "a stopped rank is ended by one on its host"

    outcome = outcome_of(tmp_path)
    assert (outcome.state, outcome.step, outcome.exit_code, outcome.attempt) == ("failed", 5, 13, 1)
    assert outcome.reason.startswith("Stalled: no sign of life for 3.")
    assert "in what came after step 5" in outcome.reason
    assert outcome.reason.endswith(f"; not heard of: rank {stopped}")
    stacks = stacks_path(tmp_path, 1, peer).read_text()
    assert stacks.startswith(f"rank {peer} of 2 (host ")
    assert "in train_step" in stacks
    assert not stacks_path(tmp_path, 1, stopped).exists()
    events, torn = read_journal(journal_path(tmp_path))
    assert (events[-1]["event"], events[-1]["attempt"], torn) == ("failed", 1, 0)
    assert not crashes_of([{"event": "restored", "attempt": 1, "step": 4}, *events[-1:]]), "no checkpoint is to blame"

    second = run_ranks(2, train, str(tmp_path), None, "")
    for rank in range(2):
        assert second[rank] == {step: loss for step, loss in whole[rank].items() if step > 4}
    assert outcome_of(tmp_path).state == "finished"


def train_over_a_store_of_rank_0(root, port):
    """As `srun` without `torchrun`: rank 0 keeps the store, and takes it along when it is stopped."""
    watchdog_actions.PART_SECONDS = 2.0  # the bound of a part of the end: several of them hang here
    rank = dist.get_rank()
    dist.barrier()  # one that leaves before the other is connected breaks its connecting
    dist.destroy_process_group()
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    store = meet(Launch(rank, 2, rank, 2, alone=False), environ, 60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    train(root, 0, "stopped")


@pytest.mark.slow
def test_a_stopped_leader_that_keeps_the_store(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with start_ranks(2, train_over_a_store_of_rank_0, str(tmp_path), port) as world:
        world.await_message(0, "hangs")
        assert await_end(world, 1) == 13
        assert await_end(world, 0) == -signal.SIGKILL
    outcome = outcome_of(tmp_path)
    assert (outcome.state, outcome.step, outcome.exit_code) == ("failed", 5, 13)
    assert "; nobody could be asked: the store where the ranks met, at rank 0 or its torchrun" in outcome.reason


def test_all_ranks_leave_when_one_hangs_in_its_own_code(tmp_path):
    with start_ranks(2, train, str(tmp_path), 1, "mount") as world:
        world.await_message(1, "hangs")
        assert [await_end(world, rank) for rank in range(2)] == [13, 13]
    assert "read_from_a_dead_mount" in stacks_path(tmp_path, 1, 1).read_text()
    assert "in train_step" in stacks_path(tmp_path, 1, 0).read_text()
    outcome = outcome_of(tmp_path)
    assert "; all ranks answer, and are stuck after the same step: their stacks say where. If nothing hung, " in (
        outcome.reason
    )


class HangingDisk(Disk):
    """A file system that hangs at the first write to a data file."""

    def write_at(self, fd, data, offset):
        say("hangs")
        threading.Event().wait()
        return 0


def train_over_a_hanging_disk(root):
    app, options = App(), {"save_policy": ckptman.AtStep(2), "deadline": None, "watchdog": 1.0}
    with on_disk(HangingDisk()), Checkpointer(root, app.state, **options) as checkpointer:
        checkpointer.restore()
        for step in range(1, 10**9):
            app.train_step()
            checkpointer.step(step)


@pytest.mark.slow
def test_a_save_that_hangs_behind_the_training_is_noticed(tmp_path):
    with start_ranks(1, train_over_a_hanging_disk, str(tmp_path)) as world:
        world.await_message(0, "hangs")
        begun = time.monotonic()
        assert await_end(world, 0) == 13
        assert time.monotonic() - begun < HangTimeout(1.0).notice_seconds("save") + SLACK_SECONDS
    reason = outcome_of(tmp_path).reason
    assert "(limit 3.0 s) from the save of step 2 in the background; there is one rank" in reason
    assert "in write_at" in stacks_path(tmp_path, 1, 0).read_text()


def open_root(root):
    hang_timeout.OPEN_SECONDS = 0.1
    with Checkpointer(root, {"step": 0}, watchdog=0.2):
        pass


def test_a_file_system_that_does_not_answer_before_the_run_begins(tmp_path, capfd):
    (tmp_path / "disk").mkdir()
    with other_client(tmp_path / "disk", tmp_path / "mount") as client:
        client.server.send_signal(signal.SIGSTOP)
        try:
            with start_ranks(1, open_root, str(client.path / "run")) as world:
                assert world.wait(0, 60) == EXIT_STALLED
        finally:
            client.server.send_signal(signal.SIGCONT)
    assert "while opening the checkpoint root: see whether its file system answers" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("setting", "ranks", "environ", "patience"),
    [
        ("auto", 1, {}, None),
        ("auto", 2, {}, HangTimeout(600.0)),
        ("auto", 1, {"CKPTMAN_ATTEMPT": "2"}, HangTimeout(600.0)),
        (None, 8, {"CKPTMAN_ATTEMPT": "2"}, None),
        (20, 1, {}, HangTimeout(20.0)),
        (HangTimeout(5, 9), 1, {}, HangTimeout(5, 9)),
    ],
)
def test_what_the_setting_means(setting, ranks, environ, patience):
    assert hang_timeout_of(setting, ranks, environ) == patience


def test_settings_that_cannot_be():
    for wrong in ("on", True, [600]):
        with pytest.raises(ConfigError, match="watchdog is the seconds"):
            hang_timeout_of(wrong, 2, {})
    with pytest.raises(ConfigError, match="floor_seconds must be a finite number above 0, not -1"):
        Checkpointer("nowhere", {"a": 1}, watchdog=-1)


def timeouts_of_groups():
    group = dist.new_group([0, 1], timeout=timedelta(seconds=77))
    found = group_timeouts("gloo"), group_timeouts("nccl")
    dist.barrier()  # the other rank may still be connecting to this one
    dist.destroy_process_group(group)
    return found


def test_the_timeouts_of_all_groups_are_known():
    for gloo, nccl in run_ranks(2, timeouts_of_groups):
        assert (min(gloo), max(gloo), nccl) == (77, 1800, [])
    assert group_timeouts("gloo") == []


@pytest.fixture
def nccl(monkeypatch):
    """A run of a chain whose groups abort a collective after 1800 and after 600 seconds."""
    monkeypatch.setenv("CKPTMAN_ATTEMPT", "1")
    monkeypatch.setattr(watchdog_actions, "group_timeouts", lambda backend: [1800.0, 600.0])


@pytest.mark.usefixtures("nccl")
def test_the_watchdog_speaks_before_nccl(tmp_path):
    with Checkpointer(tmp_path, {"a": 1}, deadline=None) as checkpointer:
        patience = checkpointer._watchdog.patience
        assert patience is not None
        assert patience == HangTimeout(555.0, speak_seconds=555.0)
    (event,) = [each for each in read_journal(journal_path(tmp_path))[0] if each["event"] == "watchdog"]
    assert (event["floor_seconds"], event["factor"], event["speak_seconds"]) == (555, 3, 555)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("setting", [900, HangTimeout(900.0)])
def test_a_limit_of_the_user_stays(tmp_path, setting):
    with Checkpointer(tmp_path, {"a": 1}, deadline=None, watchdog=setting) as checkpointer:
        checkpointer.restore()
        assert checkpointer._watchdog.patience == HangTimeout(900.0, speak_seconds=555.0)


@pytest.mark.parametrize(
    ("abort_seconds", "floor", "speak"), [(10.0, 555, 5), (300.0, 555, 255), (600.0, 555, 555), (7200.0, 600, 7155)]
)
def test_groups_that_wait_for_less_end_no_step_earlier(abort_seconds, floor, speak):
    assert hang_timeout_of("auto", 2, {}, abort_seconds) == HangTimeout(floor, speak_seconds=speak)


def train_and_listen(root):
    """What the watchdog of this rank says, whose limit is far away, while rank 1 stands still for a while."""
    app, said = App((2,)), Path(root, f"said-{dist.get_rank()}")
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    with Checkpointer(root, app.state, deadline=None, watchdog=HangTimeout(600.0, speak_seconds=2.0)) as checkpointer:
        for step in range(checkpointer.restore() + 1, 4):
            if step == 3 and dist.get_rank() == 1:
                say("hangs")
                stop_myself()
            app.train_step()
            checkpointer.step(step)
    return said.read_text()


@pytest.mark.slow
def test_it_says_who_is_silent_and_goes_on(tmp_path):
    with start_ranks(2, train_and_listen, str(tmp_path)) as world:
        world.await_message(1, "hangs")
        until = time.monotonic() + 240
        while "it goes on" not in (tmp_path / "said-0").read_text() and time.monotonic() < until:
            time.sleep(0.05)
        world.kill(1, signal.SIGCONT)
        said = world.results()[0]
    assert "rank 0 of 2 (host " in said
    assert "(limit 600 s) in what came after step 2" in said
    assert "; not heard of: rank 1; it goes on; stacks are in " in said
    assert "in train_step" in stacks_path(tmp_path, 1, 0).read_text()


@pytest.mark.parametrize("behind", [True, False])
def test_what_a_rank_is_at(tmp_path, monkeypatch, behind):
    """Up to the copy of a save a collective may be waited for, and after it only files."""
    beats, options = [], {"save_policy": ckptman.EverySteps(1), "deadline": None, "async_save": behind}
    monkeypatch.setattr(Watchdog, "beat", lambda self, doing, step: beats.append(doing))
    with Checkpointer(tmp_path, {"x": torch.zeros(4)}, **options) as checkpointer:
        beats.clear()
        checkpointer.restore()
        assert (beats[0], beats[-2], beats[-1]) == ("restore", "restore", "start")
        beats.clear()
        checkpointer.step(1)
        assert beats == (["stage", "step"] if behind else ["stage", "save", "step"])
        beats.clear()
        checkpointer.wait()
        assert beats == ["save", "step"]


@pytest.mark.parametrize(
    ("world_size", "silent", "places", "told"),
    [
        (1, None, "", "there is one rank"),
        (4, None, "", "nobody could be asked: the store where the ranks met"),
        (4, [2], "aa a", "not heard of: rank 2"),
        (4, [0, 2], " a b", "not heard of: ranks 0, 2"),
        (99, list(range(9)), "", "not heard of: ranks 0, 1, 2, 3, 4, 5, 6, 7, ..."),
        (2, [], "aa", "all ranks answer, and are stuck after the same step"),
        (4, [], "abaa", "all ranks answer, at different places: rank 0 and others a; rank 1 b"),
    ],
)
def test_what_is_told_about_the_others(world_size, silent, places, told):
    found = HangReport(0, world_size, 1)
    found.silent = silent
    found.places = {rank: place for rank, place in enumerate(places) if place != " "}
    assert found.text().startswith(told)


@pytest.mark.parametrize(
    ("nodes", "silent", "bad"),
    [
        ("aabb", [3], {"b": "ranks 3 there were silent"}),
        ("aabb", [2, 3], {"b": "ranks 2, 3 there were silent"}),
        ("aabb", [1, 3], {}),
        ("aaaa", [1], {"a": "ranks 1 there were silent"}),
        ("aabbccdd", [3, 4], {"b": "ranks 3 there were silent", "c": "ranks 4 there were silent"}),
        ("aabb", [], {}),
        ("aabb", None, {}),
    ],
)
def test_nodes_of_silent_ranks(nodes, silent, bad):
    found = HangReport(0, len(nodes), 1)
    found.silent, found._store = silent, torch.distributed.HashStore()
    for rank, node in enumerate(nodes):
        found._store.set(f"ckptman/stalled/1/node/{rank}", node)
    assert found.bad_nodes() == bad


@pytest.mark.parametrize(
    ("stops", "late_seconds", "other_host", "killed"),
    [(True, 0, "", True), (False, 0, "", False), (True, 60, "", False), (True, 0, "elsewhere", False)],
    ids=["stopped", "alive", "another process of that pid", "another host"],
)
def test_only_a_stopped_process_of_this_run_is_killed(stops, late_seconds, other_host, killed):
    child = subprocess.Popen(["sleep", "60"])
    try:
        process = psutil.Process(child.pid)
        if stops:
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        roll = HangReport(0, 2, 1)
        roll.silent, roll._store = [0, 1], torch.distributed.HashStore()
        place = [other_host or socket.gethostname(), child.pid, process.create_time() + late_seconds]
        roll._store.set("ckptman/stalled/1/process/1", json.dumps(place))
        roll.kill_stopped()
        if killed:
            assert child.wait(30) == -signal.SIGKILL
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(0.5)
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.leaves("ckptman-")
def test_what_breaks_because_a_watchdog_ended_a_rank_does_not_hide_why(tmp_path, leads):
    with pytest.raises(RuntimeError, match="connection reset"), Checkpointer(tmp_path, {"a": 1}) as checkpointer:
        own = checkpointer._session
        if not leads:  # the deputy opens the journal when it speaks for the leader
            own.claim = None
        for step in (6, 7):  # the journal hears of the first at once, and of the other at the end
            checkpointer.step(step)
        own.write_outcome("failed", 7, "Stalled: no sign of life; not heard of: rank 3", EXIT_STALLED)
        raise RuntimeError("connection reset")
    events = read_journal(journal_path(tmp_path))[0]
    assert "failed" not in [each["event"] for each in events]
    assert 7 not in [each.get("step") for each in events], "the watchdog's event is the last"
    found = outcome_of(tmp_path)
    assert (found.reason, found.exit_code) == ("Stalled: no sign of life; not heard of: rank 3", EXIT_STALLED)
    if leads:
        with pytest.raises(RuntimeError, match="again"), Checkpointer(tmp_path, {"a": 1}):
            raise RuntimeError("again")
        assert outcome_of(tmp_path).reason == "RuntimeError: again"
