"""No byte of a checkpoint runs code, no name of one leaves its folder, nothing follows a link out of a root, no text of
one reaches a terminal that would obey it. The campaign in tests/faults tries hundreds; here is one of each."""

import io
import os
import pickle
import stat
import unicodedata
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptman
from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.catalog import Catalog
from ckptman.catalog.orphans import find_leftovers
from ckptman.catalog.prune import execute, plan_prune
from ckptman.catalog.writer_lock import claim, read_owner
from ckptman.cli.app import main
from ckptman.cli.console import plain
from ckptman.exporting.formats import config_file
from ckptman.format.index import read_index
from ckptman.format.manifest import MOST_BYTES, FileRecord, is_plain_name, read_manifest
from ckptman.format.paths import owner_path, run_folder
from ckptman.format.pickle_guard import HostilePickle, check_pickle
from ckptman.io.checksums import digest_file
from ckptman.io.durable_files import DISK, PRIVATE_ENV, Disk, holding
from ckptman.io.safe_open import open_regular, read_regular
from ckptman.loading.restricted_unpickler import load_plain, read_foreign_metadata
from ckptman.runtime.failure_trace import read_trace
from ckptman.runtime.journal import Journal, read_journal
from ckptman.runtime.outcome import Outcome, read_outcome, write_outcome
from ckptman.scheduler.chain_record import Chain
from ckptman.train.dataset.tokenfile import read_meta
from ckptman.transfer.copy import CopyOptions, copy_checkpoint
from tests.faults.hostile_ours import container_of, zip_bomb
from tests.faults.hostile_pickles import BOMBS, COMMANDS
from tests.helpers.checkpoints import commit
from tests.helpers.faulty_disk import rewrite, saving_to
from tests.loading.test_damage import forge

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


# ---- links -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tmp", "trash", "old"])
def test_prune_removes_a_link_and_not_what_it_points_to(outside, kind):
    root = outside.parent / "root"
    commit(root, 2)
    link = root / f"step-0000000002.{kind}-deadbeef"
    link.symlink_to(outside)
    execute(root, plan_prune(root, None), "0123abcd-1")
    assert not os.path.lexists(link)
    stays(outside)


def test_prune_removes_folders_with_links_in_them(outside):
    root = outside.parent / "root"
    for step in (1, 2):
        commit(root, step)
    (root / STEP / "away").symlink_to(outside)
    (root / STEP / "away too").symlink_to(outside / "precious")
    execute(root, plan_prune(root, ckptman.KeepLast(1)), "0123abcd-1")
    assert [path.name for path in root.iterdir()] == ["step-0000000002"]
    stays(outside)


def test_a_step_that_is_a_link_does_not_count_and_is_left_alone(outside):
    root = outside.parent / "root"
    commit(outside.parent / "other", 1)
    commit(root, 2)
    (root / STEP).symlink_to(outside.parent / "other" / STEP)
    execute(root, plan_prune(root, ckptman.KeepLast(1)), "0123abcd-1")
    assert sorted(path.name for path in root.iterdir()) == [STEP, "step-0000000002"]
    assert (outside.parent / "other" / STEP / "manifest.json").exists()


def test_no_pin_and_no_tier_is_read_through_a_link(outside, capsys, monkeypatch):
    root, opened, real = outside.parent / "root", [], os.open

    def note(path, *flags, **options):
        opened.append(os.path.realpath(path))
        return real(path, *flags, **options)

    for step in (2, 3):
        commit(root, step)
    (root / STEP).symlink_to(outside)
    (root / "step-0000000009.trash-deadbeef").symlink_to(outside)
    monkeypatch.setattr(os, "open", note)
    assert main(["list", str(root), "--json"]) == 0
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    run_folder(root).symlink_to(outside)
    assert main(["prune", str(root), "--keep-last", "1"]) == 10
    assert "is a link" in capsys.readouterr().err
    assert opened
    assert not [path for path in opened if path.startswith(f"{outside}/")]


