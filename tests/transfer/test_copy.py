"""What a copy is: the same bytes, proved at the destination; and what it refuses, repairs and leaves alone."""

import os
import pickle
import shutil
import subprocess
import sys
import threading

import pytest

from ckptman.catalog.backends.drafts import BusyCopyingError, NotReadBackError
from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.catalog import Catalog
from ckptman.catalog.prune import execute, plan_prune
from ckptman.catalog.reader_lease import look
from ckptman.catalog.verified import identify, note_damaged, note_verified
from ckptman.catalog.writer_lock import claim
from ckptman.errors import BusyError, ConfigError, CorruptError, ExistsError, NotFoundError, RootError
from ckptman.forecast.transfer_time import Pace, Remaining, remaining
from ckptman.format.manifest import read_manifest
from ckptman.format.paths import DOT
from ckptman.io.durable_files import DISK, Disk
from ckptman.transfer.copy import CopyOptions, copy_checkpoint, copy_foreign
from ckptman.transfer.progress import Limit, Meter
from tests.helpers.checkpoints import commit, flip_byte, note_in
from tests.helpers.faulty_disk import FaultyDisk, holds
from tests.helpers.files import refuse_direct

FOLDER = "step-0000000200"
STRIDE = 4 * 2**20


@pytest.fixture
def source(tmp_path):
    """Step 200, committed third, after 100 and 300: files of two pieces and a bit."""
    commit(tmp_path / "source", 100)
    commit(tmp_path / "source", 300)
    commit(tmp_path / "source", 200, rows=1_200_003, metrics={"loss": float("nan")})
    return tmp_path / "source"


def copy(source, root, step=200, disk=DISK, **means):
    return copy_checkpoint(Catalog(source).entry(step), LocalBackend(root, disk), CopyOptions(**means))


def draft_of(root):
    (draft,) = root.glob("*.tmp-copy-*")
    return draft


class Once:
    """Does something the first time that a phase has moved so much."""

    def __init__(self, phase, action, after_bytes=1):
        self.phase, self.action, self.after_bytes, self.done = phase, action, after_bytes, False
        self.lock = threading.Lock()

    def __call__(self, meter):
        with self.lock:
            if self.done or meter.phase != self.phase or meter.done_bytes < self.after_bytes:
                return
            self.done = True
        self.action()


def stop():
    raise KeyboardInterrupt


def test_a_copy_is_the_same_checkpoint_and_is_proved(source, tmp_path):
    copied = copy(source, tmp_path / "root")
    assert (copied.step, copied.already, copied.written_bytes) == (200, False, copied.bytes)
    here, there = source / FOLDER, tmp_path / "root" / FOLDER
    for path in here.iterdir():
        if path.name != "verified.json":
            assert (there / path.name).read_bytes() == path.read_bytes(), path.name
    assert Catalog(tmp_path / "root").entry(200).sequence == 3
    note = note_in(there)
    assert note is not None
    assert note.every_byte
    assert [path.name for path in (tmp_path / "root").iterdir() if path.name != DOT] == [FOLDER]
    assert list((tmp_path / "root").glob(f"{DOT}/*")) == []


def test_everything_is_flushed_before_it_can_be_seen(source, tmp_path):
    disk = FaultyDisk()
    place = LocalBackend(tmp_path / "root", disk)
    copied = copy_checkpoint(Catalog(source).entry(200), place)
    seen = max(number for number, name in enumerate(disk.log) if name == "rename")
    assert disk.log[:seen].count("sync_file") == copied.files
    assert disk.log[seen - 1] == disk.log[seen + 1] == "sync_folder"


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("direct", [True, False])
def test_any_number_of_threads_with_and_without_direct_io(threads, direct, source, tmp_path, monkeypatch):
    if not direct:
        refuse_direct(monkeypatch)
    copied = copy(source, tmp_path / "root", threads=threads)
    assert bool(copied.buffered_because) is not direct
    assert holds(tmp_path / "root")[200] == holds(source)[200]


