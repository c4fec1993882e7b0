"""The demo, as `make demo` runs it but on less text: it checks itself, and ends with 0 only if nothing was lost."""

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from ckptman.train.tokenize import tokenize
from tests.docs.test_docs import says, text_of
from tests.helpers.forkserver import programs

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.mark.timeout(500)
def test_the_demo_loses_nothing(tmp_path):
    tokenize(tmp_path / "tokens", [Path(sysconfig.get_paths()["stdlib"], "asyncio")], vocab_size=512, workers=1)
    done = subprocess.run(
        [programs() / "python", str(DEMO), "--folder", str(tmp_path), "--steps", "48"],
        capture_output=True,
        text=True,
        timeout=480,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Nothing was lost: 3 attempts on 4 -> 2 -> 2 processes did steps 1 to 48" in done.stdout
    table = re.search(r"┏.*?┘", text_of("README.md"), re.DOTALL)
    assert table is not None
    for row in re.findall(r"^[┃│].*", table[0], re.MULTILINE):
        assert any(says(row, line) for line in done.stdout.splitlines()), row
