"""Keeping the newest checkpoint in the page cache, so that a restart on the same node reads it from memory.

A save goes past the page cache. What is kept is read back from the disk when the save is durable, in memory that nobody
needs: pages of files, which the kernel gives up as soon as somebody does.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckptman.engine.saving.staging import RESERVE_BYTES
from ckptman.runtime.host_memory import spare_bytes
from ckptman.storage.io.mount import MEMORY, family_of, find_mount, read_mounts

_PLENTY = 4
"""Where nobody has asked for it, a file is kept that takes no more than this part of the memory that is left."""


def why_not_kept(path: Path, neighbours: int, *, is_asked: bool) -> str | None:
    """Return why a data file is not to be kept in the page cache, where each of so many ranks of this host has one of
    that size; None: it may be. `is_asked`: the user wants it, and not only where memory is plenty. Raises: OSError."""
    mount = find_mount(read_mounts(), os.path.realpath(path))
    family = family_of(mount) if mount is not None else None
    if family is MEMORY:
        return "it is in memory as it is"
    if family is None or family.shared is not False:
        kind = family.name if family is not None else "an unknown file system"
        return f"it is on {kind}, and only file systems of this node are read once more for that"
    need, left = neighbours * (path.stat().st_size + RESERVE_BYTES), spare_bytes()
    if (need if is_asked else _PLENTY * need) > left:
        return (
            f"that needs {need / 2**30:.1f} GiB of host memory for all ranks of this node, and {left / 2**30:.1f} GiB "
            f"are left there besides what is read again and again"
        )
    return None
