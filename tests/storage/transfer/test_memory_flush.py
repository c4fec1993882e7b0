"""What nodes hold in memory comes to disk: what they agree on, what is said where that cannot be, kills anywhere."""

import contextlib
import errno
import os
import random
import shutil
import signal
import time
from multiprocessing import get_context

import pytest

from ckptman.errors import BusyError, CkptmanError, ConfigError, CorruptError, NotFoundError, RootError
from ckptman.policies.retention_rules import KeepLast
from ckptman.runtime.outcome import highest_attempt
from ckptman.storage.catalog import liveness
from ckptman.storage.catalog.backends.node_memory import NodeMemory
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.prune import execute, plan_prune
from ckptman.storage.catalog.rollback import execute as roll_back
from ckptman.storage.catalog.rollback import plan_rollback
from ckptman.storage.catalog.writer_lock import claim
from ckptman.storage.format.manifest import Nonfinite, read_manifest
from ckptman.storage.format.paths import step_folder
from ckptman.storage.io.durable_files import Disk
from ckptman.storage.transfer import memory_flush
from ckptman.storage.transfer.memory_flush import Flushed, flush
from tests.faults.powercut import Flushes, survive, watched
from tests.helpers.checkpoints import commit, flip_byte, steps_of
from tests.helpers.faulty_disk import WHEN, Death, Fault, FaultyDisk, drawn, holds, on_disk
from tests.helpers.node_memory import hold, live_rank, memory_of, nodes_with

FORK = get_context("fork")
WHOLE = (pytest.mark.campaign, pytest.mark.timeout(1800))
THREE = {"a": [0, 1, 3], "b": [0, 1, 2], "c": [2, 3]}
"""Four ranks on three nodes, each part on two."""
LARGE = 2_000_000
"""Rows of which each part has more than one piece."""


def on_all(root, memories, *, nodes=None, timeout_seconds=20, late=(), act=lambda children: None):
    """Flush on all nodes at the same time, a process each. `late`: nodes that begin later; `act`: meanwhile."""
    pipes = {memory.node: FORK.Pipe(duplex=False) for memory in memories}

    def work(memory):
        time.sleep(0.7 if memory.node in late else 0)
        try:
            result = flush(root, memory, nodes=nodes, timeout_seconds=timeout_seconds)
        except CkptmanError as error:
            result = error
        pipes[memory.node][1].send(result)

    children = [FORK.Process(target=work, args=(memory,)) for memory in memories]
    for child in children:
        child.start()
    for _, writing in pipes.values():
        writing.close()
    act(children)
    told = {}
    for node, (reading, _) in pipes.items():
        with contextlib.suppress(EOFError):  # it was killed
            told[node] = reading.recv()
    for child in children:
        child.join()
    return told


def left_in(root):
    """Names that are neither a checkpoint nor the run's own."""
    return [path.name for path in sorted(root.iterdir()) if ".tmp-" in path.name or ".old-" in path.name]


def test_each_node_brings_its_share_and_one_commits(tmp_path):
    root = tmp_path / "root"
    commit(root, 100, sequence=7)
    memories = nodes_with(tmp_path, 120, THREE, rows=LARGE, metrics={"loss": float("nan")}, nonfinite=Nonfinite())
    told = on_all(root, list(memories.values()))
    assert [each.step for each in told.values() if isinstance(each, Flushed)] == [120, 120, 120]
    assert sorted(str(each.committed) for each in told.values()) == ["120", "None", "None"]
    assert {step: sequence for step, (sequence, _) in holds(root).items()} == {100: 7, 120: 8}
    made, found = read_manifest(tmp_path / "made" / step_folder(120)), read_manifest(root / step_folder(120))
    assert found.files == made.files
    assert found.nonfinite == Nonfinite()
    assert sum(each.files for each in told.values() if isinstance(each, Flushed)) >= len(made.files)
    assert not left_in(root)
    again = on_all(root, list(memories.values()))
    assert {each.why for each in again.values()} == {"step 120 on disk is the same as in memory, or newer"}
    assert steps_of(Catalog(root).scan()) == [100, 120]


EVERY, OLDER = range(4), "step 110 is on disk, from the memory of 2 nodes"


