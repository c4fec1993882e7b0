"""Going back to an earlier step: what is newer stays on disk, is named, and nobody restores it unasked."""

import json
import os
import shutil
from functools import partial

import pytest
import torch

import ckptman
from ckptman.catalog.catalog import Catalog
from ckptman.catalog.prune import execute as prune
from ckptman.catalog.prune import plan_prune
from ckptman.catalog.rollback import execute, plan_rollback, plan_undo
from ckptman.catalog.rollback_records import read_abandoned, read_rollbacks
from ckptman.catalog.verified import remember_damage
from ckptman.catalog.writer_lock import claim
from ckptman.cli.app import main
from ckptman.errors import BusyError, ConfigError, CorruptError, NotFoundError, RootError
from ckptman.format.manifest import Nonfinite
from ckptman.format.paths import journal_path, rollback_path, run_folder
from ckptman.io.durable_files import DISK
from ckptman.policies.retention import KeepLast
from ckptman.runtime.journal import read_journal
from tests.helpers.checkpoints import commit
from tests.helpers.faulty_disk import Death, FaultyDisk, faults
from tests.helpers.faulty_disk import save as save_bytes


@pytest.fixture
def root(tmp_path):
    """Steps 10 to 50."""
    for step in (10, 20, 30, 40, 50):
        commit(tmp_path / "run", step, metrics={"loss": 1 / step})
    return tmp_path / "run"


def back(root, step, why="", disk=DISK):
    return execute(root, partial(plan_rollback, root, step), why=why, by="me@here", time_seconds=1.0, disk=disk)


def undo(root):
    return execute(root, partial(plan_undo, root), why="", by="me@here", time_seconds=2.0)


def steps(root, **more):
    return [entry.step for entry in Catalog(root).scan(**more)]


def test_what_is_newer_is_abandoned_and_stays_where_it_is(root):
    before = sorted(path.name for path in root.iterdir())
    change = back(root, 20, "the loss exploded")
    assert [entry.step for entry in change.entries] == [30, 40, 50]
    assert steps(root) == [10, 20]
    assert steps(root, abandoned=True) == [10, 20, 30, 40, 50]
    assert sorted(path.name for path in root.iterdir() if path.name != ".ckptman") == before
    left = {entry.step: entry.abandoned for entry in Catalog(root).scan(abandoned=True)}
    assert left == {10: "", 20: "", **dict.fromkeys((30, 40, 50), "by the rollback to step 20 (the loss exploded)")}
    assert Catalog(root).entry(40).abandoned
    (rollback,) = read_rollbacks(root).values()
    assert (rollback.to_step, rollback.by, [each.sequence for each in rollback.abandoned]) == (20, "me@here", [3, 4, 5])


def test_a_rollback_to_the_newest_changes_nothing(root):
    assert back(root, 50).entries == []
    assert read_rollbacks(root) == {}


def test_a_step_that_no_restore_would_take_is_refused(root, capsys):
    for step in (60, 70):
        commit(root, step, nonfinite=Nonfinite(tensors=("model.weight",)))
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


def test_a_finite_one_that_is_damaged_does_not_count(root):
    for entry in Catalog(root).scan():
        remember_damage(entry.path, entry.require_manifest(), "a block")
    commit(root, 60, nonfinite=Nonfinite(tensors=("model.weight",)))
    assert back(root, 60).entries == []


def test_where_none_is_finite_any_will_do(tmp_path):
    for step in (10, 20):
        commit(tmp_path, step, nonfinite=Nonfinite(tensors=("model.weight",)))
    assert [entry.step for entry in back(tmp_path, 10).entries] == [20]


def test_it_is_the_order_of_commits_that_counts(tmp_path):
    for step, sequence in ((10, 1), (90, 2), (20, 3), (30, 4)):
        commit(tmp_path, step, sequence=sequence)
    assert [entry.step for entry in back(tmp_path, 20).entries] == [30]
    assert steps(tmp_path) == [10, 90, 20]


