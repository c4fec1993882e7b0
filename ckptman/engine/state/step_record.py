"""What `Checkpointer.step` saw of a state, so that the save at the end of a run is of that step, or is not made; and
the steps of optimizers, counted, and held back while what they change is being copied.

A training loop may go on after its last `step()`: it fetches a batch too many, or breaks after a forward pass. Of
modules and optimizers it is noticed whether they were changed since, by the version counters that torch keeps of
tensors. Of all other objects, which are small, what they gave at the step is kept, and saved.
"""

from __future__ import annotations

import copy
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ckptman._torch_compat import buffers_of, local_tensor, parameters_of, versions_of
from ckptman.engine.state.accelerators import is_capturing
from ckptman.engine.state.generators import RNGState
from ckptman.engine.state.local_shards import is_dense, local_parts
from ckptman.engine.state.modules import module_of
from ckptman.engine.state.named_state import is_stateful
from ckptman.engine.state.snapshot import Snapshot

SHARE = 0.02
"""How much of a step recording may take: an object that takes longer is not asked at each step."""
_FLOOR_SECONDS = 0.001
_SLOW_STEPS = 3
_SLOW_SECONDS = 0.1
"""What so many steps in a row have to take together. All of it in time of this thread's CPU: on a busy machine, or
beside a save, it may have to wait for its turn at each step, which is nothing that the object does."""
_CLONED_BYTES = 16 * 1024
_FIXED = frozenset((int, float, str, bytes, bool, complex, type(None), torch.Size, torch.dtype))


class OptimizerHooks:
    """Counts the steps that the optimizers of a state make, and calls `before_step` ahead of each step of any optimizer
    of this process: what it changes may still be being copied.

    `others`: what other optimizers of this process have made a step since this was cleared. One may be within another
    object of the state, and what the fused kind changes is not counted by torch.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.before_step: Callable[[], None] | None = None
        self.count = 0
        """Steps so far of the optimizers of the state."""
        self.others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._state, self._captured, self._pid = state, False, os.getpid()
        self._called: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hooks = [
            register_optimizer_step_pre_hook(_calling(weakref.WeakMethod(self._about_to_step))),
            register_optimizer_step_post_hook(_calling(weakref.WeakMethod(self._stepped))),
        ]

    @property
    def graphed(self) -> bool:
        """Whether a step was captured into a graph, which calls no hook when it is replayed, or is meant to be."""
        groups = (group for each in self._own() for group in each.param_groups)
        return self._captured or any(group.get("capturable") for group in groups)

    def called_since(self) -> bool:
        """Return whether every optimizer of the state has made a step that called its hooks since this was asked last.
        Of another one it is not known whether a graph makes its steps, captured before there were any hooks."""
        called, self._called = self._called, weakref.WeakSet()
        return all(each in called for each in self._own())

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Inside, steps do not count: torch makes one on zero gradients to learn what state an optimizer has."""
        count = self.count
        try:
            yield
        finally:
            self.count = count

    def close(self) -> None:
        """Take the hooks off again."""
        for hook in self._hooks:
            hook.remove()

    def _own(self) -> list[torch.optim.Optimizer]:
        return [each for each in self._state.values() if isinstance(each, torch.optim.Optimizer)]

    def _about_to_step(self, optimizer: torch.optim.Optimizer) -> None:
        if is_capturing():
            self._captured = True
        else:
            self._called.add(optimizer)
        if self.before_step is not None and os.getpid() == self._pid:  # a fork has no thread that it could wait for
            self.before_step()

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if any(each is optimizer for each in self._state.values()):
            self.count += 1
        else:
            self.others.add(optimizer)


class ChangeCounters:
    """Tensors, and how often each had been changed by then, as torch counts it; and where its memory was."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._tensors = list(tensors)
        self._then = self._look()

    def unchanged(self) -> bool:
        """Return whether none was changed since. What torch keeps no count of (inference mode) may have been."""
        return -1 not in self._then[0] and self._look() == self._then

    @property
    def addresses(self) -> list[int]:
        """Where the memory of each was."""
        return self._then[1]

    def _look(self) -> tuple[list[int], list[int]]:
        if not self._tensors:  # as of most objects, at each step
            return [], []
        local: list[Any] = [local_tensor(each) if type(each) is DTensor else each for each in self._tensors]
        try:
            return versions_of(local), list(map(torch.Tensor.data_ptr, local))
        except RuntimeError:  # one was made in inference mode, where nothing is counted, or is made of others
            return list(map(_version, local)), list(map(_address, local))

    def same(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether these are the very tensors, in this order."""
        found = list(tensors)
        return len(found) == len(self._tensors) and all(a is b for a, b in zip(found, self._tensors))


