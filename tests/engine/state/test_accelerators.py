"""What is asked of accelerators, and the pretended one that shows what is not asked."""

import contextlib
import threading
from collections import deque
from unittest import mock

import pytest
import torch

import ckptman
from ckptman.engine.loading import read_tensors
from ckptman.engine.loading.read_tensors import Uploads
from ckptman.engine.state import accelerators
from ckptman.engine.state.accelerators import BUFFERS, is_capturing
from ckptman.storage.format.paths import data_name
from tests.helpers.fake_device import GARBAGE, fake_devices

ZERO, ONE = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(accelerators, "_free", deque())
    monkeypatch.setattr(accelerators, "_warned", False)
    with fake_devices(count=2) as made:
        yield made


def test_a_copy_that_nobody_waited_for_is_not_there(device):
    source, target = device.tensor(torch.ones(10)), torch.empty(10, pin_memory=True).zero_()
    with device.main.held():
        target.copy_(source, non_blocking=True)
        event = device.main.record_event()
        assert not event.query()
        assert target.sum() == 0
    event.synchronize()
    assert target.sum() == 10


def test_memory_that_is_freed_is_written_over_by_what_comes_next_on_its_stream(device):
    source, target = device.tensor(torch.ones(10)), torch.empty(10, pin_memory=True).zero_()
    side = device.Stream(ZERO)
    with side.held():
        with device.stream(side):
            target.copy_(source, non_blocking=True)
        del source
        device.main.synchronize()
    side.synchronize()
    assert target.view(torch.uint8).unique().tolist() == [GARBAGE]


def test_streams_wait_for_each_other_and_no_more(device):
    tensor, side = device.tensor(torch.ones(10)), device.Stream(ZERO)
    with device.main.held():
        tensor.add_(1)
        side.wait_stream(device.main)
        with device.stream(side):
            tensor.mul_(3)
        assert not side.query()
    side.synchronize()
    assert device.values(tensor).unique().tolist() == [6.0]
    assert device.values(tensor * 2 - 1).unique().tolist() == [11.0]


def test_a_capture_keeps_what_is_done_and_breaks_at_what_is_not_allowed(device):
    tensor, outside = device.tensor(torch.zeros(10)), device.main.record_event()
    with device.capture() as graph:
        assert is_capturing()
        tensor.add_(1)
    assert not is_capturing()
    assert device.values(tensor).sum() == 0
    graph.replay()
    graph.replay()
    assert device.values(tensor).unique().tolist() == [2.0]
    for what in (lambda: device.current_stream().wait_event(outside), outside.synchronize, outside.query):
        with pytest.raises(RuntimeError, match="CUDA error"), device.capture(), contextlib.suppress(RuntimeError):
            what()


def test_a_device_that_has_failed_stays_so(device):
    tensor = device.tensor(torch.zeros(10))
    device.main.submit(lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="division by zero"):
            device.main.synchronize()
    with pytest.raises(RuntimeError, match="division by zero"):
        tensor.add_(1)


def test_uploads_pass_through_a_few_buffers_and_are_there_in_the_end(device):
    targets = [device.tensor(torch.zeros(50, dtype=torch.int32)) for _ in range(3 * BUFFERS)]
    scratch, uploads = torch.empty(50, dtype=torch.int32), Uploads()
    with device.main.held():
        for each in targets:
            each.fill_(-2)  # what was done to the targets before comes first
        for number, each in enumerate(targets[:BUFFERS]):
            scratch.fill_(number)
            uploads.to(ZERO)(each, scratch)
            scratch.fill_(-1)
    for number, each in enumerate(targets[BUFFERS:], BUFFERS):
        scratch.fill_(number)
        uploads.to(ZERO)(each, scratch)
        scratch.fill_(-1)
    uploads.finish()
    assert [int(device.values(each).unique()) for each in targets] == list(range(3 * BUFFERS))
    assert len(device._pinned) == BUFFERS, "as many as may be, before the first is waited for"
    on_host = torch.zeros(50, dtype=torch.int32)
    uploads.to(torch.device("cpu"))(on_host, scratch)
    assert int(on_host.unique()) == -1


def test_threads_that_upload_ask_for_nothing_on_another_device(device):
    device.set_device(1)
    targets = [device.tensor(torch.zeros(50), 1) for _ in range(3 * BUFFERS)]
    uploads = Uploads()
    put = uploads.to(ONE)

    def upload():
        for each in targets:
            put(each, torch.ones(50))

    thread = threading.Thread(target=upload)
    thread.start()
    thread.join()
    uploads.finish()
    assert all(device.values(each).sum() == 50 for each in targets)
    assert device.contexts == {1}


def test_uploads_need_no_pinned_memory(device, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    target, scratch, uploads = device.tensor(torch.zeros(50)), torch.ones(50), Uploads()
    monkeypatch.setattr(device, "empty_pinned", refuse)
    with pytest.warns(RuntimeWarning, match="host memory cannot be pinned .*out of memory"):
        uploads.to(ZERO)(target, scratch)
    scratch.zero_()
    uploads.finish()
    assert device.values(target).sum() == 50


def test_what_is_read_for_a_device_goes_there_from_where_it_was_read(device, tmp_path, monkeypatch):
    values = {"large": torch.randn(3_000_000), "small": torch.randn(500), "rows": torch.randn(900, 1000)}
    ckptman.save(values, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / data_name(0)).read_bytes()  # of a cold disk larger pieces are read
    there = {name: device.tensor(torch.zeros(each.shape)) for name, each in values.items()}
    copied, put = [], read_tensors.put

    def noted(target, source, **options):
        if target.nbytes >= 256 * 1024:  # others are not waited for
            copied.append(target.device.type)
        put(target, source, **options)

    monkeypatch.setattr(read_tensors, "put", noted)
    ckptman.load(there, tmp_path / "checkpoint")
    assert {*copied} == {"cuda"}, "no byte is copied on the host"
    assert len(device._pinned) <= BUFFERS
    assert all(torch.equal(device.values(there[name]), each) for name, each in values.items())
    there["large"].fill_(0)
    monkeypatch.setattr(device, "empty_pinned", mock.Mock(side_effect=RuntimeError("CUDA error: out of memory")))
    accelerators._free.clear()
    with pytest.warns(RuntimeWarning, match="host memory cannot be pinned"):
        ckptman.load(there, tmp_path / "checkpoint")
    assert torch.equal(device.values(there["large"]), values["large"])
