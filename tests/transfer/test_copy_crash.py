"""A copy or a drain dies, is run again to its end, and then comes a power cut: what counts by then is durable.

The one that died made things visible that it had not flushed yet. The next one finds them, and may not take it for
granted that they stay.
"""

import contextlib
import random
import shutil
from functools import partial
from unittest import mock

import pytest

from ckptman.catalog import reader_lease as lease
from ckptman.catalog import writer_lock as owner
from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.catalog import Catalog
from ckptman.catalog.prune import execute, plan_prune
from ckptman.catalog.tiers import open_tier, write_tiers
from ckptman.io.durable_files import DISK
from ckptman.policies.retention import KeepLast
from ckptman.policies.tiers import Tier
from ckptman.transfer.copy import CopyOptions, copy_checkpoint
from ckptman.transfer.drain import carry_out, plan_drain, prepare
from tests.faults.powercut import Flushes, survive, watched
from tests.helpers.checkpoints import commit
from tests.helpers.faulty_disk import Death, FaultyDisk, faults, holds

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def dead(monkeypatch):
    """Whoever died in this process is dead, although its pid is alive, and is not watched for half a minute."""
    for module in (owner, lease):
        monkeypatch.setattr(module, "process_lives", lambda claimant: False)
    monkeypatch.setattr(owner, "PATIENCE_SECONDS", 0)


def copy(world, disk):
    for entry in Catalog(world / "root").complete():
        copy_checkpoint(entry, LocalBackend(world / "near", disk), CopyOptions(threads=1))


def drain(world, disk):
    root = world / "root"
    write_tiers(root, [Tier(world / "near")], disk)
    plan = plan_drain(root, [Tier(world / "near")])
    prepare(root, plan)
    with mock.patch("ckptman.transfer.drain.open_tier", partial(open_tier, disk=disk)):
        for each in carry_out(root, plan, lambda task: contextlib.nullcontext(CopyOptions(threads=1))):
            assert each.error is None


@pytest.mark.parametrize("act", [copy, drain])
def test_what_was_begun_again_and_finished_outlives_a_power_cut(act, tmp_path):
    commit(tmp_path / "before" / "root", 100)
    commit(tmp_path / "before" / "root", 200)
    whole = holds(tmp_path / "before" / "root")
    struck = 0
    for number, fault in enumerate(faults(when=("before",))):
        world, memory = tmp_path / f"world-{number}", tmp_path / f"memory-{number}"
        shutil.copytree(tmp_path / "before", world)
        disk = FaultyDisk(fault)
        with watched(Flushes(world, memory)):
            with contextlib.suppress(Death):
                act(world, disk)
            act(world, DISK)
            if act is drain:
                execute(world / "root", plan_prune(world / "root", KeepLast(1)), "0123abcd-1")
        left = survive(world, memory, tmp_path / f"left-{number}", "everything", random.Random(number))
        assert holds(left / "near") == whole, fault
        assert holds(left / "root").items() <= whole.items(), fault
        struck += disk.struck
        if not disk.struck:
            break
        shutil.rmtree(world)
        shutil.rmtree(left)
    assert struck > 30