def test_a_step_that_is_saved_again_takes_nothing_away(root):
    back(root, 20)
    lost = {entry.step: entry.identity for entry in Catalog(root).scan(abandoned=True)}
    commit(root, 30, rows=4)
    assert steps(root) == [10, 20, 30]
    entries = Catalog(root).scan(abandoned=True)
    assert [(entry.step, bool(entry.abandoned)) for entry in entries] == [
        *((10, False), (20, False)),
        *((30, True), (40, True), (50, True)),
        (30, False),
    ]
    aside = entries[2]
    assert aside.identity == lost[30]
    assert aside.path.name.startswith("step-0000000030.abandoned-")
    assert aside.complete
    assert not Catalog(root).entry(30).abandoned
    assert Catalog(root).leftovers() == []
    # Saved once more, the good one of before is not kept.
    commit(root, 30, rows=5)
    assert [entry.step for entry in Catalog(root).scan(abandoned=True)] == [10, 20, 30, 40, 50, 30]


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
    verdicts = {verdict.record.step: (verdict.keep, verdict.reasons) for verdict in plan.verdicts}
    assert {step for step, (keep, _) in verdicts.items() if keep} == {10, 20}
    assert all("rollback to step 20 (spike)" in "; ".join(verdicts[step][1]) for step in (30, 40, 50))
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
    with pytest.raises(ConfigError, match="step 30 was saved again"):
        plan_undo(root)
    shutil.rmtree(root / "step-0000000030")
    with pytest.raises(ConfigError, match="step 30 was saved again"):
        plan_undo(root)
    assert steps(root) == [10, 20]


def test_what_cannot_be(root):
    with pytest.raises(NotFoundError, match="no checkpoint of step 35; the latest there are: 10, 20, 30, 40, 50"):
        plan_rollback(root, 35)
    with pytest.raises(NotFoundError, match="no checkpoint root"):
        plan_rollback(root / "nowhere", 35)
    (root / "step-0000000030" / "__0_0.distcp").unlink()
    with pytest.raises(CorruptError, match="not a complete checkpoint"):
        plan_rollback(root, 30)
    assert [entry.step for entry in plan_rollback(root, 20).entries] == [40, 50]


def test_not_while_a_run_is_alive(root):
    held = claim(root, "run", None)
    try:
        with pytest.raises(BusyError):
            back(root, 20)
    finally:
        held.release()
    assert steps(root) == [10, 20, 30, 40, 50]
    assert [entry.step for entry in back(root, 20).entries] == [30, 40, 50]


@pytest.mark.parametrize("text", [b"", b"{", b'{"format_version": 1}', b"\xff", b"[]"])
def test_a_rollback_that_cannot_be_read_is_no_reason_to_restore_what_it_left(root, text):
    back(root, 20)
    rollback_path(root, 1).write_bytes(text)
    with pytest.raises(CorruptError, match=r"rollback-000001\.json"):
        Catalog(root).scan()
    rollback_path(root, 1).unlink()
    rollback_path(root, 1).mkdir()
    with pytest.raises((CorruptError, RootError), match=r"rollback-000001\.json"):
        Catalog(root).scan()
    rollback_path(root, 1).rmdir()
    (run_folder(root) / "rollback-1.json").write_bytes(text)  # not one of ours
    assert steps(root) == [10, 20, 30, 40, 50]


def test_a_death_at_any_operation_leaves_all_or_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    outcomes = set()

    def once(fault):
        root = tmp_path / "run"
        shutil.rmtree(root, ignore_errors=True)
        for step in (10, 20, 30):
            save_bytes(root, step, b"%d" % step)
        disk = FaultyDisk(fault)
        try:
            back(root, 10, disk=disk)
        except (Death, OSError):
            pass
        assert steps(root, abandoned=True) == [10, 20, 30]
        left = steps(root)
        assert left in ([10], [10, 20, 30])
        outcomes.add(tuple(left))
        for claimed in run_folder(root).glob("owner-*"):
            claimed.unlink()  # whoever died is this very process, which looks alive
        back(root, 10)
        assert steps(root) == [10]
        return disk.struck

    for fault in faults():
        if not once(fault):
            break
    assert len(outcomes) == 2


