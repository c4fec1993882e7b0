"""Sizes as people write them: `70GB`, `1.5TiB`, `4096`."""

from __future__ import annotations

import re
from decimal import Decimal

from ckptman.errors import ConfigError

_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(?:([kmgtpe])(i)?)?(b)?\s*", re.IGNORECASE | re.ASCII)
_MOST = 2**63 - 1


def parse_size(option: str, written: str) -> int:
    """Bytes. `kB`, `MB`, `GB`... are powers of 1000; `KiB`, `MiB`, `GiB`..., and letters without a B, of 1024.

    Raises: ConfigError where it is no size, or none above 0.
    """
    match = _SIZE.fullmatch(written)
    if match is None:
        raise ConfigError(f"{option}: a size such as 70GB, 1.5TiB or 4096 (bytes), not {written!r}")
    number, letter, binary, byte = match.groups()
    base = 1024 if binary or not byte else 1000
    size = int(Decimal(number) * base ** (" kmgtpe".index(letter.lower()) if letter else 0))
    if not 0 < size <= _MOST:
        raise ConfigError(f"{option}: a size above 0 that a file system can hold, not {written!r}")
    return size
