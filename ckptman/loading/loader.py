"""Loading a checkpoint into an application: first see on all ranks whether it fits, then fill, then hand over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from ckptman.comm.control import Channel, Failure, RankFailed
from ckptman.errors import CkptmanError, ConfigError, CorruptError, MismatchError, plain, warn
from ckptman.format.value_codec import TensorRef
from ckptman.io.safe_open import AWAY, DENIED, SHORTAGE
from ckptman.loading.checkpoint_reader import Lazy, SavedState, read_to_load, resolve
from ckptman.loading.exchange import read_together
from ckptman.loading.read import NOT_USABLE, refuse_unfillable
from ckptman.loading.tied_tensors import apart_in_one_memory
from ckptman.state.named_state import (
    is_named,
    is_stateful,
    nested,
    put_back,
    rank_key,
    refs_in,
    replace_refs,
    snapshot_of,
)
from ckptman.state.optimizers import GROUPS, as_before_on_error, groups_by_name, model_of, parameter_of
from ckptman.state.tensor_container import QUANTIZED

T = TypeVar("T")
State = MutableMapping[str, Any]
_OF_A_DEVICE = ("AcceleratorError", "CUDA error:", "HIP error:")
"""What is in the text of an error of a device, at whatever was asked of it next: that may well be a load."""


def load(channel: Channel, state: State, folder: Path) -> None:
    """Load a checkpoint into an application's state, in place, checking every block that is read. Every rank calls it.

    Raises on every rank alike: MismatchError before anything is copied; CorruptError if a rank cannot read it, or
    reads other bytes than were saved: then what its text says is not usable.
    """
    saved = read_on_all(channel, state, folder)
    with as_before_on_error(state.values()):
        fit = _measure(channel, state, saved, folder)
        # Objects that may refuse what they are given come first: then the model is as it was when one does.
        for in_place in (False, True):
            names = [name for name in fit.values if _is_filled_in_place(state[name]) == in_place]
            fill(channel, fit.saved, fit.tensors_of(names), folder)
            try:
                channel.run_on_all(partial(_hand_over, state, fit, names, channel.rank))
            except RankFailed as failed:  # an object refused its state: no older checkpoint would help
                raise failed.as_ckptman_error(NOT_USABLE if in_place else "") from failed


def _is_filled_in_place(target: object) -> bool:
    """Whether a restore writes into the tensors of an entry of the state: of all but objects that load themselves."""
    return is_named(target) or not (is_stateful(target) or getattr(target, "per_rank", False))


def _measure(channel: Channel, state: State, saved: SavedState, folder: Path) -> _Fit:
    """See on all ranks whether a checkpoint fits. Raises on every rank alike: MismatchError, CorruptError."""
    live: list[dict[str, Any]] = []
    fits: list[_Fit] = []

    def look() -> None:
        live.append(live_values(state, channel.rank, saved))
        if saved.manifest is None:
            _take_from_top(state, live[0], saved, warns=channel.is_leader)

    try:
        channel.run_on_all(look)
    except RankFailed as failed:  # the state_dict of an object failed: that says nothing about the checkpoint
        raise failed.as_ckptman_error() from failed
    reports = all_or_corrupt(channel, lambda: _take_measure(state, live[0], saved, channel.rank, fits), folder)
    wanted = {name for report in reports for name in report.wanted}
    missing = sorted({name for report in reports for name in report.missing})
    mismatched = sorted({line for report in reports for line in report.mismatched})
    unexpected = sorted(fits[0].strictly_saved - wanted)
    if missing or mismatched or unexpected:
        raise MismatchError(str(folder), missing, unexpected, mismatched)
    return fits[0]


def fill(
    channel: Channel, saved: SavedState, targets: Mapping[str, torch.Tensor], folder: Path, *, verify: bool = True
) -> int:
    """Fill the targets of all ranks, reading once what several of them need. Returns the bytes that this one read.

    Raises on every rank alike: CorruptError, and then no target is usable.
    """
    try:
        with corrupt_on_all(folder):
            return read_together(channel, saved, targets, verify=verify)
    except CkptmanError as error:
        # Others were raised before anything was read, or say it already.
        if type(error) not in (CkptmanError, CorruptError) or "is not usable" in str(error):
            raise
        raise type(error)(f"{error}. {NOT_USABLE}") from error


def _hand_over(state: State, fit: _Fit, names: list[str], rank: int) -> None:
    filled = set[int]()
    for name in names:
        fit.values[name] = replace_refs(fit.values[name], lambda ref: fit.targets[ref.name])
        put_back(state, name, fit.values[name], rank, name in fit.from_other_rank, filled)


def read_on_all(channel: Channel, state: Mapping[str, Any], folder: Path) -> SavedState:
    """What a checkpoint holds, of which every rank sees the same. Raises on every rank alike: CorruptError;
    CkptmanError where they see different ones under its name."""
    saved: list[SavedState] = []

    def read() -> str:
        saved.append(read_for(state, folder, channel.rank))
        manifest = saved[0].manifest
        return manifest.identity if manifest is not None else ""

    if len(set(all_or_corrupt(channel, read, folder))) > 1:
        raise CkptmanError(f"{folder}: the ranks see different checkpoints, as it was replaced just now: load it again")
    return saved[0]


def read_for(state: Mapping[str, Any], folder: Path, rank: int) -> SavedState:
    """Read what a checkpoint holds; of the optimizers of this state, under flat names."""
    saved = read_to_load(folder, rank)
    for name in [each for each in saved.values if is_named(state.get(each))]:
        if not isinstance(saved.values[name], dict):
            saved.values[name] = {}  # another object had this name: all of this one is missing
        elif isinstance(state[name], torch.optim.Optimizer):
            saved.values[name] = flat_optimizer(saved.values[name])
    return saved


def live_values(state: Mapping[str, Any], rank: int, saved: SavedState) -> dict[str, Any]:
    """The state dicts of all objects, to be filled. What `saved` cannot say of parameter groups it says as they do."""
    live = nested(state, rank, saved.values)
    for name, target in state.items():
        if isinstance(target, torch.optim.Optimizer) and name in saved.values:
            saved.values[name] |= _settings_of_a_newer_torch(live[name], saved.values[name], name, warns=not rank)
    return live


def _take_from_top(state: Mapping[str, Any], live: Mapping[str, Any], saved: SavedState, *, warns: bool) -> None:
    """Put the tensors of a model under its name where a foreign checkpoint has them at its top, as torchtitan saves
    them: there is nothing of the model's own name, and its names are there without it. What else is there that the
    state has no key for is left there.

    Raises: ConfigError where that can be said of two models.
    """
    top = {name for name, value in saved.values.items() if name not in state and not isinstance(value, dict | list)}
    lacking = [name for name, each in state.items() if isinstance(each, torch.nn.Module) and name not in saved.values]
    fitting = [name for name in lacking if not top.isdisjoint(live[name])]
    if not fitting:
        return
    if len(fitting) > 1:
        raise ConfigError(
            f"{saved.folder} holds the tensors of one model without a name before them, and they could be those of "
            f"{' or '.join(map(repr, fitting))}: restore with one of them in the state"
        )
    (model,) = fitting
    # All tensors, also those that this model lacks or that another rank has: they are found to be unexpected, or not.
    taken = {name for name in top if isinstance(saved.values[name], TensorRef) or name in live[model]}
    saved.values[model] = {name: saved.values.pop(name) for name in sorted(taken)}
    left = sorted(saved.values.keys() - state.keys())
    for name in left:
        del saved.values[name]
    if warns:
        told = f"{saved.folder} holds the tensors of {model!r} without that name before them, as torchtitan saves them"
        if left:
            told += f"; not loaded, as the state has no such keys: {', '.join(map(plain, left))}"
        with suppress(Warning):  # one that is an error must not keep a rank from the others
            warn(told)


def all_or_corrupt(channel: Channel, work: Callable[[], T], folder: Path) -> list[T]:
    """Do `work` on all ranks. What one rank cannot read counts as corrupt on all; our own errors stay what they are."""
    with corrupt_on_all(folder):
        return channel.run_on_all(work)


@contextmanager
def corrupt_on_all(folder: Path) -> Iterator[None]:
    """What failed on one rank inside counts as corrupt on all."""
    try:
        yield
    except RankFailed as failed:
        if failed.failure.error is not None:
            raise failed.failure.error from failed
        if _is_shortage(failed.failure):
            raise CkptmanError(
                f"{folder}: rank {failed.failure.rank} has not enough memory or open files to load it "
                f"({failed.failure.text}): load it on more ranks, ask for more memory, or allow more open files "
                f"(ulimit -n); `ckptman verify {folder}` tells if it is what was saved"
            ) from failed
        if failed.failure.errno in AWAY:
            raise CkptmanError(
                f"{folder}: the file system does not answer on rank {failed.failure.rank} ({failed.failure.text}): "
                f"check the mount there, and start again; `ckptman verify {folder}` tells if it is what was saved"
            ) from failed
        if failed.failure.errno in DENIED:
            raise CkptmanError(
                f"{folder}: this user may not read it on rank {failed.failure.rank} ({failed.failure.text}): check its "
                f"permissions there, and start again"
            ) from failed
        if any(sign in failed.failure.text for sign in _OF_A_DEVICE):
            raise CkptmanError(
                f"{folder}: the device of rank {failed.failure.rank} failed ({failed.failure.text}): leave its node "
                f"out, and start again; `ckptman verify {folder}` tells if it is what was saved"
            ) from failed
        raise CorruptError(
            f"{folder} cannot be read on rank {failed.failure.rank}: {failed.failure.text}; check the mount "
            f"there, or restore an older checkpoint"
        ) from failed


def _is_shortage(failure: Failure) -> bool:
    """Whether a rank ran out of something: that says nothing about the checkpoint. What torch's allocator on the CPU
    raises has no class of its own."""
    of_memory = "MemoryError" in failure.text.partition(":")[0]  # of Python, NumPy or torch
    told = any(sign in failure.text for sign in ("DefaultCPUAllocator: can't allocate memory", "error: out of memory"))
    return of_memory or told or failure.errno in SHORTAGE


@dataclass
class _Report:
    """What one rank tells the others about how a checkpoint fits."""

    wanted: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)


@dataclass
class _Fit:
    """What is to be loaded on this rank: tensors to fill by flat name, and for each object its saved values.

    `strictly_saved`: what some rank must want, the names in modules and optimizers and the keys of all other state.
    """

    saved: SavedState
    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    strictly_saved: set[str] = field(default_factory=set)
    from_other_rank: set[str] = field(default_factory=set)

    def tensors_of(self, names: list[str]) -> dict[str, torch.Tensor]:
        """The tensors to fill for these objects."""
        wanted = {ref.name for name in names for ref in refs_in(self.values[name])}
        return {name: tensor for name, tensor in self.targets.items() if name in wanted}

    def fill(self, name: str, tensor: torch.Tensor, report: _Report) -> None:
        """Have a tensor of this run filled where it is. One of another shape or dtype is reported."""
        record, here = self.saved.tensor(name), _look(tensor.size(), tensor.dtype)
        if (there := _look(record.shape, record.dtype)) != here:
            report.mismatched.append(f"{name}: checkpoint {there}, this run {here}")
        self.targets[name] = tensor


def _take_measure(state: State, live: dict[str, Any], saved: SavedState, rank: int, out: list[_Fit]) -> _Report:
    fit, report = _Fit(saved), _Report()
    for name, target in state.items():
        report.wanted.add(name)
        if name not in saved.values:
            report.missing.append(name)
        elif is_named(target):
            _measure_named(name, target, live[name], fit, report)
            if isinstance(target, torch.optim.Optimizer):
                report.mismatched += settings_apart(state, name, saved.values[name])
        elif getattr(target, "per_rank", False):
            _measure_per_rank(name, rank, fit)
        elif is_stateful(target):
            _measure_free(name, saved.values[name], live[name], fit)
        else:
            _measure_plain(name, saved.values[name], live[name], fit, report)
    for name, values in saved.values.items():
        if is_named(state.get(name)):
            fit.strictly_saved |= {f"{name}.{entry}" for entry in values}
        else:
            fit.strictly_saved.add(name)
    for name, tensor in fit.targets.items():
        refuse_unfillable(name, tensor)
    if not report.missing and not report.mismatched:
        plain = [name for name, target in state.items() if _is_filled_in_place(target) and not is_named(target)]
        report.mismatched += apart_in_one_memory(saved, fit.targets, plain)
        # Now: what plain DCP pickled may turn out to be damaged, and nothing has been filled yet.
        fit.values = {name: resolve(value) for name, value in fit.values.items()}
    out.append(fit)
    return report


def _measure_named(name: str, target: object, live: dict[str, Any], fit: _Fit, report: _Report) -> None:
    """Modules and optimizers: exactly the names, and for tensors the shapes and dtypes, that were saved."""
    saved = fit.saved.values[name]
    if isinstance(target, torch.optim.Optimizer):
        live = started(live, saved)
    fit.values[name] = {entry: saved.get(entry, value) for entry, value in live.items()}
    if isinstance(target, torch.optim.Optimizer):
        later = settings_made_later(live, saved)
        report.wanted |= {f"{name}.{entry}" for entry in later}
        fit.values[name] |= later
    for entry, value in live.items():
        full = f"{name}.{entry}"
        report.wanted.add(full)
        if entry not in saved:
            report.missing.append(full)
        elif is_extra_state(entry):
            fit.targets |= own_tensors(fit.saved, full, saved[entry], value)
        elif isinstance(value, torch.Tensor) != isinstance(saved[entry], TensorRef):
            kinds = ["a plain value", "a tensor"]
            here, other = reversed(kinds) if isinstance(value, torch.Tensor) else kinds
            report.mismatched.append(f"{full}: checkpoint {other}, this run {here}")
        elif isinstance(value, torch.Tensor):
            fit.fill(saved[entry].name, value, report)


def _measure_per_rank(name: str, rank: int, fit: _Fit) -> None:
    saved = fit.saved.values[name]
    mine = rank_key(rank)
    if mine not in saved:
        fit.from_other_rank.add(name)
        (mine,) = list(saved)[:1] if fit.saved.manifest is not None else [rank_key(rank % len(saved))]
    _measure_free(name, saved[mine], {}, fit)


def _measure_free(name: str, saved: Any, live: Any, fit: _Fit) -> None:
    """Stateful objects decide themselves what fits."""
    fit.targets |= own_tensors(fit.saved, name, saved, live)
    fit.values[name] = saved


def _measure_plain(name: str, saved: Any, live: Any, fit: _Fit, report: _Report) -> None:
    """Tensors in dicts and lists are filled where they are: somebody else, such as a model, may have them too. What the
    checkpoint has besides is new."""
    there = {ref.name for ref in refs_in(saved)}
    here = snapshot_of({name: live}).tensors
    report.missing += here.keys() - there
    for full in there & here.keys():
        fit.fill(full, here[full], report)
    fit.targets |= {full: _new_tensor(fit.saved, full) for full in there - here.keys()}
    fit.values[name] = saved


def is_extra_state(entry: str) -> bool:
    """Whether an entry of a module's state dict is what its `get_extra_state` gave, and `set_extra_state` checks."""
    return entry.rpartition(".")[2] == "_extra_state"


