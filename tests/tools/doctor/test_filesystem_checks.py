"""The promises of a disk and its speed, one by one: what is broken is found, and told with its consequence."""

import errno
import fcntl
import os
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from ckptman.storage.catalog import liveness
from ckptman.storage.io.durable_files import DISK, Disk
from ckptman.storage.io.mount import parse_mountinfo
from ckptman.tools.doctor import filesystem_checks, speed
from tests.tools.doctor.places import SIZE, isolated, place_at
from tests.tools.doctor.test_second_client import elsewhere

UNSAFE = parse_mountinfo("50 1 0:1 / / rw - overlay overlay rw,volatile")[0]


@pytest.mark.parametrize(
    ("number", "of_folders", "verdict", "value", "advice"),
    [
        (errno.EIO, False, "FAILED", "fails on a file: Input/output error", "nothing that is saved here"),
        (errno.EIO, True, "FAILED", "fails on a folder: Input/output error", "may take back the name"),
        (errno.EINVAL, True, "warning", "refused on folders: Invalid argument", "may take back the newest"),
    ],
)
def test_an_fsync_that_fails_is_found(number, of_folders, verdict, value, advice, tmp_path):
    def sync(fd):
        if of_folders == Path(f"/proc/self/fd/{fd}").is_dir():
            raise OSError(number, os.strerror(number))
        os.fsync(fd)

    with patch.object(DISK, "sync_file", sync):
        found = filesystem_checks.check_sync(place_at(tmp_path))
    assert found.verdict == verdict
    assert value in found.value
    assert advice in found.advice


def test_an_fsync_that_takes_long_is_slow(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem_checks, "SLOW_SYNC_SECONDS", 0.01)
    with patch.object(DISK, "sync_file", lambda fd: time.sleep(0.02)):
        assert filesystem_checks.check_sync(place_at(tmp_path, repeat_seconds=0.0)).verdict == "slow"


def test_a_mount_that_takes_fsync_away_is_a_warning(tmp_path):
    found = filesystem_checks.check_sync(place_at(tmp_path, mount=UNSAFE))
    assert (found.verdict, "fsync does nothing" in found.advice) == ("warning", True)


def test_bytes_that_are_not_those_that_were_written_are_found(tmp_path):
    with patch.object(DISK, "sync_file", lambda fd: os.pwrite(fd, b"\0" * 64, 0)):
        found = filesystem_checks.check_sync(place_at(tmp_path))
    assert (found.verdict, found.value) == ("FAILED", "what was written is not what is read")


def _refuse(path, data):
    raise FileExistsError(errno.EEXIST, "File exists", str(path))


@pytest.mark.parametrize(
    ("create", "value", "advice"),
    [
        (
            *(DISK.write_file, "two processes made the same file, each as the only one, 10 times of 10"),
            "two runs could write to one root, and rename and prune each other's checkpoints",
        ),
        (
            *(_refuse, "of two processes none could make a file that was not there, 10 times"),
            "no run could claim its root",
        ),
    ],
    ids=["both", "none"],
)
def test_files_that_two_processes_make_at_once_or_nobody_can_make_are_found(create, value, advice, tmp_path):
    with patch.object(DISK, "create_file", create):
        found = isolated(filesystem_checks.check_claim, tmp_path)
    assert (found.verdict, found.value, found.advice) == ("FAILED", value, advice)


def test_a_root_that_two_processes_own_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(liveness, "process_lives", lambda of: False)
    found = isolated(filesystem_checks.check_claim, tmp_path)
    assert (found.verdict, found.value) == ("FAILED", "a root that the other process owns was given to this one")


def _granted(kind, fd):
    pass


def _refused(kind, fd):
    raise OSError(errno.ENOSYS, "Function not implemented")


def _posix_only(kind, fd, lock=filesystem_checks.lock):
    (_refused if kind == "flock" else lock)(kind, fd)


def _kept(kind, fd):
    taken = Path(f"/proc/self/fd/{fd}").readlink().with_name(f"taken-{kind}")
    if taken.exists():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    taken.touch()


@pytest.mark.parametrize(
    ("take", "verdict", "value"),
    [
        (_granted, "FAILED", "two processes hold the same flock lock; two processes hold the same fcntl lock"),
        (_kept, "FAILED", "a flock lock is never given back; a fcntl lock is never given back"),
        (_refused, "warning", "refused: flock (Function not implemented), fcntl (Function not implemented)"),
        (_posix_only, "warning", "fcntl works; refused: flock (Function not implemented)"),
    ],
)
def test_locks_that_do_not_hold_are_found(take, verdict, value, tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem_checks, "lock", take)
    monkeypatch.setattr(filesystem_checks, "_GIVEN_BACK_SECONDS", 0.1)
    found = isolated(filesystem_checks.check_locks, tmp_path)
    assert found.verdict == verdict
    assert value in found.value


def test_locks_that_hold_on_each_host_alone_are_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem_checks, "lock", _granted)
    found = isolated(filesystem_checks.check_locks, tmp_path, second=elsewhere(monkeypatch))
    value = "two clients hold the same flock lock; two clients hold the same fcntl lock"
    assert (found.verdict, found.value) == ("warning", value)


def test_a_client_that_refuses_what_is_there_with_another_reason_is_told(tmp_path, monkeypatch):
    def create(path, data):
        try:
            Disk.create_file(DISK, path, data)
        except FileExistsError:
            raise PermissionError(errno.EPERM, "Operation not permitted") from None

    with patch.object(DISK, "create_file", create):
        found = isolated(filesystem_checks.check_claim, tmp_path, second=elsewhere(monkeypatch))
    assert found.verdict == "warning"
    assert found.value.endswith("made by one of two clients; the other one was refused with: Operation not permitted")


def refusing_direct(number):
    def write_at(fd, data, offset):
        if os.O_DIRECT & fcntl.fcntl(fd, fcntl.F_GETFL):
            raise OSError(number, os.strerror(number))
        return os.pwrite(fd, data, offset)

    return patch.object(DISK, "write_at", write_at)


def test_direct_io_that_is_refused_is_slow_and_other_errors_fail(tmp_path):
    with refusing_direct(errno.EINVAL):
        found = filesystem_checks.check_direct(place_at(tmp_path))
    assert (found.verdict, "Invalid argument" in found.value) == ("slow", True)
    with refusing_direct(errno.EIO), pytest.raises(OSError, match="Input/output"):
        filesystem_checks.check_direct(place_at(tmp_path))


def test_room_that_is_not_taken_is_told(tmp_path):
    with patch.object(DISK, "reserve", lambda fd, size: None):
        found = filesystem_checks.check_reserve(place_at(tmp_path))
    assert found.verdict == "warning"
    assert "a full disk or quota shows only while a save is being written" in found.advice
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_ends_the_test_of_its_speed(tmp_path):
    def write_at(fd, data, offset):
        time.sleep(0.1)
        return os.pwrite(fd, data, offset)

    place = place_at(tmp_path, size_bytes=64 * 1024 * 1024, part_seconds=0.15)
    with patch.object(DISK, "write_at", write_at):
        found = place.found["write"] = speed.check_write(place)
    assert found.verdict == "slow"
    assert "stopped after" in found.value
    assert "less than a project folder on NFS gives one process" in found.advice
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 64 * 1024 * 1024
    assert speed.check_read(place).figures["bytes_per_second"] > 0


def test_where_direct_io_is_refused_it_goes_through_the_cache(tmp_path):
    with refusing_direct(errno.EINVAL):
        found = speed.check_write(place_at(tmp_path))
    assert found.figures["direct"] is False
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == SIZE
