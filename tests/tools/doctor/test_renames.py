"""Renames of folders and of files while another process looks: what is broken is found, what is only late is told."""

import errno
import os
import re
import shutil
import time
from functools import partial
from unittest.mock import patch

import pytest

from ckptman.storage.io.durable_files import DISK
from ckptman.tools.doctor import renames, second_client
from ckptman.tools.doctor.second_client import HERE, Second
from tests.tools.doctor.places import isolated
from tests.tools.doctor.test_second_client import elsewhere

check_rename, check_replace = partial(renames.check, renames.COMMITS), partial(renames.check, renames.REPLACEMENTS)


def copy(source, target):
    """Rename as an object store does: file by file."""
    if source.is_dir():
        target.mkdir()
        for path in source.iterdir():
            time.sleep(0.01)
            shutil.copy(path, target)
        shutil.rmtree(source)
    else:
        target.unlink()
        time.sleep(0.01)
        source.rename(target)


def vanish(source, target):
    """What is renamed is nowhere for a moment."""
    elsewhere = source.with_name("elsewhere")
    source.rename(elsewhere)
    time.sleep(0.01)
    elsewhere.rename(target)


def double(source, target):
    """What is renamed stays under its old name."""
    if source.is_dir():
        shutil.copytree(source, source.with_name("copy"))
        source.with_name("copy").rename(target)
    else:
        source.rename(target)


def rewrite(source, target):
    """A file is replaced by writing over it."""
    if source.is_dir():
        source.rename(target)
        return
    with target.open("r+b") as file:
        for at in range(0, 4096, 1024):
            file.write(source.read_bytes()[at : at + 1024])
            file.flush()
            time.sleep(0.005)


def go_away(source, target):
    """A file is gone while it is replaced."""
    source.rename(target) if source.is_dir() else copy(source, target)


@pytest.mark.parametrize(
    ("rename", "told"),
    [
        (copy, r"was seen without its \S+|bytes of \S+, or with those of two saves"),
        (vanish, "was seen under neither name"),
        (double, "under its old and its new name at a time"),
    ],
)
def test_a_rename_that_is_not_atomic_is_found(rename, told, tmp_path):
    with patch.object(DISK, "rename", rename):
        found = isolated(check_rename, tmp_path)
    assert found.verdict == "FAILED"
    assert re.search(told, found.value), found.value
    assert found.advice.startswith("commits are not safe here: a run could load half a checkpoint, or find none")


def test_a_file_that_is_replaced_by_writing_over_it_is_found(tmp_path):
    with patch.object(DISK, "rename", rewrite):
        found = isolated(check_replace, tmp_path)
    told = "a file that was replaced was seen with 4,096 of 4,096 bytes, or with those of two saves"
    assert (found.verdict, found.value) == ("FAILED", told)
    assert found.advice.startswith("what ckptman notes beside checkpoints (rules, tiers, pins) could be read damaged")


def test_a_file_that_is_gone_while_it_is_replaced_is_a_warning_with_what_it_means(tmp_path):
    with patch.object(DISK, "rename", go_away):
        found = isolated(check_replace, tmp_path)
    assert found.verdict == "warning"
    assert re.fullmatch(
        r"a file is old or new, never a mixture, but another process could not read a file that was replaced for up to "
        r"\S+ s \(No such file or directory\), \d+ times of \d+",
        found.value,
    )
    assert found.advice.endswith("pin nothing again, and start no run, while another process prunes")
    with patch.object(DISK, "rename", go_away):
        assert isolated(check_rename, tmp_path).verdict == "ok"


def _see_after(error, times=3, see=renames._see):
    """Fail at the first looks at each change."""
    looks = {}

    def look(folder, change, is_elsewhere):
        looks[change] = looks.get(change, 0) + 1
        if 1 < looks[change] <= times:  # the first is before the change
            raise error
        return see(folder, change, is_elsewhere)

    return look


def test_what_is_torn_on_another_client_is_fatal_in_a_commit_and_stale_in_a_prune(tmp_path, monkeypatch):
    def number(folder, real=renames._number):
        if (folder / "torn").exists():
            raise renames._Wrong("was seen without its manifest.json")
        return real(folder)

    monkeypatch.setattr(renames, "_number", number)
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "torn").touch()
    for old, torn in ((None, renames._Wrong), (3, FileNotFoundError)):
        with pytest.raises(torn):
            renames._see(tmp_path, renames._Change("step-1", "step-1.tmp", old, 4), True)


def test_a_name_that_another_client_remembers_is_told(tmp_path, monkeypatch):
    second = elsewhere(monkeypatch)
    monkeypatch.setattr(renames, "_PROMPT_SECONDS", 0.0)
    found = isolated(check_rename, tmp_path, repeat_seconds=0.0, second=second)
    assert found.verdict == "ok"
    told = (
        r"atomic, and seen by node2 after \S+ s at most, 9 times; a checkpoint that was deleted is found there by its "
    )
    assert re.fullmatch(told + r"path for \S+ s", found.value)


BOTH = pytest.mark.parametrize("check", [check_rename, check_replace])
STALE = OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@BOTH
@pytest.mark.parametrize("other", [HERE, Second(("elsewhere",), "node2")])
def test_a_stale_name_is_looked_at_again_and_told(check, other, tmp_path, monkeypatch):
    monkeypatch.setattr(renames, "_see", _see_after(STALE))
    elsewhere(monkeypatch)
    found = isolated(check, tmp_path, repeat_seconds=0.0, second=other)
    assert (found.verdict, "not safe" in found.advice) == ("warning", False)
    assert re.search(f"{other.who} could not read a f.* for up to .*Stale file handle", found.value)


@BOTH
@pytest.mark.parametrize(
    ("error", "times", "told"),
    [
        (STALE, 1 << 60, "could not be read for 0.1 s: Stale file handle"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), 3, "could not be read at that moment: Input/output error"),
    ],
)
def test_what_stays_unreadable_or_fails_otherwise_fails(check, error, times, told, tmp_path, monkeypatch):
    monkeypatch.setattr(second_client, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(renames, "_see", _see_after(error, times))
    found = isolated(check, tmp_path)
    assert (found.verdict, told in found.value) == ("FAILED", True)


@BOTH
@pytest.mark.parametrize("patience_seconds", [0.1, 10.0])
def test_what_another_client_sees_late_or_not_at_all_is_slow(check, patience_seconds, tmp_path, monkeypatch):
    never = patience_seconds < 1
    monkeypatch.setattr(second_client, "PATIENCE_SECONDS", patience_seconds)
    monkeypatch.setattr(renames, "SLOW_SIGHT_SECONDS", 0.0)
    if never:
        monkeypatch.setattr(renames, "_see", lambda folder, change, is_elsewhere: change.old)
    found = isolated(check, tmp_path, second=elsewhere(monkeypatch))
    assert (found.verdict, found.advice) == ("slow", check.args[0].late)
    assert ("but node2 did not see it within 0.1 s" if never else "but node2 saw it only after ") in found.value


def test_a_commit_that_is_never_seen_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(second_client, "PATIENCE_SECONDS", 0.2)
    with patch.object(DISK, "rename", lambda *_: None):
        found = isolated(check_rename, tmp_path)
    assert found.verdict == "FAILED"
    assert found.value == "a folder that was renamed was not seen by another process for 0.2 s"
