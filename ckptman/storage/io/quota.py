"""Quotas, as far as the file system or a command of the site reports them, and the size of a file system."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptman.storage.io.mount import Mount, family_of, find_mount, read_mounts

Run = Callable[[Sequence[str]], str]
"""Runs a command and returns what it prints. Raises: OSError, subprocess.SubprocessError."""
_KIB = 1024
# A name, then twice: used, soft limit, hard limit, grace. Long names are on a line of their own; `*`: above the soft
# limit; `[ ]`: not exact.
_ROW = re.compile(
    r"(?P<name>\S+)\s+\[?(?P<kib>\d+)\*?\]?\*?\s+(?P<soft>\d+)\s+(?P<hard>\d+)\s+(?P<grace>\S+)"
    r"\s+\[?(?P<files>\d+)\*?\]?\*?\s+(?P<files_soft>\d+)\s+(?P<files_hard>\d+)\s+(?P<files_grace>\S+)"
)
_NO_LIMIT = re.compile(r"^Disk quotas for .*\): none\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Quota:
    """What may be used and what is. `whose`: user, group, project or fileset. Limits are None where there are none.

    `in_grace`: above a limit that may be passed for some days. `grace_over`: those days are over.
    """

    whose: str
    used_bytes: int
    limit_bytes: int | None
    used_files: int
    limit_files: int | None
    in_grace: bool = False
    grace_over: bool = False

    @property
    def left_bytes(self) -> int | None:
        return None if self.limit_bytes is None else max(0, self.limit_bytes - self.used_bytes)

    @property
    def left_files(self) -> int | None:
        return None if self.limit_files is None else max(0, self.limit_files - self.used_files)


def quotas(folder: str, mount: Mount, run: Run, uid: int, gid: int) -> list[Quota]:
    """Return the quotas that count for a folder; none where nothing tells them. `gid`: of the folder."""
    if mount.kind == "lustre":
        found = parse_quota(ask(run, "lfs", "quota", "-q", "-u", str(uid), folder), "user")
        found += parse_quota(ask(run, "lfs", "quota", "-q", "-g", str(gid), folder), "group")
        project = re.match(r"\s*(\d+)\s", ask(run, "lfs", "project", "-d", folder))
        if project is not None and int(project[1]):
            found += parse_quota(ask(run, "lfs", "quota", "-q", "-p", project[1], folder), "project")
        return found
    if mount.kind == "gpfs":
        return parse_mmlsquota(ask(run, "mmlsquota", "-Y", mount.source.removeprefix("/dev/")))
    if family_of(mount).name == "CephFS":
        return ceph_quotas(folder, mount.point)
    if mount.kind in ("tmpfs", "overlay", "ramfs", "squashfs"):
        return []
    return [
        each
        for whose, flag in (("user", "-u"), ("group", "-g"))
        for each in parse_quota(ask(run, "quota", "-w", "-p", flag, "-f", mount.point), whose)
    ]


def ceph_quotas(folder: str, point: str) -> list[Quota]:
    """Return the quotas of a folder of CephFS and of those above it, up to its mount: each bounds all that is in it."""
    found = []
    for each in (folder, *map(str, Path(folder).parents)):
        limits = [_ceph_number(each, f"ceph.quota.{name}") for name in ("max_bytes", "max_files")]
        used = [_ceph_number(each, f"ceph.dir.{name}") for name in ("rbytes", "rentries")]
        if any(limits):
            found.append(Quota(f"folder {each}", used[0] or 0, limits[0] or None, used[1] or 0, limits[1] or None))
        elif each == folder and used[0] is not None:
            found.append(Quota(f"folder {each}", used[0], None, used[1] or 0, None))
        if each == point:
            break
    return found


def capacity_bytes(root: Path, run: Run) -> int:
    """Return the size of the file system under a root, or of the smallest known quota: a limit in percent refers to it.

    Raises: OSError.
    """
    space = os.statvfs(root)
    sizes = [space.f_blocks * space.f_frsize]
    path = os.path.realpath(root)
    mounted = find_mount(read_mounts(), path)
    if mounted is not None:
        found = quotas(path, mounted, run, os.getuid(), Path(path).stat().st_gid)
        sizes += [each.limit_bytes for each in found if each.limit_bytes is not None]
    return min(sizes)


def parse_quota(printed: str, whose: str) -> list[Quota]:
    """Return the rows that `quota -w -p` and `lfs quota -q` print: KiB and files; one without limits for `none`."""
    names = ("kib", "soft", "hard", "files", "files_soft", "files_hard")
    found = [
        _quota(whose, [int(row[name]) for name in names], _is_past(row["grace"]), _is_past(row["files_grace"]))
        for row in _ROW.finditer(printed)
    ]
    return found or [Quota(whose, 0, None, 0, None) for _ in _NO_LIMIT.findall(printed)]


def parse_mmlsquota(printed: str) -> list[Quota]:
    """Return the rows that `mmlsquota -Y` prints, fields between colons under the names of its HEADER line: KiB and
    files."""
    columns = ("blockUsage", "blockQuota", "blockLimit", "filesUsage", "filesQuota", "filesLimit")
    found, names = [], list[str]()
    for line in printed.splitlines():
        fields = line.split(":")
        if len(fields) > 2 and fields[2] == "HEADER":
            names = fields
            continue
        row = dict(zip(names, fields))
        with contextlib.suppress(KeyError, ValueError):
            whose = {"USR": "user", "GRP": "group", "FILESET": "fileset"}.get(row["quotaType"], row["quotaType"])
            if fileset := row.get("filesetname"):
                whose += f" (fileset {fileset})"
            numbers = [int(row[name]) for name in columns]
            over = [row.get(name) == "expired" for name in ("blockGrace", "filesGrace")]
            found.append(_quota(whose, numbers, *over))
    return found


def ask(run: Run, *command: str) -> str:
    """Return what a command prints; "" where it is not there or fails."""
    try:
        return run(command)
    except subprocess.CalledProcessError as error:
        return error.stdout or ""  # quota(1) says so much, and then fails, where something is above its limit
    except (OSError, subprocess.SubprocessError):
        return ""


def _ceph_number(folder: str, name: str) -> int | None:
    try:
        return int(os.getxattr(folder, name))
    except (OSError, ValueError):  # not set, a kernel that hides it, or no CephFS
        return None


def _quota(whose: str, numbers: Sequence[int], *past: bool) -> Quota:
    """`numbers`: used, soft limit and hard limit, of KiB and of files. `past`: whether their days of grace are over."""
    limits, in_grace, grace_over = list[int](), False, False
    for (used, soft, hard), is_past in zip((numbers[:3], numbers[3:]), past):
        above = 0 < soft < used
        # 0 is no limit. Above the soft one it goes on for some days, up to the hard one.
        limits.append(soft if above and is_past else hard or (0 if above else soft))
        in_grace, grace_over = in_grace or above, grace_over or (above and is_past)
    kib, files = limits
    return Quota(whose, numbers[0] * _KIB, kib * _KIB or None, numbers[3], files or None, in_grace, grace_over)


def _is_past(grace: str) -> bool:
    """Return whether the days of grace are over: said in a word, or as the time when they end (`quota -p`; 0 is
    none)."""
    if re.fullmatch(r"[0-9]{1,12}", grace):
        return 0 < int(grace) <= time.time()
    return grace in ("none", "expired")
