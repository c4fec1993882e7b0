"""The random number generators of every rank."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import random
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

_MT19937_BYTES = 624 * 4 + 4


class RNGState:
    """Python's, NumPy's, torch's and the device's generators, saved and restored for each rank on its own.

    That of the device is saved where the process has used the device: a run on the CPU makes no CUDA context.
    On another world size, ranks that existed get their own state back. A rank that is new gets each generator that all
    ranks had alike, as groups that have to draw the same numbers need it. The others are seeded from the state of
    another rank and its own number, so that no two ranks draw the same numbers.
    """

    per_rank = True
    """Tells the Checkpointer to save this object once for each rank."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process, as one JSON text: no pickle, and one small value for a rank."""
        return self.encoded(self.generators())

    def generators(self) -> dict[str, Any]:
        """Return copies of what each generator is at now: little work, for who may need `encoded` of it later."""
        # A subclass need not call an __init__ of this class.
        kept = self.__dict__.get("_kept")
        if kept is None:
            kept = self._kept = _Kept(_python_state, _python_memory), _Kept(_numpy_state, _numpy_memory)
        state: dict[str, Any] = {"python": kept[0].state(), "torch": torch.get_rng_state()}
        device = _device_module()
        if device is not None and _is_in_use(device):  # of another one it would make the process a user of the device
            state["device"] = device.get_rng_state()
        if (numpy_state := kept[1].state()) is not None:
            state["numpy"] = numpy_state
        return state

    def encoded(self, generators: dict[str, Any]) -> dict[str, Any]:
        """Return what `state_dict` gives for what `generators` gave."""
        state = {name: _text(each) if isinstance(each, torch.Tensor) else each for name, each in generators.items()}
        if "numpy" in generators:
            name, keys, *rest = generators["numpy"]
            state["numpy"] = [name, keys.tolist(), *rest]
        return {"generators": json.dumps(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put every generator that was saved, and that exists here, back to where it was."""
        saved = json.loads(state["generators"])
        for name in saved:
            _put_back(name, saved[name])

    def load_from_other_rank(self, state: dict[str, Any], rank: int, alike: Collection[str] = ()) -> None:
        """Seed a rank that did not exist at save time, deterministically and unlike any other rank.

        Args:
            state: The state of another rank.
            rank: The number of this one.
            alike: The generators that were the same on all ranks: this one gets them, too.
        """
        seed = xxh3_64_intdigest(state["generators"].encode(), seed=rank)
        random.seed(seed)
        torch.manual_seed(seed)
        with contextlib.suppress(ImportError):
            import numpy

            numpy.random.seed(seed % 2**32)
        saved = json.loads(state["generators"])
        for name in saved.keys() & set(alike):
            _put_back(name, saved[name])

    @staticmethod
    def digests(state: dict[str, Any]) -> dict[str, str]:
        """Return a digest of each generator in a saved state; none, if it is that of another object."""
        try:
            saved = json.loads(state["generators"])
        except (KeyError, TypeError, ValueError):
            return {}
        return {name: xxh3_64_hexdigest(json.dumps(each).encode()) for name, each in saved.items()}


def _put_back(name: str, state: Any) -> None:
    if name == "python":
        version, internal, gauss = state
        random.setstate((version, tuple(internal), gauss))
    elif name == "torch":
        torch.set_rng_state(_tensor(state))
    elif name == "numpy":
        _set_numpy_state(state)
    elif (device := _device_module()) is not None and device.is_available():
        if not _is_in_use(device):
            # Else torch does it at the first use, and before the seeds that wait for that, which would win.
            device.init()
        device.set_rng_state(_tensor(state))


class _Kept:
    """The state of a generator, read anew only where its memory has changed: at each step that would be most of what a
    step costs. `read`: its state; `memory`: copies of all bytes and objects that are its state, None where there is no
    way to see them."""

    def __init__(self, read: Callable[[], Any], memory: Callable[[], Any]) -> None:
        self._read, self._memory = read, memory
        self._seen: Any = None
        self._state: Any = None

    def state(self) -> Any:
        seen = self._memory()
        if seen is None or seen != self._seen:
            self._state, self._seen = self._read(), seen
        return self._state


def _device_module() -> Any:
    """Return the module of the accelerator that torch was built for, such as torch.cuda; None: for none."""
    device = torch.accelerator.current_accelerator()
    return None if device is None else torch.get_device_module(device)


def _is_in_use(device: Any) -> bool:
    """Whether this process has used the device. Those that need no initialisation say only whether they are there."""
    return bool(getattr(device, "is_initialized", device.is_available)())


def _bytes_of(thing: Any) -> bytes:
    """The fields of an object that is written in C, behind its head."""
    head = object.__basicsize__
    return ctypes.string_at(id(thing) + head, type(thing).__basicsize__ - head)


def _python_state() -> Any:
    return random.getstate()  # looked up now: a copy of the method would be one of the generator, too


def _python_memory() -> Any:
    generator: Any = getattr(random.getstate, "__self__", None)
    if sys.implementation.name != "cpython" or type(generator) is not random.Random:
        return None
    return _bytes_of(generator), getattr(generator, "gauss_next", None)


def _numpy_memory() -> Any:
    numpy = sys.modules.get("numpy")
    if sys.implementation.name != "cpython" or numpy is None or not hasattr(numpy.random, "get_bit_generator"):
        return None
    legacy, bits = getattr(numpy.random.get_state, "__self__", None), numpy.random.get_bit_generator()
    if legacy is None or type(bits).__name__ != "MT19937":
        return None
    # The generator holds its last normal number, and the bits are elsewhere.
    return _bytes_of(legacy), ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _numpy_state() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy.random.get_state(legacy=True)


def _set_numpy_state(state: Any) -> None:
    try:
        import numpy
    except ImportError:
        return
    name, keys, position, has_gauss, gauss = state
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
