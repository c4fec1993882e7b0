"""Tiers: what goes where and why, drains, rollbacks, and what a root with tiers behind it has to restore."""

import errno
import json
import math
import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

import ckptman
from ckptman.cli.app import main
from ckptman.cli.copy import STUCK_SECONDS
from ckptman.errors import ConfigError, CorruptError, IntervalError, NotFoundError, RootError
from ckptman.policies.retention_rules import AtMost, KeepBest, KeepEvery, KeepLast, Record, RetentionPolicy
from ckptman.policies.tiers import Tier, due
from ckptman.runtime.outcome import Outcome, write_outcome
from ckptman.storage.catalog.backends.backend import open_backend
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.backends.object_store import ObjectBackend
from ckptman.storage.catalog.backends.run_store import RunStore
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.tiers import (
    check_tier,
    claim_tiers,
    mark_tier,
    read_identity,
    read_mark,
    read_tiers,
    steps_awaiting_drain,
    write_tiers,
)
from ckptman.storage.format.paths import DOT, ROOT_ID, TIER_OF, drained_path, outcome_path, tiers_path
from ckptman.storage.io.durable_files import DISK, Disk
from ckptman.storage.transfer.copy import CopyOptions
from ckptman.storage.transfer.drain import carry_out, copy_checkpoint, plan_drain, prepare, prune_tier
from tests.end_to_end.test_tiers import drains_here, run, steps
from tests.helpers.checkpoints import commit, flip_byte
from tests.helpers.faulty_disk import on_disk


def record(sequence, loss=1.0, **more):
    return Record(10 * sequence, sequence, 1000.0 * sequence, 100, {"loss": loss}, **more)


def drain(root, *tiers):
    write_tiers(root, tiers)
    plan = plan_drain(root, tiers)
    prepare(root, plan)
    return list(carry_out(root, plan, lambda task: nullcontext(CopyOptions())))


def outcomes(done):
    """The steps that were copied to a tier, and those that were not."""
    copied, failed = (
        [each.task.entry.step for each in done if (each.error is not None) is bad] for bad in (False, True)
    )
    return copied, failed


@pytest.fixture
def root(tmp_path):
    """Steps 10 to 80, of which 30 is the best."""
    for step in range(10, 90, 10):
        commit(tmp_path / "run", step, metrics={"loss": abs(step - 30)})
    return tmp_path / "run"


@pytest.fixture
def far(root):
    return root.parent / "far"


@pytest.fixture
def store(tmp_path):
    """The address of an object store in memory."""
    return f"memory://{tmp_path.name}/run"


def empty(root):
    shutil.rmtree(root)
    root.mkdir()


# ---- the rules -------------------------------------------------------------------------------------------------------


NINE = [record(number, loss=abs(number - 3)) for number in range(1, 10)]
SPOILT = {"nonfinite_tensors": ("model.weight",)}
LAST_SPOILT = [record(1), record(2), record(3, **SPOILT), record(4, **SPOILT)]
HALF_SPOILT = Record(20, 2, 2000.0, 100, {"loss": 0.5, "accuracy": math.nan}, nonfinite_metrics=("accuracy",))
BEST, LAST = {"retention": KeepBest("loss")}, {"retention": KeepLast(1)}


@pytest.mark.parametrize(
    ("records", "there", "tier", "expected"),
    [
        (NINE, [], {}, dict.fromkeys(range(1, 10), "every commit")),
        (NINE, [], {"every": 4}, {4: "every 4 commits", 8: "every 4 commits"}),
        (NINE, [NINE[3]], {"every": 4}, {8: "every 4 commits"}),
        # Of the candidates those go that the tier would keep.
        (NINE, [], BEST, {3: "keep best 1 by loss (min): 0"}),
        (NINE, [record(20, loss=-1)], BEST, {}),
        (NINE, NINE[:7], {"retention": KeepLast(2)}, [8, 9]),
        (NINE, [], {"every": 2, "retention": KeepEvery(steps=40)}, [4, 8]),
        # One whose newest is not finite gets the newest finite one too.
        (LAST_SPOILT, [], LAST, {2: "newest finite", 4: "keep last 1 of 1"}),
        (LAST_SPOILT, LAST_SPOILT[:2], LAST, {4: "keep last 1 of 1"}),
        (LAST_SPOILT, [], {"every": 3, **LAST}, [3]),  # 2 is no candidate
        ([*LAST_SPOILT, record(5)], [], LAST, [5]),
        ([record(1), HALF_SPOILT, record(3)], [], BEST, [2]),
        # What is damaged or abandoned goes nowhere, and another one of the same number is not the same.
        ([record(1), record(2, damaged="a block"), record(3, abandoned="by a rollback")], [], {}, [1]),
        ([record(1)], [Record(10, 1, 5.0, 100, {})], {}, [1]),
    ],
)
def test_what_is_due_to_a_tier(records, there, tier, expected):
    found = {records[place].sequence: why for place, why in due(records, there, Tier("/x", **tier), 0).items()}
    assert (found if isinstance(expected, dict) else list(found)) == expected


