"""Staging: a private copy in host memory, so that training may go on while the copy is written.

A slot is the image of this rank's data file: what is copied into it lies where it will lie in the file, on pages, and
goes to storage without another copy. Slots are reused, because fresh memory is several times slower than warm memory.
The first is made behind the first steps, and a second one when a save comes while the first is still being written.
Memory is pinned between steps, a piece at a time: nobody may do that while a graph is being captured.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from ckptman._torch_compat import copy_all, is_traceable_wrapper_subclass, transform_subclass
from ckptman.engine.saving.write_plan import RankFile
from ckptman.engine.state.accelerators import is_capturing, on_device, record, synchronize, warn_unpinned
from ckptman.engine.state.file_layout import Image, flat, put, view_of
from ckptman.runtime.host_memory import available_bytes
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.threads import ALIGN_BYTES, Task, Wakeup, Worker, aligned_memory
from ckptman.storage.io.writer_process import shared_memory

T = TypeVar("T")
Kind = tuple[torch.dtype, tuple[int, ...]]
SLOTS = 2
RESERVE_BYTES = 512 * 1024 * 1024
"""Host memory that staging leaves to each rank: what a save takes besides, and some for the user's own program."""
_PORTABLE = 1
"""`cudaHostRegisterPortable`: memory that is pinned for all devices."""
_PIN_BYTES = 64 * 1024 * 1024
"""The least that is pinned at a time."""
_TOUCH_BYTES = 16 * 1024 * 1024


