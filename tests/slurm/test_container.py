"""A training in a container: signals, the outcome and the exit code come through."""

import shlex
import shutil
import sys
from pathlib import Path

import pytest

from ckptman.cli.app import main
from ckptman.jobs.chain_record import find_chains
from tests.slurm.test_templates import RANKS, WAITING, rendered

BOUND = ("usr", "root", "home", "opt", "tmp")
"""Where the programs, this Python and the folder of the test may be."""


@pytest.mark.timeout(600)
def test_the_warning_reaches_every_rank_in_its_container(lab, tmp_path, monkeypatch):
    runtime = shutil.which("ch-run")
    if runtime is None:
        pytest.skip("ch-run is not installed (Debian: apt-get install charliecloud)")
    image = small_image(tmp_path / "image")
    monkeypatch.setenv("USER", "somebody")  # it wants one
    (tmp_path / "wait.py").write_text(WAITING)
    prefix = Path(sys.prefix).resolve()
    binds = {f"/{name}" for name in BOUND} | {f"/{prefix.parts[1]}", f"/{tmp_path.resolve().parts[1]}"}
    for each in binds:
        (image / each[1:]).mkdir(exist_ok=True)
    options = [part for each in sorted(binds) for part in ("-b", f"{each}:{each}")]
    values = {
        **RANKS,
        "container": str(image),
        "container_command": shlex.join([runtime, *options, "--cd", str(tmp_path)]),
        "command": shlex.join(["--", sys.executable, "-S", "wait.py", "."]),
    }
    assert main(["submit", "--max-attempts", "1", str(rendered("generic", values))]) == 0
    lab.wait(lambda: len(list(tmp_path.glob("there-*"))) == 4, 60, "not all ranks are there")
    [job] = lab.queue()
    lab.ask("scancel", "--signal=USR2", "--batch", job)
    lab.wait(lambda: not lab.queue(), 60, "the job goes on")
    assert len(list(tmp_path.glob("saved-*"))) == 4
    [chain] = find_chains(tmp_path)
    assert chain.ends()[1].ending == "stopped", [path.read_text() for path in Path("logs").iterdir()]


def small_image(folder):
    """An image without anything of its own: what is in it is bound."""
    for name in ("dev", "etc", "proc", "sys", "mnt", "run", "var", *BOUND):
        (folder / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (folder / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (folder / "etc" / name).touch()
    return folder
