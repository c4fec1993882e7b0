"""What a directory is on, before anything is written there: the kind of file system, its free space and its quotas."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ckptman.runtime.deadline import run_command
from ckptman.storage.io.mount import LUSTRE, NFS, Mount, Quota, ask, family_of, quotas
from ckptman.tools.doctor.finding import Finding, Place, first_number, found, size_text

_COMMAND_SECONDS = 5.0
_MOST_FILES = 1 << 63
"""Some file systems report 2^64 - 1 for what they do not count."""
_SOFT = "mounted soft: a server that is slow to answer becomes an I/O error, and fails a save (hard waits)"


def check_kind(place: Place) -> Finding:
    """Check the file system, with advice for its kind and its options."""
    mount = place.mount
    if mount is None:
        return found("unknown", "the kernel's table of mounts does not show it")
    family = family_of(mount)
    is_warning, advice = family.is_warning, [family.advice]
    name = family.name if mount.kind in (family.name, family.name.lower()) else f"{family.name}: {mount.kind}"
    value = f"{name}, {mount.source} at {mount.point}"
    if "ro" in mount.options:
        is_warning, advice = True, ["mounted read-only: nothing can be saved here"]
    nodes = first_number(os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or "") or 1
    if family.shared is False and nodes > 1:
        is_warning = True
        advice.insert(0, f"this job has {nodes} nodes, and each would see its own files only: name a shared directory")
    if family is NFS and ("nolock" in mount.options or mount.options.get("local_lock", "none") != "none"):
        is_warning = True
        advice.insert(0, "locks hold on this host only (nolock or local_lock)")
    if family is NFS and ("soft" in mount.options or "softerr" in mount.options):
        is_warning = True
        advice.insert(0, _SOFT)
    if family is LUSTRE and not place.over:  # a command would hang with the file system
        value += _stripe_text(_ask(place, "lfs", "getstripe", "-d", place.path))
    return found(
        "warning" if is_warning else "ok",
        value,
        "; ".join(filter(None, advice)),
        type=mount.kind,
        source=mount.source,
        mount_point=mount.point,
        shared=family.shared,
        options=list(mount.written),
    )


def _stripe_text(printed: str) -> str:
    """Return what `lfs getstripe -d` prints about a directory in words, after a comma."""
    if "lcm_" in printed or "lcme_" in printed:
        return ", a composite layout (the stripe count grows with the file)"
    count = re.search(r"stripe_count:\s*(-?\d+)", printed)
    if count is None:
        return ""
    return ", striped over all servers" if count[1] == "-1" else f", stripe count {count[1]}"


def unsafe_sync(mount: Mount | None) -> str | None:
    """Return which option of a mount takes fsync its meaning, with the consequence; None: none is known."""
    if mount is None:
        return None
    if mount.kind == "overlay" and "volatile" in mount.options:
        return "the container is mounted volatile: fsync does nothing, and a crash of the host loses what was saved"
    if "nobarrier" in mount.options or mount.options.get("barrier") == "0":
        return "mounted without barriers: a power cut may lose what was fsynced"
    return None


def check_space(place: Place) -> Finding:
    """Free bytes and files for this user, against two checkpoints: the new one exists before the old one is deleted."""
    space = os.statvfs(place.path)
    if not space.f_blocks:
        return found("unknown", "this file system does not say how large it is")
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    figures: dict[str, object] = {"free_bytes": free, "total_bytes": total}
    value = f"{size_text(free)} free of {size_text(total)}"
    if 0 < space.f_files < _MOST_FILES and 0 <= space.f_favail < _MOST_FILES:
        figures["free_inodes"] = space.f_favail
        value += f", room for {space.f_favail:,} files"
        if not space.f_favail:
            return found("FAILED", value, "no file can be made: remove files", **figures)
    return _room(value, free, total, place.against_bytes, figures)


def check_quota(place: Place) -> Finding | None:
    """Check the quota that leaves least, against two checkpoints."""
    if place.mount is None:
        return None
    group = Path(place.path).stat().st_gid
    every = quotas(place.path, place.mount, lambda command: _run(place, command), os.getuid(), group)
    return judge_quotas(every, place.against_bytes)


def judge_quotas(every: Sequence[Quota], against_bytes: int | None) -> Finding:
    """Return the finding about some quotas."""
    limited = [each for each in every if each.limit_bytes is not None or each.limit_files is not None or each.in_grace]
    if not every:
        advice = "nothing tells it here: a quota shows when it is used up, unless your site has another way to ask"
        return found("unknown", "not known", advice)
    if not limited:
        return found("ok", "no limit is set")
    figures: dict[str, object] = {"quotas": [{**vars(each), "left_bytes": each.left_bytes} for each in limited]}
    for each in limited:
        if each.left_files == 0:
            return found("FAILED", _quota_text(each), "no file can be made: remove files", **figures)
    value = "; ".join(_quota_text(each) for each in limited)
    left, total = min(
        ((each.left_bytes, each.limit_bytes or 0) for each in limited if each.left_bytes is not None),
        default=(None, 0),
    )
    row = found("ok", value, **figures) if left is None else _room(value, left, total, against_bytes, figures)
    if row.verdict == "ok" and any(each.in_grace for each in limited):
        advice = "above the soft limit: when the days of grace are over, saves fail; remove files"
        return found("warning", value, advice, **figures)
    return row


def _quota_text(quota: Quota) -> str:
    parts = []
    if quota.limit_bytes is not None:
        parts.append(f"{size_text(quota.left_bytes or 0)} left of {size_text(quota.limit_bytes)}")
    if quota.limit_files is not None:
        parts.append(f"{quota.left_files:,} files left of {quota.limit_files:,}")
    if quota.in_grace:
        parts.append("above the soft limit" + (", and the days of grace are over" if quota.grace_over else ""))
    return f"{quota.whose}: {', '.join(parts)}"


def _room(value: str, free: int, total: int, against_bytes: int | None, figures: dict[str, object]) -> Finding:
    """Judge free bytes: FAILED without room for one checkpoint, a warning without room for two."""
    if not free:
        return found("FAILED", value, "nothing can be saved: prune, or name another root", **figures)
    if against_bytes is None:
        if free >= min(total // 20, 10**12):
            return found("ok", value, **figures)
        advice = "nearly full: file systems get slow, and a save needs room beside the one before"
    elif free < against_bytes:
        return found("FAILED", value, "a save does not fit: prune, or name another root", **figures)
    elif free < 2 * against_bytes:
        advice = "room for one more save only, and the one before is deleted after the new one is there: make room"
    else:
        return found("ok", value, **figures)
    return found("warning", value, advice, **figures)


def _run(place: Place, command: Sequence[str]) -> str:
    return run_command(command, timeout_seconds=min(_COMMAND_SECONDS, place.part_seconds))


def _ask(place: Place, *command: str) -> str:
    return ask(lambda command: _run(place, command), *command)
