"""Staging: a private copy in host memory, so that training may go on while the copy is written.

A slot is the image of this rank's data file: what is copied into it lies where it will lie in the file, on pages, and
goes to storage without another copy. Slots are reused, because fresh memory is several times slower than warm memory;
a second one is made when a save comes while the first is still being written.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from ckptman.io.threads import Task, Wakeup, Worker, aligned_memory
from ckptman.io.writer_process import shared_memory
from ckptman.runtime.host_memory import available_bytes
from ckptman.saving.write_plan import RankFile
from ckptman.state.file_layout import flat, put, view_of

SLOTS = 2
RESERVE_BYTES = 512 * 1024 * 1024
"""Host memory that staging leaves to each rank: what a save takes besides, and some for the user's own program."""


class Slot:
    """Host memory for one staged copy, touched once so that it is warm. Pinned if the tensors are on a device."""

    def __init__(self, file: RankFile, memory: Sequence[torch.Tensor]) -> None:
        pinned = any(each.device.type != "cpu" for each in memory)
        self._bytes, self.fd = _allocate(file.end, pinned)
        self.memory = view_of(self._bytes)
        self.free = True
        for start, data in file.literals:
            self.memory[start : start + len(data)] = data
        self._targets = []
        for place, each in zip(file.places, memory):
            size = each.numel() * each.dtype.itemsize
            target = self._bytes[place.payload : place.payload + size].view(each.dtype).view(each.shape)
            self._targets.append(target if size else torch.empty_like(target))

    def copy(self, memory: Sequence[torch.Tensor], numbers: Collection[int]) -> None:
        """Copy the tensors of these numbers into their places; from a device without waiting for it."""
        for number in numbers:
            # A lazy conjugation would be made up for on the host, before a copy that is not waited for has arrived.
            source, target = memory[number].resolve_conj().resolve_neg(), self._targets[number]
            put(target, source, non_blocking=True)


class Staged:
    """A copy that is complete after `wait`.

    `copied`: what a thread still copies; `events`: what devices still copy, from `sources`, which are kept until then:
    freed ones would be overwritten by the next forward.
    """

    def __init__(
        self,
        slot: Slot,
        freed: Wakeup,
        copied: Task[None] | None = None,
        events: Sequence[tuple[torch.device, Any]] = (),
        sources: Sequence[torch.Tensor] = (),
    ) -> None:
        self.slot, self._freed, self._copied, self._events = slot, freed, copied, events
        self._sources = sources
        self._released = threading.Lock()

    def wait(self) -> None:
        """Wait until all is copied, on the calling thread."""
        if self._copied is not None:
            self._copied.result()
        for _, event in self._events:
            event.synchronize()

    def wait_staged(self) -> None:
        """Keep what comes next on this thread, or on its device's stream, from changing what is still being copied."""
        if self._copied is not None:
            self._copied.wait()  # what went wrong is for the save to tell, not for the optimizer step that waits here
        for device, event in self._events:
            torch.get_device_module(device).current_stream(device).wait_event(event)

    def release(self) -> None:
        """Give the slot back. Only the first call does: the slot may have another copy in it by then."""
        with contextlib.suppress(Exception):  # what went wrong is for the save to tell
            self.wait()
        if self._released.acquire(blocking=False):
            self.slot.free = True
            self._freed.notify()


