"""Going back to an earlier step: what is newer stays on disk, is named, and nobody restores it unasked."""

import contextlib
import json
import os
import shutil
from functools import partial

import pytest
import torch

import ckptman
from ckptman.cli.app import main
from ckptman.errors import BusyError, ConfigError, CorruptError, NotFoundError, RootError
from ckptman.policies.retention_plan import KeepLast
from ckptman.runtime.journal import read_journal
from ckptman.runtime.outcome import highest_attempt
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.prune import execute as prune
from ckptman.storage.catalog.prune import plan_prune
from ckptman.storage.catalog.rollback import execute, plan_rollback, plan_undo
from ckptman.storage.catalog.rollback_records import read_abandoned, read_rollbacks
from ckptman.storage.catalog.verified import remember_damage
from ckptman.storage.catalog.writer_lock import claim
from ckptman.storage.format.manifest import Nonfinite
from ckptman.storage.format.paths import journal_path, rollback_path, run_folder
from tests.helpers.checkpoints import commit, steps_of
from tests.helpers.faulty_disk import Death, FaultyDisk, faults, on_disk, save


@pytest.fixture
def root(tmp_path):
    """Steps 10 to 50."""
    for step in (10, 20, 30, 40, 50):
        commit(tmp_path / "run", step, metrics={"loss": 1 / step})
    return tmp_path / "run"


def back(root, step, why=""):
    return execute(
        root,
        partial(plan_rollback, root, step),
        why=why,
        by="me@here",
        time_seconds=1.0,
        highest=highest_attempt,
    )


def undo(root):
    return execute(root, partial(plan_undo, root), why="", by="me@here", time_seconds=2.0, highest=highest_attempt)


def steps(root, **more):
    return steps_of(Catalog(root).scan(**more))


def test_what_is_newer_is_abandoned_and_stays_where_it_is(root):
    before = sorted(path.name for path in root.iterdir())
    assert back(root, 50).entries == []
    [left] = read_rollbacks(root).values()
    assert left.abandoned == [], "but nodes may have newer ones in memory"
    assert steps_of(back(root, 20, "the loss exploded").entries) == [30, 40, 50]
    assert steps(root) == [10, 20]
    assert sorted(path.name for path in root.iterdir() if path.name != ".ckptman") == before
    left = {entry.step: entry.abandoned for entry in Catalog(root).scan(abandoned=True)}
    assert left == {10: "", 20: "", **dict.fromkeys((30, 40, 50), "by the rollback to step 20 (the loss exploded)")}
    assert Catalog(root).entry(40).abandoned
    (_, rollback) = read_rollbacks(root).values()
    assert (rollback.to_step, rollback.by, [each.sequence for each in rollback.abandoned]) == (20, "me@here", [3, 4, 5])


def test_it_is_the_order_of_commits_that_counts(tmp_path):
    for step, sequence in ((10, 1), (90, 2), (20, 3), (30, 4)):
        commit(tmp_path, step, sequence=sequence)
    assert steps_of(back(tmp_path, 20).entries) == [30]
    assert steps(tmp_path) == [10, 90, 20]


WEIGHTS = Nonfinite(tensors=("model.weight",))


def test_a_step_that_no_restore_would_take_is_refused(root, capsys):
    for step in (60, 70):
        commit(root, step, nonfinite=WEIGHTS)
    for step in (60, 70):
        assert main(["rollback", str(root), "--to-step", str(step)]) == 2
        told = capsys.readouterr().err
        assert f"step {step} is not finite (NaN or infinity in tensor model.weight), so a restore would" in told
        assert "go back to step 50: roll back to that one" in told
    assert read_rollbacks(root) == {}
    back(root, 50)
    assert main(["rollback", str(root), "--undo"]) == 0
    told = "goes on from the newest finite one, if there is any: step 70 is then the newest, and not finite (tensor"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("finite", ["none", "damaged"])
def test_where_none_is_finite_and_whole_any_will_do(tmp_path, finite):
    for step in (10, 20):
        entry = commit(tmp_path, step, nonfinite=WEIGHTS if finite == "none" else None)
        if finite == "damaged":
            remember_damage(entry.path, entry.require_manifest(), "a block")
    for step in (60, 70):
        commit(tmp_path, step, nonfinite=WEIGHTS)
    assert steps_of(back(tmp_path, 60).entries) == [70]