@pytest.mark.parametrize(
    ("path", "options", "error", "told"),
    [
        ("/x", {"every": 0}, IntervalError, "every"),
        ("", {}, ConfigError, "path"),
        ("/x", {"retention": 3}, ConfigError, "retention"),
        ("/x", {"retention": KeepLast(3) & AtMost(percent=80)}, ConfigError, "percent"),
        ("/x", {"bytes_per_second": 0}, IntervalError, "bytes_per_second"),
    ],
)
def test_tiers_that_cannot_be(path, options, error, told):
    with pytest.raises(error, match=told):
        Tier(path, **options)


class Own(RetentionPolicy):
    def keeps(self, records):
        return {}


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        *(([path], "cannot be a tier") for path in ("run", "run/below", ".")),
        *((paths, "cannot be a tier") for paths in (["a", "a"], ["a", "a/b"], ["a/b", "a"])),
        (["s3://bucket/run", "s3://bucket/run/"], "twice"),
        ([Tier("x", retention=Own())], "a rule of its own"),
    ],
)
def test_tiers_that_cannot_be_those_of_a_root(paths, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=told):
        write_tiers(tmp_path / "run", [each if isinstance(each, Tier) else Tier(each) for each in paths])
    assert list(tmp_path.iterdir()) == []


# ---- the file in the root --------------------------------------------------------------------------------------------


def test_tiers_are_stored_with_absolute_paths(root, monkeypatch):
    monkeypatch.chdir(root.parent)
    tiers = (Tier("far", every=4, retention=KeepLast(3) | KeepBest("loss"), bytes_per_second=1e9), Tier("s3://b/run"))
    write_tiers(Path("run"), tiers)
    assert read_tiers(root) == (Tier(root.parent / "far", 4, KeepLast(3) | KeepBest("loss"), 1e9), Tier("s3://b/run"))
    assert (root.parent / "far").is_dir()
    write_tiers(root, [])
    assert read_tiers(root) == ()


def test_a_tier_that_was_there_and_is_gone_is_not_made_anew(root):
    tier = Tier(root.parent / "far")
    write_tiers(root, [tier])
    shutil.rmtree(root.parent / "far")
    write_tiers(root, [tier])
    assert not (root.parent / "far").exists()
    plan = plan_drain(root, read_tiers(root))
    assert not plan.tasks
    assert [each.tier for each in plan.troubles] == [tier]


@pytest.mark.parametrize("text", [b"", b"{}", b'{"format_version": 1, "tiers": [{}]}', b"[]"])
def test_what_cannot_be_read_is_no_reason_to_delete(root, text):
    write_tiers(root, [Tier(root.parent / "far")])
    tiers_path(root).write_bytes(text)
    with pytest.raises(CorruptError, match=r"tiers\.json"):
        steps_awaiting_drain(root, [], 0)
    write_tiers(root, [Tier(root.parent / "far")])
    assert len(read_tiers(root)) == 1


# ---- drains ----------------------------------------------------------------------------------------------------------


def test_a_drain_copies_what_is_due_newest_first_and_prunes_the_tier(root, far):
    tier = Tier(far, every=2, retention=KeepLast(2))
    assert outcomes(drain(root, tier)) == ([80, 60], [])
    assert steps(far) == [60, 80]
    assert drain(root, tier) == []
    for step in (90, 100):
        commit(root, step, metrics={"loss": 1.0})
    assert outcomes(drain(root, tier)) == ([100], [])
    assert steps(far) == [80, 100]
    assert len(steps(root)) == 10


