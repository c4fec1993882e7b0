"""What saves cost on a GPU: the time of a staged copy, and memory."""

import statistics
import time

import psutil
import torch
from torch import nn

from ckptman.engine.saving.staging import Stager
from ckptman.storage.io.threads import Worker
from tests.engine.saving.test_staging import file_of
from tests.gpu.device import open_run

ROUNDS = 7
MIB = 1 << 20


def raw_copy_seconds(memory, pinned):
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for each, target in zip(memory, pinned):
        target.copy_(each, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def staging_rates(stager, file, memory):
    """GB/s of staging, and of a copy into pinned memory with nothing else done, in turns: medians of seven rounds."""
    pinned = [torch.zeros(each.shape, pin_memory=True) for each in memory]
    raw, staging = [], []
    stager.prepare(file, memory)
    stager.wait()
    stager.stage(file, memory).release()
    for _ in range(ROUNDS):
        raw.append(raw_copy_seconds(memory, pinned))
        begun = time.perf_counter()
        staged = stager.stage(file, memory)
        staged.wait()
        staging.append(time.perf_counter() - begun)
        staged.release()
    size = sum(each.nbytes for each in memory) / 1e9
    return size / statistics.median(staging), size / statistics.median(raw)


def test_staging_is_as_fast_as_a_copy_into_pinned_memory(cuda, capsys):
    """1 GiB in 16 tensors is staged, and copied into pinned memory with nothing else done, in turns. By the medians of
    seven rounds staging has at least 0.9 of the rate of the copy. The figure is printed."""
    file, memory = file_of({"x": {str(number): torch.rand(16 * MIB, device="cuda") for number in range(16)}})
    with Worker("saves") as saves:
        stager = Stager(saves)
        staging, raw = staging_rates(stager, file, memory)
        stager.close()
    with capsys.disabled():
        print(f"\nstaging {staging:.1f} GB/s, raw pinned copy {raw:.1f} GB/s: {staging / raw:.2f}")
    assert staging / raw >= 0.9


def test_memory_is_flat_over_ten_saves(tmp_path, cuda):
    """Ten saves with overlap of 192 MiB (a model and AdamW), a step between them. From the third on, the memory that
    torch has of the GPU does not grow by a byte, and that of the process on the host by less than 32 MiB."""
    model = nn.Linear(4096, 4096, bias=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    process, on_gpu, on_host = psutil.Process(), [], []
    x = torch.ones(8, 4096, device="cuda")
    with open_run(tmp_path, {"model": model, "optimizer": optimizer}, overlap=True) as checkpointer:
        for step in range(1, 11):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            checkpointer.save(step)
            checkpointer.wait()
            torch.cuda.synchronize()
            on_gpu.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
            on_host.append(process.memory_info().rss)
    assert len(set(on_gpu[2:])) == 1, on_gpu
    assert max(on_host[2:]) - on_host[2] < 32 * MIB, [size // MIB for size in on_host]
