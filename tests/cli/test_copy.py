"""`ckptman copy`: which checkpoints of a root it takes, what it says of the others, and how it ends."""

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from ckptman.cli import console
from ckptman.cli.app import main
from ckptman.storage.catalog.backends import copy_source
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.transfer.progress import Meter
from tests.helpers.checkpoints import commit, flip_byte, steps_of


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Steps 100, 200 and 300; the newest is 200. Seen from the folder that holds the root."""
    for step in (100, 300, 200):
        commit(tmp_path / "run", step)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def steps(path):
    return sorted(steps_of(Catalog(path).complete()))


def copied(*arguments):
    return main(["copy", "run", "backup", *arguments])


def test_the_newest_is_copied_unless_another_is_named(root, capsys):
    assert copied() == copied("--step", "300") == main(["copy", "run/step-0000000100", "backup"]) == 0
    assert [entry.step for entry in Catalog("backup").scan()] == [100, 300, 200]
    assert copied() == 0
    assert capsys.readouterr().out.endswith("\nNothing to copy: 1 checkpoint in backup already.\n")


def test_of_all_those_that_cannot_be_copied_are_told_at_the_end(root, capsys):
    (root / "step-0000000100" / "index.json").unlink()
    flip_byte(root / "step-0000000300" / "__0_0.distcp")
    (root / "step-0000000050").mkdir()
    assert copied("--all") == 4
    told = capsys.readouterr()
    assert "step 50: not copied: it does not count: it has no manifest.json" in told.out
    assert "step 100: not copied: run/step-0000000100 is not a complete checkpoint: index.json is missing" in told.out
    assert "step 300: not copied: run/step-0000000300: __0_0.distcp is not what was saved: block 0" in told.out
    assert "Error: 2 checkpoints not copied, the first of step 100" in told.err
    assert steps("backup") == [200]


def test_what_the_run_prunes_meanwhile_is_no_failure_and_gives_way_to_the_next(root, capsys, monkeypatch):
    make = copy_source.FolderSource.__init__
    vanishing = []

    def pruned(self, folder, manifest):
        if manifest.step in vanishing:
            shutil.rmtree(folder)
            commit(root, 400)
        make(self, folder, manifest)

    monkeypatch.setattr(copy_source.FolderSource, "__init__", pruned)
    vanishing += [300]
    assert copied("--all") == 0
    assert "step 300: not copied: it was deleted meanwhile" in capsys.readouterr().out
    assert steps("backup") == [100, 200]
    shutil.rmtree("backup")
    shutil.rmtree(root / "step-0000000400")
    vanishing += [200]
    assert copied() == 0
    assert steps("backup") == [400]
    commit(root, 200)
    assert copied("--step", "200") == 3


def test_what_was_copied_before_a_destination_failed_is_told(root, ends, monkeypatch):
    publish = LocalBackend.publish

    def fail(self, source, name, *arguments, **options):
        if name == "step-0000000300":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return publish(self, source, name, *arguments, **options)

    monkeypatch.setattr(LocalBackend, "publish", fail)
    found = json.loads(ends(10, "copy", "run", "backup", "--all", "--json").out)
    assert [each["step"] for each in found["checkpoints"]] == [100]
    assert [each["step"] for each in found["failed"]] == [300]
    assert steps("backup") == [100]


def test_a_newest_that_does_not_count_is_passed_over_and_told(root, capsys):
    (root / "step-0000000400").mkdir()
    assert copied() == 0
    assert capsys.readouterr().out.startswith("step 400: not copied: it does not count: it has no manifest.json\n")
    commit(root, 500)
    (root / "step-0000000500" / "__0_0.distcp").unlink()
    assert copied() == 4
    assert "not copied: run/step-0000000500 is not a complete checkpoint: __0_0.distcp is m" in capsys.readouterr().out
    assert steps("backup") == [200]
    assert copied("--step", "500") == main(["copy", "run/step-0000000500", "backup"]) == 4


def test_one_that_a_rollback_left_behind_is_copied_only_by_name(root):
    assert main(["rollback", "run", "--to-step", "100"]) == 0
    assert copied("--all") == 0
    assert steps("backup") == [100]
    assert copied("--step", "300") == 0
    assert sorted(steps_of(Catalog("backup").look(abandoned=True))) == [100, 300]


def test_a_newer_format_is_not_gone_back_behind(root, capsys):
    newer = root / "step-0000000500"
    newer.mkdir()
    (newer / "manifest.json").write_text('{"format_version": 99}')
    assert copied() == copied("--all") == 9
    assert steps("backup") == [100, 200, 300]


def test_what_plain_dcp_wrote_has_no_digests_and_is_not_copied(root, ends):
    Path("plain").mkdir()
    for name in (".metadata", "__0_0.distcp"):
        Path("plain", name).write_bytes(b"bytes" * 1000)
    assert "ckptman adopt gives it digests" in ends(2, "copy", "plain", "backup").err
    assert not Path("backup").exists()


def test_a_destination_that_keeps_all_in_memory_is_told(root, capsys, monkeypatch):
    monkeypatch.setattr("ckptman.storage.catalog.backends.local_draft.drop_all", lambda *_, **__: True)
    assert copied() == 0
    assert "  not proved: that it is on storage, for this file system keeps" in capsys.readouterr().out


def test_a_terminal_gets_a_bar_for_each_phase(root, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with console.copy_progress("step\x1b 7") as meter:
        assert isinstance(meter, Meter)
        meter.begin("copying", 100)
        meter.moved(50)
        meter.begin("verifying", 100)
        meter.moved(100)
    told = capsys.readouterr().err
    assert "verifying" in told
    assert "\x1b 7" not in told
