"""How the saved state of an optimizer fits one whose parameters, groups or settings are others now."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from ckptman.engine.loading.checkpoint_reader import Lazy, resolve
from ckptman.engine.state.named_state import refs_in
from ckptman.engine.state.optimizers import GROUPS, OF_SCHEDULES, parameter_of


def flat_optimizer(values: dict[str, Any]) -> dict[str, Any]:
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


def without_unsaved_state(live: Mapping[str, Any], saved: Mapping[str, Any], had: Collection[str]) -> dict[str, Any]:
    """Return an optimizer's state without that of parameters which had none yet when it was saved. `had`: those that
    have some now; what is not known of in the checkpoint keeps it."""
    known = {parameter_of(entry) for entry in saved}
    known |= {*had} - {_setting(entry)[0] for entry in saved if entry.startswith(GROUPS)}
    return {entry: value for entry, value in live.items() if not (each := parameter_of(entry)) or each in known}


def settings_added_later(live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved settings that an optimizer, or its schedule, adds to its groups in the first steps."""
    known = {entry.rpartition(".")[0] for entry in live if entry.startswith(GROUPS)}
    return {
        entry: value
        for entry, value in saved.items()
        if entry not in live and entry.rpartition(".")[0] in known and not any(refs_in(value))
    }


def conflicting_settings(name: str, groups: Mapping[str, int], saved: Mapping[str, Any]) -> list[str]:
    """Return the saved settings of parameters that are in one group of the optimizer `name` now and differ: a group has
    one of each. Those that are tensors, or that plain DCP pickled, are not looked at."""
    first: dict[tuple[int, str], tuple[str, Any]] = {}
    found = []
    for entry, parameter, key, value in _settings(groups, saved):
        if not isinstance(value, Lazy):
            other, there = first.setdefault((groups[parameter], key), (parameter, value))
            if repr(value) != repr(there):
                found.append(conflict(f"{name}.{entry}", repr(value), repr(there), other))
    return found


def conflict(name: str, saved: str, other_value: str, other: str) -> str:
    """Return what to say of a saved setting that differs from that of another parameter in its group."""
    return f"{name}: checkpoint {saved}, this run {other_value} as of {other}, of its group"


def parameters_left(
    name: str, live: Mapping[str, Any], saved: Mapping[str, Any], unexpected: Collection[str]
) -> list[str]:
    """Return the parameters that were in a group of the optimizer `name`, are in none now, and are not accepted."""
    known = {_setting(entry)[0] for entry in live if entry.startswith(GROUPS)}
    there = {_setting(entry)[0]: entry for entry in saved if entry.startswith(GROUPS)}
    return sorted(parameter for parameter in there.keys() - known if f"{name}.{there[parameter]}" in unexpected)


def start_new_parameters(
    values: dict[str, Any],
    kept: Collection[str],
    had_state: Collection[str],
    groups: Mapping[str, int],
    saved: Mapping[str, Any],
) -> None:
    """Have an optimizer make no state for parameters that the checkpoint has none of, and give them the settings that
    were saved of the others in their group, which has one of each.

    Args:
        values: what the optimizer is given, by entries; it is changed.
        kept: the entries that the checkpoint lacks.
        had_state: the parameters that had state before.
        groups: the number of the group of each parameter.
        saved: what the checkpoint has, by entries.
    """
    with_state = {*had_state, *(parameter_of(entry) for entry in values if entry not in kept)}
    for entry in values.keys() & kept:
        if (parameter := parameter_of(entry)) and parameter not in with_state:
            del values[entry]
    of_group: dict[int, dict[str, Any]] = {}
    for _, parameter, key, value in _settings(groups, saved):
        of_group.setdefault(groups[parameter], {})[key] = value
    for parameter in {_setting(entry)[0] for entry in kept if entry.startswith(GROUPS)}:
        for key, value in of_group.get(groups.get(parameter, -1), {}).items():
            if (entry := f"{GROUPS}{parameter}.{key}") not in saved:
                values[entry] = value


def settings_of_newer_torch(live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of parameter groups that a checkpoint of an older torch lacks: they stay as they are.

    Where the checkpoint has what this one lacks, and no schedule adds it, it is of another kind of optimizer."""
    known = {entry.rpartition(".")[0] for entry in saved if entry.startswith(GROUPS)}
    kept = {
        entry: value
        for entry, value in live.items()
        if entry not in saved and entry.rpartition(".")[0] in known and not isinstance(value, torch.Tensor)
    }
    is_other = any(_setting(entry)[1] not in OF_SCHEDULES for entry in settings_added_later(live, saved))
    return {} if is_other else kept


def _setting(entry: str) -> tuple[str, str]:
    """Return the parameter and the name of a setting `param_groups.<parameter>.<name>`."""
    parameter, _, key = entry.removeprefix(GROUPS).rpartition(".")
    return parameter, key


def _settings(groups: Mapping[str, int], saved: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Any]]:
    """Yield entry, parameter, name and value of the saved settings of parameters that are in a group now, but for
    tensors."""
    for entry, value in saved.items():
        parameter, key = _setting(entry)
        if entry.startswith(GROUPS) and parameter in groups and not any(refs_in(value)):
            yield entry, parameter, key, value
