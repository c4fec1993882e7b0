"""Rules that cannot be meant delete nothing; those that can are left alone."""

import math

import pytest

from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.catalog import Catalog
from ckptman.catalog.writer_lock import claim
from ckptman.format.paths import journal_path
from ckptman.policies.calendar import KeepDaily, KeepWithin
from ckptman.policies.retention import slip
from ckptman.policies.retention_rules import AtMost, KeepBest, KeepEvery, KeepLast, KeepSteps, Record, RetentionPolicy
from ckptman.runtime.journal import Journal, read_journal
from ckptman.saving.retention_runner import RetentionRunner
from ckptman.saving.writer import SaveInfo
from tests.helpers.checkpoints import commit, steps_of

NAN = math.nan
LOSS = {"loss": 1.0}


class Own(RetentionPolicy):
    def keeps(self, records):
        return {}


def run(*metrics):
    return [Record(10 * number, number, 0.0, 1, each) for number, each in enumerate(metrics, 1)]


@pytest.mark.parametrize(
    ("policy", "records", "by_hand", "in_the_run"),
    [
        (KeepBest("lozz"), run(LOSS, LOSS), "no checkpoint has the metric 'lozz'; they have loss", "the same"),
        (KeepLast(1) | KeepBest("lozz"), run(LOSS), "has the metric 'lozz'", "the same"),
        (KeepLast(1) | KeepBest("loss"), run({}, {}), "has the metric 'loss'; they have no metrics", ""),
        (KeepBest("loss"), run({}, {}), "has the metric 'loss'; they have no metrics", "keep none of 2 checkpoints"),
        (KeepLast(1) | KeepBest("loss"), run({"loss": NAN}, {"x": 1.0}), "'loss' is a finite number in no", ""),
        (KeepBest("loss"), run({"loss": NAN}, {"x": 1.0}), "is a finite number in no checkpoint", ""),
        (KeepBest("loss") & AtMost(bytes=1), run(LOSS, {}), "", ""),
        (KeepSteps(15, 25), run(LOSS, LOSS), "the rules keep none of 2 checkpoints (KeepSteps(15, 25))", ""),
        (KeepSteps(15, 16), run(LOSS, LOSS), "keep none of 2 checkpoints (KeepSteps(15, 16))", "the same"),
        (KeepSteps(15), run(LOSS), "", ""),
        (KeepEvery(100), run(LOSS, LOSS), "keep none of 2 checkpoints (KeepEvery(steps=100))", ""),
        (KeepEvery(100) | KeepLast(1), run(LOSS, LOSS), "", ""),
        (KeepEvery(100) | KeepDaily(1), run(LOSS, LOSS), "", ""),
        (KeepWithin(5.0), run(LOSS, LOSS), "", ""),
        (Own(), run(LOSS, LOSS), "keep none of 2 checkpoints", ""),
        (AtMost(bytes=1), run(LOSS, LOSS), "", ""),
        (None, run(LOSS, LOSS), "", ""),
        (KeepBest("loss"), [], "", ""),
    ],
)
def test_what_is_a_slip(policy, records, by_hand, in_the_run):
    for goes_on, expected in ((False, by_hand), (True, by_hand if in_the_run == "the same" else in_the_run)):
        found = slip(policy, records, 1e6, goes_on=goes_on)
        assert expected in found
        assert bool(found) == bool(expected)


def test_a_run_warns_once_and_deletes_nothing_until_the_metric_is_there(tmp_path, recwarn):
    held = claim(tmp_path, "run", None)
    journal = Journal(journal_path(tmp_path))
    keeper = RetentionRunner(LocalBackend(tmp_path), KeepBest("eval"), "prune", held, journal)
    for step in (1, 2, 3):
        commit(tmp_path, step, metrics=LOSS)
        keeper.prune()
    assert not keeper.make_room(SaveInfo(4, "every step"), "no space")
    assert steps_of(Catalog(tmp_path).scan()) == [1, 2, 3]
    told = [str(each.message) for each in recwarn]
    assert sum("no checkpoint has the metric 'eval'; they have loss" in each for each in told) == 1
    commit(tmp_path, 4, metrics={"eval": 1.0})
    commit(tmp_path, 5, metrics=LOSS)
    keeper.prune()
    keeper.close(tidy=True)
    held.release()
    journal.close()
    assert steps_of(Catalog(tmp_path).scan()) == [4, 5]
    assert any(each["event"] == "prune_failed" for each in read_journal(journal_path(tmp_path))[0])


def test_where_the_metric_is_finite_in_none_a_run_prunes_all_the_same(tmp_path, recwarn):
    held = claim(tmp_path, "run", None)
    keeper = RetentionRunner(LocalBackend(tmp_path), KeepBest("loss"), "prune", held, None)
    for step in (1, 2, 3):
        commit(tmp_path, step, metrics={"loss": NAN})
        keeper.prune()
    keeper.close(tidy=True)
    held.release()
    assert steps_of(Catalog(tmp_path).scan()) == [3], "or the root would grow without a bound"
    assert not recwarn


def test_where_other_rules_keep_some_a_run_prunes_by_them_and_warns_once(tmp_path, recwarn):
    held = claim(tmp_path, "run", None)
    keeper = RetentionRunner(LocalBackend(tmp_path), KeepLast(2) | KeepBest("eval"), "prune", held, None)
    for step in (1, 2, 3, 4):
        commit(tmp_path, step, metrics=LOSS)
        keeper.prune()
    commit(tmp_path, 5, metrics={"eval": 1.0})
    for step in (6, 7, 8):
        commit(tmp_path, step, metrics=LOSS)
        keeper.prune()
    keeper.close(tidy=True)
    held.release()
    assert steps_of(Catalog(tmp_path).scan()) == [5, 7, 8]
    assert ["pruned by the other rules alone: no checkpoint has" in str(each.message) for each in recwarn] == [True]
