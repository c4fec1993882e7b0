"""Which file system a folder is on, its room and its quota: from tables and texts that real systems print."""

import errno
import os
import subprocess

import pytest

from ckptman.tools.doctor.finding import size_text
from ckptman.tools.doctor.mount import (
    MOUNTINFO,
    check_kind,
    check_space,
    find_mount,
    mount_number,
    parse_mountinfo,
    unsafe_sync,
)
from ckptman.tools.doctor.quota import Quota, check_quota, parse_mmlsquota, parse_quota, quotas

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
43 27 0:56 / /weka rw - wekafs weka rw,writecache
44 27 0:57 / /ceph rw - ceph mon:/ rw
45 27 0:58 / /moose rw - fuse mfs#10.1.1.1:9421 rw
46 27 0:59 / /juice rw - fuse JuiceFS:volume rw
47 27 0:60 / /s3 rw - fuse s3fs rw
48 27 0:61 / /nobody rw - fuse x rw
49 27 0:62 / /lizard rw - fuse.mfs mfsmaster:9421 rw
no line of the table
"""


def mounted_at(path):
    return find_mount(parse_mountinfo(TABLE), path)


def kind_of(path, environ=None, stripes=""):
    return check_kind(mounted_at(path), environ or {}, stripes)


def check(found, verdict, value, advice):
    assert found.verdict == verdict
    assert value in found.value
    assert advice in found.advice


@pytest.mark.parametrize(
    ("path", "kind", "point"),
    [
        ("/", "ext4", "/"),
        ("/scratch/run/1", "lustre", "/scratch"),
        ("/scratchy", "ext4", "/"),
        ("/old home/x", "nfs", "/old home"),
        ("/gpfs/projects", "gpfs", "/gpfs/projects"),
        ("/gpfs", "ext4", "/"),
    ],
)
def test_the_mount_of_a_path(path, kind, point):
    assert (mounted_at(path).kind, mounted_at(path).point) == (kind, point)


def test_of_two_mounts_on_one_point_the_last_counts_and_a_number_beats_both():
    assert mounted_at("/dev/shm").source == "later"
    assert find_mount(parse_mountinfo(TABLE), "/dev/shm", 34).source == "tmpfs"
    assert find_mount([], "/x") is None
    assert check_kind(None, {}).verdict == "unknown"


def test_the_kernel_tells_the_mount_of_this_folder(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        number = mount_number(fd)
    finally:
        os.close(fd)
    found = find_mount(parse_mountinfo(MOUNTINFO.read_text()), str(tmp_path), number)
    assert str(tmp_path.resolve()).startswith(found.point)
    assert mount_number(-1) is None


@pytest.mark.parametrize(
    ("path", "verdict", "value", "advice"),
    [
        ("/x", "ok", "ext4, /dev/vda1 at /", "other nodes do not see it"),
        ("/scratch", "ok", "Lustre, 10.1.1.1@o2ib:10.1.1.2@o2ib:/scratch at /scratch", "lfs setstripe -c 4"),
        ("/gpfs/projects/a", "ok", "GPFS (Spectrum Scale): gpfs, projects at", "all nodes see a commit at once"),
        ("/home/u", "ok", "NFS: nfs4, server:/export/home", "only after seconds"),
        ("/old home", "warning", "NFS, server:/old", "mounted soft: a server that is slow"),
        ("/old home", "warning", "NFS", "locks hold on this host only"),
        ("/dev/shm", "warning", "memory: tmpfs", "gone with the job or the node"),
        ("/merged", "warning", "overlay (inside a container)", "bind a folder of the host"),
        ("/bucket", "warning", "an object store behind FUSE: fuse.s3fs", "do not save here"),
        ("/mine", "ok", "FUSE (gocryptfs)", "a program of its own"),
        ("/image", "warning", "a read-only image", "mounted read-only"),
        ("/strange", "ok", "hammer2", "nothing is known about this kind"),
        ("/beegfs", "ok", "BeeGFS", "--setpattern"),
        ("/weka", "ok", "WekaFS", "tiered to an object store"),
        ("/ceph", "ok", "CephFS", "quota of the folder"),
        ("/moose", "ok", "MooseFS (LizardFS): fuse, mfs#10.1.1.1:9421 at /moose", "whole seconds"),
        ("/lizard", "ok", "MooseFS (LizardFS): fuse.mfs", "whole seconds"),
        ("/juice", "ok", "JuiceFS: fuse, JuiceFS:volume", "--writeback"),
        ("/s3", "warning", "an object store behind FUSE: fuse, s3fs", "do not save here"),
        ("/nobody", "ok", "FUSE (no name)", "a program of its own"),
    ],
)
def test_each_kind_has_its_advice(path, verdict, value, advice):
    check(kind_of(path), verdict, value, advice)


def test_a_folder_that_the_other_nodes_do_not_see_is_a_warning_in_a_job_of_several():
    assert kind_of("/fast", {"SLURM_JOB_NUM_NODES": "1"}).verdict == "ok"
    found = kind_of("/fast", {"SLURM_JOB_NUM_NODES": "16"})
    check(found, "warning", "", "this job has 16 nodes, and each would see its own files only")
    assert kind_of("/scratch", {"SLURM_JOB_NUM_NODES": "16"}).verdict == "ok"
    for number in ("²", "9" * 5000, "-1", "many"):  # which are none
        assert kind_of("/fast", {"SLURM_JOB_NUM_NODES": number}).verdict == "ok"


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        ("stripe_count:  1 stripe_size:   1048576 pattern:       0 stripe_offset: -1\n", "stripe count 1"),
        ("stripe_count:  -1 stripe_size:   1048576\n", "striped over all servers"),
        ("  lcm_layout_gen:    0\n  lcm_entry_count:   3\n  stripe_count: 1", "a composite layout"),
        ("", "/scratch"),
    ],
)
def test_stripes_of_lustre_are_told(printed, told):
    assert told in kind_of("/scratch", stripes=printed).value


def test_mounts_whose_fsync_does_less_than_it_says():
    assert "volatile: fsync does nothing" in (unsafe_sync(mounted_at("/merged")) or "")
    assert "without barriers" in (unsafe_sync(mounted_at("/fast")) or "")
    assert unsafe_sync(mounted_at("/scratch")) is None
    assert unsafe_sync(None) is None


def space(free, total=10**12, files=1000, free_files=500):
    return os.statvfs_result((4096, 1, total, free, free, files, free_files, free_files, 0, 255))


@pytest.mark.parametrize(
    ("free", "against", "verdict", "advice"),
    [
        (500 * 10**9, None, "ok", ""),
        (20 * 10**9, None, "warning", "nearly full"),
        (0, None, "FAILED", "nothing can be saved"),
        (500 * 10**9, 70 * 10**9, "ok", ""),
        (100 * 10**9, 70 * 10**9, "warning", "room for one more save only"),
        (60 * 10**9, 70 * 10**9, "FAILED", "a save does not fit"),
    ],
)
def test_space_against_two_checkpoints(free, against, verdict, advice):
    found = check_space(space(free), against)
    check(found, verdict, "", advice)
    assert found.figures["free_bytes"] == free


def test_what_is_not_counted_is_unknown_and_no_inode_left_fails():
    check(check_space(space(500 * 10**9, free_files=0)), "FAILED", "", "no file can be made: remove files")
    assert check_space(space(500 * 10**9, files=0, free_files=0)).verdict == "ok"
    for files, free_files in ((1, 2**64 - 1), (1, -1), (2**64 - 1, 5)):  # CephFS; the sign is up to Python
        found = check_space(space(500 * 10**9, files=files, free_files=free_files))
        assert (found.verdict, found.value, "free_inodes" in found.figures) == ("ok", "500 GB free of 1 TB", False)
    found = check_space(space(0, total=0, files=0, free_files=0), 70 * 10**9)
    assert (found.verdict, found.figures) == ("unknown", {})


@pytest.mark.parametrize(
    ("count", "told"),
    [(512, "512 B"), (999.7, "1 kB"), (70e9, "70 GB"), (1.5e12, "1.5 TB"), (2.5e18, "2,500 PB"), (0, "0 B")],
)
def test_sizes_are_told_in_powers_of_1000(count, told):
    assert size_text(count) == told


QUOTA = """Disk quotas for user ada (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
server:/export/home 14340 16384 20480 0 160 0 0 0
"""
LFS = "       /scratch  1000000* 900000 2000000  6d23h   12000       0 1000000       -\n"
LFS_WRAPPED = "/lustre/a/very/long/name\n      [10]   0   0   -   5   0   0   -\nuid 5 is using default block quota"
GPFS = """mmlsquota::HEADER:version:reserved:reserved:filesystemName:quotaType:id:name:blockUsage:blockQuota:\
blockLimit:blockInDoubt:blockGrace:filesUsage:filesQuota:filesLimit:filesInDoubt:filesGrace:remarks:quota:defQuota:fid:filesetname:
mmlsquota::0:1:::projects:USR:1001:ada:1048576:2097152:3145728:0:none:1000:0:0:0:none:e:on:off:::
mmlsquota::0:1:::projects:GRP:100:lab:1:0:0:0:none:1:0:0:0:none:e:on:off:::
"""


def test_quotas_as_the_commands_print_them():
    assert parse_quota(QUOTA, "user") == [Quota("user", 14340 * 1024, 20480 * 1024, 160, None)]
    assert parse_quota(LFS, "group") == [Quota("group", 1024000000, 2048000000, 12000, 1000000, in_grace=True)]
    assert parse_quota(LFS_WRAPPED, "user") == [Quota("user", 10240, None, 5, None)]
    assert parse_quota("Disk quotas for user root (uid 0): none\n", "user") == [Quota("user", 0, None, 0, None)]
    assert parse_quota("Disk quotas for user ada (uid 1): no limited resources used\n", "user") == []
    assert parse_quota("lfs quota: error", "user") == []
    user, group = Quota("user", 2**30, 3 * 2**30, 1000, None), Quota("group", 1024, None, 1, None)
    assert parse_mmlsquota(GPFS) == [user, group]
    assert parse_mmlsquota("mmlsquota: Command not found\n::\n") == []


@pytest.mark.parametrize(
    ("grace", "over"),
    [("expired", True), ("none", True), ("1000", True), ("0", False), ("99999999999", False), ("6d23h", False)],
)
def test_days_of_grace_that_are_over(grace, over):
    (bytes_over,) = parse_quota(f"/scratch 12000* 10000 20000 {grace} 1 0 0 -\n", "user")
    assert (bytes_over.in_grace, bytes_over.grace_over) == (True, over)
    row = check_quota([bytes_over])
    assert row.verdict == ("FAILED" if over else "warning")
    assert row.value.endswith("0 B left of 10.2 MB, above the soft limit, and the days of grace are over") is over
    (files_over,) = parse_quota(f"/scratch 1 0 0 - 12* 10 20 {grace}\n", "user")
    assert (files_over.left_files, check_quota([files_over]).verdict) == ((0, "FAILED") if over else (8, "warning"))
    (below,) = parse_quota(f"/scratch 9 10 20 {grace} 1 0 0 -\n", "user")
    assert not below.grace_over


def test_filesets_do_not_hide_each_other():
    header, row = GPFS.splitlines()[:2]
    home = row.replace("off:::", "off::home:")
    other = row.replace("off:::", "off::root:").replace("1048576", "3145727").replace(":none:1000", ":expired:1000")
    found = parse_mmlsquota("\n".join([header, other, home]))
    assert [each.whose for each in found] == ["user (fileset root)", "user (fileset home)"]
    told = check_quota(found)
    assert (told.verdict, [each["left_bytes"] for each in told.figures["quotas"]]) == ("FAILED", [0, 2 * 2**30])


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


def test_lustre_is_asked_for_user_group_and_project():
    answers = {"lfs quota -q -u 7 /scratch/x": LFS, "lfs quota -q -p 1234 /scratch/x": LFS}
    run = Commands({**answers, "lfs project -d /scratch/x": " 1234 P /scratch/x\n"})
    found = quotas("/scratch/x", mounted_at("/scratch"), run, 7, 8)
    assert [each.whose for each in found] == ["user", "project"]
    assert "lfs quota -q -g 8 /scratch/x" in run.asked


def test_others_are_asked_by_their_commands_and_nobody_is_asked_of_memory():
    run = Commands({"mmlsquota -Y projects": GPFS})
    assert len(quotas("/gpfs/projects/x", mounted_at("/gpfs/projects"), run, 7, 8)) == 2
    over = subprocess.CalledProcessError(1, "quota", output=QUOTA)  # it fails where a limit is passed, and says it
    run = Commands({"quota -w -p -u -f /home": over, "quota -w -p -g -f /home": subprocess.TimeoutExpired("quota", 5)})
    assert [each.whose for each in quotas("/home/u", mounted_at("/home"), run, 7, 8)] == ["user"]
    run = Commands({})
    assert quotas("/dev/shm", mounted_at("/dev/shm"), run, 7, 8) == []
    assert run.asked == []


def test_quotas_of_ceph_are_read_from_the_folder_and_those_above_it(monkeypatch):
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
    assert (
        check_quota([me, lab]).value == "folder /ceph/lab/me: 4 files left of 9; folder /ceph/lab: 600 B left of 1 kB"
    )
    assert quotas("/ceph/elsewhere", mounted_at("/ceph"), Commands({}), 7, 8) == []
    attributes["/ceph/lab/me"] = {"ceph.quota.max_files": b"0", "ceph.dir.rbytes": b"0"}
    attributes["/ceph/lab"]["ceph.quota.max_bytes"] = b"0"
    assert check_quota(quotas("/ceph/lab/me", mounted_at("/ceph"), Commands({}), 7, 8)).value == "no limit is set"


GB = 10**9
FILES, NEARLY = Quota("user", 0, None, 5, 9), Quota("group", 95 * GB, 100 * GB, 5, None)


@pytest.mark.parametrize(
    ("found", "against", "verdict", "value", "advice"),
    [
        ([], None, "unknown", "not known", "nothing tells it here"),
        ([Quota("user", 5, None, 5, None)], None, "ok", "no limit is set", ""),
        ([Quota("user", 10 * GB, 100 * GB, 5, None)], 40 * GB, "ok", "user: 90 GB left of 100 GB", ""),
        ([Quota("user", 10 * GB, 100 * GB, 5, None)], 60 * GB, "warning", "user: 90 GB", "room for one more save only"),
        ([FILES, NEARLY], 60 * GB, "FAILED", "user: 4 files left of 9; group: 5 GB left", "a save does not fit"),
        ([Quota("group", 1, 2, 100, 100)], None, "FAILED", "group: 1 B left of 2 B, 0 files", "no file can be made"),
        ([Quota("user", 120 * GB, 100 * GB, 5, None)], None, "FAILED", "0 B left of 100 GB", "nothing can be saved"),
        ([Quota("user", 9 * GB, 100 * GB, 5, None, in_grace=True)], None, "warning", "above the soft", "days of grace"),
        ([Quota("user", 9 * GB, None, 5, None, in_grace=True)], None, "warning", "above the soft limit", "days of"),
    ],
)
def test_quota_against_two_checkpoints(found, against, verdict, value, advice):
    check(check_quota(found, against), verdict, value, advice)
