"""Who writes to a root: one run at a time, whatever became of the one before it."""

import contextlib
import errno
import itertools
import os
import socket
import subprocess
import threading
import time
from unittest import mock

import pytest

from ckptman.errors import BusyError, RootError
from ckptman.storage.catalog import liveness
from ckptman.storage.catalog import writer_lock as owner_module
from ckptman.storage.catalog.liveness import is_this_process, this_process
from ckptman.storage.catalog.writer_lock import claim, owner_lives, read_owner
from ckptman.storage.format.paths import owner_path, run_folder
from ckptman.storage.io.durable_files import DISK, Disk
from tests.helpers.faulty_disk import Death, FaultyDisk, faults, on_disk
from tests.helpers.ranks import run_ranks

SHORT_SECONDS = 0.1


def soon(act, *arguments):
    """Act, and judge a process of another host after a moment, not after half a minute."""
    with mock.patch.object(liveness, "SILENT_SECONDS", SHORT_SECONDS):
        return act(*arguments)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Nobody pulls the plug here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def dead():
    """The pid of a process that has ended."""
    with subprocess.Popen(["true"]) as child:
        pass
    return child.pid


def leave(root, number=1, **differences):
    """Leave a claim as if another process had made it and never given it back."""
    owner = this_process("run-before", "4711").model_copy(update={"nonce": f"{number:08x}", **differences})
    run_folder(root).mkdir(parents=True, exist_ok=True)
    owner_path(root, number).write_text(owner.model_dump_json() + "\n")
    return owner


def marks(root):
    return sorted(path.name for path in run_folder(root).iterdir())


# ---- claiming and giving back ----------------------------------------------------------------------------------------


def test_a_root_is_claimed_and_given_back(tmp_path):
    root = tmp_path / "new" / "root"
    assert read_owner(root) is None
    root.mkdir(parents=True)
    held = claim(root, "run", "4711")
    owner = read_owner(root)
    assert owner == held.owner
    assert (owner.host, owner.pid, owner.job_id, owner.run_id) == (socket.gethostname(), os.getpid(), "4711", "run")
    assert owner_lives(root, owner)
    assert is_this_process(owner)
    tags = {held.next_tag() for _ in range(5)}
    assert len(tags) == 5
    assert {tag.partition("-")[0] for tag in tags} == {owner.nonce}
    with pytest.raises(BusyError, match=rf"by this very process \(pid {os.getpid()}\)") as caught:
        claim(root, "other", None)
    assert (caught.value.host, caught.value.job_id) == (socket.gethostname(), "4711")
    held.check()
    held.release()
    assert read_owner(root) is None
    assert not owner_lives(root, owner)
    claim(root, "run", None).release()
    assert marks(root) == ["owner-000002.json"], "only the last claim is kept"


# ---- the same host ---------------------------------------------------------------------------------------------------


def test_a_dead_owner_is_taken_over(tmp_path, dead):
    before = leave(tmp_path, pid=dead)
    assert not owner_lives(tmp_path, before)
    claim(tmp_path, "run", None).release()
    assert marks(tmp_path) == ["owner-000002.json"]


def test_a_pid_that_was_used_again_is_no_owner_and_a_clock_that_was_set_is_nothing(tmp_path, monkeypatch):
    owner = leave(tmp_path)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert owner_lives(tmp_path, owner)
    leave(tmp_path, start_ticks=owner.start_ticks - 1)
    claim(tmp_path, "run", None).release()


def test_an_owner_that_is_killed_is_taken_over_at_once(tmp_path):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        ticks = liveness._state_and_start(child.pid)[1]
        owner = leave(tmp_path, pid=child.pid, start_ticks=ticks)
        assert owner_lives(tmp_path, owner)
        with pytest.raises(BusyError, match=f"pid {child.pid}, job 4711"):
            claim(tmp_path, "run", None)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is dead, and nobody has asked for its exit code
        assert liveness._state_and_start(child.pid) == ("Z", ticks)
        claim(tmp_path, "run", None).release()


