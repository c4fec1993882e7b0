"""What an attempt leaves behind: its log, the outcome in its root, and checkpoints."""

import sys
import time
from dataclasses import replace

import pytest

from ckptman.errors import SchedulerError
from ckptman.jobs import evidence
from ckptman.jobs.chain_record import AttemptRecord, Wish
from ckptman.jobs.evidence import find_outcome, logs_of, newest_sequence, passed_over_text
from ckptman.jobs.local import run_chain
from ckptman.runtime.journal import Journal
from ckptman.runtime.outcome import Outcome, write_outcome
from ckptman.storage.catalog.writer_lock import claim
from ckptman.storage.format.paths import DOT, journal_path, outcome_path
from tests.helpers.checkpoints import commit, make_suspect
from tests.helpers.slurm_chains import NOW

OUTCOME = Outcome("stopped", 10, "SIGTERM", 75, "", 1, 100.0, 1, "n1")


def write(root, **start):
    (root / DOT).mkdir(parents=True)
    write_outcome(
        outcome_path(root), replace(OUTCOME, root=str(root), **{k: start.pop(k) for k in ("state",) if k in start})
    )
    journal = Journal(journal_path(root))
    journal.bind(attempt=1)
    journal.record("attempt_started", **start)
    journal.close()


def test_the_only_fresh_one_below_the_folder_counts(tmp_path):
    write(tmp_path / "a" / "runs" / "first")
    found = find_outcome(tmp_path, [], 99.0, 1)
    assert (found.state, found.root) == ("stopped", str(tmp_path / "a" / "runs" / "first"))
    assert "SIGTERM (as its root says: the ranks had no CKPTMAN_OUTCOME, which env -i" in found.reason
    assert find_outcome(tmp_path, [], 101.0, 1) is None, "of an attempt before"
    write(tmp_path / "second")
    assert find_outcome(tmp_path, [], 99.0, 1) is None, "nobody knows which one it is"
    assert find_outcome(tmp_path, ["", str(tmp_path / "second")], 99.0, 1).root == str(tmp_path / "second")


@pytest.mark.parametrize("start", [{"chain": "/of/others"}, {"job_id": "8"}])
def test_one_of_others_is_left_alone(tmp_path, start):
    write(tmp_path / "run", **start)
    assert find_outcome(tmp_path, [], 99.0, 1, "7") is None


def test_what_runs_is_not_that_of_a_program_that_is_over(tmp_path):
    write(tmp_path / "run", state="running", job_id="7")
    assert find_outcome(tmp_path, [], 99.0, 0, "7") is None
    assert find_outcome(tmp_path, [], 99.0, 1, "7").state == "running"
    assert find_outcome(tmp_path, [], 99.0, None, "7").state == "running"


def test_a_program_that_failed_has_not_finished_whatever_ended_beside_it(tmp_path):
    write(tmp_path / "run", state="finished")
    assert find_outcome(tmp_path, [], 99.0, 1) is None
    assert find_outcome(tmp_path, [], 99.0, 0).state == "finished"
    assert find_outcome(tmp_path, [], 99.0, None).state == "finished"


def test_a_run_that_lives_is_not_that_of_an_attempt_that_is_over(tmp_path):
    write(tmp_path / "run", state="running")
    claimed = claim(tmp_path / "run", "run", None)
    assert find_outcome(tmp_path, [], 99.0, 1) is None
    claimed.release()
    assert find_outcome(tmp_path, [], 99.0, 1) is not None


def test_a_run_that_began_before_is_not_that_of_an_attempt(tmp_path):
    write(tmp_path / "run")
    ended = time.time() + 60
    write_outcome(outcome_path(tmp_path / "run"), replace(OUTCOME, time_seconds=ended))
    assert find_outcome(tmp_path, [], ended - 1, 1) is None
    assert find_outcome(tmp_path, [], 99.0, 1) is not None


