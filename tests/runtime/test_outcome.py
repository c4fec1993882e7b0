"""The outcome of an attempt on disk, and the number of an attempt."""

import errno
import json
import os
from dataclasses import replace

import pytest

from ckptman import ConfigError, CorruptError
from ckptman.runtime.outcome import ATTEMPT_ENV, OUTCOME_ENV, Outcome, attempt_number, read_outcome, write_outcome
from ckptman.storage.io.durable_files import Disk
from tests.helpers.faulty_disk import on_disk

STOPPED = Outcome("stopped", 120, "SIGTERM on rank 2", 75, "/scratch/run/checkpoints", 2, 1795269780.5, 4711, "n1")


def test_written_and_read_back(tmp_path):
    path = tmp_path / ".ckptman" / "outcome.json"
    assert read_outcome(path) is None
    write_outcome(path, STOPPED)
    assert read_outcome(path) == STOPPED
    finished = replace(STOPPED, state="finished", exit_code=0)
    write_outcome(path, finished)
    assert read_outcome(path) == finished
    assert [each.name for each in path.parent.iterdir()] == ["outcome.json"], "no temporary file is left"


def test_a_failed_write_leaves_the_old_outcome(tmp_path):
    class FullDisk(Disk):
        def write_file(self, path, data):
            super().write_file(path, data[:10])
            raise OSError(28, os.strerror(28))

    path = tmp_path / "outcome.json"
    write_outcome(path, STOPPED)
    with on_disk(FullDisk()), pytest.raises(OSError, match="No space left"):
        write_outcome(path, replace(STOPPED, step=121))
    assert read_outcome(path) == STOPPED
    assert [each.name for each in tmp_path.iterdir()] == ["outcome.json"]


def test_a_key_of_a_later_version_is_left_out(tmp_path):
    path = tmp_path / "outcome.json"
    path.write_text(json.dumps({**vars(STOPPED), "goodput": 0.97}))
    assert read_outcome(path) == STOPPED


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "JSONDecodeError"),
        (b"{", "JSONDecodeError"),
        (b"[]", "TypeError"),
        (b"{}", "KeyError: 'state'"),
        (b'{"state": "\xff"}', "UnicodeDecodeError"),
        *(
            (json.dumps({**vars(STOPPED), name: value}).encode(), f"{name} is {value!r}")
            for name, value in [("state", "done"), ("state", 3), ("step", "12"), ("root", None)]
        ),
    ],
)
def test_garbage_and_wrong_values_are_corrupt(tmp_path, data, message):
    path = tmp_path / "outcome.json"
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=message) as caught:
        read_outcome(path)
    assert str(path) in str(caught.value)
    assert "remove it" in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({}, 1),
        ({ATTEMPT_ENV: "3"}, 3),
        ({ATTEMPT_ENV: "3", "SLURM_RESTART_COUNT": "9"}, 3),
        ({"SLURM_RESTART_COUNT": "1"}, 2),
        ({"SLURM_RESTART_COUNT": "0"}, 1),
        ({ATTEMPT_ENV: "", "SLURM_RESTART_COUNT": ""}, 1),
    ],
)
def test_attempt_number(environ, number):
    assert attempt_number(environ) == number


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "²"])
def test_attempt_number_that_is_none(text):
    with pytest.raises(ConfigError, match=ATTEMPT_ENV):
        attempt_number({ATTEMPT_ENV: text})


def test_names_that_others_rely_on():
    assert (OUTCOME_ENV, ATTEMPT_ENV) == ("CKPTMAN_OUTCOME", "CKPTMAN_ATTEMPT")


def test_a_record_is_seen_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    disk, path, seen = Disk(), tmp_path / "record.json", []
    real = Disk.write_file

    def looked_at(self, where, data):
        real(self, where, data[:3])
        seen.append(path.exists())
        real(self, where, data)

    monkeypatch.setattr(Disk, "write_file", looked_at)
    disk.create_whole_file(path, b"whole")
    assert (seen, path.read_bytes()) == ([False], b"whole")
    with pytest.raises(FileExistsError):
        disk.create_whole_file(path, b"other")
    assert [each.name for each in tmp_path.iterdir()] == ["record.json"]
    assert path.read_bytes() == b"whole"

    def no_links(source, target):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    disk.create_whole_file(tmp_path / "without", b"links")
    with pytest.raises(FileExistsError):
        disk.create_whole_file(path, b"other")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["record.json", "without"]
