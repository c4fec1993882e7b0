"""`ckptman` as somebody whom permissions stop: root's rights are given up where a test has them."""

import os
import shutil
import subprocess
import sys

import pytest

PYTHON = sys.executable
"""What is forked has all rights."""


def ckptman(*arguments):
    """Run a command to its end. Skips the test for a root that cannot give up its rights."""
    command = [*_dropped(), PYTHON, "-m", "ckptman", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def need_refusal(folder):
    """Skip the test where the file system lets root write to a folder by its user id, whatever rights it gave up."""
    path = folder / "refused"
    if subprocess.run([*_dropped(), "touch", str(path)], capture_output=True).returncode == 0:
        path.unlink()
        pytest.skip("the file system of this folder refuses root nothing")


def _dropped():
    if os.getuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root may do everything, and there is no setpriv")
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
