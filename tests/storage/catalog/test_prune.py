"""Pruning: deletes by plan and says why, never the newest, and clears what the dead left, not what the living use."""

import contextlib
import errno
import itertools
import math
import os
import shutil
import subprocess
import threading
from dataclasses import replace

import pytest

from ckptman.cli.app import main
from ckptman.engine.saving import retention_runner
from ckptman.engine.saving.retention_runner import RetentionRunner
from ckptman.errors import NotFoundError
from ckptman.policies.retention_plan import KeepBest, KeepEvery, KeepLast
from ckptman.runtime.journal import Journal, read_journal
from ckptman.storage.catalog import liveness, reader_lease
from ckptman.storage.catalog import prune as prune_module
from ckptman.storage.catalog.backends.run_store import RunStore
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.liveness import this_process
from ckptman.storage.catalog.orphans import find_leftovers
from ckptman.storage.catalog.pins import pin, read_pin
from ckptman.storage.catalog.prune import execute, plan_prune
from ckptman.storage.catalog.reader_lease import Lease, lease, look
from ckptman.storage.catalog.writer_lock import claim
from ckptman.storage.format.manifest import read_manifest
from ckptman.storage.format.paths import (
    data_name,
    lease_path,
    outcome_path,
    owner_path,
    rollback_path,
    run_folder,
    step_folder,
)
from ckptman.storage.integrity.folder_check import verify_folder
from ckptman.storage.io.durable_files import Disk
from tests.helpers.checkpoints import commit, steps_of
from tests.helpers.faulty_disk import holds, on_disk, rewrite, save

NAME = "step-0000000100"
tags = (f"0123abcd-{number}" for number in itertools.count(1))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Nobody pulls the plug here, and no reader waits for the prune in whose midst it comes."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(reader_lease, "_PASS_SECONDS", 0.0)


@pytest.fixture
def root(tmp_path):
    """Steps 100, 200, 300."""
    for step in (100, 200, 300):
        save(tmp_path / "root", step)
    return tmp_path / "root"


def prune(root, policy=None, **more):
    """Prune by the policy, or keep the last one."""
    return execute(root, plan_prune(root, policy or KeepLast(1)), next(tags), **more)


def clear(root):
    execute(root, plan_prune(root, None), next(tags))


def steps(root):
    return steps_of(Catalog(root).scan())


def names_in(root):
    return sorted(path.name for path in root.iterdir() if path.name != ".ckptman")


def left(root):
    return sorted(each.path.name for each in find_leftovers(root))


def pin_it(folder, why="the paper"):
    pin(folder, why, by="me", time_seconds=1.0)


# ---- by plan ---------------------------------------------------------------------------------------------------------


def test_a_plan_is_carried_out_and_never_takes_the_newest(root):
    save(root, 150)
    plan = plan_prune(root, KeepLast(2) | KeepEvery(200))
    assert [(verdict.record.step, verdict.keep) for verdict in plan.verdicts] == [
        *((100, False), (200, True), (300, True), (150, True))
    ]
    assert plan.freed_bytes == plan.entries[1].require_manifest().total_bytes
    assert steps(root) == [100, 200, 300, 150], "a plan deletes nothing"
    for _ in range(2):
        execute(root, plan, next(tags))
        assert steps(root) == [200, 300, 150]
    prune(root, KeepBest("accuracy", mode="max"))
    clear(root)
    assert steps(root) == [150], "the newest is kept whatever the rules"
    with pytest.raises(NotFoundError):
        plan_prune(root / "nowhere", None)


def test_what_does_not_count_is_neither_counted_nor_touched(root):
    os.truncate(root / "step-0000000300" / "__0_0.distcp", 1)
    rewrite(root / "step-0000000200", format_version=2)
    (root / "step-0000000400").mkdir()
    (root / "step-7.tmp-backup").mkdir()
    prune(root)
    assert sorted(steps(root)) == [100, 200, 300, 400], "the newest that is complete stays, and all that is not"
    assert (root / "step-7.tmp-backup").exists()


def test_folders_that_share_a_sequence_each_get_a_verdict(root):
    for entry in Catalog(root).scan():
        rewrite(entry.path, sequence=1, metrics={"loss": math.nan})
    plan = plan_prune(root, KeepLast(1))
    assert [verdict.record.step for verdict in plan.verdicts] == [100, 200, 300]
    execute(root, plan, next(tags))
    assert steps(root) == [300]


