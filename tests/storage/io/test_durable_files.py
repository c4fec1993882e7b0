"""The file layer: what is made, flushed and removed, in an order that survives a power cut, and what refuses."""

import contextlib
import errno
import os
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.io import durable_files
from ckptman.storage.io.durable_files import DISK, Disk, ThrottledDelete, holding, owner_of, remove_by_file
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


SUPER_USER = pytest.mark.skipif(os.geteuid() != 0, reason="only the super-user may give a file to another one")
OTHER = 4321


def filled(folder, count=5):
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / str(number)).write_text("mine")
    return folder


def test_a_folder_that_is_exchanged_while_it_is_removed(tmp_path):
    victim, trash = filled(tmp_path / "victim"), filled(tmp_path / "root" / "trash")

    def exchange():
        if not trash.is_symlink():
            trash.rename(tmp_path / "root" / "aside")
            trash.symlink_to(victim)

    remove_by_file(trash, exchange)
    assert len(list(victim.iterdir())) == 5
    assert not list((tmp_path / "root" / "aside").iterdir())


@pytest.mark.parametrize("name", [".ckptman", "step-0000000010"])
def test_nothing_is_changed_behind_a_link_that_has_a_name_of_ours(tmp_path, name):
    victim = filled(tmp_path / "victim", 1)
    (tmp_path / name).symlink_to(victim)
    path = tmp_path / name / "0"
    for change in (DISK.remove_file, partial(DISK.replace_file, data=b"x"), partial(DISK.write_file, data=b"")):
        with pytest.raises(NotADirectoryError, match="is no folder, or a link, which ckptman does not follow"):
            change(path)
    with pytest.raises(NotADirectoryError):
        DISK.create_whole_file(tmp_path / name / "new", b"x")
    assert [each.read_text() for each in victim.iterdir()] == ["mine"]


def test_what_is_held_stays_what_it_was_for_who_holds_it_again(tmp_path):
    folder = filled(tmp_path / "folder")
    with holding(folder) as first:
        folder.rename(tmp_path / "moved")
        filled(folder, 1)
        with holding(folder) as second:
            assert second.st_ino == first.st_ino
        DISK.remove_file(folder / "0")
    assert len(list((tmp_path / "moved").iterdir())) == 4
    assert len(list(folder.iterdir())) == 1


def test_who_held_a_folder_first_may_let_it_go_while_another_works_in_it(tmp_path, monkeypatch):
    tree, unlink = filled(tmp_path / "root" / "tree"), os.unlink
    with contextlib.ExitStack() as first:
        first.enter_context(holding(tree.parent))

        def let_go(*arguments, **options):
            first.close()
            unlink(*arguments, **options)

        monkeypatch.setattr(os, "unlink", let_go)
        DISK.remove_tree(tree)
    assert not tree.exists()


def test_what_is_held_and_has_another_name_by_now_is_not_removed(tmp_path):
    """Such as a draft that was interrupted when it had just become a checkpoint."""
    draft = filled(tmp_path / "draft")
    with holding(draft):
        draft.rename(tmp_path / "final")
        DISK.remove_tree(draft)
        filled(draft, 1)
        with pytest.raises(OSError, match="something else was put in its place"):
            DISK.remove_tree(draft)
    assert len(list((tmp_path / "final").iterdir())) == 5


def test_a_root_that_is_named_like_a_step_may_be_a_link(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "step-size-0.1").symlink_to(tmp_path / "scratch")
    DISK.write_file(tmp_path / "step-size-0.1" / "x", b"x")
    assert (tmp_path / "scratch" / "x").read_bytes() == b"x"


@SUPER_USER
@pytest.mark.parametrize("where", ["the folder", "on the way"])
def test_the_super_user_follows_nobody_into_what_is_another_users(tmp_path, where):
    victim = filled(tmp_path / "victim" / "runs")
    link = tmp_path / "link"
    link.symlink_to(victim if where == "the folder" else victim.parent)
    path = link if where == "the folder" else link / "runs"
    for owner, may in ((0, True), (OTHER, False)):
        os.lchown(link, owner, -1)
        told = pytest.raises(PermissionError, match="link on the way is a link")
        with contextlib.nullcontext() if may else told, holding(path, through_link=True):
            pass
    os.chown(link.resolve(), OTHER, -1)
    with holding(path, through_link=True):  # whose link it is
        pass


def test_links_of_all_kinds_lead_to_the_folder(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "up").symlink_to("a/b/..")
    (tmp_path / "a" / "absolute").symlink_to(tmp_path / "up" / "b")
    (tmp_path / "loop").symlink_to("loop")
    with holding(tmp_path / "up" / "absolute", through_link=True) as found:
        assert found.st_ino == (tmp_path / "a" / "b").stat().st_ino
    with pytest.raises(OSError, match=r"\[Errno 40\]"):
        holding(tmp_path / "loop", through_link=True).__enter__()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        holding(tmp_path / "nowhere", through_link=True).__enter__()


def test_the_folder_of_a_run_is_made_in_a_root_that_is_there(tmp_path):
    """Where the root is missing its mount may be away, and what is made there is below it."""
    with pytest.raises(FileNotFoundError):
        DISK.make_folder_if_missing(tmp_path / "root" / ".ckptman")
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        DISK.make_folder_if_missing(tmp_path / ".ckptman")
    assert [each.name for each in tmp_path.iterdir()] == [".ckptman"]


@SUPER_USER
def test_what_the_super_user_makes_for_a_run_is_given_to_its_owner(tmp_path):
    (tmp_path / "root").mkdir()
    os.chown(tmp_path / "root", OTHER, OTHER)
    DISK.make_folder_if_missing(tmp_path / "root" / ".ckptman")
    assert owner_of(tmp_path / "root" / ".ckptman") == OTHER
    assert owner_of(tmp_path / "root" / "nothing") is None


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

    monkeypatch.setattr(durable_files, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
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
