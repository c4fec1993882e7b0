"""Three torchruns and a world of two: after a restart the third one waits in reserve, and the ranks run on. With one
left of them, it ends."""

import os
import re
import socket
import sys
import time
from contextlib import contextmanager, suppress

import psutil
import pytest

from tests.helpers.forkserver import Python

RANK = """
import os, sys, time
from pathlib import Path
Path(f"start-{os.environ['GROUP_RANK']}-{time.time_ns()}").touch()
while not Path("done").exists():
    time.sleep(0.05)
    if os.environ["RANK"] == "1" and Path("crash").exists():
        Path("crash").unlink()
        sys.exit(1)
    if Path("crash-all").exists():
        sys.exit(1)
"""
QUIET_SECONDS = 3.0
"""torchrun looks every second who waits; with one that has no place it would restart the ranks every other second."""


IMPATIENT = """
import runpy, ckptman._torch_compat as compat
compat._REJOIN_SECONDS = 2.0
runpy.run_module("ckptman.train.torchrun", run_name="__main__", alter_sys=True)
"""


class Launchers:
    """torchruns on this host, the first of which has the rendezvous."""

    def __init__(self, folder, count, how):
        self.folder = folder
        (folder / "rank.py").write_text(RANK)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=test"]
        options += [f"--rdzv-endpoint=127.0.0.1:{port}", "--no-python", sys.executable, "-S", "rank.py"]
        environ = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        self.all = []
        for number in range(count):
            command = [*how, f"--rdzv-conf=is_host={int(number == 0)}", *options]
            with (folder / f"said-{number}").open("wb") as said:
                self.all.append(Python(*command, cwd=folder, env=environ, stderr=said))

    @property
    def starts(self):
        return [re.sub(r"-\d+$", "", path.name) for path in self.folder.glob("start-*")]

    def until_started(self, count):
        deadline = time.monotonic() + 240
        while len(self.starts) < count:
            assert time.monotonic() < deadline, self.starts
            time.sleep(0.1)

    def kill(self, number):
        """With its rank."""
        with suppress(ProcessLookupError):
            for each in psutil.Process(self.all[number].pid).children():
                each.kill()
            self.all[number].kill()


@contextmanager
def launchers(folder, count, *how):
    found = Launchers(folder, count, how)
    try:
        yield found
    finally:
        for number, each in enumerate(found.all):
            with suppress(psutil.Error):
                found.kill(number)
            each.wait()


@pytest.mark.timeout(600)
def test_a_node_in_reserve_is_no_reason_to_restart(tmp_path):
    with launchers(tmp_path, 3, "-m", "ckptman.train.torchrun") as found:
        found.until_started(2)
        time.sleep(2.0)  # the third one has come too
        (tmp_path / "crash").touch()
        found.until_started(4)
        time.sleep(QUIET_SECONDS)
        before = len(found.starts)
        time.sleep(QUIET_SECONDS)
        assert len(found.starts) == before
        (tmp_path / "done").touch()
        codes = [each.wait(60) for each in found.all]
        assert codes.count(0) >= 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_ends_when_too_few_nodes_are_left(tmp_path):
    with launchers(tmp_path, 2, "-c", IMPATIENT) as found:
        found.until_started(2)
        found.kill(1)
        (tmp_path / "crash-all").touch()  # the other one rejoins at once; who is dead is noticed after 15 s
        assert found.all[0].wait(100) not in (0, None)
    assert "fewer nodes came to the rendezvous than the run needs" in (tmp_path / "said-0").read_text()
