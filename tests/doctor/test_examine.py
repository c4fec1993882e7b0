"""The checks of a mount together: all pass on disks that work; and whatever the trouble, nothing is left behind."""

import errno
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ckptman.doctor import examine as checks
from ckptman.doctor import filesystem_checks, mount, renames
from ckptman.doctor.examine import LEAST_BYTES, bill, examine
from ckptman.doctor.finding import Finding
from ckptman.errors import BusyError, NotFoundError, RootError
from ckptman.io.durable_files import DISK, Disk
from ckptman.runtime.deadline import run_command
from tests.doctor.test_mount import LFS, TABLE, Commands
from tests.helpers import unprivileged

SIZE = 8 * 1024 * 1024
PROMISES = ["rename", "fsync", "claim", "locks", "clock", "direct I/O", "reserve", "links"]
SPEEDS = ["small files", "write", "read"]
ALL = ["file system", "space", "quota", "writable", *PROMISES, *SPEEDS]


@pytest.fixture(params=["disk", "memory"])
def folder(request, tmp_path):
    """A folder on the disk of the tests, and one in memory. What is in it must be left alone."""
    if request.param == "disk":
        path = tmp_path
    elif os.access("/dev/shm", os.W_OK):
        path = Path("/dev/shm") / f"ckptman-test-{os.getpid()}"
        path.mkdir()
    else:
        pytest.skip("no /dev/shm")
    (path / "step-0000000001").mkdir()
    (path / "step-0000000001" / "manifest.json").write_text("in use")
    yield path
    assert [each.name for each in path.iterdir()] == ["step-0000000001"], "something was left behind"
    assert (path / "step-0000000001" / "manifest.json").read_text() == "in use"
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def quickly_and_without_commands(monkeypatch):
    monkeypatch.setattr(checks, "REPEAT_SECONDS", 0.05)
    monkeypatch.setattr(checks, "run_command", lambda command, timeout_seconds: Commands({})(command))


def mounted(monkeypatch, line):
    """Have the kernel show one mount."""
    monkeypatch.setattr(mount, "read_mounts", lambda: mount.parse_mountinfo(line))


def quick(folder, disk=DISK, **more):
    """Examine a folder on a disk; what was found, by name."""
    found = examine(folder, size_bytes=SIZE, disk=disk, **{"timeout_seconds": 20.0, **more})
    return {each.name: each for each in found}


def failed(found):
    return [name for name, each in found.items() if each.verdict == "FAILED"]


# ---- what works ------------------------------------------------------------------------------------------------------


def test_everything_passes_on_a_disk_that_works(folder):
    noted = []
    found = quick(folder, note=noted.append)
    assert list(found) == ALL
    assert noted == ALL
    assert failed(found) == []
    good = {"rename", "fsync", "claim", "locks", "clock", "links", "writable"}
    assert {name for name in good if found[name].verdict not in ("ok", "slow")} == set()
    assert found["rename"].figures["renames"] >= 12
    assert found["write"].figures["bytes_per_second"] > 0
    assert found["read"].figures["bytes_per_second_4"] > 0
    assert found["small files"].figures["create_per_second"] > 0


def test_a_file_system_in_memory_is_never_read_cold():
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    found = quick(Path("/dev/shm"))
    assert "(from memory" in found["read"].value
    assert found["file system"].verdict == "warning"


# ---- bounds and judgements -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("50 1 0:1 / / rw - overlay overlay rw,volatile", "fsync does nothing"),
        ("50 1 8:1 / / rw - xfs /dev/sda1 rw,nobarrier", "without barriers"),
    ],
)
def test_a_mount_that_takes_fsync_away_is_a_warning(line, told, tmp_path, monkeypatch):
    mounted(monkeypatch, line)
    found = quick(tmp_path)
    assert found["fsync"].verdict == "warning"
    assert told in found["fsync"].advice


def test_a_root_that_cannot_be_claimed_is_found(folder, monkeypatch):
    def refuse(*args, **more):
        raise BusyError("root", "elsewhere", 7, None)

    monkeypatch.setattr(filesystem_checks, "claim", refuse)
    found = quick(folder)["claim"]
    assert found.verdict == "FAILED"
    assert "being written to by another run" in found.value
    assert found.advice == "two runs could write to one root"


