"""A worker that dies costs the test it died of, and the others are run."""

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

CONFTEST = """
def pytest_xdist_make_scheduler(config, log):
    from tests.helpers.lanes import FilesByTime

    return FilesByTime(config, log)
"""


def test_a_worker_that_dies_costs_one_test(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in "abcdef":
        (tmp_path / f"test_{name}.py").write_text("def test_1(): pass\ndef test_2(): pass\n")
    (tmp_path / "test_d.py").write_text(
        "import os, signal\n"
        "def test_1(): pass\n"
        "def test_2(): os.kill(os.getpid(), signal.SIGKILL)\n"
        "def test_3(): pass\n"
    )
    words = ["-m", "pytest", "-c", "/dev/null", "--rootdir", str(tmp_path), "-q", "-n", "2", "-p", "no:cacheprovider"]
    ran = subprocess.run([sys.executable, *words, str(tmp_path)], capture_output=True, text=True, cwd=REPOSITORY)
    assert re.findall(r"^FAILED \S*/(test_\S+)", ran.stdout, re.M) == ["test_d.py::test_2"], ran.stdout
    assert re.search(r"1 failed, 12 passed", ran.stdout), ran.stdout
