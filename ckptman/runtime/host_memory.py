"""How much memory this host has left for us: the least that the machine and the limits of our control groups leave."""

from __future__ import annotations

from pathlib import Path

_CGROUPS, _OWN, _MEMINFO = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/meminfo")


def available_bytes(cgroup_root: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Return bytes that can be taken without swapping and without being killed for it.

    Slurm limits a job by control groups; memory that only holds pages of files counts as free in both.
    """
    return _least_left(_host_bytes(), cgroup_root, own, ("inactive_file", "active_file"))


def total_bytes(cgroup_root: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Return the memory of this host, or the least that a limit of our control groups leaves of it."""
    import psutil

    limits = [_number(folder / limit) for folder, limit, _ in _groups(cgroup_root, own)]
    return min([int(psutil.virtual_memory().total), *(each for each in limits if each is not None)])


def spare_bytes(cgroup_root: Path = _CGROUPS, own: Path = _OWN, meminfo: Path = _MEMINFO) -> int:
    """Return bytes that pages of one more file can take without pushing out those of files that are read again and
    again, as training reads its data.

    The kernel keeps those apart, as active, and first gives up what was read once; here as there, that counts as free.
    """
    active = _numbers(meminfo).get("Active(file):", 0) * 1024
    return _least_left(_host_bytes() - active, cgroup_root, own, ("inactive_file",))


def _host_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _least_left(host_bytes: int, cgroup_root: Path, own: Path, free_kinds: tuple[str, ...]) -> int:
    left = [host_bytes]
    for folder, limit, used in _groups(cgroup_root, own):
        most, now = _number(folder / limit), _number(folder / used)
        if most is not None and now is not None:
            stat = _numbers(folder / "memory.stat")
            # In version 1 the plain names leave out the groups below; version 2 has no others.
            left.append(most - now + sum(stat.get(f"total_{kind}", stat.get(kind, 0)) for kind in free_kinds))
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


def _numbers(path: Path) -> dict[str, int]:
    """Return what a file has in lines of a name and a number."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {each[0]: int(each[1]) for each in fields if len(each) > 1 and each[1].isdigit()}