def test_what_was_proved_of_the_original_holds_of_the_copy(source, tmp_path):
    manifest = read_manifest(source / FOLDER)
    note_verified(
        source / FOLDER,
        identify(source / FOLDER, manifest),
        levels=("digests", "coverage"),
        world_sizes=(1, 8),
        disk=DISK,
    )
    copy(source, tmp_path / "root")
    note = note_in(tmp_path / "root" / FOLDER)
    assert note is not None
    assert (note.levels, note.world_sizes) == (("digests", "coverage"), (1, 8))
    assert note.time_seconds > 1.0


def test_a_pin_travels_and_what_is_no_part_of_it_does_not(source, tmp_path):
    (source / FOLDER / "pinned.json").write_text('{"why": "Table 2"}')
    (source / FOLDER / "notes\x1b.txt").write_text("mine")
    copied = copy(source, tmp_path / "root")
    assert (tmp_path / "root" / FOLDER / "pinned.json").read_text() == '{"why": "Table 2"}'
    assert copied.remarks == ("notes\\x1b.txt is not in the manifest: it was not copied",)


def test_one_that_is_there_is_not_copied_again_but_proved(source, tmp_path):
    root = tmp_path / "root"
    copy(source, root)
    assert copy(source, root).already
    (root / FOLDER / "verified.json").unlink()
    shutil.copytree(source / FOLDER, root / "cp")
    assert copy(source, root).already
    assert note_in(root / FOLDER) is not None
    flip_byte(root / FOLDER / "__1_0.distcp")
    with pytest.raises(ExistsError, match=r"is damaged there: __1_0\.distcp.*--overwrite"):
        copy(source, root)
    assert not copy(source, root, overwrite=True).already
    assert holds(root)[200] == holds(source)[200]


def test_another_one_of_the_same_step_stays_unless_it_may_go(source, tmp_path):
    root = tmp_path / "root"
    commit(root, 200)
    before = holds(root)
    with pytest.raises(ExistsError, match="is another checkpoint"):
        copy(source, root)
    assert holds(root) == before
    copy(source, root, overwrite=True)
    assert holds(root)[200] == holds(source)[200]
    (root / FOLDER / "__0_0.distcp").unlink()
    with pytest.raises(ExistsError, match="not complete"):
        copy(source, root)
    shutil.rmtree(root / FOLDER)
    (root / FOLDER).write_text("a file")
    with pytest.raises(ExistsError, match="no folder"):
        copy(source, root)


def test_an_interrupted_copy_goes_on_where_it_was(source, tmp_path):
    root = tmp_path / "root"
    with pytest.raises(KeyboardInterrupt):
        copy(source, root, threads=1, meter=Meter(Once("copying", stop, 2 * STRIDE + 1)))
    assert Catalog(root).scan() == []
    draft = draft_of(root)
    copied = copy(source, root, threads=1)
    assert 0 < copied.written_bytes <= copied.bytes - 2 * STRIDE
    assert holds(root)[200] == holds(source)[200]
    assert not draft.exists()


def test_what_is_wrong_in_a_draft_is_written_again(source, tmp_path):
    root = tmp_path / "root"
    with pytest.raises(KeyboardInterrupt):
        copy(source, root, meter=Meter(Once("verifying", stop)))
    draft = draft_of(root)
    flip_byte(draft / "__1_0.distcp")
    with (draft / "__0_0.distcp").open("ab") as file:
        file.write(b"more than there should be")
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    (draft / "index.json").unlink()
    (draft / "index.json").symlink_to(outside)
    (draft / "chunks.bin").unlink()
    os.link(outside, draft / "chunks.bin")
    (draft / ".metadata").unlink()
    os.mkfifo(draft / ".metadata")
    (draft / "folder").mkdir()
    (draft / "junk").write_bytes(b"junk")
    copied = copy(source, root)
    assert STRIDE <= copied.written_bytes < 2 * STRIDE
    assert outside.read_bytes() == b"mine"
    assert holds(root)[200] == holds(source)[200]
    assert {path.name for path in (root / FOLDER).iterdir()} == {
        *read_manifest(source / FOLDER).files,
        "manifest.json",
        "verified.json",
    }