def test_a_tree_with_links_is_removed_without_following_them(root, tmp_path):
    precious, folder = tmp_path / "precious", root / NAME
    save(precious, 1)
    (folder / "link to a folder").symlink_to(precious)
    (folder / "link to a file").symlink_to(precious / "step-0000000001" / "manifest.json")
    (folder / "link to nowhere").symlink_to("nowhere")
    (folder / "below").mkdir()
    (folder / "below" / "up").symlink_to("..")
    os.link(precious / "step-0000000001" / "__0_0.distcp", folder / "second name")
    prune(root)
    assert names_in(root) == ["step-0000000300"]
    assert list(holds(precious)) == [1]


def test_ctrl_c_leaves_the_rest_for_the_next_prune(root):
    for step in range(400, 1100, 100):
        save(root, step)

    def stop(path):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(root, jobs=2, remove=stop)
    prune(root, jobs=3)
    assert steps(root) == [1000]
    assert find_leftovers(root) == []


# ---- leftovers -------------------------------------------------------------------------------------------------------


def litter(root, nonce):
    """One leftover of every kind, made by the owner with this nonce."""
    names = [f"{NAME}.{kind}-{nonce}-{number}" for number, kind in enumerate(("old", "tmp", "trash"))]
    for name in names:
        shutil.copytree(root / NAME, root / name)
    return names


def half_written(root, pid):
    """What a kill leaves in the middle of writing the outcome."""
    path = outcome_path(root).with_name(f"outcome.json.tmp-{pid}-0123abcd")
    path.touch()
    return path


def test_leftovers_say_why_and_how_much(tmp_path):
    save(tmp_path, 100, b"x" * 1000)
    names = litter(tmp_path, "deadbeef")
    (tmp_path / names[1] / data_name(7)).symlink_to(tmp_path)
    bytes_of_one = sum(path.stat().st_size for path in (tmp_path / NAME).iterdir())
    found = find_leftovers(tmp_path)
    assert [each.reason for each in found] == [
        "an earlier save of a step that was saved again",
        "a save that was never committed; its writer is gone",
        "a deletion that was interrupted",
    ]
    assert found[0].bytes == found[2].bytes == bytes_of_one
    assert found[1].bytes < bytes_of_one + 1000, "links are not followed"
    assert plan_prune(tmp_path, None).freed_bytes == sum(each.bytes for each in found)
    clear(tmp_path)
    assert names_in(tmp_path) == [NAME]


def test_leftovers_of_a_live_owner_stay_and_those_of_others_go(tmp_path):
    save(tmp_path, 100)
    run_folder(tmp_path).mkdir()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        start_ticks = liveness._state_and_start(child.pid)[1]
        owner = this_process("run", None).model_copy(update={"pid": child.pid, "start_ticks": start_ticks})
        owner_path(tmp_path, 1).write_text(owner.model_dump_json() + "\n")
        names = [*litter(tmp_path, owner.nonce), half_written(tmp_path, child.pid).name]
        of_others = litter(tmp_path, "deadbeef")
        assert left(tmp_path) == of_others
        clear(tmp_path)
        assert left(tmp_path) == []
        assert names_in(tmp_path) == [NAME, *sorted(names[:3])]
        child.kill()
        child.communicate()
    assert left(tmp_path) == sorted(names)


def test_a_run_clears_its_own_deletions_but_not_its_own_saves(tmp_path):
    """A folder that could not be removed yesterday is tried again; a save may be on its way in another thread."""
    save(tmp_path, 100)
    held = claim(tmp_path, "run", None)
    old, tmp, trash = litter(tmp_path, held.owner.nonce)
    mine, other = half_written(tmp_path, os.getpid()), half_written(tmp_path, os.getpid() + 1)
    assert left(tmp_path) == sorted([old, trash, other.name])
    held.release()
    assert left(tmp_path) == sorted([old, tmp, trash, mine.name, other.name])
    clear(tmp_path)
    assert left(tmp_path) == []
    assert [path.name for path in run_folder(tmp_path).iterdir()] == ["owner-000001.json"]


def test_a_save_that_stands_in_for_its_step_is_no_leftover(tmp_path):
    save(tmp_path, 50)
    aside = "step-0000000100.old-deadbeef"
    save(tmp_path, 100).path.rename(tmp_path / aside)
    assert plan_prune(tmp_path, KeepLast(1)).leftovers == []
    prune(tmp_path)
    assert names_in(tmp_path) == [aside]
    save(tmp_path, 200)
    prune(tmp_path)
    assert names_in(tmp_path) == ["step-0000000200"], "and is deleted as any other"


