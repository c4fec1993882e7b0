import json
import time

import pytest

from ckptman.catalog import prune
from ckptman.catalog.catalog import Catalog
from ckptman.cli.app import main
from ckptman.format.paths import run_folder
from tests.helpers.checkpoints import commit, steps_of


@pytest.fixture
def root(tmp_path):
    """Steps 100 to 500; the loss is lowest at 200, the accuracy highest at 300; and what two crashes left."""
    for step, loss, accuracy in ((100, 3.0, 0.1), (200, 1.0, 0.2), (300, 2.0, 0.9), (400, 4.0, 0.3), (500, 5.0, 0.4)):
        commit(tmp_path, step, time_seconds=time.time(), metrics={"loss": loss, "accuracy": accuracy})
    for name in ("step-0000000600.tmp-deadbeef-1", "step-0000000050.trash-deadbeef-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"x" * 1024)
    return tmp_path


def _kept(root):
    return steps_of(Catalog(root).scan())


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--keep-last", "2"], [400, 500]),
        (["--keep-every", "200"], [200, 400, 500]),
        (["--keep-best", "loss"], [200, 500]),
        (["--keep-best", "loss:2:min"], [200, 300, 500]),
        (["--keep-best", "accuracy:1:max", "--keep-best", "loss"], [200, 300, 500]),
        (["--keep-last", "1", "--keep-every", "300", "--keep-best", "accuracy:max"], [300, 500]),
        (["--leftovers"], [100, 200, 300, 400, 500]),
        (["--keep-steps", "100,300,999"], [100, 300, 500]),
        (["--keep-within", "1d"], [100, 200, 300, 400, 500]),
        (["--keep-daily", "3"], [500]),
        (["--max-percent", "100"], [100, 200, 300, 400, 500]),
        (["--max-bytes", "1B"], [500]),
        (["--keep-last", "3", "--max-bytes", "1300B", "--jobs", "1"], [400, 500]),
    ],
)
def test_what_a_rule_keeps_stays_and_the_rest_goes(options, kept, root):
    assert main(["prune", str(root), *options]) == 0
    assert _kept(root) == kept
    assert Catalog(root).leftovers() == []


def test_each_line_has_its_reason_and_the_end_says_what_was_freed(root, capsys):
    assert main(["prune", str(root), "--keep-last", "1", "--keep-best", "loss"]) == 0
    lines = [line.split(maxsplit=5) for line in capsys.readouterr().out.splitlines()]
    assert lines[1][:3] == ["delete", "step", "100"]
    assert lines[1][5] == "no rule keeps it: older than the last one, loss 3 is not among the best 1"
    assert lines[2][:3] == ["keep", "step", "200"]
    assert lines[2][5] == "keep best 1 by loss (min): 1"
    assert lines[5][:3] == ["keep", "step", "500"]
    assert lines[5][5] == "newest; keep last 1 of 1"
    assert lines[6][:4] == ["clear", "step-0000000050.trash-deadbeef-2", "1.0", "KiB"]
    assert " ".join(lines[-1]).startswith("Deleted 3 of 5 checkpoints and 2 leftovers: ")


def test_a_dry_run_is_the_same_plan_and_touches_nothing(root, capsys):
    before = sorted(root.rglob("*"))
    plans = []
    for option in (["--dry-run"], []):
        assert main(["prune", str(root), "--keep-last", "2", "--json", *option]) == 0
        plans.append(json.loads(capsys.readouterr().out))
        if option:
            assert sorted(root.rglob("*")) == before
    dry, real = plans
    assert (dry.pop("dry_run"), real.pop("dry_run")) == (True, False)
    assert dry == real
    assert [each["step"] for each in real["checkpoints"] if each["keep"]] == [400, 500] == _kept(root)
    assert real["freed_bytes"] > 2048


def test_pruning_twice_finds_nothing_more(root, capsys):
    assert main(["prune", str(root), "--keep-last", "2"]) == 0
    capsys.readouterr()
    assert main(["prune", str(root), "--leftovers"]) == 0
    assert capsys.readouterr().out == "Nothing to delete: 2 checkpoints, no leftovers.\n"


def test_what_is_incomplete_is_neither_counted_nor_touched(root):
    broken = Catalog(root).entry(500).path
    (broken / "__0_0.distcp").unlink()
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert sorted(_kept(root)) == [400, 500]


def test_a_removal_that_fails_is_told_and_can_be_repeated(root, monkeypatch, capsys):
    from ckptman.io.durable_files import Disk

    def refuse(self, source, target):
        raise PermissionError(13, "Permission denied", str(source))

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "rename", refuse)
        assert main(["prune", str(root), "--keep-last", "1"]) == 10
    assert "cannot be removed (Permission denied): check permissions and prune again" in capsys.readouterr().err
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert _kept(root) == [500]


def test_a_root_without_checkpoints_is_no_error_whatever_the_metric(tmp_path):
    run_folder(tmp_path).mkdir()
    assert main(["prune", str(tmp_path), "--keep-best", "loss"]) == 0


def test_a_second_prune_of_this_host_waits(root, monkeypatch, capsys):
    run_folder(root).mkdir(exist_ok=True)
    monkeypatch.setattr(prune, "LOCK_SECONDS", 0.1)
    with prune.one_at_a_time(root):
        assert main(["prune", str(root), "--keep-last", "1"]) == 1
        assert "another ckptman prune has been at work" in capsys.readouterr().err
        assert len(_kept(root)) == 5
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert _kept(root) == [500]