class Stager:
    """Makes private copies, in at most `SLOTS` slots.

    Args:
        saves: the thread that writes from the slots. While it is idle, all of them are free.
    """

    def __init__(self, saves: Worker) -> None:
        self.saves = saves
        self.neighbours = 1
        """How many ranks this host has, this one included."""
        self._slots: list[Slot] = []
        self._freed = Wakeup()
        self._file: RankFile | None = None
        self._copier = Worker("ckptman-stage")
        self._streams: dict[torch.device, Any] = {}

    def needs(self, file: RankFile) -> tuple[str, int, int]:
        """Return this host, the bytes that a slot for `file` takes, and those that are left once the slots of before
        are given back."""
        return socket.gethostname(), file.end, available_bytes() + self.held_bytes

    @property
    def held_bytes(self) -> int:
        """Host memory of all slots."""
        return sum(len(slot.memory) for slot in self._slots)

    def prepare(self, file: RankFile, memory: Sequence[torch.Tensor]) -> None:
        """Make the first slot for a file, so that the first save finds it warm. Raises: MemoryError, RuntimeError."""
        if self._file is not file:
            self.give_back()
            self._slots.append(Slot(file, memory))
            self._file = file  # last: with a file and no slot, a save would wait for one for ever

    def give_back(self) -> None:
        """Give up all slots, when they are no longer needed."""
        self._freed.wait_for(lambda: all(slot.free for slot in self._reclaimed()))
        self._slots.clear()
        self._file = None

    def stage(self, file: RankFile, memory: Sequence[torch.Tensor], later: AbstractSet[int] = frozenset()) -> Staged:
        """Copy. The tensors whose numbers are in `later` may still be copied when this returns.

        Waits for a slot if all are being written.
        """
        self.prepare(file, memory)
        slot = self._free_slot(file, memory)
        now = [number for number in range(len(memory)) if number not in later]
        slot.free = False
        try:
            if any(each.device.type != "cpu" for each in memory):
                return self._from_device(slot, memory, now, later)
            if not later:
                slot.copy(memory, now)
                return Staged(slot, self._freed)
            copied: Task[None] = self._copier.submit(slot.copy, memory, later)
            try:
                slot.copy(memory, now)
            except BaseException:
                copied.wait()  # a slot that is free is one that nobody writes to
                raise
            return Staged(slot, self._freed, copied)
        except BaseException:
            slot.free = True
            raise

    def close(self) -> None:
        """Stop the thread that copies, and give up the slots."""
        self._copier.close()
        self._slots.clear()
        self._file = None

    def _free_slot(self, file: RankFile, memory: Sequence[torch.Tensor]) -> Slot:
        if all(not slot.free for slot in self._reclaimed()) and len(self._slots) < SLOTS and self._has_room(file):
            with contextlib.suppress(MemoryError, RuntimeError, OSError):  # then it waits for the first
                self._slots.append(Slot(file, memory))
        self._freed.wait_for(lambda: any(slot.free for slot in self._reclaimed()))
        return next(slot for slot in self._slots if slot.free)

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

    def _from_device(
        self, slot: Slot, memory: Sequence[torch.Tensor], now: Sequence[int], later: Collection[int]
    ) -> Staged:
        events: list[tuple[torch.device, Any]] = []
        urgent: list[Any] = []
        for device in dict.fromkeys(each.device for each in memory if each.device.type != "cpu"):
            module = torch.get_device_module(device)
            if not hasattr(module, "Stream"):  # such as MPS
                slot.copy(memory, [number for number, each in enumerate(memory) if each.device == device])
                module.synchronize()
                continue
            if device not in self._streams:
                self._streams[device] = module.Stream(device)
            stream = self._streams[device]
            stream.wait_stream(module.current_stream(device))
            with module.stream(stream):
                slot.copy(memory, [number for number in now if memory[number].device == device])
                urgent.append(stream.record_event())
                slot.copy(memory, [number for number in later if memory[number].device == device])
                events.append((device, stream.record_event()))
        slot.copy(memory, [number for number in range(len(memory)) if memory[number].device.type == "cpu"])
        for event in urgent:
            event.synchronize()
        return Staged(slot, self._freed, None, events, tuple(memory))


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


def _allocate(size: int, pinned: bool) -> tuple[torch.Tensor, int | None]:
    """Return zeroed memory, touched, and its descriptor, where it can be shared. Pinned, it is registered as it is:
    torch's own pool rounds up to a power of two."""
    if not size:
        return torch.empty(0, dtype=torch.uint8, device="cpu"), None
    fd = None
    try:
        memory, fd = shared_memory(size)
    except OSError:  # not on every kernel
        memory = aligned_memory(size)
    allocated = flat(memory).zero_()
    if pinned and torch.cuda.is_available():
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = runtime.cudaHostRegister(allocated.data_ptr(), size, 0)
        if int(code):
            raise MemoryError(f"{size} bytes of host memory cannot be pinned: {code}")
        weakref.finalize(memory.obj, runtime.cudaHostUnregister, allocated.data_ptr())
    return allocated, fd
