"""Whether a checkpoint fits a state, and what of it goes where: found on each rank before a byte is copied."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptman.errors import ConfigError, plain, warn
from ckptman.format.value_codec import TensorRef
from ckptman.loading.checkpoint_reader import Lazy, SavedState, resolve
from ckptman.loading.read_tensors import fills_for_box, read_fills
from ckptman.state.file_layout import as_bytes
from ckptman.state.local_shards import (
    QUANTIZED,
    Box,
    describes_shards,
    empty_like,
    global_shape,
    is_plain,
    local_parts,
    refuse_unfillable,
)
from ckptman.state.named_state import (
    is_leaf,
    is_named,
    is_stateful,
    nested,
    put_back,
    rank_key,
    refs_in,
    replace_refs,
    snapshot_of,
)
from ckptman.state.optimizers import GROUPS, groups_by_name, model_of, parameter_of
from ckptman.state.trainable import FROZEN, Trainable

State = MutableMapping[str, Any]


@dataclass
class FitReport:
    """Per-rank result of the fit, gathered on all ranks.

    `wanted`: the keys of its state, and the names in its modules and optimizers.
    """

    wanted: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)


class Fit:
    """What of a checkpoint goes where on this rank.

    `targets`: the tensors to fill, by flat name. `values`: for each key of the state what it is given, with references
    in place of tensors. `from_other_rank`: keys of which it is another rank's. `expected`: of what was saved, the names
    that some rank has to want.

    Strict, as for a restore: a module or an optimizer needs exactly the names that were saved of it, and all other
    state becomes what was saved. Otherwise, as for `ckptman.load`: what the state holds is looked for, and what the
    checkpoint has besides is left there.
    """

    def __init__(self, state: State, saved: SavedState, rank: int, *, strict: bool, verify: bool) -> None:
        self._state, self._saved, self._rank, self._strict, self._verify = state, saved, rank, strict, verify
        self.targets: dict[str, torch.Tensor] = {}
        self.values: dict[str, Any] = {}
        self.from_other_rank: set[str] = set()
        self.expected: set[str] = set()
        self._report = FitReport()
        self._live: dict[str, Any] = {}

    def ask(self) -> None:
        """Ask each object for its state, which is to be filled. Optimizers make theirs first."""
        saved = self._saved
        self._live = nested(self._state, self._rank, saved.values)
        for name, target in self._state.items():
            if isinstance(target, torch.optim.Optimizer) and name in saved.values:
                kept = _settings_of_newer_torch(self._live[name], saved.values[name])
                saved.values[name] |= kept
                if kept:
                    settings = {entry.rpartition(".")[2]: value for entry, value in kept.items()}
                    self._warn(
                        f"the checkpoint was saved by an optimizer without {settings} in its groups: {name} keeps them"
                    )
        if self._strict and saved.manifest is None and (told := _nest_bare_model(self._state, self._live, saved)):
            self._warn(told)

    def match(self) -> FitReport:
        """Match checkpoint and state, after `ask`. Raises: CorruptError, also for plain values; ConfigError."""
        saved, report = self._saved, self._report
        for name, target in self._state.items():
            report.wanted.add(name)
            if self._strict and name not in saved.values:
                report.missing.append(name)
            elif is_named(target):
                self._match_named(name, target)
            elif not self._strict:
                matched = self._match(self._live[name], (name,))
                self.values[name] = matched[rank_key(self._rank)] if _is_per_rank(target) else matched
            elif _is_per_rank(target):
                self._take_of_a_rank(name)
            elif is_stateful(target):  # decides itself what fits
                self._take(name, saved.values[name], self._live[name])
            else:
                self._take_and_fill(name)
        for name, tensor in self.targets.items():
            refuse_unfillable(name, tensor)
        for name, values in saved.values.items() if self._strict else ():
            self.expected |= {f"{name}.{entry}" for entry in values} if is_named(self._state.get(name)) else {name}
        if not report.missing and not report.mismatched:
            plain_names = [
                name
                for name, target in self._state.items()
                if not is_named(target) and (not self._strict or _is_filled_in_place(target))
            ]
            report.mismatched += _wrongly_tied(saved, self.targets, plain_names, verify=self._verify)
            # Now: a plain value that others pickled may turn out to be damaged, and nothing has been filled yet.
            self.values = {name: resolve(value) for name, value in self.values.items()}
        return report

    def names(self, *, in_place: bool) -> list[str]:
        """Return the keys of what a restore fills in place, or those of objects that load themselves."""
        return [name for name in self.values if _is_filled_in_place(self._state[name]) == in_place]

    def tensors_of(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the tensors to fill for these keys of the state."""
        wanted = {ref.name for name in names for ref in refs_in(self.values[name])}
        return {name: tensor for name, tensor in self.targets.items() if name in wanted}

    def apply(self, names: Iterable[str]) -> None:
        """Give these objects their values, when the tensors are filled. Raises whatever they raise."""
        filled = set[int]() if self._strict else None
        for name in names:
            value = self.values[name] = replace_refs(self.values[name], lambda ref: self.targets[ref.name])
            put_back(self._state, name, value, self._rank, name in self.from_other_rank, filled)

    def _warn(self, message: str) -> None:
        if not self._rank:
            with suppress(Warning):  # one that is an error must not keep a rank from the others
                warn(message)

    def _match_named(self, name: str, target: object) -> None:
        live, saved = self._live[name], self._saved.values.get(name, {})
        if isinstance(target, torch.optim.Optimizer):
            live = _without_unsaved_state(live, saved) | _settings_added_later(live, saved)
            self._report.mismatched += _conflicting_settings(self._state, name, saved)
        if isinstance(target, Trainable) and saved.get(FROZEN, target.frozen) != target.frozen:
            self._report.mismatched.append(
                f"{name}: its frozen parameters are not those that it was trained with; load that base, in the same "
                f"dtype, first: checkpoint {saved[FROZEN]}, this run {target.frozen}"
            )
        self._report.wanted |= {f"{name}.{entry}" for entry in live}
        self.values[name] = values = {}
        for entry, value in live.items():
            # What came from `get_extra_state` of a module: `set_extra_state` checks it.
            if entry.rpartition(".")[2] == "_extra_state" and entry in saved:
                self.targets |= _new_tensors(self._saved, f"{name}.{entry}", saved[entry], value)
                values[entry] = saved[entry]
            else:
                values[entry] = self._match(value, (name, entry))

    def _match(self, live: Any, path: tuple[Any, ...]) -> Any:
        """Return what takes the place of a value. What the checkpoint lacks, or has as something else, is reported."""
        name, objects = ".".join(map(str, path)), self._saved.index.objects
        there, known = _at(self._saved.values, path)
        if isinstance(live, torch.Tensor):
            return self._match_tensor(name, live, there, known)
        if not self._strict:
            if isinstance(live, MutableMapping) and live:
                return {key: self._match(each, (*path, key)) for key, each in live.items()}
            if isinstance(live, list) and not is_leaf(live):
                return [self._match(each, (*path, number)) for number, each in enumerate(live)]
            if not known and name in objects:
                return Lazy(partial(self._saved.plain_value, name, verify=self._verify))
            if there is None and isinstance(live, Mapping) and name not in objects:
                return live  # DCP saves nothing of an empty mapping; in a list, None is in its place
        if not known:
            self._report.missing.append(name)
        elif any(refs_in(there)):
            self._report.mismatched.append(f"{name}: checkpoint a tensor, this run a plain value")
        return there

    def _match_tensor(self, name: str, live: torch.Tensor, there: Any, known: bool) -> TensorRef | None:
        if not isinstance(there, TensorRef) and name not in self._saved.index.tensors:
            if not known or not self._strict:
                self._report.missing.append(name)
            if known:
                self._report.mismatched.append(f"{name}: checkpoint a plain value, this run a tensor")
            return None
        ref = there if isinstance(there, TensorRef) else TensorRef(name)
        if ref.name in self.targets:
            raise ConfigError(f"two values of the state have the flat name {ref.name}: rename one of them")
        self._fill(ref.name, live)
        return ref

    def _fill(self, name: str, tensor: torch.Tensor) -> None:
        """Note that a tensor is to be filled where it is. Another shape or dtype is reported."""
        record = self._saved.tensor(name)
        there, here = _form(record.shape, record.dtype), _form(global_shape(tensor), tensor.dtype)
        if there != here:
            self._report.mismatched.append(f"{name}: checkpoint {there}, this run {here}")
        self.targets[name] = tensor

    def _take_of_a_rank(self, name: str) -> None:
        saved, mine = self._saved.values[name], rank_key(self._rank)
        if not isinstance(saved, dict) or not all(str(each).startswith("rank-") for each in saved):
            raise ConfigError(
                f"{name} was saved once for all ranks, and this state has it for each rank (PerRank, a ResumableLoader "
                f"without ElasticSampler, per_rank = True): put into the state what the checkpoint was saved with"
            )
        if mine not in saved:
            self.from_other_rank.add(name)
            is_ours = self._saved.manifest is not None
            (mine,) = list(saved)[:1] if is_ours else [rank_key(self._rank % len(saved))]
        self._take(name, saved[mine], {})

    def _take(self, name: str, saved: Any, live: Any) -> None:
        """Take what was saved, with new tensors for those in it."""
        self.targets |= _new_tensors(self._saved, name, saved, live)
        self.values[name] = saved

    def _take_and_fill(self, name: str) -> None:
        """Take what was saved. Tensors in dicts and lists are filled where they are: somebody else, such as a model,
        may have them too. What the checkpoint has besides is new."""
        saved = self.values[name] = self._saved.values[name]
        there = {ref.name for ref in refs_in(saved)}
        here = snapshot_of({name: self._live[name]}).tensors
        self._report.missing += here.keys() - there
        for full in there & here.keys():
            self._fill(full, here[full])
        self.targets |= {full: _new_tensor(self._saved, full) for full in there - here.keys()}