@pytest.mark.parametrize(
    ("older", "newer", "has_manifest", "nodes", "late", "step", "why"),
    [
        # A node that comes late is waited for.
        ({}, {"a": [0, 1], "b": [2, 3]}, "ab", None, "b", 120, None),
        # Nodes that were killed between commits agree on the newest.
        ({"b": EVERY}, {"a": [0, 1], "b": [2, 3]}, "a", None, "a", 120, None),
        # What nobody has all of does not keep the one before from disk.
        *(
            (
                {"a": [0, 1, 2], "b": [2, 3]},
                {"b": [0, 1]},
                "b",
                2,
                late,
                110,
                OLDER + "; step 120, which is newer, was not complete",
            )
            for late in ("", "a", "b")
        ),
        # A save that never ended keeps nobody waiting once all are there.
        ({"a": EVERY, "b": EVERY}, {"a": [0, 1], "b": [0, 1]}, "", 2, "", 110, None),
    ],
)
def test_nodes_agree_on_the_newest_that_they_have_all_of(tmp_path, older, newer, has_manifest, nodes, late, step, why):
    root = tmp_path / "root"
    memories = nodes_with(tmp_path, 110, older)
    checkpoint = commit(tmp_path / "made", 120, ranks=4).path
    for node, ranks in newer.items():
        memories.setdefault(node, memory_of(tmp_path / "shm", root, node))
        hold(memories[node], checkpoint, ranks, manifest=node in has_manifest)
    told = on_all(root, list(memories.values()), nodes=nodes, late=late, timeout_seconds=100 if nodes else 20)
    assert {each.step for each in told.values()} == {step}
    assert holds(root).keys() == {step}
    if why is not None:  # node a, which has nothing of the newer one, may see that b has gone
        assert {each.why for each in told.values()} - {OLDER} == {why}


def test_what_is_missing_is_said_and_what_the_run_goes_on_from(tmp_path):
    root = tmp_path / "root"
    memories = nodes_with(tmp_path, 120, {"a": [0, 1], "b": [1, 3]})
    told = on_all(root, list(memories.values()), nodes=2)
    for error in told.values():
        assert isinstance(error, NotFoundError)
        assert str(error) == (
            "step 120 in memory is not complete: 1 of its parts are on no node that is left (__2_0.distcp). The run "
            "goes on from its start, as there is nothing on disk"
        )
    commit(root, 100)
    with pytest.raises(NotFoundError, match=r"goes on from step 100, the newest on disk$"):
        flush(root, memories["a"], timeout_seconds=0.3)
    assert set(holds(root)) == {100}
    assert not left_in(root)


def test_a_part_whose_bytes_changed_comes_from_another_node(tmp_path):
    root = tmp_path / "root"
    memories = nodes_with(tmp_path, 120, {"a": range(4), "b": range(4)}, rows=LARGE)
    for node, rank in (("a", 0), ("a", 2), ("b", 1), ("b", 3)):
        flip_byte(memories[node].path_of(120) / f"__{rank}_0.distcp")
    flip_byte(memories["a"].path_of(120) / "index.json")
    told = on_all(root, list(memories.values()))
    assert {each.step for each in told.values()} == {120}
    assert set(holds(root)) == {120}


@pytest.mark.parametrize("what", ["changed", "shorter", "link", "folder", "gone"])
def test_what_is_no_file_of_its_bytes_is_not_brought(tmp_path, monkeypatch, what):
    monkeypatch.setattr(memory_flush, "_LINGER_SECONDS", 0.0)
    memory = nodes_with(tmp_path, 120, {"a": range(4)})["a"]
    path = memory.path_of(120) / "__2_0.distcp"
    aside = path.rename(tmp_path / "elsewhere")
    {
        "changed": lambda: path.write_bytes(bytes(len(aside.read_bytes()))),
        "shorter": lambda: path.write_bytes(aside.read_bytes()[:-1]),
        "link": lambda: path.symlink_to(aside),
        "folder": path.mkdir,
        "gone": lambda: None,
    }[what]()
    error = CorruptError if what == "changed" else NotFoundError
    told = r"__2_0\.distcp has other bytes" if what == "changed" else r"__2_0\.distcp"
    with pytest.raises(error, match=rf"step 120 in memory is not complete: .*{told}"):
        flush(tmp_path / "root", memory, nodes=1)
    assert not holds(tmp_path / "root")


def test_the_newer_attempt_is_newer_at_whatever_step(tmp_path):
    root = tmp_path / "root"
    commit(root, 300)
    commit(root, 120)
    memories = nodes_with(tmp_path, 120, {"a": range(4)}, attempt=2)
    assert flush(root, memories["a"]).committed == 120
    entries = Catalog(root).scan()
    found = [(each.step, each.sequence, each.require_manifest().attempt) for each in entries]
    assert found == [(300, 1, 1), (120, 3, 2)]
    assert not left_in(root)


