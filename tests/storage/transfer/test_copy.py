"""What a copy is, to whatever backend: the same bytes, proved there; and what it refuses, repairs and leaves alone."""

import errno
import os
import pickle
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ckptman.cli.app import main
from ckptman.errors import BusyError, ConfigError, CorruptError, ExistsError, NotFoundError, RootError
from ckptman.storage.catalog.backends import object_draft
from ckptman.storage.catalog.backends.copy_draft import BusyCopyingError, NotReadBackError
from ckptman.storage.catalog.backends.copy_source import FolderReading
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.backends.object_store import ObjectBackend
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.pins import PINNED
from ckptman.storage.catalog.prune import execute, plan_prune
from ckptman.storage.catalog.reader_lease import look
from ckptman.storage.catalog.verified import identify, note_damaged, note_verified
from ckptman.storage.catalog.writer_lock import claim
from ckptman.storage.format.manifest import read_manifest
from ckptman.storage.format.paths import DOT, MANIFEST
from ckptman.storage.io.checksums import digest_file, digest_of_blocks
from ckptman.storage.io.durable_files import Disk
from ckptman.storage.transfer.copy import CopyOptions, copy_checkpoint
from ckptman.storage.transfer.progress import Limit, Meter
from tests.helpers.checkpoints import commit, flip_byte, note_in
from tests.helpers.copies import copy, copy_back, interrupt, names, once
from tests.helpers.faulty_disk import FaultyDisk, holds, on_disk, rewrite
from tests.helpers.files import refuse_direct
from tests.helpers.object_store import bucket_fixture, proxy_fixture

__all__ = ["bucket_fixture", "proxy_fixture"]

FOLDER = "step-0000000200"
DATA = "__1_0.distcp"
STRIDE = 4 * 2**20


@pytest.fixture
def source(tmp_path):
    """Step 200, committed third, after 100 and 300: files of two pieces and a bit."""
    for step, more in ((100, {}), (300, {}), (200, {"rows": 1_200_003, "metrics": {"loss": float("nan")}})):
        commit(tmp_path / "source", step, **more)
    return tmp_path / "source"


def backend(kind, request):
    """An empty backend, in an object store one for which the files of step 200 are large."""
    tmp_path, monkeypatch = request.getfixturevalue("tmp_path"), request.getfixturevalue("monkeypatch")
    if kind == "folder":
        return LocalBackend(tmp_path / "root")
    monkeypatch.setattr(object_draft, "PART_BYTES", (5 if kind == "s3" else 1) * 2**20)
    bucket = request.getfixturevalue("bucket") if kind == "s3" else tmp_path.name
    place = ObjectBackend(f"{kind}://{bucket}/runs")
    place.attempts, place.first_seconds = 2, 0.0
    return place


@pytest.fixture(params=["folder", "memory"])
def place(request):
    return backend(request.param, request)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


def there(place):
    """The bytes of all that a backend has, by name."""
    if isinstance(place, LocalBackend):
        paths = [path for path in place.root.rglob("*") if path.is_file() and path.name != "verified.json"]
        found = {str(path.relative_to(place.root)): path.read_bytes() for path in paths}
    else:
        found = {name: place.fs.cat_file(f"{place.prefix}/{name}") for name in place.listing()}
    return {name: data for name, data in found.items() if not name.startswith(DOT)}


