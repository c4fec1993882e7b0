"""Pruning: deletes by plan and says why, never the newest, and clears what the dead left, not what the living use."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ckptman.catalog import prune as prune_module
from ckptman.catalog import writer_lock as owner_module
from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.catalog import Catalog
from ckptman.catalog.orphans import Leftover, find_leftovers
from ckptman.catalog.pins import pin
from ckptman.catalog.prune import execute, plan_prune
from ckptman.catalog.reader_lease import Lease, lease, look
from ckptman.catalog.writer_lock import claim, this_process
from ckptman.errors import NotFoundError
from ckptman.format.paths import lease_path, outcome_path, owner_path, rollback_path, run_folder
from ckptman.io.durable_files import DISK, Disk
from ckptman.policies.retention import KeepBest, KeepEvery, KeepLast
from tests.helpers.faulty_disk import rewrite, save


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Nobody pulls the plug here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def steps(root):
    return [entry.step for entry in Catalog(root).scan()]


def litter(root, nonce):
    """One leftover of every kind, made by the owner with this nonce."""
    names = [f"step-0000000100.{kind}-{nonce}-{number}" for number, kind in enumerate(("old", "tmp", "trash"))]
    for name in names:
        shutil.copytree(root / "step-0000000100", root / name)
    return names


def left(root):
    return sorted(each.path.name for each in find_leftovers(root))


def owned(root, **differences):
    """Have the root claimed by a process like this one but for `differences`."""
    owner = this_process("run", None).model_copy(update=differences)
    run_folder(root).mkdir(parents=True, exist_ok=True)
    owner_path(root, 1).write_text(owner.model_dump_json() + "\n")
    return owner


# ---- by plan ---------------------------------------------------------------------------------------------------------


def test_each_checkpoint_gets_a_verdict_with_its_reasons(tmp_path):
    for step in (100, 200, 300, 150):
        save(tmp_path, step)
    plan = plan_prune(tmp_path, KeepLast(2) | KeepEvery(200))
    assert [(verdict.record.step, verdict.keep, verdict.reasons) for verdict in plan.verdicts] == [
        (100, False, ("no rule keeps it: older than the last 2, not the first from a multiple of 200 on",)),
        (200, True, ("keep every 200 steps",)),
        (300, True, ("keep last 2 of 2",)),
        (150, True, ("newest", "keep last 1 of 2")),
    ]
    assert plan.freed_bytes == plan.entries[1].require_manifest().total_bytes
    assert steps(tmp_path) == [100, 200, 300, 150], "a plan deletes nothing"
    execute(tmp_path, plan, "0123abcd-1")
    assert steps(tmp_path) == [200, 300, 150]
    execute(tmp_path, plan, "0123abcd-3")
    assert steps(tmp_path) == [200, 300, 150]


def test_the_newest_is_kept_after_a_rollback_whatever_the_rules(tmp_path):
    for step in (100, 200, 300, 50):
        save(tmp_path, step)
    execute(tmp_path, plan_prune(tmp_path, KeepBest("accuracy", mode="max")), "0123abcd-1")
    assert steps(tmp_path) == [50]


def test_without_a_policy_nothing_is_deleted(tmp_path):
    save(tmp_path, 100)
    save(tmp_path, 200)
    execute(tmp_path, plan_prune(tmp_path, None), "0123abcd-1")
    assert steps(tmp_path) == [100, 200]


def test_what_does_not_count_is_neither_counted_nor_touched(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path, step)
    os.truncate(tmp_path / "step-0000000300" / "__0_0.distcp", 1)
    rewrite(tmp_path / "step-0000000200", format_version=2)
    (tmp_path / "step-0000000400").mkdir()
    (tmp_path / "step-7.tmp-backup").mkdir()
    execute(tmp_path, plan_prune(tmp_path, KeepLast(1)), "0123abcd-1")
    assert sorted(steps(tmp_path)) == [100, 200, 300, 400], "the newest that is complete stays, and all that is not"
    assert (tmp_path / "step-7.tmp-backup").exists()


def test_folders_that_share_a_sequence_each_get_a_verdict(tmp_path):
    for step in (100, 200, 300):
        rewrite(save(tmp_path, step).path, sequence=1, metrics={"loss": math.nan})
    plan = plan_prune(tmp_path, KeepLast(1))
    assert [verdict.record.step for verdict in plan.verdicts] == [100, 200, 300]
    execute(tmp_path, plan, "0123abcd-1")
    assert steps(tmp_path) == [300]


def test_a_step_that_was_saved_again_since_the_plan_is_kept(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path, step)
    plan = plan_prune(tmp_path, KeepLast(1))
    newest = save(tmp_path, 100)
    shutil.rmtree(tmp_path / "step-0000000200")
    execute(tmp_path, plan, "0123abcd-1")
    assert steps(tmp_path) == [300, 100]
    assert Catalog(tmp_path).entry(100).sequence == newest.sequence


def test_a_root_that_is_not_there(tmp_path):
    with pytest.raises(NotFoundError):
        plan_prune(tmp_path / "nowhere", None)


# ---- leftovers -------------------------------------------------------------------------------------------------------


def test_leftovers_say_why_and_how_much(tmp_path):
    save(tmp_path, 100, b"x" * 1000)
    names = litter(tmp_path, "deadbeef")
    (tmp_path / names[1] / "link").symlink_to(tmp_path)
    bytes_of_one = sum(path.stat().st_size for path in (tmp_path / "step-0000000100").iterdir())
    found = find_leftovers(tmp_path)
    assert [each.reason for each in found] == [
        "an earlier save of a step that was saved again",
        "a save that was never committed; its writer is gone",
        "a deletion that was interrupted",
    ]
    assert found[0].bytes == found[2].bytes == bytes_of_one
    assert found[1].bytes < bytes_of_one + 1000, "links are not followed"
    plan = plan_prune(tmp_path, None)
    assert plan.freed_bytes == sum(each.bytes for each in found)
    execute(tmp_path, plan, "0123abcd-1")
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000100"]


def test_leftovers_of_a_dead_owner_go(tmp_path):
    save(tmp_path, 100)
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as child:
        pass
    owner = owned(tmp_path, pid=child.pid)
    names = litter(tmp_path, owner.nonce)
    assert left(tmp_path) == sorted(names)


def test_leftovers_of_a_live_owner_stay_and_those_of_others_go(tmp_path):
    save(tmp_path, 100)
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = owner_module._state_and_start(child.pid)
        assert found is not None
        owner = owned(tmp_path, pid=child.pid, start_ticks=found[1])
        litter(tmp_path, owner.nonce)
        half_written(tmp_path, child.pid)
        dead = litter(tmp_path, "deadbeef")
        assert left(tmp_path) == sorted(dead)
        execute(tmp_path, plan_prune(tmp_path, None), "0123abcd-1")
        assert left(tmp_path) == []
        assert len(list(tmp_path.iterdir())) == 1 + 1 + 3
        child.kill()
        child.communicate()
    assert len(left(tmp_path)) == 3 + 1


def test_a_run_clears_its_own_deletions_but_not_its_own_saves(tmp_path):
    """A folder that could not be removed yesterday is tried again; a save may be on its way in another thread."""
    save(tmp_path, 100)
    held = claim(tmp_path, "run", None)
    old, tmp, trash = litter(tmp_path, held.owner.nonce)
    mine, other = half_written(tmp_path, os.getpid()), half_written(tmp_path, os.getpid() + 1)
    assert left(tmp_path) == sorted([old, trash, other.name])
    held.release()
    assert left(tmp_path) == sorted([old, tmp, trash, mine.name, other.name])
    execute(tmp_path, plan_prune(tmp_path, None), "0123abcd-1")
    assert left(tmp_path) == []
    assert sorted(path.name for path in run_folder(tmp_path).iterdir()) == ["owner-000001.json"]


def half_written(root, pid):
    """What a kill leaves in the middle of writing the outcome."""
    path = outcome_path(root).with_name(f"outcome.json.tmp-{pid}-0123abcd")
    path.touch()
    return path


def test_a_save_that_stands_in_for_its_step_is_no_leftover(tmp_path):
    save(tmp_path, 50)
    path = save(tmp_path, 100).path
    path.rename(path.with_name("step-0000000100.old-deadbeef"))
    plan = plan_prune(tmp_path, KeepLast(1))
    assert plan.leftovers == []
    execute(tmp_path, plan, "0123abcd-1")
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000100.old-deadbeef"]
    save(tmp_path, 200)
    execute(tmp_path, plan_prune(tmp_path, KeepLast(1)), "0123abcd-2")
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000200"], "and is deleted as any other"


@pytest.mark.parametrize("kind", ["tmp", "trash", "old"])
def test_leftovers_that_are_no_folders(tmp_path, kind):
    elsewhere = tmp_path / "elsewhere"
    save(elsewhere, 1)
    root = tmp_path / "root"
    save(root, 100)
    (root / f"step-0000000100.{kind}-0000000a").symlink_to(elsewhere)
    (root / f"step-0000000100.{kind}-0000000b").write_bytes(b"1234")
    (root / f"step-0000000100.{kind}-0000000c").symlink_to("nowhere")
    plan = plan_prune(root, None)
    assert plan.leftovers[1].bytes == 4
    execute(root, plan, "0123abcd-1")
    assert [path.name for path in root.iterdir()] == ["step-0000000100"]
    assert steps(elsewhere) == [1]


# ---- removing --------------------------------------------------------------------------------------------------------


def test_a_tree_with_links_is_removed_without_following_them(tmp_path):
    precious = tmp_path / "precious"
    save(precious, 1)
    root = tmp_path / "root"
    folder = save(root, 100).path
    (folder / "link to a folder").symlink_to(precious)
    (folder / "link to a file").symlink_to(precious / "step-0000000001" / "manifest.json")
    (folder / "link to nowhere").symlink_to("nowhere")
    (folder / "below").mkdir()
    (folder / "below" / "up").symlink_to("..")
    os.link(precious / "step-0000000001" / "__0_0.distcp", folder / "second name")
    save(root, 200)
    execute(root, plan_prune(root, KeepLast(1)), "0123abcd-1")
    assert [path.name for path in root.iterdir()] == ["step-0000000200"]
    assert steps(precious) == [1]
    assert Catalog(precious).entry(1).complete


def test_two_who_remove_the_same_tree(tmp_path):
    for number in range(20):
        tree = tmp_path / str(number)
        for folder in range(5):
            (tree / str(folder)).mkdir(parents=True)
            for file in range(20):
                (tree / str(folder) / str(file)).touch()
        start = threading.Barrier(2)
        errors = []

        def remove(tree, start, errors):
            start.wait()
            try:
                DISK.remove_tree(tree)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=remove, args=(tree, start, errors)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert not tree.exists()


def test_an_error_while_removing_is_told(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").touch()

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(PermissionError):
        DISK.remove_tree(folder)


def test_making_folders(tmp_path, monkeypatch):
    class Counting(Disk):
        synced: list[Path] = []  # noqa: RUF012 one test

        def sync_folder(self, path):
            self.synced.append(path)

    disk = Counting()
    disk.make_folders(tmp_path / "a" / "b")
    assert disk.synced == [tmp_path, tmp_path / "a"]
    disk.make_folders(tmp_path / "a" / "b")
    assert len(disk.synced) == 2
    monkeypatch.chdir(tmp_path)
    disk.make_folders(Path("c/d"))
    disk.make_folders(Path())
    assert (tmp_path / "c" / "d").is_dir()
    # A mount that is gone shows nothing at all, up to the top.
    monkeypatch.setattr(Path, "exists", lambda path: False)
    disk.make_folders(tmp_path / "e" / "f")
    assert (tmp_path / "e" / "f").is_dir()


def test_a_file_is_made_once(tmp_path):
    DISK.create_file(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        DISK.create_file(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"


def test_a_file_that_could_not_be_written_is_not_there(tmp_path, monkeypatch):
    def full(fd, data):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        DISK.create_file(tmp_path / "file", b"first")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_refuses_to_be_flushed(tmp_path, monkeypatch):
    codes = iter([22, 95, 38, 5])

    def refuse(fd):
        raise OSError(code := next(codes), os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    for _ in range(3):
        DISK.sync_folder(tmp_path)
    with pytest.raises(OSError, match="Input/output error"):
        DISK.sync_folder(tmp_path)


def test_files_are_flushed_before_the_name_that_makes_them_count(tmp_path, monkeypatch):
    """The order that a power cut needs, of what really reaches the system."""
    log = []
    rename = os.rename

    def fsync(fd):
        log.append(f"flush {Path(f'/proc/self/fd/{fd}').readlink().name}")

    def note(source, target):
        log.append(f"rename to {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", note)
    root = tmp_path / "root"
    save(root, 100, tag="a")
    assert log == [
        f"flush {tmp_path.name}",  # by who made the root, and by who uses it: either may have been killed
        f"flush {tmp_path.name}",
        *("flush __0_0.distcp", "flush blocks-00000.bin", "flush __1_0.distcp", "flush blocks-00001.bin"),
        *("flush chunks.bin", "flush index.json"),
        *("flush manifest.json", "flush step-0000000100.tmp-a"),
        "rename to step-0000000100",
        "flush root",
    ]
    del log[:]
    LocalBackend(root).remove(root / "step-0000000100", "step-0000000100", "b")
    assert log == ["rename to step-0000000100.trash-b", "flush root"]
    assert find_leftovers(root) == []
    assert Leftover(root, None, "", 0).step is None


# ---- readers, pins and prunes that are killed ------------------------------------------------------------------------


class Meanwhile(Disk):
    """Has something happen right after the first rename: what comes between a prune's look and its deed."""

    def __init__(self, what):
        self._what = what

    def rename(self, source, target):
        super().rename(source, target)
        if (what := self._what) is not None:
            self._what = None
            what()


