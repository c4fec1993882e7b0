"""Three torchruns and a world of two: after a restart the third one waits in reserve, and the ranks run on."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

RANK = """
import os, sys, time
from pathlib import Path
Path(f"start-{os.environ['GROUP_RANK']}-{time.time_ns()}").touch()
while not Path("done").exists():
    time.sleep(0.05)
    if os.environ["RANK"] == "1" and Path("crash").exists():
        Path("crash").unlink()
        sys.exit(1)
"""
QUIET_SECONDS = 5.0
"""torchrun looks every second who waits; with one that has no place it would restart the ranks every other second."""


@pytest.mark.timeout(120)
def test_a_node_in_reserve_is_no_reason_to_restart(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=test"]
    options += [f"--rdzv-endpoint=127.0.0.1:{port}", "--no-python", sys.executable, "-S", "rank.py"]
    environ = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}

    def starts() -> list[str]:
        return [re.sub(r"-\d+$", "", path.name) for path in tmp_path.glob("start-*")]

    def until(count: int) -> None:
        deadline = time.monotonic() + 60
        while len(starts()) < count:
            assert time.monotonic() < deadline, starts()
            time.sleep(0.1)

    launchers = []
    try:
        for number in range(3):
            command = [sys.executable, "-m", "ckptman.train.torchrun", f"--rdzv-conf=is_host={int(number == 0)}"]
            launchers.append(subprocess.Popen([*command, *options], cwd=tmp_path, env=environ))
        until(2)
        time.sleep(2.0)  # the third one has come too
        (tmp_path / "crash").touch()
        until(4)
        time.sleep(QUIET_SECONDS)
        before = len(starts())
        time.sleep(QUIET_SECONDS)
        assert len(starts()) == before
        (tmp_path / "done").touch()
        codes = [each.wait(60) for each in launchers]
        assert codes.count(0) >= 2
    finally:
        for each in launchers:
            each.kill()
            each.wait()
