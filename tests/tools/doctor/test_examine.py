"""The checks of a mount together: all pass on disks that work; and whatever the trouble, nothing is left behind."""

import errno
import os
import signal
import socket
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

import ckptman.storage.io.file_writer  # noqa: F401 so that no check imports NumPy in a process of its own
from ckptman.errors import BusyError
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.mount import parse_mountinfo
from ckptman.tools.doctor import examine as checks
from ckptman.tools.doctor import mount_checks, second_client, speed
from ckptman.tools.doctor.examine import bill, examine
from ckptman.tools.doctor.finding import Finding
from tests.storage.io.test_mount import Commands
from tests.tools.doctor.places import SIZE

ALL = [check.name for check in checks.CHECKS]
CORE = [("make_folder", "writable"), ("rename", "rename"), ("sync_file", "fsync"), ("create_file", "claim")]
"""Operations of a disk, and the check that meets each first. Saves rely on these checks."""


@pytest.fixture
def folder(tmp_path):
    """A directory in use: its content must be left alone."""
    (tmp_path / "step-0000000001").mkdir()
    (tmp_path / "step-0000000001" / "manifest.json").write_text("in use")
    yield tmp_path
    assert [each.name for each in tmp_path.iterdir()] == ["step-0000000001"], "something was left behind"
    assert (tmp_path / "step-0000000001" / "manifest.json").read_text() == "in use"


@pytest.fixture(autouse=True)
def quickly_and_without_commands(monkeypatch):
    monkeypatch.setattr(checks, "REPEAT_SECONDS", 0.05)
    monkeypatch.setattr(mount_checks, "run_command", lambda command, timeout_seconds: Commands({})(command))


def mounted(monkeypatch, line):
    """Have the kernel show one mount."""
    monkeypatch.setattr(checks, "read_mounts", lambda: parse_mountinfo(line))


def checked_by(monkeypatch, name, run):
    """Have another function be a check."""
    changed = [replace(check, run=run) if check.name == name else check for check in checks.CHECKS]
    monkeypatch.setattr(checks, "CHECKS", changed)


def quick(folder, **more):
    """Examine a directory; return the findings by name."""
    found = examine(folder, size_bytes=SIZE, **{"timeout_seconds": 20.0, **more})
    return {each.name: each for each in found}


def failed(found):
    return [name for name, each in found.items() if each.verdict == "FAILED"]


def hang(*_):
    time.sleep(600)


