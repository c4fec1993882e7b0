"""`ckptman memory list | flush | clear`, and what `list`, `prune` and `doctor` say of the memory of this node."""

import json
import os
import subprocess
import sys

import psutil
import pytest

from ckptman.cli.app import main
from ckptman.engine.state.installed_torch import TorchFacts
from ckptman.runtime.journal import read_journal
from ckptman.storage.catalog.backends.node_memory import NodeMemory, found_on
from ckptman.storage.format import paths
from ckptman.storage.format.paths import journal_path
from ckptman.tools.doctor.job_environment import Job, check_left_in_memory
from tests.helpers.checkpoints import commit
from tests.helpers.faulty_disk import holds
from tests.helpers.node_memory import hold, live_rank, memory_of, nodes_with


@pytest.fixture
def shm(tmp_path, monkeypatch):
    """The memory of this node, which is called "a"."""
    monkeypatch.setattr(paths, "MEMORY_PATH", str(tmp_path / "shm"))
    for name in list(os.environ):
        if name.startswith("SLURM"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLURMD_NODENAME", "a")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # no Slurm
    return tmp_path / "shm"


def squeue(tmp_path, answer, code=0):
    """A Slurm that gives this answer."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    path = tmp_path / "bin" / "squeue"
    path.write_text(f"#!/bin/sh\n{answer}\nexit {code}\n")
    path.chmod(0o755)


def test_list_shows_what_each_run_holds_and_whether_it_lives(tmp_path, shm, ends):
    assert ends(0, "memory", "list", "--path", shm).out == f"No run of this user has anything in {shm}.\n"
    memory = nodes_with(tmp_path, 120, {"a": [0, 1, 3]})["a"]
    hold(memory, commit(tmp_path / "made", 130, ranks=4).path, [0], manifest=False)
    memory_of(shm, tmp_path / "other", "a", job_id="42")
    (memory_of(shm, tmp_path / "third", "a").folder / "owner.json").write_bytes(b"\x1b[31m")
    squeue(tmp_path, "echo '42|RUNNING|None|N/A|run.sbatch 1'")
    with live_rank(memory):
        lines = ends(0, "memory", "list", "--path", shm).out.splitlines()
        told = {each["root"]: each for each in json.loads(ends(0, "memory", "list", "--path", shm, "--json").out)}
    assert lines[0].split() == ["step", "parts", "memory", "node", "root", "job", "state"]
    rows = [" ".join(line.split()) for line in lines[1:]]
    mine = f" a {tmp_path / 'root'} - alive"
    other = f" a {tmp_path / 'other'} 42 may go on"
    expected = [
        ("120 3 of 4 ", mine),
        ("130 1, without manifest ", mine),
        ("- - ", other),
        ("- - ", " a ? - left behind"),
    ]
    for begin, end in expected:
        assert [row for row in rows if row.startswith(begin) and row.endswith(end)]
    assert len(rows) == len(expected)
    parts = told[str(tmp_path / "root")]["checkpoints"]
    assert [(each["step"], each["parts"], each["parts_saved"]) for each in parts] == [(120, 3, 4), (130, 1, None)]
    assert [told[None]["state"], told[str(tmp_path / "root")]["state"]] == ["left behind", "alive"]


def test_flush_brings_it_to_the_root_and_notes_that(tmp_path, shm, ends):
    root = tmp_path / "root"
    commit(root, 100)
    nodes_with(tmp_path, 120, {"a": range(4)})
    told = ends(0, "memory", "flush", root, "--path", shm).out
    assert told == f"{root}: step 120 is on disk, from the memory of 1 node. This node brought 11 files, 777 B.\n"
    assert set(holds(root)) == {100, 120}
    assert [(each["event"], each["step"]) for each in read_journal(journal_path(root))[0]] == [("memory_flushed", 120)]
    again = json.loads(ends(0, "memory", "flush", root, "--path", shm, "--json").out)
    assert (again["files"], again["why"]) == (0, "step 120 on disk is the same as in memory, or newer")


def test_each_end_of_a_flush_has_its_exit_code(tmp_path, shm, ends, monkeypatch):
    root = tmp_path / "root"
    commit(root, 100)
    memory = nodes_with(tmp_path, 120, {"a": [0, 1]})["a"]
    told = ends(3, "memory", "flush", root, "--path", shm, "--timeout", "0.2")
    assert "2 of its parts are on no node that is left (__2_0.distcp, __3_0.distcp)" in told.err
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "1")
    ends(3, "memory", "flush", root, "--path", shm, "--timeout", "600")  # nobody else can come
    with live_rank(memory):
        ends(11, "memory", "flush", root, "--path", shm)
    ends(3, "memory", "flush", tmp_path / "nowhere", "--path", shm)
    assert set(holds(root)) == {100}


def test_clear_removes_what_is_over_and_never_what_is_alive(tmp_path, shm, ends):
    root, other = tmp_path / "root", tmp_path / "other"
    memory = nodes_with(tmp_path, 120, {"a": [0, 1]})["a"]
    memory_of(shm, other, "a", job_id="42")
    memory_of(shm, tmp_path / "over", "a", job_id="41")
    with live_rank(memory):
        said = ends(2, "memory", "clear", root, "--path", shm).err
        assert said == f"Error: the run of {root} is not over on a: its ranks are alive. End it first\n"
        squeue(tmp_path, "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2", code=1)
        told = ends(0, "memory", "clear", "--all-dead", "--path", shm)
        assert told.out == "Nothing to remove. 3 runs may go on, and keep theirs.\n"
        squeue(tmp_path, "echo '42|PENDING|Resources|N/A|run.sbatch 1'")
        assert ends(0, "memory", "clear", "--all-dead", "--path", shm).out.startswith("Removed what 1 run had, ")
    assert sorted(each.owner().root for each in found_on(shm)) == [str(other), str(root)]
    ends(0, "memory", "clear", other, "--path", shm)
    ends(0, "memory", "clear", root, "--path", shm)
    assert not list(shm.iterdir())
    assert ends(0, "memory", "clear", root, "--path", shm).out.endswith("Nothing to remove.\n")


def test_the_shell_of_the_user_keeps_nothing_alive_and_a_launcher_does(tmp_path, shm, ends):
    root, shell = tmp_path / "root", psutil.Process(os.getppid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as launcher:
        memory_of(shm, root, "a", pid=launcher.pid, started=psutil.Process(launcher.pid).create_time())
        told = ends(2, "memory", "clear", root, "--path", shm)
        assert f"what started its ranks is alive (pid {launcher.pid})" in told.err
        launcher.kill()
    memory_of(shm, root, "a", pid=shell.pid, started=shell.create_time())
    ends(0, "memory", "clear", root, "--path", shm)
    assert not found_on(shm)


def test_list_of_a_root_shows_what_this_node_holds_of_it(tmp_path, shm, ends):
    root = tmp_path / "root"
    commit(root, 100)
    assert "memory" not in ends(0, "list", root).out
    nodes_with(tmp_path, 120, {"a": [0, 1, 3]})
    memory_of(shm, tmp_path / "other", "a")
    assert ends(0, "list", root).out.splitlines()[-1] == (
        "In the memory of this node: step 120, 3 of 4 parts. Other nodes may hold more; ckptman memory list says whose."
    )
    (held,) = json.loads(ends(0, "list", root, "--json").out)["memory"]
    assert (held["step"], held["parts"], held["parts_saved"], held["node"]) == (120, 3, 4, "a")
    found_on(shm)[0].folder.parent.chmod(0o777)
    assert "memory" not in ends(0, "list", root).out  # it is about the root


def test_prune_removes_what_a_run_that_is_over_left_once_the_disk_is_as_new(tmp_path, shm, capsys):
    root = tmp_path / "root"
    commit(root, 100)
    memory = nodes_with(tmp_path, 120, {"a": range(4)})["a"]
    other = memory_of(shm, tmp_path / "other", "a")

    def stays(*options):
        assert main(["prune", str(root), "--keep-last", "1", *options]) == 0
        return memory.folder.exists()

    assert stays()  # it is newer than all that is on disk
    commit(root, 120)
    with live_rank(memory):
        assert stays()
    capsys.readouterr()
    assert stays("--dry-run")
    told = capsys.readouterr().out
    assert f"clear   {memory.folder.name}" in told
    assert "in memory, of a run that is over" in told
    assert not stays()
    assert "Deleted 1 leftover: " in capsys.readouterr().out
    assert other.folder.exists()


def test_doctor_tells_what_was_left_behind(tmp_path, shm):
    job = Job(TorchFacts(), os.environ)
    assert check_left_in_memory(job).verdict == "ok"
    memory = nodes_with(tmp_path, 120, {"a": range(4)})["a"]
    with live_rank(memory):
        assert check_left_in_memory(job).value == "no leftovers"
    found = check_left_in_memory(job)
    assert found.verdict == "warning"
    assert found.value.endswith("left behind by 1 run")
    assert "clear --all-dead removes it" in found.advice
    memory.folder.parent.chmod(0o777)
    assert "others may write to it" in check_left_in_memory(job).value


def test_a_root_that_never_had_anything_in_memory(tmp_path, shm, ends):
    commit(tmp_path / "root", 100)
    told = ends(0, "memory", "flush", tmp_path / "root", "--path", shm, "--nodes", "7")
    assert told.out == f"{tmp_path / 'root'}: a holds nothing of it in memory.\n"
    assert not (tmp_path / "root" / ".ckptman").exists()
    assert not NodeMemory(shm, "0" * 32, "a").folder.exists()