def test_what_a_leftover_link_points_to_is_not_even_looked_at(tmp_path):
    """A link to / would have every file of the machine counted."""
    commit(tmp_path / "elsewhere", 1)
    root = tmp_path / "root"
    root.mkdir()
    (root / "step-0000000009.tmp-deadbeef").symlink_to(tmp_path / "elsewhere")
    (leftover,) = find_leftovers(root)
    assert leftover.bytes < 1000


def test_prune_goes_through_no_link_in_place_of_the_runs_folder(outside):
    root = outside.parent / "root"
    (outside / "precious").rename(outside / "outcome.json.tmp-1-0123abcd")
    (outside / "lease-0a1b2c3d.json").symlink_to("nowhere")  # which counts as one that is over
    run_folder(root).symlink_to(outside)
    (root / "step-0000000009.tmp-deadbeef").mkdir()
    assert main(["prune", str(root), "--leftovers"]) == 0
    assert sorted(path.name for path in outside.iterdir()) == ["lease-0a1b2c3d.json", "outcome.json.tmp-1-0123abcd"]


def test_prune_writes_through_no_link_in_place_of_its_lock(outside):
    root = outside.parent / "root"
    run_folder(root).mkdir()
    (run_folder(root) / "prune.lock").symlink_to(outside / "precious")
    assert main(["prune", str(root), "--leftovers"]) == 0
    stays(outside)


def test_a_run_writes_nothing_through_a_link(outside):
    root = outside.parent / "root"
    run_folder(root).symlink_to(outside)
    with pytest.raises(ckptman.RootError, match=r"is a link.* remove it, or name another"):
        claim(root, "run", None)
    stays(outside)
    run_folder(root).unlink()
    run_folder(root).mkdir()
    (run_folder(root) / "journal.jsonl").symlink_to(outside / "precious")
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        Journal(run_folder(root) / "journal.jsonl").record("harm")
    stays(outside)


