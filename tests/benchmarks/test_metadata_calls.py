"""What a save, a restore and the like ask of a file system: bounded, however many checkpoints the root holds."""

import os
import shutil

import pytest

from benchmarks.metadata_calls import PARTS, count

FEW, MANY = 40, 240

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("strace") is None and os.environ.get("CKPTMAN_TEST_MOUNTS") != "must", reason="there is no strace"
    ),
]


@pytest.fixture(scope="module")
def calls():
    """The calls of each part in a root with few checkpoints, and in one with many."""
    return count(FEW), count(MANY)


@pytest.mark.parametrize(
    ("part", "most"),
    [("restore", 60), ("restore(step=)", 60), ("save", 100), ("save, and one is pruned", 150)],
)
def test_what_does_not_grow_with_the_root(calls, part, most):
    few, many = (each[part] for each in calls)
    assert 10 < few <= most
    assert many <= few + 5, "a listing may take a few calls more"


@pytest.mark.parametrize(
    ("part", "each", "besides"),
    [("opening a run", 1, 120), ("Run.latest", 1, 50), ("ckptman list", 20, 100), ("ckptman prune, one goes", 20, 250)],
)
def test_what_is_asked_of_each_checkpoint(calls, part, each, besides):
    """One open, of its manifest; where all files are looked at, one for each of them (11 here), and the folder's."""
    few, many = (found[part] for found in calls)
    assert many - few <= each * (MANY - FEW) + 5
    assert many <= each * MANY + besides


def test_every_part_is_counted(calls):
    assert all(found[part] > 0 for found in calls for part in PARTS)