def test_trouble_with_one_tier_keeps_no_other(root, far):
    (root.parent / "file").touch()
    near, tier = Tier(root.parent / "file" / "near"), Tier(far, every=8)
    write_tiers(root, [tier])
    plan = plan_drain(root, (near, tier))
    assert [str(each.tier) for each in plan.troubles] == [str(near)]
    assert [task.entry.step for task in plan.tasks] == [80]


def test_a_damaged_one_is_read_once_and_not_copied_and_the_others_are(root, far):
    flip_byte(root / "step-0000000070" / "__0_0.distcp")
    done = drain(root, Tier(far))
    assert outcomes(done)[1] == [70]
    assert CorruptError in {type(each.error) for each in done}
    assert steps(far) == [10, 20, 30, 40, 50, 60, 80]
    assert drain(root, Tier(far)) == []


def test_a_damaged_copy_is_no_copy_and_is_made_again(root, far):
    tier, bad = Tier(far, every=8), far / "step-0000000080"
    drain(root, tier)
    commit(root, 90)
    flip_byte(bad / "__0_0.distcp")
    assert main(["verify", str(bad)]) == 4
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert steps(root) == [80, 90]
    assert outcomes(drain(root, tier)) == ([80], [])
    assert main(["verify", str(bad)]) == 0


def test_what_is_awaited_is_known_to_prunes(root, far):
    tier = Tier(far, every=4)
    write_tiers(root, [tier])
    records = [entry.record() for entry in Catalog(root).scan()]
    assert {records[place].step for place in steps_awaiting_drain(root, records, 0)} == {40, 80}
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert steps(root) == [40, 80]
    drain(root, tier)
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert steps(root) == [80]
    for step in (90, 100, 110, 120, 130):
        commit(root, step)
    shutil.rmtree(far)  # what cannot be looked at may still want all that it would take
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert steps(root) == [80, 120, 130]


def test_a_run_that_is_at_work_believes_the_last_drain(root, far):
    drain(root, Tier(far, every=4))
    commit(root, 90)
    records = [entry.record() for entry in Catalog(root).scan()]
    shutil.rmtree(far)
    assert steps_awaiting_drain(root, records, 0, look=False) == {}
    assert {records[place].step for place in steps_awaiting_drain(root, records, 0)} == {40, 80}
    drained_path(root).unlink()
    assert {records[place].step for place in steps_awaiting_drain(root, records, 0, look=False)} == {40, 80}


def test_a_tier_that_is_an_empty_mount_point_is_away(root, far):
    write_tiers(root, [Tier(far)])
    shutil.rmtree(far)
    far.mkdir()
    assert "check the mount" in plan_drain(root, read_tiers(root)).troubles[0].trouble
    with pytest.raises(RootError, match="is it mounted"):
        write_tiers(root, [Tier(root.parent / "mount" / "far")])


def test_a_slip_in_the_rules_of_a_tier_deletes_nothing_there(root, far):
    tier = Tier(far, retention=KeepBest("lozz"))
    for entry in Catalog(root).scan():
        copy_checkpoint(entry, LocalBackend(far))
    with pytest.warns(RuntimeWarning, match="nothing is deleted in .*far: no checkpoint has the metric 'lozz'"):
        prune_tier(tier, LocalBackend(far))
    assert len(steps(far)) == 8
    prune_tier(replace(tier, retention=KeepBest("lozz") | KeepLast(1)), LocalBackend(far))
    assert steps(far) == [80]


def test_what_others_put_below_the_name_of_a_checkpoint_in_a_store_stays(root, store):
    place, name = ObjectBackend(store), "step-0000000080/results.json"
    place.write(name, b"theirs")
    assert outcomes(drain(root, Tier(store, every=8))) == ([], [80])
    assert place.read(name, 0, 6) == b"theirs"
    assert [entry for entry in place.look() if entry.complete] == []


# ---- what a run finds ------------------------------------------------------------------------------------------------


def test_the_newest_wherever_it_is_and_the_nearest_copy_of_it(root, far):
    near, tier = Tier(root.parent / "near", every=2), Tier(far)
    drain(root, near, tier)
    shutil.rmtree(root / "step-0000000080")
    shutil.rmtree(root / "step-0000000050")
    place = RunStore(root, [near, tier])
    best_first = [(entry.step, entry.path.parent.name) for entry in reversed(place.list())]
    assert best_first[:7] == [
        *((80, "near"), (80, "far"), (70, "run"), (70, "far"), (60, "run"), (60, "near"), (60, "far"))
    ]
    assert (50, "far") in best_first
    assert (50, "run") not in best_first
    assert place.last_sequence() == 8