def test_what_is_on_disk_already_or_was_rolled_back_is_left_where_it_is(tmp_path):
    root = tmp_path / "root"
    memories = nodes_with(tmp_path, 120, {"a": range(4)})
    commit(root, 130)
    assert flush(root, memories["a"]) == Flushed(130, "step 130 on disk is the same as in memory, or newer")
    commit(root, 90)
    hold(memories["a"], commit(tmp_path / "made", 140, ranks=4).path, range(4))
    roll_back(
        root,
        lambda: plan_rollback(root, 130),
        why="",
        by="",
        time_seconds=time.time(),
        highest=highest_attempt,
        job_id=None,
    )
    assert flush(root, memories["a"]) == Flushed(130, "what is in memory is older than the last rollback")
    assert set(holds(root)) == {130}


def test_nothing_in_memory_or_only_a_save_that_never_ended_is_no_error(tmp_path):
    root = tmp_path / "root"
    commit(root, 90)
    nothing = NodeMemory(tmp_path / "shm", "0" * 32, "a")
    assert flush(root, nothing) == Flushed(90, "a holds nothing of it in memory")
    with pytest.raises(NotFoundError, match="no checkpoint root"):
        flush(tmp_path / "nowhere", nothing)
    memory = memory_of(tmp_path / "shm", root, "a")
    hold(memory, commit(tmp_path / "made", 120, ranks=4).path, range(4), manifest=False)
    assert flush(root, memory, nodes=1).why == "what is in memory was not complete when the run ended"


def test_a_run_that_is_alive_is_left_alone(tmp_path):
    root = tmp_path / "root"
    memories = nodes_with(tmp_path, 120, {"a": range(4)})
    with live_rank(memories["a"]), pytest.raises(BusyError, match="is being written to by another run"):
        flush(root, memories["a"])
    other = claim(root, "next attempt", None)
    try:
        with pytest.raises(BusyError):
            flush(root, memories["a"], timeout_seconds=0.3)
    finally:
        other.release()
    assert not holds(root)
    memories["a"].folder.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write to it"):
        flush(root, memories["a"])
    memories["a"].folder.parent.chmod(0o700)
    assert flush(root, memories["a"]).committed == 120


def test_a_full_disk_is_told_and_the_next_flush_ends_it(tmp_path):
    root = tmp_path / "root"
    memories = nodes_with(tmp_path, 120, {"a": range(4)}, rows=LARGE)

    class FullDisk(Disk):
        def write_at(self, fd, data, offset):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told = pytest.raises(RootError, match=r"No space left on device: make room.* flush again")
    with on_disk(FullDisk()), told as caught:
        flush(root, memories["a"])
    assert caught.value.exit_code == 10
    assert not holds(root)
    assert flush(root, memories["a"]).committed == 120


class PruningDisk(Disk):
    """Prunes the root at each operation, as somebody else might."""

    def __init__(self, root):
        self.root, self.is_pruning = root, False

    def prune(self):
        if not self.is_pruning and self.root.is_dir():
            self.is_pruning = True
            execute(self.root, plan_prune(self.root, KeepLast(1), wait=False), "cli0badf00d")
            self.is_pruning = False

    def rename(self, source, target):
        self.prune()
        Disk.rename(self, source, target)
        self.prune()

    def sync_folder(self, path):
        self.prune()
        Disk.sync_folder(self, path)


def test_a_prune_takes_nothing_from_a_flush_that_is_alive_and_clears_what_a_dead_one_left(tmp_path):
    root = tmp_path / "root"
    memories = nodes_with(tmp_path, 120, {"a": range(4)})
    with on_disk(PruningDisk(root)):
        assert flush(root, memories["a"]).committed == 120
    hold(memories["a"], commit(tmp_path / "made", 130, ranks=4).path, range(4))
    dies(root, memories["a"], Fault(20))
    assert left_in(root)
    execute(root, plan_prune(root, None), "cli0badf00d")
    assert not left_in(root)
    assert flush(root, memories["a"]).committed == 130


def dies(root, memory, fault):
    """Flush in a process that dies at an operation of its disk. Whether that was reached."""

    def work():
        with on_disk(FaultyDisk(fault)) as disk, contextlib.suppress(Death):
            flush(root, memory)
        os._exit(9 if disk.struck else 0)

    child = FORK.Process(target=work)
    child.start()
    child.join()
    return child.exitcode == 9


