"""The file layer: what is made, flushed and removed, in an order that survives a power cut, and what refuses."""

import errno
import os
import threading
from pathlib import Path

import pytest

from ckptman.catalog.backends.local import LocalBackend
from ckptman.io.durable_files import DISK, Disk
from tests.helpers.faulty_disk import save


def refuse(code):
    def refusing(*arguments, **options):
        raise OSError(code, os.strerror(code))

    return refusing


def test_two_who_remove_the_same_tree(tmp_path):
    for number in range(20):
        tree = tmp_path / str(number)
        for folder in range(5):
            (tree / str(folder)).mkdir(parents=True)
            for file in range(20):
                (tree / str(folder) / str(file)).touch()
        start, errors = threading.Barrier(2), []

        def remove(tree, start, errors):
            start.wait()
            try:
                DISK.remove_tree(tree)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=remove, args=(tree, start, errors)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert not tree.exists()


def test_an_error_while_removing_is_told(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    monkeypatch.setattr(os, "unlink", refuse(errno.EACCES))
    with pytest.raises(PermissionError):
        DISK.remove_tree(tmp_path / "folder")


def test_making_folders(tmp_path, monkeypatch):
    synced = []

    class Counting(Disk):
        def sync_folder(self, path):
            synced.append(path)

    disk = Counting()
    for _ in range(2):
        disk.make_folders(tmp_path / "a" / "b")
        assert synced == [tmp_path, tmp_path / "a"]
    monkeypatch.chdir(tmp_path)
    disk.make_folders(Path("c/d"))
    disk.make_folders(Path())
    assert (tmp_path / "c" / "d").is_dir()
    # A mount that is gone shows nothing at all, up to the top.
    monkeypatch.setattr(Path, "exists", lambda path: False)
    disk.make_folders(tmp_path / "e" / "f")
    assert (tmp_path / "e" / "f").is_dir()


def test_a_file_is_made_once_and_as_a_whole(tmp_path, monkeypatch):
    DISK.create_file(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        DISK.create_file(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
    monkeypatch.setattr(os, "write", refuse(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        DISK.create_file(tmp_path / "another", b"first")
    assert not (tmp_path / "another").exists()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_a_folder_that_refuses_to_be_flushed(code, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", refuse(code))
    if code == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            DISK.sync_folder(tmp_path)
    else:
        DISK.sync_folder(tmp_path)


def test_files_are_flushed_before_the_name_that_makes_them_count(tmp_path, monkeypatch):
    """The order that a power cut needs, of what really reaches the system."""
    log = []
    rename = os.rename

    def note(source, target):
        log.append(f"rename to {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", lambda fd: log.append(f"flush {Path(f'/proc/self/fd/{fd}').readlink().name}"))
    monkeypatch.setattr(os, "rename", note)
    root = tmp_path / "root"
    save(root, 100, tag="a")
    assert log == [
        f"flush {tmp_path.name}",  # by who made the root, and by who uses it: either may have been killed
        f"flush {tmp_path.name}",
        *("flush __0_0.distcp", "flush blocks-00000.bin", "flush __1_0.distcp", "flush blocks-00001.bin"),
        *("flush chunks.bin", "flush index.json"),
        *("flush manifest.json", "flush step-0000000100.tmp-a"),
        "rename to step-0000000100",
        "flush root",
    ]
    log.clear()
    LocalBackend(root).remove(root / "step-0000000100", "step-0000000100", "b")
    assert log == ["rename to step-0000000100.trash-b", "flush root"]
    assert list(root.iterdir()) == []
    LocalBackend(root).remove(root / "step-0000000100", "step-0000000100", "c")  # it is gone already
