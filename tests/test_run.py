"""`ckptman.Run`: what a program learns of a run, without torch, and without leaving a trace."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch

import ckptman
from ckptman.runtime.journal import Journal
from ckptman.storage.catalog.pins import pin
from ckptman.storage.catalog.verified import remember_damage
from ckptman.storage.format.paths import journal_path
from tests.helpers.checkpoints import commit, make_suspect


def test_checkpoints_come_in_order_of_commit_each_with_what_is_known_of_it(tmp_path):
    commit(tmp_path, 30, metrics={"loss": 0.5}, ranks=4)
    pin(commit(tmp_path, 20).path, "the paper", by="me", time_seconds=1.0)
    (commit(tmp_path, 10).path / "index.json").unlink()
    first, second, third = ckptman.Run(str(tmp_path)).checkpoints
    assert [each.step for each in (first, second, third)] == [30, 20, 10]
    assert (first.path, first.sequence, first.world_size) == (tmp_path / "step-0000000030", 1, 4)
    assert (first.metrics, first.time_seconds, first.verified) == ({"loss": 0.5}, 1_790_000_000.0, False)
    assert first.bytes == sum(each.stat().st_size for each in first.path.iterdir() if each.name != "manifest.json")
    assert (second.pinned, second.counts) == ("the paper", True)
    assert (third.problem, third.counts) == ("index.json is missing", False)


def test_latest_and_best_are_among_those_that_count(tmp_path):
    run = ckptman.Run(tmp_path)
    assert (run.latest, run.best("loss")) == (None, None)
    for step, loss in ((1, 0.5), (2, 0.25), (3, 0.25), (4, float("nan")), (5, float("-inf")), (6, 0.0)):
        entry = commit(tmp_path, step, metrics={"loss": loss})
    remember_damage(entry.path, entry.require_manifest(), "a block is not what was saved")
    commit(tmp_path, 7)
    (tmp_path / "step-0000000008").mkdir()
    found = (run.latest, run.best("loss"), run.best("loss", "max"))
    assert [each.step for each in found if each is not None] == [7, 3, 1]
    with pytest.raises(ckptman.NotFoundError, match="has the metric 'accuracy': they have loss"):
        run.best("accuracy")
    assert run.checkpoints[-2].problem == "a block is not what was saved"
    with pytest.raises(ckptman.ConfigError, match='"min" or "max"'):
        run.best("loss", "lowest")


def test_the_best_is_right_where_a_copy_has_the_sequence_of_another(tmp_path):
    for step, loss in ((1, 0.5), (2, 0.25)):
        commit(tmp_path, step, metrics={"loss": loss}, sequence=4)
    run = ckptman.Run(tmp_path)
    found = run.best("loss"), run.best("loss", "max")
    assert [each.step for each in found if each is not None] == [2, 1]


def test_latest_is_what_a_restore_takes_so_it_is_finite_where_one_is(tmp_path):
    model, policy = torch.nn.Linear(2, 2), ckptman.EverySteps(1)
    with ckptman.Checkpointer(tmp_path, {"w": model}, save_policy=policy, async_save=False) as checkpointer:
        for step, value in ((1, 1.0), (2, float("nan"))):
            torch.nn.init.constant_(model.weight, value)
            checkpointer.step(step, metrics={"loss": 1.0 / step})
    run = ckptman.Run(tmp_path)
    assert ["w" in each.nonfinite for each in run.checkpoints] == [False, True]
    assert [each.step for each in (run.latest, run.best("loss")) if each is not None] == [1, 1]


def test_latest_is_none_that_a_restore_suspects(tmp_path):
    for step in (1, 2):
        commit(tmp_path, step)
    make_suspect(tmp_path, 2)
    run = ckptman.Run(tmp_path)
    assert run.latest is not None
    assert run.latest.step == 1
    shutil.rmtree(run.latest.path)
    assert run.latest.step == 2, "where all are suspect, a restore says so and somebody has to look"


def test_what_a_newer_ckptman_wrote_may_be_the_latest_so_none_before_it_is(tmp_path):
    commit(tmp_path, 1, metrics={"loss": 1.0})
    manifest = commit(tmp_path, 2).path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format_version": 99}))
    run = ckptman.Run(tmp_path)
    assert "newer" in run.checkpoints[0].problem
    for ask in (lambda: run.latest, lambda: run.best("loss")):
        with pytest.raises(ckptman.FormatVersionError):
            ask()


def test_events_are_those_of_the_journal_and_tell_the_run_id_before_the_first_checkpoint(tmp_path):
    run = ckptman.Run(tmp_path)
    assert (run.events(), run.run_id) == ([], None)
    journal = Journal(journal_path(tmp_path))
    journal.record("attempt_started", run_id="italia")
    journal.close()
    assert [each["event"] for each in run.events()] == ["attempt_started"]
    assert run.run_id == "italia"


def test_a_root_that_is_none_is_never_an_empty_run(tmp_path):
    folder = commit(tmp_path, 1).path
    away = ckptman.Run(tmp_path / "away")
    for ask in (lambda: away.checkpoints, lambda: away.latest, away.events, lambda: away.run_id):
        with pytest.raises(ckptman.NotFoundError, match="there is no checkpoint root"):
            ask()
    with pytest.raises(ckptman.ConfigError, match="one checkpoint, not a root"):
        _ = ckptman.Run(folder).checkpoints


ASK = """
import sys, ckptman
run = ckptman.Run(sys.argv[1])
run.checkpoints, run.latest, run.best("loss"), run.events(), run.run_id
print(sorted({"torch", "numpy", "rich"} & set(sys.modules)))
"""


def test_asking_needs_no_torch_and_no_numpy_and_writes_nothing(tmp_path):
    commit(tmp_path, 1, metrics={"loss": 1.0})
    before = sorted((each, each.stat().st_mtime_ns) for each in tmp_path.rglob("*"))
    ran = subprocess.run([sys.executable, "-c", ASK, str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")
    assert sorted((each, each.stat().st_mtime_ns) for each in tmp_path.rglob("*")) == before


# ---- what a program does with it -------------------------------------------------------------------------------------


def train(root, until, stop=None, **options):
    model = torch.nn.Linear(2, 2)
    with (
        contextlib.suppress(SystemExit),
        ckptman.Checkpointer(
            root, {"model": model}, save_policy=5, deadline=None, watchdog=None, **options
        ) as checkpointer,
    ):
        for step in range(checkpointer.restore() + 1, until + 1):
            checkpointer.step(step, {"loss": 1 / step, **({"eval": 2.0 * step} if step % 5 == 0 else {})})
            if step == stop:
                sys.exit("killed")


def test_metrics_by_step_over_all_attempts(tmp_path):
    run = ckptman.Run(tmp_path)
    assert run.metrics("loss") == ([], [])
    train(tmp_path, 12, stop=8)
    train(tmp_path, 12)
    assert run.metrics("loss") == (list(range(1, 13)), [1 / step for step in range(1, 13)])
    assert run.metrics("eval").steps == [5, 10]
    with pytest.raises(ckptman.NotFoundError, match="has the metric 'lose': there are eval, loss"):
        run.metrics("lose")
    with pytest.raises(ckptman.NotFoundError, match="there is no checkpoint root"):
        ckptman.Run(tmp_path / "missing").metrics("loss")


def test_steps_that_a_rollback_left_behind_are_replaced_by_those_that_follow(tmp_path):
    train(tmp_path, 10)
    subprocess.run([sys.executable, "-m", "ckptman", "rollback", tmp_path, "--to-step", "5", "--why", "x"], check=True)
    train(tmp_path, 7)
    assert ckptman.Run(tmp_path).metrics("loss").steps == list(range(1, 8))


def test_a_checkpoint_stands_for_its_path_and_a_root_for_its_newest(tmp_path):
    train(tmp_path / "run", 10, metadata={"lr": 0.1})
    latest = ckptman.Run(tmp_path / "run").latest
    assert latest is not None
    assert latest.metadata == {"lr": 0.1}
    assert os.fspath(latest) == str(latest.path)
    state = {"model": torch.nn.Linear(2, 2)}
    for each in (latest, latest.path, str(latest.path), tmp_path / "run"):
        ckptman.load(state, each)
        assert torch.equal(ckptman.read(each)["model"]["weight"], state["model"].weight)
    assert ckptman.export(latest, tmp_path / "out").tensors == 2
    for each in ("", None, 3):
        with pytest.raises(ckptman.ConfigError, match="path is a checkpoint, the path of one, or a root"):
            ckptman.load(state, each)


def test_waiting_for_new_checkpoints_ends_with_the_run(tmp_path):
    run, found, checkpoint = ckptman.Run(tmp_path / "run"), [], None
    thread = threading.Thread(target=train, args=(tmp_path / "run", 20), kwargs={"signals": False})
    assert run.wait_for_new(timeout_seconds=0) is None
    thread.start()
    while checkpoint := run.wait_for_new(checkpoint, poll_seconds=0.001):
        found.append(checkpoint.step)
    thread.join()
    assert found[-1] == 20
    assert found == sorted(set(found))


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"path": object()}, "cannot be written as JSON .*: give a dict of plain values"),
        ([1], "metadata is not a list: give a dict"),
        ({"x": "y" * 100_000}, "of at most 65,536: every look at the root reads it"),
    ],
)
def test_metadata_that_a_manifest_cannot_have_is_refused(tmp_path, metadata, told):
    with pytest.raises(ckptman.ConfigError, match=told):
        ckptman.Checkpointer(tmp_path, {"x": {}}, metadata=metadata)


def test_objects_say_what_they_are(tmp_path):
    loader = ckptman.ResumableLoader(torch.utils.data.DataLoader(range(10), 3))
    with ckptman.Checkpointer(tmp_path, {"data": loader, "rng": ckptman.RNGState()}, save_policy=5) as run:
        next(iter(loader))
        run.step(1)
        assert repr(run).startswith(f"Checkpointer({str(tmp_path)!r}, step 1, EverySteps(")
        assert not run.saving
    assert repr(run).startswith(f"Checkpointer({str(tmp_path)!r}, step 1, closed, ")
    assert repr(loader) == "ResumableLoader(DataLoader, epoch 0, batch 1 of 4)"
    assert repr(ckptman.PerRank([1])) == "PerRank([1])"
    assert repr(ckptman.FromRank0(2)) == "FromRank0(2)"
    assert repr(ckptman.RNGState()) == "RNGState()"
    assert repr(ckptman.Trainable(torch.nn.Linear(2, 2))) == "Trainable(Linear)"