@pytest.mark.parametrize("kind", ["tmp", "trash", "old"])
def test_leftovers_that_are_no_folders(tmp_path, kind):
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    save(elsewhere, 1)
    save(root, 100)
    (root / f"{NAME}.{kind}-0000000a").symlink_to(elsewhere)
    (root / f"{NAME}.{kind}-0000000b").touch()
    (root / f"{NAME}.{kind}-0000000c").symlink_to("nowhere")
    (root / f"{NAME}.{kind}-0000000d").write_bytes(b"of somebody")
    assert len(plan_prune(root, None).leftovers) == 3
    clear(root)
    assert names_in(root) == [NAME, f"{NAME}.{kind}-0000000d"]
    assert steps(elsewhere) == [1]


@pytest.mark.parametrize("name", ["step-0000000050.trash-{nonce}-1", f"step-0000000050.tmp-copy-{'0123abcd' * 2}"])
def test_what_another_prune_removes_or_a_copy_writes_is_its_own_business(name, tmp_path):
    save(tmp_path, 100)
    draft = name if "copy" in name else ""
    with lease(tmp_path, [draft], what="prune") as nonce:
        (tmp_path / name.format(nonce=nonce)).mkdir()
        assert left(tmp_path) == []
    assert left(tmp_path) == [name.format(nonce=nonce)]


def test_leases_of_the_dead_are_cleared(root):
    run_folder(root).mkdir()
    owner = this_process("", None).model_copy(update={"start_ticks": 1})
    path = lease_path(root, "0a1b2c3d")
    path.write_text(Lease(owner=owner, names=(NAME,), what="verify").model_dump_json())
    assert [each.reason for each in plan_prune(root, None).leftovers] == ["a lease whose reader is gone"]
    clear(root)
    assert not path.exists()


# ---- what a killed prune took ----------------------------------------------------------------------------------------


def take(root, step, nonce="deadbeef"):
    path = root / f"step-0000000{step}"
    path.rename(path.with_name(f"{path.name}.trash-{nonce}-1"))


def test_a_wanted_checkpoint_that_a_killed_prune_took_gets_its_name_back(root):
    pin_it(root / NAME)
    take(root, 100)
    take(root, 200)
    plan = plan_prune(root, KeepLast(1))
    assert [each.path.name for each in plan.strays] == ["step-0000000100.trash-deadbeef-1"]
    assert [each.path.name for each in plan.leftovers] == ["step-0000000200.trash-deadbeef-1"]
    assert "it is pinned" in plan.strays[0].reason
    execute(root, plan, next(tags))
    assert steps(root) == [100, 300]


def test_what_was_taken_after_the_look_for_who_lives_is_no_stray(root, monkeypatch):
    """It may be half removed by the time that it gets its name back."""
    pin_it(root / NAME)

    def late(root, **options):
        found = look(root, **options)
        take(root, 100)
        return found

    monkeypatch.setattr(prune_module, "look", late)
    plan = plan_prune(root, KeepLast(1))
    assert plan.strays == plan.leftovers == []


# ---- what comes between the plan, the look and the deed --------------------------------------------------------------


def save_again(root):
    save(root, 100)
    shutil.rmtree(root / "step-0000000200")


def roll_back(root):
    run_folder(root).mkdir()
    rollback_path(root, 1).write_text("{}")


ROLLED_BACK = "the root was rolled back since the plan was made"


@pytest.mark.parametrize(
    ("change", "spared", "names"),
    [
        (lambda root: pin_it(root / NAME), {1: "pinned: the paper"}, [NAME, "step-0000000300"]),
        (roll_back, {1: ROLLED_BACK, 2: ROLLED_BACK}, [NAME, "step-0000000200", "step-0000000300"]),
        (save_again, {}, [NAME, "step-0000000300"]),
    ],
)
def test_what_changes_after_the_plan_counts(change, spared, names, root):
    plan = plan_prune(root, KeepLast(1))
    change(root)
    done = execute(root, plan, next(tags))
    assert done.spared == spared
    assert names_in(root) == names


class Meanwhile(Disk):
    """Something happens right after a checkpoint has become trash. `one_way`: it cannot be renamed back."""

    def __init__(self, what, one_way=False):
        self._what, self.one_way = what, one_way

    def rename(self, source, target):
        if self.one_way and ".trash-" in source.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))
        super().rename(source, target)
        if (what := self._what) is not None and ".trash-" in target.name:
            self._what = None
            what()


def trash(root):
    (found,) = root.glob(f"{NAME}.trash-*")
    return found


