"""Two ranks on two GPUs: which of them they touch, and how a run ends in which one rank fails or stands still."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptman
from tests.gpu.bundled import make_tokens, start_ranks
from tests.gpu.device import open_run
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("two_gpus")]

NCCL_TIMEOUT_SECONDS = 90


def save_and_restore(root):
    """Which GPUs this rank has a context on, after saves with overlap and a restore."""
    import torch.distributed as dist

    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Linear(700, 900).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "rng": ckptman.RNGState(), "x": torch.zeros(9, device=device)}
    for _ in range(2):
        with open_run(Path(root), state, overlap=True) as checkpointer:
            start = checkpointer.restore()
            for step in range(start + 1, start + 4):
                optimizer.zero_grad()
                model(torch.ones(4, 700, device=device)).square().mean().backward()
                optimizer.step()
                checkpointer.save(step)
    assert start == 3
    return [torch._C._cuda_hasPrimaryContext(number) for number in range(2)]


def test_no_rank_makes_a_context_on_the_gpu_of_another(tmp_path):
    """Each of two ranks has a GPU of its own, and saves with overlap and restores. All that copies, waits and uploads
    in threads behind it leaves the other GPU alone: a context there would take half a GB of it."""
    assert run_ranks(2, save_and_restore, str(tmp_path), limit=100.0) == [[True, False], [False, True]]


def test_a_rank_that_runs_out_of_memory_ends_the_run_with_its_traceback(tmp_path):
    """Rank 1 of the bundled loop asks for more memory than its GPU has, while rank 0 waits for it in a collective. The
    run under torchrun is over in less than 60 s, and what it printed has the traceback of rank 1."""
    with start_ranks(2, make_tokens(tmp_path / "tokens"), tmp_path / "run", "oom=3", run__steps=10**6) as run:
        code = run.wait(200)
        ended = time.time()
        text = run.output()
        assert code not in (None, 0), text
        assert ended - run.trouble_began() < 60, text
    assert "Traceback (most recent call last)" in text
    assert "OutOfMemoryError" in text
    assert "in _oom" in text, "where it was"


def test_a_rank_that_stands_still_is_told_of_before_nccl_aborts(tmp_path):
    """Rank 1 of the bundled loop is stopped by SIGSTOP, and rank 0 waits for it in a collective, which NCCL would abort
    after 90 s. Before that the watchdog says that rank 1 is not heard of."""
    folder = tmp_path / "run"
    changes = {"run__steps": 10**6, "run__timeout_seconds": NCCL_TIMEOUT_SECONDS}
    with start_ranks(2, make_tokens(tmp_path / "tokens"), folder, "freeze=3", **changes) as run:
        code = run.wait(200)
        text = run.output()
        assert code not in (None, 0), text
    before, _, _ = text.partition("Watchdog caught collective operation timeout")
    assert "not heard of: rank 1; it goes on" in before, text
