"""A copy whose name is taken when it is about to be published: whoever was first stays, and nothing is mixed."""

import shutil
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest

from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.catalog import Catalog
from ckptman.catalog.tiers import open_tier, write_tiers
from ckptman.cli.app import main
from ckptman.errors import ExistsError, RootError
from ckptman.format.paths import DOT, MANIFEST
from ckptman.io.durable_files import Disk
from ckptman.policies.tiers import Tier
from ckptman.transfer.copy import CopyOptions, copy_checkpoint
from ckptman.transfer.drain import carry_out, plan_drain
from tests.helpers.checkpoints import commit
from tests.helpers.faulty_disk import holds

NAME = "step-0000000200"


@pytest.fixture
def source(tmp_path):
    commit(tmp_path / "source", 200, rows=3000)
    return tmp_path / "source"


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
        if self._after and target.name == NAME:
            self._now()
        super().rename(source, target)

    def _now(self):
        if (what := self._what) is not None:
            self._what = None
            what()


def copy(source, root, disk=None, *, overwrite=False):
    disk = disk or Disk()
    means = CopyOptions(threads=1, overwrite=overwrite)
    return copy_checkpoint(Catalog(source).entry(200), LocalBackend(root, disk), means)


def assert_tidy(root, *kept):
    """Nothing is there but this, or what a prune of leftovers clears."""
    left = {path.name for path in root.iterdir()} - {DOT, *kept}
    assert {name.partition(".")[0] for name in left} <= {NAME}
    assert main(["prune", str(root), "--leftovers"]) == 0
    assert {path.name for path in root.iterdir()} - {DOT} == set(kept)


at_any_time = pytest.mark.parametrize("after", [False, True], ids=["before the look", "after the look"])


@at_any_time
def test_another_checkpoint_that_was_there_first_stays(after, source, tmp_path):
    root = tmp_path / "root"
    with pytest.raises(ExistsError, match=f"{NAME} came to be there meanwhile, and is another.*--overwrite") as told:
        copy(source, root, Late(lambda: commit(root, 200), after=after))
    assert told.value.exit_code == 5
    first = holds(root)
    assert list(first) == [200]
    assert first != holds(source)
    with pytest.raises(ExistsError):
        copy(source, root)
    assert holds(root) == first
    assert_tidy(root, NAME)
    copy(source, root, overwrite=True)
    assert holds(root) == holds(source)
    assert_tidy(root, NAME)


@at_any_time
def test_where_it_is_the_same_checkpoint_the_next_copy_has_nothing_to_do(after, source, tmp_path):
    root = tmp_path / "root"
    with pytest.raises(ExistsError):
        copy(source, root, Late(lambda: shutil.copytree(source / NAME, root / NAME), after=after))
    assert holds(root) == holds(source)
    assert copy(source, root).already
    assert_tidy(root, NAME)


@pytest.mark.parametrize("kind", ["empty", "file", "link"])
@at_any_time
def test_what_is_no_checkpoint_is_not_replaced_either(after, kind, source, tmp_path):
    root, final = tmp_path / "root", tmp_path / "root" / NAME
    make = {
        "empty": lambda: (final.mkdir(), (final / "mine").touch()),
        "file": lambda: final.write_text("mine"),
        "link": lambda: final.symlink_to(tmp_path),
    }[kind]
    with pytest.raises((ExistsError, RootError)):
        copy(source, root, Late(make, after=after))
    assert not (final / MANIFEST).exists()
    assert final.is_symlink() == (kind == "link")
    assert final.is_file() == (kind == "file")
    assert_tidy(root, NAME)


def test_what_may_be_replaced_is_by_the_next_copy_at_the_latest(source, tmp_path):
    root = tmp_path / "root"
    with pytest.raises(RootError, match=f"{NAME}.*copy again"):
        copy(source, root, Late(lambda: commit(root, 200), after=True), overwrite=True)
    assert list(holds(root)) == [200]
    assert copy(source, root, overwrite=True).written_bytes == 0
    assert holds(root) == holds(source)
    assert_tidy(root, NAME)


def test_a_drain_says_so_and_fills_up_the_rest(source, tmp_path):
    far = tmp_path / "far"
    commit(source, 100)
    commit(source, 300)
    write_tiers(source, [Tier(far)])

    @contextmanager
    def means(task):
        yield CopyOptions()

    def late(tier):
        return open_tier(tier, Late(lambda: commit(far, 200, sequence=9), after=True))

    def drained():
        with mock.patch("ckptman.transfer.drain.open_tier", late):
            return {each.task.entry.step: each for each in carry_out(source, plan_drain(source, [Tier(far)]), means)}

    done = drained()
    assert {step for step, each in done.items() if each.copied is not None} == {100, 300}
    assert done[200].error is not None
    first = holds(far)
    assert first == {**holds(source), 200: first[200]}
    assert first[200] != holds(source)[200]
    (again,) = drained().values()
    assert isinstance(again.error, ExistsError)
    assert holds(far) == first
    assert_tidy(far, *(f"step-{step:010d}" for step in (100, 200, 300)))


def test_what_a_tier_got_while_a_drain_was_planned_is_not_replaced(source, tmp_path):
    far = tmp_path / "far"
    write_tiers(source, [Tier(far)])
    plan = plan_drain(source, [Tier(far)])
    commit(far, 200, metrics={"loss": 1.0})
    before = holds(far)
    (drained,) = carry_out(source, plan, lambda task: nullcontext(CopyOptions(threads=1)))
    assert isinstance(drained.error, ExistsError)
    assert holds(far) == before
