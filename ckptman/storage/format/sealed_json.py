"""The digest of a small JSON file: its last field, the xxh3-128 of all bytes before it. For notes beside a manifest.

A file that was written without one is read as it is: earlier versions wrote such.
"""

from __future__ import annotations

import re
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from ckptman.errors import CorruptError

_SEAL = re.compile(rb',\n ?"digest": ?"([0-9a-f]{32})"\n?}\n?\Z')
_FIELD = b'"digest"'


class SealError(CorruptError):
    """The bytes of a file are not those that were written."""


def seal(data: bytes) -> bytes:
    """Return the bytes of a JSON object with fields, with their digest as its last field."""
    body = data.rstrip().removesuffix(b"}").rstrip()
    return body + b',\n "digest": "' + xxh3_128_hexdigest(body).encode() + b'"\n}\n'


def unseal(path: Path | str, data: bytes) -> bytes:
    """Return the bytes that were sealed, without the digest; what has none is returned as it is. `path`: for messages.

    Raises: SealError.
    """
    found = _SEAL.search(data)
    if found is None and _FIELD not in data:
        return data
    if found is None or xxh3_128_hexdigest(data[: found.start()]).encode() != found[1]:
        raise SealError(
            f"{path} does not match its digest: its bytes have changed since it was written; bring it back from a "
            f'copy, or, where it was edited by hand, take its last field, "digest", and the comma before it out of it'
        )
    return data[: found.start()] + b"\n}\n"