def every_fault(root, memory):
    """Each operation of a flush to a copy of a root, and how it can fail."""
    fresh = root.with_name("counted")
    shutil.copytree(root, fresh)
    with on_disk(FaultyDisk()) as disk:
        flush(fresh, memory)
    assert len(disk.log) > 50
    return [Fault(number, when) for number in range(len(disk.log)) for when in WHEN]


@pytest.mark.parametrize("count", [12, pytest.param(10**6, marks=WHOLE)])
def test_a_flush_that_dies_anywhere_leaves_nothing_that_counts_and_the_next_ends_it(tmp_path, count):
    root = tmp_path / "root"
    commit(root, 100)
    memory = nodes_with(tmp_path, 120, {"a": range(4)})["a"]
    for number, fault in enumerate(drawn(every_fault(root, memory), count)):
        fresh = tmp_path / f"root-{number}"
        shutil.copytree(root, fresh)
        assert dies(fresh, memory, fault), fault
        assert holds(fresh).keys() - {120} == {100}
        # Another process of the same node takes it up, or finds it done.
        assert flush(fresh, memory).step == 120
        assert holds(fresh)[120][0] == 2
        execute(fresh, plan_prune(fresh, None), "cli0badf00d")
        assert not left_in(fresh)


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, pytest.param(10**6, marks=WHOLE)])
def test_what_was_begun_again_and_finished_outlives_a_power_cut(tmp_path, monkeypatch, count):
    # Whoever died in this process is dead, although its pid is alive.
    monkeypatch.setattr(liveness, "process_lives", lambda claimant: False)
    monkeypatch.setattr(liveness, "SILENT_SECONDS", 0)
    root, memory = tmp_path / "root", nodes_with(tmp_path, 120, {"a": range(4)})["a"]
    commit(root, 100)
    every = [fault for fault in every_fault(root, memory) if fault.when == "before"]
    for number, fault in enumerate(drawn(every, count)):
        world, flushed = tmp_path / f"world-{number}", tmp_path / f"flushed-{number}"
        shutil.copytree(root, world / "root")
        with watched(Flushes(world, flushed)):
            with on_disk(FaultyDisk(fault)), pytest.raises(Death):
                flush(world / "root", memory)
            assert flush(world / "root", memory).step == 120
        left = survive(world, flushed, tmp_path / f"left-{number}", "everything", random.Random(number))
        found = holds(left / "root")
        assert found.items() > holds(root).items()
        assert found[120][0] == 2


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=WHOLE)])
@pytest.mark.parametrize("whom", ["one", "all"])
def test_kills_at_any_moment_cost_nothing_that_the_others_or_a_next_flush_cannot_bring(tmp_path, whom, kills):
    """With each part on two nodes, any one of the three may go; where all do, they begin again."""
    memories = list(nodes_with(tmp_path, 120, THREE, rows=LARGE).values())
    chance = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    for number in range(kills):
        root = tmp_path / f"root-{number}"
        shutil.copytree(tmp_path / "root", root)
        commit(root, 100)

        def kill(children):
            time.sleep(chance.uniform(0, 0.35))
            for child in children if whom == "all" else [chance.choice(children)]:
                child.kill()

        told = on_all(root, memories, act=kill)
        assert holds(root).keys() - {120} == {100}
        if whom == "all":
            told = on_all(root, memories)
        assert {each.step for each in told.values()} <= {120}
        assert len(told) >= 2
        assert {step: sequence for step, (sequence, _) in holds(root).items()} == {100: 1, 120: 2}
        execute(root, plan_prune(root, None), "cli0badf00d")
        assert not left_in(root)


def test_a_process_that_stands_still_does_not_keep_the_others(tmp_path):
    root = tmp_path / "root"
    memories = nodes_with(tmp_path, 120, {"a": range(4), "b": range(4)}, rows=LARGE)

    class StandingDisk(Disk):
        stood = False

        def rename(self, source, target):
            if target.name.startswith("__") and not self.stood:
                self.stood = True
                os.kill(os.getpid(), signal.SIGSTOP)
            Disk.rename(self, source, target)

    child = FORK.Process(target=on_disk(StandingDisk())(flush), args=(root, memories["b"]))
    child.start()
    assert child.pid is not None
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    try:
        assert flush(root, memories["a"], timeout_seconds=3).committed == 120
    finally:
        os.kill(child.pid, signal.SIGCONT)
        child.join()
    assert child.exitcode == 0
    assert set(holds(root)) == {120}
    assert not left_in(root)
