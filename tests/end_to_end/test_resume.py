"""A run that goes on, on the same world size and on others, is bit for bit the run that never stopped.

And no run starts over what may be a checkpoint.
"""

import contextlib
import math
import os
from pathlib import Path

import pytest
import torch

import ckptman
from ckptman.cli.app import main
from ckptman.session import run_session as attempt
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.verified import read_verified
from ckptman.storage.format.manifest import read_manifest
from ckptman.storage.format.paths import MANIFEST, step_folder
from ckptman.storage.io.durable_files import PRIVATE_ENV
from tests.engine.dcp.test_values import save
from tests.helpers.apps import App
from tests.helpers.checkpoints import flip_byte
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("forked")


def train(root, mesh, until, every=3, async_save=True):
    app = App(mesh)
    losses = {}
    with ckptman.Checkpointer(
        root, app.state, save_policy=ckptman.EverySteps(every), async_save=async_save, deadline=None, timeout_seconds=30
    ) as checkpointer:
        start = checkpointer.restore()
        restored = app.digests()
        for step in range(start + 1, until + 1):
            losses[step] = app.train_step()
            checkpointer.step(step, {"loss": losses[step]})
        ended = app.digests()
    return {"start": start, "losses": losses, "restored": restored, "ended": ended}


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, mesh, async_save):
    world = math.prod(mesh)
    whole = run_ranks(world, train, str(tmp_path / "whole"), mesh, 8, 100, async_save)
    first = run_ranks(world, train, str(tmp_path / "parts"), mesh, 4, 3, async_save)
    second = run_ranks(world, train, str(tmp_path / "parts"), mesh, 8, 3, async_save)
    for rank in range(world):
        assert second[rank]["start"] == 4
        assert first[rank]["losses"] | second[rank]["losses"] == whole[rank]["losses"]
        assert second[rank]["ended"] == whole[rank]["ended"]
        assert second[rank]["restored"] == first[rank]["ended"]


@pytest.mark.slow
def test_world_sizes_4_2_1_3_4_restore_bit_for_bit(tmp_path):
    root, until, ended = str(tmp_path / "run"), 0, None
    for mesh in [(2, 2), (1, 2), (1,), (3,), (4,)]:
        world, until = math.prod(mesh), until + 2
        results = run_ranks(world, train, root, mesh, until)
        assert [each["start"] for each in results] == [until - 2] * world
        if ended is not None:
            assert all(each["restored"] == ended for each in results)
        assert all(each["ended"] == results[0]["ended"] for each in results)
        ended = results[0]["ended"]


def one_step(root, restore=None, step=1, **options):
    """A run that saves `step`; returns what it started from. `restore`: how it restores; None: it does not."""
    state = {"x": {"w": torch.full((3,), float(step))}}
    with ckptman.Checkpointer(root, state, deadline=None, **options) as run:
        start = run.restore(**restore) if restore is not None else None
        run.save(step)
    return start


def cut_short(root, step):
    file = root / step_folder(step) / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)


def newer(root, step):
    folder = root / step_folder(step)
    (folder / MANIFEST).write_bytes(read_manifest(folder).model_copy(update={"format_version": 2}).to_json())


@pytest.mark.filterwarnings("ignore:the checkpoint of step")
@pytest.mark.parametrize(
    ("damage", "error", "told"),
    [
        (cut_short, ckptman.CorruptError, "none of them is complete: step 1: .*Nothing is started over them"),
        (newer, ckptman.FormatVersionError, "format version 2"),
    ],
)
def test_a_run_with_a_path_starts_over_nothing_of_its_own(tmp_path, damage, error, told):
    root, base = tmp_path / "run", tmp_path / "base"
    ckptman.save({"x": {"w": torch.zeros(3)}}, base)
    path = {"path": base}
    assert one_step(root, path) == 0
    assert one_step(root, path, 2) == 1, "each attempt of a chain is given the same path"
    for step in (1, 2):
        damage(root, step)
    before = {each: each.read_bytes() for each in root.rglob("step-*/*")}
    for restore in (path, {}):
        with pytest.raises(error, match=told):
            one_step(root, restore, 2)
    with pytest.raises(ckptman.ConfigError, match=r"restore\(\) was not called"):
        one_step(root, None, 2)
    assert {each: each.read_bytes() for each in root.rglob("step-*/*")} == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("writer", ["dcp", "ckptman.save"])
def test_a_root_with_checkpoints_under_other_names_is_no_fresh_one(tmp_path, writer):
    save({"x": {"w": torch.ones(3)}}, tmp_path / "step-500", writer)
    with pytest.raises(ckptman.ConfigError, match=r"step-500 is a checkpoint itself .*restore\(path='.*step-500'\)"):
        one_step(tmp_path, {})
    assert one_step(tmp_path, {"path": tmp_path / "step-500"}) == 0
    assert one_step(tmp_path, {"path": tmp_path / "step-500"}, 2) == 1
    assert one_step(tmp_path, {}, 3) == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("writer", ["dcp", "ckptman.save"])
