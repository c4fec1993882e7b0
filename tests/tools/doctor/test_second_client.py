"""The second process of the checks, started by a command: what it is told, what it answers, and how it ends."""

import errno
import os
import socket
from unittest.mock import patch

import pytest

from ckptman.errors import ConfigError
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.isolated_process import run_isolated
from ckptman.storage.io.mount import parse_mountinfo
from ckptman.tools.doctor import second_client
from ckptman.tools.doctor.second_client import HERE, Second, check_clients, find_token
from tests.tools.doctor.places import isolated, place_at

NOISY = ("sh", "-c", 'echo Welcome to node2; echo "a prompt without an end" >&2; exec "$@"', "sh")


def elsewhere(monkeypatch, start=Second.start):
    """Have each second client be a process of this host that is taken for another client; one of them."""
    monkeypatch.setattr(Second, "start", lambda _, *arguments: start(HERE, *arguments))
    return Second(("elsewhere",), "node2")


def refuse_twice(pipe, folder):
    """Task: answer with an error of the system, and then with one of ours."""
    while True:
        number = pipe.recv()
        pipe.send(OSError(number, os.strerror(number)) if number else ConfigError("no"))


@pytest.mark.parametrize("command", [("env",), NOISY], ids=["quiet", "noisy"])
def test_this_host_is_no_other_client(command, tmp_path):
    found = isolated(check_clients, tmp_path, second=Second(command))
    assert (found.verdict, found.value) == ("warning", f"{socket.gethostname()} is this host, with this mount")


@pytest.mark.parametrize(("kind", "verdict"), [("ext4 /dev/vda", "ok"), ("lustre x:/y", "unknown")])
def test_one_host_cannot_see_what_others_see(kind, verdict, tmp_path):
    (mount,) = parse_mountinfo(f"50 1 0:1 / / rw - {kind} rw")
    found = check_clients(place_at(tmp_path, mount=mount))
    assert (found.verdict, "--second-client" in found.advice) == (verdict, verdict == "unknown")


def test_a_client_that_does_not_see_the_folder_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(second_client, "PATIENCE_SECONDS", 0.05)
    with patch.object(DISK, "write_file", lambda path, data: None):
        found = isolated(check_clients, tmp_path, second=Second(("env",)))
    value = f"{socket.gethostname()} does not see what this host writes here: No such file or directory"
    assert (found.verdict, found.value) == ("FAILED", value)
    with patch.object(DISK, "write_file", lambda path, data: path.write_bytes(b"other")):
        found = isolated(check_clients, tmp_path, second=Second(("env",)))
    assert found.value.endswith("other bytes are there")


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (
            ("false",),
            "--second-client: false ended with exit code 1: name a command that starts Python on another node",
        ),
        (("sh", "-c", "echo; echo no such node >&2; exit 255"), "ended with exit code 255 (no such node): name a"),
        (("no-such-command", "n2"), "--second-client: no-such-command cannot be started: No such file or directory"),
        (("sh", "-c", "sleep 600"), "--second-client: sh -c 'sleep 600' does not answer within 1 s"),
    ],
)
def test_a_command_that_starts_no_process_is_told_with_its_last_words(command, told, tmp_path, monkeypatch):
    monkeypatch.setattr(second_client, "START_SECONDS", 1.0 if "600" in str(command) else 60.0)
    with pytest.raises(ConfigError) as raised:
        isolated(check_clients, tmp_path, second=Second(command))
    assert told in str(raised.value)


def test_errors_come_back_as_what_they_are(tmp_path):
    def ask():
        with Second(("env",)).start(refuse_twice, tmp_path) as other:
            other.pipe.send(errno.EDQUOT)
            with pytest.raises(OSError, match="quota exceeded") as full:
                other.receive()
            other.pipe.send(0)
            with pytest.raises(Exception, match=r"^no$"):
                other.receive()
            return full.value.errno

    assert run_isolated(ask, 60) == errno.EDQUOT


def test_it_ends_by_itself_when_the_first_one_has_no_more_to_say(tmp_path):
    ended = tmp_path / "ended"
    command = ("sh", "-c", f'"$@"; touch {ended}', "sh")

    def ask():
        with Second(command).start(find_token, tmp_path):
            pass

    run_isolated(ask, 60)
    assert ended.exists()
