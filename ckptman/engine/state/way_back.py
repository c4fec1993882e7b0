"""Whether modules take back what they give: a state dict may have names that no load knows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ckptman._torch_compat import full_names, takes_more
from ckptman.engine.state.named_state import added_entries
from ckptman.engine.state.trainable import loads_as_a_whole
from ckptman.errors import ConfigError

_EXTRA = "_extra_state"


def refuse_one_way_modules(state: Mapping[str, Any], names: Collection[str]) -> None:
    """Refuse modules that give entries which are neither parameters nor buffers, and have no code that could take them.
    Nothing is loaded for it: a load may change more than what it is given. A module with a load of its own is believed.

    Args:
        names: the flat names of what is saved.

    Raises: ConfigError.
    """
    for key, module in state.items():
        if not isinstance(module, torch.nn.Module):
            continue
        unknown = [each for each in added_entries(key, module, names) if _EXTRA not in each.split(".")]
        if not unknown or loads_as_a_whole(module):
            continue
        modules = [(prefix, each) for name, each in module.named_modules() for prefix in _prefixes(module, name)]
        for entry in unknown:
            above = [(prefix, each) for prefix, each in modules if entry.startswith(prefix)]
            if not any(takes_more(each) for _, each in above):
                prefix, owner = max(above, key=lambda pair: len(pair[0]))
                is_frozen = not any(each.requires_grad for each in owner.parameters())
                frozen = ", or put ckptman.Trainable(module) into the state, which leaves out what is frozen"
                kind = type(owner).__name__
                raise ConfigError(
                    f"{f'{key}.{prefix}'.rstrip('.')} ({kind}) saves {entry.removeprefix(prefix)!r}, which is neither "
                    f"a parameter nor a buffer of it, and cannot load it, so no restore would work: give {kind} a "
                    f"_load_from_state_dict() that takes it{frozen if is_frozen else ''}"
                )


def _prefixes(root: torch.nn.Module, name: str) -> list[str]:
    """Return how the entries of a submodule begin in a state dict, in which wrappers have no names."""
    return [each.removesuffix(_EXTRA) for each in full_names(root, f"{name}.{_EXTRA}" if name else _EXTRA)]