class RecordedStep:
    """An object of the state as it was at a step: its state dict of then."""

    def __init__(self, value: object, values: Any, decode: Callable[[Any], Any] | None = None) -> None:
        self._values, self._decode = values, decode
        self.value = getattr(value, "value", None)
        """What it is around: an optimizer, whose parameters have names."""
        self.per_rank, self.from_rank0 = (bool(getattr(value, kind, False)) for kind in ("per_rank", "from_rank0"))

    def state_dict(self) -> Any:
        """Return what the object had given."""
        return self._values if self._decode is None else self._decode(self._values)

    def load_state_dict(self, state: Any) -> None:
        """Nothing is ever loaded into it."""
        raise NotImplementedError


class Settings:
    """An optimizer, with the settings of its groups at a step, and what tells whether it holds the same as then."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.groups = [dict(group) for group in optimizer.param_groups]
        for group in self.groups:
            del group["params"]
        settings = (each for group in self.groups for each in group.values())
        self._marks = ChangeCounters([each for each in settings if isinstance(each, torch.Tensor)])
        self._state, self._sizes = optimizer.state, self._look()

    def unchanged(self) -> bool:
        """Return whether it has the same parameters and state, and no tensor among its settings was changed since."""
        is_same = self.optimizer.state is self._state and self._look() == self._sizes
        return is_same and self._marks.unchanged()

    def _look(self) -> list[int]:
        return [len(self.optimizer.state), *(len(group["params"]) for group in self.optimizer.param_groups)]


@dataclass
class Recorded:
    """A state as it was when a step ended.

    `names` of its entries; `modules` and `optimizers` among them, with marks of their tensors and their settings;
    `others` as they were, with marks of the tensors that were not copied; `updates`: optimizer steps so far; `unknown`:
    why it cannot be told what the state was, or "".
    """

    @property
    def addresses(self) -> set[int]:
        """Where the tensors are that are watched."""
        marks = [*(each[1] for each in self.modules.values()), *(each[1] for each in self.others.values())]
        return {address for each in marks for address in each.addresses}

    names: tuple[str, ...] = ()
    modules: dict[str, tuple[torch.nn.Module, ChangeCounters]] = field(default_factory=dict)
    optimizers: dict[str, Settings] = field(default_factory=dict)
    others: dict[str, tuple[Any, ChangeCounters]] = field(default_factory=dict)
    updates: int = 0
    unknown: str = ""


class StepRecorder:
    """Records a state at the end of steps. Every rank has one."""

    def __init__(self, state: Mapping[str, Any], hooks: OptimizerHooks) -> None:
        self._state, self._hooks = state, hooks
        self._walks: dict[str, tuple[torch.nn.Module, Callable[[], Iterable[torch.Tensor]]]] = {}
        self._slow: list[float] = []
        self.too_slow = ""
        """The object whose `state_dict()` takes too long on this rank to be called at each step; "": there is none."""
        self.given_up = False
        """Whether such objects are not asked any more. All ranks agree on it: what they are asked may wait for all."""

    def refresh(self) -> None:
        """Look at the structure of the modules anew, as it is when their state is taken for a save."""
        self._walks.clear()

    def record(self, step_seconds: float | None) -> Recorded:
        """Return what is to be seen of the state now. Never raises: what is wrong with it is for a save to tell."""
        found = Recorded(tuple(self._state), updates=self._hooks.count)
        self._hooks.others.clear()
        try:
            self._record(found, step_seconds)
        except Exception as error:  # noqa: BLE001 a user's state_dict() may raise anything
            found.unknown = f"its state could not be asked for ({type(error).__name__})"
        return found

    def changed(self, then: Recorded) -> str:
        """Return what keeps the state from being saved as that of `then`, in words; "": nothing does."""
        if then.unknown:
            return then.unknown
        if self._hooks.count != then.updates:
            return "an optimizer has made a step since"
        if not then.addresses.isdisjoint(_addresses_of(self._hooks.others)):
            return "an optimizer has made a step since, on tensors of the state"
        if then.names != tuple(self._state):
            return "the state has other entries by now"
        for name, value in self._state.items():
            if (module := module_of(value)) is not None:
                recorded, marks = then.modules.get(name, (None, ChangeCounters()))
                if recorded is not module or not marks.same(_walk(module)()) or not marks.unchanged():
                    return f"{name!r} was changed since (a forward pass in training mode changes BatchNorm, for one)"
            elif isinstance(value, torch.optim.Optimizer):
                settings = then.optimizers.get(name)
                if settings is None or settings.optimizer is not value or not settings.unchanged():
                    return f"{name!r} was changed since"
            elif name not in then.others or not then.others[name][1].unchanged():
                return f"{name!r} was changed since"
        return ""

    @contextmanager
    def as_of(self, then: Recorded) -> Iterator[dict[str, Any]]:
        """Give the state of `then`, of which `changed` found nothing, while its values are taken for a save."""
        groups = [
            (group, settings, dict(group))
            for each in then.optimizers.values()
            for group, settings in zip(each.optimizer.param_groups, each.groups)
        ]
        try:
            for group, settings, _ in groups:
                group.update(settings)
            yield {name: then.others[name][0] if name in then.others else each for name, each in self._state.items()}
        finally:
            for group, _, now in groups:
                group.update(now)

    def _record(self, found: Recorded, step_seconds: float | None) -> None:
        spent: dict[str, float] = {}
        for name, value in self._state.items():
            if (module := module_of(value)) is not None:
                found.modules[name] = module, ChangeCounters(self._tensors(name, module))
            elif isinstance(value, torch.optim.Optimizer):
                found.optimizers[name] = Settings(value)
            elif self.given_up:
                found.unknown = "an object in the state takes too long to be asked for its state at each step"
            else:
                begun = time.thread_time()
                found.others[name] = _keep(value)
                spent[name] = time.thread_time() - begun
        if step_seconds is not None and not self.given_up:
            seconds = sum(spent.values())
            self._slow = [*self._slow, seconds] if seconds > max(_FLOOR_SECONDS, SHARE * step_seconds) else []
            if len(self._slow) >= _SLOW_STEPS and sum(self._slow) >= _SLOW_SECONDS:
                self.too_slow = max(spent, key=spent.__getitem__)

    def _tensors(self, name: str, module: torch.nn.Module) -> Iterable[torch.Tensor]:
        known = self._walks.get(name)
        if known is None or known[0] is not module:
            known = self._walks[name] = module, _walk(module)
        return known[1]()


def _calling(method: weakref.WeakMethod[Callable[..., None]]) -> Callable[..., None]:
    """Return what calls a method of an object that it does not keep alive: a hook of the process may outlive it."""

    def call(optimizer: object, *_: object) -> None:
        if (called := method()) is not None:
            called(optimizer)

    return call


def updated_tensors(state: Mapping[str, Any], snapshot: Snapshot) -> set[str]:
    """Flat names of the tensors that change in optimizer steps alone: the parameters the optimizers of the state have,
    and the optimizers' own state. A forward pass may change anything else, buffers above all."""
    optimizers = {name: each for name, each in state.items() if isinstance(each, torch.optim.Optimizer)}
    parameters = [
        each for optimizer in optimizers.values() for group in optimizer.param_groups for each in group["params"]
    ]
    memory = {part.data_ptr() for each in parameters for _, part in local_parts(each)}
    # Not its groups: a learning rate that is a tensor changes when a schedule says so.
    states = tuple(f"{name}.state." for name in optimizers)
    names = set()
    for name, tensor in snapshot.tensors.items():
        if name.startswith(states) or any(part.data_ptr() in memory for _, part in local_parts(tensor)):
            names.add(name)
    return names