class Slot:
    """Host memory for one staged copy, touched once so that it is warm.

    Args:
        kinds: dtype and shape of each of the file's tensors.
        path: a new file in memory that it is, so that others can be given its name; None: it has none.
    """

    def __init__(self, file: RankFile, kinds: Sequence[Kind], path: Path | None = None) -> None:
        self.kinds = kinds
        self._bytes, self.fd = _allocate(file.end, path)
        self.path = path if path is not None and path.exists() else None
        self.memory = view_of(self._bytes)
        self.free = True
        self._copies_at_once = True
        for start, data in file.literals:
            self.memory[start : start + len(data)] = data
        self._targets = []
        for place, (dtype, shape) in zip(file.places, kinds):
            size = dtype.itemsize * math.prod(shape)
            target = self._bytes[place.payload : place.payload + size].view(dtype).view(shape)
            self._targets.append(target if size else torch.empty_like(target))
        self._unpinned = deque(_pieces(file))
        self._pinned: list[int] = []
        """Addresses of the pieces that are."""
        self._unpin: Callable[[], object] = lambda: None

    @property
    def is_pinned(self) -> bool:
        """Whether all is pinned that can be."""
        return not self._unpinned

    def become(self, path: Path, image: Image) -> bool:
        """Be the file `path` from now on, as `image` says, if this is a file in memory; False: it is none.

        Raises: OSError.
        """
        if self.path is None or self.fd is None or not len(self.memory):
            return False
        begin = len(self.memory)
        tail = image.view(begin, memoryview(bytearray(image.size_bytes - begin)))
        os.ftruncate(self.fd, image.size_bytes)
        if len(tail) and os.pwrite(self.fd, tail, begin) != len(tail):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        DISK.link(self.path, path)
        return True

    def copy(self, memory: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
        """Copy the tensors of these numbers into their places; from a device without waiting for it."""
        targets, sources = [self._targets[number] for number in numbers], [memory[number] for number in numbers]
        with torch.no_grad():  # the sources may be parameters
            if all(each.device.type == "cpu" for each in sources[:1]):  # all are on the host, or none is
                try:
                    if self._copies_at_once:
                        copy_all(targets, sources)
                        return
                except RuntimeError:  # a dtype that is not copied as it is, or inference mode
                    self._copies_at_once = False
            for target, source in zip(targets, sources):
                put(target, source, non_blocking=True)

    def close(self) -> None:
        """Give up the memory, of which the device is told first. Nobody copies into it or reads it any more."""
        self._unpin()
        if self.path is not None:
            with contextlib.suppress(OSError):
                DISK.remove_file(self.path)
        self.memory, self.fd = memoryview(b""), None
        self._bytes, self._targets = torch.empty(0, dtype=torch.uint8, device="cpu"), []

    def pin(self, device: torch.device, seconds: float = math.inf) -> None:
        """Pin the memory, as far as that is to be had, so that copies from the device need not be waited for: one piece
        at least, and others for so long. It is registered as it is: torch's own pinned memory is rounded up to a power
        of two."""
        module = torch.get_device_module(device)
        if not hasattr(module, "cudart") or not len(self._bytes):
            self._unpinned.clear()
            return
        runtime, address, until = module.cudart(), self._bytes.data_ptr(), time.monotonic() + seconds
        if not self._pinned:
            # The finalizer holds the memory, so it stays mapped until it is unregistered, even without close().
            self._unpin = weakref.finalize(self, _unregister, runtime, device, self._bytes, self._pinned, os.getpid())
            self._unpin.atexit = False  # by then a thread may still copy into it, and the driver gives it up itself
        with on_device(device):
            while self._unpinned:
                low, high = self._unpinned.popleft()
                if int(code := runtime.cudaHostRegister(address + low, high - low, _PORTABLE)):
                    self._unpinned.clear()
                    warn_unpinned(code)
                    return
                self._pinned.append(address + low)
                if time.monotonic() >= until:
                    return


class Staged:
    """A copy that is complete after `wait`.

    `special`: copies of the tensors that are to be pickled. Kept until the copy is complete are what it is made from:
    memory that is freed on a device would be overwritten by the next forward.
    """

    def __init__(self, slot: Slot, freed: Wakeup, sources: Sequence[torch.Tensor]) -> None:
        self.slot, self._freed = slot, freed
        self.special: list[torch.Tensor] = []
        self.events: list[tuple[torch.device, Any]] = []
        """What devices still copy: each is over when its event is reached."""
        self._tasks: list[Task[None]] = []
        """What threads still copy, or wait for."""
        self._copied: Task[None] | None = None
        self._sources = sources
        self._released = threading.Lock()

    @property
    def is_complete(self) -> bool:
        """Whether all is copied. Asks no device: during the capture of a graph nobody may."""
        return all(task.done() for task in self._tasks)

    def copy_behind(self, copier: Worker, memory: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
        """Have tensors of the CPU copied by a thread."""
        self._copied = copier.submit(self.slot.copy, memory, numbers)
        self._tasks.append(self._copied)

    def arrive_behind(self) -> None:
        """Have a thread wait for the devices, from now on: once a graph is being captured nobody may begin to."""
        try:
            self._tasks.append(_begin(self.arrive))
        except RuntimeError:  # no thread
            self.arrive()

    def arrive(self) -> None:
        """Wait for the devices. Raises: RuntimeError, if one has failed."""
        for device, event in self.events:
            synchronize(device, event)
        self._sources = ()

    def wait(self) -> None:
        """Wait until all is copied, on the calling thread. Raises: what went wrong."""
        for task in self._tasks:
            task.wait()
        for task in self._tasks:
            task.result()

    def wait_staged(self) -> None:
        """Keep what comes next on this thread, or on its device's stream, from changing what is still being copied.
        What went wrong is for the save to tell, not for the optimizer step that waits here."""
        if is_capturing():  # a graph must not wait for what is not in it: what is replayed later finds it copied
            for task in self._tasks:
                task.wait()
            return
        if self._copied is not None:
            self._copied.wait()
        for device, event in self.events:
            torch.get_device_module(device).current_stream(device).wait_event(event)

    def release(self) -> None:
        """Give the slot back. Only the first call does: the slot may have another copy in it by then."""
        with contextlib.suppress(Exception):  # what went wrong is for the save to tell
            self.wait()
        if self._released.acquire(blocking=False):
            self.slot.free = True
            self._freed.notify()


class Stager:
    """Makes private copies, in at most `slots` slots.

    Args:
        saves: the thread that writes from the slots. While it is idle, all of them are free that are not kept.
    """

    def __init__(self, saves: Worker) -> None:
        self.saves = saves
        self.slots = SLOTS
        self.new_file: Callable[[], Path | None] = lambda: None
        """Returns the file in memory that the next slot is to be; None: it needs no name."""
        self.kept: Callable[[], Collection[Slot]] = lambda: ()
        """Returns the slots that checkpoints in memory are made of, or are going to be."""
        self.neighbours = 1
        """How many ranks this host has, this one included."""
        self._slots: list[Slot] = []
        self._making: Task[None] | None = None
        """What makes a slot, in a thread of its own."""
        self._pinning: Task[None] | None = None
        """What pins one, likewise."""
        self._freed = Wakeup()
        self._file: RankFile | None = None
        self._device: torch.device | None = None
        """Where what is copied was when the first slot was made; None: in host memory."""
        self._copier = Worker("ckptman-stage")
        self._streams: dict[torch.device, Any] = {}

    def needs(self, file: RankFile) -> tuple[str, int, int]:
        """Return this host, the bytes that a slot for `file` takes, and those that are left once the slots of before
        are given back."""
        return socket.gethostname(), file.end, self.held_bytes + available_bytes()

    @property
    def held_bytes(self) -> int:
        """Host memory of all slots, when the one is made that is being made: before, a part of it may be taken."""
        if self._making is not None:
            self._making.wait()
        return sum(len(slot.memory) for slot in self._slots)

    def prepare(self, file: RankFile, memory: Sequence[torch.Tensor]) -> None:
        """Begin to make the first slot for a file, behind the training, so that the first save finds it warm.

        Raises: RuntimeError (no thread).
        """
        if self._file is not file:
            self.give_back()
            self._device, self._file = _device_of(memory), file
            try:
                self._making = _begin(self._add_slot, file, [_kind(each) for each in memory])
            except BaseException:
                self._file = None
                raise

    def wait(self) -> None:
        """Wait for the first slot. Raises: MemoryError, RuntimeError, OSError, as there is none."""
        if self._making is not None and not self._slots:
            self._making.wait()
            if self._making.error is not None:
                self._file = None  # with a file and no slot, a save would wait for one for ever
            self._making.result()

    def pin_some(self, seconds: float) -> None:
        """Pin memory that is made, for about so long, between two steps."""
        if self._device is None or is_capturing():
            return
        for slot in self._slots:
            if slot.free and not slot.is_pinned:
                with contextlib.suppress(RuntimeError):  # no thread: the save that needs it says so
                    self._pin(slot, self._device, seconds)
                return

    def give_back(self) -> None:
        """Give up all slots, when they are no longer needed."""
        self._freed.wait_for(lambda: all(slot.free for slot in self._reclaimed()))
        self._drop()

    def stage(
        self,
        file: RankFile,
        memory: Sequence[torch.Tensor],
        later: AbstractSet[int] = frozenset(),
        special: Sequence[torch.Tensor] = (),
    ) -> Staged:
        """Copy. The tensors whose numbers are in `later` may still be copied when this returns.

        Where there are such, devices may also still copy others: what comes after on their current streams comes after
        that. `special` are tensors of classes of their own. Waits for a slot if all are being written.
        """
        self.prepare(file, memory)
        self.wait()
        slot = self._free_slot(file, memory)
        slot.free = False
        staged = Staged(slot, self._freed, (*memory, *special))
        try:
            self._copy(staged, memory, later, special)
        except BaseException:
            with contextlib.suppress(Exception):
                staged.arrive()  # a slot that is free is one that nobody writes to
            staged.release()
            raise
        return staged

    def close(self) -> None:
        """Stop the thread that copies, and give up the slots."""
        self._copier.close()
        self._drop()

    def _drop(self) -> None:
        for task in (self._making, self._pinning):
            if task is not None:
                task.wait()
        for stream in (
            self._streams.values() if self._slots else ()
        ):  # Ctrl-C may have left a copy that nobody waits for
            with contextlib.suppress(Exception):
                stream.synchronize()
        self._file = self._making = self._pinning = None
        while self._slots:
            self._slots.pop().close()

    def _free_slot(self, file: RankFile, memory: Sequence[torch.Tensor]) -> Slot:
        """Return a slot that is free: the first that is given back or made."""
        is_making = self._making is not None and not self._making.done()
        is_needed = all(not self._is_free(slot) for slot in self._reclaimed()) and len(self._slots) < self.slots
        if is_needed and not is_making and self._has_room(file):
            with contextlib.suppress(RuntimeError):  # no thread: then it waits for the first
                self._making = _begin(self._add_another, file, [_kind(each) for each in memory])
        self._freed.wait_for(lambda: any(self._is_free(slot) for slot in self._reclaimed()))
        slot = next(slot for slot in self._slots if self._is_free(slot))
        if not slot.is_pinned and (device := _device_of(memory)) is not None:
            # Here, where the training waits: it may be capturing a graph at any other time, and nobody may pin then.
            self._pin(slot, device, math.inf)
        return slot

    def _pin(self, slot: Slot, device: torch.device, seconds: float) -> None:
        self._pinning = _begin(slot.pin, device, seconds)
        self._pinning.result()

    def _add_slot(self, file: RankFile, kinds: Sequence[Kind]) -> None:
        slot = Slot(file, kinds, self.new_file())
        if self._file is file:  # after a Ctrl-C the slots may be for another file by now
            self._slots.append(slot)
            self._freed.notify()

    def _add_another(self, file: RankFile, kinds: Sequence[Kind]) -> None:
        with contextlib.suppress(MemoryError, RuntimeError, OSError):  # then saves wait for the first
            self._add_slot(file, kinds)

    def has_free_slot(self) -> bool:
        """Return whether a copy can be made now, or soon, without waiting for what is written from another slot."""
        if any(self._is_free(slot) for slot in self._reclaimed()):
            return True
        return len(self._slots) < self.slots and self._file is not None and self._has_room(self._file)

    def make_slots(self, count: int) -> None:
        """Have as many slots as that, now. Raises: MemoryError, RuntimeError, OSError."""
        self.wait()
        while self._slots and len(self._slots) < count and self._file is not None:
            self._making = _begin(self._add_slot, self._file, self._slots[0].kinds)
            self._making.result()

    def freed(self) -> None:
        """Let who waits for a slot look again: one is no longer kept."""
        self._freed.notify()

    def _is_free(self, slot: Slot) -> bool:
        return slot.free and slot not in self.kept()

    def _has_room(self, file: RankFile) -> bool:
        """Return whether there is memory for one more slot, also if all ranks of this host want one now."""
        return available_bytes() >= self.neighbours * (file.end + RESERVE_BYTES)

    def _reclaimed(self) -> list[Slot]:
        """Return the slots. All are free where nobody can be using one: Ctrl-C may keep a save from giving its slot
        back."""
        if self.saves.idle and self._copier.idle:
            for slot in self._slots:
                slot.free = True
        return self._slots

    def _copy(
        self, staged: Staged, memory: Sequence[torch.Tensor], later: AbstractSet[int], special: Sequence[torch.Tensor]
    ) -> None:
        copies: dict[int, torch.Tensor] = {}
        on_host: Sequence[int] = range(len(memory))
        if devices := dict.fromkeys(each.device for each in (*memory, *special) if each.device.type != "cpu"):
            on_host = [number for number in on_host if memory[number].device.type == "cpu"]
        for device in devices:
            self._copy_from(device, staged, memory, later, special, copies)
        if behind := [number for number in on_host if number in later] if later else []:
            staged.copy_behind(self._copier, memory, behind)
        if later and staged.events:
            staged.arrive_behind()
        staged.slot.copy(memory, [number for number in on_host if number not in later] if behind else on_host)
        staged.special = [copies[number] if number in copies else _private(each) for number, each in enumerate(special)]
        if not later:
            staged.arrive()

    def _copy_from(
        self,
        device: torch.device,
        staged: Staged,
        memory: Sequence[torch.Tensor],
        later: AbstractSet[int],
        special: Sequence[torch.Tensor],
        copies: dict[int, torch.Tensor],
    ) -> None:
        """Copy what is on one device, on a stream of its own: first what the training may change at once, which its
        stream waits for where the host does not."""
        module = torch.get_device_module(device)
        numbers = [number for number, each in enumerate(memory) if each.device == device]
        pickled = [number for number, each in enumerate(special) if each.device == device]
        if not hasattr(module, "Stream"):  # such as MPS
            staged.slot.copy(memory, numbers)
            copies |= {number: _private(special[number]) for number in pickled}
            module.synchronize()
            return
        if device not in self._streams:
            self._streams[device] = module.Stream(device)
        stream, training = self._streams[device], module.current_stream(device)
        stream.wait_stream(training)
        try:
            with module.stream(stream):
                copies |= {number: _private(special[number]) for number in pickled}
                staged.slot.copy(memory, [number for number in numbers if number not in later])
                urgent = record(stream)
                staged.slot.copy(memory, [number for number in numbers if number in later])
                staged.events.append((device, record(stream)))
        except BaseException:
            with contextlib.suppress(Exception):  # nothing is under way any more when the slot is free again
                stream.synchronize()
            raise
        if later:
            training.wait_event(urgent)


def refusal(needs: Sequence[tuple[str, int, int]]) -> str | None:
    """Return which host has too little memory for the slots of all its ranks; None: each has enough. `needs`: of each
    rank."""
    for host in dict.fromkeys(host for host, _, _ in needs):
        here = [(need, left) for name, need, left in needs if name == host]
        need = sum(each for each, _ in here) + RESERVE_BYTES * len(here)
        left = min(each for _, each in here)
        if need > left:
            return (
                f"a private copy for async saves needs {need / 2**30:.1f} GiB of host memory on {host}, and "
                f"{left / 2**30:.1f} GiB are left there. Say async_save=False, or ask for more memory (sbatch --mem)"
            )
    return None


def _pieces(file: RankFile) -> Iterator[tuple[int, int]]:
    """Yield the pieces of a slot that are pinned one after the other: pages, with whole tensors, as a copy must not
    cross from one to the next."""
    low = 0
    for place in file.places:
        if place.payload - low >= _PIN_BYTES and not place.payload % ALIGN_BYTES:
            yield low, place.payload
            low = place.payload
    yield low, file.end


def _kind(tensor: torch.Tensor) -> Kind:
    return tensor.dtype, tuple(tensor.shape)


def _device_of(memory: Sequence[torch.Tensor]) -> torch.device | None:
    return next((each.device for each in memory if each.device.type != "cpu"), None)


def _private(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, complete when what is on the current stream is done. A tensor that is made of
    others may not know how to copy itself: they do."""
    if is_traceable_wrapper_subclass(tensor):
        return transform_subclass(tensor, lambda _, inner: _private(inner))
    if tensor.device.type == "cpu":
        return tensor.clone()
    tensor = tensor.resolve_conj().resolve_neg()
    try:
        return tensor.to("cpu", non_blocking=True)
    except RuntimeError as error:  # no pinned memory, unless the device has failed
        copied = tensor.to("cpu")
        warn_unpinned(error)
        return copied


def _begin(work: Callable[..., T], *arguments: object) -> Task[T]:
    """Have `work(*arguments)` done in a thread of its own. The runtime of a device keeps an error, such as that of
    memory that could not be pinned, for the next kernel of the same thread: in this one there is none."""
    task: Task[T] = Task(partial(work, *arguments))
    threading.Thread(target=task.run, name="ckptman-memory").start()
    return task


def _unregister(runtime: Any, device: torch.device, _: torch.Tensor, addresses: Sequence[int], parent: int) -> None:
    if os.getpid() == parent:  # a fork has no device
        with on_device(device):
            for address in addresses:
                runtime.cudaHostUnregister(address)


def _allocate(size: int, path: Path | None = None) -> tuple[torch.Tensor, int | None]:
    """Return zeroed memory, touched, and its descriptor, where it can be given to another process. It is shared with
    forks of this process: of private memory a fork would leave this one copies, which a device does not know. `path`:
    the name that it is to have; where there is no room for it, it has none."""
    if not size:
        return torch.empty(0, dtype=torch.uint8, device="cpu"), None
    fd = None
    try:
        memory, fd = _named_memory(size, path) or shared_memory(size)
    except OSError:  # not on every kernel
        memory = aligned_memory(size, shared=True)
    touched = flat(memory)
    for low in range(0, size, _TOUCH_BYTES):  # one thread, small pieces: training continues meanwhile
        touched.numpy()[low : low + _TOUCH_BYTES] = 0
    return touched, fd


def _named_memory(size: int, path: Path | None) -> tuple[memoryview, int] | None:
    if path is None:
        return None
    try:
        return shared_memory(size, path)
    except OSError:
        with contextlib.suppress(OSError):
            DISK.remove_file(path)
        return None
