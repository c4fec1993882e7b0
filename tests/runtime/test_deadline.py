"""The end of the allocation: from the environment, else from squeue, which is a fake here."""

import subprocess
import time

import pytest

from ckptman.runtime.deadline import deadline_from_environment, run_command


@pytest.fixture
def berlin(monkeypatch):
    # POSIX notation, so that no time zone database is needed.
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


JOB, AT = {"SLURM_JOB_ID": "7"}, "2026-11-21T15:03:00\n"


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("environ", "answer", "deadline", "asked"),
    [
        ({}, AT, None, None),  # outside a job
        ({**JOB, "SLURM_JOB_END_TIME": "1795276980"}, AT, 1795276980.0, None),
        (JOB, AT, 1795269780.0, "7"),  # 14:03:00 UTC
        (JOB, "2026-07-01T12:00:00", 1782900000.0, "7"),  # summer time: 10:00:00 UTC
        (JOB, f"{AT}N/A\n2026-11-21T14:03:00\n", 1795266180.0, "7"),  # the earliest of several
        *((JOB, text, None, "7") for text in ("N/A", "NONE", "Unknown", "UNLIMITED", "", "n/a\n")),
        # Nonsense in the environment is passed over.
        *(
            ({**JOB, "SLURM_JOB_END_TIME": text}, AT, 1795269780.0, "7")
            for text in ("", "soon", "nan", "inf", "0", "-5")
        ),
        # The last task of an array has the array's own id as SLURM_JOB_ID: a task asks for itself, not for the array.
        ({"SLURM_JOB_ID": "26", "SLURM_ARRAY_JOB_ID": "26", "SLURM_ARRAY_TASK_ID": "3"}, "N/A", None, "26_3"),
    ],
)
def test_the_environment_wins_and_squeue_is_asked_once(environ, answer, deadline, asked):
    commands = []
    assert deadline_from_environment(environ, lambda command: (commands.append(tuple(command)), answer)[1]) == deadline
    assert commands == ([("squeue", "-h", "-j", asked, "-o", "%e")] if asked else [])


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (FileNotFoundError(2, "No such file or directory", "squeue"), "No such file"),
        (subprocess.CalledProcessError(1, "squeue", stderr="Invalid job id specified\n"), "Invalid job id specified"),
        (subprocess.CalledProcessError(3, "squeue"), "exit code 3"),
        (subprocess.TimeoutExpired("squeue", 10), "timed out"),
        ("tomorrow at noon", "tomorrow at noon"),
    ],
)
def test_a_failing_squeue_is_a_warning_with_a_remedy(failure, message):
    def squeue(command):
        if isinstance(failure, Exception):
            raise failure
        return failure

    with pytest.warns(RuntimeWarning, match=message) as caught:
        assert deadline_from_environment(JOB, squeue) is None
    assert len(caught) == 1
    assert "job 7" in str(caught[0].message)
    assert "Pass deadline=" in str(caught[0].message)


def fake_squeue(folder, body, monkeypatch):
    program = folder / "squeue"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@pytest.mark.usefixtures("berlin")
def test_a_squeue_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    body = 'echo "$* $SLURM_TIME_FORMAT" > "$(dirname "$0")/asked"; echo 2026-11-21T15:03:00'
    fake_squeue(tmp_path, body, monkeypatch)
    assert deadline_from_environment({"SLURM_JOB_ID": "12"}) == 1795269780.0
    assert (tmp_path / "asked").read_text() == "-h -j 12 -o %e standard\n"


def test_a_squeue_on_the_path_that_fails(tmp_path, monkeypatch):
    fake_squeue(tmp_path, "echo 'slurm_load_jobs error: Unable to contact controller' >&2; exit 1", monkeypatch)
    with pytest.warns(RuntimeWarning, match="Unable to contact controller"):
        assert deadline_from_environment({"SLURM_JOB_ID": "12"}) is None


def test_a_squeue_that_hangs_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptman.runtime.deadline.SQUEUE_TIMEOUT_SECONDS", 0.1)
    fake_squeue(tmp_path, "exec sleep 60", monkeypatch)
    with pytest.raises(subprocess.TimeoutExpired):
        run_command(["squeue"])
