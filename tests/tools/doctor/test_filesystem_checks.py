"""The promises of a disk and its speed, one by one: what is broken is found, and told with its consequence."""

import errno
import fcntl
import os
import re
import time
from pathlib import Path

import pytest

from ckptman.storage.catalog import writer_lock as owner
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.isolated_process import run_isolated
from ckptman.tools.doctor import filesystem_checks, speed
from tests.helpers.faulty_disk import disk_whose
from tests.tools.doctor.test_second_client import elsewhere

SIZE = 8 * 1024 * 1024


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
        DISK.sync_file(fd)

    found = filesystem_checks.check_sync(tmp_path, disk_whose("sync_file", sync))
    assert found.verdict == verdict
    assert value in found.value
    assert advice in found.advice


def test_an_fsync_that_takes_long_is_slow(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem_checks, "SLOW_SYNC_SECONDS", 0.01)
    slow = disk_whose("sync_file", lambda fd: time.sleep(0.02))
    assert filesystem_checks.check_sync(tmp_path, slow, seconds=0.0).verdict == "slow"


def test_bytes_that_are_not_those_that_were_written_are_found(tmp_path):
    lossy = disk_whose("sync_file", lambda fd: os.pwrite(fd, b"\0" * 64, 0))
    found = filesystem_checks.check_sync(tmp_path, lossy)
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
    found = run_isolated(lambda: filesystem_checks.check_claim(tmp_path, disk_whose("create_file", create)), 30)
    assert (found.verdict, found.value, found.advice) == ("FAILED", value, advice)


def test_a_root_that_two_processes_own_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "process_lives", lambda of: False)
    found = run_isolated(lambda: filesystem_checks.check_claim(tmp_path), 30)
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
    found = run_isolated(lambda: filesystem_checks.check_locks(tmp_path), 30)
    assert found.verdict == verdict
    assert value in found.value


def test_a_lock_that_is_given_back_late_holds(tmp_path, monkeypatch):
    def late(kind, fd, lock=filesystem_checks.lock):
        tried = Path(f"/proc/self/fd/{fd}").readlink().with_name(f"tried-{kind}")
        tried.touch()
        with tried.open("ab") as file:
            file.write(b".")
        if 1 < tried.stat().st_size < 4:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        lock(kind, fd)

    monkeypatch.setattr(filesystem_checks, "lock", late)
    assert run_isolated(lambda: filesystem_checks.check_locks(tmp_path), 30).verdict == "ok"


def test_locks_that_hold_on_each_host_alone_are_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem_checks, "lock", _granted)
    found = run_isolated(lambda: filesystem_checks.check_locks(tmp_path, elsewhere(monkeypatch)), 30)
    value = "two clients hold the same flock lock; two clients hold the same fcntl lock"
    assert (found.verdict, found.value) == ("warning", value)


def test_a_client_that_refuses_what_is_there_with_another_reason_is_told(tmp_path, monkeypatch):
    def create(path, data):
        try:
            DISK.create_file(path, data)
        except FileExistsError:
            raise PermissionError(errno.EPERM, "Operation not permitted") from None

    def check(disk):
        return run_isolated(lambda: filesystem_checks.check_claim(tmp_path, disk, elsewhere(monkeypatch)), 30)

    found = check(disk_whose("create_file", lambda *_: create(*_)))
    assert found.verdict == "warning"
    assert found.value.endswith("made by one of two clients; the other one was refused with: Operation not permitted")


def granularity(folder):
    """What the times of files there may be off by: some file systems have whole seconds."""
    path = folder / "asked"
    path.touch()
    os.utime(path, ns=(500_000_000, 500_000_000))
    return 0.0 if path.stat().st_mtime_ns == 500_000_000 else 1.0


@pytest.mark.parametrize(("shift", "told"), [(-99.5, "s ahead of"), (3600.0, "s behind"), (1.0, "within")])
def test_a_clock_that_is_off_is_told(shift, told, tmp_path, monkeypatch):
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + shift)
    found = filesystem_checks.check_clock(tmp_path)
    monkeypatch.undo()
    assert found.verdict == ("ok" if told == "within" else "warning")
    assert told in found.value
    if told != "within":
        seconds = float(re.search(r"[\d,]+(\.\d+)?", found.value)[0].replace(",", ""))
        assert seconds == pytest.approx(abs(shift), abs=0.5 + granularity(tmp_path))


def refusing_direct(number):
    def write_at(fd, data, offset):
        if os.O_DIRECT & fcntl.fcntl(fd, fcntl.F_GETFL):
            raise OSError(number, os.strerror(number))
        return os.pwrite(fd, data, offset)

    return disk_whose("write_at", write_at)


def test_direct_io_that_is_refused_is_slow_and_other_errors_fail(tmp_path):
    found = filesystem_checks.check_direct(tmp_path, refusing_direct(errno.EINVAL))
    assert (found.verdict, "Invalid argument" in found.value) == ("slow", True)
    with pytest.raises(OSError, match="Input/output"):
        filesystem_checks.check_direct(tmp_path, refusing_direct(errno.EIO))


def test_room_that_is_not_taken_is_told(tmp_path):
    found = filesystem_checks.check_reserve(tmp_path, SIZE, disk_whose("reserve", lambda fd, size: None))
    assert found.verdict == "warning"
    assert "a full disk or quota shows only while a save is being written" in found.advice
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_links_is_fine(tmp_path, monkeypatch):
    def refuse(self, target):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    found = filesystem_checks.check_links(tmp_path)
    assert (found.verdict, found.value) == ("ok", "symbolic links are refused: Operation not permitted")


def test_a_slow_disk_ends_the_test_of_its_speed(tmp_path):
    def write_at(fd, data, offset):
        time.sleep(0.1)
        return os.pwrite(fd, data, offset)

    found = speed.check_write(tmp_path, 64 * 1024 * 1024, 0.15, disk_whose("write_at", write_at))
    assert found.verdict == "slow"
    assert "stopped after" in found.value
    assert "less than a project folder on NFS gives one process" in found.advice
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 64 * 1024 * 1024
    assert speed.check_read(tmp_path, 64 * 1024 * 1024, 5).figures["bytes_per_second"] > 0


def test_where_direct_io_is_refused_it_goes_through_the_cache(tmp_path):
    found = speed.check_write(tmp_path, SIZE, 10, refusing_direct(errno.EINVAL))
    assert found.figures["direct"] is False
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == SIZE