class SizedDisk(Disk):
    """Notes in a file the most bytes that ever lay in the folder."""

    def __init__(self, noted):
        self.noted = noted

    def sync_file(self, fd):
        super().sync_file(fd)
        own = Path(f"/proc/self/fd/{fd}").readlink()
        held = sum(path.stat().st_size for path in (own if own.is_dir() else own.parent).glob("*") if path.is_file())
        with self.noted.open("a") as file:
            file.write(f"{held}\n")


def test_no_more_is_written_than_was_said(tmp_path):
    inside, noted = tmp_path / "inside", tmp_path / "noted"
    inside.mkdir()
    found = quick(inside, SizedDisk(noted))
    most = max(map(int, noted.read_text().split()))
    assert SIZE <= most < SIZE * 1.1, "little files of other checks lie beside it"
    assert found["write"].figures["test_bytes"] == SIZE


@pytest.mark.slow
@pytest.mark.parametrize(("free", "tried"), [(100 * 1024 * 1024, 5 * 1024 * 1024), (10 * 1024 * 1024, None)])
def test_never_more_than_a_twentieth_of_what_is_free(free, tried, tmp_path, monkeypatch):
    space = os.statvfs_result((1, 1, 10**10, free, free, 10, 5, 5, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    found = quick(tmp_path)
    if tried is None:
        assert (found["write"].verdict, found["read"].verdict) == ("unknown", "unknown")
        assert "not measured: 5 % of what is known to be free is less" in found["write"].value
    else:
        assert found["write"].figures["test_bytes"] == tried


def test_a_quota_bounds_the_test_too(tmp_path, monkeypatch):
    mounted(monkeypatch, TABLE.splitlines()[3].replace("/scratch rw", "/ rw"))
    run = Commands({f"lfs quota -q -u {os.getuid()} {tmp_path}": LFS.replace("2000000", "1100000")})
    monkeypatch.setattr(checks, "run_command", lambda command, timeout_seconds: run(command))
    found = quick(tmp_path)
    assert found["quota"].verdict == "warning"
    assert found["write"].figures["test_bytes"] == int(0.05 * 100_000 * 1024) // 4096 * 4096


@pytest.mark.parametrize(
    ("write", "save", "interval", "verdict", "advice"),
    [
        (2e9, "70 GB in 35 s", "at least 700 s where saves block training, for 5 % of the time; 35 s where", "ok", ""),
        (0.5e9, "70 GB in 140 s", "at least 2,800 s", "slow", "a run should save every 15 min: save in the background"),
        (0.05e9, "70 GB in 1,400 s", "at least 28,000 s", "slow", "one save takes longer than that"),
    ],
)
def test_what_a_checkpoint_costs(write, save, interval, verdict, advice):
    found = [
        Finding("write", "ok", "", figures={"bytes_per_second": write}),
        Finding("read", "ok", "", figures={"bytes_per_second": 1e9}),
    ]
    rows = {each.name: each for each in bill(found, 70 * 10**9)}
    assert rows["save"].value == save
    assert rows["load"].value == "70 GB in 70 s"
    assert rows["interval"].value.startswith(interval)
    assert rows["interval"].verdict == verdict
    assert advice in rows["interval"].advice
    assert bill(found, None) == []
    assert bill([Finding("write", "unknown", "")], 70) == []


def test_no_save_is_told_to_be_faster_than_its_files_and_folders():
    found = [
        Finding("fsync", "ok", "", figures={"file_seconds": 0.003, "folder_seconds": 0.002}),
        Finding("small files", "ok", "", figures={"create_per_second": 100.0, "stat_per_second": 600.0}),
        Finding("write", "ok", "", figures={"bytes_per_second": 2e9}),
        Finding("read", "ok", "", figures={"bytes_per_second": 1e9}),
    ]
    rows = {each.name: each for each in bill(found, 70)}
    assert rows["save"].figures["seconds"] == pytest.approx(6 * 0.01 + 2 * 0.002)
    assert rows["save"].value == "70 B in 0.064 s"
    assert rows["load"].value == "70 B in 0.01 s"
    assert rows["interval"].value.startswith("at least 1.28 s where saves block training")
    refused = Finding("fsync", "warning", "", figures={"file_seconds": 0.05, "folder_seconds": None})
    assert bill([refused, *found[1:]], 70)[0].value == "70 B in 0.3 s"


def test_times_of_nothing_are_not_told_more_exactly_than_they_are_known():
    found = [Finding(name, "ok", "", figures={"bytes_per_second": 1e9}) for name in ("write", "read")]
    save, load, interval = bill(found, 70)
    assert (save.value, load.value) == ("70 B in less than 0.001 s",) * 2
    assert interval.value.startswith("at least 0.001 s where")


def test_a_cost_at_a_rate_that_is_not_that_of_a_checkpoint_says_so(tmp_path):
    found = quick(tmp_path, against_bytes=10**6)
    assert (found["save"].verdict, found["load"].verdict) == ("warning", "warning")
    assert "rough: measured on 8.39 MB)" in found["save"].value
    figures = {"bytes_per_second": 1e6, "doubts": ["from memory", "stopped after 9 MB"]}
    rows = bill([Finding(name, "ok", "", figures=figures) for name in ("write", "read")], 10**6)
    assert [each.value for each in rows[:2]] == ["1 MB in 1 s (from memory, stopped after 9 MB)"] * 2


@pytest.mark.slow
def test_what_repeats_ends_well_before_a_short_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "REPEAT_SECONDS", 1.0)
    monkeypatch.setattr(renames, "check_rename", lambda own, disk, seconds: Finding("rename", "ok", f"{seconds:g} s"))
    for limit, told in ((3.0, "0.5 s"), (60.0, "1 s")):
        found = quick(tmp_path, timeout_seconds=limit)
        assert found["rename"].value == told


@pytest.mark.slow
def test_a_command_that_hangs_is_not_a_file_system_that_does(tmp_path, monkeypatch):
    (tmp_path / "quota").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "quota").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(checks, "run_command", run_command)
    found = {each.name: each for each in examine(tmp_path, size_bytes=LEAST_BYTES, timeout_seconds=3.0)}
    assert (found["quota"].verdict, failed(found)) == ("unknown", [])