def test_a_step_that_is_saved_again_takes_nothing_away(root):
    back(root, 20)
    lost = Catalog(root).entry(30).identity
    commit(root, 30, rows=4)
    assert steps(root) == [10, 20, 30]
    entries = Catalog(root).scan(abandoned=True)
    assert steps_of(entries) == [10, 20, 30, 40, 50, 30]
    assert [bool(entry.abandoned) for entry in entries] == [False, False, True, True, True, False]
    aside = entries[2]
    assert (aside.identity, aside.complete) == (lost, True)
    assert aside.path.name.startswith("step-0000000030.abandoned-")
    assert not Catalog(root).entry(30).abandoned
    assert Catalog(root).leftovers() == []
    commit(root, 30, rows=5)
    assert steps(root, abandoned=True) == [10, 20, 30, 40, 50, 30], "the good one of before is not kept"


def test_numbers_that_come_again_abandon_nothing(root):
    back(root, 20)
    for entry in Catalog(root).scan(abandoned=True)[2:]:
        shutil.rmtree(entry.path)
    again = commit(root, 30, rows=4, sequence=3)
    assert steps(root) == [10, 20, 30]
    assert again.identity not in read_abandoned(root)


def test_retention_counts_what_was_abandoned_for_nothing(root):
    back(root, 20, "spike")
    plan = plan_prune(root, KeepLast(2))
    verdicts = {verdict.record.step: verdict for verdict in plan.verdicts}
    assert [step for step, verdict in verdicts.items() if verdict.keep] == [10, 20]
    assert all("rollback to step 20 (spike)" in "; ".join(verdicts[step].reasons) for step in (30, 40, 50))
    prune(root, plan, "0123abcd-1")
    assert steps(root, abandoned=True) == [10, 20]
    commit(root, 30)
    assert steps(root) == [10, 20, 30]


def test_an_undo_brings_them_back(root):
    back(root, 40)
    back(root, 20)
    with pytest.raises(NotFoundError, match="step 40 was abandoned by the rollback to step 20"):
        plan_rollback(root, 40)
    assert undo(root).target.step == 40
    assert steps(root) == [10, 20, 30, 40]
    assert undo(root).target.step == 50
    assert steps(root) == [10, 20, 30, 40, 50]
    with pytest.raises(NotFoundError, match="no rollback to undo"):
        plan_undo(root)
    assert len(read_rollbacks(root)) == 4


def test_an_undo_does_not_take_the_place_of_what_was_saved_since(root):
    back(root, 20)
    commit(root, 30, rows=4)
    for _ in range(2):
        with pytest.raises(ConfigError, match="step 30 was saved again"):
            plan_undo(root)
        shutil.rmtree(root / "step-0000000030", ignore_errors=True)
    assert steps(root) == [10, 20]


def test_what_cannot_be(root):
    with pytest.raises(NotFoundError, match="no checkpoint of step 35; the latest there are: 10, 20, 30, 40, 50"):
        plan_rollback(root, 35)
    with pytest.raises(NotFoundError, match="no checkpoint root"):
        plan_rollback(root / "nowhere", 35)
    (root / "step-0000000030" / "__0_0.distcp").unlink()
    with pytest.raises(CorruptError, match="not a complete checkpoint"):
        plan_rollback(root, 30)
    assert steps_of(plan_rollback(root, 20).entries) == [40, 50]
    held = claim(root, "run", None)
    with pytest.raises(BusyError):
        back(root, 20)
    held.release()
    assert steps_of(back(root, 20).entries) == [40, 50]


@pytest.mark.parametrize("text", [b"", b"{", b'{"format_version": 1}', b"\xff", b"[]", None])
def test_a_rollback_that_cannot_be_read_is_no_reason_to_restore_what_it_left(root, text):
    back(root, 20)
    path = rollback_path(root, 1)
    if text is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(text)
    with pytest.raises((CorruptError, RootError), match=r"rollback-000001\.json"):
        Catalog(root).scan()
    path.rename(path.with_name("rollback-1.json"))  # not one of ours
    assert steps(root) == [10, 20, 30, 40, 50]


def after_each_fault(tmp_path, act, before=lambda root: None):
    """Act on a disk that fails at one operation, on a root of steps 10, 20, 30, until no fault is reached; after each
    yield the root. `before` works."""
    for number, fault in enumerate(faults()):
        root, disk = tmp_path / str(number), FaultyDisk(fault)
        for step in (10, 20, 30):
            save(root, step, b"%d" % step)
        before(root)
        with contextlib.suppress(Death, OSError), on_disk(disk):
            act(root)
        yield root
        if not disk.struck:
            break


