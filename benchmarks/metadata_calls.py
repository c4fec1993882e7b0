"""How many metadata calls a save, a restore, a list and a prune make in a root with many checkpoints.

    python benchmarks/metadata_calls.py [--checkpoints 2000] [--show PART]

On a parallel file system each is a message to a server: an open, a look at a name, a listing, a rename. Reads, writes
and looks at an open file are not counted. Traced by strace, one rank, checkpoints of 4 ranks (12 files each).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

PARTS = (
    "opening a run",
    "restore",
    "restore(step=)",
    "save",
    "save, and one is pruned",
    "Run.latest",
    "ckptman list",
    "ckptman prune, one goes",
)
_MARK = "/part-"
_CALL = re.compile(r"^(?:\d+ +)?(?P<name>\w+)\((?P<rest>.*)$")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkpoints", type=int, default=2000)
    parser.add_argument("--show", choices=PARTS, help="print the calls of this part")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        work(options.child, options.checkpoints)
        return
    lines = trace(options.checkpoints)
    for part in PARTS:
        print(f"{part:>26}: {len(lines[part]):,}")
    if options.show is not None:
        print(*lines[options.show], sep="\n")


def count(checkpoints: int) -> dict[str, int]:
    """The calls of each part in a root that holds so many checkpoints."""
    return {part: len(lines) for part, lines in trace(checkpoints).items()}


def trace(checkpoints: int) -> dict[str, list[str]]:
    """The lines of strace of each part."""
    with tempfile.TemporaryDirectory() as scratch:
        root, log = Path(scratch, "root"), Path(scratch, "log")
        fill(root, checkpoints)
        child = [sys.executable, __file__, "--child", str(root), "--checkpoints", str(checkpoints)]
        calls = "trace=%file,getdents64,?utimensat"
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(
            ["strace", "-f", "-qq", "-y", "-s", "300", "-e", calls, "-o", log, *child],
            check=True,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        return sorted_by_part(log.read_text().splitlines(), str(root))


def sorted_by_part(lines: Iterable[str], root: str) -> dict[str, list[str]]:
    """The metadata calls that are about a root, by the part that made them."""
    parts: dict[str, list[str]] = {part: [] for part in PARTS}
    part = ""
    for line in lines:
        found = _CALL.match(line)
        if found is None:
            continue
        if _MARK in line:
            part = line.partition(_MARK)[2].partition('"')[0]
        elif part in parts and (root in line or "/proc/self/fd/" in line) and not re.search(r'>, ""', found["rest"]):
            parts[part].append(line)
    return parts


def fill(root: Path, checkpoints: int) -> None:
    """Make so many checkpoints, of steps 100, 200 and so on. The last one can be loaded."""
    import torch

    import ckptman
    from tests.helpers.checkpoints import commit

    for number in range(1, checkpoints):
        commit(root, 100 * number, ranks=4, sequence=number, metrics={"loss": 3 / number})
    with ckptman.Checkpointer(
        root, {"x": torch.zeros(64)}, save_policy=ckptman.OnStop(), deadline=None
    ) as checkpointer:
        checkpointer._ready = True  # what `commit` made could not be loaded
        checkpointer.save(100 * checkpoints)


def work(root: Path, checkpoints: int) -> None:
    """Do each part once. What is traced."""
    import torch

    import ckptman
    from ckptman.cli.app import main as ckptman_command

    def mark(part: str) -> None:
        os.access(f"{_MARK}{part}", os.F_OK)

    last = 100 * checkpoints
    rules = ckptman.KeepLast(2) | ckptman.KeepEvery(steps=100)
    options = {"save_policy": ckptman.OnStop(), "retention": rules, "deadline": None, "async_save": False}
    # Once for all that is only done the first time, such as imports.
    with ckptman.Checkpointer(root.with_name("other"), {"x": torch.zeros(64)}, **options) as checkpointer:
        checkpointer.save(1)
    mark("opening a run")
    with ckptman.Checkpointer(root, {"x": torch.zeros(64)}, **options) as checkpointer:
        mark("restore")
        assert checkpointer.restore() == last
        mark("")
        checkpointer.save(last + 1)
        mark("save")
        checkpointer.save(last + 2)
        mark("save, and one is pruned")
        checkpointer.save(last + 3)
        checkpointer._saver.retention._remover.drain()
        mark("")
    assert not (root / f"step-{last + 1:010d}").exists()
    with ckptman.Checkpointer(root, {"x": torch.zeros(64)}, **options) as checkpointer:
        mark("restore(step=)")
        assert checkpointer.restore(step=last) == last
        mark("")
    mark("Run.latest")
    assert ckptman.Run(root).latest is not None
    for part, line in {
        "ckptman list": ["list", str(root)],
        "ckptman prune, one goes": ["prune", str(root), "--keep-last", "1", "--keep-every", "100"],
    }.items():
        mark(part)
        code = ckptman_command(line)
        mark("")
        assert not code, code


if __name__ == "__main__":
    main()