def test_a_draft_that_is_a_link_is_not_followed(source, tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    with pytest.raises(KeyboardInterrupt):
        copy(source, root, meter=Meter(Once("copying", stop)))
    draft = draft_of(root)
    shutil.rmtree(draft)
    outside.mkdir()
    (outside / "mine").touch()
    draft.symlink_to(outside)
    copy(source, root)
    assert [path.name for path in outside.iterdir()] == ["mine"]
    assert holds(root)[200] == holds(source)[200]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("__1_0.distcp", r"__1_0\.distcp is not what was saved: block 36 \(from byte 4,718,592 on\) has changed"),
        ("index.json", r"index\.json is not what was saved"),
        ("blocks-00001.bin", r"blocks-00001\.bin does not match its digest|blocks-00001\.bin is not what was saved"),
    ],
)
def test_a_damaged_original_is_refused_by_file_and_block(name, told, source, tmp_path):
    flip_byte(source / FOLDER / name)
    with pytest.raises(CorruptError, match=told):
        copy(source, tmp_path / "root")
    assert list((tmp_path / "root").glob("step-*")) == []


def test_one_that_was_found_damaged_is_refused_before_a_byte_is_read(source, tmp_path):
    manifest = read_manifest(source / FOLDER)
    identity = identify(source / FOLDER, manifest)
    note_damaged(source / FOLDER, identity, "block 3", DISK)
    with pytest.raises(CorruptError, match="is damaged, as was found before: block 3"):
        copy(source, tmp_path / "root")


def test_an_original_that_is_deleted_or_saved_again_meanwhile_is_told(source, tmp_path):
    entry = Catalog(source).entry(200)
    root = tmp_path / "root"

    def again():
        shutil.rmtree(source / FOLDER)
        commit(source, 200, rows=1_200_000)

    for action in (lambda: shutil.rmtree(source / FOLDER), again):
        meter = Meter(Once("copying", action))
        with pytest.raises(NotFoundError, match="was deleted, or saved again"):
            copy_checkpoint(entry, LocalBackend(root), CopyOptions(threads=1, meter=meter))
        assert list(root.glob("step-*")) == []
        with pytest.raises(NotFoundError):
            copy_checkpoint(entry, LocalBackend(root))
        if not (source / FOLDER).exists():
            entry = commit(source, 200, rows=1_200_003)


class LyingDisk(Disk):
    """Loses one byte of what it writes at a place."""

    def __init__(self):
        self.lies = True

    def write_at(self, fd, data, offset):
        if self.lies and offset == STRIDE and len(data) >= 4096:
            self.lies = False
            data[100] ^= 1
        return os.pwrite(fd, data, offset)


def test_what_storage_does_not_give_back_does_not_count(source, tmp_path):
    root = tmp_path / "root"
    with pytest.raises(RootError, match=r"does not give back what was written to it \(__\d_0\.distcp.*blocks \(32;"):
        copy(source, root, threads=1, disk=LyingDisk())
    assert Catalog(root).scan() == []
    copied = copy(source, root)
    assert 0 < copied.written_bytes <= STRIDE
    assert holds(root)[200] == holds(source)[200]


def test_where_there_is_no_room_nothing_is_written(source, tmp_path, monkeypatch):
    root, statvfs = tmp_path / "root", os.statvfs

    def full(path):
        return os.statvfs_result((*statvfs(path)[:4], 100, *statvfs(path)[5:]))

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", full)
        with pytest.raises(RootError, match=r"has no room for step-0000000200 \(No space left on device; it needs"):
            copy(source, root)
        assert list(root.glob("step-*")) == []
    with pytest.raises(KeyboardInterrupt):
        copy(source, root, meter=Meter(Once("verifying", stop)))
    with monkeypatch.context() as patch:  # what is there already needs no room
        patch.setattr(os, "statvfs", full)
        assert copy(source, root).written_bytes == 0


def test_a_destination_that_goes_away_is_no_original_that_is_gone(source, tmp_path):
    root = tmp_path / "root"
    with pytest.raises(RootError, match="No such file or directory"):
        copy(source, root, threads=1, meter=Meter(Once("copying", lambda: shutil.rmtree(root))))