def test_a_reader_that_comes_between_the_look_and_the_deed_gets_its_checkpoint_back(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path, step)
    with contextlib.ExitStack() as readers:
        disk = Meanwhile(lambda: readers.enter_context(lease(tmp_path, ["step-0000000100"], what="restore")))
        done = execute(tmp_path, plan_prune(tmp_path, KeepLast(1)), "0123abcd-1", disk)
        assert steps(tmp_path) == [100, 300]
        assert "in use by restore" in done.spared[1]
        assert done.deleted == {2}
        assert done.freed_bytes == Catalog(tmp_path).entry(300).require_manifest().total_bytes
    execute(tmp_path, plan_prune(tmp_path, KeepLast(1)), "0123abcd-1")
    assert steps(tmp_path) == [300]


def test_a_pin_that_comes_between_the_plan_and_the_deed_counts(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path, step)
    plan = plan_prune(tmp_path, KeepLast(1))
    pin(tmp_path / "step-0000000100", "late", by="me", time_seconds=1.0, disk=DISK)
    done = execute(tmp_path, plan, "0123abcd-1")
    assert steps(tmp_path) == [100, 300]
    assert done.spared == {1: "pinned: late"}


def test_a_rollback_that_comes_between_the_plan_and_the_deed_counts(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path, step)
    plan = plan_prune(tmp_path, KeepLast(1))
    run_folder(tmp_path).mkdir(exist_ok=True)
    rollback_path(tmp_path, 1).write_text("{}")
    done = execute(tmp_path, plan, "0123abcd-1")
    assert done.deleted == set()
    assert "rolled back" in done.spared[1]


