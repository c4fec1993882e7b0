"""The program's own objects fail in a restore: that is the program's fault, and no checkpoint's.

Each case has an object of the state raise an error at one of its calls, once or from then on. The restore says so, or
gives the newest checkpoint; it never gives an older one. Afterwards the program without the fault gets the newest
checkpoint, with no word of damage.
"""

import errno
import pickle
import struct
import tempfile
import warnings
import zipfile
import zlib
from pathlib import Path

import torch
from torch import nn

import ckptman
from tests.faults.limits import limit
from tests.faults.subject import blank, content, open_run, version_of

CASES = 1200
SECONDS = 30.0
NEWEST = 3
CALLS = 6
"""A fault comes at one of the first so many calls."""
ERRORS = (
    lambda: ValueError("not as I want it"),
    lambda: KeyError("exp_avg"),
    lambda: TypeError("unhashable type: 'list'"),
    lambda: IndexError("list index out of range"),
    lambda: AttributeError("'NoneType' object has no attribute 'shape'"),
    lambda: AssertionError(),
    lambda: StopIteration(),
    lambda: RuntimeError("The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0"),
    lambda: RecursionError("maximum recursion depth exceeded"),
    lambda: NotImplementedError(),
    lambda: EOFError("Ran out of input"),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    lambda: pickle.UnpicklingError("invalid load key, '\\x00'."),
    lambda: struct.error("unpack requires a buffer of 8 bytes"),
    lambda: zlib.error("Error -3 while decompressing data"),
    lambda: zipfile.BadZipFile("File is not a zip file"),
)
OF_FILES = (
    lambda: FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/index.json"),
    lambda: PermissionError(errno.EACCES, "Permission denied", "/data/index.json"),
    lambda: OSError(errno.EIO, "Input/output error", "/data/index.json"),
    lambda: OSError("a file is truncated"),
    lambda: ckptman.CorruptError("/other/step-0000000001/index.json was cut: restore an older checkpoint"),
    lambda: ckptman.MismatchError("/other/step-0000000001", ["a"], [], []),
)
"""From objects that open files or load a checkpoint of their own. A function of a tensor does not."""


class Fault:
    """Raises an error of the program's at call `at` of a place, and if `stays` at each one from then on."""

    def __init__(self, at=0, make=ERRORS[0], stays=True):
        self.at, self.make, self.stays, self.calls = at, make, stays, 0
        self.armed = False

    def __call__(self):
        if self.armed:
            self.calls += 1
            if self.calls == self.at or (self.stays and self.calls > self.at):
                raise self.make()

    @property
    def struck(self):
        return self.calls >= self.at


class Object:
    """Any object with a pair of state_dict() and load_state_dict()."""

    def __init__(self, version, fault, place):
        self.fault, self.place, self.held = fault, place, {"n": version, "t": torch.full((3,), float(version))}

    def state_dict(self):
        if self.place == "state_dict":
            self.fault()
        return dict(self.held)

    def load_state_dict(self, state):
        if self.place == "load_state_dict":
            self.fault()
        self.held = dict(state)

    @property
    def version(self):
        return self.held["n"] if torch.equal(self.held["t"], torch.full((3,), float(self.held["n"]))) else None


class Module(nn.Module):
    """A module with state of its own, and hooks."""

    def __init__(self, version, fault, place):
        super().__init__()
        self.fault, self.place, self.n = fault, place, version
        self.weight = nn.Parameter(torch.full((4, 5), float(version)))
        if place == "hook after":
            self.register_load_state_dict_post_hook(lambda *_: fault())
        if place == "hook before":
            self._register_load_state_dict_pre_hook(lambda *_: fault())
        if place == "state hook":
            self._register_state_dict_hook(lambda *_: fault())

    def get_extra_state(self):
        if self.place == "get_extra_state":
            self.fault()
        return {"n": self.n}

    def set_extra_state(self, state):
        if self.place == "set_extra_state":
            self.fault()
        self.n = state["n"]

    @property
    def version(self):
        return self.n if torch.equal(self.weight, torch.full((4, 5), float(self.n))) else None


