"""Which file system a directory is on, from tables that real kernels show."""

import errno
import os
import subprocess
from pathlib import Path

import pytest

from ckptman.storage.io import mount
from ckptman.storage.io.mount import (
    MOUNTINFO,
    Quota,
    capacity_bytes,
    family_of,
    find_mount,
    mount_number,
    parse_mmlsquota,
    parse_mountinfo,
    parse_quota,
    quotas,
)

TABLE = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,discard
30 27 0:44 / /scratch rw,noatime - lustre 10.1.1.1@o2ib:10.1.1.2@o2ib:/scratch rw,flock,lazystatfs
31 27 0:45 / /gpfs/projects rw,relatime shared:9 master:2 - gpfs projects rw
32 27 0:46 /home /home rw,relatime - nfs4 server:/export/home rw,vers=4.2,hard,proto=tcp,local_lock=none
33 27 0:47 / /old\040home rw,relatime - nfs server:/old rw,vers=3,soft,nolock,local_lock=all
34 27 0:48 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=24684084k
35 34 0:49 / /dev/shm rw,nosuid - tmpfs later rw,size=1k
36 27 0:50 / /merged rw - overlay overlay rw,lowerdir=/l,upperdir=/u,workdir=/w,volatile
37 27 0:51 / /bucket rw,nosuid - fuse.s3fs s3fs rw
38 27 0:52 / /mine rw - fuse.gocryptfs gocryptfs rw
39 27 0:53 / /image ro,relatime - squashfs /dev/loop0 ro
40 27 0:54 / /strange rw - hammer2 x rw
41 27 0:55 / /beegfs rw - beegfs beegfs_nodev rw
42 27 8:3 / /fast rw - xfs /dev/sdb1 rw,nobarrier
44 27 0:57 / /ceph rw - ceph mon:/ rw
45 27 0:58 / /moose rw - fuse mfs#10.1.1.1:9421 rw
46 27 0:59 / /juice rw - fuse JuiceFS:volume rw
48 27 0:61 / /nobody rw - fuse x rw
49 27 0:62 / /lizard rw - fuse.mfs mfsmaster:9421 rw
no line of the table
"""


def mounted_at(path):
    return find_mount(parse_mountinfo(TABLE), path)


@pytest.mark.parametrize(
    ("path", "family", "point", "shared"),
    [
        ("/", "ext4", "/", False),
        ("/scratch/run/1", "Lustre", "/scratch", True),
        ("/scratchy", "ext4", "/", False),
        ("/old home/x", "NFS", "/old home", True),
        ("/gpfs/projects", "GPFS (Spectrum Scale)", "/gpfs/projects", True),
        ("/gpfs", "ext4", "/", False),
        ("/dev/shm/x", "memory", "/dev/shm", False),
        ("/bucket", "an object store behind FUSE", "/bucket", True),
        ("/moose", "MooseFS (LizardFS)", "/moose", True),
        ("/lizard", "MooseFS (LizardFS)", "/lizard", True),
        ("/juice", "JuiceFS", "/juice", True),
        ("/mine", "FUSE (gocryptfs)", "/mine", None),
        ("/nobody", "FUSE (no name)", "/nobody", None),
        ("/strange", "hammer2", "/strange", None),
    ],
)
def test_the_mount_of_a_path_and_its_family(path, family, point, shared):
    found = mounted_at(path)
    assert (family_of(found).name, found.point, family_of(found).shared) == (family, point, shared)


def test_of_two_mounts_on_one_point_the_last_counts_and_a_number_beats_both():
    assert mounted_at("/dev/shm").source == "later"
    assert find_mount(parse_mountinfo(TABLE), "/dev/shm", 34).source == "tmpfs"
    assert find_mount([], "/x") is None


def test_the_kernel_tells_the_mount_of_this_directory(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        number = mount_number(fd)
    finally:
        os.close(fd)
    found = find_mount(parse_mountinfo(MOUNTINFO.read_text()), str(tmp_path), number)
    assert str(tmp_path.resolve()).startswith(found.point)
    assert mount_number(-1) is None


QUOTA = """Disk quotas for user ada (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
server:/export/home 14340 16384 20480 0 160 0 0 0
"""
LFS = "       /scratch  1000000* 900000 2000000  6d23h   12000       0 1000000       -\n"
LFS_WRAPPED = "/lustre/a/very/long/name\n      [10]   0   0   -   5   0   0   -\nuid 5 is using default block quota"
GPFS = """mmlsquota::HEADER:version:reserved:reserved:filesystemName:quotaType:id:name:blockUsage:blockQuota:\
blockLimit:blockInDoubt:blockGrace:filesUsage:filesQuota:filesLimit:filesInDoubt:filesGrace:remarks:quota:defQuota:fid:filesetname:
mmlsquota::0:1:::projects:USR:1001:ada:1048576:2097152:3145728:0:none:1000:0:0:0:none:e:on:off::home:
mmlsquota::0:1:::projects:USR:1001:ada:3145727:2097152:3145728:0:expired:1000:0:0:0:none:e:on:off::root:
mmlsquota::0:1:::projects:GRP:100:lab:1:0:0:0:none:1:0:0:0:none:e:on:off:::
"""


class Commands:
    """Answers like the commands of a site, and notes what it was asked."""

    def __init__(self, answers):
        self.answers, self.asked = answers, []

    def __call__(self, command):
        self.asked.append(" ".join(command))
        answer = self.answers.get(self.asked[-1], FileNotFoundError(2, "No such file"))
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        (QUOTA, [Quota("user", 14340 * 1024, 20480 * 1024, 160, None)]),
        (LFS, [Quota("user", 1024000000, 2048000000, 12000, 1000000, in_grace=True)]),
        (LFS_WRAPPED, [Quota("user", 10240, None, 5, None)]),
        ("Disk quotas for user root (uid 0): none\n", [Quota("user", 0, None, 0, None)]),
        ("Disk quotas for user ada (uid 1): no limited resources used\n", []),
        ("lfs quota: error", []),
    ],
)
def test_quotas_as_the_commands_print_them(printed, found):
    assert parse_quota(printed, "user") == found


@pytest.mark.parametrize(
    ("grace", "over"),
    [("expired", True), ("none", True), ("1000", True), ("0", False), ("99999999999", False), ("6d23h", False)],
)
def test_days_of_grace_that_are_over(grace, over):
    (in_bytes,) = parse_quota(f"/scratch 12000* 10000 20000 {grace} 1 0 0 -\n", "user")
    assert (in_bytes.in_grace, in_bytes.grace_over, in_bytes.left_bytes == 0) == (True, over, over)
    (in_files,) = parse_quota(f"/scratch 1 0 0 - 12* 10 20 {grace}\n", "user")
    assert in_files.left_files == (0 if over else 8)
    (below,) = parse_quota(f"/scratch 9 10 20 {grace} 1 0 0 -\n", "user")
    assert not below.grace_over


def test_filesets_of_gpfs_do_not_hide_each_other():
    found = parse_mmlsquota(GPFS)
    assert [each.whose for each in found] == ["user (fileset home)", "user (fileset root)", "group"]
    assert [each.left_bytes for each in found] == [2 * 2**30, 0, None]
    assert parse_mmlsquota("mmlsquota: Command not found\n::\n") == []


def test_each_file_system_is_asked_by_its_commands_and_nobody_is_asked_of_memory():
    answers = {"lfs quota -q -u 7 /scratch/x": LFS, "lfs quota -q -p 1234 /scratch/x": LFS}
    run = Commands({**answers, "lfs project -d /scratch/x": " 1234 P /scratch/x\n"})
    assert [each.whose for each in quotas("/scratch/x", mounted_at("/scratch"), run, 7, 8)] == ["user", "project"]
    assert "lfs quota -q -g 8 /scratch/x" in run.asked
    run = Commands({"mmlsquota -Y projects": GPFS})
    assert len(quotas("/gpfs/projects/x", mounted_at("/gpfs/projects"), run, 7, 8)) == 3
    over = subprocess.CalledProcessError(1, "quota", output=QUOTA)  # it fails if a limit is passed, and prints it
    run = Commands({"quota -w -p -u -f /home": over, "quota -w -p -g -f /home": subprocess.TimeoutExpired("quota", 5)})
    assert [each.whose for each in quotas("/home/u", mounted_at("/home"), run, 7, 8)] == ["user"]
    run = Commands({})
    assert (quotas("/dev/shm", mounted_at("/dev/shm"), run, 7, 8), run.asked) == ([], [])


def test_quotas_of_ceph_are_read_from_the_directory_and_those_above_it(monkeypatch):
    attributes = {
        "/ceph/lab": {"ceph.quota.max_bytes": b"1000", "ceph.dir.rbytes": b"400", "ceph.dir.rentries": b"7"},
        "/ceph/lab/me": {"ceph.quota.max_files": b"9", "ceph.dir.rbytes": b"300", "ceph.dir.rentries": b"5"},
        "/": {"ceph.quota.max_bytes": b"1"},
    }

    def getxattr(path, name):
        try:
            return attributes[path][name]
        except KeyError:
            raise OSError(errno.ENODATA, "No data available") from None

    monkeypatch.setattr(os, "getxattr", getxattr)
    me, lab = Quota("folder /ceph/lab/me", 300, None, 5, 9), Quota("folder /ceph/lab", 400, 1000, 7, None)
    assert quotas("/ceph/lab/me", mounted_at("/ceph"), Commands({}), 7, 8) == [me, lab]
    assert quotas("/ceph/elsewhere", mounted_at("/ceph"), Commands({}), 7, 8) == []
    attributes["/ceph/lab/me"] = {"ceph.quota.max_files": b"0", "ceph.dir.rbytes": b"0"}
    attributes["/ceph/lab"]["ceph.quota.max_bytes"] = b"0"
    assert quotas("/ceph/lab/me", mounted_at("/ceph"), Commands({}), 7, 8) == [Quota(me.whose, 0, None, 0, None)]


def test_the_capacity_is_the_smaller_one_of_disk_and_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(mount, "read_mounts", lambda: parse_mountinfo("50 1 0:1 / / rw - lustre x:/y rw"))
    disk = capacity_bytes(tmp_path, Commands({}))
    assert disk == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    run = Commands({f"lfs quota -q -u {os.getuid()} {Path(tmp_path).resolve()}": LFS.replace("2000000", "3")})
    assert capacity_bytes(tmp_path, run) == 3 * 1024
