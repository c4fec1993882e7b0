"""A pretended accelerator: its streams are threads, and memory that is freed is written over by what comes next.

A copy that nobody waits for shows: it is not there yet, or what it copies is gone. Tensors on it say that they are on
"cuda". It keeps what a real one is asked to keep: host memory that is registered while it is mapped; no call that a
graph that is being captured forbids; a last error for the next kernel of the same thread; contexts on those devices
alone that a thread has asked for. It shows what is asked of a device and in which order, not how fast that is.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from unittest import mock

import torch
from torch.utils._pytree import tree_map

from ckptman.engine.state import local_shards

WAIT = 20.0
"""Seconds after which a thread that waits for another one gives up."""
GARBAGE = 0x5A
_UNSAFE = "CUDA error: operation not permitted when stream is capturing"
_OUTSIDE = "CUDA error: dependency created on uncaptured work in another stream"
_NO_MEMORY = 2


class Stream:
    """Work that is done in order, in a thread."""

    def __init__(self, module, device):
        self.module, self.device = module, device
        self._queue = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device-stream", daemon=True)
        self._thread.start()

    def submit(self, work, always=False):
        """Have it done after what was submitted before; `always`: also on a device that has failed."""
        self._queue.put((work, always))

    def hold(self):
        """Do nothing of what is submitted from now on until the event that is returned is set."""
        go = threading.Event()
        self.submit(lambda: _await(go))
        return go

    @contextlib.contextmanager
    def held(self):
        """Inside, nothing of what is submitted is done."""
        go = self.hold()
        try:
            yield
        finally:
            go.set()

    def record_event(self, event=None):
        event = event or Event(self.module)
        event.record(self)
        return event

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, other):
        other.record_event().wait(self)

    def synchronize(self):
        self.record_event().synchronize()

    def finish(self):
        """Wait as a copy does that is waited for: it is on the device of its tensor, whatever that of the thread is."""
        if self.is_capturing():
            self.module.break_capture(_UNSAFE)
        reached = threading.Event()
        self.submit(reached.set, always=True)
        _await(reached)
        self.module.raise_error()

    def query(self):
        return self.record_event().query()

    def is_capturing(self):
        return self.module.graph is not None and self.module.graph.stream is self

    def end(self):
        """Do what was submitted, and end the thread."""
        self._queue.put(None)
        self._thread.join(WAIT)

    def _run(self):
        while (got := self._queue.get()) is not None:
            work, always = got
            try:
                if self.module.error is None or always:
                    work()
            except Exception as error:  # as on a real one, whoever waits next is told
                self.module.error = error
            del got, work


class Event:
    """Reached when everything that was submitted before it is done."""

    def __init__(self, module, enable_timing=False, blocking=False):
        self.module, self.blocking = module, blocking
        self._graph = None
        self._reached = threading.Event()
        self._reached.set()

    def record(self, stream=None):
        stream = stream or self.module.current_stream()
        self._graph = self.module.graph if stream.is_capturing() else None
        self._reached = threading.Event()
        if self._graph is None:
            stream.submit(self._reached.set, always=True)

    def wait(self, stream=None):
        stream = stream or self.module.current_stream()
        if stream.is_capturing():
            if self._graph is not self.module.graph:
                self.module.break_capture(_OUTSIDE)
            return
        reached = self._reached
        stream.submit(lambda: _await(reached))

    def synchronize(self):
        self.module.called()
        _await(self._reached)
        self.module.raise_error()

    def query(self):
        self.module.called()
        self.module.raise_error()
        return self._reached.is_set()


class Graph:
    """Work that was captured, to be done again."""

    def __init__(self, stream):
        self.stream, self.works = stream, list[Callable[[], object]]()
        self.broken = ""

    def replay(self):
        """Do it on the current stream."""
        for work in self.works:
            self.stream.module.current_stream().submit(work)


class Runtime:
    """What `torch.cuda.cudart()` returns. `fails`: registering memory does."""

    def __init__(self, module):
        self._module = module
        self.fails = False
        self.registered = {}
        """Bytes of host memory, by its address."""
        self.calls = []

    def cudaHostRegister(self, address, size, flags):
        self._module.called()
        self.calls.append("register")
        if self.fails:
            self._module.local.last_error = "CUDA error: out of memory"
            return _NO_MEMORY
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address):
        self._module.called()
        self.calls.append("unregister")
        assert is_mapped(address), "unregistered after it was unmapped"
        del self.registered[address]
        return 0


_Stream, _Event = Stream, Event


class FakeDevice:
    """The module of the pretended devices, such as torch.cuda."""

    def __init__(self, count=1):
        self.local = threading.local()
        self.error = None
        """What has gone wrong on it. All that comes after fails with it."""
        self.graph = None
        """What is being captured."""
        self.contexts = set()
        """Devices on which a thread has done something for which it needs a context."""
        self.streams = []
        """Those that were asked for."""
        self.runtime = Runtime(self)
        self._main = [_Stream(self, torch.device("cuda", number)) for number in range(count)]
        self.main = self._main[0]
        """The default stream of the first device."""
        self._pinned = []

    # ---- what torch.cuda has -----------------------------------------------------------------------------------

    def Stream(self, device=None):
        made = _Stream(self, self._main[self._index(device)].device)
        self.streams.append(made)
        return made

    def Event(self, enable_timing=False, blocking=False):
        return _Event(self, enable_timing, blocking)

    def current_stream(self, device=None):
        index = self._index(device)
        return getattr(self.local, "streams", {}).get(index, self._main[index])

    @contextlib.contextmanager
    def stream(self, stream):
        if stream is None:
            yield
            return
        before = getattr(self.local, "streams", {})
        self.local.streams = before | {stream.device.index: stream}
        try:
            with self.device(stream.device):
                yield
        finally:
            self.local.streams = before

    def current_device(self):
        return int(getattr(self.local, "device", 0))

    def set_device(self, device):
        self.local.device = self._index(device)

    @contextlib.contextmanager
    def device(self, device):
        before, self.local.device = self.current_device(), self._index(device)
        try:
            yield
        finally:
            self.local.device = before

    def device_count(self):
        return len(self._main)

    def synchronize(self, device=None):
        index = self._index(device)
        for each in [self._main[index], *(each for each in self.streams if each.device.index == index)]:
            each.synchronize()

    def is_initialized(self):
        return True

    def is_current_stream_capturing(self):
        return self.current_stream().is_capturing()

    def cudart(self):
        return self.runtime

    # ---- what tests ask for ------------------------------------------------------------------------------------

    def tensor(self, values, index=0):
        """Return a tensor on the device with these values. It is there at once."""
        made = OnDevice(_Memory(self, values.shape, values.dtype, self._main[index]))
        made.inner.copy_(values)
        return made

    def values(self, tensor):
        """Return what a tensor holds once everything is done."""
        self.synchronize(tensor.device)
        return tensor.inner.clone()

    @contextlib.contextmanager
    def capture(self):
        """Capture into a graph what is done on the current stream, as `torch.cuda.graph` does. Raises: RuntimeError at
        its end where something inside was not allowed."""
        self.synchronize()
        stream = _Stream(self, self.current_stream().device)
        self.streams.append(stream)
        with self.stream(stream):
            self.graph = graph = Graph(stream)
            try:
                yield graph
            finally:
                self.graph = None
        if graph.broken:
            raise RuntimeError(graph.broken)

    def break_capture(self, why):
        """End what is being captured with an error. Raises: RuntimeError."""
        self.graph.broken = why
        raise RuntimeError(why)

    def called(self):
        """Note that this thread has made a call that needs a context, and that no capture allows. Raises: RuntimeError
        during a capture, in any thread."""
        self.contexts.add(self.current_device())
        if self.graph is not None:
            self.break_capture(_UNSAFE)

    def raise_error(self):
        """Raise what has gone wrong on the device."""
        if self.error is not None:
            raise RuntimeError(str(self.error))

    def launch(self, name, work, device):
        """Submit work to the current stream of a device; where it is being captured, keep it."""
        self.raise_error()
        if (last := getattr(self.local, "last_error", "")) and "copy" not in name:
            self.local.last_error = ""
            raise RuntimeError(last)
        stream = self.current_stream(device)
        if stream.is_capturing():
            self.graph.works.append(work)
        else:
            stream.submit(work)

    def is_pinned(self, tensor):
        """Return whether a copy of host memory need not be waited for."""
        address = tensor.data_ptr()
        spans = [*self.runtime.registered.items(), *((each.data_ptr(), each.nbytes) for each in self._pinned)]
        return any(start <= address < start + size for start, size in spans)

    def empty_pinned(self, *size, **options):
        """Return host memory that is pinned."""
        self.called()
        made = _EMPTY(*size, **options)
        self._pinned.append(made)
        return made

    def close(self):
        """End all streams."""
        for stream in [*self._main, *self.streams]:
            stream.end()

    def _index(self, device):
        if isinstance(device, int):
            return device
        return self.current_device() if device is None or device.index is None else device.index


class _Memory:
    """A piece of the memory of a device. When nobody has it any more, what comes next on its stream writes over it."""

    def __init__(self, module, shape, dtype, stream):
        self.module, self.device = module, stream.device
        self.whole = _EMPTY(shape, dtype=dtype, device="cpu")
        weakref.finalize(self, _reuse, self.whole, stream).atexit = False


def _reuse(whole, stream):
    stream.submit(lambda: whole.reshape(-1).view(torch.uint8).fill_(GARBAGE))


class OnDevice(torch.Tensor):
    """A tensor on the pretended device. What is done with it is done on the current stream."""

    inner: torch.Tensor
    memory: _Memory

    @staticmethod
    def __new__(cls, memory, inner=None):
        inner = memory.whole if inner is None else inner
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=memory.device
        )
        made.inner, made.memory = inner, memory
        return made

    def data_ptr(self):
        return self.inner.data_ptr()

    def __getitem__(self, index):
        return OnDevice(self.memory, self.inner[index])  # a view: torch would ask for a real device first

    def copy_(self, source, non_blocking=False):
        _copy(self.memory.module, "copy_", self.device, self, source, non_blocking)
        return self

    def __repr__(self):
        return f"OnDevice({list(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo):
        made = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = made
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        found = []
        tree_map(lambda each: found.append(each) if isinstance(each, OnDevice) else None, (args, kwargs))
        first = found[0]
        module, device, name = first.memory.module, first.device, func._schema.name.removeprefix("aten::")
        inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
        if name == "copy_":
            return _copy(module, name, device, args[0], args[1], bool(args[2:] and args[2]))
        if name == "_to_copy":
            return _to(module, args[0], **kwargs)
        if name in ("_local_scalar_dense", "equal"):
            module.current_stream(device).finish()
            return func(*inner_args, **inner_kwargs)
        if func._schema.is_mutable:
            module.launch(name, lambda: func(*inner_args, **inner_kwargs), device)
            return args[0] if func._schema.returns else None
        if any(each.alias_info is not None for each in func._schema.returns):  # a view
            return tree_map(partial(_on, first.memory), func(*inner_args, **inner_kwargs))
        if "device" in inner_kwargs:
            inner_kwargs["device"] = torch.device("cpu")
        like = func(*tree_map(_as_meta, inner_args), **tree_map(_as_meta, inner_kwargs))
        made = OnDevice(_Memory(module, like.shape, like.dtype, module.current_stream(device)))
        target = made.inner
        module.launch(name, lambda: target.copy_(func(*inner_args, **inner_kwargs)), device)
        return made


def _on(memory, each):
    return OnDevice(memory, each) if isinstance(each, torch.Tensor) else each


def _as_meta(each):
    if isinstance(each, torch.Tensor):
        return each.to("meta")
    return torch.device("meta") if isinstance(each, torch.device) else each


def _inner(each):
    return each.inner if isinstance(each, OnDevice) else each


def _copy(module, name, device, target, source, later):
    to, of = _inner(target), _inner(source)
    module.launch(name, lambda: to.copy_(of), device)  # it keeps neither of them alive: that is for the caller
    host = next((each for each in (target, source) if not isinstance(each, OnDevice)), None)
    if host is not None and not (later and module.is_pinned(host)):
        module.current_stream(device).finish()
    return target


def _to(module, source, **options):
    device = source.device if isinstance(source, OnDevice) else torch.device(options["device"])
    where, later = options.get("device") or device, bool(options.get("non_blocking"))
    dtype = options.get("dtype") or source.dtype
    if torch.device(where).type != "cpu":
        made = OnDevice(_Memory(module, source.shape, dtype, module.current_stream(device)))
    else:
        empty = module.empty_pinned if later else _EMPTY
        made = empty(source.shape, dtype=dtype, device="cpu")
    return _copy(module, "copy_", device, made, source, later)


def _await(event):
    if not event.wait(WAIT):
        raise RuntimeError("a stream waits for ever")


def is_mapped(address):
    """Return whether there is memory at an address of this process."""
    with open("/proc/self/maps") as file:
        spans = (line.split(" ", 1)[0].split("-") for line in file)
        return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


_EMPTY = torch.empty
_MODULE_OF = torch.get_device_module


@contextlib.contextmanager
def fake_devices(count=1):
    """Inside, "cuda" is a pretended device: `module.tensor(values)` puts tensors on it, which are taken for plain."""
    module = FakeDevice(count)
    module.local.device = 0

    def module_of(device=None):
        return module if device is None or torch.device(device).type == "cuda" else _MODULE_OF(device)

    def empty(*size, pin_memory=False, **options):
        return module.empty_pinned(*size, **options) if pin_memory else _EMPTY(*size, **options)

    patches = {
        "synchronize": module.synchronize,
        "current_stream": module.current_stream,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
    }
    with contextlib.ExitStack() as stack:
        stack.callback(module.close)
        stack.enter_context(mock.patch.object(torch, "get_device_module", module_of))
        stack.enter_context(mock.patch.object(torch, "empty", empty))
        stack.enter_context(mock.patch.object(local_shards, "PLAIN", (*local_shards.PLAIN, OnDevice)))
        for name, made in patches.items():
            stack.enter_context(mock.patch.object(torch.accelerator, name, made))
        yield module