def change(place, name):
    """Change a byte that a backend has."""
    if isinstance(place, LocalBackend):
        flip_byte(place.root / name)
    else:
        data = bytearray(place.fs.cat_file(f"{place.prefix}/{name}"))
        data[len(data) // 2] ^= 0x40
        place.write(name, bytes(data))


def drafts(place):
    """Where the files of a copy that was interrupted are."""
    return {name.partition("/")[0] for name in there(place)}


# ---- to any backend --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "threads"), [("folder", 1), ("memory", None), ("memory", 1), ("memory", 3), ("s3", None)]
)
def test_there_and_back_is_the_same_and_is_proved(kind, threads, source, tmp_path, request):
    place, seen = backend(kind, request), []
    (source / FOLDER / PINNED).write_text('{"why": "Table 2"}')
    (source / FOLDER / "notes\x1b.txt").write_text("mine")
    meter = Meter(lambda meter: seen.append((meter.phase, meter.done_bytes, meter.total_bytes)))
    copied = copy(source, place, threads=threads, meter=meter)
    assert (copied.step, copied.already, copied.written_bytes) == (200, False, copied.bytes)
    assert copied.remarks == ("notes\\x1b.txt is not in the manifest: it was not copied",)
    for phase in ("copying", "verifying"):
        assert max(done for each, done, _ in seen if each == phase) == copied.bytes
        assert {total for each, _, total in seen if each == phase} == {copied.bytes}
    here = {f"{FOLDER}/{path.name}": path.read_bytes() for path in (source / FOLDER).iterdir()}
    assert there(place) == {name: data for name, data in here.items() if "notes" not in name}
    (entry,) = place.list()
    assert (entry.step, entry.sequence, entry.complete) == (200, 3, True)
    assert [each.written_bytes for each in copy_back(place, tmp_path / "back")] == [copied.bytes]
    for root in [place.root, tmp_path / "back"] if kind == "folder" else [tmp_path / "back"]:
        assert note_in(root / FOLDER).every_byte
        assert names(root) == [FOLDER]
        assert list(root.glob(f"{DOT}/*")) == []
        assert holds(root)[200] == holds(source)[200]
        assert (root / FOLDER / PINNED).read_text() == '{"why": "Table 2"}'


def test_one_that_is_there_is_not_copied_again_but_proved(source, place):
    copy(source, place)
    before = there(place)
    again = copy(source, place)
    assert (again.already, again.written_bytes) == (True, 0)
    assert main(["pin", str(source / FOLDER), "--why", "Table 2"]) == 0
    assert copy(source, place).already
    assert there(place) == {**before, f"{FOLDER}/{PINNED}": (source / FOLDER / PINNED).read_bytes()}
    change(place, f"{FOLDER}/{DATA}")
    with pytest.raises(ExistsError, match=r"is damaged there: __1_0\.distcp.*--overwrite"):
        copy(source, place)
    copied = copy(source, place, overwrite=True)
    assert not copied.already
    rewritten = copied.bytes if isinstance(place, LocalBackend) else (source / FOLDER / DATA).stat().st_size
    assert copied.written_bytes == rewritten
    assert copy(source, place).already


def test_another_one_of_the_same_step_stays_unless_it_may_go(source, place, tmp_path):
    commit(tmp_path / "other", 200)
    copy(tmp_path / "other", place)
    before = there(place)
    with pytest.raises(ExistsError, match=r"is another checkpoint.*--overwrite"):
        copy(source, place)
    flip_byte(source / FOLDER / DATA)
    with pytest.raises(CorruptError, match="is not what was saved"):  # and replaces nothing
        copy(source, place, overwrite=True)
    assert there(place) == before
    assert [entry.complete for entry in place.list()] == [True]
    flip_byte(source / FOLDER / DATA)
    copy(source, place, overwrite=True)
    assert drafts(place) == {FOLDER}
    copy_back(place, tmp_path / "back")
    assert holds(tmp_path / "back")[200] == holds(source)[200]


def test_an_interrupted_copy_goes_on_with_what_is_missing_or_wrong(source, place, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        copy(source, place, meter=interrupt("verifying"))
    assert [entry for entry in place.list() if entry.complete] == []
    (draft,) = drafts(place)
    change(place, f"{draft}/{DATA}")
    copied = copy(source, place)
    assert 0 < copied.written_bytes <= (source / FOLDER / DATA).stat().st_size
    assert drafts(place) == {FOLDER}
    copy_back(place, tmp_path / "back")
    assert holds(tmp_path / "back")[200] == holds(source)[200]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (DATA, r"__1_0\.distcp is not what was saved: block 36 \(from byte 4,718,592 on\) has changed"),
        ("index.json", r"index\.json is not what was saved"),
        ("blocks-00001.bin", r"blocks-00001\.bin does not match its digest|blocks-00001\.bin is not what was saved"),
    ],
)
def test_a_damaged_original_is_refused_by_file_and_block(name, told, source, place, tmp_path):
    flip_byte(source / FOLDER / name)
    with pytest.raises(CorruptError, match=told):
        copy(source, place)
    assert there(place) == {}
    flip_byte(source / FOLDER / name)
    copy(source, place)
    change(place, f"{FOLDER}/{name}")
    with pytest.raises(CorruptError, match=f"{told}.*copy another checkpoint"):
        copy_back(place, tmp_path / "back")
    assert names(tmp_path / "back") == []