def test_a_root_that_is_a_checkpoint_itself_is_left_as_it_is(tmp_path, writer):
    save({"x": {"w": torch.ones(3)}}, tmp_path / "x", writer)
    before = sorted((tmp_path / "x").iterdir())
    for restore in ({}, {"path": tmp_path / "x"}, None):
        with pytest.raises(ckptman.ConfigError, match="but it is a checkpoint itself"):
            one_step(tmp_path / "x", restore)
    assert sorted((tmp_path / "x").iterdir()) == before


def test_a_root_of_logs_and_leftovers_is_a_fresh_one(tmp_path):
    one_step(tmp_path)
    (tmp_path / step_folder(1)).rename(tmp_path / step_folder(1, "trash", "deadbeef-1"))
    for name in ("logs/manifest.txt", "logs/deep/manifest.json", f"{step_folder(7, 'tmp', 'deadbeef')}/manifest.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (tmp_path / "run.log").touch()
    (tmp_path / "loop").symlink_to("loop")
    assert one_step(tmp_path, {}) == 0


@pytest.mark.parametrize("restore", [{}, {"step": 2}])
def test_a_checkpoint_that_is_refused_is_noted_as_damaged(tmp_path, restore):
    """Or retention would keep it as the newest that was verified, and delete good ones for it."""
    for step in (1, 2):
        one_step(tmp_path, {}, step)
    assert main(["verify", str(tmp_path), "--all"]) == 0
    flip_byte(tmp_path / step_folder(2) / "__0_0.distcp")
    with contextlib.ExitStack() as stack:
        if restore:
            stack.enter_context(pytest.raises(ckptman.CorruptError))
        else:
            stack.enter_context(pytest.warns(RuntimeWarning, match="skipping the checkpoint of step 2"))
        assert one_step(tmp_path, restore, 3, retention=ckptman.KeepLast(1)) == 1
    notes = [read_verified(entry.path, entry.require_manifest()) for entry in Catalog(tmp_path).complete()]
    assert [(note.every_byte, bool(note.damaged)) for note in notes if note] == [(True, False), (False, True)]


def test_a_wrong_setting_is_told_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setenv(PRIVATE_ENV, "yes")
    with pytest.raises(ckptman.ConfigError, match="CKPTMAN_PRIVATE is 'yes': set it to 1"):
        one_step(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_another_run_saved_until_the_root_was_ours_counts(tmp_path, monkeypatch):
    real = attempt._claim

    def late(root, *others):
        monkeypatch.setattr(attempt, "_claim", real)
        one_step(root)
        return real(root, *others)

    monkeypatch.setattr(attempt, "_claim", late)
    with pytest.raises(ckptman.ConfigError, match=r"restore\(\) was not called"):
        one_step(tmp_path)
    assert one_step(tmp_path, {"path": tmp_path / "nowhere"}, 2) == 1


@pytest.mark.slow
def test_the_default_device_of_a_script_is_of_no_consequence(tmp_path):
    """Scripts begin with torch.set_default_device("cuda"), and what ckptman makes for itself is on the CPU."""
    held = {"w": torch.arange(6.0), "n": torch.tensor(5)}
    root = tmp_path / "root"
    with torch.device("meta"):
        with ckptman.Checkpointer(root, {"x": held}, save_policy=ckptman.EverySteps(1), deadline=None) as checkpointer:
            for step in range(checkpointer.restore() + 1, 4):
                checkpointer.step(step, {"loss": 1.0})
                assert not checkpointer.should_stop()
        assert main(["verify", str(root), "--world-size", "1,2"]) == 0
        assert main(["diff", str(root / "step-0000000002"), str(root / "step-0000000003")]) == 0
        held["w"].zero_()
        with ckptman.Checkpointer(root, {"x": held}, deadline=None) as checkpointer:
            assert checkpointer.restore() == 3
    assert held["w"].equal(torch.arange(6.0))


@pytest.mark.parametrize("root", ["~/runs", "~"])
def test_no_folder_is_named_by_a_tilde_that_no_shell_expanded(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ckptman.ConfigError, match="write the path out"):
        ckptman.Checkpointer(root, {"x": {"w": torch.zeros(1)}}, deadline=None).restore()
    with pytest.raises(ckptman.ConfigError, match="write the path out"):
        ckptman.save({"w": torch.zeros(1)}, Path(root) / "step-0000000001")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ckptman.ConfigError, match="write the path out"):
        ckptman.Checkpointer("run", {"x": {"w": torch.zeros(1)}}, tiers=[ckptman.Tier(root)], deadline=None).restore()
    assert not list(tmp_path.glob("~*"))
