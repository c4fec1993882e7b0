"""Saves to the memory of the node from a device: what is copied there is the checkpoint, and goes back to a device."""

import signal
import threading

import pytest
import torch

import ckptman
from ckptman.engine.saving.staging import Stager
from ckptman.policies import EverySteps
from ckptman.storage.io.threads import Worker
from tests.engine.dcp.test_values import differing
from tests.engine.saving.test_staging import file_of
from tests.gpu.device import BUSY, Cuda, Run, busy, check_saved, open_run, values_of
from tests.gpu.test_costs import MIB, staging_rates
from tests.helpers.node_memory import shm
from tests.helpers.ranks import say, start_ranks

__all__ = ["shm"]

STEPS = 12
LIMIT = 100.0
ONE_COPY = "ignore:checkpoints in memory have 1 copy"


def tier(shm):
    return ckptman.MemoryTier(EverySteps(2), path=shm)


@pytest.mark.filterwarnings(ONE_COPY)
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_bit_equal_in_memory(tmp_path, shm, device, overlap):
    """Six saves to memory, each while the device is busy: what lies in memory holds, bit for bit, what parameters,
    buffers, both optimizers and a tensor in host memory were, although the next step changes all of it."""
    run = Run(device)
    options = {"save_policy": EverySteps(100), "memory": tier(shm), "overlap": overlap}
    with open_run(tmp_path / "root", run.state, **options) as checkpointer:
        checkpointer.restore()
        for step in range(1, STEPS + 1):
            run.train_step(step)
            busy(device, BUSY / 4)
            kept = run.copies()
            checkpointer.step(step)
            run.train_step(step + 100)
            assert checkpointer._memory is not None
            checkpointer._memory.saves.wait()
            if step % 2 == 0:
                check_saved(checkpointer._memory._node.path_of(step).parent, device, {step: kept})


def train_until_killed(root, shm):
    run = Run(Cuda())
    with open_run(root, run.state, save_policy=EverySteps(100), memory=tier(shm)) as checkpointer:
        checkpointer.restore()
        for step in range(1, STEPS + 1):
            run.train_step(step)
            checkpointer.step(step)
            assert checkpointer._memory is not None
            checkpointer._memory.saves.wait()
        torch.save(values_of(Cuda(), run.tensors()), root / "expected.pt")
        say("there")
        threading.Event().wait()


@pytest.mark.filterwarnings(ONE_COPY)
def test_a_killed_run_goes_on_from_memory_on_the_gpu(tmp_path, shm, cuda):
    """A run that saves to memory every second step is killed with SIGKILL while its slots are pinned. The next process
    goes on from its last step, nothing being on disk, with each tensor on the GPU as it was, bit for bit."""
    with start_ranks(1, train_until_killed, tmp_path, shm, limit=LIMIT) as ranks:
        ranks.await_message(0, "there")
        ranks.kill(0, signal.SIGKILL)
        ranks.join()
    assert not list(tmp_path.glob("step-*"))
    run = Run(cuda, seed=1)
    with open_run(tmp_path, run.state, save_policy=EverySteps(100), memory=tier(shm)) as checkpointer:
        assert checkpointer.restore() == STEPS
        assert differing(values_of(cuda, run.tensors()), torch.load(tmp_path / "expected.pt")) == []


def test_staging_into_memory_is_as_fast_as_a_copy_into_pinned_memory(shm, cuda, capsys):
    """1 GiB in 16 tensors is staged into a file in memory, and copied into pinned memory, in turns. By the medians of
    seven rounds a stall is at most 1.15 times the copy. The figure is printed."""
    file, memory = file_of({"x": {str(number): torch.rand(16 * MIB, device="cuda") for number in range(16)}})
    numbers = iter(range(9))
    with Worker("saves") as saves:
        stager = Stager(saves)
        stager.new_file = lambda: shm / f"slot-{next(numbers)}"
        staging, raw = staging_rates(stager, file, memory)
        assert stager._slots[0].path is not None
        stager.close()
    with capsys.disabled():
        print(
            f"\nstaging into memory {staging:.1f} GB/s, raw pinned copy {raw:.1f} GB/s: {raw / staging:.2f} of its time"
        )
    assert raw / staging <= 1.15
