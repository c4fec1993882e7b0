"""`ckptman doctor`: what people and programs get to see, how it ends, and what it leaves behind: nothing."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import ckptman.storage.io.file_writer  # noqa: F401 so that no check imports NumPy in a process of its own
from ckptman.cli import doctor as verb
from ckptman.cli.app import main
from ckptman.engine.state.installed_torch import TorchFacts
from ckptman.storage.io.mount import FAMILIES, LOCAL
from ckptman.tools.doctor import examine as checks
from ckptman.tools.doctor import renames
from ckptman.tools.doctor.finding import Finding
from tests.helpers.checkpoints import commit
from tests.helpers.forkserver import Python

QUICK = ["--size", "2MiB"]


@pytest.fixture(autouse=True)
def no_job_and_no_torch(monkeypatch):
    """These tests are of this host, whatever job they run in; and torch takes seconds to ask."""
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(checks, "REPEAT_SECONDS", 0.05)
    monkeypatch.setattr(verb, "_torch_facts", lambda timeout: TorchFacts("2.13.0+cpu", "cpu", (), ("gloo",)))


def rows(printed):
    """The lines of the table by the name of the check."""
    found = {}
    for line in printed.splitlines()[1:]:
        if not line.startswith(" "):
            name = line.split("  ")[0]
        found.setdefault(name, []).append(line)
    return found


def test_a_table_for_people_and_figures_with_units_for_programs(tmp_path, ends):
    commit(tmp_path, 1)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    told = ends(0, "doctor", tmp_path, *QUICK, "--against", "1GB")
    table = rows(told.out)
    assert told.out.splitlines()[0].split() == ["check", "result", "what", "it", "means"]
    assert "1 GB in" in table["save"][0]
    assert (max(map(len, told.out.splitlines())) <= 120, told.err) == (True, "")
    told = json.loads(ends(0, "doctor", tmp_path, *QUICK, "--against", "1GB", "--json").out)
    assert (told["directory"], told["good"], told["against_bytes"]) == (str(tmp_path), True, 10**9)
    found = {each["name"]: each for each in told["findings"]}
    assert set(found) == set(table)
    rate, save = found["write"]["figures"]["bytes_per_second"], found["save"]["figures"]
    assert save["seconds"] == pytest.approx(10**9 / rate + save["fixed_seconds"])
    assert save["fixed_seconds"] >= 6 * found["fsync"]["figures"]["file_seconds"]
    assert set(found["write"]) == {"name", "verdict", "value", "advice", "figures"}
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_what_failed_is_one_line_with_its_consequence(tmp_path, ends, monkeypatch):
    torn = Finding("", "FAILED", "a folder that was renamed was seen under neither name", renames.COMMITS.broken)

    def check_sync(place):
        raise OSError(errno.EIO, "Input/output error")

    instead = {"rename": lambda place: torn, "fsync": check_sync}
    changed = [replace(each, run=instead.get(each.name, each.run)) for each in checks.CHECKS]
    monkeypatch.setattr(checks, "CHECKS", changed)
    told = ends(1, "doctor", tmp_path, *QUICK)
    assert told.err == (
        f"Error: {tmp_path} is not fit to save to: rename (a folder that was renamed was seen under neither name): "
        "commits are not safe here: a run could load half a checkpoint, or find none. Save to another file system; "
        "fsync (Input/output error): nothing that is saved here is durable\n"
    )
    assert "FAILED" in rows(told.out)["rename"][0]
    told = ends(1, "doctor", tmp_path, *QUICK, "--json")
    assert json.loads(told.out)["good"] is False
    assert told.err.startswith("Error: ")
    assert list(tmp_path.iterdir()) == []


def test_against_a_checkpoint_a_root_and_one_of_plain_dcp(tmp_path, ends):
    commit(tmp_path / "root", 1)
    entry = commit(tmp_path / "root", 2, rows=4096)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / ".metadata").write_bytes(b"x" * 10)
    (plain / "__0_0.distcp").write_bytes(b"x" * 90)
    for path, size in ((entry.path, None), (tmp_path / "root", None), (plain, 100)):
        told = json.loads(ends(0, "doctor", "--against", path, "--json").out)
        assert told["against_bytes"] == (size or entry.require_manifest().total_bytes)
    (tmp_path / "empty").mkdir()
    assert main(["doctor", "--against", str(tmp_path / "empty")]) == 3


def test_a_checkpoint_that_does_not_answer_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(verb, "is_foreign", lambda path: time.sleep(600))
    assert main(["doctor", "--against", str(tmp_path), "--timeout", "0.2"]) == 1
    assert "does not answer within 0.2 s: give its size, such as 70GB" in capsys.readouterr().err


def test_a_job_that_is_broken_is_1(ends, monkeypatch):
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("WORLD_SIZE", "4")
    told = ends(1, "doctor", "--json")
    assert json.loads(told.out)["directory"] is None
    assert told.err == (
        "Error: this job is not fit to run: world (RANK=4, WORLD_SIZE=4): RANK must be below WORLD_SIZE: the start "
        "would hang\n"
    )


@pytest.mark.parametrize(
    ("torch_facts", "told"),
    [
        (lambda: time.sleep(600), "torch (does not answer within 0.2 s): "),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "torch (cannot be imported: the check was killed by SIGKILL"),
    ],
    ids=["hangs", "dies"],
)
def test_a_torch_that_hangs_or_dies_is_told(torch_facts, told, monkeypatch, ends):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "ckptman.engine.state.installed_torch", SimpleNamespace(torch_facts=torch_facts))
    printed = ends(1, "doctor", "--timeout", "0.2" if "0.2" in told else "60")
    assert told in printed.err
    if "0.2" in told:
        assert "raise --timeout" in printed.err
        assert "imported" not in printed.out + printed.err
        assert "torch does not answer" in rows(printed.out)["devices"][0]


def test_the_command_itself_never_looks_at_the_folder(tmp_path, capsys, monkeypatch):
    me, real = os.getpid(), os.stat

    def stat(path, *args, **more):
        if os.getpid() == me:
            assert str(tmp_path) not in str(path), "this would hang with its file system"
        return real(path, *args, **more)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os.path, "realpath", lambda path: time.sleep(600))
    assert main(["doctor", str(tmp_path), "--timeout", "0.3", "--against", "1GB"]) == 1
    assert f"answer ({tmp_path} does not answer within 0.3 s)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["INT", "TERM", "HUP"]
)
def test_a_signal_leaves_nothing_behind(number, code, tmp_path):
    command = ["-m", "ckptman", "doctor", tmp_path, "--size", "64MiB"]
    with Python(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 240
        while not any(tmp_path.glob(".ckptman-doctor-*/*")):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        process.send_signal(number)
        _, told = process.communicate(timeout=240)
    assert process.returncode == code, told
    assert told == ""
    assert list(tmp_path.iterdir()) == []


def test_every_check_and_every_kind_of_file_system_is_on_its_page(tmp_path, ends, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "4000000000")
    for arguments in (["doctor", str(tmp_path), *QUICK, "--against", "1MB"], ["doctor"]):
        for each in json.loads(ends(0, *arguments, "--json").out)["findings"]:
            assert f"| {each['name']} |" in page or f"\n{each['name']} " in page, each["name"]
    for family in FAMILIES.values():
        rare = family.advice == LOCAL or family.name in ("a read-only image", "autofs") or "virtual" in family.name
        assert rare or family.name.split(" (")[0] in page, family.name
