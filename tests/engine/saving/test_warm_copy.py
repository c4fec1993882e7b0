"""The newest checkpoint is kept in the page cache, where that can be and there is memory for it."""

import time
from unittest import mock

import pytest
import torch

import ckptman
from benchmarks.engine.cache import resident_share
from ckptman.engine.saving import warm_copy
from ckptman.engine.saving.staging import RESERVE_BYTES
from ckptman.engine.saving.warm_copy import why_not_kept
from ckptman.runtime.journal import read_journal
from ckptman.storage.format.paths import data_name
from ckptman.storage.io import writer_process
from ckptman.storage.io.mount import parse_mountinfo

COUNT = 1_000_000


def mounted(kind):
    mounts = parse_mountinfo(f"29 1 8:1 / / rw,relatime - {kind} somewhere rw")
    return mock.patch.object(warm_copy, "read_mounts", return_value=mounts)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "x").write_bytes(bytes(1000))
    return tmp_path / "x"


@pytest.fixture
def _spare(monkeypatch):
    monkeypatch.setattr(warm_copy, "spare_bytes", lambda: 1 << 40)


@pytest.mark.usefixtures("_spare")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("ext4", None),
        ("overlay", None),
        ("lustre", "it is on Lustre"),
        ("fuse.somefs", "it is on FUSE"),
        ("tmpfs", "it is in memory as it is"),
    ],
)
def test_only_file_systems_of_this_node_are_read_once_more(path, kind, reason):
    with mounted(kind):
        found = why_not_kept(path, 1, is_asked=True)
    assert found == reason or (reason is not None and found is not None and found.startswith(reason))


def test_memory_for_all_ranks_of_the_node_has_to_be_left(path, monkeypatch):
    monkeypatch.setattr(warm_copy, "spare_bytes", lambda: 2 * (1000 + RESERVE_BYTES))
    with mounted("ext4"):
        assert why_not_kept(path, 2, is_asked=True) is None
        assert "1.5 GiB of host memory" in (why_not_kept(path, 3, is_asked=True) or "")


def test_without_being_asked_it_takes_a_quarter_of_what_is_left(path, monkeypatch):
    enough = 4 * (1000 + RESERVE_BYTES)
    with mounted("ext4"):
        for left, is_kept in ((enough, True), (enough - 1, False)):
            monkeypatch.setattr(warm_copy, "spare_bytes", lambda left=left: left)
            assert (why_not_kept(path, 1, is_asked=False) is None) == is_kept
            assert why_not_kept(path, 1, is_asked=True) is None


@pytest.mark.usefixtures("_spare")
def test_without_being_asked_no_process_is_started_for_it(tmp_path):
    state = {"s": {"w": torch.rand(COUNT)}}
    with mounted("ext4"), ckptman.Checkpointer(tmp_path, state, async_save=False, deadline=None) as checkpointer:
        checkpointer.save(1)
        assert checkpointer._saver._writer._process._running is None


def test_nobody_is_told_why_what_they_did_not_ask_for_is_not_done(tmp_path, recwarn):
    with (
        ckptman.Checkpointer(tmp_path, {"s": {"w": torch.rand(COUNT)}}, deadline=None) as checkpointer,
        mounted("nfs4"),
    ):
        checkpointer.save(1)
        checkpointer.wait()
    assert [each for each in recwarn if "page cache" in str(each.message)] == []
    events, _ = read_journal(tmp_path / ".ckptman/journal.jsonl")
    assert "not_kept_warm" not in [each["event"] for each in events]


@pytest.mark.usefixtures("_spare")
@pytest.mark.parametrize(("async_save", "keep_warm"), [(True, True), (False, True), (True, None)])
def test_a_save_is_warm_soon_after_it_is_durable(tmp_path, async_save, keep_warm, monkeypatch):
    monkeypatch.setattr(writer_process, "LEAST_BYTES", 0)  # so that a process writes
    state = {"s": {"w": torch.rand(COUNT)}}
    with (
        mounted("ext4"),
        ckptman.Checkpointer(
            tmp_path, state, async_save=async_save, keep_warm=keep_warm, deadline=None
        ) as checkpointer,
    ):
        checkpointer.save(1)
        checkpointer.wait()
        (file,) = tmp_path.glob(f"step-*/{data_name(0)}")
        end = time.monotonic() + 240
        while resident_share(file) < 0.9:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.mark.usefixtures("_spare")
def test_it_can_be_switched_off(tmp_path):
    state = {"s": {"w": torch.rand(COUNT)}}
    with (
        ckptman.Checkpointer(tmp_path, state, keep_warm=False, deadline=None) as checkpointer,
        mock.patch.object(checkpointer._saver, "_keep_cached") as keep,
    ):
        checkpointer.save(1)
        checkpointer.wait()
    keep.assert_not_called()


def test_where_it_is_not_kept_a_warning_says_why_and_once(tmp_path):
    state = {"s": {"w": torch.rand(COUNT)}}
    with ckptman.Checkpointer(tmp_path, state, keep_warm=True, deadline=None) as checkpointer, mounted("nfs4"):
        with pytest.warns(RuntimeWarning, match="not kept in the page cache: it is on NFS"):
            checkpointer.save(1)
            checkpointer.wait()
        checkpointer.save(2)
        checkpointer.wait()
    events, _ = read_journal(tmp_path / ".ckptman/journal.jsonl")
    assert [each["step"] for each in events if each["event"] == "not_kept_warm"] == [1]
    assert [each["event"] for each in events].count("save_durable") == 2
