"""What a new run takes from the checkpoint of another one: some entries of its state, perhaps under other names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ckptman.engine.loading.allowed_mismatches import matches_any
from ckptman.engine.loading.checkpoint_reader import SavedState
from ckptman.errors import ConfigError
from ckptman.storage.format.renaming import renaming

_ONLY = "only is the name of an entry of the state, such as 'model', or a list of them"


@dataclass(frozen=True)
class OtherWeights:
    """Entries of the state to load, all if there are none; and pairs of a regular expression and its replacement,
    applied in order to the names in the checkpoint."""

    only: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, only: object, rename: object, state: Mapping[str, Any]) -> OtherWeights:
        """Return what a user asks for. Raises: ConfigError."""
        names = [only] if isinstance(only, str) else only
        if names is not None and not (isinstance(names, Sequence) and names and all(isinstance(n, str) for n in names)):
            raise ConfigError(f"{_ONLY}, not {only!r}")
        for name in names or ():
            if not any(matches_any([name], key) for key in state):
                raise ConfigError(
                    f"only={name!r} names no entry of the state, which has {', '.join(state)}: correct it"
                )
        is_list = isinstance(rename, Sequence) and not isinstance(rename, str)
        pairs: list[Any] = list(cast(Sequence[Any], rename)) if is_list else [None]
        if not all(isinstance(each, tuple | list) and len(each) == 2 for each in pairs):
            raise ConfigError(f'rename is a list of pairs such as [(r"^model\\.old\\.", "model.new.")], not {rename!r}')
        renaming(pairs, "rename: {0!r} to {1!r}")
        return cls(tuple(names or ()), tuple((str(old), str(new)) for old, new in pairs))

    def part_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a state that are to be loaded."""
        return {name: value for name, value in state.items() if not self.only or matches_any(self.only, name)}

    def apply(self, saved: SavedState) -> None:
        """Give what was saved its new names, and leave out the entries that are not wanted.

        Raises: ConfigError: two names become one.
        """
        if self.pairs:
            saved.values = self._renamed(saved.values)
        wanted = {name: value for name, value in saved.values.items() if matches_any(self.only, name)}
        if self.only and wanted:  # else it may be a model that plain DCP saved without a name around it
            saved.values = wanted

    def _renamed(self, values: dict[str, Any]) -> dict[str, Any]:
        new_name, found = renaming(self.pairs, "rename"), dict[str, Any]()
        names = [f"{key}.{entry}" for key, value in values.items() if isinstance(value, dict) for entry in value]
        for old, new in self.pairs:
            if not any(re.search(old, name) for name in [*values, *names]):
                raise ConfigError(
                    f"rename: {old!r} to {new!r} changes no name in the checkpoint, such as {', '.join(names[:2])}: "
                    f"ckptman show lists them. Below the entries of a nested dict, nothing is renamed"
                )
        for key, value in values.items():
            entries = value if isinstance(value, dict) and value else {None: value}
            for entry, each in entries.items():
                if entry is not None and not isinstance(entry, str):
                    found.setdefault(key, {})[entry] = each
                    continue
                name, _, rest = new_name(key if entry is None else f"{key}.{entry}").partition(".")
                inside = found if entry is None else found.setdefault(name, {})
                at = name if entry is None else rest
                if at in inside:
                    raise ConfigError(f"rename gives two names of the checkpoint the name {name}.{rest}: correct it")
                inside[at] = each
        return found