def test_a_wanted_checkpoint_that_a_killed_prune_took_gets_its_name_back(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path, step)
    pin(tmp_path / "step-0000000100", "the paper", by="me", time_seconds=1.0, disk=DISK)
    for step in (100, 200):
        path = tmp_path / f"step-0000000{step}"
        path.rename(path.with_name(f"{path.name}.trash-deadbeef-1"))
    plan = plan_prune(tmp_path, KeepLast(1))
    assert [each.path.name for each in plan.strays] == ["step-0000000100.trash-deadbeef-1"]
    assert [each.path.name for each in plan.leftovers] == ["step-0000000200.trash-deadbeef-1"]
    assert "it is pinned" in plan.strays[0].reason
    execute(tmp_path, plan, "0123abcd-1")
    assert steps(tmp_path) == [100, 300]


def test_what_was_taken_after_the_look_for_who_lives_is_no_stray(tmp_path, monkeypatch):
    """It may be half removed by the time that it gets its name back."""
    for step in (100, 200):
        save(tmp_path, step)
    pin(tmp_path / "step-0000000100", "the paper", by="me", time_seconds=1.0, disk=DISK)

    def late(root, *, wait):
        found = look(root, wait=wait)
        path = root / "step-0000000100"
        path.rename(path.with_name(f"{path.name}.trash-feedbeef-1"))
        return found

    monkeypatch.setattr(prune_module, "look", late)
    plan = plan_prune(tmp_path, KeepLast(1))
    assert plan.strays == plan.leftovers == []


