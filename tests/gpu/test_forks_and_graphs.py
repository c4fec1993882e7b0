"""What a training does besides while saves are made: processes that fork, graphs that are captured and replayed."""

import os
import signal
import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import ckptman
from ckptman.engine.saving.writer import CheckpointWriter
from ckptman.storage.format.paths import step_folder
from tests.gpu.device import BUSY, WAIT, Run, busy, check_saved, open_run


@contextmanager
def forked():
    """Inside, there is a fork of this process, as the worker of a data loader is, which asks nothing of a device."""
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(100)  # also where its parent is gone
        while True:
            signal.pause()
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_fork_after_the_first_save(tmp_path, cuda):
    """A process is forked when the memory for saves is pinned and was written to, and lives on. What the host writes
    into that memory from then on, which are values of tensors on the CPU, leaves what the device writes where it was:
    each of three more checkpoints holds, bit for bit, the state of its step, small tensors and large ones."""
    run, kept = Run(cuda), {}
    with open_run(tmp_path, run.state) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        with forked():
            for step in (2, 3, 4):
                run.train_step(step)
                kept[step] = run.copies()
                checkpointer.save(step)
                checkpointer.wait()
    check_saved(tmp_path, cuda, kept)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_graph_is_captured_while_a_save_is_written(tmp_path, device, monkeypatch, overlap):
    """A graph is captured, in the mode in which the runtime refuses most calls to all threads, from before the save is
    written until it is written. The capture succeeds, the graph does what was captured, and the checkpoint holds, bit
    for bit, the state of its step."""
    capturing, written, original = threading.Event(), threading.Event(), CheckpointWriter._write

    def write(writer, *arguments):
        assert capturing.wait(WAIT)
        try:
            return original(writer, *arguments)
        finally:
            written.set()

    monkeypatch.setattr(CheckpointWriter, "_write", write)
    run, counter = Run(device), device.tensor(torch.zeros(5))
    counter.add_(1)  # kernels are loaded when they are first used, which a capture forbids
    with open_run(tmp_path, run.state, overlap=overlap) as checkpointer:
        run.train_step(1)
        kept = {1: run.copies()}
        checkpointer.save(1)
        with device.capture() as graph:
            counter.add_(1)
            capturing.set()
            assert written.wait(WAIT)
        checkpointer.wait()
        run.train_step(2)
    graph.replay()
    graph.replay()
    assert device.values(counter).tolist() == [3.0] * 5, "captured, not done, and done twice"
    check_saved(tmp_path, device, kept)


def test_overlap_beside_a_graph_that_replays_the_optimizer(tmp_path, device):
    """Steps are replays of a graph in which an optimizer step was captured, so that no hook of the optimizer runs, and
    the device is busy when each save begins. With overlap such a save is refused with a ConfigError, or its checkpoint
    holds the parameters of its step, all of one step."""
    model = nn.Module()
    model.weight = nn.Parameter(device.tensor(torch.zeros(1_000_000)))
    model.weight.grad = device.tensor(torch.ones(1_000_000))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.step()
    done = []
    with open_run(tmp_path, {"model": model, "optimizer": optimizer}, overlap=True) as checkpointer:
        with device.capture() as graph:
            optimizer.step()
        for step in range(1, 5):
            graph.replay()
            busy(device, BUSY / 2)
            try:
                checkpointer.save(step)
            except ckptman.ConfigError as error:
                assert "overlap" in str(error)
                break
            done.append(step)
    for step in done:
        found = {"weight": torch.zeros(1_000_000)}
        ckptman.load({"model": found}, tmp_path / step_folder(step))
        assert found["weight"].unique().tolist() == [-1.0 - step]
