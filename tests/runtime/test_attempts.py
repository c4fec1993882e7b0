"""A number that anything durable knows of an attempt is never given again."""

import shutil

import pytest

import ckptman
from ckptman.runtime.attempts import highest_attempt
from ckptman.storage.format.manifest import read_manifest
from ckptman.storage.format.paths import DOT, journal_path, outcome_path, step_folder


def attempt(root, **options):
    """One attempt, which saves a step; its number."""
    with ckptman.Checkpointer(root, {"n": 0}, save_policy=100, deadline=None, signals=None, **options) as checkpointer:
        checkpointer.save(checkpointer.restore() + 1)
        return checkpointer.attempt


@pytest.mark.parametrize("lost", [[journal_path], [outcome_path], [journal_path, outcome_path]])
def test_what_is_left_tells_the_number(tmp_path, lost):
    assert [attempt(tmp_path) for _ in range(3)] == [1, 2, 3]
    for path in lost:
        path(tmp_path).unlink()
    assert attempt(tmp_path) == 4


def test_each_thing_alone_tells_it(tmp_path):
    for _ in range(3):
        attempt(tmp_path / "run")
    manifest = read_manifest(tmp_path / "run" / step_folder(3))
    for keep in (journal_path, outcome_path):
        root = tmp_path / keep.__name__
        (root / DOT).mkdir(parents=True)
        shutil.copy(keep(tmp_path / "run"), keep(root))
        assert highest_attempt(root, []) == 3
    assert highest_attempt(tmp_path / "none", [manifest.attempt]) == 3
    assert highest_attempt(tmp_path / "none", []) == 0


def test_a_root_that_was_brought_back_from_a_tier(tmp_path):
    tiers = [ckptman.Tier(tmp_path / "tier")]
    for _ in range(3):
        attempt(tmp_path / "run", tiers=tiers)
    ckptman.run.Run(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert attempt(tmp_path / "run", tiers=tiers) == 4


def test_a_journal_of_nonsense_tells_nothing(tmp_path):
    attempt(tmp_path)
    with journal_path(tmp_path).open("a") as file:
        file.write('{"time": 1, "event": "step", "attempt": 99999999999}\n{"event": "x", "attempt": true}\nnot JSON\n')
    assert attempt(tmp_path) == 2
