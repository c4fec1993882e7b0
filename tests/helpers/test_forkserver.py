"""Forked processes end as fresh interpreters do, and never outlive the client that asked for them."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.helpers.forkserver import Python, programs, run


@pytest.mark.parametrize(
    ("code", "returncode"),
    [
        ("pass", 0),
        ("import sys; sys.exit(75)", 75),
        ("import sys; sys.exit('why')", 1),
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os; os._exit(13)", 13),
    ],
)
def test_it_ends_as_an_interpreter_does(code, returncode):
    assert run("-c", code, capture_output=True).returncode == returncode
    assert subprocess.run([sys.executable, "-S", "-c", code], capture_output=True).returncode == returncode


def test_it_gets_what_its_client_gives(tmp_path):
    script = tmp_path / "script.py"
    told = "print('told', file=sys.stderr)"
    script.write_text(f"import os, sys\nprint(input(), sys.argv, os.environ['NAME'], os.getcwd(), __file__)\n{told}")
    environ = {**os.environ, "NAME": "value"}
    with Python("script.py", "a b", cwd=tmp_path, env=environ, stdin=-1, stdout=-1, stderr=-1, text=True) as process:
        out, err = process.communicate("line", timeout=240)
    assert out == f"line ['script.py', 'a b'] value {tmp_path} {script}\n"
    assert err == "told\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_ends_with_its_process_and_the_other_way_round(number):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([programs() / "python", "-c", code], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        process = psutil.Process(int(program.stdout.readline()))
        assert process.pid != program.pid
        program.send_signal(number)
        assert program.wait(60) == -number
    process.wait(60)
