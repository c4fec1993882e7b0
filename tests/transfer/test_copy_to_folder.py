"""Copies where others are unkind: nothing that is not ours is replaced, and nothing wrong is called right."""

import errno
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from xxhash import xxh3_128_hexdigest

from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.catalog import Catalog
from ckptman.catalog.pins import PINNED, pin, read_pin
from ckptman.catalog.prune import plan_prune
from ckptman.cli.app import main
from ckptman.errors import BusyError, ExistsError, NotFoundError, RootError
from ckptman.format.paths import DOT, MANIFEST, step_folder
from ckptman.io import file_reader
from ckptman.io.durable_files import DISK, Disk
from ckptman.io.safe_open import open_regular
from ckptman.transfer.copy import CopyOptions, copy_checkpoint, copy_foreign
from ckptman.transfer.progress import Limit, Meter
from tests.helpers.checkpoints import commit, steps_of

STEP = "step-0000000200"
Told = pytest.CaptureFixture[str]


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Steps 100 and 200, seen from the folder that holds their root."""
    for step in (100, 200):
        commit(tmp_path / "source", step, rows=3000)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "source"


def copy(source, root, step=200, disk=DISK, overwrite=False):
    return copy_checkpoint(Catalog(source).entry(step), LocalBackend(root, disk), CopyOptions(overwrite=overwrite))


def plain(folder, content):
    """What looks like a checkpoint of plain DCP, in two files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("__0_0.distcp", ".metadata"):
        (folder / name).write_bytes(content * 5000)
    return folder


def test_a_checkpoint_of_others_that_is_saved_over_meanwhile_is_no_mixture(tmp_path):
    folder = plain(tmp_path / "outputs", b"one")
    saved = threading.Event()

    def save_over(meter):
        if meter.phase == "verifying" and not saved.is_set():
            saved.set()
            plain(folder, b"two")

    place = LocalBackend(tmp_path / "root")
    with pytest.raises(NotFoundError, match="was deleted, or saved again"):
        copy_foreign(folder, place, CopyOptions(meter=Meter(save_over)))
    assert saved.is_set()
    assert [path.name for path in place.root.iterdir() if path.name != ".ckptman"] == []
    assert not copy_foreign(folder, place).already


def test_what_is_no_checkpoint_is_never_replaced(tmp_path):
    folder = plain(tmp_path / "outputs", b"one")
    thesis = tmp_path / "project" / "outputs" / "thesis.tex"
    thesis.parent.mkdir(parents=True)
    thesis.touch()
    place = LocalBackend(thesis.parents[1])
    with pytest.raises(ExistsError, match="and is no checkpoint: move it away"):
        copy_foreign(folder, place, CopyOptions(overwrite=True))
    assert thesis.exists()
    thesis.rename(thesis.with_name("__0_0.distcp"))
    assert not copy_foreign(folder, place, CopyOptions(overwrite=True)).already


@pytest.mark.parametrize("name", ["thesis.tex", MANIFEST, "eval/results.json", ".metadata/workspace"])
def test_nor_what_only_has_the_name_of_one(name, source, tmp_path):
    root = tmp_path / "root"
    theirs = root / STEP / name
    theirs.parent.mkdir(parents=True)
    theirs.write_text('{"name": "a web page"}')
    with pytest.raises(ExistsError, match="and is no checkpoint: move it away"):
        copy(source, root, overwrite=True)
    with pytest.raises(ExistsError, match="is no checkpoint, and is not replaced by one"):
        commit(root, 200)
    assert theirs.read_text() == '{"name": "a web page"}'


@pytest.mark.parametrize("lost", [MANIFEST, "__0_0.distcp", "index.json"])
def test_what_is_left_of_a_checkpoint_is_replaced(lost, source, tmp_path):
    copy(source, tmp_path / "root")
    (tmp_path / "root" / STEP / lost).unlink()
    assert not copy(source, tmp_path / "root", overwrite=True).already


def test_of_what_is_replaced_nothing_is_left(source, tmp_path):
    root = tmp_path / "root"
    commit(root, 200, metrics={"loss": 1.0})
    with pytest.raises(ExistsError):
        copy(source, root)
    copy(source, root, overwrite=True)
    assert [path.name for path in root.iterdir() if path.name != ".ckptman"] == [STEP]
    assert plan_prune(root, None).leftovers == []


@pytest.mark.parametrize("name", [MANIFEST, PINNED])
def test_the_manifest_and_a_pin_are_read_back_too(name, source, tmp_path):
    class Garbling(Disk):
        def write_file(self, path, data):
            super().write_file(path, data[:-3] + b"?" + data[-2:] if path.name == name else data)

    pin(source / STEP, "the paper", by="me", time_seconds=1.0, disk=DISK)
    with pytest.raises(RootError, match=f"does not give back what was written to it \\({name}"):
        copy(source, tmp_path / "root", disk=Garbling())
    assert Catalog(tmp_path / "root").scan() == []
    copy(source, tmp_path / "root")


def test_a_pin_that_was_set_later_travels_with_the_next_copy(source, tmp_path):
    copy(source, tmp_path / "root")
    pin(source / STEP, "the paper", by="me", time_seconds=1.0, disk=DISK)
    assert copy(source, tmp_path / "root").already
    there = read_pin(tmp_path / "root" / STEP)
    assert there is not None
    assert there.why == "the paper"


