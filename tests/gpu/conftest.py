"""Gives scenarios their device: a GPU where `-m gpu` asks for one, a pretended one where not."""

from pathlib import Path

import pytest
import torch

from tests.gpu.device import Cuda
from tests.helpers.fake_device import fake_devices

FOLDER = Path(__file__).parent
NO_GPU = "there is no GPU that torch can use here"
NOT_ASKED = "needs a GPU: pytest -m gpu"


def asks_for_gpu(config):
    """Return whether the scenarios are to run on a real GPU."""
    return "gpu" in str(config.option.markexpr).replace("not gpu", "")


@pytest.fixture
def device(request):
    """The device, real or pretended."""
    if asks_for_gpu(request.config):
        yield Cuda()
        torch.cuda.synchronize()  # so that an error on the device is told of the scenario that made it
    else:
        with fake_devices() as fake:
            yield fake


@pytest.fixture
def cuda():
    """A real GPU."""
    yield Cuda()
    torch.cuda.synchronize()


@pytest.fixture
def two_gpus():
    """Two real GPUs, which this process does not touch: ranks of their own use them."""


def pytest_collection_modifyitems(config, items):
    """All of this folder are scenarios. From Python 3.12 on a fork of a process with threads is warned of."""
    if asks_for_gpu(config) and not torch.cuda.is_available():
        raise pytest.UsageError(NO_GPU)
    for item in (item for item in items if item.path.parent == FOLDER):
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"))
        if reason := reason_to_skip(config, getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.skip(reason=reason))


def reason_to_skip(config, fixtures):
    """Return why a scenario with these fixtures is not run; "": it is."""
    needs = 2 if "two_gpus" in fixtures else 1 if "cuda" in fixtures else 0
    if not asks_for_gpu(config):
        return NOT_ASKED if needs else ""
    return "needs two GPUs" if needs > torch.cuda.device_count() else ""
