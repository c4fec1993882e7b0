"""A crash or an error at any single operation of a save, a deletion or a prune leaves the old set or the new set."""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.catalog import Catalog
from ckptman.catalog.prune import execute, plan_prune
from ckptman.errors import CkptmanError
from ckptman.format.paths import outcome_path
from ckptman.io.durable_files import Disk
from ckptman.io.file_writer import write_source
from ckptman.policies.retention import KeepLast
from tests.helpers.faulty_disk import WHEN, Death, Fault, FaultyDisk, faults, holds, rewrite, save

Holding = dict[int, tuple[int, str]]
Scene = tuple[Callable[[Path], None], Callable[[Path, Disk], object]]
"""What was there before, and what happens on the faulty disk."""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Nobody pulls the plug here: what counts is the order of operations."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def nothing(root):
    """No root yet."""


def one(root):
    save(root, 100, b"first")


def three(root):
    for step in (100, 200, 300):
        save(root, step, b"%d" % step)


def littered(root):
    """Three checkpoints, and what every kind of crash leaves."""
    three(root)
    for kind in ("tmp", "trash", "old"):
        shutil.copytree(root / "step-0000000300", root / f"step-0000000300.{kind}-deadbeef")
    shutil.copytree(root / "step-0000000100", root / "step-0000000100.old-deadbeef")
    rewrite(root / "step-0000000100", sequence=4)  # saved again, after step 300
    rewrite(root / "step-0000000300", sequence=5)
    (root / "step-0000000100.tmp-deadbeef").mkdir()
    outcome_path(root).parent.mkdir()
    outcome_path(root).with_name("outcome.json.tmp-1-0123abcd").touch()


def delete(root, disk):
    entry = Catalog(root).entry(100)
    LocalBackend(root, disk).remove(entry.path, entry.path.name, "0123abcd-1")


def prune(root, disk):
    execute(root, plan_prune(root, KeepLast(1)), "0123abcd-1", disk)


SCENES = {
    "the first save": (nothing, lambda root, disk: save(root, 100, b"new", disk)),
    "a save": (one, lambda root, disk: save(root, 200, b"new", disk)),
    "a save over the same step": (one, lambda root, disk: save(root, 100, b"new", disk)),
    "a save over the newest of three": (three, lambda root, disk: save(root, 300, b"new", disk)),
    "a save of an earlier step": (three, lambda root, disk: save(root, 100, b"new", disk)),
    "a deletion": (three, delete),
    "a prune": (three, prune),
    "a prune of litter": (littered, prune),
}


def allowed(scene, tmp_path):
    """The states that may be seen: before, after, and for a prune those in between, one whole checkpoint at a time.

    Leaves what was there before in `before`.
    """
    before, act = scene
    before(tmp_path / "before")
    root = as_before(tmp_path, Fault(-1))
    states = [holds(root) if root.exists() else {}]
    act(root, Disk())
    after = holds(root)
    while states[-1] != after:
        gone = [step for step in states[-1] if step not in after]
        states.append({step: each for step, each in states[-1].items() if step != gone[0]} if gone else after)
    return states


def as_before(tmp_path, fault):
    """A root of its own for one fault."""
    root = tmp_path / f"{fault.at}-{fault.when}"
    if (tmp_path / "before").exists():
        shutil.copytree(tmp_path / "before", root, copy_function=os.link)
    return root


def names(root):
    return {path.name for path in root.iterdir()} - {".ckptman"}


def goes_on(root):
    """A save and a prune work as if nothing had been, and leave nothing behind that is not a checkpoint."""
    newest = max((sequence for sequence, _ in holds(root).values()), default=0) if root.exists() else 0
    saved = save(root, 400, b"after the fault")
    assert saved.sequence == newest + 1
    execute(root, plan_prune(root, KeepLast(2)), "0123abcd-2")
    assert names(root) == {entry.path.name for entry in Catalog(root).scan()}, "a leftover survived"
    held = holds(root)
    assert held[400][0] == saved.sequence
    assert len(held) <= 2
    assert not list(root.glob(".ckptman/*.tmp-*")), "a leftover survived"
    assert plan_prune(root, None).leftovers == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_death_at_any_operation(tmp_path, name):
    act = SCENES[name][1]
    states = allowed(SCENES[name], tmp_path)
    seen = []
    for fault in faults():
        root = as_before(tmp_path, fault)
        disk = FaultyDisk(fault)
        with contextlib.suppress(Death):
            act(root, disk)
        state = holds(root) if root.exists() else {}
        assert state in states, f"after {fault} in {disk.log}"
        seen.append(state)
        goes_on(root)
        if not disk.struck:
            break
    assert seen[0] == states[0]
    assert seen[-1] == states[-1]
    assert all(state in seen for state in states)
    assert len(seen) > 3 * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
@pytest.mark.filterwarnings("ignore:.* could not be removed:RuntimeWarning")
def test_an_error_at_any_operation(tmp_path, name):
    act = SCENES[name][1]
    states = allowed(SCENES[name], tmp_path)
    errors = 0
    for fault in faults():
        # The two are handled alike: one of them at each operation is enough.
        fault.error = code = (errno.ENOSPC, errno.EIO)[fault.at % 2]
        root = as_before(tmp_path, fault)
        disk = FaultyDisk(fault)
        try:
            act(root, disk)
            failed = False
        except OSError as error:
            assert error.errno == code
            failed = True
            errors += 1
        state = holds(root) if root.exists() else {}
        # A deletion that fails does not keep the others from being done.
        some_deleted = states[-1].items() <= state.items() <= states[0].items()
        assert state in states or some_deleted, f"after {fault} in {disk.log}"
        assert failed or state == states[-1], "what raises nothing has done all of it"
        goes_on(root)
        if not disk.struck:
            break
    assert errors > 3


