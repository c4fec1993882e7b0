"""New names by regular expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ckptman.errors import ConfigError


def renaming(pairs: Sequence[Sequence[str]], said: str, strip: str = "") -> Callable[[str], str]:
    """Return a function that gives a name without the prefix `strip`, with each regular expression replaced in order.

    Args:
        pairs: Regular expressions and their replacements.
        said: How a message names a pair, with {0} and {1} for its parts.
        strip: The prefix.

    Raises:
        ConfigError: one of them is none.
    """
    patterns: list[tuple[re.Pattern[str], str]] = []
    for pattern, replacement in pairs:
        try:
            patterns.append((re.compile(pattern), replacement))
            re.sub(pattern, replacement, "")
        except (re.error, IndexError, TypeError) as error:
            raise ConfigError(
                f"{said.format(pattern, replacement)} is not a pair as Python's re.sub takes it: {error}"
            ) from None

    def new_name(name: str) -> str:
        name = name.removeprefix(strip)
        for pattern, replacement in patterns:
            name = pattern.sub(replacement, name)
        return name

    return new_name
