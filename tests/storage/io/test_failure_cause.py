"""What is the environment's fault, in one table: of an attempt, of a load, of a device."""

import errno
import http.client
import subprocess
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

import ckptman
from ckptman.engine.comm.control_group import Failure, RankFailed
from ckptman.storage.io.failure_cause import ELSEWHERE, UNREADABLE, cause_of, is_broken_device, trouble_of_load


class OutOfMemoryError(RuntimeError):
    """As torch calls its own, whose home depends on its version."""


def after(error, **other):
    """An error with its cause, or the one that was being handled."""
    for name, each in other.items():
        setattr(error, f"__{name}__", each)
    return error


def of_a_client(module, name):
    error = type(name, (Exception,), {"__module__": module})("no answer")
    return error


OUTAGES = [
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ESTALE, "Stale file handle"),
    ConnectionResetError("peer"),
    MemoryError(),
    OutOfMemoryError("CUDA out of memory"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1, unhandled system error"),
    RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:1"),
    RuntimeError("DataLoader worker (pid(s) 77) exited unexpectedly"),
    torch.distributed.DistNetworkError("no host"),
    after(ValueError("no batch"), cause=OSError(errno.EIO, "Input/output error")),
    after(ckptman.CkptmanError("rank 3 failed"), cause=RankFailed(Failure(3, "OSError: no", "", None, errno.EIO))),
    ckptman.RankLostError("gone"),
    after(ValueError("no batch"), context=OSError(errno.EIO, "Input/output error")),
    after(ValueError("no batch"), context=ConnectionResetError("peer")),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("can't start new thread"),
    RuntimeError("DataLoader timed out after 30 seconds"),
    RuntimeError("unable to open shared memory object </torch_1>: Too many open files (24)"),
    BrokenProcessPool("a process died"),
    EOFError("end of file"),
    subprocess.TimeoutExpired("rsync", 5),
    http.client.IncompleteRead(b""),
    of_a_client("botocore.exceptions", "EndpointConnectionError"),
    of_a_client("wandb.errors", "CommError"),
    KeyboardInterrupt(),
    SystemExit(1),
]


@pytest.mark.parametrize("error", OUTAGES, ids=lambda error: type(error).__name__)
def test_an_outage_is_the_environments(error):
    assert cause_of(error) == "environment"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("igloo: loss is NaN"),
        RuntimeError("igloo of shape [2, 3]"),
        RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"),
        after(FloatingPointError("nan"), context=FileNotFoundError(errno.ENOENT, "no cache")),
        type("Odd", (Exception,), {"exceptions": None, "__module__": None})(),
        type("Mute", (RuntimeError,), {"__str__": lambda self: 1 / 0})(),
        ValueError("loss is NaN"),
        IndexError(5),
        RuntimeError("CUDA error: device-side assert triggered"),
        KeyError("x"),
    ],
    ids=repr,
)
def test_what_the_program_raises_is_its_own(error):
    assert cause_of(error) == "program"


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("No CUDA GPUs are available: no CUDA-capable device is detected", True),
        ("Unable to determine the device handle: GPU is lost, it has fallen off the bus", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("CUDA error: device-side assert triggered", False),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_errors_of_a_device_and_errors_of_a_program(text, bad):
    assert is_broken_device(RuntimeError(text)) is bad
    assert not is_broken_device(ValueError(text))


@pytest.mark.parametrize(
    ("text", "code", "trouble"),
    [
        ("MemoryError: ", None, "shortage"),
        ("_ArrayMemoryError: Unable to allocate 8 GiB", None, "shortage"),
        ("OutOfMemoryError: CUDA out of memory", None, "shortage"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", None, "shortage"),
        ("AcceleratorError: CUDA error: out of memory", None, "shortage"),
        ("OSError: Too many open files", errno.EMFILE, "shortage"),
        ("TimeoutError: Connection timed out", errno.ETIMEDOUT, "away"),
        ("OSError: Cannot send after transport endpoint shutdown", errno.ESHUTDOWN, "away"),
        ("PermissionError: Permission denied", errno.EACCES, "denied"),
        ("AcceleratorError: CUDA error: device-side assert triggered", None, "device"),
        ("RuntimeError: HIP error: unspecified launch failure", None, "device"),
        ("OSError: Input/output error", errno.EIO, None),
        ("OSError: Stale file handle", errno.ESTALE, None),
        ("FileNotFoundError: no such file", errno.ENOENT, None),
        ("ValueError: MemoryError", None, None),
    ],
)
def test_what_keeps_a_rank_from_loading(text, code, trouble):
    assert trouble_of_load(text, code) == trouble


def test_an_error_of_reading_is_of_the_bytes_or_of_something_else():
    assert not set(ELSEWHERE) & set(UNREADABLE)
