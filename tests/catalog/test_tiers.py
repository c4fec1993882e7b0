"""Tiers: what goes where and why, drains, and what a root with tiers behind it has to restore."""

import json
import math
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptman.catalog.backends.tiered import TieredBackend
from ckptman.catalog.catalog import Catalog
from ckptman.catalog.tiers import awaited, read_tiers, write_tiers
from ckptman.cli.app import main
from ckptman.cli.drain import STUCK_SECONDS
from ckptman.errors import ConfigError, CorruptError, IntervalError, NotFoundError, RootError
from ckptman.format.paths import outcome_path, tiers_path
from ckptman.policies.retention import AtMost, KeepBest, KeepEvery, KeepLast, Record, RetentionPolicy
from ckptman.policies.tiers import Tier, due
from ckptman.runtime.outcome import Outcome, write_outcome
from ckptman.transfer.copy import CopyOptions
from ckptman.transfer.drain import carry_out, plan_drain, prepare
from tests.helpers.checkpoints import commit, flip_byte


def record(sequence, loss=1.0, **more):
    return Record(10 * sequence, sequence, 1000.0 * sequence, 100, {"loss": loss}, **more)


def steps(root):
    return [entry.step for entry in Catalog(root).scan()]


def wanted(records, there, tier):
    """What is due, by sequence."""
    return {records[place].sequence: why for place, why in due(records, there, tier, 0).items()}


def drain(root, *tiers):
    @contextmanager
    def means(task):
        yield CopyOptions()

    write_tiers(root, tiers)
    plan = plan_drain(root, tiers)
    prepare(root, plan)
    return list(carry_out(root, plan, means))


@pytest.fixture
def root(tmp_path):
    """Steps 10 to 80, of which 30 is the best."""
    for step in range(10, 90, 10):
        commit(tmp_path / "run", step, metrics={"loss": abs(step - 30)})
    return tmp_path / "run"


# ---- the rules -------------------------------------------------------------------------------------------------------


def test_each_so_many_th_commit_is_due():
    records = [record(number) for number in range(1, 10)]
    assert wanted(records, [], Tier("/x")) == dict.fromkeys(range(1, 10), "every commit")
    assert wanted(records, [], Tier("/x", every=4)) == {4: "every 4 commits", 8: "every 4 commits"}
    assert wanted(records, [records[3]], Tier("/x", every=4)) == {8: "every 4 commits"}


def test_of_the_candidates_those_go_that_the_tier_would_keep():
    records = [record(number, loss=abs(number - 3)) for number in range(1, 10)]
    best = Tier("/x", retention=KeepBest("loss"))
    assert wanted(records, [], best) == {3: "keep best 1 by loss (min): 0"}
    assert wanted(records, [record(20, loss=-1)], best) == {}
    assert list(wanted(records, records[:7], Tier("/x", retention=KeepLast(2)))) == [8, 9]
    assert list(wanted(records, [], Tier("/x", every=2, retention=KeepEvery(steps=40)))) == [4, 8]


def test_a_tier_whose_newest_is_not_finite_gets_the_newest_finite_one_too():
    last, spoilt = Tier("/x", retention=KeepLast(1)), {"nonfinite_tensors": ("model.weight",)}
    records = [record(1), record(2), record(3, **spoilt), record(4, **spoilt)]
    assert wanted(records, [], last) == {2: "newest finite", 4: "keep last 1 of 1"}
    assert wanted(records, records[:2], last) == {4: "keep last 1 of 1"}
    assert list(wanted(records, [], Tier("/x", every=3, retention=KeepLast(1)))) == [3], "2 is no candidate"
    assert list(wanted([*records, record(5)], [], last)) == [5]
    best = Tier("/x", retention=KeepBest("loss"))
    other = Record(20, 2, 2000.0, 100, {"loss": 0.5, "accuracy": math.nan}, nonfinite_metrics=("accuracy",))
    records = [record(1), other, record(3)]
    assert wanted(records, [], best) == {2: "keep best 1 by loss (min): 0.5", 3: "newest finite"}


def test_what_is_damaged_or_abandoned_goes_nowhere():
    records = [record(1), record(2, damaged="a block"), record(3, abandoned="by a rollback")]
    assert list(wanted(records, [], Tier("/x"))) == [1]


def test_another_checkpoint_of_the_same_number_is_not_the_same():
    assert list(wanted([record(1)], [Record(10, 1, 5.0, 100, {})], Tier("/x"))) == [1]


def test_tiers_that_cannot_be(tmp_path):
    with pytest.raises(IntervalError, match="every"):
        Tier("/x", every=0)
    with pytest.raises(ConfigError, match="path"):
        Tier("")
    with pytest.raises(ConfigError, match="retention"):
        Tier("/x", retention=3)
    with pytest.raises(ConfigError, match="percent"):
        Tier("/x", retention=KeepLast(3) & AtMost(percent=80))
    with pytest.raises(IntervalError, match="bytes_per_second"):
        Tier("/x", bytes_per_second=0)
    root = tmp_path / "run"
    for path in (root, root / "below", tmp_path):
        with pytest.raises(ConfigError, match="cannot be a tier"):
            write_tiers(root, [Tier(path)])
    for first, second in (("a", "a"), ("a", "a/b"), ("a/b", "a")):
        with pytest.raises(ConfigError, match="cannot be a tier"):
            write_tiers(root, [Tier(tmp_path / first), Tier(tmp_path / second)])
    with pytest.raises(ConfigError, match="twice"):
        write_tiers(root, [Tier("s3://bucket/run"), Tier("s3://bucket/run/")])

    class Own(RetentionPolicy):
        def keeps(self, records):
            return {}

    with pytest.raises(ConfigError, match="a rule of its own"):
        write_tiers(root, [Tier(tmp_path / "x", retention=Own())])
    assert not root.exists()


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
        awaited(root, [], 0)
    write_tiers(root, [Tier(root.parent / "far")])
    assert len(read_tiers(root)) == 1


