"""How much a file system, or a quota on it, holds in all: what a limit in percent is of."""

from __future__ import annotations

import os
from pathlib import Path

from ckptman.doctor.mount import MOUNTINFO, find_mount, parse_mountinfo
from ckptman.doctor.quota import Run, quotas
from ckptman.runtime.deadline import run_command


def capacity_bytes(root: Path, run: Run = run_command) -> int:
    """Bytes of the file system under a root, or of the smallest quota that counts for it. Raises: OSError.

    A quota that no command tells is not known. Called by `ckptman prune`, and by a run as it starts.
    """
    space = os.statvfs(root)
    sizes = [space.f_blocks * space.f_frsize]
    path = os.path.realpath(root)
    try:
        mounts = parse_mountinfo(MOUNTINFO.read_text(errors="surrogateescape"))
    except OSError:
        mounts = []
    mounted = find_mount(mounts, path)
    if mounted is not None:
        found = quotas(path, mounted, run, os.getuid(), Path(path).stat().st_gid)
        sizes += [each.limit_bytes for each in found if each.limit_bytes is not None]
    return min(sizes)