def own_tensors(saved: SavedState, name: str, value: Any, live: Any) -> dict[str, torch.Tensor]:
    """New tensors for those in a saved value, sharded as the live ones are: one of these may well be a parameter."""
    there = snapshot_of({name: live}).tensors
    return {ref.name: _new_tensor(saved, ref.name, there.get(ref.name)) for ref in refs_in(value)}


def _new_tensor(saved: SavedState, name: str, like: torch.Tensor | None = None) -> torch.Tensor:
    size, dtype = torch.Size(saved.tensor(name).shape), saved.dtype(name)
    if dtype in QUANTIZED:
        raise ConfigError(
            f"{name} was saved quantized ({saved.tensor(name).dtype}), and a load makes no such tensor: put one of the "
            f"same scales into the state, to be filled"
        )
    if isinstance(like, DTensor) and (like.size(), like.dtype) == (size, dtype):
        return torch.empty_like(like)
    return torch.empty(size, dtype=dtype, device=like.device if like is not None else None)


def started(live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state, without what parameters have of it that had none yet when it was saved."""
    known = {parameter_of(entry) for entry in saved}
    return {entry: value for entry, value in live.items() if not (each := parameter_of(entry)) or each in known}


def settings_made_later(live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint has of parameter groups that an optimizer, or its schedule, adds to them in its first steps."""
    known = {entry.rpartition(".")[0] for entry in live if entry.startswith(GROUPS)}
    return {
        entry: value
        for entry, value in saved.items()
        if entry not in live and entry.rpartition(".")[0] in known and not any(refs_in(value))
    }


def settings_apart(state: Mapping[str, Any], name: str, saved: Mapping[str, Any]) -> list[str]:
    """What a checkpoint has of parameters in different groups that are in one group of the optimizer `name` now: of
    their settings it can have only one. Those that are tensors, or that plain DCP pickled, are not looked at."""
    groups = groups_by_name(model_of(state[name], state), state[name])
    first: dict[tuple[int, str], tuple[str, Any]] = {}
    found = []
    for entry, value in saved.items():
        parameter, _, key = entry.removeprefix(GROUPS).rpartition(".")
        if not entry.startswith(GROUPS) or parameter not in groups or isinstance(value, TensorRef | Lazy):
            continue
        other, there = first.setdefault((groups[parameter], key), (parameter, value))
        if repr(value) != repr(there):
            found.append(f"{name}.{entry}: checkpoint {value!r}, this run {there!r} as of {other}, of its group")
    return found


def _settings_of_a_newer_torch(
    live: Mapping[str, Any], saved: Mapping[str, Any], name: str, *, warns: bool
) -> dict[str, Any]:
    """What an optimizer has of parameter groups that a checkpoint lacks, which has all else of them: it stays as it is.
    Where the checkpoint has what this one lacks, it is of another kind of optimizer."""
    known = {entry.rpartition(".")[0] for entry in saved if entry.startswith(GROUPS)}
    kept = {
        entry: value
        for entry, value in live.items()
        if entry not in saved and entry.rpartition(".")[0] in known and not isinstance(value, torch.Tensor)
    }
    if not kept or settings_made_later(live, saved):
        return {}
    if warns:
        settings = {entry.rpartition(".")[2]: value for entry, value in kept.items()}
        with suppress(Warning):  # one that is an error must not keep a rank from the others
            warn(f"the checkpoint was saved by an optimizer without {settings} in its groups: {name} keeps them")
    return kept


def flat_optimizer(values: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's saved state under flat names, also where plain DCP was given one that was not flattened."""
    if not isinstance(values.get("state", {}), dict) or "param_groups" not in values:
        return values
    flat: dict[str, Any] = {}
    for parameter, entries in values.get("state", {}).items():
        flat |= {f"state.{parameter}.{key}": each for key, each in entries.items()}
    for group in resolve(values["param_groups"]):
        for parameter in group["params"]:
            flat |= {f"param_groups.{parameter}.{key}": each for key, each in group.items() if key != "params"}
    return flat


def _look(shape: Sequence[int], dtype: torch.dtype | str) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
