"""`save` and `load` of a state dict, for those who have a training loop of their own."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckptman.catalog.reader_lease import reading
from ckptman.comm.control import Channel, RankFailed
from ckptman.comm.replicas import compare_replicas
from ckptman.errors import CommitError, ConfigError, MismatchError, warn
from ckptman.format.paths import parse_step
from ckptman.io.filesystem import DISK
from ckptman.loading.checkpoint_reader import Lazy, SavedState, resolve
from ckptman.loading.loader import (
    all_or_corrupt,
    fill,
    is_extra_state,
    live_values,
    own_tensors,
    read_on_all,
    settings_apart,
    settings_made_later,
    started,
)
from ckptman.loading.read import NOT_USABLE, read_bytes
from ckptman.loading.tied_tensors import apart_in_one_memory
from ckptman.saving.draft import Draft, SaveInfo
from ckptman.saving.loadable import warn_of_refused
from ckptman.saving.rank_file import RankFile, make_rank_file
from ckptman.saving.write_plan import make_plan, signature_of
from ckptman.saving.writer import CheckpointWriter, Content
from ckptman.state.file_layout import pickled
from ckptman.state.named_state import (
    Snapshot,
    is_leaf,
    is_named,
    is_stateful,
    put_back,
    rank_key,
    refs_in,
    replace_refs,
    snapshot,
)
from ckptman.state.optimizers import as_before_on_error

TIMEOUT_SECONDS = 1800.0
_COMPARED: set[int] = set()
"""Signatures of the states whose replicas were compared: the first save of each does that."""


def save(state_dict: Mapping[str, Any], path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Save a state dict as the checkpoint `path`, and return when it is durable.

    Args:
        state_dict: tensors, DTensors, nested dicts and plain values by name, as for `dcp.save`; modules, optimizers and
            other objects with `state_dict` are asked for theirs.
        path: the folder that appears when, and only when, the save is complete.
        overwrite: replace the checkpoint that `path` is; it stays until the new one takes its place.

    Every rank calls it. A value that `load` will refuse is told by a RuntimeWarning.

    Raises on every rank alike: ExistsError, ConfigError (a value that cannot be saved, or a small tensor that differs
    between ranks), CommitError (disk full, quota, an I/O error on any rank: nothing is left of the save, and older ones
    are untouched).
    """
    final = Path(path)
    channel = Channel(TIMEOUT_SECONDS)
    shots: list[Snapshot] = []
    files: list[RankFile] = []
    name = parse_step(final.name)
    step = name.step if name else 0
    info = SaveInfo(step=step, reason="saved by ckptman.save", world_size=channel.world_size)
    draft = Draft(final, info, overwrite=overwrite)

    def look() -> bool:
        shots.append(snapshot(state_dict, channel.rank, strict=False))
        return signature_of(shots[0]) not in _COMPARED

    try:
        if any(channel.run_on_all(look)):
            warning = compare_replicas(channel, shots[0], state_dict)
            _COMPARED.add(signature_of(shots[0]))
            if warning and channel.is_leader:
                with contextlib.suppress(Warning):  # one that is an error must not keep the leader from the others
                    warn(warning)
        plan = make_plan(shots[0], channel)
        channel.run_on_all(lambda: files.append(make_rank_file(shots[0], plan)))
        _warn_of_refused(shots[0], files[0])
        CheckpointWriter(DISK).save(channel, draft, Content.of(shots[0], files[0], files[0].memory(shots[0])))
    except RankFailed as failed:
        if failed.failure.error is not None:
            raise failed.failure.error from failed
        raise CommitError(step, failed.failure.rank, failed.failure.text) from failed
    finally:
        draft.abandon()
        channel.close()


def _warn_of_refused(shot: Snapshot, file: RankFile) -> None:
    """Tell of what this rank pickles because it is no plain value or tensor, and `load` refuses for the same reason."""
    encoded = {name for unit in shot.units for name in unit.names}
    values = [(name, partial(pickled, shot.objects[name])) for name in file.plan.objects if name not in encoded]
    warn_of_refused(file.special(shot), values)


