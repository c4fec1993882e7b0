"""Whether a checkpoint fits a state, and what of it goes where: found on each rank before a byte is copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from ckptman.engine.loading.allowed_mismatches import AllowedMismatches, matches, matches_any
from ckptman.engine.loading.checkpoint_reader import Lazy, SavedState, resolve
from ckptman.engine.loading.optimizer_fit import (
    conflict,
    conflicting_settings,
    flat_optimizer,
    parameters_left,
    settings_added_later,
    settings_of_newer_torch,
    start_new_parameters,
    without_unsaved_state,
)
from ckptman.engine.loading.read_tensors import fills_for_box, read_fills
from ckptman.engine.state.file_layout import as_bytes
from ckptman.engine.state.generators import RNGState
from ckptman.engine.state.local_shards import (
    QUANTIZED,
    Box,
    describes_shards,
    empty_in_order,
    empty_like,
    global_shape,
    is_plain,
    local_parts,
    refuse_lazy,
    refuse_unfillable,
)
from ckptman.engine.state.module_checks import prefixes_that_load
from ckptman.engine.state.modules import FROZEN, Trainable
from ckptman.engine.state.named_state import is_named, is_stateful, nested, put_back, rank_key, refs_in, replace_refs
from ckptman.engine.state.optimizers import (
    GROUPS,
    ORDER,
    WHOLE,
    groups_by_name,
    names_in_order,
    parameters_with_state,
)
from ckptman.engine.state.program_faults import naming
from ckptman.engine.state.snapshot import snapshot_of
from ckptman.engine.state.tensor_digest import pieces
from ckptman.errors import ConfigError, plain, warn
from ckptman.storage.format.value_codec import SEQUENCES, TensorRef, is_leaf, opaque_in, rebuilt

State = MutableMapping[str, Any]
_SHOWN = 8
"""So many parameters are named."""


class Part(Enum):
    """A part of a load that some rank has to take, so that all do."""

    TRAINABLES = "trainables"
    OBJECTS = "objects"
    """That load themselves."""
    IN_PLACE = "in place"


@dataclass
class FitReport:
    """Per-rank result of the fit, gathered on all ranks.

    `wanted`: what it looked for in the checkpoint. `missing`: what is not there; `kept`: what is not there, and may
    stay as it is here. `left`: what may be left there, of dicts. `known`: the patterns that name something. `kinds`:
    what to call the part of the state under each key. `own`: key, name and digest of the
    generators that each rank saved.
    """

    wanted: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)
    mismatched: set[str] = field(default_factory=set)
    kinds: dict[str, str] = field(default_factory=dict)
    own: set[tuple[str, str, str]] = field(default_factory=set)
    parts: set[Part] = field(default_factory=set)

    def key(self) -> list[object]:
        """Return what is the same on two ranks that found the same."""
        return [sorted(value.items() if isinstance(value, dict) else map(str, value)) for value in vars(self).values()]

    @classmethod
    def of_all(cls, reports: Iterable[FitReport]) -> FitReport:
        """Return what all ranks found together."""
        found = cls()
        for each in reports:
            for name, value in vars(each).items():
                vars(found)[name] |= value
        return found


class Fit:
    """What of a checkpoint goes where on this rank.

    `targets`: the tensors to fill, by flat name. `values`: for each key of the state what it is given, with references
    in place of tensors. `from_other_rank`: keys of which it is another rank's.

    Strict, as for a restore: a module or an optimizer needs exactly the names that were saved of it, and all other
    state becomes what was saved. Otherwise, as for `ckptman.load`: what the state holds is looked for.

    What is missing in the checkpoint, and `accepted`, stays as it is.
    """

    def __init__(
        self, state: State, saved: SavedState, rank: int, accepted: AllowedMismatches, *, strict: bool, verify: bool
    ) -> None:
        self._state, self._saved, self._rank, self._strict, self._verify = state, saved, rank, strict, verify
        self._accepted = accepted
        self.targets: dict[str, torch.Tensor] = {}
        self.values: dict[str, Any] = {}
        self.from_other_rank: set[str] = set()
        self.parts: set[Part] = set()
        """What all ranks take part in, after `note_all`."""
        self._alike: set[tuple[str, str]] = set()
        """Key and name of the generators that all ranks saved alike."""
        self._report = FitReport()
        self._live: dict[str, Any] = {}
        self._had_state: dict[str, set[str]] = {}
        """Of each optimizer, the parameters that it had state of before it was asked."""
        self._found: set[str] = set()
        """Keys of the state of which the checkpoint has something."""

    def ask(self) -> None:
        """Ask each object for its state, which is to be filled. Optimizers make theirs first."""
        saved = self._saved
        for name, target in self._state.items() if self._accepted.missing else ():
            if isinstance(target, torch.optim.Optimizer):
                self._had_state[name] = parameters_with_state(name, target, self._state)
        self._live = nested(self._state, self._rank, saved.values, self._form)
        for name, target in self._state.items():
            if _is_per_rank(target):  # only what was saved has an order to compare
                for held in filter(lambda each: type(each) is dict, self._live[name].values()):
                    held.pop(ORDER, None)
            if isinstance(target, torch.optim.Optimizer) and name in saved.values:
                kept = settings_of_newer_torch(self._live[name], saved.values[name])
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
            report.kinds[name] = _kind_of(name, target)
            with naming(name):
                self._match_entry(name, target)
        for name, tensor in self.targets.items():
            with naming(name):
                refuse_unfillable(name, tensor)
        if not self._strict:
            self._leave_alone_what_is_kept()
        for name, value in self.values.items():
            report.mismatched.update(
                f"{path}: checkpoint a {each.kind}, and {each.why}" for path, each in opaque_in(value, name)
            )
        report.known = self._known_patterns()
        report.parts = {
            Part.IN_PLACE if _is_filled_in_place(self._state[name]) else Part.OBJECTS for name in self.values
        }
        if any(isinstance(each, Trainable) for each in self._state.values()):
            report.parts.add(Part.TRAINABLES)
        if not report.missing and not report.mismatched:
            report.mismatched.update(_wrongly_tied(saved, self.targets, verify=self._verify))
            if self._strict and (names := _untied(saved, self.targets)):
                self._warn(
                    f"{' and '.join(names)} were one parameter when they were saved, and are not in this run: they "
                    f"start with the same values and are trained apart. If that is not meant, tie them before restore()"
                )
            # Now: a plain value that others pickled may turn out to be damaged, and nothing has been filled yet.
            self.values = {name: resolve(value) for name, value in self.values.items()}
        return report

    def _match_entry(self, name: str, target: object) -> None:
        if self._strict and name not in self._saved.values:
            self._keeps(name)
        elif is_named(target):
            self._match_named(name, target)
        elif not self._strict:
            matched = self._match(self._live[name], (name,))
            self.values[name] = matched[rank_key(self._rank)] if _is_per_rank(target) else matched
        elif _is_per_rank(target):
            self._take_of_a_rank(name)
        elif is_stateful(target):  # decides itself what fits
            self._take(name, self._saved.values[name], self._live[name])
            if isinstance(target, LRScheduler):
                self._compare_rates(name, target)
        else:
            self._take_and_fill(name)

    @property
    def report(self) -> FitReport:
        """What this rank found."""
        return self._report

    def all_expected(self) -> list[object]:
        """Return the names that some rank has to want, in order."""
        return [(str(key), sorted(self.expected(key))) for key in self._saved.values]

    def note_all(self, found: FitReport) -> None:
        """Take note of what all ranks found: which parts of the load they take, and which generators they saved
        alike."""
        self.parts = found.parts
        manifest = self._saved.manifest
        if manifest is not None and manifest.world_size > 1:
            times = Counter((key, generator) for key, generator, _ in found.own)
            self._alike = {each for each, count in times.items() if count == 1}

    def expected(self, key: str) -> set[str]:
        """Return the names of what was saved under a key that some rank has to want."""
        target, value = self._state.get(key), self._saved.values[key]
        if is_named(target):
            return {f"{key}.{entry}" for entry in value}
        return {str(key)} if self._strict or _is_per_rank(target) else {*_names_in(value, key)}

    def unexpected(self, wanted: set[str]) -> list[str]:
        """Return what was saved and no rank wants: where it wants nothing that is under a key, the key."""
        found: list[str] = []
        for key in self._saved.values:
            names = self.expected(key)
            left = names - wanted
            found += [str(key)] if left == names and key not in wanted else left
        return found

    def not_in_groups(self, unexpected: Iterable[str]) -> str:
        """Return what to say of parameters that were in a group of an optimizer and are in none now; "": nothing."""
        names = set(unexpected)
        left = {
            key: each
            for key, live in self._live.items()
            if isinstance(self._state[key], torch.optim.Optimizer) and key in self._saved.values
            if (each := parameters_left(key, live, self._saved.values[key], names))
        }
        told = (f"{', '.join(each[:_SHOWN])}{' ...' * (len(each) > _SHOWN)} of {key!r}" for key, each in left.items())
        return "; ".join(told)

    def saved_names(self) -> set[str]:
        """Return the names of all that was saved."""
        return {name for key, value in self._saved.values.items() for name in _names_in(value, key)}

    def names(self, part: Part) -> list[str]:
        """Return the keys of what a restore fills in place, or those of objects that load themselves."""
        in_place = part is Part.IN_PLACE
        return [name for name in self.values if _is_filled_in_place(self._state[name]) == in_place]

    def targets_by_part(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors that each part of the load fills."""
        return {part.value: self.tensors_of(self.names(part)) for part in (Part.OBJECTS, Part.IN_PLACE)}

    def tensors_of(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the tensors to fill for these keys of the state."""
        wanted = {ref.name for name in names for ref in refs_in(self.values[name])}
        return {name: tensor for name, tensor in self.targets.items() if name in wanted}

    def apply(self, names: Iterable[str]) -> None:
        """Give these objects their values, when the tensors are filled. Raises whatever they raise."""
        filled = set[int]() if self._strict else None
        for name in names:
            value = self.values[name] = replace_refs(self.values[name], lambda ref: self.targets[ref.name])
            try:
                alike = [generator for key, generator in self._alike if key == name]
                if alike and name in self.from_other_rank and isinstance(self._state[name], RNGState):
                    self._state[name].load_from_other_rank(value, self._rank, alike)
                else:
                    put_back(self._state, name, value, self._rank, name in self.from_other_rank, filled)
                    self._warn_of_what_is_lost(name, value)
            except ConfigError as error:
                if type(error) is not ConfigError or repr(name) in str(error):
                    raise
                raise ConfigError(f"{name!r}: {error}") from error

    def _warn_of_what_is_lost(self, name: str, value: Any) -> None:
        """Ask an object that loads itself what it has now, and warn if that lacks something. Optimizers see to it
        themselves, and values may differ: a time, for one."""
        target = self._state[name]
        if self._strict and is_stateful(target) and not is_named(target) and name not in self.from_other_rank:
            with suppress(Exception):  # it was asked before, and will be at the next save
                if lost := _lost(value, target.state_dict(), name):
                    self._warn(
                        f"{name} has not taken all that was saved of it: {lost} after load_state_dict(). Correct the "
                        f"load_state_dict() of {type(target).__name__}"
                    )

    def _warn(self, message: str) -> None:
        if not self._rank:
            with suppress(Warning):  # one that is an error must not keep a rank from the others
                warn(message)

    def _match_named(self, name: str, target: object) -> None:
        live, saved = self._live[name], self._saved.values.get(name, {})
        groups: dict[str, int] = {}
        had_state = self._had_state.get(name, set())
        if isinstance(target, torch.optim.Optimizer):
            if WHOLE in saved:
                self._report.wanted |= {f"{name}.{entry}" for entry in saved}
                self._take(name, saved, {})
                self._compare_order(name, target, saved.get(ORDER, ()))
                return
            groups = groups_by_name(name, target, self._state)
            live = without_unsaved_state(live, saved, had_state) | settings_added_later(live, saved)
            self._report.mismatched.update(conflicting_settings(name, groups, saved))
        if isinstance(target, Trainable) and saved.get(FROZEN, target.frozen) != target.frozen:
            self._report.mismatched.add(
                f"{name}: its frozen parameters are not those that it was trained with; load that base, in the same "
                f"dtype, first: checkpoint {saved[FROZEN]}, this run {target.frozen}"
            )
        self._report.wanted |= {f"{name}.{entry}" for entry in live}
        self.values[name] = values = {}
        own = prefixes_that_load(target) if isinstance(target, torch.nn.Module) else ()
        for entry, value in live.items():
            # What came from `get_extra_state` of a module: `set_extra_state` checks it.
            is_extra = entry.rpartition(".")[2] == "_extra_state"
            is_extra |= entry.startswith(own) and self._is_of_another_shape(value, saved.get(entry))
            if entry in saved and (is_extra or (groups and _holds_tensors(saved[entry]))):
                self._found.add(name)
                self.targets |= _new_tensors(self._saved, f"{name}.{entry}", saved[entry], value)
                values[entry] = saved[entry]
            else:
                values[entry] = self._match(value, (name, entry))
        if groups and self._report.kept:
            kept = {entry for entry in values if f"{name}.{entry}" in self._report.kept}
            start_new_parameters(values, kept, had_state, groups, saved)

    def _is_of_another_shape(self, live: Any, saved: Any) -> bool:
        if not (isinstance(live, torch.Tensor) and isinstance(saved, TensorRef)) or is_lazy(live):
            return False
        return torch.Size(self._saved.tensor(saved.name).shape) != global_shape(live)

    def _keeps(self, name: str) -> bool:
        """Note that the checkpoint lacks a name, and return whether that is accepted."""
        accepted = matches_any(self._accepted.missing, name)
        (self._report.kept if accepted else self._report.missing).add(name)
        return accepted

    def _leave_alone_what_is_kept(self) -> None:
        """Take objects and values of which the checkpoint has nothing out of what is loaded."""
        for name in [*self.values] if self._report.kept else ():
            others = {each for each in self._report.kept if each != name and not each.startswith(f"{name}.")}
            if name not in self._found and len(others) < len(self._report.kept):
                del self.values[name]
                self._report.kept = {*others, name}

    def _known_patterns(self) -> set[str]:
        """Return the patterns that name something in the state or in the checkpoint."""
        sides = [*self._live.items(), *self._saved.values.items()]
        return {
            pattern
            for pattern in {*self._accepted.missing, *self._accepted.unexpected}
            if any(matches(pattern, name) for key, value in sides for name in _names_in(value, key))
        }

    def _match(self, live: Any, path: tuple[Any, ...]) -> Any:
        """Return what takes the place of a value. What the checkpoint lacks, or has as something else, is reported."""
        name, objects = ".".join(map(str, path)), self._saved.index.objects
        there, known = _at(self._saved.values, path)
        if isinstance(live, torch.Tensor):
            self._report.wanted.add(name)
            matched = self._match_tensor(name, live, there, known)
            self._found |= {path[0]} if isinstance(matched, TensorRef) else set()
            return matched
        if not self._strict:
            if isinstance(live, MutableMapping) and live:
                return {key: self._match(each, (*path, key)) for key, each in live.items()}
            if isinstance(live, SEQUENCES) and not is_leaf(live, (torch.Tensor,)):
                return rebuilt(live, [self._match(each, (*path, number)) for number, each in enumerate(live)])
            if there is None and isinstance(live, Mapping) and name not in objects:
                return live  # DCP saves nothing of an empty mapping; in a list, None is in its place
            self._report.wanted.add(name)
            if not known and name in objects:
                self._found.add(path[0])
                return Lazy(partial(self._saved.plain_value, name, verify=self._verify))
        if not known:
            return live if self._keeps(name) else None
        self._found.add(path[0])
        if isinstance(there, TensorRef) and there.is_array:
            self.targets[there.name] = _new_tensor(self._saved, there)
        elif any(refs_in(there)):
            self._report.mismatched.add(f"{name}: checkpoint a tensor, this run a plain value")
        return there

    def _match_tensor(self, name: str, live: torch.Tensor, there: Any, known: bool) -> Any:
        if not isinstance(there, TensorRef) and name not in self._saved.index.tensors:
            if not known:
                return live if self._keeps(name) else None
            if not self._strict:
                self._report.missing.add(name)
            self._report.mismatched.add(f"{name}: checkpoint a plain value, this run a tensor")
            return None
        ref = there if isinstance(there, TensorRef) else TensorRef(name)
        if ref.name in self.targets:
            raise ConfigError(f"two values of the state have the flat name {ref.name}: rename one of them")
        self._fill(ref.name, live)
        return ref

    def _fill(self, name: str, tensor: torch.Tensor) -> None:
        """Note that a tensor is to be filled where it is. Another shape or dtype is reported."""
        refuse_lazy(name, tensor)
        record = self._saved.tensor(name)
        there, here = _form(record.shape, record.dtype), _form(global_shape(tensor), tensor.dtype)
        if there != here:
            self._report.mismatched.add(f"{name}: checkpoint {there}, this run {here}")
        self.targets[name] = tensor

    def _form(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Return shape and dtype of a saved tensor."""
        return torch.Size(self._saved.tensor(name).shape), self._saved.dtype(name)

    def _take_of_a_rank(self, name: str) -> None:
        saved, mine = self._saved.values[name], rank_key(self._rank)
        if not isinstance(saved, dict) or not any(str(each).startswith("rank-") for each in saved):
            raise ConfigError(
                f"{name} was saved once for all ranks, and this state has it for each rank (PerRank, a ResumableLoader "
                f"without ElasticSampler, per_rank = True): put into the state what the checkpoint was saved with"
            )
        if mine not in saved:
            self.from_other_rank.add(name)
            is_ours = self._saved.manifest is not None
            (mine,) = list(saved)[:1] if is_ours else [rank_key(self._rank % len(saved))]
        elif isinstance(self._state[name], RNGState):
            self._report.own |= {(name, *each) for each in RNGState.digests(saved[mine]).items()}
        held = saved[mine]
        if isinstance(held, dict) and ORDER in held:
            held = dict(held)
            self._compare_order(name, getattr(self._state[name], "value", None), held.pop(ORDER))
        self._take(name, held, {})

    def _compare_rates(self, name: str, schedule: LRScheduler) -> None:
        """Report a schedule whose optimizer has its groups in another order now: it has its rates by their numbers."""
        key = next((key for key, each in self._state.items() if each is schedule.optimizer), "")
        saved, entries = self._saved.values[name], self._saved.values.get(key, {})
        groups = groups_by_name(key, schedule.optimizer, self._state) if entries else {}
        rates = {number: entries.get(f"{GROUPS}{each}.initial_lr") for each, number in groups.items()}
        here = [rates[number] for number in sorted(rates)]
        live = [group.get("initial_lr") for group in schedule.optimizer.param_groups]
        is_by_number = list(getattr(schedule, "base_lrs", live)) == live  # others have an order of their own
        if not all(isinstance(each, float | int) for each in here) or not isinstance(saved, dict) or not is_by_number:
            return
        inner = saved.get("_schedulers")
        for each in (saved, *(inner if isinstance(inner, list) else ())):
            there = each.get("base_lrs") if isinstance(each, dict) else None
            there = list(there) if isinstance(there, list | tuple) else here
            if there != here and Counter(map(str, there)) == Counter(map(str, here)):
                self._report.mismatched.add(
                    f"{name}: the groups of {key!r} were in another order: checkpoint base_lrs {there}, this run "
                    f"{here}; put its groups in the order of the checkpoint"
                )

    def _compare_order(self, name: str, optimizer: object, there: Sequence[str]) -> None:
        """Report parameters of an optimizer in another order than when it was saved without their names."""
        here = names_in_order(optimizer, self._state) if isinstance(optimizer, torch.optim.Optimizer) else ()
        for number, (old, new) in enumerate(zip(there, here)):
            if old and new and old != new:
                self._report.mismatched.add(
                    f"{name}: parameter {number} of the optimizer is {old} in the checkpoint, {new} in this run; its "
                    f"state is saved without names, and needs the same parameters in the same order"
                )
                return

    def _merged(self, name: str, live: Any, saved: Any) -> Any:
        """Return what was saved of a dict or a list, with what may stay as it is here, and without what may be left
        there. A dict or list in it that only one side has goes as a whole, where a pattern names anything in it."""
        here, there = _entries(live), _entries(saved)
        alike = any(isinstance(live, kind) and isinstance(saved, kind) for kind in (Mapping, *SEQUENCES))
        if not alike or (here is None and there is None):
            return saved
        here, there = here or {}, there or {}
        of_this_run, merged = {str(key): each for key, each in here.items()}, {}
        for key, value in there.items():
            full = f"{name}.{key}"
            if str(key) in of_this_run:
                merged[key] = self._merged(full, of_this_run.pop(str(key)), value)
            elif left := [each for each in _names_in(value, full) if matches_any(self._accepted.unexpected, each)]:
                self._report.left.update(left)
            else:
                merged[key] = value
        for key, value in here.items():
            if str(key) in of_this_run:
                full = f"{name}.{key}"
                kept = [each for each in _names_in(value, full) if matches_any(self._accepted.missing, each)]
                self._report.kept.update(kept)
                merged |= {key: value} if kept else {}
        return rebuilt(saved, merged.values()) if isinstance(saved, SEQUENCES) else merged

    def _take(self, name: str, saved: Any, live: Any) -> None:
        """Take what was saved, with new tensors for those in it."""
        self.targets |= _new_tensors(self._saved, name, saved, live)
        self.values[name] = saved

    def _take_and_fill(self, name: str) -> None:
        """Take what was saved. Tensors in dicts and lists are filled where they are: somebody else, such as a model,
        may have them too. What the checkpoint has besides is new."""
        saved = self.values[name] = self._merged(name, self._live[name], self._saved.values[name])
        there = {ref.name: ref for ref in refs_in(saved)}
        here = snapshot_of({name: self._live[name]}).tensors
        self._report.wanted |= {*_names_in(self._live[name], name)}
        self._report.missing |= here.keys() - there.keys() - self._report.kept
        for full in there.keys() & here.keys():
            self._fill(full, here[full])
        self.targets |= {name: _new_tensor(self._saved, ref) for name, ref in there.items() if name not in here}


def _entries(value: Any) -> Mapping[Any, Any] | None:
    """Return what is in a dict, or in a sequence that holds more than plain values; None: it is one value."""
    if isinstance(value, SEQUENCES) and not is_leaf(value, (torch.Tensor, TensorRef)):
        return dict(enumerate(value))
    return value if isinstance(value, Mapping) else None


def _holds_tensors(value: Any) -> bool:
    """Return whether a saved value is a container with tensors in it."""
    return not isinstance(value, TensorRef) and any(refs_in(value))


def _lost(given: Any, now: Any, path: str) -> str:
    """Return what an object lacks of what it was given, in words; "": nothing."""
    if isinstance(given, SEQUENCES) and isinstance(now, SEQUENCES) and len(given) == len(now):
        given, now = dict(enumerate(given)), dict(enumerate(now))
    if isinstance(given, Mapping) and isinstance(now, Mapping):
        told = (
            _lost(each, now[key], f"{path}.{key}") if key in now else f"{path}.{key} is not there"
            for key, each in given.items()
        )
        return next(filter(None, told), "")
    if isinstance(given, torch.Tensor) and isinstance(now, torch.Tensor):
        there, here = _form(given.shape, given.dtype), _form(now.shape, now.dtype)
        return f"{path} is {here}, not {there}," if there != here else ""
    return ""


def _names_in(value: Any, name: object) -> Iterator[str]:
    """Yield the flat names in a value."""
    entries = _entries(value)
    for key, each in (entries or {}).items():
        yield from _names_in(each, f"{name}.{key}")
    if not entries:
        yield str(name)


def name_as(state: Mapping[str, Any], saved: SavedState) -> None:
    """Bring the saved values of the optimizers of this state under flat names."""
    for name in [each for each in saved.values if is_named(state.get(each))]:
        if not isinstance(saved.values[name], dict):
            saved.values[name] = {}  # another object had this name: all of this one is missing
        elif isinstance(state[name], torch.optim.Optimizer):
            saved.values[name] = flat_optimizer(saved.values[name])


def _kind_of(name: str, target: object) -> str:
    """Return what to call a part of the state in a message."""
    kinds = {"optimizer": torch.optim.Optimizer, "schedule": LRScheduler, "model": torch.nn.Module | Trainable}
    kind = next((kind for kind, each in kinds.items() if isinstance(target, each)), "")
    kind = kind or ("" if is_stateful(target) else "value")
    return f"the {name}" if name == kind else " ".join(filter(None, (kind and f"the {kind}", repr(name))))


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
        elif isinstance(values, SEQUENCES) and isinstance(key, int) and key < len(values):
            values = values[key]
        else:
            return None, False
    return values, True


def _form(shape: Sequence[int], dtype: torch.dtype | str) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _new_tensors(saved: SavedState, name: str, value: Any, live: Any) -> dict[str, torch.Tensor]:
    """Make tensors for those in a saved value, sharded as the live ones are: one of these may well be a parameter."""
    there = snapshot_of({name: live}).tensors
    return {ref.name: _new_tensor(saved, ref, there.get(ref.name)) for ref in refs_in(value)}


def _new_tensor(saved: SavedState, ref: TensorRef, like: torch.Tensor | None = None) -> torch.Tensor:
    name = ref.name
    size, dtype = torch.Size(saved.tensor(name).shape), saved.dtype(name)
    if dtype in QUANTIZED:
        raise ConfigError(
            f"{name} was saved quantized ({saved.tensor(name).dtype}), and a load makes no such tensor: put one of the "
            f"same scales into the state, to be filled"
        )
    is_sharded = isinstance(like, DTensor) or (like is not None and describes_shards(like))
    if like is not None and is_sharded and (global_shape(like), like.dtype) == (size, dtype):
        return empty_like(like)
    return empty_in_order(size, ref.order, dtype, like.device if like is not None else None)


def _wrongly_tied(saved: SavedState, targets: Mapping[str, torch.Tensor], *, verify: bool) -> list[str]:
    """Return what is one tensor in this run and was saved as two that differ, such as a copy kept of a parameter, or
    the weights of a model that did not tie them. Raises: CorruptError."""
    names: dict[Hashable, list[tuple[str, Box, torch.Tensor]]] = {}
    for name, tensor in targets.items():
        for box, memory in local_parts(tensor, name):
            if is_plain(memory) and memory.numel():
                place = (memory.device, memory.data_ptr(), memory.shape, memory.stride(), memory.dtype)
                names.setdefault(place, []).append((name, box, memory))
    return [
        _told_of_tied(saved, first, name, memory, verify)
        for (first, box, memory), *others in names.values()
        for name, its_box, _ in others
        if not _are_saved_alike(saved, (first, box), (name, its_box), memory, verify)
    ]


def _untied(saved: SavedState, targets: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the first names that were of one parameter when they were saved, and are of several in this run."""
    for names in saved.index.tied:
        memory = [part for name in names if name in targets for _, part in local_parts(targets[name], name)[:1]]
        if len({each.data_ptr() for each in memory if is_plain(each) and each.numel()}) > 1:
            return names
    return []


def _told_of_tied(saved: SavedState, first: str, name: str, like: torch.Tensor, verify: bool) -> str:
    """Return what to say of one tensor in this run that was saved as two. All parameters in a group of an optimizer
    have one of each setting."""
    (key, _, setting), (its_key, _, its_setting) = (each.partition(f".{GROUPS}") for each in (first, name))
    if setting and its_setting and key == its_key and like.numel() == 1:
        here, there = torch.empty_like(like, device="cpu"), torch.empty_like(like, device="cpu")
        for each, tensor in ((first, here), (name, there)):
            read_fills(saved, fills_for_box(saved, each, [0] * like.dim(), tensor), verify=verify)
        return conflict(name, f"{there.item():.6g}", f"{here.item():.6g}", setting.rpartition(".")[0])
    return (
        f"{name}: in this run the same memory as {first}, in the checkpoint another tensor: clone() one of them, or "
        f"untie them, as when they were saved"
    )


def _are_saved_alike(
    saved: SavedState, one: tuple[str, Box], other: tuple[str, Box], like: torch.Tensor, verify: bool
) -> bool:
    """Return whether two boxes of this form have the same bytes in the checkpoint. They are read in pieces."""
    for piece, at in pieces(torch.empty(like.shape, dtype=like.dtype, device="meta"), [0] * like.dim()):
        read = []
        for name, box in (one, other):
            read.append(torch.empty(piece.shape, dtype=like.dtype, device="cpu"))
            offsets = [begin + moved for begin, moved in zip(box.offsets, at)]
            read_fills(saved, fills_for_box(saved, name, offsets, read[-1]), verify=verify)
        if not torch.equal(*map(as_bytes, read)):
            return False
    return True


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
