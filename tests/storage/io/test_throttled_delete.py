"""Removing folders: no faster than wanted, and never what a link points to."""

import os
from types import SimpleNamespace

import pytest

from ckptman.storage.io import throttled_delete as slowly
from ckptman.storage.io.durable_files import DISK, remove_by_file
from ckptman.storage.io.throttled_delete import ThrottledDelete


def tree(folder, files=5):
    folder.mkdir()
    for number in range(files):
        (folder / str(number)).touch()
    (folder / "below").mkdir()
    (folder / "below" / "file").touch()
    return folder


def test_no_faster_than_it_is_wanted(tmp_path, monkeypatch):
    now, slept = [100.0], list[float]()

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(slowly, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    remove = ThrottledDelete(10.0)
    remove(tree(tmp_path / "a"))
    remove(tree(tmp_path / "b"))
    assert list(tmp_path.iterdir()) == []
    assert slept == pytest.approx([0.1] * 9)


def test_links_are_removed_and_never_followed(tmp_path):
    precious = tree(tmp_path / "precious")
    folder = tree(tmp_path / "folder")
    (folder / "to-a-folder").symlink_to(precious)
    (tmp_path / "link").symlink_to(precious)
    for path in (folder, tmp_path / "link", tmp_path / "gone"):
        remove_by_file(path, lambda: None)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    assert len(list(precious.iterdir())) == 6


def test_what_is_no_folder_is_removed_and_never_waited_for(tmp_path):
    for name in ("pipe", "folder/pipe"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
    for name in ("pipe", "folder"):
        DISK.remove_tree(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