def test_a_death_while_the_step_is_saved_again_keeps_what_was_left(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    for fault in faults():
        root = tmp_path / "run"
        shutil.rmtree(root, ignore_errors=True)
        for step in (10, 20):
            save_bytes(root, step, b"%d" % step)
        lost = Catalog(root).entry(20).identity
        back(root, 10)
        disk = FaultyDisk(fault)
        try:
            save_bytes(root, 20, b"again", disk)
        except (Death, OSError):
            pass
        entries = Catalog(root).scan(abandoned=True)
        assert [entry.identity for entry in entries if entry.abandoned and entry.complete] == [lost]
        assert [entry.step for entry in entries if not entry.abandoned] in ([10], [10, 20])
        if not disk.struck:
            break


# ---- with a run, and on the command line -----------------------------------------------------------------------------


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


def test_the_next_run_goes_on_from_there(tmp_path, capsys):
    root = tmp_path / "run"
    run(root, 50)
    assert main(["rollback", str(root), "--to-step", "20", "--why", "spike", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "the next restore would go on from step 20" in told
    assert run(root, 50) == 50
    assert main(["rollback", str(root), "--to-step", "20", "--why", "spike"]) == 0
    told = capsys.readouterr().out
    assert [line.split()[:3] for line in told.splitlines()[1:4]] == [["abandon", "step", str(n)] for n in (30, 40, 50)]
    assert told.endswith("The next restore goes on from step 20.\n")
    assert main(["list", str(root)]) == 0
    told = capsys.readouterr().out
    assert told.count("abandoned by the rollback to step 20 (spike)") == 3
    assert "the newest is of step 20. 3 were abandoned." in told
    assert run(root, 40) == 20
    assert steps(root) == [10, 20, 30, 40]
    assert len(steps(root, abandoned=True)) == 7
    assert run(root, 40) == 40
    assert main(["list", str(root), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(each["step"], each["abandoned"] is None) for each in listed][-2:] == [(30, True), (40, True)]
    sequences = [each["sequence"] for each in listed]
    assert sequences == sorted(set(sequences))
    events, _ = read_journal(journal_path(root))
    (event,) = [each for each in events if each["event"] == "rolled_back"]
    assert (event["step"], event["steps"], event["why"]) == (20, [30, 40, 50], "spike")


def test_one_run_can_start_elsewhere_without_a_rollback(tmp_path):
    root = tmp_path / "run"
    run(root, 50)
    assert run(root, 25, step=20) == 20
    assert read_rollbacks(root) == {}
    assert steps(root) == [10, 20, 30, 40, 50, 25]  # each run saves where it ends
    assert run(root, 50) == 25
    back(root, 20)
    assert run(root, 40, step=40) == 40  # asked for by its step, what was abandoned is still there


def test_the_command_says_what_is_wrong(root, capsys):
    assert main(["rollback", str(root)]) == 2
    assert "--to-step N" in capsys.readouterr().err
    assert main(["rollback", str(root), "--to-step", "20", "--undo"]) == 2
    assert main(["rollback", str(root), "--to-step", "21"]) == 3
    assert main(["rollback", str(root), "--undo"]) == 3
    assert not run_folder(root).exists()
    capsys.readouterr()
    assert main(["rollback", str(root), "--to-step", "50"]) == 0
    assert capsys.readouterr().out == "Nothing to abandon: step 50 is the newest checkpoint.\n"
    assert main(["rollback", str(root), "--to-step", "40", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], [each["step"] for each in told["abandoned"]]) == (40, [50])
    assert main(["show", str(root), "--step", "50"]) == 0
    assert "abandoned      by the rollback to step 40" in capsys.readouterr().out
    assert main(["rollback", str(root), "--undo"]) == 0
    told_text = capsys.readouterr().out
    assert "bring back  step 50" in told_text
    assert told_text.endswith("The next restore goes on from step 50.\n")
