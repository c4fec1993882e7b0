"""Quotas, from what the commands of real systems print."""

import errno
import os
import subprocess
from pathlib import Path

import pytest

from ckptman.storage.io import quota
from ckptman.storage.io.mount import parse_mountinfo
from ckptman.storage.io.quota import Quota, capacity_bytes, parse_mmlsquota, parse_quota, quotas
from tests.storage.io.test_mount import mounted_at

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
    monkeypatch.setattr(quota, "read_mounts", lambda: parse_mountinfo("50 1 0:1 / / rw - lustre x:/y rw"))
    disk = capacity_bytes(tmp_path, Commands({}))
    assert disk == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    run = Commands({f"lfs quota -q -u {os.getuid()} {Path(tmp_path).resolve()}": LFS.replace("2000000", "3")})
    assert capacity_bytes(tmp_path, run) == 3 * 1024