def name_as(state: Mapping[str, Any], saved: SavedState) -> None:
    """Bring the saved values of the optimizers of this state under flat names."""
    for name in [each for each in saved.values if is_named(state.get(each))]:
        if not isinstance(saved.values[name], dict):
            saved.values[name] = {}  # another object had this name: all of this one is missing
        elif isinstance(state[name], torch.optim.Optimizer):
            saved.values[name] = _flat_optimizer(saved.values[name])


def _is_per_rank(target: object) -> bool:
    return bool(getattr(target, "per_rank", False))


def _is_filled_in_place(target: object) -> bool:
    """Return whether a restore writes into the tensors of an entry: of all but objects that load themselves."""
    return is_named(target) or not (is_stateful(target) or _is_per_rank(target))


def _at(values: Any, path: tuple[Any, ...]) -> tuple[Any, bool]:
    """Return the saved value at a path, and whether there is one. Plain DCP saves all keys as texts."""
    for key in path:
        values = values.read() if isinstance(values, Lazy) else values  # until torch 2.3, a dict without tensors
        if isinstance(values, dict) and (key in values or str(key) in values):
            values = values[key] if key in values else values[str(key)]
        elif isinstance(values, list) and isinstance(key, int) and key < len(values):
            values = values[key]
        else:
            return None, False
    return values, True


