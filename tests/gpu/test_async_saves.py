"""Saves in the background on a device: what is saved is the state of its step, whatever stream does what meanwhile."""

import time

import torch
from torch import nn

import ckptman
from ckptman.storage.format.paths import step_folder
from tests.engine.dcp.test_values import differing
from tests.gpu.device import BUSY, Run, busy, check_saved, open_run, saved, values_of

STEPS = 6
NOT_BEGUN = "the device is still busy, and the copy has not begun"


def train_and_save(root, device, **options):
    run, kept = Run(device), {}
    with open_run(root, run.state, **options) as checkpointer:
        for step in range(1, STEPS + 1):
            run.train_step(step)
            busy(device, BUSY / 4)
            kept[step] = run.copies()
            checkpointer.save(step)
    check_saved(root, device, kept)


def test_bit_equal_after_an_async_save(tmp_path, device):
    """A save after each of six steps, with no pause between them: each checkpoint holds, bit for bit, what parameters,
    buffers, both optimizers and a tensor in host memory were at its step, although the next step changes all of it."""
    train_and_save(tmp_path, device)


def test_bit_equal_with_overlap(tmp_path, device):
    """The same with `overlap=True`: the copy runs under the next forward and backward pass, and the next optimizer step
    waits for it on the device."""
    train_and_save(tmp_path, device, overlap=True)


def test_bit_equal_after_a_save_that_blocks(tmp_path, device):
    """Saves in the training thread, by `async_save=False` and by `ckptman.save`, right after a step that the device has
    not done yet: both hold, bit for bit, the state after it."""
    run = Run(device)
    with open_run(tmp_path, run.state, async_save=False) as checkpointer:
        busy(device)
        run.train_step(1)
        kept = {1: run.copies()}
        checkpointer.save(1)
    busy(device)
    run.train_step(2)
    kept[2] = run.copies()
    ckptman.save(run.state, tmp_path / step_folder(2))
    run.train_step(3)
    check_saved(tmp_path, device, kept)


def test_a_save_with_overlap_does_not_wait_for_the_device(tmp_path, device):
    """The device is still busy with the steps before when a save with overlap begins. Where all that is saved is what
    the optimizers update, the call returns long before the device is done, and what is saved is the state after it."""
    model = nn.Module()
    model.weight = nn.Parameter(device.tensor(torch.zeros(300_000)))
    model.weight.grad = device.tensor(torch.ones(300_000))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    optimizer.step()
    with open_run(tmp_path, {"model": model, "optimizer": optimizer}, overlap=True) as checkpointer:
        checkpointer.save(0)  # what the first save takes besides is not what this is about
        checkpointer.wait()
        device.synchronize()
        busy(device, 4 * BUSY)
        optimizer.step()
        begun = time.monotonic()
        checkpointer.save(1)
        seconds = time.monotonic() - begun
        optimizer.step()
    assert seconds < 2 * BUSY, f"the call took {seconds:.2f} s"
    found = {"weight": torch.zeros(300_000)}
    ckptman.load({"model": found}, tmp_path / step_folder(1))
    assert found["weight"].unique().tolist() == [-1 - 1.5]


def test_a_training_on_a_stream_of_its_own(tmp_path, device):
    """All of the training runs on a stream that is not the default one. What that stream has yet to do when the save
    begins comes first, and what it is told after the save comes later: the checkpoint holds the value between them."""
    own = device.Stream()
    tensors = {"a": device.tensor(torch.zeros(100_000)), "b": device.tensor(torch.zeros(7))}
    own.wait_stream(device.current_stream())
    with open_run(tmp_path, {"x": tensors}) as checkpointer, device.stream(own):
        for step in (1, 2, 3):
            busy(device, BUSY / 2)
            for each in tensors.values():
                each.fill_(step)
            checkpointer.save(step)
            for each in tensors.values():
                each.fill_(-1)
    for step in (1, 2, 3):
        found = saved(tmp_path, step, tensors)
        assert {name: each.unique().tolist() for name, each in found.items()} == {"a": [step], "b": [step]}


def test_two_optimizers_on_two_streams_each_wait(tmp_path, device):
    """With overlap, and the device busy so that the copy has not begun, two optimizers step on two streams of their
    own, which are idle. Neither step begins before the copy is made: the checkpoint holds the values before both."""
    run = Run(device, hosted=False)
    streams = [device.Stream(), device.Stream()]
    with open_run(tmp_path, run.state, overlap=True) as checkpointer:
        checkpointer.save(0)  # what the first save takes besides is not what this is about
        checkpointer.wait()
        run.train_step(1)
        run.backward(2)
        device.synchronize()
        busy(device)
        kept = {1: run.copies()}
        checkpointer.save(1)
        assert not device.current_stream().query(), NOT_BEGUN
        for stream, optimizer in zip(streams, (run.first, run.second)):
            with device.stream(stream):
                optimizer.step()
        device.synchronize()
        changed = differing(values_of(device, run.tensors()), values_of(device, kept[1]))
        assert {"first.weight", "second.weight"} <= set(changed)
    check_saved(tmp_path, device, kept, hosted=False)


def test_memory_that_is_freed_after_a_save_is_not_used_before_it_is_copied(tmp_path, device):
    """With overlap, and the device busy so that the copy has not begun, an optimizer is given another buffer and the
    old one is freed. It is of a stream that is idle, whose next tensors would have its memory at once: the checkpoint
    holds what the old one held."""
    side, size = device.Stream(), 3_000_000
    model = nn.Module()
    model.weight = nn.Parameter(device.tensor(torch.zeros(size)))
    model.weight.grad = device.tensor(torch.ones(size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    optimizer.step()
    with open_run(tmp_path, {"model": model, "optimizer": optimizer}, overlap=True) as checkpointer:
        checkpointer.save(0)  # what the first save takes besides is not what this is about
        checkpointer.wait()
        optimizer.step()
        device.synchronize()
        with device.stream(side):
            optimizer.state[model.weight]["momentum_buffer"] = torch.full_like(model.weight.detach(), 5.0)
        device.synchronize()
        busy(device)
        checkpointer.save(1)
        assert not device.current_stream().query(), NOT_BEGUN
        optimizer.state[model.weight]["momentum_buffer"] = torch.zeros_like(model.weight.detach())
        with device.stream(side):
            used = [torch.full_like(model.weight.detach(), -7.0) for _ in range(3)]
    del used
    found = {"state.weight.momentum_buffer": torch.zeros(size)}
    ckptman.load({"optimizer": found}, tmp_path / step_folder(1))
    assert found["state.weight.momentum_buffer"].unique().tolist() == [5.0]