class Lying(Disk):
    """Loses a byte of what is written to a file, once."""

    def __init__(self, name):
        self.name = name

    def write_file(self, path, data):
        super().write_file(path, data[:-3] + b"?" + data[-2:] if path.name == self.name else data)

    def write_at(self, fd, data, offset):
        if self.name == DATA and offset == STRIDE and len(data) >= 4096:
            self.name = ""
            data[100] ^= 1
        return os.pwrite(fd, data, offset)


@pytest.mark.parametrize("name", [DATA, MANIFEST, PINNED])
def test_what_storage_does_not_give_back_does_not_count(name, source, place):
    (source / FOLDER / PINNED).write_text('{"why": "Table 2"}')
    where = r"__\d_0\.distcp" + " is not what was saved: block " if name == DATA else name
    told = rf"does not give back what was written to it \({where}"
    with pytest.raises(RootError, match=told):
        if isinstance(place, LocalBackend):
            with on_disk(Lying(name)):
                copy(source, place, threads=1)
        else:
            read, wrong = place.read, f"{FOLDER}/{name}"
            place.read = lambda name, at, size: bytes(size) if name == wrong else read(name, at, size)
            try:
                copy(source, place)
            finally:
                del place.read
    assert [entry for entry in place.list() if entry.complete] == []
    copied = copy(source, place)
    assert not copied.already
    assert copied.written_bytes <= max(path.stat().st_size for path in (source / FOLDER).iterdir())
    assert [entry.complete for entry in place.list()] == [True]


# ---- to a folder -----------------------------------------------------------------------------------------------------


def test_everything_is_flushed_before_it_can_be_seen(source, root):
    with on_disk(FaultyDisk()) as disk:
        copied = copy(source, root)
    seen = max(number for number, name in enumerate(disk.log) if name == "rename")
    assert disk.log[:seen].count("sync_file") == copied.files
    assert disk.log[seen - 1] == disk.log[seen + 1] == "sync_folder"


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("direct", [True, False])
def test_any_number_of_threads_with_and_without_direct_io(threads, direct, source, root, monkeypatch):
    if not direct:
        refuse_direct(monkeypatch)
    copy(source, root, threads=threads)
    assert holds(root)[200] == holds(source)[200]


def test_blocks_of_any_size_are_copied(source, tmp_path):
    folder = source / FOLDER
    files = [name for name in read_manifest(folder).files if "blocks" not in name]
    for size in (1000, 2**20, 2**23, 2**30):
        found = {name: digest_file(folder / name, size) for name in files}
        records = {
            name: {"bytes": count, "digest": digest_of_blocks(blocks)} for name, (count, blocks) in found.items()
        }
        rewrite(folder, block_bytes=size, files=records)
        copied = copy(source, tmp_path / f"root-{size}")
        assert copied.written_bytes == copied.bytes


def test_what_was_proved_of_the_original_holds_of_the_copy(source, root):
    identity = identify(source / FOLDER, read_manifest(source / FOLDER))
    note_verified(source / FOLDER, identity, levels=("digests", "coverage"), world_sizes=(1, 8))
    copy(source, root)
    note = note_in(root / FOLDER)
    assert (note.levels, note.world_sizes) == (("digests", "coverage"), (1, 8))
    assert note.time_seconds > 1.0


@pytest.mark.parametrize(("lost", "told"), [("__0_0.distcp", "not complete"), ("", "no folder")])
def test_what_is_no_checkpoint_there_is_told(lost, told, source, root):
    copy(source, root)
    if lost:
        (root / FOLDER / lost).unlink()
    else:
        shutil.rmtree(root / FOLDER)
        (root / FOLDER).write_text("a file")
    with pytest.raises(ExistsError, match=told):
        copy(source, root)


def test_a_file_at_hand_when_a_copy_was_interrupted_begins_anew_and_no_other(source, root):
    files = sorted((source / FOLDER / name).stat().st_size for name in read_manifest(source / FOLDER).files)
    with pytest.raises(KeyboardInterrupt):
        copy(source, root, threads=1, meter=interrupt("copying", files[-1] + 1))
    assert Catalog(root).scan() == []
    copied = copy(source, root, threads=1)
    assert files[-2] <= copied.written_bytes <= copied.bytes - files[-1]
    assert holds(root)[200] == holds(source)[200]
    assert names(root) == [FOLDER]


