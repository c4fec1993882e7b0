"""How much memory this host has left for us: the least that the machine and the limits of our control groups leave."""

from __future__ import annotations

from pathlib import Path


def available_bytes(cgroup_root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return bytes that can be taken without swapping and without being killed for it.

    Slurm limits a job by control groups; memory that only holds pages of files counts as free in both.
    """
    import psutil

    left = [int(psutil.virtual_memory().available)]
    for folder, limit, used in _groups(cgroup_root, own):
        most, now = _number(folder / limit), _number(folder / used)
        if most is not None and now is not None:
            left.append(most - now + _reclaimable(folder))
    return max(0, min(left))


def _groups(root: Path, own: Path) -> list[tuple[Path, str, str]]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        found += [(each, limit, used) for each in (folder, *folder.parents) if each == base or base in each.parents]
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file here, or the word "max"
        return None


def _reclaimable(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    numbers = dict(line.split(" ", 1) for line in lines if " " in line)
    # In version 1 the plain names leave out the groups below; version 2 has no others.
    kinds = ("inactive_file", "active_file")
    return sum(int(numbers.get(f"total_{kind}", numbers.get(kind, 0))) for kind in kinds)