def test_a_data_file_that_is_a_link_is_not_read(tmp_path):
    path = tmp_path / "x"
    ckptman.save({"x": torch.ones(5)}, path)
    (path / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (path / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ckptman.CorruptError, match=r"__0_0\.distcp is not a regular file"):
        ckptman.load({"x": torch.zeros(5)}, path)


def test_what_plain_dcp_wrote_may_have_links_within_its_folder(tmp_path):
    """Some stores keep files under the names of their digests, and links to them."""
    path = tmp_path / "plain"
    save_plain({"x": torch.ones(5), "epoch": 3}, path)
    (path / "blobs").mkdir()
    for name in ("__0_0.distcp", ".metadata"):
        (path / name).rename(path / "blobs" / f"blob-{name}")
        (path / name).symlink_to(f"blobs/blob-{name}")
    state = {"x": torch.zeros(5), "epoch": 0}
    ckptman.load(state, path)
    assert torch.equal(state["x"], torch.ones(5))
    assert state["epoch"] == 3


# ---- what is no file ---------------------------------------------------------------------------------------------


@pytest.mark.timeout(20)
def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "zero", "folder"):
        with pytest.raises(ckptman.CorruptError, match="not a regular file"):
            open_regular(tmp_path / name)
    for name in ("pipe", "zero", "folder"):
        with pytest.raises(ckptman.CorruptError, match="not a regular file"):
            read_regular(tmp_path / name, 10, follow=True)
    with pytest.raises(ckptman.CorruptError, match="not a regular file"):
        digest_file(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nothing")


def test_no_more_is_read_than_can_be_right(tmp_path):
    path = tmp_path / "manifest.json"
    path.touch()
    os.truncate(path, MOST_BYTES + 1)
    with pytest.raises(ckptman.CorruptError, match="no more than"):
        read_manifest(tmp_path)


def _outcome(folder):
    return read_outcome(folder / "outcome.json")


def _chain(folder):
    return Chain(folder).spec


def _index(folder):
    manifest = read_manifest(folder)
    record = FileRecord(bytes=SPARSE_BYTES, digest="0" * 32)
    return read_index(folder, manifest.model_copy(update={"files": {**manifest.files, "index.json": record}}))


def _trace(folder):
    return read_trace(folder / "trace.txt", float)


NOTES = [
    ("manifest.json", read_manifest),
    ("index.json", lambda folder: read_index(folder, read_manifest(folder))),
    ("index.json", _index),
    ("outcome.json", _outcome),
    ("chain.json", _chain),
    ("meta.json", read_meta),
    ("trace.txt", _trace),
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
@pytest.mark.parametrize("name", ["index.json", "chunks.bin", "blocks-00000.bin", "__0_0.distcp", "manifest.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path, name):
    path = tmp_path / "x"
    ckptman.save({"x": torch.ones(5)}, path)
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(ckptman.CorruptError, match=name):
        ckptman.load({"x": torch.zeros(5)}, path)


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_runs_own_file_is_not_waited_for(tmp_path):
    run_folder(tmp_path).mkdir()
    os.mkfifo(owner_path(tmp_path, 7))
    assert read_owner(tmp_path) is None
    claim(tmp_path, "run", None).release()
    os.mkfifo(run_folder(tmp_path) / "journal.jsonl")
    with pytest.raises(ckptman.NotFoundError, match="is not a journal"):
        read_journal(run_folder(tmp_path) / "journal.jsonl")


# ---- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "x\0", "x\n", "\x1b[2J", "\u202ex", "x" * 256]
)
def test_names_that_no_file_of_a_checkpoint_has(tmp_path, name):
    assert not is_plain_name(name)
    entry = commit(tmp_path, 1)
    manifest = entry.require_manifest()
    files = {each: record.model_dump() for each, record in manifest.files.items()}
    rewrite(entry.path, files={**files, name: files["index.json"]})
    with pytest.raises(ckptman.CorruptError, match="not a plain file name"):
        read_manifest(entry.path)


@pytest.mark.parametrize("path", ["../../x", "/etc/passwd", "a/../../x", "", "a//b"])
def test_plain_dcp_may_not_point_outside_either(tmp_path, path):
    folder = tmp_path / "plain"
    save_plain({"x": torch.ones(5)}, folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ckptman.CorruptError, match="outside the checkpoint folder"):
        ckptman.load({"x": torch.zeros(5)}, folder)


def test_a_checkpoint_under_the_name_of_another_step_is_not_loaded_as_that_one(tmp_path):
    ckptman.save({"x": torch.ones(5)}, tmp_path / STEP)
    (tmp_path / STEP).rename(tmp_path / "step-0000000002")
    with pytest.raises(ckptman.CorruptError, match="checkpoint of step 1 under another name"):
        ckptman.load({"x": torch.zeros(5)}, tmp_path / "step-0000000002")
    (tmp_path / "step-0000000002").rename(tmp_path / "best")
    ckptman.load({"x": torch.zeros(5)}, tmp_path / "best")


# ---- pickles -----------------------------------------------------------------------------------------------------


def save_plain(state, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(state, checkpoint_id=path, no_dist=True)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", [*COMMANDS, *BOMBS])
def test_no_pickle_runs_anything_or_takes_for_ever(tmp_path, name, monkeypatch):
    monkeypatch.setenv("CKPTMAN_FAULTS_CANARY", str(tmp_path / "canary"))
    data = {**COMMANDS, **BOMBS}[name]
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(ckptman.CorruptError, match="nothing of it was run"):
        read_foreign_metadata(tmp_path / ".metadata")
    for container in (container_of(data), data):
        with pytest.raises(ckptman.CorruptError, match="nothing of it was run"):
            load_plain(io.BytesIO(container), "the value x")
    assert not (tmp_path / "canary").exists()


def test_a_class_cannot_be_changed_by_data():
    data = b"\x80\x02ctorch.serialization\n_get_layout\n(N}X\x04\x00\x00\x00harmK\x01st" + b"b."
    with pytest.raises(HostilePickle, match="changes a class or a function"):
        check_pickle(data)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_pickles_that_picklers_make_are_let_pass(protocol):
    shared = (1, (2, "x"))
    value = [shared] * 1000, {shared: {3}, "f": frozenset([4])}, 2.5, 2**100, b"raw", None, True, "\u00e4"
    check_pickle(pickle.dumps(value, protocol))
    check_pickle(pickle.dumps(list(range(10_000)), protocol))


def test_a_container_is_as_torch_writes_it_or_not_read():
    value = io.BytesIO()
    torch.save({"a": (1, 2.5)}, value)
    assert load_plain(io.BytesIO(value.getvalue()), "x") == {"a": (1, 2.5)}
    with pytest.raises(ckptman.CorruptError, match="compressed"):
        load_plain(io.BytesIO(zip_bomb(4)), "x")
    twice = io.BytesIO(value.getvalue())
    with warnings.catch_warnings(), zipfile.ZipFile(twice, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr(next(each for each in archive.namelist() if each.endswith("data.pkl")), b"N.")
    with pytest.raises(ckptman.CorruptError, match="names that"):
        load_plain(twice, "x")


# ---- numbers and text --------------------------------------------------------------------------------------------


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


OBEYED = "\x1b[2J\x1b]0;x\x07\r\x9b31m\u202e\u2066\u200f\u061c\u2028\x7f"


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


def test_text_of_a_checkpoint_reaches_no_terminal_as_it_is(tmp_path, capsys):
    entry = commit(tmp_path, 1, metrics={OBEYED: 1.0}, values={OBEYED: {OBEYED: OBEYED}})
    rewrite(entry.path, reason=OBEYED, run_id=OBEYED, job_id=OBEYED, torch_version=OBEYED, ckptman_version=OBEYED)
    for arguments in (
        ["list"],
        ["show"],
        ["verify"],
        ["list", "--json"],
        ["show", "--json"],
        ["prune", "--keep-last", "1"],
    ):
        assert main([arguments[0], str(tmp_path), *arguments[1:]]) == 0
    index = entry.path / "index.json"
    forge(entry.path, "index.json", index.read_bytes().replace(b'"model.weight":', b'"\\u001b[2J\\u202e":'))
    (entry.path / "__0_0.distcp").write_bytes(b"\0" * (entry.path / "__0_0.distcp").stat().st_size)
    for arguments in (["verify"], ["show"]):
        main([arguments[0], str(tmp_path), *arguments[1:]])
    told = capsys.readouterr()
    for text in (told.out, told.err):
        assert all(each.isprintable() or each == "\n" for each in text), text


# ---- permissions -------------------------------------------------------------------------------------------------


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


# ---- a folder that is being written ----------------------------------------------------------------------------


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
    with saving_to(Swapping(outside, kind, name)):
        writer = ckptman.StorageWriter(target)
    with pytest.raises(dcp.api.CheckpointException, match="something else was put in its place"):
        dcp.save({"x": torch.ones(5)}, storage_writer=writer, no_dist=True)
    stays(outside)
    assert not target.exists()


@pytest.mark.parametrize("kind", ["link", "folder"])
@pytest.mark.parametrize("name", ["data", "manifest.json"])
def test_nor_does_a_copy(outside, kind, name):
    source = commit(outside.parent / "source", 10)
    root = outside.parent / "copies"
    with pytest.raises(ckptman.CkptmanError):
        copy_checkpoint(source, LocalBackend(root, Swapping(outside, kind, name)), CopyOptions(threads=1))
    stays(outside)
    assert Catalog(root).scan() == []


def test_a_draft_that_is_a_link_is_not_written_to(tmp_path, outside):
    (tmp_path / "x").symlink_to(outside)
    with pytest.raises(OSError, match="x"), holding(tmp_path / "x"):
        pass
    stays(outside)


def test_nor_is_one_of_another_user(tmp_path):
    """Told by the owner of what is made in it: a server may map ids, but all of them alike."""
    (tmp_path / "x").mkdir()
    if os.geteuid() == 0:
        os.chown(tmp_path / "x", 4711, -1)
    else:
        pytest.skip("only root can give a folder to somebody else")
    with holding(tmp_path / "x"), pytest.raises(OSError, match="its folder belongs to another user"):
        DISK.create_file(tmp_path / "x" / "a", b"")
    assert list((tmp_path / "x").iterdir()) == []
