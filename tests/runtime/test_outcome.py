"""The outcome of an attempt on disk, and the number of an attempt."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

import ckptman
from ckptman import ConfigError, CorruptError
from ckptman.runtime.outcome import (
    ATTEMPT_ENV,
    OUTCOME_ENV,
    Outcome,
    attempt_number,
    code_for_again,
    highest_attempt,
    launch_of,
    read_outcome,
    restarts_ranks,
    write_outcome,
)
from ckptman.storage.format.manifest import read_manifest
from ckptman.storage.format.paths import DOT, journal_path, outcome_path, step_folder
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


def attempt(root, **options):
    """One attempt, which saves a step; its number."""
    with ckptman.Checkpointer(root, {"n": 0}, save_policy=100, deadline=None, signals=None, **options) as checkpointer:
        checkpointer.save(checkpointer.restore() + 1)
        return checkpointer.attempt


@pytest.mark.parametrize("lost", [[journal_path], [outcome_path], [journal_path, outcome_path]])
def test_what_is_left_tells_the_number(tmp_path, lost):
    assert [attempt(tmp_path) for _ in range(3)] == [1, 2, 3]
    for path in lost:
        path(tmp_path).unlink()
    assert attempt(tmp_path) == 4


def test_each_thing_alone_tells_it(tmp_path):
    for _ in range(3):
        attempt(tmp_path / "run")
    manifest = read_manifest(tmp_path / "run" / step_folder(3))
    for keep in (journal_path, outcome_path):
        root = tmp_path / keep.__name__
        (root / DOT).mkdir(parents=True)
        shutil.copy(keep(tmp_path / "run"), keep(root))
        assert highest_attempt(root, []) == 3
    assert highest_attempt(tmp_path / "none", [manifest.attempt]) == 3
    assert highest_attempt(tmp_path / "none", []) == 0


def test_a_root_that_was_brought_back_from_a_tier(tmp_path):
    tiers = [ckptman.Tier(tmp_path / "tier")]
    for _ in range(3):
        attempt(tmp_path / "run", tiers=tiers)
    ckptman.run.Run(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert attempt(tmp_path / "run", tiers=tiers) == 4


def test_a_journal_of_nonsense_tells_nothing(tmp_path):
    attempt(tmp_path)
    with journal_path(tmp_path).open("a") as file:
        file.write('{"time": 1, "event": "step", "attempt": 99999999999}\n{"event": "x", "attempt": true}\nnot JSON\n')
    assert attempt(tmp_path) == 2


RESTARTS = {"TORCHELASTIC_RUN_ID": "4711", "TORCHELASTIC_MAX_RESTARTS": "3"}


@pytest.mark.parametrize(
    ("environ", "restarts"),
    [
        ({}, False),
        ({**RESTARTS, "TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ({**RESTARTS, "TORCHELASTIC_MAX_RESTARTS": "many"}, False),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, False),
        (RESTARTS, True),
    ],
)
def test_a_planned_stop_is_no_failure_to_who_would_restart_the_ranks(environ, restarts):
    assert restarts_ranks(environ) == restarts
    assert code_for_again(environ) == (0 if restarts else 75)
    assert launch_of(environ) == ("4711.0" if restarts else "")


def test_a_requeued_job_is_another_launch():
    assert launch_of({**RESTARTS, "SLURM_RESTART_COUNT": "2"}) == "4711.2"


RANK = """
import os
from ckptman.runtime.outcome import end_launcher_at_exit
end_launcher_at_exit(os.environ)
if os.fork() == 0:
    raise SystemExit  # not this rank's exit
os.wait()
raise ValueError("the error is told first")
"""


@pytest.mark.parametrize("name", ["torchrun", "other"])
def test_only_torchrun_is_ended_and_the_error_is_told_first(tmp_path, name):
    (tmp_path / "rank.py").write_text(RANK)
    launcher = tmp_path / name
    launcher.write_text(
        "import subprocess, sys, time\n"
        "subprocess.run(['sh', '-c', sys.executable + ' rank.py; :'])\n"
        "print('still here', flush=True)\n"
        "time.sleep(60)\n"
    )
    environ, out = {**os.environ, **RESTARTS}, {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([sys.executable, str(launcher)], cwd=tmp_path, env=environ, **out) as process:
        told = "".join(iter(process.stdout.readline, "still here\n" if name == "other" else ""))
        if name == "torchrun":
            assert process.wait(20) == -signal.SIGTERM
        assert "ValueError: the error is told first" in told
        process.kill()