def refusing(number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    return refuse


def test_everything_passes_on_a_disk_that_works(folder):
    noted = []
    found = quick(folder, note=noted.append, against_bytes=10**6)
    assert noted == ALL
    assert (list(found), failed(found)) == ([*ALL, "save", "load", "interval"], [])
    good = {"rename", "replace", "fsync", "claim", "locks", "writable"}
    assert {name for name in good if found[name].verdict not in ("ok", "slow")} == set()
    assert (found["rename"].figures["renames"] >= 9, found["replace"].figures["replaced"] >= 3) == (True, True)
    assert found["write"].figures["bytes_per_second"] > 0
    assert found["read"].figures["bytes_per_second_4"] > 0
    assert found["small files"].figures["create_per_second"] > 0
    assert (found["save"].verdict, found["load"].verdict) == ("warning", "warning")
    assert "rough: measured on 8.39 MB)" in found["save"].value


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_a_file_system_in_memory_is_never_read_cold():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        found = quick(Path(folder))
        assert list(Path(folder).iterdir()) == []
    assert (list(found), failed(found)) == (ALL, [])
    assert "(from memory" in found["read"].value
    assert found["file system"].verdict == "warning"


def test_no_more_is_written_than_was_said(tmp_path):
    inside, noted = tmp_path / "inside", tmp_path / "noted"
    inside.mkdir()

    def sync(fd):
        """Note how many bytes the directory holds."""
        os.fsync(fd)
        own = Path(f"/proc/self/fd/{fd}").readlink()
        held = sum(path.stat().st_size for path in (own if own.is_dir() else own.parent).glob("*") if path.is_file())
        with noted.open("a") as file:
            file.write(f"{held}\n")

    with patch.object(DISK, "sync_file", sync):
        found = quick(inside)
    most = max(map(int, noted.read_text().split()))
    assert SIZE <= most < SIZE * 1.1, "small files of other checks are beside it"
    assert found["write"].figures["test_bytes"] == SIZE


@pytest.mark.parametrize(
    ("free", "quotas", "most"),
    [
        (100 * 2**20, [], 5 * 2**20),
        (100 * 2**20, [{"left_bytes": 2**20}, {"left_bytes": None}], int(2**20 * 0.05) // 4096 * 4096),
        (None, [{"left_bytes": 2**30}], 0),
    ],
)
def test_never_more_than_a_twentieth_of_what_is_free_or_left_of_a_quota(free, quotas, most):
    space = Finding("space", "ok", "", figures={} if free is None else {"free_bytes": free})
    assert speed.most_bytes({"space": space, "quota": Finding("quota", "ok", "", figures={"quotas": quotas})}) == most


def test_without_room_nothing_is_measured(tmp_path, monkeypatch):
    space = os.statvfs_result((1, 1, 10**10, 10**7, 10**7, 10, 5, 5, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    found = quick(tmp_path)
    assert (found["write"].verdict, found["read"].verdict) == ("unknown", "unknown")
    assert "not measured: 5 % of what is known to be free is less than 1.05 MB" in found["write"].value


def costs(write, read=1e9, other=(), doubts=()):
    """The bill of a checkpoint at these rates."""
    rates = {"write": {"bytes_per_second": write, "doubts": doubts}, "read": {"bytes_per_second": read}}
    found = {name: Finding(name, "ok", "", figures=figures) for name, figures in {**dict(other), **rates}.items()}
    return lambda size: bill(found, size)


@pytest.mark.parametrize(
    ("write", "save", "interval", "verdict", "advice"),
    [
        (2e9, "70 GB in 35 s", "at least 700 s where saves block training, for 5 % of the time; 35 s where", "ok", ""),
        (0.5e9, "70 GB in 140 s", "at least 2,800 s", "slow", "a run should save every 15 min: save in the background"),
        (0.05e9, "70 GB in 1,400 s", "at least 28,000 s", "slow", "one save takes longer than that"),
    ],
)
def test_what_a_checkpoint_costs(write, save, interval, verdict, advice):
    rows = {each.name: each for each in costs(write)(70 * 10**9)}
    assert (rows["save"].value, rows["load"].value) == (save, "70 GB in 70 s")
    assert rows["interval"].value.startswith(interval)
    assert rows["interval"].verdict == verdict
    assert advice in rows["interval"].advice
    assert costs(write)(None) == bill({"write": Finding("write", "unknown", "")}, 70) == []


def test_a_save_takes_at_least_as_long_as_its_files_and_directories():
    files = {"create_per_second": 100.0, "stat_per_second": 600.0}
    sync = {"file_seconds": 0.003, "folder_seconds": 0.002}
    save, load, interval = costs(2e9, other={"small files": files, "fsync": sync})(70)
    assert save.figures["seconds"] == pytest.approx(6 * 0.01 + 2 * 0.002)
    assert (save.value, load.value) == ("70 B in 0.064 s", "70 B in 0.01 s")
    assert interval.value.startswith("at least 1.28 s where saves block training")
    refused = {"file_seconds": 0.05, "folder_seconds": None}
    assert costs(2e9, other={"small files": files, "fsync": refused})(70)[0].value == "70 B in 0.3 s"
    assert costs(1e9)(70)[0].value == "70 B in less than 0.001 s"
    assert costs(1e6, doubts=["stopped after 9 MB"])(10**6)[0].value == "1 MB in 1 s (stopped after 9 MB)"


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "name"), CORE)
def test_a_disk_that_hangs_is_left_alone(operation, name, folder):
    with patch.object(DISK, operation, hang):
        found = quick(folder, timeout_seconds=1.0)
    assert failed(found) == [name]
    assert "see that" in found["clean-up"].advice
    assert found[name].value == "does not answer within 1 s"
    if operation == "make_folder":
        assert list(found) == ["file system", "space", "quota", "writable", "clean-up"]
    else:
        after = [found[each] for each in ALL[ALL.index(name) + 1 :]]
        assert {each.value for each in after} == {"not tried: the file system does not answer any more"}
        assert {each.verdict for each in after} == {"unknown"}


def test_a_directory_that_cannot_even_be_looked_at_does_not_answer(folder, monkeypatch):
    monkeypatch.setattr(os.path, "realpath", hang)
    mounted(monkeypatch, "50 1 0:1 / / rw - lustre x:/y rw")
    monkeypatch.setattr(mount_checks, "run_command", None)  # it would hang, too
    found = quick(folder, timeout_seconds=0.3)
    assert (list(found), failed(found)) == (["file system", "answer"], ["answer"])
    assert found["answer"].value == f"{folder} does not answer within 0.3 s"


@pytest.mark.slow
def test_a_directory_that_cannot_be_removed_is_named(tmp_path):
    with patch.object(DISK, "remove_tree", hang):
        found = quick(tmp_path, timeout_seconds=1.0)
    (left,) = tmp_path.iterdir()
    assert (found["clean-up"].verdict, found["clean-up"].advice) == ("FAILED", f"see that {left} is gone")


@pytest.mark.parametrize(("operation", "name"), [*CORE, ("reserve", "reserve")])
def test_a_check_that_is_killed_fails_if_saves_rely_on_it_and_the_others_go_on(operation, name, folder):
    with patch.object(DISK, operation, lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
        found = quick(folder)
    assert "killed by SIGKILL" in found[name].value
    assert list(found) == (ALL if name != "writable" else ALL[:4])
    if name == "reserve":
        assert found[name].verdict == "unknown"
    else:
        assert (found[name].verdict, found[name].advice) == ("FAILED", "it was not found out: run doctor again")


def test_errors_of_a_check_are_findings_and_the_others_go_on(folder, monkeypatch):
    def owned(place):
        raise BusyError("root", "elsewhere", 7, None)

    def go_wrong(place):
        raise OverflowError("too large")

    checked_by(monkeypatch, "claim", owned)
    checked_by(monkeypatch, "locks", go_wrong)
    found = quick(folder)
    assert (list(found), failed(found)) == (ALL, ["claim"])
    assert found["claim"].advice == "two runs could write to one root"
    assert "being written to by another run" in found["claim"].value
    assert (found["locks"].verdict, found["locks"].value) == ("unknown", "OverflowError: too large")


@pytest.mark.parametrize(
    ("operation", "number", "name", "advice"),
    [
        ("make_folder", errno.ENOSPC, "space", "the disk is full: nothing can be saved"),
        ("write_at", errno.ENOSPC, "space", "the disk is full: nothing can be saved"),
        ("create_file", errno.EDQUOT, "quota", "the quota is used up: nothing can be saved"),
    ],
)
def test_a_full_disk_or_quota_is_told_at_its_row_and_nothing_more_is_tried(operation, number, name, advice, folder):
    with patch.object(DISK, operation, refusing(number)):
        found = quick(folder)
    assert failed(found) == [name]
    assert (os.strerror(number) in found[name].value, found[name].advice) == (True, advice)
    assert "free_bytes" in found["space"].figures
    (at,) = [each for each in found if found[each].value == "not tried to its end: there is no room"]
    after = {found[each].value for each in list(found)[list(found).index(at) + 1 :]}
    assert after == ({"not tried: there is no room"} if operation != "make_folder" else set())


def test_on_a_read_only_disk_there_is_nothing_to_clean_up(folder):
    refuse = refusing(errno.EROFS)
    with patch.multiple(DISK, make_folder=refuse, remove_tree=refuse):
        found = quick(folder)
    assert (list(found), failed(found)) == (["file system", "space", "quota", "writable"], ["writable"])
    assert found["writable"].value == "Read-only file system"
    assert found["writable"].advice == "read-only: nothing can be saved"


def test_between_two_clients_is_measured_what_is_between_them(folder, monkeypatch):
    monkeypatch.setattr(second_client, "_this_client", lambda folder: "another one")
    found = quick(folder, second_command=("env",), timeout_seconds=60.0)
    host = socket.gethostname()
    assert failed(found) == []
    assert found["other clients"].value.startswith(f"{host} sees a new file after ")
    assert f"seen by {host} after " in found["rename"].value
    assert f"seen by {host} after " in found["replace"].value
    assert found["claim"].value == "one owner at a time; 10 files each made by one of two clients"
    assert found["locks"].value == f"flock and fcntl hold between this host and {host}"


def test_the_directory_of_a_killed_doctor_is_told(tmp_path):
    left = tmp_path / ".ckptman-doctor-0123abcd"
    left.mkdir()
    found = quick(tmp_path)["writable"]
    assert (found.verdict, left.name in found.value) == ("warning", True)
    assert left.is_dir(), "it may be at work right now"
