"""A Slurm that only pretends."""

import pytest

from tests.helpers.fake_slurm import FakeSlurm


@pytest.fixture
def fake(tmp_path, monkeypatch):
    found = FakeSlurm(tmp_path / "bin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", found.environ["PATH"])
    found.plan("sbatch", *[(0, str(number), "") for number in range(101, 130)])
    found.plan("squeue", (0, "".join(f"{number}|RUNNING|None||x\n" for number in range(101, 130)), ""))
    return found
