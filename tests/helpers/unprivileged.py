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
    dropped = []
    if os.getuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may do everything, and there is no setpriv")
        dropped = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    command = [*dropped, PYTHON, "-m", "ckptman", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)