def is_whole(folder):
    return verify_folder(folder, read_manifest(folder), threads=1).good


COMING = {
    "a reader": (
        lambda root, readers: readers.enter_context(lease(root, [NAME], what="restore")),
        "in use by restore",
        [100, 300],
        None,
    ),
    "a pin": (lambda root, _: pin_it(trash(root), "Table 2"), "pinned: Table 2", [100, 300], "Table 2"),
    "a rollback": (
        lambda root, _: main(["rollback", str(root), "--to-step", "200"]),
        ROLLED_BACK,
        [100, 200],
        f"a prune could not put it back: {ROLLED_BACK}",
    ),
}


@pytest.mark.parametrize("coming", COMING)
def test_who_comes_between_the_look_and_the_deed_gets_the_checkpoint_back(coming, root):
    come, reason, stay, _ = COMING[coming]
    before = holds(root)
    with contextlib.ExitStack() as readers:
        with on_disk(Meanwhile(lambda: come(root, readers))):
            done = prune(root)
        assert reason in done.spared[1]
        assert done.deleted == {2} - done.spared.keys()
        assert done.freed_bytes == sum(Catalog(root).entry(100).require_manifest().total_bytes for _ in done.deleted)
        assert holds(root) == {step: before[step] for step in stay}


@pytest.mark.parametrize("coming", COMING)
def test_what_cannot_be_put_back_stays_in_the_trash_with_every_byte_until_it_can(coming, root):
    come, reason, stay, note = COMING[coming]
    before = holds(root)
    with contextlib.ExitStack() as readers:
        disk = readers.enter_context(on_disk(Meanwhile(lambda: come(root, readers), one_way=True)))
        with pytest.raises(OSError, match=f"stays under this name, as it cannot be put back: {reason}") as told:
            prune(root)
        folder = trash(root)
        assert (told.value.errno, told.value.filename) == (errno.EBUSY, str(folder))
        assert sorted(holds(root)) == [step for step in stay if step != 100], "what nobody wanted is gone all the same"
        for _ in range(2):
            with contextlib.suppress(OSError):
                prune(root)
            assert is_whole(folder)
        disk.one_way = False
        prune(root)
        assert holds(root) == {step: before[step] for step in stay}
        assert (found := read_pin(root / NAME)) == note or found.why == note
    if note is None:
        prune(root)
        assert names_in(root) == ["step-0000000300"]


def test_where_the_step_was_saved_again_both_are_there(root):
    before = holds(root)
    with contextlib.ExitStack() as readers:

        def meanwhile():
            save(root, 100, b"another")
            readers.enter_context(lease(root, [NAME], what="restore"))

        # Nothing is renamed over what has the name by now.
        with on_disk(Meanwhile(meanwhile)), pytest.raises(OSError, match="cannot be put back: in use by restore"):
            prune(root)
        now = holds(root)
        assert sorted(now) == [100, 300]
        assert now[100] != before[100]
        prune(root)
        assert is_whole(trash(root))
    prune(root)
    assert holds(root) == {100: now[100]}, "the newest"
    assert names_in(root) == [NAME]


def test_a_run_says_what_cannot_be_put_back_and_goes_on(root):
    journal, claimed = Journal(root / "journal.jsonl"), claim(root, "run", None)
    with contextlib.ExitStack() as readers:
        read = Meanwhile(lambda: readers.enter_context(lease(root, [NAME], what="restore")), one_way=True)
        readers.enter_context(on_disk(read))
        keeper = RetentionRunner(RunStore(root), KeepLast(1), "fail", claimed, journal)
        with pytest.warns(RuntimeWarning, match="could not be pruned.* cannot be put back: in use by restore"):
            keeper.prune()
        save(root, 400)
        keeper.prune()
        assert is_whole(trash(root)), "not even for the one who took it"
        keeper.close()
    assert sorted(holds(root)) == [400]
    journal.close()
    claimed.release()
    told = [(each["event"], each.get("step")) for each in read_journal(root / "journal.jsonl")[0]]
    assert told == [("prune_failed", None), ("pruned", 200), ("pruned", 300)], "of what went besides, and after that"