def test_what_is_wrong_in_a_draft_is_written_again(source, root, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        copy(source, root, meter=interrupt("verifying"))
    (draft,) = root.glob("*.tmp-copy-*")
    os.truncate(draft / DATA, STRIDE + 1)  # as a file system leaves it that cannot reserve room
    with (draft / "__0_0.distcp").open("ab") as file:
        file.write(b"more than there should be")
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    for name, make in (
        ("index.json", lambda path: path.symlink_to(outside)),
        ("chunks.bin", lambda path: path.hardlink_to(outside)),
        (".metadata", os.mkfifo),
    ):
        (draft / name).unlink()
        make(draft / name)
    (draft / "folder").mkdir()
    (draft / "junk").write_bytes(b"junk")
    copied = copy(source, root)
    assert copied.written_bytes < copied.bytes
    assert outside.read_bytes() == b"mine"
    assert holds(root)[200] == holds(source)[200]
    files = read_manifest(source / FOLDER).files
    assert {path.name for path in (root / FOLDER).iterdir()} == {*files, MANIFEST, "verified.json"}


def test_a_file_that_cannot_be_read_back_keeps_no_other_from_being_read(source, root, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        copy(source, root, meter=interrupt("verifying"))
    (draft,) = root.glob("*.tmp-copy-*")
    flip_byte(draft / DATA)
    read, broken = FolderReading.read, []

    def fail_once(self, offset, scratch):
        if self.path == draft / "__0_0.distcp" and not broken:
            broken.append(self.path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self, offset, scratch)

    monkeypatch.setattr(FolderReading, "read", fail_once)
    copied = copy(source, root)
    assert broken
    assert copied.written_bytes == sum((source / FOLDER / name).stat().st_size for name in (DATA, "__0_0.distcp"))
    assert holds(root)[200] == holds(source)[200]


def test_a_draft_that_is_a_link_is_not_followed(source, root, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        copy(source, root, meter=interrupt("copying"))
    (draft,) = root.glob("*.tmp-copy-*")
    shutil.rmtree(draft)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "mine").touch()
    draft.symlink_to(tmp_path / "outside")
    copy(source, root)
    assert names(tmp_path / "outside") == ["mine"]
    assert holds(root)[200] == holds(source)[200]


def test_one_that_was_found_damaged_is_refused_before_a_byte_is_read(source, root):
    note_damaged(source / FOLDER, identify(source / FOLDER, read_manifest(source / FOLDER)), "block 3")
    with pytest.raises(CorruptError, match="is damaged, as was found before: block 3"):
        copy(source, root)


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "saved again"])
def test_an_original_that_is_deleted_or_saved_again_meanwhile_is_told(again, source, root):
    entry = Catalog(source).entry(200)

    def delete():
        shutil.rmtree(source / FOLDER)
        if again:
            commit(source, 200, rows=1_200_000)

    with pytest.raises(NotFoundError, match="was deleted, or saved again"):
        copy_checkpoint(entry, LocalBackend(root), CopyOptions(threads=1, meter=once("copying", delete)))
    assert names(root) == []
    with pytest.raises(NotFoundError):
        copy_checkpoint(entry, LocalBackend(root))


def test_where_there_is_no_room_nothing_is_written(source, root, monkeypatch):
    statvfs = os.statvfs

    def full(path):
        return os.statvfs_result((*statvfs(path)[:4], 100, *statvfs(path)[5:]))

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", full)
        with pytest.raises(RootError, match=r"has no room for step-0000000200 \(No space left on device; it needs"):
            copy(source, root)
        assert names(root) == []
    with pytest.raises(KeyboardInterrupt):
        copy(source, root, meter=interrupt("verifying"))
    monkeypatch.setattr(os, "statvfs", full)  # what is there already needs no room
    assert copy(source, root).written_bytes == 0


def test_a_destination_that_goes_away_is_no_original_that_is_gone(source, root):
    with pytest.raises(RootError, match="No such file or directory"):
        copy(source, root, threads=1, meter=once("copying", lambda: shutil.rmtree(root)))


