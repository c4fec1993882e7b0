"""Which checkpoint of a root a verb takes where none is named; `ckptman path` for scripts."""

import math

import pytest

from ckptman.cli.app import main
from ckptman.cli.select import choose_objects
from ckptman.storage.catalog.backends import object_store
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.format.manifest import Nonfinite
from tests.helpers.checkpoints import commit, make_suspect, steps_of

NOTE = (
    "step 40 is not finite (tensor model.weight), so this is step 20, as for a restore: name the newest by its step, "
    "or its folder, to have that\n"
)


@pytest.fixture
def root(tmp_path):
    """Steps 10 to 40; of 20 a metric is infinite, and 30 and 40 hold NaN."""
    root = tmp_path / "run"
    commit(root, 10)
    commit(root, 20, metrics={"norm": math.inf}, nonfinite=Nonfinite(metrics=("norm",)))
    for step in (30, 40):
        commit(root, step, nonfinite=Nonfinite(tensors=("model.weight",)))
    return root


def test_a_copy_is_of_what_a_restore_takes_and_says_so(root, tmp_path, capsys):
    (root / "step-0000000050").mkdir()
    assert main(["copy", str(root), str(tmp_path / "a")]) == 0
    assert steps_of(Catalog(tmp_path / "a").complete()) == [20]
    told = capsys.readouterr()
    assert NOTE in told.err
    assert "step 50: not copied: it does not count" in told.out
    assert main(["copy", str(root), str(tmp_path / "b"), "--step", "40"]) == 0
    assert steps_of(Catalog(tmp_path / "b").complete()) == [40]
    assert "not finite" not in capsys.readouterr().err


def test_in_an_object_store_it_is_the_same(root, monkeypatch, capsys):
    monkeypatch.setattr(object_store, "ObjectBackend", lambda url: Catalog(root))
    _, entries = choose_objects("s3://bucket/run", None, False)
    assert ([entry.step for entry in entries], capsys.readouterr().err) == ([20], NOTE)


def test_pins_are_set_and_taken_off_where_a_restore_would_look(root, ends):
    assert ends(0, "pin", root, "--why", "the paper") == ("Pinned step 20: the paper\n", NOTE)
    assert ends(0, "unpin", root) == ("Step 20 is no longer pinned.\n", NOTE)


def test_a_diff_of_two_roots_is_of_what_restores_take(root, tmp_path, ends):
    assert ends(0, "diff", root, root / "step-0000000020").err == NOTE


def test_verbs_that_show_what_is_not_finite_take_the_newest(root, ends):
    told = ends(0, "verify", root)
    assert told.out.startswith("step 40: good")
    assert "remark: NaN or infinity in tensor model.weight, as it was saved" in told.out
    assert told.err == ""


def test_where_none_is_finite_it_is_the_newest(tmp_path, ends):
    for step in (10, 20):
        commit(tmp_path, step, nonfinite=Nonfinite(tensors=("model.weight",)))
    assert ends(0, "pin", tmp_path, "--why", "x") == ("Pinned step 20: x\n", "")


def test_a_suspect_is_passed_over_as_by_a_restore(tmp_path, ends):
    for step in (10, 20):
        commit(tmp_path, step)
    make_suspect(tmp_path, 20)
    told = ends(0, "pin", tmp_path, "--why", "x")
    assert told.out == "Pinned step 10: x\n"
    assert "step 20 is a suspect: attempts 1 and 2 loaded it and crashed both after step 23" in told.err
    assert "The newest is a suspect: a restore goes back to step 10." in ends(0, "list", tmp_path).out
    assert ends(0, "verify", tmp_path).out.startswith("step 20: good")


def test_nan_is_never_taken_instead_of_a_suspect(root, ends):
    for step in (10, 20):
        make_suspect(root, step)
    told = ends(0, "pin", root, "--why", "x")
    assert told.out == "Pinned step 20: x\n"
    assert "step 40 is not finite" in told.err


def test_a_journal_that_cannot_be_read_is_said(tmp_path, monkeypatch, ends):
    commit(tmp_path, 10)

    def refuse(root):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("ckptman.runtime.journal.suspects_of", refuse)
    told = ends(0, "pin", tmp_path, "--why", "x")
    assert told.out == "Pinned step 10: x\n"
    assert "cannot be read (Permission denied)" in told.err


@pytest.mark.parametrize(
    ("options", "step"),
    [([], 30), (["--latest"], 30), (["--best", "loss"], 20), (["--best", "loss", "--max"], 10), (["--step", "10"], 10)],
)
def test_one_path_is_printed_and_nothing_else(options, step, tmp_path, ends):
    for number, loss in ((10, 0.5), (20, 0.25), (30, math.nan)):
        commit(tmp_path, number, metrics={"loss": loss})
    (tmp_path / "step-0000000040").mkdir()
    assert ends(0, "path", tmp_path, *options) == (f"{tmp_path}/step-{step:010d}\n", "")
