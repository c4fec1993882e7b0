"""Copies where others are unkind: nothing that is not ours is replaced, and nothing wrong is called right."""

import errno
import itertools
import os
import re
import shutil
import signal
from contextlib import nullcontext

import pytest

from ckptman.cli.app import main
from ckptman.errors import BusyError, ExistsError, RootError
from ckptman.policies.tiers import Tier
from ckptman.storage.catalog.backends import copy_source
from ckptman.storage.catalog.backends.copy_source import SourceError
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.liveness import this_process
from ckptman.storage.catalog.pins import PINNED
from ckptman.storage.catalog.tiers import write_tiers
from ckptman.storage.format.paths import MANIFEST, owner_path
from ckptman.storage.io import file_reader
from ckptman.storage.io.durable_files import Disk
from ckptman.storage.transfer.copy import CopyOptions, copy_checkpoint
from ckptman.storage.transfer.drain import carry_out, plan_drain
from ckptman.storage.transfer.progress import Limit
from tests.helpers.checkpoints import commit, note_in, steps_of
from tests.helpers.copies import a_copy_of, a_run_in, copy, names, once
from tests.helpers.faulty_disk import holds, on_disk
from tests.storage.catalog.test_tiers import drain

STEP = "step-0000000200"
STRIDE = 4 * 2**20


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Steps 100 and 200, seen from the folder that holds their root."""
    for step in (100, 200):
        commit(tmp_path / "source", step, rows=3000)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "source"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


# ---- what comes there at the last moment -----------------------------------------------------------------------------


class Late(Disk):
    """Somebody does something at the last moment before a copy gets its name: before it is seen whether that is free,
    or `after` that."""

    def __init__(self, what, *, after):
        self._what = what
        self._after = after

    def write_file(self, path, data):
        super().write_file(path, data)
        if not self._after and path.name == MANIFEST:
            self._now()

    def rename(self, source, target):
        if self._after and target.name == STEP:
            self._now()
        super().rename(source, target)

    def _now(self):
        if (what := self._what) is not None:
            self._what = None
            what()


def assert_tidy(root, *kept):
    """Nothing is there but this, or what a prune of leftovers clears."""
    assert {name.partition(".")[0] for name in set(names(root)) - set(kept)} <= {STEP}
    assert main(["prune", str(root), "--leftovers"]) == 0
    assert names(root) == list(kept)


COMES = {
    "another": lambda source, final: commit(final.parent, 200),
    "the same": lambda source, final: shutil.copytree(source / STEP, final),
    "a folder": lambda source, final: (final.mkdir(), (final / "mine").touch()),
    "a file": lambda source, final: final.write_text("mine"),
    "a link": lambda source, final: final.symlink_to(source.parent),
}


@pytest.mark.parametrize("after", [False, True], ids=["before the look", "after the look"])
@pytest.mark.parametrize("kind", COMES)
def test_what_came_there_first_stays(after, kind, source, root):
    final, own = root / STEP, holds(source)[200]
    with (
        pytest.raises((ExistsError, RootError)) as told,
        on_disk(Late(lambda: COMES[kind](source, final), after=after)),
    ):
        copy(source, root)
    if kind == "another":
        assert re.search(f"{STEP} came to be there meanwhile, and is another.*--overwrite", str(told.value))
        first = holds(root)
        assert first[200] != own
        with pytest.raises(ExistsError):
            copy(source, root)
        assert holds(root) == first
        assert_tidy(root, STEP)
        copy(source, root, overwrite=True)
    if kind in ("another", "the same"):
        assert isinstance(told.value, ExistsError)
        assert holds(root) == {200: own}
        assert copy(source, root).already
    else:
        assert not (final / MANIFEST).exists()
        assert (final.is_symlink(), final.is_file()) == (kind == "a link", kind == "a file")
    assert_tidy(root, STEP)


def test_what_may_be_replaced_is_by_the_next_copy_at_the_latest(source, root):
    with pytest.raises(RootError, match=f"{STEP}.*copy again"), on_disk(Late(lambda: commit(root, 200), after=True)):
        copy(source, root, overwrite=True)
    assert list(holds(root)) == [200]
    assert copy(source, root, overwrite=True).written_bytes == 0
    assert holds(root)[200] == holds(source)[200]
    assert_tidy(root, STEP)


def test_a_drain_says_so_and_fills_up_the_rest(source, tmp_path):
    far = tmp_path / "far"
    commit(source, 300)

    with on_disk(Late(lambda: commit(far, 200, sequence=9), after=True)):
        done = {each.task.entry.step: each for each in drain(source, Tier(far))}
    assert {step for step, each in done.items() if each.copied is not None} == {100, 300}
    assert done[200].error is not None
    first = holds(far)
    assert first == {**holds(source), 200: first[200]}
    assert first[200] != holds(source)[200]
    (again,) = drain(source, Tier(far))
    assert isinstance(again.error, ExistsError)
    assert holds(far) == first
    assert_tidy(far, *(f"step-{step:010d}" for step in (100, 200, 300)))


def test_what_a_tier_got_while_a_drain_was_planned_is_not_replaced(source, tmp_path):
    far = tmp_path / "far"
    write_tiers(source, [Tier(far, every=2)])
    plan = plan_drain(source, [Tier(far, every=2)])
    commit(far, 200, metrics={"loss": 1.0})
    before = holds(far)
    (drained,) = carry_out(source, plan, lambda task: nullcontext(CopyOptions(threads=1)))
    assert isinstance(drained.error, ExistsError)
    assert holds(far) == before


def test_a_draft_that_another_copy_took_over_is_not_published(source, root):
    """As after `scontrol suspend`: who was silent for long is taken for dead, and what it had sealed is tidied up."""

    class Suspended(Disk):
        def sync_folder(self, path):
            super().sync_folder(path)
            if (path / MANIFEST).exists() and ".tmp-copy-" in path.name:
                other = this_process("copy", None)
                self.create_file(owner_path(path, 2), other.model_dump_json().encode() + b"\n")
                self.remove_file(path / MANIFEST)

    with pytest.raises(BusyError, match="another copy of the same checkpoint"), on_disk(Suspended()):
        copy(source, root)
    assert not (root / STEP).exists()


# ---- what is replaced, and what is not -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.tex": b"x"},
        {"eval/results.json": b"x"},
        {".metadata/workspace": b"x"},
        {MANIFEST: b'{"name": "a web page"}'},
        {MANIFEST: b'{"format_version": 99}', "model.bin": b"x"},
        {"chunks.bin": b"x", "index.json": b"{}"},
        {".metadata": b"text"},
        {".metadata": b"\x80x"},
        {".ckptman/mine": b"x", "values-00000.json": b"{}"},
        {".metadata": b"\x80x", "__0_0.distcp": b"x", "sub/notes": b"x"},
    ],
    ids=lambda files: " ".join(files),
)
def test_a_folder_of_somebody_elses_is_not_replaced(files, source, root):
    for name, data in files.items():
        path = root / STEP / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with pytest.raises(ExistsError, match="and is no checkpoint: move it away"):
        copy(source, root, overwrite=True)
    with pytest.raises(ExistsError, match="is no checkpoint, and is not replaced by one"):
        commit(root, 200)
    assert {name: (root / STEP / name).read_bytes() for name in files} == files


@pytest.mark.parametrize("lost", [MANIFEST, "__0_0.distcp", "index.json"])
def test_what_is_left_of_a_checkpoint_is_replaced(lost, source, root):
    copy(source, root)
    (root / STEP / lost).unlink()
    assert not copy(source, root, overwrite=True).already


def test_a_copy_that_is_refused_or_does_nothing_abandons_nothing_of_a_run_at_work(source, root):
    for step in (100, 200):
        copy(source, root, step)
    commit(source, 300)
    assert main(["rollback", str(source), "--to-step", "100"]) == 0
    commit(source, 150)
    with a_run_in(root):
        found = copy(source, root, 100)
        assert found.already
        assert "still counts in" in found.remarks[-1]
        with pytest.raises(BusyError, match="is being written to by another run"):
            copy(source, root, 150)
        assert sorted(steps_of(Catalog(root).complete())) == [100, 200]
    assert copy(source, root, 100).remarks == ()
    assert sorted(steps_of(Catalog(root).complete())) == [100]
    copy(source, root, 150)
    assert sorted(steps_of(Catalog(root).complete())) == [100, 150]


def test_a_rollback_goes_along_with_what_is_named_by_a_link(source, root, tmp_path):
    assert main(["rollback", str(source), "--to-step", "100"]) == 0
    (tmp_path / "best").symlink_to(source / STEP)
    assert main(["copy", "best", "root"]) == 0
    assert steps_of(Catalog(root).scan()) == []
    assert steps_of(Catalog(root).scan(abandoned=True)) == [200]


# ---- with --all ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "function", "name"),
    [
        *((file_reader, "open_regular", name) for name in ("__0_0.distcp", "blocks-00000.bin")),
        *((copy_source, "read_regular", name) for name in (MANIFEST, PINNED)),
    ],
)
def test_with_all_a_file_that_cannot_be_read_keeps_no_other_checkpoint(
    module, function, name, source, root, capsys, monkeypatch
):
    real = getattr(module, function)

    def closed(path, *arguments, **options):
        if (path.parent.name, path.name) == ("step-0000000100", name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))  # as of a read, which does not say of what
        return real(path, *arguments, **options)

    monkeypatch.setattr(module, function, closed)
    assert main(["copy", "source", "root", "--all"]) == 10
    assert "step 100: not copied: source/step-0000000100" in capsys.readouterr().out
    assert steps_of(Catalog(root).complete()) == [200]


def test_with_all_one_that_somebody_else_copies_keeps_no_other_one(source, root, capsys):
    with a_copy_of(source, 100, root):
        assert main(["copy", str(source), str(root), "--all"]) == 11
    told = capsys.readouterr()
    assert "step 100: not copied: another copy of the same checkpoint" in told.out
    assert "1 checkpoint not copied, the first of step 100" in told.err
    assert steps_of(Catalog(root).complete()) == [200]


def test_where_nothing_could_be_copied_nothing_is_said_to_be_there(source, root, capsys):
    for step in (100, 200):
        commit(root, step, metrics={"loss": 1.0})
    assert main(["copy", "source", "root", "--all"]) == 5
    assert "there already" not in capsys.readouterr().out


# ---- interrupts, and originals that go away --------------------------------------------------------------------------


def test_an_interrupt_is_not_held_back_by_a_limit(source, root):
    """The thread that copies would wait for hours; the interrupt comes to the one that waits for it."""

    class Interrupted(Limit):
        asked = itertools.count(1)

        def take(self, count, over):
            if next(self.asked) == 2:  # both threads have opened their files: an interrupt in open() would leave one
                os.kill(os.getpid(), signal.SIGINT)
            super().take(count, over)

    with pytest.raises(KeyboardInterrupt):
        copy(source, root, limit=Interrupted(1.0), threads=2)
    assert list(root.glob("*.tmp-copy-*")), "the next copy goes on there"


def test_a_mount_that_goes_away_is_no_original_that_is_gone(source, root, tmp_path):
    means = CopyOptions(meter=once("copying", lambda: source.rename(tmp_path / "away"), 0), threads=1)
    place, entry = LocalBackend(root), Catalog(source).entry(200)
    with pytest.raises(SourceError, match=r"No such file.*check the mount"):
        copy_checkpoint(entry, place, means)
    assert len(names(root)) == 1


def test_what_was_copied_by_hand_is_flushed_before_it_counts(source, root):
    class Watched(Disk):
        def __init__(self):
            self.flushed = set()

        def sync_file(self, fd):
            self.flushed.add(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115

        def sync_folder(self, path):
            self.flushed.add(str(path))

    disk, there = Watched(), root / STEP
    shutil.copytree(source / STEP, there)
    with on_disk(disk):
        assert copy(source, root).already
    assert note_in(there).every_byte
    wanted = {str(path) for path in (there, *there.iterdir()) if path.name not in (MANIFEST, "verified.json")}
    assert wanted <= disk.flushed
