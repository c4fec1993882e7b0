"""What a rank does under a torchrun that restarts ranks: which code it ends with, and how it ends the torchrun."""

import os
import signal
import subprocess
import sys

import pytest

from ckptman.runtime.launcher import code_for_again, launch_of, restarts_ranks

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
from ckptman.runtime.launcher import end_launcher_at_exit
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