def _form(shape: Sequence[int], dtype: torch.dtype | str) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _new_tensors(saved: SavedState, name: str, value: Any, live: Any) -> dict[str, torch.Tensor]:
    """Make tensors for those in a saved value, sharded as the live ones are: one of these may well be a parameter."""
    there = snapshot_of({name: live}).tensors
    return {ref.name: _new_tensor(saved, ref.name, there.get(ref.name)) for ref in refs_in(value)}


def _new_tensor(saved: SavedState, name: str, like: torch.Tensor | None = None) -> torch.Tensor:
    size, dtype = torch.Size(saved.tensor(name).shape), saved.dtype(name)
    if dtype in QUANTIZED:
        raise ConfigError(
            f"{name} was saved quantized ({saved.tensor(name).dtype}), and a load makes no such tensor: put one of the "
            f"same scales into the state, to be filled"
        )
    is_sharded = isinstance(like, DTensor) or (like is not None and describes_shards(like))
    if like is not None and is_sharded and (global_shape(like), like.dtype) == (size, dtype):
        return empty_like(like)
    return torch.empty(size, dtype=dtype, device=like.device if like is not None else None)


def _wrongly_tied(
    saved: SavedState, targets: Mapping[str, torch.Tensor], plain: Iterable[str], *, verify: bool
) -> list[str]:
    """Return what is one tensor in this run and was saved as two that differ, such as a copy kept of a parameter.

    `plain`: entries of the state that are dicts, lists or tensors. Only where one of these has a part in it is it
    looked at: what modules tie is theirs to say. Raises: CorruptError.
    """
    prefixes = tuple(f"{name}." for name in plain)
    if not any(f"{name}.".startswith(prefixes) for name in targets):
        return []
    names: dict[Hashable, list[tuple[str, Box, torch.Tensor]]] = {}
    for name, tensor in targets.items():
        for box, memory in local_parts(tensor, name):
            if is_plain(memory) and memory.numel():
                place = (memory.device, memory.data_ptr(), memory.shape, memory.stride(), memory.dtype)
                names.setdefault(place, []).append((name, box, memory))
    found = []
    for (first, box, memory), *others in names.values():
        if not others or not any(f"{name}.".startswith(prefixes) for name in (first, *(each[0] for each in others))):
            continue
        known = _saved_bytes(saved, first, box, memory, verify)
        found += [
            f"{name}: in this run the same memory as {first}, in the checkpoint another tensor: clone() one of them"
            for name, box, memory in others
            if not torch.equal(_saved_bytes(saved, name, box, memory, verify), known)
        ]
    return found


