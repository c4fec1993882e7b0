"""A small share of the fault campaign (`make faults` is all of it), and proof that it notices a broken library."""

import random
from pathlib import Path

import pytest

from ckptman.errors import CorruptError
from ckptman.storage.io.durable_files import DISK
from tests.faults.__main__ import KINDS, report, run_apart
from tests.faults.limits import in_child
from tests.faults.mutants import MUTANTS
from tests.faults.powercut import Flushes, survive, watched
from tests.faults.tally import FAILURES, Tally, flaw_of, flaw_of_text, seed_of_commit

SEED = seed_of_commit()
SHARES = {"disk": 0.05, "ranks": 0.005, "fuzz": 0.004, "user": 0.004, "kill": 0.002}
"""Of the other kinds: 0.005."""
NOTICED = {
    "digests of blocks are not looked at": 0.03,
    "folders are not flushed": 0.02,
    "errors do not say what to do": 0.02,
    "what JSON cannot be is not caught": 0.02,
}
"""Mutants, and what share of their kind notices them: one for each way of looking."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", random.Random(SEED).sample(list(KINDS), len(KINDS) // 2))
def test_a_share_of_each_kind(kind):
    """Of half of them, by the commit. In a process of its own, which has no threads and process groups of others."""
    tally = run_apart(kind, SEED, SHARES.get(kind, 0.005), "")
    assert tally.good, f"seed {tally.seed}\n{report([tally])}"
    assert tally.injected == tally.refused + tally.harmless > 0, report([tally])


@pytest.mark.slow
def test_a_broken_library_is_noticed():
    """Broken in one way, by the commit; `python -m tests.faults --mutants` tries them all."""
    mutant = random.Random(SEED).choice(list(NOTICED))
    broken = MUTANTS[mutant]
    tally = run_apart(broken.kind, 1, NOTICED[mutant], mutant)
    assert any(tally.failures[each] for each in broken.failures), f"{mutant}\n{report([tally])}"


def test_every_mutant_breaks_something_that_is_there():
    for name in MUTANTS:
        end = in_child(MUTANTS[name].break_it, 10)
        assert end.in_order, f"{name}: {end.error}"


def test_a_power_cut_after_a_kill_takes_what_neither_process_has_flushed(tmp_path):
    world, memory = tmp_path / "world", tmp_path / "memory"
    world.mkdir()
    (world / "old").write_bytes(b"old")
    with watched(Flushes(world, memory)):
        DISK.write_file(world / "removed", b"whole")
        DISK.sync_folder(world)
        (world / "removed").unlink()
        (world / "written").write_bytes(b"not flushed")
    with watched(Flushes(world, memory)):
        (world / "new").write_bytes(b"short")  # it may get the inode number of what was removed
        left = survive(world, memory, tmp_path / "without", "everything", random.Random(1))
        assert {path.name: path.read_bytes() for path in left.iterdir()} == {"old": b"old", "removed": b"whole"}
        DISK.sync_folder(world)
        left = survive(world, memory, tmp_path / "with", "everything", random.Random(1))
    assert {path.name for path in left.iterdir()} == {"old", "new", "written"}
    assert (left / "old").read_bytes() == b"old"
    assert not any((left / "new").read_bytes() + (left / "written").read_bytes())


def test_what_an_error_has_to_say():
    assert flaw_of(CorruptError("/root/step-1/index.json was cut: restore an older checkpoint")) is None
    assert flaw_of(ValueError("/root/step-1/index.json was cut: restore an older checkpoint")) is not None
    assert "path" in (flaw_of_text("something is wrong: restore an older checkpoint") or "")
    assert "what to do" in (flaw_of_text("/root/step-1/index.json was cut") or "")


def test_a_tally_counts_every_class_of_failure():
    tally = Tally("x", 1)
    for failure in FAILURES:
        with tally.fault("case"):
            tally.fail(failure, "why")
    with tally.fault("one that raises"):
        raise RuntimeError("not caught")
    assert not tally.good
    assert tally.failures["other"] == 2
    assert Tally.from_dict(tally.as_dict()).as_dict() == tally.as_dict()
    assert "| **in all** | 7 | 0 | 0 | 1 | 1 | 1 | 1 | 1 | 2 | 0 |" in report([tally])


def test_the_corpus_is_small():
    kept = [path for path in (Path(__file__).parent / "corpus").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in kept) < 200_000
