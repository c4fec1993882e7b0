"""Guards against checkpoints, roots and other users that mean harm, which the campaign's hostile checkpoints
(`tests/faults/hostile.py`) do not reach."""

import os
import stat
import unicodedata
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptman
from ckptman.errors import plain
from ckptman.jobs.chain_record import Chain
from ckptman.runtime.failure_trace import read_trace
from ckptman.runtime.journal import read_journal
from ckptman.runtime.outcome import Outcome, read_outcome, write_outcome
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.format.index import read_index
from ckptman.storage.format.manifest import FileRecord, is_plain_name, read_manifest
from ckptman.storage.io.checksums import digest_file
from ckptman.storage.io.durable_files import DISK, PRIVATE_ENV, Disk, holding
from ckptman.storage.io.safe_open import open_regular, read_regular
from ckptman.storage.transfer.copy import CopyOptions, copy_checkpoint
from ckptman.tools.exporting.formats import config_file
from ckptman.train.dataset.tokenfile import read_meta
from tests.helpers.checkpoints import commit
from tests.helpers.faulty_disk import on_disk, rewrite

STEP = "step-0000000001"
SPARSE_BYTES = 6 * 2**30


@pytest.fixture
def outside(tmp_path):
    """A folder with a file that nobody may touch, and a root beside it."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "precious").write_text("must stay")
    (tmp_path / "root").mkdir()
    return folder


def stays(outside):
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert (outside / "precious").read_text() == "must stay"


@pytest.mark.timeout(20)
def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "zero", "folder"):
        for read in (open_regular, partial(read_regular, most_bytes=10, follow=True)):
            with pytest.raises(ckptman.CorruptError, match="not a regular file"):
                read(tmp_path / name)
    with pytest.raises(ckptman.CorruptError, match="not a regular file"):
        digest_file(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nothing")


def _index(folder):
    manifest = read_manifest(folder)
    record = FileRecord(bytes=SPARSE_BYTES, digest="0" * 32)
    return read_index(folder, manifest.model_copy(update={"files": {**manifest.files, "index.json": record}}))


NOTES = [
    ("manifest.json", read_manifest),
    ("index.json", lambda folder: read_index(folder, read_manifest(folder))),
    ("index.json", _index),
    ("outcome.json", lambda folder: read_outcome(folder / "outcome.json")),
    ("chain.json", lambda folder: Chain(folder).spec),
    ("meta.json", read_meta),
    ("trace.txt", lambda folder: read_trace(folder / "trace.txt", float)),
    ("config.json", lambda folder: config_file(folder / "config.json")),
]


@pytest.mark.parametrize(("name", "read"), NOTES)
def test_a_note_of_six_gibibytes_is_refused_before_it_is_read(name, read, tmp_path, monkeypatch):
    folder = commit(tmp_path, 1).path
    real, counted = os.read, list[int]()

    def reading(fd, size):
        counted.append(size)
        return real(fd, size)

    (folder / name).touch()
    os.truncate(folder / name, SPARSE_BYTES)
    monkeypatch.setattr(os, "read", reading)
    with pytest.raises((ckptman.CorruptError, ckptman.ConfigError), match=f"{name} has {SPARSE_BYTES} bytes") as caught:
        read(folder)
    assert ";" in str(caught.value), "and what to do"
    assert sum(counted) < 2**20


@pytest.mark.parametrize("name", ["pinned.json", "verified.json"])
def test_a_note_of_six_gibibytes_beside_a_manifest_keeps_nobody_waiting(name, tmp_path):
    entry = commit(tmp_path, 1)
    (entry.path / name).touch()
    os.truncate(entry.path / name, SPARSE_BYTES)
    record = Catalog(tmp_path).entry(1).record()
    assert bool(record.pinned) == (name == "pinned.json"), "what cannot be read pins all the same"


def test_an_outcome_says_no_more_than_is_read_back(tmp_path):
    path = tmp_path / "outcome.json"
    write_outcome(path, Outcome("failed", 1, "x" * 2**22, 1, "/run", 1, 1.0, 7, "n1"))
    found = read_outcome(path)
    assert found is not None
    assert found.reason.startswith("xxx")


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_journal_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "journal.jsonl")
    with pytest.raises(ckptman.NotFoundError, match="is not a journal"):
        read_journal(tmp_path / "journal.jsonl")


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "x\0", "x\n", "\x1b[2J", "\u202ex", "x" * 256]
)
def test_names_that_no_file_of_a_checkpoint_has(name):
    assert not is_plain_name(name)


def test_a_checkpoint_under_the_name_of_another_step_is_not_loaded_as_that_one(tmp_path):
    ckptman.save({"x": torch.ones(5)}, tmp_path / STEP)
    (tmp_path / STEP).rename(tmp_path / "step-0000000002")
    with pytest.raises(ckptman.CorruptError, match="checkpoint of step 1 under another name"):
        ckptman.load({"x": torch.zeros(5)}, tmp_path / "step-0000000002")
    (tmp_path / "step-0000000002").rename(tmp_path / "best")
    ckptman.load({"x": torch.zeros(5)}, tmp_path / "best")


@pytest.mark.parametrize(
    "changes",
    [
        {"time_seconds": 1e300},
        {"time_seconds": -1},
        {"step": 10**10},
        {"sequence": 2**62},
        {"world_size": 2**31},
        {"attempt": 2**31},
        {"mesh": {"names": ["x"], "shape": [2**31]}},
    ],
)
def test_numbers_that_nothing_has_are_refused(tmp_path, changes):
    entry = commit(tmp_path, 1)
    rewrite(entry.path, **changes)
    with pytest.raises(ckptman.CorruptError, match="restore an older checkpoint"):
        read_manifest(entry.path)


def test_every_character_that_a_terminal_obeys_is_escaped():
    for number in range(0x110000):
        character = chr(number)
        control = unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs")
        turns = unicodedata.bidirectional(character) in ["LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"]
        if control or turns or character in "\u061c\u200e\u200f":
            shown = plain(character)
            assert shown.isascii(), hex(number)
            assert shown.isprintable(), hex(number)
    assert plain("\u00e4\u4e2d\u0627 -_.") == "\u00e4\u4e2d\u0627 -_."


@pytest.mark.parametrize(
    ("setting", "umask", "mode"),
    [(None, 0o022, 0o755), ("", 0o077, 0o700), ("0", 0o002, 0o775), ("1", 0o000, 0o700), ("1", 0o022, 0o700)],
)
def test_folders_are_made_as_the_umask_says_or_for_their_owner_alone(tmp_path, monkeypatch, setting, umask, mode):
    monkeypatch.delenv(PRIVATE_ENV, raising=False)
    if setting is not None:
        monkeypatch.setenv(PRIVATE_ENV, setting)
    before = os.umask(umask)
    try:
        with ckptman.Checkpointer(tmp_path / "a" / "root", {"x": torch.ones(3)}, deadline=None) as run:
            run.save(1)
        ckptman.save({"x": torch.ones(3)}, tmp_path / "b" / "best")
    finally:
        os.umask(before)
    for folder in ("a", "a/root", "a/root/.ckptman", f"a/root/{STEP}", "b", "b/best"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == mode, folder


def test_a_slip_in_the_setting_lays_nothing_open(tmp_path, monkeypatch):
    monkeypatch.setenv(PRIVATE_ENV, "yes")
    with pytest.raises(OSError, match="CKPTMAN_PRIVATE is 'yes': set it to 1"):
        DISK.make_folder(tmp_path / "x")
    with pytest.raises(ckptman.RootError, match="CKPTMAN_PRIVATE is 'yes'"):
        ckptman.save({"x": torch.ones(3)}, tmp_path / "new" / "x")
    assert list(tmp_path.iterdir()) == []


def swap(folder, outside, kind):
    """What another user of a shared root can do at any moment."""
    folder.rename(folder.with_name("aside"))
    if kind == "link":
        folder.symlink_to(outside)
    else:
        folder.mkdir()


class Swapping(Disk):
    """Puts something else in place of a draft just before the first file of a name is made in it."""

    def __init__(self, outside, kind, name):
        self.outside, self.kind, self.name = outside, kind, name

    def reserve(self, fd, size):
        if self.name == "data":
            self.swap(Path(f"/proc/self/fd/{fd}").readlink().parent)
        super().reserve(fd, size)

    def write_file(self, path, data):
        if path.name == self.name:
            self.swap(path.parent)
        super().write_file(path, data)

    def swap(self, folder):
        if self.name:
            self.name = ""
            swap(folder, self.outside, self.kind)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["link", "folder"])
@pytest.mark.parametrize("name", ["data", "blocks-00000.bin", "index.json", "manifest.json"])
def test_a_save_goes_nowhere_but_to_the_folder_that_it_made(outside, kind, name):
    target = outside.parent / "mine"
    refused = pytest.raises(dcp.api.CheckpointException, match="something else was put in its place")
    with on_disk(Swapping(outside, kind, name)), refused:
        dcp.save({"x": torch.ones(5)}, storage_writer=ckptman.StorageWriter(target), no_dist=True)
    stays(outside)
    assert not target.exists()


@pytest.mark.parametrize("kind", ["link", "folder"])
@pytest.mark.parametrize("name", ["data", "manifest.json"])
def test_nor_does_a_copy(outside, kind, name):
    source = commit(outside.parent / "source", 10)
    root = outside.parent / "copies"
    with on_disk(Swapping(outside, kind, name)), pytest.raises(ckptman.CkptmanError):
        copy_checkpoint(source, LocalBackend(root), CopyOptions(threads=1))
    stays(outside)
    assert Catalog(root).scan() == []


def test_a_draft_of_another_user_is_not_written_to(tmp_path):
    """Told by the owner of what is made in it: a server may map ids, but all of them alike."""
    (tmp_path / "x").mkdir()
    if os.geteuid() == 0:
        os.chown(tmp_path / "x", 4711, -1)
    else:
        pytest.skip("only root can give a folder to somebody else")
    with holding(tmp_path / "x"), pytest.raises(OSError, match="its folder belongs to another user"):
        DISK.create_file(tmp_path / "x" / "a", b"")
    assert list((tmp_path / "x").iterdir()) == []
