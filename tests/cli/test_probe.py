"""`ckptman probe loader`: its table, its JSON, its notes and exit codes."""

import json

import pytest

import ckptman.data.resumable_loader  # noqa: F401 so that no process of a probe takes seconds to import torch
from ckptman.cli.app import main
from ckptman.data.probe import Measurement, Pass, Probed
from ckptman.runtime.journal import Journal

PROGRAM = """
from torch.utils.data import DataLoader

def make_loader(num_workers):
    return DataLoader(range(64), 4, num_workers=num_workers)
"""
QUICK = ["--seconds", "60", "--workers", "0"]  # each pass is over before, because its data ends


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def test_a_table_for_people_and_the_same_for_programs(folder, ends):
    told = ends(0, "probe", "loader", "program.py:make_loader", *QUICK, "--steps-per-second", "0.01")
    lines = told.out.splitlines()
    assert lines[0].split() == ["workers", "cache", "batches/s", "samples/s", "tensors", "first", "batch"]
    assert lines[1].split()[:2] == ["0", "cold"]
    assert lines[2].split()[0] == "warm"
    assert "Data will not starve the GPUs" in told.out
    assert max(map(len, lines)) <= 80
    assert not told.err
    (folder / "run").mkdir()
    times = iter([100.0, 200.0])
    journal = Journal(folder / "run" / ".ckptman" / "journal.jsonl", clock=lambda: next(times))
    journal.record("first_step", attempt=1, step=1)
    journal.record("save_begun", attempt=1, step=2)
    journal.close()
    journaled = ["--root", "run", "--ranks-per-node", "2", "--json"]
    found = json.loads(ends(0, "probe", "loader", "program:make_loader", *QUICK, *journaled).out)
    [only] = found["measurements"]
    assert (only["workers"], only["cold"]["taken"], only["cold"]["samples"]) == (0, 16, 60)
    assert only["warm"]["bytes"] == 15 * 4 * 8
    assert (found["need"]["steps_per_second"], found["need"]["batches_per_second"]) == (0.01, 0.02)


def test_measurements_are_shown_before_the_problem(folder, ends):
    broken = PROGRAM.replace("    return", "    assert not num_workers, 'none today'\n    return")
    (folder / "program.py").write_text(broken)
    told = ends(1, "probe", "loader", "program.py:make_loader", "--seconds", "0.05", "--workers", "0,2")
    assert told.out.splitlines()[1].split()[:2] == ["0", "cold"]
    assert "program.py:make_loader with 2 workers raised AssertionError: none today (program.py:5)" in told.err


@pytest.mark.parametrize(
    ("cold", "warm", "seconds", "dropped", "note"),
    [
        (200, 200, 1.0, 1, ""),
        (200, 200, 1.0, 0, "Cold is not cold: no file of the data is known; name its files with --data"),
        (200, 200, 0.1, 1, "Rough: the loader came to its end after less than 0.5 s"),
        (50, 200, 1.0, 1, "if the data fits into memory, only the first epoch is slow"),
    ],
)
def test_notes_say_how_good_the_numbers_are(monkeypatch, capsys, cold, warm, seconds, dropped, note):
    def one(rate):
        return Pass(rate, rate, 1e6, 0.1, seconds, int(rate), int(rate), 10**6, int(rate), is_whole=True)

    found = Probed([Measurement(2, one(cold), one(warm))], dropped_files=dropped)
    monkeypatch.setattr("ckptman.data.probe.probe_loader", lambda *given: found)
    code = main(["probe", "loader", "program.py:make_loader", "--steps-per-second", "100"])
    told = " ".join(capsys.readouterr().out.split("\n\n")[1].split())
    assert code == (1 if cold < 100 else 0)
    assert note in told
    assert note or told == (
        "Data will not starve the GPUs: this node needs 100 batches/s (100 steps/s), and 2 workers give 200 batches/s."
    )


def test_ctrl_c_ends_it(monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptman.storage.io.isolated_process.IsolatedProcess.receive", interrupted)
    assert main(["probe", "loader", "program.py:make_loader"]) == 130
