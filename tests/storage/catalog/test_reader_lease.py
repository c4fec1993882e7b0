"""Leases: who reads what in a root, and when a lease is over."""

import errno
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from ckptman.errors import RootError
from ckptman.storage.catalog import liveness
from ckptman.storage.catalog import reader_lease as lease_module
from ckptman.storage.catalog.liveness import this_process
from ckptman.storage.catalog.reader_lease import Lease, lease, look, reading
from ckptman.storage.format.paths import is_lease, lease_path, run_folder, step_folder
from ckptman.storage.io.durable_files import Disk
from tests.helpers.faulty_disk import on_disk

NAME = step_folder(100)


@pytest.fixture
def quick(monkeypatch):
    """Shorten the waits of half a minute."""
    monkeypatch.setattr(liveness, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(lease_module, "LOOK_SECONDS", 0.01)


def leave(root, nonce="0a1b2c3d", **differences):
    """Leave a lease as if another process had taken it."""
    owner = this_process("", None).model_copy(update=differences)
    run_folder(root).mkdir(parents=True, exist_ok=True)
    path = lease_path(root, nonce)
    path.write_text(Lease(owner=owner, names=(NAME,), what="verify").model_dump_json())
    return path


def leases_in(root):
    return sorted(path.name for path in run_folder(root).iterdir())


def test_what_is_read_is_held_until_the_reader_is_done(tmp_path):
    with lease(tmp_path, [NAME, "step-0000000200.tmp-x"], what="copy"):
        words = f"in use by copy (pid {os.getpid()} on host {socket.gethostname()})"
        assert look(tmp_path).names == {NAME: words, "step-0000000200.tmp-x": words}
        assert look(tmp_path).holder(NAME) == words
        assert look(tmp_path).holder(step_folder(300)) == ""
        with pytest.raises(ValueError, match="damaged"), lease(tmp_path, [NAME], what="verify"):
            assert len(leases_in(tmp_path)) == 2
            raise ValueError("damaged")
        assert look(tmp_path).names[NAME] == words
    assert look(tmp_path).names == {}
    assert list(tmp_path.iterdir()) == [], "who only looked leaves nothing behind"
    run_folder(tmp_path).mkdir()
    with lease(tmp_path, [NAME], what="copy") as nonce:
        assert leases_in(tmp_path) == [lease_path(tmp_path, nonce).name]
        assert look(tmp_path, but=nonce).names == {}
    assert leases_in(tmp_path) == [], "a folder that was there stays"


def test_a_root_without_leases_holds_nothing(tmp_path):
    assert look(tmp_path).names == {}
    assert look(tmp_path / "nowhere").names == {}
    run_folder(tmp_path).write_text("a file")
    assert look(tmp_path).names == {}


def test_a_checkpoint_is_found_behind_a_link_and_another_folder_is_not_leased(tmp_path):
    (tmp_path / "root" / NAME).mkdir(parents=True)
    (tmp_path / "best").symlink_to(Path("root") / NAME)
    with reading(tmp_path / "best", what="diff"):
        assert list(look(tmp_path / "root").names) == [NAME]
    (tmp_path / "model").mkdir()
    with reading(tmp_path / "model", what="verify"):
        assert not run_folder(tmp_path).exists()


@pytest.mark.parametrize("fate", ["gone", "there"])
def test_a_reader_waits_until_a_prune_that_takes_its_checkpoint_is_past_it(tmp_path, fate):
    folder, order = tmp_path / NAME, []
    folder.mkdir()

    def read(name):
        with lease(tmp_path, [name], what="restore"):
            order.append((name, "there" if folder.exists() else "gone"))

    with lease(tmp_path, [NAME], what="prune", takes=True):
        assert look(tmp_path).names == {}, "that holds nothing"
        reader = threading.Thread(target=read, args=(NAME,))
        reader.start()
        read(step_folder(200))  # is not in the way
        while not look(tmp_path).names:
            time.sleep(0.001)
        assert order == [(step_folder(200), "there")]
        if fate == "gone":
            folder.rename(tmp_path / f"{NAME}.trash-x")
            reader.join(60)
    reader.join(60)
    assert order[1:] == [(NAME, fate)]


@pytest.mark.parametrize("operation", ["make_folder", "write_file"])
def test_a_reader_that_cannot_write_reads_without_a_lease(tmp_path, operation):
    class Refusing(Disk):
        def make_folder_if_missing(self, path):
            if operation == "make_folder":
                raise PermissionError(13, "Permission denied")
            super().make_folder_if_missing(path)

        def write_file(self, path, data):
            raise OSError(28, "No space left on device")

    with on_disk(Refusing()), lease(tmp_path, [NAME], what="verify"):
        assert look(tmp_path).names == {}


def test_nothing_is_written_through_a_link_or_for_a_root_that_is_gone(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    run_folder(tmp_path).symlink_to(tmp_path / "elsewhere")
    with lease(tmp_path, [NAME], what="verify"):
        assert list((tmp_path / "elsewhere").iterdir()) == []
    with lease(tmp_path / "gone", [NAME], what="verify"):
        assert not (tmp_path / "gone").exists()


def test_a_reader_that_was_killed_holds_nothing(tmp_path):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as reader:
        path = leave(tmp_path, pid=reader.pid, start_ticks=liveness._state_and_start(reader.pid)[1])
        assert f"pid {reader.pid} " in look(tmp_path).names[NAME]
        reader.kill()
        reader.wait()
        assert (look(tmp_path).names, look(tmp_path).dead) == ({}, [path])


def test_a_pid_that_was_used_again_holds_nothing(tmp_path):
    path = leave(tmp_path, start_ticks=1)
    assert look(tmp_path).dead == [path]


ELSEWHERE = {"host": "elsewhere", "host_key": "other"}


def test_a_reader_on_another_host_holds_while_its_lease_is_touched(tmp_path):
    path = leave(tmp_path, **ELSEWHERE)
    assert "on host elsewhere" in look(tmp_path, wait=False).names[NAME]
    os.utime(path, ns=(1, 1))  # its clock is far behind, or far ahead: it is different, that is all
    assert look(tmp_path).names[NAME]
    path.unlink()
    look(tmp_path, wait=False)
    assert path not in liveness._first_seen, "what was seen of leases that are gone is forgotten"


@pytest.mark.usefixtures("quick")
def test_a_silent_reader_on_another_host_is_watched_before_it_counts_as_dead(tmp_path):
    path = leave(tmp_path, **ELSEWHERE)
    assert look(tmp_path, wait=False).names
    assert look(tmp_path).dead == [path]
    assert look(tmp_path, wait=False).dead == [path], "who has watched once needs not wait again"
    os.utime(path, ns=(1, 1))
    assert look(tmp_path, wait=False).names, "it was only slow"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("rubbish", [b"", b"{", b"\xff", b"[" * 100_000, b'{"owner": 3}'])
def test_a_lease_that_cannot_be_read_holds_everything_until_it_is_known_to_be_dead(tmp_path, rubbish):
    path = leave(tmp_path)
    path.write_bytes(rubbish)
    assert "cannot be read" in look(tmp_path, wait=False).holder(step_folder(7))
    assert look(tmp_path).dead == [path]


def test_what_is_no_file_or_only_looks_alike_is_no_lease(tmp_path):
    run_folder(tmp_path).mkdir()
    for name in ("lease-.json", "lease-00000001.json.bak", "my-lease-00000001.json", "lease-0000000G.json"):
        (run_folder(tmp_path) / name).write_text("{")
    assert look(tmp_path, wait=False) == lease_module.Leases()
    lease_path(tmp_path, "00000001").symlink_to("/dev/zero")
    os.mkfifo(lease_path(tmp_path, "00000002"))
    assert len(look(tmp_path, wait=False).dead) == 2


def test_leases_that_cannot_be_listed_are_not_no_leases(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(lease_module.os, "listdir", refuse)
    with pytest.raises(RootError, match="nobody can tell which checkpoints are being read"):
        look(tmp_path)


def test_words_of_a_lease_cannot_command_a_terminal(tmp_path):
    leave(tmp_path, host="\x1b[2J", host_key="other")
    assert "\\x1b[2J" in look(tmp_path, wait=False).names[NAME]


class Beats:
    """Stands for os.utime, which each beat of a lease calls, and does something `before`."""

    def __init__(self, monkeypatch):
        self.before = lambda: None
        self.count = 0
        self._utime, self._turn = os.utime, threading.Condition()
        monkeypatch.setattr(lease_module, "BEAT_SECONDS", 0.01)
        monkeypatch.setattr(lease_module.os, "utime", self)

    def __call__(self, path, **options):
        try:
            self.before()
            self._utime(path, **options)
        finally:
            with self._turn:
                self.count += 1
                self._turn.notify_all()

    def await_more(self, count):
        """Wait until so many more have come. By then the consequences are there of all but the last."""
        with self._turn:
            until = self.count + count
            assert self._turn.wait_for(lambda: self.count >= until, 60)


@pytest.fixture
def beats(monkeypatch):
    return Beats(monkeypatch)


def test_a_lease_that_was_removed_is_made_again_also_after_an_error(beats, tmp_path):
    def fail():
        raise OSError(errno.EIO, "Input/output error")

    with lease(tmp_path, [NAME], what="verify") as nonce:
        beats.before = fail
        beats.await_more(2)
        beats.before = lambda: None
        path = lease_path(tmp_path, nonce)
        text = path.read_bytes()
        for _ in range(2):
            path.unlink()
            beats.await_more(3)
            assert path.read_bytes() == text
            assert leases_in(tmp_path) == [path.name]
            assert list(look(tmp_path).names) == [NAME]
    assert list(tmp_path.iterdir()) == []


def test_where_the_mount_is_away_no_lease_is_made(beats, tmp_path):
    """With a folder for it an empty mount point would look like a root."""
    root = tmp_path / "mount"
    root.mkdir()
    with lease(root, [NAME], what="verify"):
        root.rename(tmp_path / "away")
        root.mkdir()
        beats.await_more(3)
        assert list(root.iterdir()) == []
        root.rmdir()
        (tmp_path / "away").rename(root)
    assert list(root.iterdir()) == []


def test_a_lease_that_is_over_is_not_made_again(tmp_path):
    class Once(Disk):
        def create_whole_file(self, path, data):
            assert not path.parent.joinpath("made").exists()
            super().create_whole_file(path, data)
            path.parent.joinpath("made").touch()

    with on_disk(Once()), lease(tmp_path, [NAME], what="verify") as nonce:
        lease_path(tmp_path, nonce).unlink()
    assert leases_in(tmp_path) == ["made"]


def test_who_reads_from_a_mount_that_hangs_gets_away_from_it(tmp_path, monkeypatch):
    """Its lease goes when the mount answers."""
    monkeypatch.setattr(lease_module, "_END_SECONDS", 0.2)
    answers = threading.Event()

    class Hanging(Disk):
        def remove_file(self, path):
            answers.wait(60)
            super().remove_file(path)

    with on_disk(Hanging()):
        with lease(tmp_path, [NAME], what="verify") as nonce:
            pass
        assert leases_in(tmp_path) == [lease_path(tmp_path, nonce).name]
        answers.set()
        await_threads()
    assert list(tmp_path.iterdir()) == []


def test_a_lease_that_cannot_be_removed_is_removed_later(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 0.01)
    errors = [OSError(errno.ENOTCONN, "Transport endpoint is not connected") for _ in range(3)]

    class Away(Disk):
        def remove_file(self, path):
            if errors and is_lease(path.name):
                raise errors.pop()
            super().remove_file(path)

    with on_disk(Away()):
        with lease(tmp_path, [NAME], what="verify"):
            pass
        await_threads()
    assert errors == []
    assert list(tmp_path.iterdir()) == []


def test_a_lease_on_a_mount_that_is_away_is_removed_when_it_is_back(tmp_path, monkeypatch):
    """Below the mount point there is nothing to remove, and nothing is removed."""
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 0.01)
    root, away, devices = tmp_path / "root", tmp_path / "away", []
    root.mkdir()

    def device_of(path):
        devices.append(1 if len(devices) in (1, 2) else 0)
        if len(devices) == 4:
            away.rename(root)
        return devices[-1]

    monkeypatch.setattr(lease_module, "device_of", device_of)
    with lease(root, [NAME], what="verify"):
        root.rename(away)
    await_threads()
    assert devices == [0, 1, 1, 0]
    assert list(root.iterdir()) == []


def await_threads():
    for thread in threading.enumerate():
        if thread.name == "ckptman-lease":
            thread.join(60)