def test_a_death_at_any_operation_leaves_all_or_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    outcomes = []
    for root in after_each_fault(tmp_path, lambda root: back(root, 10)):
        assert steps(root, abandoned=True) == [10, 20, 30]
        outcomes.append(steps(root))
        for claimed in run_folder(root).glob("owner-*"):
            claimed.unlink()  # whoever died is this very process, which looks alive
        back(root, 10)
        assert steps(root) == [10]
    assert [10] in outcomes
    assert [10, 20, 30] in outcomes
    assert all(each in ([10], [10, 20, 30]) for each in outcomes)


def test_a_death_while_the_step_is_saved_again_keeps_what_was_left(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    lost = []

    def leave(root):
        lost[:] = [Catalog(root).entry(step).identity for step in (20, 30)]
        back(root, 10)

    for root in after_each_fault(tmp_path, lambda root: save(root, 20, b"again"), leave):
        entries = Catalog(root).scan(abandoned=True)
        assert [entry.identity for entry in entries if entry.abandoned and entry.complete] == lost
        assert steps_of(entry for entry in entries if not entry.abandoned) in ([10], [10, 20])


def run(root, until, step=None, every=10):
    """A run that counts; what it has counted to is checked against the step it starts from."""
    state = {"count": {"n": torch.zeros(1)}}
    with ckptman.Checkpointer(root, state, save_policy=ckptman.EverySteps(every), deadline=None) as checkpointer:
        start = checkpointer.restore(step=step)
        assert state["count"]["n"].item() == start
        for now in range(start + 1, until + 1):
            state["count"]["n"] += 1
            checkpointer.step(now)
    return start


@pytest.fixture
def ckptman_says(capsys):
    """Run a command on a root; return its output."""

    def run(command, root, *options, code=0):
        capsys.readouterr()
        assert main([command, str(root), *options]) == code
        out, err = capsys.readouterr()
        return err if code else out

    return run


def test_the_next_run_goes_on_from_there(tmp_path, ckptman_says):
    root, odd = tmp_path / "run", os.fsdecode(b"spike \xff")
    run(root, 50)
    told = ckptman_says("rollback", root, "--to-step", "20", "--why", odd, "--dry-run")
    assert "the next restore would go on from step 20" in told
    assert run(root, 50) == 50
    told = ckptman_says("rollback", root, "--to-step", "20", "--why", odd)
    assert [line.split()[:3] for line in told.splitlines()[1:4]] == [["abandon", "step", str(n)] for n in (30, 40, 50)]
    assert told.endswith("The next restore goes on from step 20.\n")
    told = ckptman_says("list", root)
    assert told.count("abandoned by the rollback to step 20 (spike") == 3
    assert "the newest is of step 20. 3 were abandoned." in told
    assert run(root, 40) == 20
    assert steps(root) == [10, 20, 30, 40]
    assert len(steps(root, abandoned=True)) == 7
    assert run(root, 40) == 40
    listed = json.loads(ckptman_says("list", root, "--json"))["checkpoints"]
    assert [(each["step"], each["abandoned"] is None) for each in listed][-2:] == [(30, True), (40, True)]
    sequences = [each["sequence"] for each in listed]
    assert sequences == sorted(set(sequences))
    (event,) = [each for each in read_journal(journal_path(root))[0] if each["event"] == "rolled_back"]
    assert (event["step"], event["steps"]) == (20, [30, 40, 50])
    assert event["why"].startswith("spike")


def test_one_run_can_start_elsewhere_without_a_rollback(tmp_path):
    root = tmp_path / "run"
    run(root, 50)
    assert run(root, 25, step=20) == 20
    assert read_rollbacks(root) == {}
    assert steps(root) == [10, 20, 30, 40, 50, 25]  # each run saves where it ends
    assert run(root, 50) == 25
    back(root, 20)
    assert run(root, 40, step=40) == 40  # asked for by its step, what was abandoned is still there


def test_the_command_says_what_is_wrong(root, ckptman_says):
    assert "--to-step N" in ckptman_says("rollback", root, code=2)
    ckptman_says("rollback", root, "--to-step", "20", "--undo", code=2)
    ckptman_says("rollback", root, "--to-step", "21", code=3)
    ckptman_says("rollback", root, "--undo", code=3)
    assert not run_folder(root).exists()
    told = ckptman_says("rollback", root, "--to-step", "50")
    assert told.startswith("Nothing on disk to abandon: step 50 is the newest checkpoint there. What nodes have in")
    told = json.loads(ckptman_says("rollback", root, "--to-step", "40", "--json"))
    assert (told["step"], [each["step"] for each in told["abandoned"]]) == (40, [50])
    assert "abandoned      by the rollback to step 40" in ckptman_says("show", root, "--step", "50")
    told = ckptman_says("rollback", root, "--undo")
    assert "bring back  step 50" in told
    assert told.endswith("The next restore goes on from step 50.\n")
