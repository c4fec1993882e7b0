"""An export of a checkpoint that is four times as large as the memory there is."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import ckptman
from tests.helpers.faulty_disk import drawn
from tests.helpers.ranks import alone

pytestmark = pytest.mark.slow

MIB = 1024 * 1024
LIMIT_BYTES = 144 * MIB
"""What an export may take besides the libraries."""

CHILD = """
import resource, sys
from pathlib import Path

import torch
from ckptman.tools.exporting.export import export
from ckptman._torch_compat import fake_tensors

folder, out, format, dtype, limit = sys.argv[1:]
with fake_tensors():  # it imports more at its first use
    torch.empty(1)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
here = int(status["VmData"].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (here + int(limit), here + int(limit)))
try:
    torch.empty(2 * int(limit), dtype=torch.uint8)  # as the largest tensor is
except RuntimeError as error:
    assert "allocate memory" in str(error)
else:
    sys.exit(77)
export(folder, out, format, dtype=dtype or None)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One tensor is as large as all of the memory twice; the others together too."""
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    alone(_save, path)  # what it takes of memory goes with its process
    return path


def _save(path):
    rows = torch.arange(1024, dtype=torch.float32).repeat(2 * LIMIT_BYTES // 4096, 1)
    model = {"huge": rows} | {f"layer.{n}": rows[: LIMIT_BYTES // 4096 // 4] for n in range(8)}
    ckptman.save({"model": model}, path)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the memory of a process is limited on Linux alone")
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.campaign)])
def test_four_times_the_memory(folder, count, tmp_path):
    kinds = [("safetensors", ""), ("safetensors", "bfloat16"), ("torch", ""), ("dcp", "")]
    for format, cast in drawn(kinds, count):
        out = tmp_path / f"{format}-{cast}"
        words = [sys.executable, "-c", CHILD, str(folder), str(out), format, cast, str(LIMIT_BYTES)]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=240)
        if ran.returncode == 77:
            pytest.skip("this system does not limit the memory of a process")
        assert ran.returncode == 0, ran.stderr
        written = out.stat().st_size if out.is_file() else sum(each.stat().st_size for each in out.iterdir())
        assert written >= 4 * LIMIT_BYTES // (2 if cast else 1)
        if format == "safetensors":
            with safe_open(out / "model.safetensors", "pt") as file:
                part = file.get_slice("huge")[-1:]
            expected = torch.arange(1024.0).to(torch.bfloat16 if cast else torch.float32)
            assert torch.equal(part[0].float(), expected.float())
