import errno
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from ckptman.catalog.backends import source as copysource
from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.catalog import Catalog
from ckptman.cli import progress
from ckptman.cli.app import main
from ckptman.cli.progress import left_text
from ckptman.forecast.transfer_time import Remaining
from ckptman.transfer.progress import Meter
from tests.helpers.checkpoints import commit, flip_byte, steps_of

Told = pytest.CaptureFixture[str]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Steps 100, 200 and 300; the newest is 200. Seen from the folder that holds the root."""
    for step in (100, 300, 200):
        commit(tmp_path / "run", step)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def steps(path):
    return sorted(steps_of(Catalog(path).complete()))


def test_the_newest_is_copied_unless_another_is_named(root, capsys):
    assert main(["copy", "run", "backup"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step 200: copied, 587 B in 7 files; every byte read back",
        "Copied 1 checkpoint, 587 B, to backup.",
    ]
    assert main(["copy", "run", "backup", "--step", "300"]) == 0
    assert main(["copy", "run/step-0000000100", "backup"]) == 0
    assert steps("backup") == [100, 200, 300]
    assert [entry.step for entry in Catalog("backup").scan()] == [100, 300, 200]


def test_what_is_there_is_told_and_not_copied_again(root, capsys):
    assert main(["copy", "run", "backup"]) == 0
    capsys.readouterr()
    assert main(["copy", "run", "backup"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step 200: there already, 587 B in 7 files, every byte verified",
        "Nothing to copy: 1 checkpoint in backup already.",
    ]
    assert main(["copy", "run", "backup", "--all"]) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "Copied 2 checkpoints, 1.1 KiB, to backup; 1 checkpoint there already."
    )


def test_of_all_those_that_cannot_be_copied_are_told_at_the_end(root, capsys):
    (root / "step-0000000100" / "index.json").unlink()
    flip_byte(root / "step-0000000300" / "__0_0.distcp")
    (root / "step-0000000050").mkdir()
    assert main(["copy", "run", "backup", "--all"]) == 4
    told = capsys.readouterr()
    assert "step 50: not copied: it does not count: it has no manifest.json" in told.out
    assert "step 100: not copied: run/step-0000000100 is not a complete checkpoint: index.json is missing" in told.out
    assert "step 300: not copied: run/step-0000000300: __0_0.distcp is not what was saved: block 0" in told.out
    assert "Error: 2 checkpoints not copied, the first of step 100" in told.err
    assert steps("backup") == [200]
    assert main(["copy", "run", "backup", "--all", "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert [(each["step"], each["already"]) for each in found["checkpoints"]] == [(200, True)]
    assert [each["step"] for each in found["passed_over"]] == [50]
    assert [each["step"] for each in found["failed"]] == [100, 300]


def test_what_the_run_prunes_meanwhile_is_no_failure(root, capsys, monkeypatch):
    make = copysource.FolderOriginal.__init__

    def pruned(self, folder, manifest):
        if manifest.step == 300:
            shutil.rmtree(folder)
        make(self, folder, manifest)

    monkeypatch.setattr(copysource.FolderOriginal, "__init__", pruned)
    assert main(["copy", "run", "backup", "--all"]) == 0
    assert "step 300: not copied: it was deleted meanwhile" in capsys.readouterr().out
    assert steps("backup") == [100, 200]


def test_a_newest_that_is_pruned_meanwhile_gives_way_to_the_next(root, capsys, monkeypatch):
    make = copysource.FolderOriginal.__init__

    def pruned(self, folder, manifest):
        if manifest.step == 200:
            commit(root, 400)
            shutil.rmtree(folder)
        make(self, folder, manifest)

    monkeypatch.setattr(copysource.FolderOriginal, "__init__", pruned)
    assert main(["copy", "run", "backup"]) == 0
    assert steps("backup") == [400]
    commit(root, 200)
    assert main(["copy", "run", "backup", "--step", "200"]) == 3


def test_what_was_copied_before_a_destination_failed_is_told(root, capsys, monkeypatch):
    publish = LocalBackend.publish

    def fail(self, source, name, *arguments, **options):
        if name == "step-0000000300":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return publish(self, source, name, *arguments, **options)

    monkeypatch.setattr(LocalBackend, "publish", fail)
    assert main(["copy", "run", "backup", "--all", "--json"]) == 10
    found = json.loads(capsys.readouterr().out)
    assert [each["step"] for each in found["checkpoints"]] == [100]
    assert [each["step"] for each in found["failed"]] == [300]
    assert steps("backup") == [100]


def test_a_newest_that_was_never_finished_is_passed_over_and_told(root, capsys):
    (root / "step-0000000400").mkdir()
    assert main(["copy", "run", "backup"]) == 0
    assert capsys.readouterr().out.startswith("step 400: not copied: it does not count: it has no manifest.json\n")
    assert steps("backup") == [200]


def test_a_newest_that_is_damaged_is_missed_and_the_one_before_is_copied(root, capsys):
    commit(root, 400)
    (root / "step-0000000400" / "__0_0.distcp").unlink()
    assert main(["copy", "run", "backup"]) == 4
    assert "not copied: run/step-0000000400 is not a complete checkpoint: __0_0.distcp is m" in capsys.readouterr().out
    assert steps("backup") == [200]
    assert main(["copy", "run", "backup", "--step", "400"]) == 4
    assert main(["copy", "run/step-0000000400", "backup"]) == 4


def test_one_that_a_rollback_left_behind_is_copied_only_by_name(root):
    assert main(["rollback", "run", "--to-step", "100"]) == 0
    assert main(["copy", "run", "backup", "--all"]) == 0
    assert steps("backup") == [100]
    assert main(["copy", "run", "backup", "--step", "300"]) == 0
    assert sorted(steps_of(Catalog("backup").look(abandoned=True))) == [100, 300]


def test_a_newer_format_is_not_gone_back_behind(root, capsys):
    newer = root / "step-0000000500"
    newer.mkdir()
    (newer / "manifest.json").write_text('{"format_version": 99}')
    assert main(["copy", "run", "backup"]) == 9
    assert main(["copy", "run", "backup", "--all"]) == 9
    assert steps("backup") == [100, 200, 300]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere", "backup"], 3, "there is no checkpoint root nowhere"),
        (["empty", "backup"], 3, "holds no checkpoint"),
        (["run", "backup", "--step", "7"], 3, "has no checkpoint of step 7; the latest there are: 100, 300, 200"),
        (["run", "run"], 2, "name a root outside of what is copied"),
        (["run", "run/backup"], 2, "name a root outside of what is copied"),
        (["empty", "empty"], 2, "name a root outside of what is copied"),
        (["run/step-0000000100", "run"], 2, "is in run already"),
        (["run", "run/step-0000000100"], 2, "name a root outside of what is copied"),
        (["run", "a-file"], 10, "is a file, not a folder"),
        (["run", "a-file/backup"], 10, "cannot be made"),
        (["run", "backup", "--limit", "fast"], 2, "--limit: a rate above 0 with its unit, such as 5GB/s"),
        (["run", "backup", "--limit", "0MB/s"], 2, "--limit"),
        (["run", "backup", "--threads", "0"], 2, "--threads must be a whole number of at least 1"),
        (["run", "backup", "--threads", "5000"], 2, "--threads: at most 1,024"),
        (["run", "backup", "--step", "100", "--all"], 2, "--step and --all exclude each other"),
        (["run", "nosuch://bucket/x"], 2, "nosuch://bucket/x"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(arguments, code, message, root, capsys):
    Path("empty").mkdir()
    Path("a-file").touch()
    assert main(["copy", *arguments]) == code
    told = capsys.readouterr()
    assert message in told.err
    assert not Path("backup").exists()


def test_what_plain_dcp_wrote_is_copied_and_what_that_means_is_said(root, capsys):
    Path("plain").mkdir()
    for name in (".metadata", "__0_0.distcp"):
        Path("plain", name).write_bytes(b"bytes" * 1000)
    assert main(["copy", "plain", "backup"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "plain: copied, 9.8 KiB in 2 files; every byte read back",
        "  it has no digests of its own: the copy is held against what was read, not what was saved",
        "Copied 1 checkpoint, 9.8 KiB, to backup.",
    ]
    assert Path("backup/plain/__0_0.distcp").read_bytes() == Path("plain/__0_0.distcp").read_bytes()
    assert main(["copy", "plain", "s3://bucket/x"]) == 2


def test_a_destination_that_keeps_all_in_memory_is_told(root, capsys, monkeypatch):
    monkeypatch.setattr("ckptman.catalog.backends.local_draft.drop_all", lambda *_: True)
    assert main(["copy", "run", "backup"]) == 0
    assert "  not proved: that it is on storage, for this file system keeps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("left", "told"),
    [
        (None, ""),
        (Remaining(42.0, 0.0), "42 s left"),
        (Remaining(600.0, 1.0), "10 min left"),
        (Remaining(24.0, 8.0), "32 s left: 24 s of bytes, 8 s of files"),
    ],
)
def test_the_time_that_is_left_is_told_with_what_it_is_made_of(left, told):
    assert left_text(left) == told


def test_a_terminal_gets_a_bar_for_each_phase(root, monkeypatch, capsys):
    seen = []

    def left(remaining):
        seen.append(left_text(remaining))
        return seen[-1]

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "left_text", left)
    monkeypatch.setenv("TERM", "xterm")
    with progress.copy_progress("step\x1b 7") as meter:
        assert isinstance(meter, Meter)
        meter.begin("copying", 100, 2)
        meter.moved(50, 1.0)
        meter.ended_file(1.0)
        meter.begin("verifying", 100, 0)
        meter.moved(100, 1.0)
    assert any("left" in each for each in seen)
    assert "\x1b 7" not in capsys.readouterr().err


def test_where_a_root_holds_checkpoints_of_others_one_is_named(root, capsys):
    for name in ("step-500", "step-1000"):
        Path("titan", name).mkdir(parents=True)
        Path("titan", name, ".metadata").touch()
    assert main(["copy", "titan", "backup"]) == 3
    assert "but titan/step-1000 is a checkpoint of torchtitan: name that folder" in capsys.readouterr().err
