"""The end of the allocation: from the environment, else from squeue, which is a fake here."""

import subprocess
import time

import pytest

from ckptman.runtime.deadline import deadline_from_environment, parse_end_time, run_command


class Squeue:
    """Answers like squeue, and notes what it was asked."""

    def __init__(self, answer):
        self.answer, self.asked = answer, list[tuple[str, ...]]()

    def __call__(self, command):
        self.asked.append(tuple(command))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def berlin(monkeypatch):
    # POSIX notation, so that no time zone database is needed.
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_outside_a_job_there_is_none_and_nobody_is_asked():
    squeue = Squeue("2026-11-21T15:03:00")
    assert deadline_from_environment({}, squeue) is None
    assert squeue.asked == []


def test_the_environment_wins():
    squeue = Squeue("2026-11-21T15:03:00")
    assert deadline_from_environment({"SLURM_JOB_END_TIME": "1795276980", "SLURM_JOB_ID": "7"}, squeue) == 1795276980.0
    assert squeue.asked == []


@pytest.mark.usefixtures("berlin")
def test_squeue_is_asked_once_and_speaks_local_time():
    squeue = Squeue("2026-11-21T15:03:00\n")
    assert deadline_from_environment({"SLURM_JOB_ID": "4711"}, squeue) == 1795269780.0  # 14:03:00 UTC
    assert squeue.asked == [("squeue", "-h", "-j", "4711", "-o", "%e")]


@pytest.mark.usefixtures("berlin")
def test_summer_time():
    assert parse_end_time("2026-07-01T12:00:00") == 1782900000.0  # 10:00:00 UTC


@pytest.mark.parametrize("text", ["N/A", "NONE", "Unknown", "UNLIMITED", "", "n/a\n"])
def test_no_time_limit_is_no_deadline(text):
    assert deadline_from_environment({"SLURM_JOB_ID": "7"}, Squeue(text)) is None


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf", "0", "-5"])
def test_nonsense_in_the_environment_is_passed_over(text):
    squeue = Squeue("UNLIMITED")
    assert deadline_from_environment({"SLURM_JOB_END_TIME": text, "SLURM_JOB_ID": "7"}, squeue) is None
    assert len(squeue.asked) == 1


def test_an_array_task_asks_for_itself_not_for_the_array():
    # The last task of an array has the array's own id as SLURM_JOB_ID.
    squeue = Squeue("N/A")
    environ = {"SLURM_JOB_ID": "26", "SLURM_ARRAY_JOB_ID": "26", "SLURM_ARRAY_TASK_ID": "3"}
    deadline_from_environment(environ, squeue)
    assert squeue.asked[0][3] == "26_3"


def test_of_several_answers_the_earliest_counts():
    answer = "2026-11-21T15:03:00\nN/A\n2026-11-21T14:03:00\n"
    assert deadline_from_environment({"SLURM_JOB_ID": "7"}, Squeue(answer)) == parse_end_time("2026-11-21T14:03:00")


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
    with pytest.warns(RuntimeWarning, match=message) as caught:
        assert deadline_from_environment({"SLURM_JOB_ID": "7"}, Squeue(failure)) is None
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


def test_no_squeue_anywhere(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="squeue"):
        assert deadline_from_environment({"SLURM_JOB_ID": "12"}) is None


def test_a_squeue_that_hangs_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptman.runtime.deadline.SQUEUE_TIMEOUT_SECONDS", 0.1)
    fake_squeue(tmp_path, "exec sleep 60", monkeypatch)
    with pytest.raises(subprocess.TimeoutExpired):
        run_command(["squeue"])
