"""Sizes as people write them: `70GB`, `1.5TiB`, `4096`."""

from __future__ import annotations

import re
from decimal import Decimal

from ckptman.errors import ConfigError

_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(?:([kmgtpe])(i)?)?(b)?\s*", re.IGNORECASE | re.ASCII)
_MOST = 2**63 - 1


def is_size(written: str) -> bool:
    """Whether it is meant as a size, of which `parse_size` says whether it can be."""
    return _SIZE.fullmatch(written) is not None


def parse_size(option: str, written: str, *, needs_unit: bool = False) -> int:
    """Bytes. `kB`, `MB`, `GB`... are powers of 1000; `KiB`, `MiB`, `GiB`..., and letters without a B, of 1024.

    `needs_unit`: a bare number is refused, where 70 bytes are sure to be 70 GB without their unit.
    Raises: ConfigError where it is no size, or none above 0.
    """
    match = _SIZE.fullmatch(written)
    if match is None:
        raise ConfigError(f"{option}: a size such as 70GB, 1.5TiB or 4096 (bytes), not {written!r}")
    number, letter, binary, byte = match.groups()
    if needs_unit and not letter and not byte:
        raise ConfigError(f"{option}: {number} has no unit: say {number}GB, if that is what is meant")
    base = 1024 if binary or not byte else 1000
    size = int(Decimal(number) * base ** (" kmgtpe".index(letter.lower()) if letter else 0))
    if not 0 < size <= _MOST:
        raise ConfigError(f"{option}: a size above 0 that a file system can hold, not {written!r}")
    return size
