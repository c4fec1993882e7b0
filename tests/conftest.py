"""What all tests begin with."""

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from ckptman.storage.io.mount import NFS, family_of, find_mount, read_mounts
from tests.helpers import forkserver
from tests.helpers.leaks import Leaks

# No time limit for each example: the machine may be busy. `timeout` in pyproject.toml is that of a test.
settings.register_profile("ckptman", deadline=None, print_blob=True)
settings.load_profile("ckptman")

TESTS = Path(__file__).parent

# A shell that starts a command in the background has it ignore Ctrl-C, and nohup SIGHUP, which its children inherit: a
# test of a signal would then wait for ever.
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)


@pytest.fixture(autouse=True)
def _nothing_is_left(request):
    """What a test leaves behind in this process would be found by those after it."""
    marker = request.node.get_closest_marker("leaves")
    before = Leaks(marker.args if marker else ())
    yield
    assert before.left() == []


@pytest.fixture
def forked(monkeypatch):
    """Let ckptman fork the processes that it starts as `sys.executable`: importing torch takes seconds."""
    monkeypatch.setattr(sys, "executable", str(forkserver.programs() / "python"))


def pytest_addoption(parser):
    parser.addoption("--write-seconds", action="store_true", help="write what each file took to tests/helpers")


def pytest_configure(config):
    if problem := _unfit(config.option.basetemp or tempfile.gettempdir()):
        raise pytest.UsageError(problem)
    forkserver.own()
    if config.option.write_seconds and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Seconds())


def _unfit(temporary):
    """Why the tests cannot run on this machine; None if they can."""
    if not os.access("/dev/shm", os.W_OK):
        return "/dev/shm is not writable, and data loaders with workers need it: mount a tmpfs there"
    mount = find_mount(read_mounts(), str(temporary))
    if mount is not None and family_of(mount) is NFS:
        return f"{temporary} is on NFS, which keeps open files that were deleted: set TMPDIR to a local directory"
    return None


def pytest_unconfigure():
    forkserver.disown()


class _Seconds:
    """Collects what tests took, those of all workers."""

    def __init__(self):
        self.took = []

    def pytest_runtest_logreport(self, report):
        self.took.append((report.nodeid, report.duration))

    def pytest_sessionfinish(self, exitstatus):
        from tests.helpers import lanes

        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            lanes.write(self.took)


def pytest_ignore_collect(collection_path, config):
    """Under `-m gpu`, collect that folder alone: the others need packages that a machine with a GPU may lack."""
    is_other = collection_path.parent == TESTS and collection_path.name != "gpu"
    return True if is_other and config.option.markexpr == "gpu" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from tests.helpers.lanes import FilesByTime

    return FilesByTime(config, log)


def pytest_collection_modifyitems(config, items):
    """Mark what needs a real Slurm as slow, and with several workers let the longest begin first."""
    for item in items:
        if item.path.is_relative_to(TESTS / "slurm"):
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):
        from tests.helpers.lanes import Order

        order = Order()
        items.sort(key=lambda item: order.key(item.nodeid))
