"""Which differences between a state and a checkpoint a load accepts, by patterns of names."""

from __future__ import annotations

import difflib
import glob
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from ckptman.engine.comm.control_group import Channel
from ckptman.errors import ConfigError

EVERYTHING = ("*",)
_FEW = 4
"""So many patterns are not shortened further."""
_SHOWN = 8
"""So many names are told one by one."""


class Skipped(NamedTuple):
    """What a load skipped, by flat names or whole keys of the state. False where that is nothing.

    `missing`: what the state has and the checkpoint lacks; it stayed as it was. `unexpected`: what the checkpoint has
    besides; it was not loaded.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected)


@dataclass(frozen=True)
class AllowedMismatches:
    """Patterns of what may be missing in a checkpoint, and of what may be unexpected in it.

    A pattern names an entry (`schedule`, `model.head`) and all that is under it; `*`, `?` and `[...]` are as in file
    names, and `*` stands for dots, too. `ema.*` is the same as `ema`.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    @classmethod
    def of(cls, missing: object, unexpected: object) -> AllowedMismatches:
        """Return the patterns that a user gave. Raises: ConfigError."""
        return cls(_patterns("missing", missing), _patterns("unexpected", unexpected))

    @staticmethod
    def refuse_unlike(given: Sequence[AllowedMismatches]) -> None:
        """Refuse other patterns on another rank. Raises: ConfigError."""
        for rank, each in enumerate(given):
            if each != given[0]:
                raise ConfigError(
                    f"rank 0 accepts ({given[0]}) and rank {rank} ({each}): every rank has to give the same patterns"
                )

    def check_keys(self, channel: Channel, keys: Iterable[str]) -> None:
        """Check the patterns of `missing` where there is no checkpoint yet, by the keys of the state: an attempt that
        finds one should not be the first to meet a typing error. Raises on every rank: ConfigError."""
        known = sorted({key for each in channel.gather([*keys]) for key in each})
        for pattern in self.missing:
            if not any(fnmatchcase(key.partition(".")[0], pattern.partition(".")[0]) for key in known):
                raise names_nothing(pattern, known)

    def __str__(self) -> str:
        lists = {"missing": self.missing, "unexpected": self.unexpected}
        return ", ".join(f"{name}={json.dumps(patterns)}" for name, patterns in lists.items() if patterns)


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern names an entry, or something that this is under."""
    entry = pattern.removesuffix(".*")
    return fnmatchcase(name, entry) or fnmatchcase(name, f"{entry}.*")


def matches_any(patterns: Iterable[str], name: str) -> bool:
    """Return whether one of the patterns names an entry, or something that this is under."""
    return any(matches(each, name) for each in patterns)


def names_nothing(pattern: str, keys: Collection[str]) -> ConfigError:
    """Return the error about a pattern of `missing` that names nothing. `keys`: those of the state."""
    close = difflib.get_close_matches(pattern.partition(".")[0], keys, 1)
    return ConfigError(
        f'missing=["{pattern}"] names nothing in the state, whose keys are {", ".join(keys)}, nor in the checkpoint: '
        + (f"did you mean {close[0]}?" if close else "correct it, or leave it out")
    )


def patterns_of(names: Collection[str], known: Iterable[str]) -> tuple[str, ...]:
    """Return patterns, as short as can be, that name these and nothing else that is known."""
    inner = {prefix for each in names for prefix in _prefixes(each)}
    others = set(known) - inner
    taken = {prefix for each in others for prefix in _prefixes(each)}
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(next((each for each in _prefixes(name) if each not in taken), name), []).append(name)
    found = []
    for prefix, group in groups.items():
        if "." not in prefix:
            found.append(glob.escape(prefix))
        else:
            found.append(f"{glob.escape(prefix)}.*" if len(group) > 1 else glob.escape(group[0]))
    if len(found) > _FEW:  # layers that are alike, as a rule
        general = {each: re.sub(r"(?<=\.)\d+(?=\.)", "*", each) for each in found}
        tight = {each for each in {*general.values()} if not any(matches(each, other) for other in others)}
        found = [general[each] if general[each] in tight else each for each in found]
    return tuple(dict.fromkeys(found))


def told(names: Iterable[str]) -> list[str]:
    """Return names to be told; where there are many, what they are under."""
    shown = dict.fromkeys(names)
    while len(shown) > _SHOWN and (deepest := max(name.count(".") for name in shown)):
        shown = dict.fromkeys(name.rpartition(".")[0] if name.count(".") == deepest else name for name in shown)
    return [*shown]


def _prefixes(name: str) -> Iterator[str]:
    at = name.find(".")
    while at >= 0:
        yield name[:at]
        at = name.find(".", at + 1)
    yield name


def _patterns(argument: str, given: object) -> tuple[str, ...]:
    if isinstance(given, list | tuple) and all(isinstance(each, str) and each for each in given):
        return tuple(given)
    raise ConfigError(f'{argument} is a list of patterns such as ["schedule", "ema.*"], not {given!r}')
