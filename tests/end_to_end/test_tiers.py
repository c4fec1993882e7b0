"""A run with tiers: copies are made behind the training, and a restore takes the newest good one wherever it is."""

import contextlib
import io
import shutil
import subprocess
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import ckptman
from ckptman.cli.app import main
from ckptman.errors import CkptmanError, ConfigError
from ckptman.runtime.journal import read_journal
from ckptman.session import drain_process
from ckptman.storage.catalog.backends.backend import open_backend
from ckptman.storage.catalog.backends.object_store import REQUEST_TRIES, ObjectBackend
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.format.paths import journal_path
from tests.helpers.checkpoints import flip_byte
from tests.helpers.object_store import bucket_fixture, proxy_fixture
from tests.helpers.ranks import run_ranks

__all__ = ["bucket_fixture", "proxy_fixture"]


def run(root, tiers, until, *, step=None, retention=None, stop=0):
    """A run that counts and saves every 10 steps; what it has counted to is checked against where it starts."""
    state = {"count": {"n": torch.zeros(4)}}
    with ckptman.Checkpointer(
        root, state, save_policy=ckptman.EverySteps(10), retention=retention, tiers=tiers, deadline=None
    ) as checkpointer:
        start = checkpointer.restore(step=step)
        assert state["count"]["n"].tolist() == [start] * 4
        for now in range(start + 1, until + 1):
            state["count"]["n"] += 1
            checkpointer.step(now)
            if now == stop:
                raise RuntimeError("it crashed")
    return start


class DrainHere:
    """`ckptman drain` in this process, in place of one of its own that takes seconds to start."""

    pid = 2**22 + 1
    """No process has that."""

    def __init__(self, command, *, stdout, stderr, **_):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            self.returncode = main(command[3:])
        stdout.write(out.getvalue().encode())
        stderr.write(err.getvalue().encode())

    def poll(self):
        return self.returncode

    def wait(self, seconds):
        return self.returncode


