"""The modules of a state: trained in part, or wrapped by frameworks.

Of a module that is trained in part, such as adapters on a frozen base, only that part is saved.

What is frozen is told by a digest, to which those of its shards add up, however it is sharded.
What frameworks put around the objects of a state is left out, so that each loads what others saved.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from xxhash import xxh3_128_hexdigest

from ckptman._torch_compat import full_names, has_hidden_names, versions_of
from ckptman.engine.state.file_layout import put
from ckptman.engine.state.local_shards import local_parts
from ckptman.engine.state.tensor_digest import Digester, components
from ckptman.errors import ConfigError

FROZEN = "_frozen_parameters"
"""The entry of a saved Trainable that tells which frozen parameters it was trained with."""


class FrozenPart(NamedTuple):
    """A part of a frozen parameter; `shape` is that of the whole."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


class Whole(NamedTuple):
    """A frozen parameter, on all ranks together."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Trainable:
    """Save and restore only what is trained of a module: the parameters that ask for gradients, and its buffers.

        base = AutoModelForCausalLM.from_pretrained("a/base")
        model = get_peft_model(base, LoraConfig())
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        state = {"model": ckptman.Trainable(model), "optimizer": optimizer}

    They have the names that they have in a checkpoint of the whole module. What was trained once is saved from then on,
    also when it is frozen again, and a restore brings it back, frozen or not. All else has to come from where it came
    from. A checkpoint holds a digest of it, so that a restore over others is refused. It is computed once, by the first
    `restore` or `step`, and again where torch counts a change: a frozen parameter that differs by then, such as a
    moving average, is saved from then on, too.

    Args:
        module: A module, also one that a framework has wrapped.

    Raises:
        ConfigError: It is no module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module: torch.nn.Module = unwrap(module)
        if not isinstance(self.module, torch.nn.Module):
            raise ConfigError(f"Trainable is for a module, not for a {type(module).__name__}")
        self.frozen = ""
        """What identifies the frozen parameters; the ranks agree on it before a save and a load."""
        self._digested: dict[str, tuple[object, dict[FrozenPart, int]]] = {}
        self._totals: dict[Whole, int] = {}
        self._trained: set[str] = set()
        """The names of the parameters that were seen to be trained."""
        self._loaded: set[str] = set()
        """The names of what was trained before, as the checkpoint has it that was loaded."""
        self._watched: list[torch.nn.Parameter] = []
        """The parameters that were frozen when this looked last, and were never trained."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved: the live tensors that are trained, and what identifies the others."""
        frozen = self._frozen_tensors()
        values = {name: each for name, each in module_state(self.module).items() if name not in frozen}
        return {**values, FROZEN: self.frozen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what was saved. Whether the frozen parameters are the same is the caller's to check."""
        values = {name: each for name, each in state.items() if name != FROZEN}
        load_module(self.module, values, strict=False)

    def expect(self, saved: Mapping[str, Any]) -> None:
        """Take it, before a load, that what a checkpoint holds was trained, and that all else is as it has to be."""
        self._loaded = set(saved) if FROZEN in saved else set()
        self._totals = {}

    @contextmanager
    def filled_or_as_before(self) -> Iterator[None]:
        """Where a load fails within, what is frozen is as before: an older checkpoint may not have it. What the load
        would fill of that is copied to host memory first."""
        filled = [each for name, each in self._tensors_of(self._frozen_names()).items() if name in self._loaded]
        parts = [part for each in filled for _, part in local_parts(each)]
        before = [part.detach().to("cpu", copy=True) for part in parts]
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for part, had in zip(parts, before):
                    put(part, had)
            raise

    def __repr__(self) -> str:
        return f"Trainable({type(self.module).__name__})"

    def note_step(self) -> None:
        """Note what asks for gradients now. Called at each step: a layer may be frozen again before the next save, and
        torch does not count what the fused optimizers change. What is frozen again before the step ends is missed, if
        its optimizer is fused and keeps nothing of it."""
        if any(each.requires_grad for each in self._watched):
            self._frozen_names()

    def note_trained(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Note that what optimizers have state of was trained. It may be frozen by now."""
        updated = {id(parameter) for each in optimizers for parameter, held in each.state.items() if held}
        for names, each in named_in_full(self.module):
            if id(each) in updated:
                self._trained.update(names)

    def frozen_changed(self) -> bool:
        """Return whether frozen parameters have been changed, or are others, since they were digested."""
        frozen = self._frozen_tensors()
        return not self.frozen or {name: _mark(each) for name, each in frozen.items()} != {
            name: mark for name, (mark, _) in self._digested.items()
        }

    def digest_frozen(self) -> dict[FrozenPart, int]:
        """Return the digests of the parts of the frozen parameters that this rank holds. It reads those that were
        changed since the last time."""
        before, self._digested, digester = self._digested, {}, Digester()
        for name, tensor in self._frozen_tensors().items():
            mark = _mark(tensor)
            known = before.get(name)
            self._digested[name] = (
                known if known is not None and known[0] == mark else (mark, _digest(digester, name, tensor))
            )
        return {part: total for _, parts in self._digested.values() for part, total in parts.items()}

    def agree(self, digests: Iterable[Mapping[FrozenPart, int]]) -> None:
        """Take the digests of all ranks. What differs from those of before is trained, in whatever way.

        Raises: ConfigError where two ranks have the same part, and it differs.
        """
        totals = totals_of(digests)
        both = {whole.name for whole in totals} & {whole.name for whole in self._totals}
        changed = both & {whole.name for whole, _ in totals.items() ^ self._totals.items()}
        self._trained |= changed
        self._totals = {whole: total for whole, total in totals.items() if whole.name not in changed}
        self._digested = {name: each for name, each in self._digested.items() if name not in changed}
        self.frozen = identity_of(self._totals)

    def _frozen_tensors(self) -> dict[str, torch.Tensor]:
        """Return what is frozen, and never was trained, with what belongs to it: the scales of a quantized weight."""
        return self._tensors_of(self._frozen_names() - self._trained - self._loaded)

    def _tensors_of(self, names: set[str]) -> dict[str, torch.Tensor]:
        """Return the tensors of parameters, with what the state dict has under their names."""
        return {
            name: each
            for name, each in module_state(self.module).items()
            if isinstance(each, torch.Tensor) and not names.isdisjoint(_with_parents(name))
        }

    def _frozen_names(self) -> set[str]:
        """Return the names of what is frozen now, and note what is not as trained."""
        frozen: set[str] = set()
        watched = []
        for names, each in named_in_full(self.module):
            if each.requires_grad:
                self._trained.update(names)
            else:
                frozen.update(names)
                watched += [each] if self._trained.isdisjoint(names) else []
        self._watched = watched
        return frozen


def module_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return the tensors of a module by the names that it gives them, without those of wrappers."""
    try:
        return get_model_state_dict(module)
    except AttributeError:
        # A hook of the module gives names of which it has no parameters, such as the parts of a fused weight, and puts
        # them together again in `load_state_dict`: torch looks for such a parameter.
        return module.state_dict()


def load_module(module: torch.nn.Module, values: dict[str, Any], *, strict: bool = True) -> None:
    """Give a module what `module_state` gave, by its own `load_state_dict()`, whatever arguments that takes."""
    with _taking_keywords(module):
        set_model_state_dict(module, values, options=StateDictOptions(strict=strict))


def named_in_full(module: torch.nn.Module) -> Iterator[tuple[Collection[str], torch.nn.Parameter]]:
    """Yield each parameter of a module, once for each place that has it, with the names that its state dict has for it
    there: several for a parameter that others were flattened into."""
    is_plain = not has_hidden_names(module)
    for name, each in module.named_parameters(remove_duplicate=False):
        yield (name,) if is_plain else full_names(module, name), each


def loads_as_a_whole(module: torch.nn.Module) -> bool:
    """Return whether a module has a `load_state_dict()` of its own. Torch calls that of the outermost module alone."""
    return getattr(module.load_state_dict, "__func__", None) is not torch.nn.Module.load_state_dict


@contextmanager
def _taking_keywords(module: torch.nn.Module) -> Iterator[None]:
    """Let torch call `load_state_dict(state_dict=, strict=, assign=)` of a module whose own takes less, or by other
    names. All that a program promises by it is that `load_state_dict(state_dict)` works."""
    own, given = module.load_state_dict, vars(module)
    accepted = _keywords(own)
    if accepted is None:
        yield
        return
    before = {name: given[name] for name in ("load_state_dict",) if name in given}

    def put_own_back() -> None:
        given.pop("load_state_dict", None)
        given.update(before)

    def load(state_dict: dict[str, Any], strict: bool, assign: bool) -> Any:
        put_own_back()
        if not strict and "strict" not in accepted:
            state_dict = {**module.state_dict(), **state_dict}
        return own(state_dict, **({"strict": strict} if "strict" in accepted else {}))

    given["load_state_dict"] = load
    try:
        yield
    finally:
        put_own_back()


def _keywords(load: Callable[..., Any]) -> set[str] | None:
    """Return the names of the arguments of a `load_state_dict()`; None: it takes those that torch gives it."""
    try:
        signature = inspect.signature(load)
        signature.bind(state_dict={}, strict=True, assign=False)
    except TypeError:
        return {*signature.parameters}
    except ValueError:  # it is not written in Python
        return None
    return None


def module_of(value: object) -> torch.nn.Module | None:
    """Return an entry of the state as a module, if it is one; of a Trainable, the whole module."""
    if isinstance(value, Trainable):
        return value.module
    return value if isinstance(value, torch.nn.Module) else None


def totals_of(digests: Iterable[Mapping[FrozenPart, int]]) -> dict[Whole, int]:
    """Return the digest of each frozen parameter of which the ranks hold these parts, on any number of ranks.

    Raises: ConfigError where two ranks have the same part, and it differs.
    """
    known: dict[FrozenPart, int] = {}
    for each in digests:
        for part, total in each.items():
            if known.setdefault(part, total) != total:
                raise ConfigError(
                    f"{part.name} is frozen, and it differs between ranks: load the same base on each of them"
                )
    totals: dict[Whole, int] = {}
    for part, total in known.items():
        whole = Whole(*part[:3])
        totals[whole] = (totals.get(whole, 0) + total) % 2**64
    return totals


def identity_of(totals: Mapping[Whole, int]) -> str:
    """Return a text that identifies the frozen parameters of which these are the digests."""
    elements = sum(math.prod(whole.shape) for whole in totals)
    dtypes = ", ".join(sorted({whole.dtype for whole in totals})) or "nothing"
    digest = xxh3_128_hexdigest(repr(sorted((tuple(whole), total) for whole, total in totals.items())).encode())
    return f"{len(totals)} parameters with {elements} elements of {dtypes}, digest {digest}"


def _with_parents(name: str) -> list[str]:
    """Return a name, and those that it is under: `a.b.c`, `a.b` and `a`."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _mark(tensor: torch.Tensor) -> object:
    """Return what changes when a tensor is changed, as torch counts it, or takes other memory."""
    parts = [piece for _, part in local_parts(tensor) for piece in components(part)]
    try:
        return [each.data_ptr() for each in parts], versions_of(parts)
    except RuntimeError:  # made in inference mode, where nothing is counted
        return object()


def _digest(digester: Digester, name: str, tensor: torch.Tensor) -> dict[FrozenPart, int]:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    return {
        FrozenPart(name, dtype, shape, box.offsets): int(digester.digest(part, box.offsets).item()) % 2**64
        for box, part in local_parts(tensor, name)
    }


_INSIDE = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "lightning.fabric.wrappers._FabricModule": "_forward_module",
    "lightning.fabric.wrappers._FabricOptimizer": "optimizer",
    "lightning_fabric.wrappers._FabricModule": "_forward_module",
    "lightning_fabric.wrappers._FabricOptimizer": "optimizer",
    "lightning.fabric.wrappers._FabricDataLoader": "_dataloader",
    "lightning_fabric.wrappers._FabricDataLoader": "_dataloader",
    "lightning.pytorch.core.optimizer.LightningOptimizer": "optimizer",
    "pytorch_lightning.core.optimizer.LightningOptimizer": "optimizer",
    "accelerate.optimizer.AcceleratedOptimizer": "optimizer",
    "accelerate.scheduler.AcceleratedScheduler": "scheduler",
}
"""Wrapper classes, and the attribute under which each has what it was put around."""


def unwrap(value: object) -> Any:
    """Return the object that frameworks have put wrappers around, such as the module in a compiled DDP module.

    Wrappers within a module are left: torch leaves their names out itself.
    """
    while (name := _inside(type(value))) is not None:  # type: ignore[arg-type]  # mypy: a class has no hash
        value = getattr(value, name)
    return value


def is_prepared_loader(value: object) -> bool:
    """Return whether Accelerate has prepared this loader. It passes for a DataLoader that has a state dict."""
    return any(_class_name(base) == "accelerate.data_loader.DataLoaderAdapter" for base in type(value).__mro__)


class UnwrappedState(MutableMapping[str, Any]):
    """View of a state that has each object without its wrappers. What is set or deleted, is so in the state itself."""

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Any:
        return unwrap(self._state[name])

    def __setitem__(self, name: str, value: Any) -> None:
        self._state[name] = value

    def __delitem__(self, name: str) -> None:
        del self._state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


@lru_cache(maxsize=256)
def _inside(kind: type) -> str | None:
    """Return the attribute under which objects of a class have what they are put around; None: it is no wrapper."""
    return next(filter(None, (_INSIDE.get(_class_name(base)) for base in kind.__mro__)), None)


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
