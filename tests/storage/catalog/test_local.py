"""How a save becomes visible in a folder. A death or an error at each of its operations: `tests.faults`."""

import contextlib
import errno
import shutil
from pathlib import Path

import pytest

from ckptman.errors import CkptmanError
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.prune import plan_prune
from ckptman.storage.format.paths import data_name
from tests.helpers.faulty_disk import Death, Fault, FaultyDisk, faults, holds, on_disk, save


def names(root):
    return {path.name for path in root.iterdir()} - {".ckptman"}


def failing_save_over(root, operation, count, when):
    """A disk on which the save over an earlier one of the same step fails, at the n-th operation of that name."""
    save(root, 100)
    with on_disk(FaultyDisk()) as disk:
        save(root, 100, b"new")
    at = [number for number, name in enumerate(disk.log) if name == operation][count]
    return FaultyDisk(Fault(at, when, errno.EIO))


def test_an_abandoned_draft_is_removed_or_left_for_prune(tmp_path):
    place = LocalBackend(tmp_path)
    with on_disk(FaultyDisk(Fault(1, "midway", errno.EIO))):
        draft = place.begin("step-0000000100", "0123abcd-1")
        for rank in range(2):
            (Path(draft) / data_name(rank)).touch()
        with pytest.warns(RuntimeWarning, match=r"could not be removed .*ckptman prune will"):
            place.abandon(draft)
    assert [each.path.name for each in plan_prune(tmp_path, None).leftovers] == ["step-0000000100.tmp-0123abcd-1"]
    place.abandon(draft)
    assert names(tmp_path) == set()
    place.abandon(draft)


def test_a_save_that_cannot_take_its_name_puts_the_earlier_one_back(tmp_path):
    disk = failing_save_over(tmp_path / "other", "rename", 1, "before")
    before = save(tmp_path, 100)
    with on_disk(disk), pytest.raises(OSError, match="Input/output error"):
        save(tmp_path, 100, b"new")
    assert Catalog(tmp_path).entry(100).path == before.path


def test_trouble_with_the_earlier_save_fails_no_save(tmp_path):
    disk = failing_save_over(tmp_path / "other", "remove_tree", 0, "midway")
    save(tmp_path / "root", 100)
    with on_disk(disk), pytest.warns(RuntimeWarning, match=r"could not be removed .*ckptman prune will"):
        saved = save(tmp_path / "root", 100, b"new")
    assert list(holds(tmp_path / "root")) == [100]
    assert saved.sequence == 2


def test_a_tag_is_used_once(tmp_path):
    LocalBackend(tmp_path).begin("step-0000000100", "0123abcd-1")
    with pytest.raises(FileExistsError):
        LocalBackend(tmp_path).begin("step-0000000100", "0123abcd-1")


def test_a_folder_of_any_name_can_be_committed(tmp_path):
    """`StorageWriter` commits under the name that its caller chose, even one that looks like a draft."""
    place = LocalBackend(tmp_path)
    for content in (b"first", b"second"):
        entry = save(tmp_path / "model", 1, content)
        draft = Path(place.begin("best.tmp-7", content.decode()))
        for path in entry.path.glob("[!m]*"):
            shutil.copy(path, draft)
        assert place.commit(str(draft), entry.require_manifest()).path == tmp_path / "best.tmp-7"
    assert names(tmp_path) == {"best.tmp-7", "model"}
    assert (tmp_path / "best.tmp-7" / "__0_0.distcp").read_bytes().endswith(b"second")


@pytest.mark.parametrize("link", [False, True])
def test_a_save_takes_the_place_of_a_file_or_link_of_its_name(tmp_path, link):
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    save(elsewhere, 5)
    root.mkdir()
    there = root / "step-0000000100"
    there.symlink_to(elsewhere) if link else there.touch()
    save(root, 100)
    assert names(root) == {"step-0000000100"}
    assert list(holds(root)) == [100]
    assert list(holds(elsewhere)) == [5], "what a link points to is not touched"


@pytest.mark.parametrize("name", ["file", "file/below", "dangling"])
def test_a_root_that_cannot_be(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CkptmanError, match="name another root") as caught:
        LocalBackend(tmp_path / name).make()
    assert caught.value.exit_code == 10


def test_replacing_a_file_at_any_operation(tmp_path):
    path = tmp_path / "outcome.json"
    for fault in faults():
        path.write_bytes(b"old content")
        disk = FaultyDisk(fault)
        with contextlib.suppress(Death):
            disk.replace_file(path, b"new")
        assert path.read_bytes() in (b"old content", b"new")
        if not disk.struck:
            break
    assert fault.at == 3
