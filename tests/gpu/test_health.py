"""What NVIDIA's or AMD's library says of a real GPU while it trains, and what a sample costs."""

import time

import pytest
import torch

import ckptman
from ckptman.policies.health import HealthSample
from ckptman.runtime.health.devices import open_device
from ckptman.runtime.journal import read_journal
from ckptman.session import run_health
from ckptman.storage.format.paths import journal_path

SAMPLES = 20


@pytest.fixture
def address(cuda):
    """Vendor and PCI address of the GPU."""
    pytest.importorskip("amdsmi" if torch.version.hip else "pynvml")
    torch.zeros(1, device="cuda")
    found = run_health._device()
    assert found is not None
    return found


def test_figures_are_those_of_this_gpu(address):
    device = open_device(*address)
    held = torch.zeros(2**30, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    sample = HealthSample(**device.read())
    assert sample.power_watts is not None
    assert sample.power_limit_watts is not None
    assert 10 < sample.power_watts < 1.5 * sample.power_limit_watts
    assert sample.temperature_celsius is not None
    assert 10 < sample.temperature_celsius < 120
    total = torch.cuda.get_device_properties(0).total_memory
    assert sample.memory_total_bytes == pytest.approx(total, rel=0.1)
    assert sample.memory_used_bytes is not None
    assert held.numel() <= sample.memory_used_bytes <= sample.memory_total_bytes
    assert (sample.ecc_errors, sample.xids) == (0, ())


def test_a_sample_costs_less_than_a_core_can_spare(address):
    device = open_device(*address)
    begun = time.thread_time()
    for _ in range(SAMPLES):
        device.read()
    seconds = (time.thread_time() - begun) / SAMPLES
    print(f"{1000 * seconds:.2f} ms of a core for each sample")
    assert seconds < 0.005 * ckptman.HealthThresholds().period_seconds


def test_a_training_that_keeps_its_gpu_busy_says_so(address, tmp_path):
    model = torch.nn.Linear(4096, 4096, device="cuda")
    x = torch.randn(8192, 4096, device="cuda")
    thresholds = ckptman.HealthThresholds(period_seconds=0.1)
    policy, end = ckptman.AtStep(10**6), time.monotonic() + 8
    with ckptman.Checkpointer(tmp_path, {"model": model}, save_policy=policy, health=thresholds) as checkpointer:
        step = checkpointer.restore()
        while time.monotonic() < end:
            step += 1
            with checkpointer.own_work():
                for _ in range(20):
                    model(x)
            torch.cuda.synchronize()
            checkpointer.step(step)
    told = next(each for each in read_journal(journal_path(tmp_path))[0] if each["event"] == "health")
    assert told["samples"] > 10
    figures = told["figures"]
    assert figures["utilisation"]["median"] > 0.5
    # The kernels count, and not the time that it takes to launch them.
    assert figures["work_seconds"]["median"] > 0.5 * figures["step_seconds"]["median"]
