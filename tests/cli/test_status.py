"""`ckptman status` and `ckptman report`: what they print, and one clear line where there is nothing to say."""

import json
import os
import pty
import shutil

import pytest

from ckptman.cli.app import main
from tests.helpers.forkserver import Python
from tests.helpers.journals import make_root
from tests.tools.monitoring.invented_run import invented


@pytest.fixture
def root(tmp_path):
    run = invented(5)
    return make_root(tmp_path / "root", run.events, [run.durable_step], ago_seconds=60)


def test_a_root_that_is_gone_keeps_no_other_from_being_shown(root, ends):
    told = ends(0, "status", root, root.parent / "gone").out.splitlines()
    assert [line.split()[1] for line in told[1:3]] == ["finished", "not"]
    assert told[3].startswith(f"{root.parent / 'gone'}: ")


def test_where_the_hours_went(root, tmp_path, ends):
    page = tmp_path / "out/report.html"
    out = ends(0, "report", root, "--html", page).out
    assert page.read_text().startswith("<!doctype html>")
    shares = [float(line.rpartition(" ")[2].rstrip("%")) for line in out.splitlines() if line.endswith("%")]
    assert sum(shares) == pytest.approx(100, abs=0.6)

    assert "all 2 runs" in ends(0, "report", root, root).out


def test_torn_lines_are_said_and_left_out(root, ends):
    journal = root / ".ckptman/journal.jsonl"
    journal.write_text('{"time": 1, "eve\n\x00\x00\x00\n' + journal.read_text() + '{"time": 3')
    assert "note: 3 of the lines of its journal cannot be read, and are left out" in ends(0, "report", root).out


def test_a_root_that_vanishes_while_it_is_watched(root):
    ours, theirs = pty.openpty()
    command = ["-m", "ckptman", "status", root, "--watch", "--every", "0.2s"]
    watching = Python(*command, stdout=theirs, stderr=theirs, env={**os.environ, "COLUMNS": "300"})
    os.close(theirs)
    seen = b""
    try:
        while b"finished" not in seen:
            seen += os.read(ours, 4096)
        shutil.rmtree(root)
        while b"not started" not in seen:
            seen += os.read(ours, 4096)
        watching.send_signal(2)
        assert watching.wait(20) == 130
    finally:
        watching.kill()
        watching.wait()
        os.close(ours)
    assert b"Traceback" not in seen


def test_without_a_root_it_shows_the_runs_of_the_chains_from_here(tmp_path, monkeypatch, ends):
    monkeypatch.chdir(tmp_path)
    assert "no chain that was submitted from here has saved yet" in ends(3, "status").err
    line = "mkdir -p out/checkpoint-20; echo x > out/checkpoint-20/model.bin; exit 0"
    assert main(["submit", "--scheduler", "local", "--progress", "out", "--", "bash", "-c", line]) == 0
    lines = ends(0, "status").out.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'out'}: finished")
    assert any(each.strip().startswith("saved     step 20, ") for each in lines)
    assert any(each.strip().startswith("chain ") for each in lines)
    assert ends(0, "status", "out").out.splitlines()[1:2] == lines[1:2]


def test_where_the_hours_of_a_program_went_that_saves_in_its_own_way(tmp_path, monkeypatch, ends):
    monkeypatch.chdir(tmp_path)
    assert "from the directory in which you submitted it" in ends(3, "report", "out").err
    (tmp_path / "program.sh").write_text(
        """n=$(ls out | wc -l)
        mkdir out/checkpoint-$((n * 10 + 10)) && echo x > out/checkpoint-$((n * 10 + 10))/model.bin
        [ $n = 0 ] && sleep 1 && exit 75
        [ $n = 1 ] && sleep 1 && kill -9 $$
        exit 0"""
    )
    (tmp_path / "out").mkdir()
    assert main(["submit", "--scheduler", "local", "--progress", "out", "--", "bash", "program.sh"]) == 0
    [found] = json.loads(ends(0, "report", "out", "--json").out)
    assert [(each["start_step"], each["step"], each["ending"]) for each in found["attempts"]] == [
        (0, 10, "stopped"),
        (10, 20, "crashed"),
        (20, 30, "finished"),
    ]
    lost = [each["seconds"]["repeated"] + each["seconds"]["ending"] for each in found["attempts"]]
    assert min(lost[:2]) > 0.9
    assert sum(found["ledger"]["seconds"].values()) == pytest.approx(found["ledger"]["total_seconds"])
    page = tmp_path / "page.html"
    assert "step 30 after" in ends(0, "report", "out", "--html", page).out
    assert page.is_file()