# ---- trouble ---------------------------------------------------------------------------------------------------------


class HangingDisk(Disk):
    """Never comes back from one operation."""

    def __init__(self, operation):
        self.operation = operation

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "operation"):
            return lambda *args: time.sleep(600)
        return object.__getattribute__(self, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "name"),
    [("make_folder", "writable"), ("rename", "rename"), ("sync_file", "fsync"), ("create_file", "claim")],
)
def test_a_disk_that_hangs_is_left_alone(operation, name, folder):
    began = time.monotonic()
    found = quick(folder, HangingDisk(operation), timeout_seconds=1.0)
    assert time.monotonic() - began < 15
    assert failed(found) == [name]
    assert "see that" in found["clean-up"].advice
    assert found[name].value == "does not answer within 1 s"
    if operation == "make_folder":
        assert list(found) == ["file system", "space", "quota", "writable", "clean-up"]
    else:
        after = [found[each] for each in ALL[ALL.index(name) + 1 :]]
        assert {each.value for each in after} == {"not tried: the file system does not answer any more"}
        assert {each.verdict for each in after} == {"unknown"}


def test_a_folder_that_cannot_even_be_looked_at_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "realpath", lambda path: time.sleep(600))
    found = quick(tmp_path, timeout_seconds=0.3)
    assert failed(found) == ["answer"]
    assert found["answer"].value == f"{tmp_path} does not answer within 0.3 s"


@pytest.mark.slow
def test_a_folder_that_cannot_be_removed_is_named(tmp_path):
    found = quick(tmp_path, HangingDisk("remove_tree"), timeout_seconds=1.0)
    assert found["clean-up"].verdict == "FAILED"
    (left,) = tmp_path.iterdir()
    assert found["clean-up"].advice == f"see that {left} is gone"


class KilledDisk(Disk):
    """Kills the process that works on it, with no warning, inside one operation."""

    def __init__(self, operation):
        self.operation = operation

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "operation"):
            return lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        return object.__getattribute__(self, name)