class Content:
    """What a rank writes to its data file: three strides."""

    def __init__(self, data):
        self._data = data
        self.size_bytes = len(data)

    def view(self, offset, scratch):
        scratch[:] = self._data[offset : offset + len(scratch)]
        return scratch


@pytest.mark.parametrize("error", [None, errno.ENOSPC, errno.EIO])
def test_a_data_file_whose_writing_dies_or_fails_at_any_operation(tmp_path, error):
    content = Content(os.urandom(8192) * 1200)
    struck = set()
    for fault in faults(error):
        disk, path = FaultyDisk(fault), tmp_path / f"{fault.at}-{fault.when}"
        try:
            write_source(path, content, disk=disk, threads=1)
        except Death:
            assert error is None
        except OSError as failure:
            assert failure.errno == error
        else:
            assert not disk.struck, f"{fault} in {disk.log}"
            assert path.read_bytes() == content.view(0, memoryview(bytearray(content.size_bytes)))
            break
        struck.add(disk.log[fault.at])
        assert len(disk.log) == fault.at + 1, "nothing is done after it"
    assert struck == {"write_at", "sync_file"}


def test_an_abandoned_draft_is_removed_or_left_for_prune(tmp_path):
    place = LocalBackend(tmp_path, FaultyDisk(Fault(1, "midway", errno.EIO)))
    draft = place.begin("step-0000000100", "0123abcd-1")
    (Path(draft) / "a").touch()
    (Path(draft) / "b").touch()
    with pytest.warns(RuntimeWarning, match="could not be removed .*ckptman prune will"):
        place.abandon(draft)
    assert [each.path.name for each in plan_prune(tmp_path, None).leftovers] == ["step-0000000100.tmp-0123abcd-1"]
    place.abandon(draft)
    assert names(tmp_path) == set()
    place.abandon(draft)


def test_a_save_that_cannot_take_its_name_puts_the_earlier_one_back(tmp_path):
    before = save(tmp_path, 100)
    renames = [at for at, name in enumerate(log_of_a_save_over(tmp_path / "other")) if name == "rename"]
    disk = FaultyDisk(Fault(renames[1], "before", errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        save(tmp_path, 100, b"new", disk)
    assert Catalog(tmp_path).entry(100).path == before.path


def test_trouble_with_the_earlier_save_fails_no_save(tmp_path):
    save(tmp_path, 100)
    removal = log_of_a_save_over(tmp_path / "other").index("remove_tree")
    with pytest.warns(RuntimeWarning, match="could not be removed .*ckptman prune will"):
        saved = save(tmp_path, 100, b"new", FaultyDisk(Fault(removal, "midway", errno.EIO)))
    assert list(holds(tmp_path)) == [100]
    assert saved.sequence == 2


def log_of_a_save_over(root):
    """The operations of a save over an earlier one of the same step."""
    save(root, 100)
    disk = FaultyDisk()
    save(root, 100, b"new", disk)
    shutil.rmtree(root)
    return disk.log


def test_a_tag_is_used_once(tmp_path):
    LocalBackend(tmp_path).begin("step-0000000100", "0123abcd-1")
    with pytest.raises(FileExistsError):
        LocalBackend(tmp_path).begin("step-0000000100", "0123abcd-1")


def test_a_folder_of_any_name_can_be_committed(tmp_path):
    """`StorageWriter` commits under the name that its caller chose, also one that looks like a draft."""
    place = LocalBackend(tmp_path)
    for content in (b"first", b"second"):
        entry = save(tmp_path / "model", 1, content)
        draft = Path(place.begin("best.tmp-7", content.decode()))
        for path in entry.path.glob("[!m]*"):
            shutil.copy(path, draft)
        committed = place.commit(str(draft), entry.require_manifest())
        assert committed.path == tmp_path / "best.tmp-7"
    assert names(tmp_path) == {"best.tmp-7", "model"}
    assert (tmp_path / "best.tmp-7" / "__0_0.distcp").read_bytes().endswith(b"second")


@pytest.mark.parametrize("link", [False, True])
def test_a_save_takes_the_place_of_a_file_or_link_of_its_name(tmp_path, link):
    elsewhere = tmp_path / "elsewhere"
    save(elsewhere, 5)
    root = tmp_path / "root"
    root.mkdir()
    if link:
        (root / "step-0000000100").symlink_to(elsewhere)
    else:
        (root / "step-0000000100").touch()
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
    for fault in faults(when=WHEN):
        folder = tmp_path / f"{fault.at}-{fault.when}"
        folder.mkdir()
        (folder / "outcome.json").write_bytes(b"old content")
        disk = FaultyDisk(fault)
        with contextlib.suppress(Death):
            disk.replace_file(folder / "outcome.json", b"new")
        assert (folder / "outcome.json").read_bytes() in (b"old content", b"new")
        if not disk.struck:
            break
    assert fault.at == 3