def test_a_root_that_was_emptied_goes_on_from_its_tiers(root, far):
    drain(root, Tier(far, every=4))
    empty(root)
    place = RunStore(root, [Tier(far, every=4)])
    assert [entry.step for entry in place.list()] == [40, 80]
    assert place.last_sequence() == 8
    (far / "step-0000000080" / "__0_0.distcp").unlink()
    shutil.rmtree(far / "step-0000000040")
    (entry,) = place.list()  # nothing there counts, and that is no reason to start over
    assert entry.problem == "__0_0.distcp is missing"


def test_a_tier_that_is_away_is_no_reason_to_start_over(root, far):
    drain(root, Tier(far))
    for step in steps(root)[2:]:
        shutil.rmtree(root / f"step-{step:010d}")
    far.rename(root.parent / "away")
    place = RunStore(root, [Tier(far)])
    with pytest.warns(RuntimeWarning, match="cannot be looked at, and what it has is not restored"):
        assert len(place.list()) == 2
    assert place.last_sequence() == 8
    empty(root)
    with pytest.raises((RootError, NotFoundError), match="far"):
        place.list()


# ---- rollbacks -------------------------------------------------------------------------------------------------------


def roll_back(root, step):
    return main(["rollback", str(root), "--to-step", str(step)])


def taken(root, tier):
    """The step that a restore would take."""
    return RunStore(root, [tier]).list()[-1].step


def test_what_was_abandoned_here_is_so_in_the_tiers(root, far):
    tier = Tier(far, every=4)
    drain(root, tier)
    assert roll_back(root, 40) == 0
    place = RunStore(root, [tier])
    assert [entry.step for entry in place.list()] == [10, 20, 30, 40, 40]
    shutil.rmtree(root / "step-0000000080")
    assert [entry.step for entry in place.list()] == [10, 20, 30, 40, 40]
    assert place.last_sequence() == 8


def test_a_step_that_was_saved_again_goes_to_the_tier_as_well(root, far):
    drain(root, Tier(far))
    assert roll_back(root, 60) == 0
    again = commit(root, 70, rows=4)
    assert outcomes(drain(root, Tier(far))) == ([70], [])
    assert Catalog(far).entry(70).identity == again.identity
    assert steps(far) == [10, 20, 30, 40, 50, 60, 70]
    assert drain(root, Tier(far)) == []


def test_what_only_a_tier_has_is_rolled_back_too(root, far):
    drain(root, Tier(far))
    assert main(["prune", str(root), "--keep-steps", "20", "--keep-last", "1"]) == 0
    assert steps(root) == [20, 80]
    assert roll_back(root, 20) == 0
    assert taken(root, Tier(far)) == 20
    empty(root)
    assert taken(root, Tier(far)) == 20
    assert main(["rollback", str(far), "--undo"]) == 0
    assert taken(root, Tier(far)) == 80


def test_one_can_go_back_to_what_only_a_tier_has(root, far):
    drain(root, Tier(far))
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert roll_back(root, 30) == 0
    assert taken(root, Tier(far)) == 30
    shutil.rmtree(far)
    assert roll_back(root, 20) == 3  # nobody can tell what is there


def test_a_rule_of_a_tier_counts_nothing_that_was_abandoned(root, far):
    best = Tier(far, retention=KeepBest("loss"))
    commit(root, 90, metrics={"loss": -5.0})
    drain(root, best)
    assert roll_back(root, 80) == 0
    commit(root, 90, rows=4, metrics={"loss": -1.0})
    drain(root, best)
    assert [entry.record().metrics["loss"] for entry in Catalog(far).scan()] == [-1.0]


