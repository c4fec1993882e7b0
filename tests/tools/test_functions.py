"""The verbs as functions: each takes a checkpoint, its path or a root, and returns what the command line prints."""

import pytest
import torch

import ckptman
from ckptman import ConfigError, CorruptError, KeepBest, KeepLast, NotFoundError, Run
from tests.helpers.checkpoints import flip_byte


@pytest.fixture
def root(tmp_path):
    """Steps 1 to 4, the loss of step 2 the lowest."""
    model, run = torch.nn.Linear(2, 2), tmp_path / "run"
    with ckptman.Checkpointer(run, {"model": model, "lr": {"lr": 0.1}}, save_policy=1, deadline=None) as checkpointer:
        for step, loss in enumerate((3.0, 1.0, 2.0, 4.0), 1):
            with torch.no_grad():
                model.weight += 1
            checkpointer.step(step, {"loss": loss})
    return run


def steps(root):
    return [each.step for each in Run(root).checkpoints]


def test_diff(root):
    first, *_, last = Run(root).checkpoints
    found = ckptman.diff(first, root)
    assert ([each.name for each in found.tensors], found.values, found.same) == (["model.weight"], [], False)
    assert found.tensors[0].kind == "changed"
    assert ckptman.diff(last, str(root)).same
    assert ckptman.diff(first, last, only=["model.bias"]).same
    with pytest.raises(ConfigError, match="only=modle matches nothing"):
        ckptman.diff(first, last, only="modle")


def test_verify(root):
    latest = Run(root).latest
    report = ckptman.verify(root, world_sizes=[2])
    assert (report.good, report.step, report.levels, list(report.loads)) == (True, 4, ["digests", "coverage"], [2])
    assert Run(root).latest.verified
    flip_byte(latest.path / "__0_0.distcp")
    report = ckptman.verify(latest)
    assert not report.good
    assert report.is_damaged
    assert (ckptman.verify(root).step, ckptman.verify(root).good) == (4, False)  # not an older one
    with pytest.raises(NotFoundError):
        ckptman.verify(root / "missing")
    for wrong in ({"world_sizes": [0]}, {"world_sizes": [2**22]}, {"threads": 0}):
        with pytest.raises(ConfigError):
            ckptman.verify(root, **wrong)


@pytest.mark.parametrize(("name", "told"), [("tmp", "never committed"), ("trash", "was deleted")])
def test_what_was_never_committed_or_was_deleted_does_not_count(root, tmp_path, name, told):
    path = root / "step-0000000004"
    path = path.rename(f"{path}.{name}-0a1b2c3d")
    assert not ckptman.verify(path).good
    for act in (lambda: ckptman.pin(path, "x"), lambda: ckptman.copy(path, tmp_path / "there")):
        with pytest.raises(CorruptError, match=told):
            act()
    assert not (tmp_path / "there").exists()


def test_an_object_store_and_other_folders_are_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    for act in (ckptman.verify, lambda path: ckptman.prune(path, 1), lambda path: ckptman.pin(path, "x"), ckptman.read):
        with pytest.raises(ConfigError, match="is in an object store"):
            act("s3://bucket/run")
    with pytest.raises(ConfigError, match="is not a root of checkpoints"):
        ckptman.prune(tmp_path / "folder", 1)
    with pytest.raises(ConfigError):
        ckptman.prune("", 1)


def test_prune(root):
    plan = ckptman.prune(root, KeepLast(1) | KeepBest("loss"), dry_run=True)
    assert ([each.step for each in plan.deleted], sorted(plan.kept), steps(root)) == ([1, 3], [2, 4], [1, 2, 3, 4])
    done = ckptman.prune(root, KeepLast(1) | KeepBest("loss"))
    assert (done.deleted, done.kept, steps(root)) == (plan.deleted, plan.kept, [2, 4])
    assert done.freed_bytes >= sum(each.bytes for each in done.deleted)
    assert [each.step for each in ckptman.prune(root, 1).deleted] == [2]
    assert ckptman.prune(root, 1).deleted == ()
    for keep in ("3", True):
        with pytest.raises(ConfigError, match="keep is a policy"):
            ckptman.prune(root, keep)
    assert ckptman.prune(root).deleted == ()  # the run keeps all
    with pytest.raises(ConfigError, match="files_per_second"):
        ckptman.prune(root, 1, files_per_second=0)
    with pytest.raises(ConfigError, match=r"is (one|a) checkpoint"):
        ckptman.prune(Run(root).latest, 1)


def test_pin_and_unpin(root):
    first = Run(root).checkpoints[0]
    ckptman.pin(first, "for the paper")
    assert Run(root).checkpoints[0].pinned == "for the paper"
    ckptman.prune(root, 1)
    assert steps(root) == [1, 4]
    assert (ckptman.unpin(first.path), ckptman.unpin(first.path)) == (True, False)
    with pytest.raises(ConfigError):
        ckptman.pin(first, " ")


def test_copy(root, tmp_path):
    best = Run(root).best("loss")
    (copied,) = ckptman.copy(best, tmp_path / "there")
    assert (copied.step, copied.already, steps(tmp_path / "there")) == (2, False, [2])
    assert [each.already for each in ckptman.copy(root, tmp_path / "there", every=True)] == [False, True, False, False]
    with pytest.raises(ConfigError, match="threads"):
        ckptman.copy(root, tmp_path / "there", threads=-1)
    with pytest.raises(ConfigError, match="inside of"):
        ckptman.copy(root, root / "inner")
    with pytest.raises(NotFoundError):
        ckptman.copy(tmp_path / "missing", tmp_path / "there", every=True)
