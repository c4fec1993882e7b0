"""What another client of a file system deleted, and this one still finds by its old name: it is deleted, not damaged.

A prune at work on one client, and each kind of reader on another, which goes on resolving the names that it has looked
up. On a local disk nothing of this can happen.
"""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import ckptman
from ckptman.checkpointer import Checkpointer
from ckptman.cli.app import main
from ckptman.errors import CommitError, NotFoundError
from ckptman.storage.catalog import prune as prune_module
from ckptman.storage.catalog.pins import pin, read_pin
from ckptman.storage.catalog.prune import write_policy
from ckptman.storage.catalog.reader_lease import is_gone
from ckptman.storage.format.paths import MANIFEST, METADATA, step_folder
from ckptman.storage.io import safe_open
from tests.helpers.other_client import other_client

OLD, NEW = step_folder(1), step_folder(2)
STAGES = {
    "renamed": (),
    "without .metadata": (METADATA,),
    "without a manifest, too": (METADATA, MANIFEST),
    "empty": None,
}


def state_of(step):
    return {"model": {"weight": torch.full((50,), float(step))}, "step": step}


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "root"
    with Checkpointer(root, {"step": 0}):
        pass
    for step in (1, 2):
        ckptman.save(state_of(step), root / step_folder(step), step=step)
    return root


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """What is stale here stays so."""
    monkeypatch.setattr(safe_open, "STALE_TRIES", 2)
    monkeypatch.setattr(safe_open, "STALE_SECONDS", 0.01)


@pytest.fixture
def client(root, tmp_path):
    with other_client(root, tmp_path / "mount") as client:
        yield client


def look_at_all(folder):
    """Look up each name in a root, so that a client knows them."""
    for each in sorted(folder.rglob("*")):
        if each.is_file():
            each.read_bytes()


def prune(root, name, stage):
    """Take a checkpoint away as far as a prune of another client has come."""
    trash = root / f"{name}.trash-0a1b2c3d-0"
    (root / name).rename(trash)
    gone = STAGES[stage]
    for each in trash.iterdir() if gone is None else (trash / name for name in gone):
        each.unlink()


def load(path):
    state = state_of(0)
    ckptman.load(state, path)
    return state


def load_by_dcp(path):
    state = {"model": {"weight": torch.zeros(50)}}
    dcp.load(state, storage_reader=ckptman.StorageReader(path))
    return state


READERS = {
    "read": ckptman.read,
    "load": load,
    "verify": ckptman.verify,
    "diff": lambda path: ckptman.diff(path, path.parent / NEW),
    "pin": lambda path: ckptman.pin(path, "the best"),
    "export": lambda path: ckptman.export(path, path.parent.parent / "out", format="torch"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_what_was_deleted_is_not_found_and_never_read_or_called_damaged(root, client, stage):
    look_at_all(client.path)
    client.turn("stale")
    prune(root, OLD, stage)
    assert (client.path / OLD).is_dir(), "its name is still found"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, reader in READERS.items():
            with pytest.raises(NotFoundError, match="was deleted"):
                pytest.fail(f"{name} gave {reader(client.path / OLD)}")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("stage", list(STAGES)[1:])
def test_dcp_finds_that_it_was_deleted(root, client, stage):
    look_at_all(client.path)
    client.turn("stale")
    prune(root, OLD, stage)
    with pytest.raises(CheckpointException, match="was deleted"):
        load_by_dcp(client.path / OLD)


@pytest.mark.parametrize("stage", STAGES)
def test_verbs_say_that_it_was_deleted(root, client, stage, capsys, tmp_path):
    look_at_all(client.path)
    client.turn("stale")
    prune(root, OLD, stage)
    for verb in (["verify"], ["copy"], ["show"], ["diff", str(client.path / NEW)]):
        extra = [str(tmp_path / "copies")] if verb == ["copy"] else []
        assert main([verb[0], str(client.path / OLD), *verb[1:], *extra]) == 3, capsys.readouterr()
        said = capsys.readouterr()
        assert "deleted" in said.out + said.err
        assert "damaged" not in said.out + said.err


@pytest.mark.parametrize("stage", STAGES)
def test_of_a_root_the_next_one_is_read(root, client, stage):
    look_at_all(client.path)
    client.turn("stale")
    prune(root, NEW, stage)
    assert [reader(client.path)["step"] for reader in (ckptman.read, load)] == [1, 1]


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_goes_on_from_the_next_one(root, client, stage):
    """Somebody has deleted the newest, on another client, between the look of this one and its load."""
    look_at_all(client.path)
    state = state_of(0)
    with Checkpointer(client.path, state) as checkpointer, warnings.catch_warnings():
        warnings.simplefilter("error")
        client.turn("stale")
        prune(root, NEW, stage)
        assert checkpointer.restore() == 1
    assert state["step"] == 1


@pytest.mark.leaves("ckptman-owner")
def test_a_mount_that_goes_away_in_a_run_gets_nothing_below_it(root, client):
    run = client.path / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what else cannot be written, or looked at
        with Checkpointer(run, state_of(0), async_save=False) as checkpointer:
            checkpointer.restore()
            checkpointer.step(3)
            checkpointer.save(3)
            client.turn("unmounted")
            with pytest.raises(CommitError, match="is not on the file system that this run began on"):
                checkpointer.save(4)
    assert list(client.path.iterdir()) == []
    assert ckptman.read(root / "run")["step"] == 0


def test_what_another_client_replaces_is_looked_for_again(root, client, monkeypatch):
    """GlusterFS says ESTALE of a file for a second after another client has replaced it."""
    pin(root / NEW, "the best", by="me", time_seconds=1.0)
    look_at_all(client.path)
    client.turn("stale")
    pin(root / NEW, "better than that", by="me", time_seconds=2.0)

    def wait(seconds):
        client.turn("stale", False)

    monkeypatch.setattr(safe_open.time, "sleep", wait)
    assert read_pin(client.path / NEW).why == "better than that"


def test_rules_that_another_client_replaces_are_looked_for_again(tmp_path, monkeypatch):
    waits = []

    def wait(seconds):
        waits.append(seconds)
        write_policy(tmp_path, ckptman.KeepLast(3))

    monkeypatch.setattr(prune_module.time, "sleep", wait)
    (tmp_path / ".ckptman").mkdir()
    assert prune_module.read_policy(tmp_path) == ckptman.KeepLast(3)
    assert waits == [prune_module.AGAIN_SECONDS]


def test_a_step_that_is_being_saved_again_is_there(tmp_path):
    (tmp_path / OLD).mkdir()
    assert not is_gone(tmp_path / OLD)
    (tmp_path / OLD).rename(tmp_path / f"{OLD}.old-0a1b2c3d-0")
    assert not is_gone(tmp_path / OLD)
    (tmp_path / f"{OLD}.old-0a1b2c3d-0").rename(tmp_path / f"{OLD}.trash-0a1b2c3d-0")
    assert is_gone(tmp_path / OLD)
    assert not is_gone(tmp_path / "model"), "no prune takes what has no checkpoint's name"
    assert not is_gone(tmp_path / "not mounted" / OLD), "a mount that is away has lost nothing"
