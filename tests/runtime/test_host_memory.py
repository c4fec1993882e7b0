"""How much memory this host has left for copies: its own, and what its control groups allow."""

from types import SimpleNamespace

import psutil
import pytest

from ckptman.runtime.host_memory import available_bytes, spare_bytes

GIB = 2**30


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host with 500 GiB of its own, whose control groups are files."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=500 * GIB))
    return Host(tmp_path)


class Host:
    def __init__(self, folder):
        self.root, self.own, self.meminfo = folder / "fs", folder / "own", folder / "meminfo"

    def put(self, group, **files):
        """Write files of a control group; `__` stands for a dot."""
        (self.root / group).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (self.root / group / name.replace("__", ".")).write_text(f"{text}\n")

    def gib(self, lines, ask=available_bytes, *more):
        """What is left for a process in these groups."""
        self.own.write_text(lines)
        return ask(self.root, self.own, *more) / GIB


def test_without_groups(host, tmp_path):
    assert available_bytes(host.root, tmp_path / "none") == 500 * GIB
    assert host.gib("0::/nowhere\n") == 500


def test_the_tightest_of_all_groups_above_counts(host, monkeypatch):
    job, step, mine = "slurm/job_7", "slurm/job_7/step_0", "0::/slurm/job_7/step_0\n"
    host.put("slurm", memory__max="max", memory__current=400 * GIB)
    host.put(
        job, memory__max=64 * GIB, memory__current=40 * GIB, memory__stat=f"anon 5\ninactive_file {9 * GIB}\nx y z"
    )
    host.put(step, memory__max="max", memory__current=39 * GIB)
    assert host.gib(mine) == 33
    host.put(step, memory__max=50 * GIB, memory__stat=f"active_file {1 * GIB}\ninactive_file {2 * GIB}")
    assert host.gib(mine) == 14
    host.put(job, memory__current=80 * GIB)
    assert host.gib(mine) == 0
    host.put(job, memory__current=0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3 * GIB))
    assert host.gib(mine) == 3


def test_a_container_that_sees_only_itself(host):
    host.put("", memory__max=8 * GIB, memory__current=5 * GIB, memory__stat=f"active_file {GIB}")
    assert host.gib("0::/\n") == 4


def test_groups_of_version_1_beside_version_2(host):
    host.put("memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=90 * GIB)
    limits = {"memory__limit_in_bytes": 20 * GIB, "memory__usage_in_bytes": 6 * GIB}
    host.put("memory/slurm/job_7", **limits, memory__stat=f"inactive_file {GIB}")
    assert host.gib("12:cpu,cpuacct:/slurm\n5:memory:/slurm/job_7\n1:name=systemd:/x\n0::/slurm/job_7\n") == 15
    assert host.gib("7:memory,hugetlb:/slurm/job_7/step_0\n") == 15


def test_pages_of_files_that_belong_to_a_group_below(host):
    stat = f"inactive_file 0\nactive_file 0\ntotal_inactive_file {10 * GIB}\ntotal_active_file {2 * GIB}"
    limits = {"memory__limit_in_bytes": 20 * GIB, "memory__usage_in_bytes": 18 * GIB}
    host.put("memory/slurm/job_7", **limits, memory__stat=stat)
    assert host.gib("5:memory:/slurm/job_7/step_0/task_0\n") == 14


def test_what_is_read_again_and_again_is_not_spare(host, tmp_path):
    host.meminfo.write_text(f"MemFree: 5 kB\nActive(file):    {400 * GIB // 1024} kB\n")
    assert host.gib("", spare_bytes, host.meminfo) == 100
    assert host.gib("", spare_bytes, tmp_path / "none") == 500
    stat = f"active_file {30 * GIB}\ninactive_file {9 * GIB}"
    host.put("job_7", memory__max=64 * GIB, memory__current=60 * GIB, memory__stat=stat)
    assert host.gib("0::/job_7\n", spare_bytes, host.meminfo) == 13


def test_this_machine_has_some_memory_left():
    assert 0 < spare_bytes() <= available_bytes() <= psutil.virtual_memory().total
