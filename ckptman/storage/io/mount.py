"""Which file system a directory is on, by the kernel's table of mounts, and what is known about that kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