def _walk(module: torch.nn.Module) -> Callable[[], Iterable[torch.Tensor]]:
    """Return what gives the parameters and buffers of a module, without walking through its submodules again."""
    modules = list(module.modules())
    holders: list[Mapping[str, torch.Tensor | None]] = [held for each in modules if (held := buffers_of(each))]
    fixed: list[torch.Tensor] = []
    if any(isinstance(each, FSDPModule) for each in modules):  # has others in their place during a forward pass
        fixed = list(module.parameters())
    else:
        holders += [held for each in modules if (held := parameters_of(each))]
    return lambda: [*fixed, *(each for holder in holders for each in holder.values() if each is not None)]


def _version(tensor: torch.Tensor) -> int:
    try:
        return versions_of([tensor])[0]
    except RuntimeError:  # made in inference mode, where nothing is counted
        return -1


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # of a class that is made of others
        return 0


def _addresses_of(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Return where the parameters are that optimizers update."""
    return {
        address
        for optimizer in list(optimizers)
        for group in optimizer.param_groups
        for address in ChangeCounters(group["params"]).addresses
    }


def _keep(value: Any) -> tuple[Any, ChangeCounters]:
    """Return an object of the state as it is now, and marks of the tensors that it shares with the live one."""
    tensors: list[torch.Tensor] = []
    if isinstance(value, RNGState):
        kept: Any = RecordedStep(value, value.generators(), value.encoded)
    elif isinstance(value, torch.Tensor) and value.requires_grad:  # a parameter, by which its optimizer knows it
        kept = value
        tensors.append(value)
    elif getattr(value, "per_rank", False) or is_stateful(value):
        kept = RecordedStep(value, _copy(value.state_dict(), tensors))
    else:
        kept = _copy(value, tensors)
    return kept, ChangeCounters(tensors)


def _copy(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a copy of containers and of small tensors. Larger tensors are not copied, but added to `tensors`."""
    kind = type(value)
    if kind in _FIXED:
        return value
    if isinstance(value, torch.Tensor):
        if kind is torch.Tensor and value.device.type == "cpu" and value.nbytes <= _CLONED_BYTES and is_dense(value):
            return value.detach().clone()
        tensors.append(value)
        return value
    if kind is dict:
        return {key: _copy(each, tensors) for key, each in value.items()}
    if kind is list:
        return [_copy(each, tensors) for each in value]
    if kind is tuple:
        return tuple([_copy(each, tensors) for each in value])
    if isinstance(value, MutableMapping):  # such as an OrderedDict
        mapping = copy.copy(value)
        for key, each in value.items():
            mapping[key] = _copy(each, tensors)
        return mapping
    return copy.copy(value)
