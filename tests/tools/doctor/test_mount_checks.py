"""The kind of a file system, its room and its quotas: verdicts and advice."""

import os

import pytest

from ckptman.storage.io.mount import Quota
from ckptman.tools.doctor import mount_checks
from ckptman.tools.doctor.finding import first_number, size_text
from ckptman.tools.doctor.mount_checks import check_kind, check_space, judge_quotas, unsafe_sync
from tests.storage.io.test_mount import Commands, mounted_at
from tests.tools.doctor.places import place_at

GB = 10**9


@pytest.fixture(autouse=True)
def no_job_and_no_commands(monkeypatch):
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(mount_checks, "run_command", lambda command, timeout_seconds: Commands({})(command))


def kind_of(path):
    return check_kind(place_at(path, mount=mounted_at(path)))


def check(found, verdict, value, advice=""):
    assert found.verdict == verdict
    assert value in found.value
    assert advice in found.advice


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
        ("/image", "warning", "a read-only image", "mounted read-only"),
        ("/strange", "ok", "hammer2", "nothing is known about this kind"),
        ("/moose", "ok", "MooseFS (LizardFS): fuse, mfs#10.1.1.1:9421 at /moose", "whole seconds"),
    ],
)
def test_each_kind_has_its_advice(path, verdict, value, advice):
    check(kind_of(path), verdict, value, advice)


def test_a_directory_that_other_nodes_do_not_see_is_a_warning_in_a_job_of_several(monkeypatch):
    for number, verdict in (("1", "ok"), ("16", "warning"), ("²", "ok"), ("9" * 5000, "ok"), ("many", "ok")):
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", number)
        assert (kind_of("/fast").verdict, kind_of("/scratch").verdict) == (verdict, "ok"), number
        assert (f"this job has {number} nodes, and each would see" in kind_of("/fast").advice) == (verdict != "ok")


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        ("stripe_count:  1 stripe_size:   1048576 pattern:       0 stripe_offset: -1\n", ", stripe count 1"),
        ("stripe_count:  -1 stripe_size:   1048576\n", ", striped over all servers"),
        ("  lcm_layout_gen:    0\n  lcm_entry_count:   3\n  stripe_count: 1", ", a composite layout (the stripe count"),
        ("", "at /scratch"),
    ],
)
def test_stripes_of_lustre_are_told(printed, told, monkeypatch):
    run = Commands({"lfs getstripe -d /scratch": printed})
    monkeypatch.setattr(mount_checks, "run_command", lambda command, timeout_seconds: run(command))
    assert told in kind_of("/scratch").value


def test_mounts_whose_fsync_does_less_than_it_says():
    assert "volatile: fsync does nothing" in unsafe_sync(mounted_at("/merged"))
    assert "without barriers" in unsafe_sync(mounted_at("/fast"))
    assert unsafe_sync(mounted_at("/scratch")) is None


@pytest.mark.parametrize(
    ("space", "against", "verdict", "value", "advice"),
    [
        ({}, None, "ok", "500 GB free of 1 TB, room for 500 files", ""),
        ({"free": 20 * GB}, None, "warning", "", "nearly full"),
        ({"free": 0}, None, "FAILED", "", "nothing can be saved"),
        ({}, 70 * GB, "ok", "", ""),
        ({"free": 100 * GB}, 70 * GB, "warning", "", "room for one more save only"),
        ({"free": 60 * GB}, 70 * GB, "FAILED", "", "a save does not fit"),
        ({"free_files": 0}, None, "FAILED", "", "no file can be made: remove files"),
        ({"files": 0, "free_files": 0}, None, "ok", "of 1 TB", ""),
        ({"files": 1, "free_files": 2**64 - 1}, None, "ok", "of 1 TB", ""),  # CephFS; the sign is up to Python
        ({"files": 1, "free_files": -1}, None, "ok", "of 1 TB", ""),
        ({"total": 0, "free": 0}, 70 * GB, "unknown", "does not say how large it is", ""),
    ],
)
def test_space_against_two_checkpoints(space, against, verdict, value, advice, monkeypatch):
    fields = {"free": 500 * GB, "total": 10**12, "files": 1000, "free_files": 500, **space}
    total, free, files, free_files = (fields[name] for name in ("total", "free", "files", "free_files"))
    stated = os.statvfs_result((4096, 1, total, free, free, files, free_files, free_files, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: stated)
    found = check_space(place_at("/x", against_bytes=against))
    check(found, verdict, value, advice)
    assert ("files" in found.value) == ("free_inodes" in found.figures) == (files == 1000 and total > 0)


FILES, NEARLY = Quota("user", 0, None, 5, 9), Quota("group", 95 * GB, 100 * GB, 5, None)


@pytest.mark.parametrize(
    ("quotas", "against", "verdict", "value", "advice"),
    [
        ([], None, "unknown", "not known", "nothing tells it here"),
        ([Quota("user", 5, None, 5, None)], None, "ok", "no limit is set", ""),
        ([Quota("user", 10 * GB, 100 * GB, 5, None)], 40 * GB, "ok", "user: 90 GB left of 100 GB", ""),
        ([Quota("user", 10 * GB, 100 * GB, 5, None)], 60 * GB, "warning", "user: 90 GB", "room for one more save only"),
        ([FILES, NEARLY], 60 * GB, "FAILED", "user: 4 files left of 9; group: 5 GB left", "a save does not fit"),
        ([Quota("group", 1, 2, 100, 100)], None, "FAILED", "group: 1 B left of 2 B, 0 files", "no file can be made"),
        ([Quota("user", 120 * GB, 100 * GB, 5, None)], None, "FAILED", "0 B left of 100 GB", "nothing can be saved"),
        ([Quota("user", 9 * GB, None, 5, None, in_grace=True)], None, "warning", "above the soft limit", "days of"),
        ([Quota("user", 9, 9, 5, None, True, True)], None, "FAILED", "limit, and the days of grace are over", ""),
    ],
)
def test_quota_against_two_checkpoints(quotas, against, verdict, value, advice):
    check(judge_quotas(quotas, against), verdict, value, advice)


@pytest.mark.parametrize(
    ("count", "told"), [(512, "512 B"), (999.7, "1 kB"), (70e9, "70 GB"), (2.5e18, "2,500 PB"), (0, "0 B")]
)
def test_sizes_are_told_in_powers_of_1000(count, told):
    assert size_text(count) == told


def test_numbers_at_the_beginning_of_a_text():
    assert [first_number(each) for each in ("4(x2)", "16", "x", "", "²", "9" * 10)] == [4, 16, None, None, None, None]