def test_what_is_removed_while_a_run_plans_is_no_leftover(root, monkeypatch):
    may_remove = threading.Event()

    class Waiting(Meanwhile):
        def remove_tree(self, path):
            may_remove.wait()
            super().remove_tree(path)

    def plan(*arguments, **options):
        found = plan_prune(*arguments, **options)
        if found.leftovers:
            may_remove.set()
            keeper._remover.drain()
        return found

    journal, claimed = Journal(root / "journal.jsonl"), claim(root, "run", None)
    monkeypatch.setattr(retention_runner, "plan_prune", plan)
    keeper = RetentionRunner(RunStore(root), KeepLast(1), "fail", claimed, journal)
    with on_disk(Waiting(None, one_way=True)):
        keeper.prune()
        save(root, 400)
        keeper.prune()
        assert may_remove.is_set()
        keeper.close()
    journal.close()
    claimed.release()
    assert {each["event"] for each in read_journal(root / "journal.jsonl")[0]} == {"pruned"}
    assert names_in(root) == ["journal.jsonl", "step-0000000400"]


def test_a_root_that_is_exchanged_meanwhile_costs_nobody_else_anything(tmp_path, monkeypatch):
    """Who may write to the folder of the root has its name lead to another one, whose checkpoints are the same."""
    victim, mine = tmp_path / "victim", tmp_path / "mine"
    for step in (10, 20, 30):
        commit(victim, step)
    shutil.copytree(victim, mine)

    class Exchanging(Disk):
        """At the first rename, and at each one after it."""

        def rename(self, source, target):
            if not mine.is_symlink():
                os.rename(mine, tmp_path / "moved")  # noqa: PTH104
                mine.symlink_to(victim)
            super().rename(source, target)

    with contextlib.suppress(OSError), on_disk(Exchanging()):
        execute(mine, plan_prune(mine, KeepLast(1)), "x")
    assert sorted(holds(victim)) == [10, 20, 30]

    mine.unlink()
    (tmp_path / "moved").rename(mine)
    plan = plan_prune(mine, KeepLast(1))
    mine.rename(tmp_path / "moved")
    mine.symlink_to(victim)
    with pytest.raises(OSError, match="something else was put in its place since it was looked at"):
        execute(mine, plan, "x")
    assert sorted(holds(victim)) == [10, 20, 30]


@pytest.mark.skipif(os.geteuid() != 0, reason="only the super-user may give a folder to another one")
def test_the_super_user_takes_only_what_belongs_to_the_owner_of_the_root(tmp_path):
    for step in (10, 20, 30):
        commit(tmp_path, step)
    os.chown(tmp_path / step_folder(10), 4321, -1)
    pruned = execute(tmp_path, plan_prune(tmp_path, KeepLast(1)), "x")
    assert pruned.spared == {1: "it belongs to another user than its root"}
    assert sorted(holds(tmp_path)) == [10, 30]


@pytest.mark.skipif(os.geteuid() != 0, reason="only the super-user may give a folder to another one")
@pytest.mark.parametrize("whose", ["their run's", "his own"])
def test_the_super_user_takes_what_was_saved_in_the_root_for_its_owner(tmp_path, whose):
    """In a container he trains in a folder of the user; and a project's folder may be his, with runs of users in it."""
    run_folder(tmp_path).mkdir()
    for step in (10, 20, 30):
        commit(tmp_path, step)
    for path in [tmp_path] if whose == "his own" else [run_folder(tmp_path), *tmp_path.glob("step-*")]:
        os.chown(path, 4321, -1)
    execute(tmp_path, plan_prune(tmp_path, KeepLast(1)), "x")
    assert sorted(holds(tmp_path)) == [30]


@pytest.mark.skipif(os.geteuid() != 0, reason="only the super-user may give a folder to another one")
def test_leftovers_of_another_user_stay_and_are_named(tmp_path):
    commit(tmp_path, 10)
    folder, half = tmp_path / f"{step_folder(5)}.tmp-0123abcd", run_folder(tmp_path) / "notes.tmp-12-0123abcd"
    for path in (folder, run_folder(tmp_path)):
        path.mkdir()
    half.write_text("x")
    for path in (folder, half):
        os.chown(path, 4321, -1)
    plan = plan_prune(tmp_path, None)
    assert plan.leftovers == []
    assert [why for _, why in plan.ignored] == ["it belongs to another user than its root"]
    execute(tmp_path, replace(plan, leftovers=find_leftovers(tmp_path)), "x")
    assert folder.is_dir()
    assert half.exists()


def test_a_root_behind_a_link_is_pruned(tmp_path):
    for step in (10, 20):
        commit(tmp_path / "there", step)
    (tmp_path / "here").symlink_to(tmp_path / "there")
    execute(tmp_path / "here", plan_prune(tmp_path / "here", KeepLast(1)), "x")
    assert sorted(holds(tmp_path / "there")) == [20]