def test_a_check_that_is_killed_leaves_nothing_and_the_others_go_on(folder):
    found = quick(folder, KilledDisk("reserve"))
    assert found["reserve"].verdict == "unknown"
    assert "killed by SIGKILL" in found["reserve"].value
    assert list(found) == ALL
    assert found["small files"].verdict in ("ok", "slow")


@pytest.mark.parametrize(
    ("operation", "name"),
    [("make_folder", "writable"), ("rename", "rename"), ("sync_file", "fsync"), ("create_file", "claim")],
)
def test_what_saves_build_on_fails_where_it_was_not_found_out(operation, name, folder):
    found = quick(folder, KilledDisk(operation))[name]
    assert found.verdict == "FAILED"
    assert "killed by SIGKILL" in found.value
    assert found.advice == "it was not found out: run doctor again"


def test_a_check_that_goes_wrong_is_told_and_the_others_go_on(folder, monkeypatch):
    def go_wrong(*args):
        raise OverflowError("too large")

    monkeypatch.setattr(filesystem_checks, "check_links", go_wrong)
    monkeypatch.setattr(filesystem_checks, "check_claim", go_wrong)
    found = quick(folder)
    assert list(found) == ALL
    assert (found["links"].verdict, found["links"].value) == ("unknown", "OverflowError: too large")
    assert failed(found) == ["claim"]


class FullDisk(Disk):
    """Takes nothing."""

    def __init__(self, number):
        self.number = number

    def write_at(self, fd, data, offset):
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize(
    ("number", "told", "advice"),
    [
        (errno.ENOSPC, "No space left on device", "the disk is full: nothing can be saved"),
        (errno.EDQUOT, "Disk quota exceeded", "the quota is used up: nothing can be saved"),
    ],
)
def test_a_full_disk_is_told(number, told, advice, folder):
    found = quick(folder, FullDisk(number))
    assert failed(found) == ["direct I/O"]
    assert (found["direct I/O"].value, found["direct I/O"].advice) == (told, advice)
    assert {found[name].value for name in ALL[ALL.index("reserve") :]} == {"not tried: there is no room"}


class ReadOnlyDisk(Disk):
    def make_folder(self, path):
        raise OSError(errno.EROFS, "Read-only file system", str(path))


def test_a_read_only_folder_fails_at_once(folder):
    found = quick(folder, ReadOnlyDisk())
    assert list(found) == ["file system", "space", "quota", "writable"]
    assert failed(found) == ["writable"]
    assert (found["writable"].value, found["writable"].advice) == (
        "Read-only file system",
        "read-only: nothing can be saved",
    )


def test_a_folder_of_somebody_else_fails(tmp_path):
    tmp_path.chmod(0o555)
    try:
        ended = unprivileged.ckptman("doctor", tmp_path, "--json")
    finally:
        tmp_path.chmod(0o755)
    assert ended.returncode == 1
    found = json.loads(ended.stdout)["findings"]
    assert [each["name"] for each in found if each["verdict"] == "FAILED"] == ["writable"]


@pytest.mark.parametrize("at", ["rename", "claim", "write", "read"])
def test_ctrl_c_leaves_nothing(at, folder):
    def interrupt(name):
        if name == at:
            assert any(path.name.startswith(".ckptman-doctor-") for path in folder.iterdir())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quick(folder, note=interrupt)


def test_what_a_doctor_that_was_killed_left_is_told(tmp_path):
    left = tmp_path / ".ckptman-doctor-0123abcd"
    left.mkdir()
    found = quick(tmp_path)
    assert found["writable"].verdict == "warning"
    assert left.name in found["writable"].value
    assert left.is_dir(), "it may be at work right now"


def test_a_folder_that_is_not_there_and_a_file(tmp_path):
    with pytest.raises(NotFoundError, match="there is no folder"):
        examine(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(RootError, match="is a file, not a folder"):
        examine(tmp_path / "file")
    assert not (tmp_path / "nowhere").exists()


def test_commands_that_hang_or_fail_are_no_trouble():
    with pytest.raises(FileNotFoundError):
        run_command(["there-is-no-such-command"])
    assert run_command(["printf", r"hello \377"]) == "hello \ufffd"
    with pytest.raises(subprocess.TimeoutExpired):
        run_command(["sleep", "60"], timeout_seconds=0.1)
    assert LEAST_BYTES == 2**20
