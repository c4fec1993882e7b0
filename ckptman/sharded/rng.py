"""The random number generators of every rank."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import torch
from xxhash import xxh3_64_intdigest


class RNGState:
    """Python's, NumPy's, torch's and the device's generators, saved and restored for each rank on its own.

    On another world size, ranks that existed get their own state back; a rank that is new gets generators seeded
    from the state of rank `r % saved` and its own number, so that no two ranks draw the same numbers.
    """

    per_rank = True
    """Tells the Checkpointer to save this object once for each rank."""

    def state_dict(self) -> dict[str, Any]:
        """The state of this process, as one JSON text: no pickle, and one small value for a rank."""
        return self.encoded(self.generators())

    def generators(self) -> dict[str, Any]:
        """Copies of what each generator is at now: little work, for who may need `encoded` of it later."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if torch.accelerator.is_available():
            state["device"] = torch.get_device_module().get_rng_state()
        numpy_state = _numpy_state()
        if numpy_state is not None:
            state["numpy"] = numpy_state
        return state

    def encoded(self, generators: dict[str, Any]) -> dict[str, Any]:
        """What `state_dict` gives for what `generators` gave."""
        state = {name: _text(each) if isinstance(each, torch.Tensor) else each for name, each in generators.items()}
        if "numpy" in generators:
            name, keys, *rest = generators["numpy"]
            state["numpy"] = [name, keys.tolist(), *rest]
        return {"generators": json.dumps(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put every generator that was saved, and that exists here, back to where it was."""
        saved = json.loads(state["generators"])
        version, internal, gauss = saved["python"]
        random.setstate((version, tuple(internal), gauss))
        torch.set_rng_state(_tensor(saved["torch"]))
        if "device" in saved and torch.accelerator.is_available():
            torch.get_device_module().set_rng_state(_tensor(saved["device"]))
        if "numpy" in saved:
            _set_numpy_state(saved["numpy"])

    def load_from_other_rank(self, state: dict[str, Any], rank: int) -> None:
        """Seed a rank that did not exist at save time, deterministically and unlike any other rank."""
        seed = xxh3_64_intdigest(state["generators"].encode(), seed=rank)
        random.seed(seed)
        torch.manual_seed(seed)
        try:
            import numpy
        except ImportError:
            return
        numpy.random.seed(seed % 2**32)


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
