"""Which file system a directory is on, from tables that real kernels show."""

import os

import pytest

from ckptman.storage.io.mount import MOUNTINFO, family_of, find_mount, mount_number, parse_mountinfo

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