def test_a_copy_that_is_refused_or_does_nothing_abandons_nothing_of_a_run_at_work(source, tmp_path):
    root = tmp_path / "root"
    for step in (100, 200):
        copy(source, root, step)
    commit(source, 300)
    assert main(["rollback", str(source), "--to-step", "100"]) == 0
    commit(source, 150)
    with a_run_in(root):
        found = copy(source, root, 100)
        assert found.already
        assert "still counts in" in found.remarks[-1]
        with pytest.raises(BusyError):
            copy(source, root, 150)
        assert sorted(steps_of(Catalog(root).complete())) == [100, 200]
    assert copy(source, root, 100).remarks == ()
    assert sorted(steps_of(Catalog(root).complete())) == [100]
    copy(source, root, 150)
    assert sorted(steps_of(Catalog(root).complete())) == [100, 150]


def test_with_all_one_that_somebody_else_copies_keeps_no_other_one(source, tmp_path, capsys):
    root = tmp_path / "root"
    with a_copy_of(source, 100, root):
        assert main(["copy", str(source), str(root), "--all"]) == 11
    told = capsys.readouterr()
    assert "step 100: not copied: another copy of the same checkpoint" in told.out
    assert "1 checkpoint not copied, the first of step 100" in told.err
    assert steps_of(Catalog(root).complete()) == [200]


def test_with_all_a_file_that_cannot_be_read_keeps_no_other_checkpoint(source, tmp_path, capsys, monkeypatch):
    def closed(path, **how):
        if path.parent.name == "step-0000000100":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_regular(path, **how)

    monkeypatch.setattr(file_reader, "open_regular", closed)
    assert main(["copy", "source", "root", "--all"]) == 10
    assert "step 100: not copied: source/step-0000000100/" in capsys.readouterr().out
    assert steps_of(Catalog(tmp_path / "root").complete()) == [200]


def test_a_draft_of_what_was_saved_over_since_is_cleared_by_the_next_copy(tmp_path):
    folder, root = plain(tmp_path / "outputs", b"one"), tmp_path / "root"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder), str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "now\n"
        child.kill()
    assert len(list(root.glob("outputs.tmp-copy-*"))) == 1
    plain(folder, b"three")
    copy_foreign(folder, LocalBackend(root))
    assert [path.name for path in root.iterdir() if path.name != DOT] == ["outputs"]


def test_an_interrupt_is_not_held_back_by_a_limit(source, tmp_path):
    """The thread that copies would wait for hours; the interrupt comes to the one that waits for it."""

    class Interrupted(Limit):
        told = threading.Lock()

        def take(self, count):
            if self.told.acquire(blocking=False):
                os.kill(os.getpid(), signal.SIGINT)
            super().take(count)

    means = CopyOptions(limit=Interrupted(1.0), threads=2)
    with pytest.raises(KeyboardInterrupt):
        copy_checkpoint(Catalog(source).entry(200), LocalBackend(tmp_path / "root"), means)
    assert list((tmp_path / "root").glob("*.tmp-copy-*")), "the next copy goes on there"


OWNS = """
import sys
from pathlib import Path
from ckptman.catalog.writer_lock import claim
claim(Path(sys.argv[1]), "run", None)
print("now", flush=True)
sys.stdin.read()
"""
KILLED = """
import sys
from pathlib import Path
from ckptman.transfer.copy import CopyOptions, copy_foreign
from ckptman.transfer.progress import Meter
from ckptman.catalog.backends.local import LocalBackend
def wait(meter):
    if meter.phase == "verifying":
        print("now", flush=True)
        sys.stdin.read()
copy_foreign(Path(sys.argv[1]), LocalBackend(sys.argv[2]), CopyOptions(meter=Meter(wait)))
"""


@contextmanager
def a_run_in(root):
    """Somebody else owns a root, or a draft, meanwhile."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNS, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "now\n"
        try:
            yield
        finally:
            child.kill()


@contextmanager
def a_copy_of(source, step, root):
    """Another copy of one of the checkpoints is at work meanwhile."""
    folder = step_folder(step)
    tag = xxh3_128_hexdigest((source / folder / MANIFEST).read_bytes())[:16]
    draft = root / f"{folder}.tmp-copy-{tag}"
    draft.mkdir(parents=True)
    with a_run_in(draft):
        yield


@pytest.mark.parametrize(
    "files",
    [
        {"manifest.json": b'{"format_version": 99}', "model.bin": b"x"},
        {"chunks.bin": b"x", "index.json": b"{}"},
        {".metadata": b"text"},
        {".metadata": b"\x80x"},
        {".ckptman/mine": b"x", "values-00000.json": b"{}"},
        {".metadata": b"\x80x", "__0_0.distcp": b"x", "sub/notes": b"x"},
    ],
    ids=lambda files: " ".join(files),
)
def test_a_folder_of_somebody_elses_is_not_replaced(files, tmp_path):
    source, root = tmp_path / "a", tmp_path / "b"
    commit(source, 200)
    for name, data in files.items():
        path = root / step_folder(200) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with pytest.raises(ExistsError):
        copy(source, root, overwrite=True)
    assert {name: (root / step_folder(200) / name).read_bytes() for name in files} == files


def test_a_file_that_was_cut_off_goes_on_from_there(source, tmp_path):
    commit(source, 300, rows=1_500_000)

    def stop(meter):
        if meter.phase == "verifying":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_checkpoint(Catalog(source).entry(300), LocalBackend(tmp_path / "root"), CopyOptions(meter=Meter(stop)))
    draft = next((tmp_path / "root").glob("step-0000000300.tmp-copy-*"))
    largest = max(draft.glob("*.distcp"), key=lambda path: path.stat().st_size)
    size = largest.stat().st_size
    os.truncate(largest, size // 2)  # as a file system leaves it that cannot reserve room
    again = copy(source, tmp_path / "root", 300)
    assert again.written_bytes < size * 3 // 4
    assert Catalog(tmp_path / "root").entry(300).complete