def test_of_two_copies_at_once_one_works_and_the_other_is_told(source, root):
    told = []

    def second():
        with pytest.raises(BusyError, match="another copy of the same checkpoint") as refused:
            copy(source, root)
        told.append(refused.value)
        assert copy(source, root, step=300).step == 300  # another one is none of its business

    copied = copy(source, root, meter=once("copying", second))
    assert len(told) == 1
    assert not copied.already
    assert sorted(holds(root)) == [200, 300]


def test_many_copies_at_once_harm_nothing(source, root):
    script = (
        "import sys; from pathlib import Path; from tests.helpers.copies import copy\n"
        "from ckptman.errors import BusyError\n"
        "try: print(copy(Path(sys.argv[1]), Path(sys.argv[2])).already)\n"
        "except BusyError: print('busy')\n"
    )
    command = [sys.executable, "-c", script, str(source), str(root)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    told = [child.communicate(timeout=240)[0].strip() for child in children]
    assert [child.returncode for child in children] == [0] * 4
    assert told.count("False") == 1, told
    assert set(told) <= {"False", "True", "busy"}
    assert list(holds(root)) == [200]
    assert names(root) == [FOLDER]


def test_both_sides_are_held_meanwhile_and_no_prune_takes_anything(source, root):
    commit(root, 50)
    seen = []

    def see():
        seen.extend((look(source).names, look(root).names))
        plan = plan_prune(root, None)
        assert plan.leftovers == []
        execute(root, plan, "0123abcd-1")

    copy(source, root, meter=once("copying", see))
    at_source, at_root = seen
    assert list(at_source) == [FOLDER]
    assert "in use by copy" in at_source[FOLDER]
    assert {name.partition(".tmp-copy-")[0] for name in at_root} == {FOLDER}
    assert look(source).names == look(root).names == {}
    assert sorted(holds(root)) == [50, 200]


def test_a_run_may_drain_into_a_root_of_its_own(source, root):
    root.mkdir()
    mine = claim(root, "run", None)
    assert copy(source, root).step == 200
    mine.release()


@pytest.mark.parametrize("root", ["source", "source/backup", f"source/{FOLDER}", f"source/{FOLDER}/x", "other/step-1"])
def test_a_destination_that_cannot_be_one_is_refused(root, source, tmp_path):
    commit(tmp_path / "other", 1)
    (tmp_path / "other" / "step-1").symlink_to(tmp_path / "other" / "step-0000000001")
    (tmp_path / "link").symlink_to(source)
    for destination in (tmp_path / root, tmp_path / "link" / "backup"):
        with pytest.raises(ConfigError):
            copy(source, destination)


# ---- limits and errors -----------------------------------------------------------------------------------------------


def test_a_limit_holds_for_all_threads_together():
    waits, limit = [], Limit(1e9)
    for _ in range(100):
        limit.take(10**8, SimpleNamespace(wait=waits.append))
    # Nobody really waits here, so each has to wait for all before it.
    assert waits[-1] == pytest.approx(10.0, rel=0.05)
    with pytest.raises(ConfigError):
        Limit(0)


def test_a_copy_within_a_limit_counts_what_is_read_back_too(source, root):
    taken = []
    copied = copy(source, root, limit=SimpleNamespace(take=lambda count, over: taken.append(count)))
    assert sum(taken) == 2 * copied.bytes


def test_where_one_file_fails_the_others_end_at_once(source, place):
    class Failing(Limit):
        """Lets through the first piece of each of two files, and fails when one of them wants more."""

        def __init__(self):
            super().__init__(1.0)
            self.taken = 0

        def take(self, count, over):
            self.taken += 1
            if self.taken == 3:
                raise KeyboardInterrupt
            if self.taken > 3:
                super().take(count, over)

    limit = Failing()
    with pytest.raises(KeyboardInterrupt):
        copy(source, place, limit=limit, threads=4)
    assert limit.taken <= 6, "one piece for each thread, and no other file"


@pytest.mark.parametrize(
    "error",
    [
        BusyCopyingError("root", "host", 7, "job"),
        BusyCopyingError("root", "host", 7, None, "its objects were replaced"),
        NotReadBackError("draft", ("a has other bytes",)),
    ],
)
def test_what_ends_a_copy_is_told_to_other_ranks(error):
    told = pickle.loads(pickle.dumps(error))
    assert (type(told), str(told), vars(told)) == (type(error), str(error), vars(error))
