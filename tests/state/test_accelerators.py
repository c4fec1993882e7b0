"""What is done for tensors on an accelerator, on a pretended one: copies on its stream happen when it is waited for.

It shows what is asked of the device and in which order, not what a real one makes of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from ckptman.loading import read_tensors as read_module
from ckptman.loading.read_tensors import BUFFERS, Uploads
from ckptman.saving.staging import Stager
from ckptman.saving.write_plan import RankFile
from tests.saving.test_staging import file_of

DEVICE = torch.device("cuda", 0)


class Event:
    """Reached when everything queued before it is done."""

    def __init__(self, stream: Stream, length: int) -> None:
        self.stream, self.length = stream, length

    def synchronize(self) -> None:
        self.stream.run(self.length)

    def query(self) -> bool:
        return self.stream.done >= self.length


class Stream:
    """Work in order, done when somebody waits for it."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()
        self.done = 0
        self.waits: list[object] = []

    def submit(self, work: Callable[[], None]) -> None:
        self.queue.append(work)

    def run(self, length: int) -> None:
        while self.done < length:
            self.queue.popleft()()
            self.done += 1

    def record_event(self) -> Event:
        return Event(self, self.done + len(self.queue))

    def synchronize(self) -> None:
        self.run(self.done + len(self.queue))

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other)
        other.synchronize()

    def wait_event(self, event: Event) -> None:
        self.waits.append(event)
        event.synchronize()


class Device:
    """The module of the pretended device, such as torch.cuda."""

    def __init__(self) -> None:
        self.main = self.current = Stream()
        self.streams: list[Stream] = []

    def Stream(self, device: torch.device) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        if non_blocking:
            self.current.submit(lambda: target.copy_(source))
        else:
            self.current.synchronize()
            target.copy_(source)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class OnDevice(torch.Tensor):
    """A tensor that says it is on the device. A copy that need not be waited for is queued on the current stream."""

    module: Device
    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, module: Device) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=DEVICE)  # type: ignore[attr-defined]
        made.inner, made.module = inner, module
        return made  # type: ignore[no-any-return]

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> OnDevice:  # type: ignore[override]
        self.module.copy(self.inner, source, non_blocking)
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.copy_.default, func
        target, source, non_blocking = (*args, False)[:3]
        source.module.copy(target, source.inner, non_blocking)
        return target


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    with mock.patch.object(torch, "get_device_module", return_value=made):
        yield made


def staged_bytes(file: RankFile, slot: Any, number: int, like: torch.Tensor) -> torch.Tensor:
    payload = file.places[number].payload
    return torch.frombuffer(slot.memory, dtype=like.dtype, count=like.numel(), offset=payload).view(like.shape)


def test_a_copy_from_a_device_waits_for_what_is_urgent_and_for_no_more(device: Device) -> None:
    inner = [torch.full((300,), 1.0), torch.full((200,), 2.0), torch.full((100,), 3.0)]
    file, memory = file_of({"x": {"a": inner[0], "b": inner[1], "c": inner[2]}})
    on_device: list[torch.Tensor] = [OnDevice(each, device) for each in memory[:2]]
    stager = Stager(SimpleNamespace(idle=False))  # type: ignore[arg-type]
    device.main.submit(lambda: memory[0].fill_(7.0))  # the step before has not ended yet
    staged = stager.stage(file, [*on_device, memory[2]], {1})
    (stream,) = device.streams
    assert stream.waits[0] is device.main, "what the step still does comes first"
    assert len(stream.queue) == 1, "only what may come later"
    assert torch.equal(staged_bytes(file, staged.slot, 0, memory[0]), torch.full((300,), 7.0))
    assert torch.equal(staged_bytes(file, staged.slot, 2, memory[2]), memory[2])
    assert not staged_bytes(file, staged.slot, 1, memory[1]).any()
    staged.wait_staged()
    assert isinstance(device.main.waits[-1], Event), "the next step waits on the device, not the host"
    staged.wait()
    assert torch.equal(staged_bytes(file, staged.slot, 1, memory[1]), torch.full((200,), 2.0))
    staged.release()
    again = stager.stage(file, [*on_device, memory[2]])
    assert again.slot is staged.slot
    assert len(device.streams) == 1
    stager.close()


@pytest.fixture
def pageable(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the buffers that would have been pinned."""
    made, original = [], torch.empty

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            made.append(size[0])
        return original(*size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(read_module, "_free", deque())
    return made


def test_uploads_pass_through_a_few_buffers_and_are_there_in_the_end(device: Device, pageable: list[int]) -> None:
    targets = [torch.zeros(50, dtype=torch.int32) for _ in range(3 * BUFFERS)]
    scratch = torch.empty(50, dtype=torch.int32)
    uploads = Uploads()
    for number, inner in enumerate(targets):
        scratch.fill_(number)
        uploads.to(DEVICE)(OnDevice(inner, device), scratch)
        scratch.fill_(-1)
    (stream,) = device.streams
    assert stream.waits == [device.main], "what was done to the targets before comes first"
    uploads.finish()
    assert [int(each.unique()) for each in targets] == list(range(3 * BUFFERS))
    assert len(pageable) == BUFFERS, "as many as may be, before the first is waited for"
    on_host = torch.zeros(50, dtype=torch.int32)
    uploads.to(torch.device("cpu"))(on_host, scratch)
    assert int(on_host.unique()) == -1