def test_of_two_copies_at_once_one_works_and_the_other_is_told(source, tmp_path):
    root = tmp_path / "root"
    told = []

    def second():
        with pytest.raises(BusyError, match="another copy of the same checkpoint") as refused:
            copy(source, root)
        told.append(refused.value)
        assert copy(source, root, step=300).step == 300  # another one is none of its business

    copied = copy(source, root, meter=Meter(Once("copying", second)))
    assert len(told) == 1
    assert not copied.already
    assert sorted(holds(root)) == [200, 300]


def test_many_copies_at_once_harm_nothing(source, tmp_path):
    root = tmp_path / "root"
    script = (
        "import sys; from pathlib import Path; from tests.transfer.test_copy import copy\n"
        "from ckptman.errors import BusyError\n"
        "try: print(copy(Path(sys.argv[1]), Path(sys.argv[2])).already)\n"
        "except BusyError: print('busy')\n"
    )
    command = [sys.executable, "-c", script, str(source), str(root)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    told = [child.communicate(timeout=60)[0].strip() for child in children]
    assert [child.returncode for child in children] == [0] * 4
    assert told.count("False") == 1, told
    assert set(told) <= {"False", "True", "busy"}
    assert list(holds(root)) == [200]
    assert [path.name for path in root.iterdir() if path.name != DOT] == [FOLDER]


def test_both_sides_are_held_meanwhile_and_no_prune_takes_anything(source, tmp_path):
    root = tmp_path / "root"
    commit(root, 50)
    seen = []

    def see():
        seen.extend((look(source).names, look(root).names))
        plan = plan_prune(root, None)
        assert plan.leftovers == []
        execute(root, plan, "0123abcd-1")

    copy(source, root, meter=Meter(Once("copying", see)))
    at_source, at_root = seen
    assert list(at_source) == [FOLDER]
    assert "in use by copy" in at_source[FOLDER]
    assert {name.partition(".tmp-copy-")[0] for name in at_root} == {FOLDER}
    assert look(source).names == look(root).names == {}
    assert sorted(holds(root)) == [50, 200]


def test_the_root_of_a_run_that_is_alive_is_left_alone(source, tmp_path):
    root = tmp_path / "root"
    commit(root, 100)
    script = (
        "import sys; from pathlib import Path; from ckptman.catalog.writer_lock import claim\n"
        "claim(Path(sys.argv[1]), 'run', None); print('mine', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "mine\n"
        with pytest.raises(BusyError, match="is being written to by another run"):
            copy(source, root)
        child.kill()
    assert copy(source, root).step == 200
    mine = claim(root, "run", None)
    assert copy(source, root, step=300).step == 300  # a run that drains into a root of its own
    mine.release()


@pytest.mark.parametrize("root", ["source", "source/backup", f"source/{FOLDER}", f"source/{FOLDER}/x", "other/step-1"])
def test_a_destination_that_cannot_be_one_is_refused(root, source, tmp_path):
    commit(tmp_path / "other", 1)
    (tmp_path / "other" / "step-1").symlink_to(tmp_path / "other" / "step-0000000001")
    with pytest.raises(ConfigError):
        copy(source, tmp_path / root)
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(ConfigError):
        copy(source, tmp_path / "link" / "backup")


def test_blocks_of_any_size_are_copied(source, tmp_path):
    from ckptman.io.checksums import digest_file, digest_of_blocks
    from tests.helpers.faulty_disk import rewrite

    folder = source / FOLDER
    for size in (1000, 2**20, 2**23, 2**30):
        names = [path.name for path in folder.iterdir() if path.name != "manifest.json" and "blocks" not in path.name]
        files = {name: (path, *digest_file(path, size)) for name in names for path in [folder / name]}
        records = {
            name: {"bytes": count, "digest": digest_of_blocks(blocks)} for name, (_, count, blocks) in files.items()
        }
        rewrite(folder, block_bytes=size, files=records)
        copied = copy(source, tmp_path / f"root-{size}")
        assert copied.written_bytes == copied.bytes


def foreign(folder):
    folder.mkdir(parents=True)
    for name, size in ((".metadata", 100), ("__0_0.distcp", 2 * STRIDE + 12_345), ("__1_0.distcp", 0)):
        (folder / name).write_bytes(os.urandom(size))
    return folder


def test_a_checkpoint_of_others_is_copied_by_bytes(tmp_path):
    folder, root = foreign(tmp_path / "plain"), tmp_path / "root"
    with pytest.raises(KeyboardInterrupt):
        copy_foreign(folder, LocalBackend(root), CopyOptions(threads=1, meter=Meter(Once("copying", stop, STRIDE + 1))))
    copied = copy_foreign(folder, LocalBackend(root), CopyOptions(threads=1))
    assert 0 < copied.written_bytes < copied.bytes
    assert {path.name: path.read_bytes() for path in (root / "plain").iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    assert copy_foreign(folder, LocalBackend(root)).already
    flip_byte(root / "plain" / "__0_0.distcp")
    with pytest.raises(ExistsError, match="with other bytes"):
        copy_foreign(folder, LocalBackend(root))
    copy_foreign(folder, LocalBackend(root), CopyOptions(overwrite=True))
    (folder / "__2_0.distcp").touch()
    with pytest.raises(ExistsError, match="with other files"):
        copy_foreign(folder, LocalBackend(root))
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="has link in it"):
        copy_foreign(folder, LocalBackend(root))
    with pytest.raises(ConfigError):
        copy_foreign(folder, LocalBackend(folder / "inside"))


def test_a_checkpoint_of_others_that_changes_meanwhile_is_told(tmp_path):
    folder, root = foreign(tmp_path / "plain"), tmp_path / "root"
    meter = Meter(Once("copying", lambda: os.truncate(folder / "__0_0.distcp", 10)))
    with pytest.raises(NotFoundError, match="was deleted, or saved again"):
        copy_foreign(folder, LocalBackend(root), CopyOptions(threads=1, meter=meter))
    assert [path.name for path in root.iterdir() if path.name != DOT] == []


def test_a_limit_holds_for_all_threads_together():
    waits = []
    limit = Limit(1e9)
    limit._over.wait = waits.append
    for _ in range(100):
        limit.take(10**8)
    # Nobody really waits here, so each has to wait for all before it.
    assert waits[-1] == pytest.approx(10.0, rel=0.05)
    with pytest.raises(ConfigError):
        Limit(0)


def test_a_copy_within_a_limit_counts_what_is_read_back_too(source, tmp_path):
    waits = []
    copied = copy(source, tmp_path / "root", threads=1, limit=Limit(1e15))
    limit = Limit(1e3)
    limit._over.wait = waits.append
    copy(source, tmp_path / "other", threads=1, limit=limit)
    assert waits[-1] == pytest.approx(2 * copied.bytes / 1e3, rel=0.05)


@pytest.mark.parametrize(
    ("pace", "left", "expected"),
    [
        (Pace(100, 8.0, 10, 2.0, 10.0), (300, 30), Remaining(24.0, 6.0)),
        (Pace(100, 32.0, 10, 8.0, 10.0), (300, 30), Remaining(24.0, 6.0)),  # four streams
        (Pace(100, 8.0, 0, 0.0, 10.0), (300, 30), Remaining(30.0, 0.0)),
        (Pace(0, 0.0, 10, 2.0, 10.0), (0, 30), Remaining(0.0, 30.0)),
        (Pace(0, 0.0, 0, 0.0, 10.0), (300, 30), None),
        (Pace(0, 1.0, 10, 2.0, 10.0), (300, 30), None),
    ],
)
def test_time_left_is_bytes_by_bandwidth_and_files_by_rate(pace, left, expected):
    assert remaining(pace, *left) == expected


def test_both_parts_are_told_where_both_matter():
    assert Remaining(24.0, 6.0).both_matter
    assert Remaining(1.0, 9.0).both_matter
    assert not Remaining(100.0, 1.0).both_matter
    assert not Remaining(0.0, 5.0).both_matter
    assert not Remaining(0.0, 0.0).both_matter


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