def _saved_bytes(saved: SavedState, name: str, box: Box, like: torch.Tensor, verify: bool) -> torch.Tensor:
    read = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    read_fills(saved, fills_for_box(saved, name, box.offsets, read), verify=verify)
    return as_bytes(read)


def _without_unsaved_state(live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state without that of parameters which had none yet when it was saved."""
    known = {parameter_of(entry) for entry in saved}
    return {entry: value for entry, value in live.items() if not (each := parameter_of(entry)) or each in known}


def _settings_added_later(live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved settings that an optimizer, or its schedule, adds to its groups in the first steps."""
    known = {entry.rpartition(".")[0] for entry in live if entry.startswith(GROUPS)}
    return {
        entry: value
        for entry, value in saved.items()
        if entry not in live and entry.rpartition(".")[0] in known and not any(refs_in(value))
    }


def _conflicting_settings(state: Mapping[str, Any], name: str, saved: Mapping[str, Any]) -> list[str]:
    """Return the saved settings of parameters that are in one group of the optimizer `name` now and differ: a group has
    one of each. Those that are tensors, or that plain DCP pickled, are not looked at."""
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


def _settings_of_newer_torch(live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of parameter groups that a checkpoint of an older torch lacks: they stay as they are.

    Where the checkpoint has what this one lacks, it is of another kind of optimizer."""
    known = {entry.rpartition(".")[0] for entry in saved if entry.startswith(GROUPS)}
    kept = {
        entry: value
        for entry, value in live.items()
        if entry not in saved and entry.rpartition(".")[0] in known and not isinstance(value, torch.Tensor)
    }
    return {} if _settings_added_later(live, saved) else kept


def _flat_optimizer(values: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's saved state under flat names, also where plain DCP was given a nested one."""
    if not isinstance(values.get("state", {}), dict) or "param_groups" not in values:
        return values
    flat: dict[str, Any] = {}
    for parameter, entries in values.get("state", {}).items():
        flat |= {f"state.{parameter}.{key}": each for key, each in entries.items()}
    for group in resolve(values["param_groups"]):
        for parameter in group["params"]:
            flat |= {f"param_groups.{parameter}.{key}": each for key, each in group.items() if key != "params"}
    return flat


def _nest_bare_model(state: Mapping[str, Any], live: Mapping[str, Any], saved: SavedState) -> str:
    """Put the tensors of a model under its name where a foreign checkpoint has them at its top, as torchtitan saves
    them: there is nothing of the model's own name, and its names are there without it. What else is there that the
    state has no key for is left there. Return what to warn of; "" where nothing was done.

    Raises: ConfigError where that can be said of two models.
    """
    top = {name for name, value in saved.values.items() if name not in state and not isinstance(value, dict | list)}
    lacking = [name for name, each in state.items() if isinstance(each, torch.nn.Module) and name not in saved.values]
    fitting = [name for name in lacking if not top.isdisjoint(live[name])]
    if not fitting:
        return ""
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
    told = f"{saved.folder} holds the tensors of {model!r} without that name before them, as torchtitan saves them"
    return told + (f"; not loaded, as the state has no such keys: {', '.join(map(plain, left))}" if left else "")