def test_what_another_prune_is_removing_is_its_own_business(tmp_path):
    save(tmp_path, 100)
    with lease(tmp_path, [], what="prune") as nonce:
        (tmp_path / f"step-0000000050.trash-{nonce}-1").mkdir()
        assert left(tmp_path) == []
    assert left(tmp_path) == [f"step-0000000050.trash-{nonce}-1"]


def test_leases_of_the_dead_are_cleared(tmp_path):
    save(tmp_path, 100)
    run_folder(tmp_path).mkdir(exist_ok=True)
    owner = this_process("", None).model_copy(update={"start_ticks": 1})
    path = lease_path(tmp_path, "0a1b2c3d")
    path.write_text(Lease(owner=owner, names=("step-0000000100",), what="verify").model_dump_json())
    plan = plan_prune(tmp_path, None)
    assert [each.reason for each in plan.leftovers] == ["a lease whose reader is gone"]
    execute(tmp_path, plan, "0123abcd-1")
    assert not path.exists()


def test_ctrl_c_leaves_the_rest_for_the_next_prune(tmp_path):
    for step in range(100, 1100, 100):
        save(tmp_path, step)

    def stop(path):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path, plan_prune(tmp_path, KeepLast(1)), "0123abcd-1", jobs=2, remove=stop)
    execute(tmp_path, plan_prune(tmp_path, KeepLast(1)), "0123abcd-3", jobs=3)
    assert steps(tmp_path) == [1000]
    assert find_leftovers(tmp_path) == []