def test_a_process_that_this_host_hides_is_watched(tmp_path, monkeypatch):
    """With /proc mounted `hidepid`, other users' processes look as if they were not there."""
    owner = leave(tmp_path)
    monkeypatch.setattr(liveness, "_state_and_start", lambda pid: None)
    assert not soon(owner_lives, tmp_path, owner), "nothing is heard of it"
    monkeypatch.setattr(os, "kill", mock.Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted")))
    with touching(owner_path(tmp_path, 1)):
        assert owner_lives(tmp_path, owner)


# ---- another host ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def touching(path):
    """Touch a file as its owner on another host does."""
    done = threading.Event()

    def beat():
        while not done.wait(0.02):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_live_owner_on_another_host(tmp_path):
    owner = leave(tmp_path, host="node17", pid=5)
    with touching(owner_path(tmp_path, 1)):
        assert owner_lives(tmp_path, owner)
        with pytest.raises(BusyError, match="host node17, pid 5, job 4711"):
            claim(tmp_path, "run", None)


@pytest.mark.parametrize("difference", [{"host": "node17"}, {"host_key": "another boot"}, {"host_key": ""}])
def test_a_dead_owner_on_another_host_or_of_another_boot(tmp_path, difference):
    """Its pid lives here, which says nothing."""
    owner = leave(tmp_path, **difference)
    begun = time.monotonic()
    assert not soon(owner_lives, tmp_path, owner)
    assert time.monotonic() - begun >= SHORT_SECONDS
    held = soon(claim, tmp_path, "run", None)
    assert not soon(owner_lives, tmp_path, owner)
    held.release()


def test_an_owner_on_another_host_that_leaves_while_we_watch(tmp_path, monkeypatch):
    """What it writes last is a touch too, and no reason to refuse the next run."""
    leave(tmp_path, host="node17")

    def release(seconds):
        with owner_path(tmp_path, 1).open("a") as file:
            file.write("released\n")

    monkeypatch.setattr(time, "sleep", release)
    claim(tmp_path, "run", None).release()


def test_an_owner_touches_its_claim_until_it_is_released(tmp_path, monkeypatch):
    beats, touch = threading.Semaphore(0), os.utime

    def beat(path, **options):
        try:
            touch(path, **options)
        finally:
            beats.release()

    def await_beats():
        """The second one from now on has begun from now on."""
        while beats.acquire(blocking=False):
            pass
        assert all(beats.acquire(timeout=240) for _ in range(2))

    monkeypatch.setattr(owner_module, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(os, "utime", beat)
    held = claim(tmp_path, "run", None)
    path = owner_path(tmp_path, 1)
    for _ in range(2):
        touch(path, (0, 0))
        await_beats()
        assert path.stat().st_mtime > 0
        path.rename(path.with_name("away"))  # the file system is away for a moment
        await_beats()
        path.with_name("away").rename(path)
    held.release()
    held._thread.join(60)
    assert not held._thread.is_alive()


# ---- rubbish and loss ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rubbish", [b"", b"{", b"null\n", b"[1]\nx\n", b'{"host": 5}\n', b"\xff\xfe\n\n", b"[" * 100_000, b"\n\n\n"]
)
def test_a_claim_that_cannot_be_read_is_waited_for_and_then_taken_over(tmp_path, rubbish):
    run_folder(tmp_path).mkdir()
    owner_path(tmp_path, 3).write_bytes(rubbish)
    assert read_owner(tmp_path) is None
    with touching(owner_path(tmp_path, 3)), pytest.raises(BusyError, match="host unknown"):
        claim(tmp_path, "run", None)
    soon(claim, tmp_path, "run", None).release()
    assert marks(tmp_path) == ["owner-000004.json"]


def test_a_claim_that_is_whole_a_moment_later_is_alive(tmp_path, monkeypatch):
    """Its file is made, and then written: who looks in between must not wait for it to be written once more."""
    leave(tmp_path)
    whole = owner_path(tmp_path, 1).read_bytes()
    owner_path(tmp_path, 1).write_bytes(b"")
    touched_at = liveness.touched_at

    def write_first(path):
        if not path.read_bytes():
            path.write_bytes(whole)
        return touched_at(path)

    monkeypatch.setattr(liveness, "touched_at", write_first)
    with pytest.raises(BusyError) as caught:
        soon(claim, tmp_path, "run", None)
    assert caught.value.job_id == "4711"


def test_a_pid_that_cannot_be_is_rubbish_and_a_field_of_a_later_version_is_not(tmp_path):
    for pid in (0, -1, 2**31, 10**30):
        leave(tmp_path, pid=pid)
        assert read_owner(tmp_path) is None
    owner = leave(tmp_path)
    text = owner_path(tmp_path, 1).read_text()
    owner_path(tmp_path, 1).write_text(text.replace('{"host"', '{"rank": 0, "host"'))
    assert read_owner(tmp_path) == owner


@pytest.mark.parametrize("number", [1, 2])
def test_a_lost_claim_is_noticed_and_the_winner_left_alone(tmp_path, number):
    held = claim(tmp_path, "run", None)
    if number == 1:
        owner_path(tmp_path, 1).unlink()
    winner = leave(tmp_path, number, host="node17", pid=5)
    with pytest.raises(BusyError, match="host node17, pid 5"):
        held.check()
    held.release()
    assert read_owner(tmp_path) == winner
    owner_path(tmp_path, 1).unlink()  # as the winner of a higher number does
    if number == 2:
        with pytest.raises(BusyError, match="host node17, pid 5"):
            held.check()


def test_a_claim_whose_files_were_removed_is_made_again(tmp_path):
    held = claim(tmp_path, "run", None)
    DISK.remove_tree(run_folder(tmp_path))
    held.check()
    assert read_owner(tmp_path) == held.owner
    with pytest.raises(BusyError):
        claim(tmp_path, "other", None)
    DISK.remove_tree(run_folder(tmp_path))
    held.release()
    assert not run_folder(tmp_path).exists()


def test_a_root_whose_file_system_is_gone_is_not_claimed_on_the_one_below(tmp_path):
    """What is saved there would be hidden as soon as it is mounted again."""
    held = claim(tmp_path, "run", None)
    held._device += 1
    held.check()  # mounted again, a file system may have another number
    DISK.remove_tree(run_folder(tmp_path))
    with pytest.raises(RootError, match="see whether it is still mounted"):
        held.check()
    assert not run_folder(tmp_path).exists()
    held._device -= 1
    held.release()


@pytest.mark.parametrize("operation", ["create_file", "make_folder_if_missing"])
def test_a_mount_that_goes_while_its_root_is_claimed(tmp_path, operation):
    """Nothing is made below it, it is no other run that has it, and it is free once it is back."""
    root, mount = tmp_path / "root", tmp_path / "elsewhere"

    def leave(path, *data):
        getattr(Disk, operation)(DISK, path, *data)
        root.rename(mount)

    root.mkdir()
    with mock.patch.object(DISK, operation, leave), pytest.raises(RootError, match="No such file"):
        claim(root, "run", None)
    assert not root.exists()
    mount.rename(root)
    claim(root, "run", None).release()


def test_whoever_looked_too_early_loses(tmp_path, monkeypatch):
    """NFS may show an old listing: a claim of a number that others have passed is taken back."""
    held = claim(tmp_path, "run", None)
    DISK.rename(owner_path(tmp_path, 1), owner_path(tmp_path, 5))
    held._number = 5
    nothing_first = itertools.chain([None], itertools.repeat(mock.DEFAULT))
    with (
        mock.patch.object(owner_module, "_newest", wraps=owner_module._newest, side_effect=nothing_first),
        pytest.raises(BusyError, match=f"pid {os.getpid()}"),
    ):
        claim(tmp_path, "other", None)
    assert marks(tmp_path) == ["owner-000005.json"]
    held.check()
    held.release()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_root_that_cannot_be_written(tmp_path, code):
    refused = mock.patch.object(DISK, "create_file", side_effect=OSError(code, os.strerror(code), str(tmp_path)))
    words = r"cannot be written .*: check permissions, quota and the mount"
    with refused, pytest.raises(RootError, match=words) as caught:
        claim(tmp_path, "run", None)
    assert caught.value.errno == code


def test_a_root_whose_own_folder_is_a_file(tmp_path):
    run_folder(tmp_path).touch()
    with pytest.raises(RootError):
        claim(tmp_path, "run", None)
    with pytest.raises(RootError, match="cannot be read"):
        read_owner(tmp_path)


# ---- crashes ---------------------------------------------------------------------------------------------------------


@pytest.mark.leaves("ckptman-owner")
@pytest.mark.parametrize("left", [None, "dead", "released"])
def test_death_at_any_operation_of_a_claim(tmp_path, monkeypatch, dead, left):
    """The next run gets the root, at the latest when its patience is over."""
    late = this_process("late", None).model_copy(update={"pid": dead})
    for fault in faults():
        root = tmp_path / f"{fault.at}-{fault.when}"
        root.mkdir(exist_ok=True)
        if left is not None:
            line = leave(root, 7, pid=dead).model_dump_json() + "\n"
            owner_path(root, 7).write_text(line + ("released\n" if left == "released" else ""))
        disk = FaultyDisk(fault)
        with monkeypatch.context() as patch:
            # Who dies in this test does not live on in this process.
            patch.setattr(owner_module, "this_process", lambda run, job: late)
            with contextlib.suppress(Death), on_disk(disk):
                claim(root, "run", None).release()
        held = soon(claim, root, "run", None)
        assert len(marks(root)) == 1
        assert read_owner(root) == held.owner
        held.release()
        if not disk.struck:
            break
    assert fault.at >= (3 if left else 2)


def test_an_error_at_any_operation_of_a_claim(tmp_path, dead):
    """The process lives on, and may try again."""
    for fault in faults(errno.ENOSPC):
        root = tmp_path / f"{fault.at}-{fault.when}"
        leave(root, 7, pid=dead)
        with on_disk(FaultyDisk(fault)) as disk:
            try:
                held = claim(root, "run", None)
            except RootError as error:
                assert error.errno == errno.ENOSPC
                if (fault.when, disk.log[-1]) != ("after", "create_file"):
                    held = soon(claim, root, "run", None)
            held.release()
        if not disk.struck:
            break


# ---- two at once -----------------------------------------------------------------------------------------------------


def test_of_threads_that_claim_at_once_exactly_one_wins(tmp_path, dead):
    for number in range(40):
        root = tmp_path / str(number)
        root.mkdir()
        if number % 2:
            leave(root, 3, pid=dead)
        start, won, refused = threading.Barrier(4), [], []

        def contend(root, start, won, refused):
            start.wait()
            try:
                won.append(claim(root, "run", None))
            except BusyError as error:
                refused.append(error)

        threads = [threading.Thread(target=contend, args=(root, start, won, refused)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(refused)) == (1, 3)
        won[0].check()
        won[0].release()


def contend_in_process(root, rounds):
    """Claim, hold and give back so many times. Returns when it was held."""
    spans = []
    with mock.patch.object(os, "fsync"):
        while len(spans) < rounds:
            try:
                held = claim(root, "run", None)
            except BusyError:
                continue
            begun = time.monotonic()
            held.check()
            held.check()
            spans.append((begun, time.monotonic()))
            held.release()
    return spans


def test_of_processes_that_claim_again_and_again_never_two_hold_it(tmp_path):
    spans = sorted(itertools.chain(*run_ranks(3, contend_in_process, tmp_path, 40)))
    assert len(spans) == 3 * 40
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans)), "two held it at once"