@pytest.fixture
def drains_here(monkeypatch):
    monkeypatch.setattr(drain_process, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": DrainHere}))


here = pytest.mark.usefixtures("drains_here")


def steps(root):
    return [entry.step for entry in Catalog(root).scan()]


def steps_in(tier):
    return [entry.step for entry in open_backend(tier).list() if entry.complete]


def events(root, name):
    return [each for each in read_journal(journal_path(root))[0] if each["event"] == name]


def test_a_run_that_is_finished_has_filled_its_tiers(tmp_path):
    root, far = tmp_path / "run", tmp_path / "far"
    tiers = [ckptman.Tier(far, every=4)]
    run(str(root), tiers, 80, retention=ckptman.KeepLast(1))
    assert steps(far) == [40, 80]
    assert {(each["step"], each["tier"]) for each in events(root, "drained")} == {(40, str(far)), (80, str(far))}
    assert 80 in steps(root)
    assert 10 not in steps(root)
    assert not events(root, "drain_failed")


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_trackers_hear_of_the_last_drain(tmp_path):
    class Hearing(ckptman.Tracker):
        def __init__(self):
            self.events = []

        def event(self, event, fields):
            self.events.append((event, fields.get("step")))

    hearing = Hearing()
    with ckptman.Checkpointer(
        tmp_path / "root",
        {"n": 1},
        save_policy=ckptman.EverySteps(10),
        tiers=[ckptman.Tier(tmp_path / "far")],
        trackers=[hearing],
        deadline=None,
    ) as checkpointer:
        checkpointer.restore()
        checkpointer.step(10)
    assert ("drained", 10) in hearing.events


def test_ctrl_c_while_tiers_are_filled_at_the_end_gives_the_root_back(tmp_path, monkeypatch):
    close, calls = drain_process.Drainer.close, []

    def interrupted(drainer, *, finish):
        calls.append(finish)
        if finish:
            raise KeyboardInterrupt
        close(drainer, finish=False)

    monkeypatch.setattr(drain_process.Drainer, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "root", [ckptman.Tier(tmp_path / "far")], 10)
    assert calls == [True, False]
    calls.clear()
    monkeypatch.setattr(ckptman.Checkpointer, "_write_the_end", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "root", [ckptman.Tier(tmp_path / "far")], 20)
    assert calls == [False], "no tier is filled after that"
    monkeypatch.undo()
    assert run(tmp_path / "root", [ckptman.Tier(tmp_path / "far")], 20) == 20


def test_several_ranks_wait_for_no_drain(tmp_path):
    root, far = tmp_path / "run", tmp_path / "far"
    assert run_ranks(2, run, str(root), [ckptman.Tier(far)], 30, limit=150) == [0, 0]
    assert steps(far) == [10, 20, 30]
    shutil.rmtree(root)
    assert run_ranks(2, run, str(root), [ckptman.Tier(far)], 40, limit=150) == [30, 30]


@here
@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_root_that_was_emptied_goes_on_from_a_tier(kind, tmp_path):
    root, there = tmp_path / "run", str(tmp_path / "far") if kind == "folder" else f"memory://{tmp_path.name}/far"
    tiers = [ckptman.Tier(there, every=2, retention=ckptman.KeepLast(2))]
    assert run(root, tiers, 60, retention=ckptman.KeepLast(1)) == 0
    assert steps_in(there) == [40, 60]
    shutil.rmtree(root)
    assert run(root, tiers, 80) == 60
    there_too = [(60, 6)] if kind == "memory" else []  # which is fetched from a store
    entries = Catalog(root).scan()
    assert [(entry.step, entry.sequence) for entry in entries] == [*there_too, (70, 7), (80, 8)]
    assert entries[-1].require_manifest().restored_from == 60
    assert steps_in(there) == [60, 80]
    shutil.rmtree(root)
    assert run(root, tiers, 70, step=60) == 60
    assert Catalog(root).scan()[-1].sequence == 9


@here
def test_a_damaged_copy_gives_way_to_the_next_one_of_the_same(tmp_path):
    root, far = tmp_path / "run", tmp_path / "far"
    run(root, [ckptman.Tier(far)], 40)
    flip_byte(root / "step-0000000040" / "__0_0.distcp")
    with pytest.warns(RuntimeWarning, match="skipping the checkpoint of step 40"):
        assert run(root, [ckptman.Tier(far)], 40) == 40
    (restored,) = events(root, "restored")
    assert restored["path"] == str(far / "step-0000000040")
    flip_byte(root / "step-0000000020" / "__0_0.distcp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run(root, [ckptman.Tier(far)], 20, step=20) == 20


@here
def test_what_the_root_has_lost_a_part_of_is_fetched_again_from_a_store(tmp_path):
    root, tiers = tmp_path / "run", [ckptman.Tier(f"memory://{tmp_path.name}/far")]
    data = root / "step-0000000030" / "__0_0.distcp"
    run(root, tiers, 30)
    for damage in (data.unlink, lambda: flip_byte(data)):
        damage()
        with pytest.warns(RuntimeWarning, match="skipping the checkpoint of step 30"):
            assert run(root, tiers, 30) == 30
    assert main(["verify", str(root)]) == 0
    shutil.rmtree(root)  # a store is looked at before anything is started
    with ckptman.Checkpointer(root, {"count": {"n": torch.zeros(4)}}, tiers=tiers, deadline=None) as checkpointer:
        assert checkpointer.restore(path=tmp_path / "pretrained") == 30


@here
@pytest.mark.slow
def test_a_store_that_cannot_be_asked_is_no_reason_to_start_over(tmp_path, bucket, proxy, monkeypatch):
    monkeypatch.setattr(ObjectBackend, "attempts", 2)
    monkeypatch.setattr(ObjectBackend, "first_seconds", 0.0)
    root, tiers = tmp_path / "run", [ckptman.Tier(f"s3://{bucket}/runs/a")]
    run(root, tiers, 20)
    proxy.first(2 * REQUEST_TRIES, "503", lambda request: request.lists)
    with pytest.warns(RuntimeWarning, match="cannot be looked at"):
        assert run(root, tiers, 20) == 20
    shutil.rmtree(root)
    proxy.always("503", lambda request: request.lists)
    with pytest.raises(CkptmanError, match="That says nothing of what is there"):
        run(root, tiers, 20)
    proxy.fail = lambda request: None
    shutil.rmtree(root)
    assert run(root, tiers, 20) == 20


@pytest.mark.slow
def test_a_run_fills_an_object_store_by_a_process_of_its_own(tmp_path, bucket):
    run(tmp_path / "run", [ckptman.Tier(url := f"s3://{bucket}/runs/a")], 20)
    assert steps_in(url) == [10, 20]


def test_a_run_that_crashed_breaks_its_drain_off(tmp_path):
    root, far = tmp_path / "run", tmp_path / "far"
    with pytest.raises(RuntimeError, match="it crashed"):
        run(str(root), [ckptman.Tier(far, bytes_per_second=1.0)], 40, stop=30)
    assert steps(far) == []
    assert events(root, "failed")
    assert run(str(root), [ckptman.Tier(far)], 40) in (20, 30)
    assert steps(far)[-1] == 40
    assert set(steps(root)) <= set(steps(far))


@here
def test_a_tier_that_goes_away_does_not_end_the_run(tmp_path):
    root, far = tmp_path / "run", tmp_path / "far"
    tiers = [ckptman.Tier(far)]
    run(str(root), tiers, 20)
    shutil.rmtree(far)
    with pytest.warns(RuntimeWarning, match="far"):
        assert run(str(root), tiers, 40, retention=ckptman.KeepLast(1)) == 20
    assert steps(root) == [30, 40]  # those that were not copied to where they are awaited
    assert events(root, "drain_failed")


def test_what_is_no_tier_is_refused(tmp_path):
    for tiers in ("far", [tmp_path / "far"], ckptman.Tier("far")):
        with pytest.raises(ConfigError, match="tiers"):
            run(str(tmp_path / "run"), tiers, 1)
    assert not (tmp_path / "run").exists()