class Optimizer(torch.optim.Adam):
    """An optimizer of the program's."""

    def __init__(self, version, fault, place):
        self.parameter = nn.Parameter(torch.full((6,), float(version)))
        super().__init__([self.parameter])
        self.fault, self.place = fault, place
        self.parameter.grad = torch.ones(6)
        for _ in range(version):
            super().step()
        with torch.no_grad():
            self.parameter.fill_(version)

    def state_dict(self):
        if self.place == "state_dict":
            self.fault()
        return super().state_dict()

    def load_state_dict(self, state):
        if self.place == "load_state_dict":
            self.fault()
        return super().load_state_dict(state)

    def __setstate__(self, state):
        if getattr(self, "place", "") == "__setstate__":
            self.fault()
        super().__setstate__(state)

    @property
    def version(self):
        steps = int(self.state[self.parameter]["step"]) if self.state else 0
        return steps if torch.equal(self.parameter, torch.full((6,), float(steps))) else None


class Tensor(torch.Tensor):
    """A tensor of a class of the program's, which fails at one of the functions of torch."""

    place, fault = "", staticmethod(Fault())

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if cls.place in (getattr(function, "__name__", ""), "any"):
            cls.fault()
        return super().__torch_function__(function, types, args, kwargs or {})


class OfTensor:
    """One of the latter in the state itself."""

    def __init__(self, version, fault, place):
        kind = type("TensorOfMine", (Tensor,), {"fault": staticmethod(fault), "place": place})
        self.tensor = torch.full((30,), float(version)).as_subclass(kind)

    @property
    def version(self):
        values = self.tensor.as_subclass(torch.Tensor)
        return int(values[0]) if torch.equal(values, values[0].expand(30)) else None


PLACES = (
    *((Object, place) for place in ("state_dict", "load_state_dict")),
    *((Module, place) for place in ("hook after", "hook before", "state hook", "get_extra_state", "set_extra_state")),
    *((Optimizer, place) for place in ("state_dict", "load_state_dict", "__setstate__")),
    *((OfTensor, place) for place in ("any", "detach", "copy_", "__get__", "numel")),
)


def state_of(made):
    """What a run saves: the campaign's state, and the object in the middle of it."""
    if isinstance(made, Optimizer):
        return {"parameter": made.parameter, "object": made}
    return {"object": made.tensor if isinstance(made, OfTensor) else made}


def run(tally):
    """1,200 restores, each with a fault at one call."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for number in range(tally.count(CASES, least=len(PLACES))):
            kind, place = PLACES[number % len(PLACES)]
            errors = ERRORS if kind is OfTensor else (*ERRORS, *OF_FILES)
            make, at, stays = tally.dice.choice(errors), tally.dice.randint(1, CALLS), tally.dice.random() < 0.5
            fault = Fault(at, make, stays)
            case = f"{kind.__name__}, {place}: {make()!r} at call {at}{' and later' * stays}"
            with tally.fault(case, place), limit(SECONDS, "a restore"):
                if not _one(tally, Path(folder, kind.__name__), kind, place, fault):
                    tally.injected -= 1
                    tally.parts[place] -= 1


def _one(tally, root, kind, place, fault):
    """Whether the fault was met."""
    if not root.exists():
        _save(root, kind)
    made = kind(0, fault, place)
    state, error, start = {**blank(), **state_of(made)}, None, None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with open_run(root, state, signals=None) as checkpointer:
                fault.armed = True
                try:
                    start = checkpointer.restore()
                finally:
                    fault.armed = False
        except Exception as failed:
            error = failed
    if not fault.struck:
        return False
    if error is not None:
        tally.refuse(error)
    else:
        tally.survive()
        tally.check(start == NEWEST == version_of(state) == made.version, "wrong", f"restored {start}, {made.version}")
    for each in told:
        tally.check(
            "skipping the checkpoint" not in str(each.message), "lost", f"a good one is skipped: {each.message}"
        )
    sound = kind(0, Fault(), "")
    state = {**blank(), **state_of(sound)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_run(root, state, signals=None) as checkpointer:
            start = checkpointer.restore()
    tally.check(
        start == NEWEST == version_of(state) == sound.version,
        "lost",
        f"then the program without the fault got {start}, {version_of(state)}, {sound.version}",
    )
    return True


def _save(root, kind):
    for version in range(1, NEWEST + 1):
        before, state = (state_of(kind(each, Fault(), "")) for each in (0, version))
        if kind is OfTensor:
            before, state = ({"object": each["object"].as_subclass(torch.Tensor)} for each in (before, state))
        with open_run(root, {**blank(), **before}, async_save=False, signals=None) as checkpointer:
            checkpointer.restore()
            checkpointer.state.update({**content(version), **state})
            checkpointer.save(version)