# ---- drains ----------------------------------------------------------------------------------------------------------


def test_a_drain_copies_what_is_due_newest_first_and_prunes_the_tier(root):
    far = Tier(root.parent / "far", every=2, retention=KeepLast(2))
    assert [(each.task.entry.step, each.copied is not None) for each in drain(root, far)] == [(80, True), (60, True)]
    assert steps(root.parent / "far") == [60, 80]
    assert drain(root, far) == []
    for step in (90, 100):
        commit(root, step, metrics={"loss": 1.0})
    assert [each.task.entry.step for each in drain(root, far)] == [100]
    assert steps(root.parent / "far") == [80, 100]
    assert len(steps(root)) == 10


def test_trouble_with_one_tier_keeps_no_other(root):
    (root.parent / "file").touch()
    near, far = Tier(root.parent / "file" / "near"), Tier(root.parent / "far", every=8)
    write_tiers(root, [far])
    plan = plan_drain(root, (near, far))
    assert [str(each.tier) for each in plan.troubles] == [str(near)]
    assert [task.entry.step for task in plan.tasks] == [80]


def test_a_damaged_one_is_not_copied_and_the_others_are(root):
    flip_byte(root / "step-0000000070" / "__0_0.distcp")
    done = drain(root, Tier(root.parent / "far"))
    bad = [each for each in done if each.error is not None]
    assert [each.task.entry.step for each in bad] == [70]
    assert isinstance(bad[0].error, CorruptError)
    assert steps(root.parent / "far") == [10, 20, 30, 40, 50, 60, 80]


def test_what_is_awaited_is_known_to_prunes(root):
    far = Tier(root.parent / "far", every=4)
    write_tiers(root, [far])
    records = [entry.record() for entry in Catalog(root).scan()]
    assert {records[place].step for place in awaited(root, records, 0)} == {40, 80}
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert steps(root) == [40, 80]
    drain(root, *read_tiers(root))
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert steps(root) == [80]
    for step in (90, 100, 110, 120, 130):
        commit(root, step)
    shutil.rmtree(root.parent / "far")  # what cannot be looked at may still want all that it would take
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert steps(root) == [80, 120, 130]


# ---- what a run finds ------------------------------------------------------------------------------------------------


def test_the_newest_wherever_it_is_and_the_nearest_copy_of_it(root):
    near, far = Tier(root.parent / "near", every=2), Tier(root.parent / "far")
    drain(root, near, far)
    shutil.rmtree(root / "step-0000000080")
    shutil.rmtree(root / "step-0000000050")
    place = TieredBackend(root, [near, far])
    best_first = [(entry.step, entry.path.parent.name) for entry in reversed(place.list())]
    assert best_first[:7] == [
        *((80, "near"), (80, "far"), (70, "run"), (70, "far"), (60, "run"), (60, "near"), (60, "far")),
    ]
    assert (50, "far") in best_first
    assert (50, "run") not in best_first
    assert place.last_sequence() == 8


def test_a_root_that_was_emptied_goes_on_from_its_tiers(root):
    far = Tier(root.parent / "far", every=4)
    drain(root, far)
    shutil.rmtree(root)
    root.mkdir()
    place = TieredBackend(root, [far])
    assert [entry.step for entry in place.list()] == [40, 80]
    assert place.last_sequence() == 8


def test_a_tier_that_is_away_is_no_reason_to_start_over(root):
    far = Tier(root.parent / "far", every=4)
    drain(root, far)
    (root.parent / "far").rename(root.parent / "away")
    place = TieredBackend(root, [far])
    with pytest.warns(RuntimeWarning, match="cannot be looked at, and what it has is not restored"):
        assert len(place.list()) == 8
    shutil.rmtree(root)
    root.mkdir()
    with pytest.raises((RootError, NotFoundError), match="far"):
        place.list()


def test_what_was_abandoned_here_is_so_in_the_tiers(root):
    far = Tier(root.parent / "far", every=4)
    drain(root, far)
    assert main(["rollback", str(root), "--to-step", "40"]) == 0
    place = TieredBackend(root, [far])
    assert [entry.step for entry in place.list()] == [10, 20, 30, 40, 40]
    shutil.rmtree(root / "step-0000000080")
    assert [entry.step for entry in place.list()] == [10, 20, 30, 40, 40]
    assert place.last_sequence() == 8


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
    outcome = Outcome(
        state=state, step=1, reason="", exit_code=0, root=str(root), attempt=1, time_seconds=1.0, pid=1, host="h"
    )
    write_outcome(outcome_path(root), outcome)


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