def test_pins_and_rollbacks_hold_in_a_store(root, store):
    tier = Tier(store, retention=KeepLast(1))
    assert main(["pin", str(root / "step-0000000010"), "--why", "paper"]) == 0
    aside = root.parent / "aside"
    root.rename(aside)
    for step in (10, 20, 30):  # one after the other, as a run saves them
        shutil.copytree(aside / f"step-{step:010d}", root / f"step-{step:010d}")
        drain(root, tier)
    assert [entry.step for entry in ObjectBackend(store).look()] == [10, 30]
    assert roll_back(root, 20) == 0
    assert [entry.step for entry in RunStore(root, [tier]).list()] == [10, 10, 20]
    again = commit(root, 30, rows=4)
    drain(root, tier)
    entries = ObjectBackend(store).look()
    assert [entry.step for entry in entries] == [10, 30]
    assert entries[1].require_manifest().identity == again.identity


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command(root, capsys):
    assert main(["drain", str(root)]) == 2
    assert "has no tiers" in capsys.readouterr().err
    far, best = root.parent / "far", root.parent / "best"
    write_tiers(root, [Tier(far, every=4), Tier(best, retention=KeepBest("loss"))])
    assert main(["drain", str(root), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "Would copy 3 checkpoints. Nothing was copied (--dry-run)." in told
    assert "every 4 commits" in told
    assert "keep best 1 by loss (min): 0" in told
    assert steps(far) == []
    assert main(["drain", str(root)]) == 0
    told = capsys.readouterr().out
    assert told.count(": copied, ") == 3
    assert "to 2 tiers." in told
    assert (steps(far), steps(best)) == ([40, 80], [30])
    assert main(["drain", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"root": str(root), "tasks": [], "troubles": []}
    assert main(["drain", str(root), "--to", str(root.parent / "other"), "--every", "8", "--json"]) == 0
    (task,) = json.loads(capsys.readouterr().out)["tasks"]
    assert (task["step"], task["copied"]["already"]) == (80, False)
    shutil.rmtree(far)
    commit(root, 90, metrics={"loss": -1.0})
    assert main(["drain", str(root)]) == 10
    assert steps(best)[-1] == 90
    assert "far" in capsys.readouterr().err


def tell(root, state):
    """As a run does of itself."""
    write_outcome(outcome_path(root), Outcome(state, 1, "", 0, str(root), 1, 1.0, 1, "h"))


def test_it_follows_a_run_until_that_is_finished(root, monkeypatch):
    far = root.parent / "far"
    write_tiers(root, [Tier(far)])
    looks = []

    def wait(seconds):
        looks.append(len(steps(far)))
        if len(looks) == 1:
            commit(root, 90)
        elif len(looks) == 2:
            tell(root, "finished")

    tell(root, "running")
    monkeypatch.setattr("time.sleep", wait)
    assert main(["drain", str(root), "--follow", "--poll", "5"]) == 0
    assert looks[:2] == [8, 9]
    assert steps(far)[-1] == 90


def test_it_waits_for_a_tier_no_longer_than_that_makes_sense(root, monkeypatch):
    """Once the run is finished, and no earlier: until then a tier may well come back."""
    far, clock, waited = root.parent / "far", [0.0], []
    write_tiers(root, [Tier(far)])
    shutil.rmtree(far)

    def wait(seconds):
        waited.append(clock[0])
        clock[0] += seconds
        if len(waited) == 20:
            tell(root, "finished")

    monkeypatch.setattr("time.sleep", wait)
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    assert main(["drain", str(root), "--follow", "--poll", "60"]) == 10
    assert clock[0] == 60 * 19 + STUCK_SECONDS, "after the last look at which it was not finished"


__all__ = ["drains_here"]
pytestmark = pytest.mark.usefixtures("drains_here")


@pytest.fixture
def a(tmp_path):
    return tmp_path / "a"


@pytest.fixture
def b(tmp_path):
    return tmp_path / "b"


@pytest.fixture
def far_folder(tmp_path):
    return tmp_path / "far"


@pytest.mark.parametrize("has_run", [False, True])
def test_two_runs_do_not_share_a_tier(has_run, a, b, far_folder):
    tiers = [Tier(far_folder, retention=KeepLast(2))]
    if has_run:
        run(b, [], 20)
    assert run(a, tiers, 40) == 0
    before = steps(far_folder)
    with pytest.raises(ConfigError, match=rf"is of another root, {a} .*and not of {b}: give each"):
        run(b, tiers, 20)
    assert steps(far_folder) == before
    assert not (b / DOT / "tiers.json").exists()
    assert run(a, tiers, 60) == 40
    assert run(b, [], 20) == 20 * has_run


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_drain_leaves_alone_what_is_of_another_root(kind, a, b, far_folder, capsys):
    there = str(far_folder) if kind == "folder" else f"memory://{far_folder.parent.name}/far"
    place = open_backend(there)
    for root, step in ((a, 10), (b, 50)):
        commit(root, step)
        write_tiers(root, [Tier(there)])
    assert main(["drain", str(a)]) == 0
    assert main(["drain", str(b)]) != 0
    assert f"{there} is of another root, {a}" in capsys.readouterr().err
    assert main(["drain", str(b), "--to", there]) != 0
    assert [entry.step for entry in place.list()] == [10]
    assert read_mark(place).id == read_identity(a)
    with pytest.raises(ConfigError, match=f"remove {there}/.ckptman/tier-of.json"):
        RunStore(b, [Tier(there)]).list()
    # What is due there stays until somebody has said where it is to go.
    commit(b, 60)
    assert main(["prune", str(b), "--keep-last", "1"]) == 0
    assert steps(b) == [50, 60]


@pytest.mark.parametrize("earlier", [False, True], ids=["", "of an earlier version"])
def test_nor_is_a_root_filled_that_is_named_as_a_tier(earlier, a, b, capsys):
    """One of an earlier version has no id yet, and the same run id where one was copied from the other."""
    run(a, [], 20)
    if earlier:
        (a / DOT / ROOT_ID).unlink()
        shutil.copytree(a, b)
    commit(b, 50, sequence=9)
    write_tiers(b, [Tier(a, retention=KeepLast(1))])
    assert main(["drain", str(b)]) != 0
    assert (f"a run has been started in it ({a / DOT}" if earlier else "root of a run") in capsys.readouterr().err
    assert steps(a) == [10, 20]


def test_a_tier_in_which_a_run_was_started_is_one_no_more_until_that_is_over(a, far_folder, tmp_path, capsys):
    tiers = [Tier(far_folder)]
    run(a, tiers, 20)
    assert main(["drain", str(far_folder), "--to", str(tmp_path / "further")]) == 0  # that makes no root of it
    assert run(a, tiers, 30) == 20
    assert run(far_folder, [], 40) == 30
    with pytest.raises(
        ConfigError, match=f"{far_folder} is the root of a run itself.*remove {far_folder}/.ckptman/root.json"
    ):
        run(a, tiers, 50)
    assert main(["drain", str(a)]) == 10
    assert "is the root of a run itself" in capsys.readouterr().err
    (far_folder / DOT / ROOT_ID).unlink()
    assert run(a, tiers, 50) == 40


def test_of_two_at_once_one_gets_the_tier(a, b, far_folder):
    for root in (a, b):
        root.mkdir()
        claim_tiers(root, [], root.name)
    (far_folder / DOT).mkdir(parents=True)

    def come_late(path, data):
        with on_disk(Disk()):
            mark_tier(b, LocalBackend(far_folder), "b", renew=False)
        Disk.create_whole_file(DISK, path, data)

    late = patch.object(DISK, "create_whole_file", come_late)
    with late, pytest.raises(ConfigError, match="is of another root"):
        mark_tier(a, LocalBackend(far_folder), "a", renew=False)
    assert read_mark(LocalBackend(far_folder)).run_id == "b"


def test_a_lost_root_goes_on_from_its_tiers_at_the_same_path(a, far_folder, tmp_path):
    tiers = [Tier(far_folder), Tier(tmp_path / "near")]
    run(a, tiers, 20)
    known = read_identity(a)
    shutil.rmtree(a)
    assert run(a, tiers, 40) == 20
    assert read_identity(a) == known


def test_at_another_path_by_its_run_id(a, b, far_folder, tmp_path):
    tiers = [Tier(far_folder)]
    run(a, tiers, 20)
    mark = read_mark(LocalBackend(far_folder))
    shutil.rmtree(a)
    with pytest.raises(ConfigError, match=f"run_id='{mark.run_id}'"):
        run(tmp_path / "new", tiers, 40)
    with ckptman.Checkpointer(b, {"count": {"n": 0}}, tiers=tiers, deadline=None, run_id=mark.run_id) as checkpointer:
        assert checkpointer.root == b
    assert read_identity(b) == mark.id
    assert read_mark(LocalBackend(far_folder)).root == str(b)


def test_a_root_that_was_moved_keeps_its_tiers_and_one_that_was_copied_does_not(a, b, far_folder, tmp_path):
    tiers = [Tier(far_folder)]
    run(a, tiers, 20)
    a.rename(b)
    assert run(b, tiers, 40) == 20
    shutil.copytree(b, tmp_path / "c")
    with pytest.raises(ConfigError, match="one of them is a copy of the other"):
        run(tmp_path / "c", tiers, 60)
    (tmp_path / "link").symlink_to(b)
    assert run(tmp_path / "link", tiers, 60) == 40


def test_a_tier_of_an_earlier_version_is_adopted_by_its_run(a, b, far_folder):
    tiers = [Tier(far_folder)]
    run(a, tiers, 20)
    for path in (a / DOT / ROOT_ID, far_folder / DOT / TIER_OF):
        path.unlink()
    with pytest.raises(ConfigError, match="holds checkpoints of another run"):
        run(b, tiers, 20)
    assert run(a, tiers, 40) == 20
    assert read_mark(LocalBackend(far_folder)).id == read_identity(a)


def test_a_mark_that_has_changed_is_no_mark(a, far_folder):
    tiers = [Tier(far_folder)]
    run(a, tiers, 20)
    mark = far_folder / DOT / TIER_OF
    mark.write_bytes(mark.read_bytes().replace(b'"root": "/', b'"root": "#'))
    with pytest.raises(CorruptError, match=f"{mark} is not what ckptman wrote there.*remove it"):
        run(a, tiers, 40)
    assert TIER_OF in plan_drain(a, tiers).troubles[0].trouble
    mark.unlink()
    assert run(a, tiers, 40) == 20


def test_a_folder_of_copies_may_have_been_rolled_back(a, far_folder):
    run(a, [], 30)
    assert main(["copy", str(a), str(far_folder), "--all"]) == 0
    assert main(["rollback", str(far_folder), "--to-step", "20"]) == 0
    assert run(a, [Tier(far_folder)], 40) in (20, 30)


def test_a_root_that_nobody_may_write_to_is_drained_all_the_same(a, far_folder, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "root.json")

    commit(a, 10)
    monkeypatch.setattr("ckptman.storage.transfer.drain.make_identity", refuse)
    main(["drain", str(a), "--to", str(far_folder)])
    assert steps(far_folder) == [10]


@pytest.mark.skipif(os.geteuid() != 0, reason="only the super-user may give a folder to another one")
def test_the_super_user_who_trains_in_a_folder_of_a_user_is_his_own_word(tmp_path):
    root, tier = tmp_path / "run", tmp_path / "tier"
    root.mkdir()
    os.chown(root, 4321, -1)
    for _ in range(2):
        with ckptman.Checkpointer(root, {"n": 0}, tiers=[ckptman.Tier(tier)], deadline=None) as checkpointer:
            checkpointer.save(checkpointer.restore() + 1)
    assert steps(tier) == [1, 2]
    os.chown(tier, 4321, -1)
    check_tier(root, LocalBackend(tier))


def test_a_tier_that_is_exchanged_after_the_last_copy_is_not_pruned(tmp_path, monkeypatch):
    root, tier, victim = tmp_path / "run", tmp_path / "tier", tmp_path / "victim"
    for step in (10, 20, 30):
        commit(victim, step)
        commit(root, step)

    def exchange(*arguments):
        copied = copy_checkpoint(*arguments)
        if not tier.is_symlink():
            tier.rename(tmp_path / "moved")
            tier.symlink_to(victim)
        return copied

    monkeypatch.setattr("ckptman.storage.transfer.drain.copy_checkpoint", exchange)
    main(["drain", str(root), "--to", str(tier), "--keep-last", "1"])
    assert steps(victim) == [10, 20, 30]


@pytest.mark.skipif(os.geteuid() != 0, reason="only the super-user may give a folder to another one")
@pytest.mark.parametrize("whose", ["tier", "tiers.json", "root.json"])
def test_the_super_user_takes_nobodys_word_for_what_is_anothers(tmp_path, whose):
    root, tier = tmp_path / "run", tmp_path / "tier"
    with ckptman.Checkpointer(root, {"n": 0}, tiers=[ckptman.Tier(tier)], deadline=None) as checkpointer:
        checkpointer.save(1)
    path = tier if whose == "tier" else root / ".ckptman" / whose
    os.chown(path, 4321, -1)
    place = LocalBackend(tier)
    with pytest.raises(ConfigError, match=r"root .*chown .*, or do this as"):
        check_tier(root, place)
    os.chown(path, root.stat().st_uid, -1)
    check_tier(root, place)