def test_a_large_tree_is_not_searched_for_ever(tmp_path, monkeypatch):
    for number in range(20):
        (tmp_path / f"data-{number:02}").mkdir()
    write(tmp_path / "data-19" / "run")
    assert find_outcome(tmp_path, [], 99.0, 1) is not None
    monkeypatch.setattr(evidence, "_MOST_FOLDERS", 10)
    assert find_outcome(tmp_path, [], 99.0, 1) is None


PROGRAM = """
import os, signal, sys, ckptman
state = {"n": 0}
with ckptman.Checkpointer("run", state, save_policy=100, deadline=None) as checkpointer:
    start = checkpointer.restore()
    for step in range(start + 1, 41):
        if step == start + 12:
            os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.step(step)
        if checkpointer.should_stop():
            break
sys.exit(checkpointer.should_stop())  # 1, as torchrun does, whatever its workers end with
"""


@pytest.mark.slow
@pytest.mark.parametrize("lacks", [True, False])
def test_a_chain_whose_ranks_lack_it_goes_on_to_the_end(tmp_path, monkeypatch, forked, lacks):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    told = []
    clean = ["env", "-u", "CKPTMAN_OUTCOME", "-u", "CKPTMAN_CHAIN"] if lacks else []
    assert run_chain([*clean, sys.executable, "train.py"], tmp_path / "chain", told.append) == 0
    ends = [line for line in told if line.startswith("attempt")]
    assert [line.split(":")[0] for line in ends] == [*(f"attempt {n} stopped" for n in (1, 2, 3)), "attempt 4 finished"]
    assert all(("as its root says" in line) == lacks for line in ends)


def test_a_chain_that_never_heard_of_a_root_says_what_may_be_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = []
    with pytest.raises(SchedulerError, match="1 attempt crashed within 10 min, with no known"):
        run_chain(["false"], tmp_path / "chain", told.append, Wish(crash_limit=1))
    assert "pass the variables CKPTMAN_* on to its ranks" in told[-1]


def test_the_log_of_a_later_attempt_says_nothing_of_an_earlier_one(tmp_path):
    log = tmp_path / "log"
    log.write_text("one\ntwo\nthree\n")
    first, second = (
        AttemptRecord(
            number=n,
            job=n,
            job_id="1",
            restart=0,
            nodes="",
            host="",
            log=str(log),
            log_begin=begin,
            begun_seconds=NOW,
        )
        for n, begin in ((1, 4), (2, 8))
    )
    assert logs_of(first, [second]) == [[], ["two"]]
    assert logs_of(first) == [[], ["two", "three"]]


def test_only_checkpoints_of_this_chain_are_progress(tmp_path):
    root = tmp_path / "root"
    assert newest_sequence(str(root)) == 0
    commit(root, 10, time_seconds=1000.0)
    commit(root, 20, time_seconds=2000.0)
    commit(root, 15, time_seconds=3000.0)
    assert newest_sequence(str(root)) == 3
    assert newest_sequence(str(root), since_seconds=2500.0) == 3
    assert newest_sequence(str(root), since_seconds=3500.0) == 0
    (root / "step-0000000015" / "manifest.json").unlink()
    assert newest_sequence(str(root), since_seconds=1500.0) == 2


def test_a_chain_says_that_a_restore_goes_back_behind_a_suspect(tmp_path):
    for step in (10, 20):
        commit(tmp_path, step)
    assert passed_over_text(str(tmp_path)) == ""
    make_suspect(tmp_path, 20)
    assert passed_over_text(str(tmp_path)).startswith("step 20: attempts 1 and 2 loaded it and crashed both after")
    assert passed_over_text(str(tmp_path)).endswith("so the next attempt goes back to step 10")
    assert newest_sequence(str(tmp_path)) == 2, "going back is no loss of progress"
    make_suspect(tmp_path, 10)
    assert passed_over_text(str(tmp_path)).startswith("step 20 is all there is to restore, and attempts 1 and 2")
