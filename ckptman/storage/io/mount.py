"""Which file system a directory is on, by the kernel's table of mounts, what is known about that kind, and the quotas
that it or a command of the site reports.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Mount:
    """A line of /proc/self/mountinfo (proc_pid_mountinfo(5)): options of the mount and of the file system together."""

    number: int
    point: str
    kind: str
    source: str
    written: tuple[str, ...]
    """The options as they are written there."""

    @property
    def options(self) -> Mapping[str, str]:
        """The options by name, the first of each; "" where one has no value."""
        return dict(each.partition("=")[::2] for each in reversed(self.written))


@dataclass(frozen=True)
class Family:
    """What is known about a kind of file system. `shared`: other nodes see it; None: that depends.

    `is_warning`: whether the advice has to be known before anything is saved there.
    """

    name: str
    shared: bool | None
    advice: str
    is_warning: bool = False


LUSTRE = Family(
    "Lustre",
    True,
    "a file is as fast as the servers it is striped over: lfs setstripe -c 4 on the folder before the first save where "
    "few ranks write large files; with hundreds of ranks, which write a file each, a stripe count of 1 is right",
)
NFS = Family(
    "NFS",
    True,
    "other nodes see what this one did only after seconds (attribute caches, actimeo=); only the leader lists a root, "
    "so that is safe. All nodes share the rate of one server: save to a faster tier and copy here",
)
MEMORY = Family(
    "memory",
    False,
    "gone with the job or the node, and counted as memory of the job: a fast first tier, never the only one",
    is_warning=True,
)
LOCAL = "other nodes do not see it: for runs on one node, or as a first tier; often cleared when the job ends"
_GPFS = "all nodes see a commit at once; it likes few large files better than many small ones"
_BEEGFS = (
    "striping is per folder: beegfs-ctl --setpattern --numtargets=4 before the first save where few ranks write large "
    "files; locks hold between nodes only where tuneUseGlobalFileLocks is on"
)
_WEKA = "where it is tiered to an object store, old checkpoints are slow to read at first"
_OBJECT = "renaming a folder copies every file in it, and is not atomic on most of them: do not save here; copy here"
_OVERLAY = "gone with the container, and slower than the disk below: bind a folder of the host into the container"
_LOCAL_KINDS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs")
_AUTOFS = "nothing is mounted here yet: look into the folder, and ask again"
_OBJECT_STORES = "fuse.s3fs fuse.gcsfuse fuse.goofys fuse.mountpoint-s3 fuse.rclone fuse.blobfuse fuse.blobfuse2"

_KINDS: tuple[tuple[str, Family], ...] = (
    ("lustre", LUSTRE),
    ("gpfs", Family("GPFS (Spectrum Scale)", True, _GPFS)),
    ("nfs nfs4", NFS),
    ("beegfs beegfs_nodev fhgfs fhgfs_nodev", Family("BeeGFS", True, _BEEGFS)),
    ("wekafs", Family("WekaFS", True, _WEKA)),
    ("ceph", Family("CephFS", True, "the size that is shown is the quota of the folder where one is set")),
    ("fuse.ceph-fuse fuse.ceph", Family("CephFS", True, "through FUSE: the kernel's client is faster")),
    ("panfs", Family("PanFS", True, "")),
    ("pvfs2", Family("OrangeFS", True, "it has no locks")),
    ("fuse.glusterfs", Family("GlusterFS", True, "metadata is slow: keep the number of files low")),
    ("fuse.mfs fuse.mfsmount fuse.lizardfs", Family("MooseFS (LizardFS)", True, "its times are whole seconds")),
    ("fuse.dfuse", Family("DAOS", True, "through FUSE: preload libioil or libpil4dfs for the full rate")),
    ("fuse.juicefs", Family("JuiceFS", True, "with --writeback, what is fsynced is only in the cache of this node")),
    ("fuse.sshfs", Family("sshfs", True, "one connection: slow", is_warning=True)),
    ("cifs smb3", Family("SMB", True, "slow for this: save to a faster tier and copy here", is_warning=True)),
    (
        f"{_OBJECT_STORES} fuse.geesefs fuse.ossfs",
        Family("an object store behind FUSE", True, _OBJECT, is_warning=True),
    ),
    ("tmpfs ramfs devtmpfs", MEMORY),
    *((kind, Family(kind, False, LOCAL)) for kind in _LOCAL_KINDS),
    ("overlay fuse.fuse-overlayfs", Family("overlay (inside a container)", False, _OVERLAY, is_warning=True)),
    (
        "squashfs iso9660 erofs fuse.squashfuse",
        Family("a read-only image", None, "nothing can be saved here", is_warning=True),
    ),
    ("9p virtiofs", Family("a folder of the host of this virtual machine", None, "")),
    ("autofs", Family("autofs", None, _AUTOFS, is_warning=True)),
)
FAMILIES: Mapping[str, Family] = {kind: family for kinds, family in _KINDS for kind in kinds.split()}


def read_mounts() -> list[Mount]:
    """Return the mounts that this process sees; none where the kernel does not tell."""
    try:
        return parse_mountinfo(MOUNTINFO.read_text(errors="surrogateescape"))
    except OSError:
        return []


def parse_mountinfo(text: str) -> list[Mount]:
    """Return the mounts of /proc/self/mountinfo, in its order. Lines that are none are left out."""
    found = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, more = left.split(" "), right.split(" ")
        if len(fields) < 6 or len(more) < 3 or not fields[0].isdigit():
            continue
        options = tuple(dict.fromkeys([*fields[5].split(","), *more[2].split(",")]))
        found.append(Mount(int(fields[0]), _unescape(fields[4]), more[0], _unescape(more[1]), options))
    return found


def find_mount(mounts: list[Mount], path: str, number: int | None = None) -> Mount | None:
    """Return the mount with this number (see `mount_number`), which no other one hides; without one, the last of those
    with the longest point above `path` (absolute, no links)."""
    for each in mounts:
        if each.number == number:
            return each
    above = [each for each in mounts if (path + "/").startswith(each.point.rstrip("/") + "/")]
    # Of several on one point, the last one hides the others.
    return max(reversed(above), key=lambda each: len(each.point), default=None)


def mount_number(fd: int) -> int | None:
    """Return the number of the mount that an open file is on; None where the kernel does not tell."""
    try:
        found = re.search(r"^mnt_id:\s*(\d+)$", Path(f"/proc/self/fdinfo/{fd}").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def family_of(mount: Mount) -> Family:
    """Return what is known about the kind of a mount."""
    if mount.kind in FAMILIES:
        return FAMILIES[mount.kind]
    if mount.kind.startswith("fuse"):
        # Of those whose type says only that, the source often has the name: `mfs#server:9421`, `JuiceFS:volume`.
        named = f"fuse.{re.split('[#:]', mount.source)[0].lower()}"
        if named in FAMILIES:
            return FAMILIES[named]
        kind = mount.kind.partition(".")[2] or "no name"
        return Family(f"FUSE ({kind})", None, "a program of its own makes this file system: the checks below tell")
    return Family(mount.kind, None, "nothing is known about this kind: the checks below tell")


def _unescape(text: str) -> str:
    """Undo the octal numbers that the kernel writes for blanks, tabs, newlines and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


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
