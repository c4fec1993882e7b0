"""Directories for a check of `ckptman doctor` alone."""

from pathlib import Path

from ckptman.storage.io.isolated_process import run_isolated
from ckptman.tools.doctor.finding import Place
from ckptman.tools.doctor.second_client import HERE

SIZE = 8 * 1024 * 1024


def place_at(folder, **more):
    return Place(str(folder), Path(folder), **{"mount": None, "second": HERE, "size_bytes": SIZE, **more})


def isolated(check, folder, **more):
    """Run a check in a process of its own, as doctor does."""
    return run_isolated(lambda: check(place_at(folder, **more)), 60)