def load(state_dict: MutableMapping[str, Any], path: str | os.PathLike[str], *, verify: bool = True) -> None:
    """Load the checkpoint `path` into a state dict, in place, on any number of ranks.

    Tensors and DTensors are filled where they are, in any sharding; plain values are replaced; modules, optimizers and
    other objects with `load_state_dict` are given their state. What the checkpoint holds besides is left there. `path`
    may also be what `dcp.save` or torchtitan wrote. With `verify`, every block that is read is checked.

    Every rank calls it. Raises on every rank alike: NotFoundError; MismatchError (something is missing in the
    checkpoint, or has another shape or dtype there) before anything is filled; CorruptError, after which what was to be
    filled is not usable; FormatVersionError.
    """
    folder = Path(path)
    channel = Channel(TIMEOUT_SECONDS)
    saved: list[SavedState] = []
    live: list[dict[str, Any]] = []
    found: list[_Found] = []
    left = ""

    def look() -> _Found:
        modules = [name for name, value in state_dict.items() if isinstance(value, torch.nn.Module)]
        extra = {f"{name}.{entry}" for name in modules for entry in live[0][name] if is_extra_state(entry)}
        found.append(_Found(saved[0], extra))
        for name, value in list(live[0].items()):
            if isinstance(state_dict[name], torch.optim.Optimizer):
                there = saved[0].values.get(name, {})
                found[0].mismatched += settings_apart(state_dict, name, there)
                live[0][name] = started(value, there) | settings_made_later(value, there)
            found[0].look(live[0][name], (name,), partial(operator.setitem, live[0], name))
        if not found[0].missing and not found[0].mismatched:
            plain = [name for name, value in state_dict.items() if not is_named(value)]
            found[0].mismatched += apart_in_one_memory(saved[0], found[0].targets, plain, verify=verify)
        return _Found(None, missing=found[0].missing, mismatched=found[0].mismatched)

    held = contextlib.ExitStack()
    if channel.is_leader:
        held.enter_context(reading(folder, what="load"))
    try:
        saved.append(read_on_all(channel, state_dict, folder))
        with as_before_on_error(state_dict.values()):
            channel.run_on_all(lambda: live.append(live_values(state_dict, channel.rank, saved[0])))
            reports = all_or_corrupt(channel, look, folder)
            missing = sorted({name for each in reports for name in each.missing})
            mismatched = sorted({line for each in reports for line in each.mismatched})
            if missing or mismatched:
                raise MismatchError(str(folder), missing, (), mismatched)
            all_or_corrupt(channel, partial(found[0].read_values, verify), folder)
            fill(channel, saved[0], found[0].targets, folder, verify=verify)
            left = NOT_USABLE
            found[0].set_values()
            channel.run_on_all(lambda: _hand_over(state_dict, live[0], channel.rank))
    except RankFailed as failed:
        raise failed.as_ckptman_error(left) from failed
    finally:
        held.close()
        channel.close()


@dataclass
class _Found:
    """What was found in a checkpoint for a state: tensors to fill by flat name, and how to set each plain value.

    `extra`: names of what modules check themselves, whatever it looks like.
    """

    saved: SavedState | None
    extra: set[str] = field(default_factory=set)
    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    plain: list[tuple[Any, Callable[[Any], None]]] = field(default_factory=list)
    pickled: list[tuple[str, Callable[[Any], None]]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)

    def look(self, value: Any, path: tuple[str | int, ...], assign: Callable[[Any], None]) -> None:
        """Look for a value and everything below it. `assign` puts another plain value in its place."""
        assert self.saved is not None
        name = ".".join(map(str, path))
        if name in self.extra and _at(self.saved.values, path)[1]:
            there, _ = _at(self.saved.values, path)
            tensors = own_tensors(self.saved, name, there, value)
            self.targets |= tensors
            self.plain.append((there, lambda found: assign(replace_refs(found, lambda ref: tensors[ref.name]))))
        elif isinstance(value, torch.Tensor):
            record = self.saved.index.tensors.get(name)
            here = (str(value.dtype).removeprefix("torch."), tuple(value.shape))
            if record is None:
                self.missing.append(name)
            elif name in self.targets:
                raise ConfigError(f"two values of the state have the flat name {name}: rename one of them")
            elif (record.dtype, record.shape) != here:
                there = f"{list(record.shape)} {record.dtype}"
                self.mismatched.append(f"{name}: checkpoint {there}, this run {list(value.shape)} {here[0]}")
            else:
                self.targets[name] = value
        elif isinstance(value, MutableMapping) and value:
            for key, each in value.items():
                self.look(each, (*path, key), partial(operator.setitem, value, key))
        elif isinstance(value, list) and not is_leaf(value):
            for number, each in enumerate(value):
                self.look(each, (*path, number), partial(operator.setitem, value, number))
        else:
            there, known = _at(self.saved.values, path)
            if not known and name in self.saved.index.objects:
                self.pickled.append((name, assign))
            elif not known or (there is None and isinstance(value, Mapping) and name not in self.saved.index.objects):
                # DCP saves nothing of an empty mapping; in a list, None is in its place.
                self.missing += [] if isinstance(value, Mapping) else [name]
            elif any(refs_in(there)):
                self.mismatched.append(f"{name}: checkpoint a tensor, this run a plain value")
            else:
                self.plain.append((there, assign))

    def read_values(self, verify: bool) -> None:
        """Read the plain values: what is damaged there is found before a tensor is filled."""
        assert self.saved is not None
        for name, assign in self.pickled:
            self.plain.append((self.saved.pickled(name, read_bytes(self.saved, name, verify=verify)), assign))
        self.plain = [(resolve(value), assign) for value, assign in self.plain]

    def set_values(self) -> None:
        """Set the plain values."""
        for value, assign in self.plain:
            assign(value)


def _at(values: Any, path: tuple[str | int, ...]) -> tuple[Any, bool]:
    """The saved value at a path, and whether there is one. Plain DCP saves all keys as texts."""
    for key in path:
        values = values.read() if isinstance(values, Lazy) else values  # until torch 2.3, a dict without tensors
        if isinstance(values, dict) and (key in values or str(key) in values):
            values = values[key] if key in values else values[str(key)]
        elif isinstance(values, list) and isinstance(key, int) and key < len(values):
            values = values[key]
        else:
            return None, False
    return values, True


def _hand_over(state_dict: MutableMapping[str, Any], values: Mapping[str, Any], rank: int) -> None:
    for name, value in values.items():
        target = state_dict[name]
        if is_named(target) or is_stateful(target):
            mine = value[rank_key(rank)] if getattr(target, "per_rank", False) else value
            put_back(state_dict, name, mine, rank, False, set())
        elif value is not target:
            state_dict[name] = value
