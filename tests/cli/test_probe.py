"""`ckptman probe loader`: what people and programs get to see, how it ends, and which speed it is held against."""

import json

import numpy as np
import pytest

import ckptman.data.resumable_loader  # noqa: F401 so that no process of a probe takes seconds to import torch
from ckptman.cli.app import main
from ckptman.cli.probe import _reading_text
from ckptman.data.probe import Measurement, Pass, Probed, Weight
from ckptman.forecast.data_rate import Need
from ckptman.runtime.journal import Journal
from ckptman.storage.io.mount import FAMILIES, Mount
from ckptman.train.dataset.tokenfile import META, TOKENS, TokenMeta

PROGRAM = """
from torch.utils.data import DataLoader

def make_loader(num_workers):
    return DataLoader(range(64), 4, num_workers=num_workers)
"""
QUICK = ["--seconds", "60", "--workers", "0"]  # each pass is over before, as its data end


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def journal(root, *events):
    times = iter([time for _, time, _ in events])
    root.mkdir(exist_ok=True)
    written = Journal(root / ".ckptman" / "journal.jsonl", clock=lambda: next(times))
    for name, _, step in events:
        written.record(name, attempt=1, step=step)
    written.close()


def test_a_table_for_people_and_the_same_for_programs(folder, ends):
    told = ends(0, "probe", "loader", "program.py:make_loader", *QUICK, "--steps-per-second", "0.01")
    lines = told.out.splitlines()
    assert lines[0].split()[:4] == ["workers", "cache", "batches/s", "samples/s"]
    assert [line.split()[:2] for line in lines[1:2]] == [["0", "cold"]]
    assert lines[2].split()[0] == "warm"
    assert "Data will not starve the GPUs" in told.out
    assert max(map(len, lines)) <= 80
    assert not told.err
    journal(folder / "run", ("first_step", 100.0, 1), ("save_begun", 200.0, 2))
    journaled = ["--root", "run", "--ranks-per-node", "2", "--json"]
    found = json.loads(ends(0, "probe", "loader", "program:make_loader", *QUICK, *journaled).out)
    [only] = found["measurements"]
    assert (only["workers"], only["cold"]["taken"], only["cold"]["samples"]) == (0, 16, 60)
    assert only["warm"]["bytes"] == 15 * 4 * 8
    assert (found["need"]["steps_per_second"], found["need"]["batches_per_second"]) == (0.01, 0.02)


def test_one_that_starves_ends_with_1(ends):
    told = ends(1, "probe", "loader", "program.py:make_loader", *QUICK, "--steps-per-second", "1e9")
    assert told.out.splitlines()[1].split()[:2] == ["0", "cold"]
    assert told.err.startswith("Error: Data will starve the GPUs: without workers")


def test_what_was_measured_is_shown_before_the_problem(folder, ends):
    broken = PROGRAM.replace("    return", "    assert not num_workers, 'none today'\n    return")
    (folder / "program.py").write_text(broken)
    told = ends(1, "probe", "loader", "program.py:make_loader", "--seconds", "0.05", "--workers", "0,2")
    assert told.out.splitlines()[1].split()[:2] == ["0", "cold"]
    assert "program.py:make_loader with 2 workers raised AssertionError: none today (program.py:5)" in told.err


def test_the_bundled_loop(folder, ends):
    (folder / "tokens").mkdir()
    np.arange(4001, dtype="<u2").tofile(folder / "tokens" / TOKENS)
    meta = TokenMeta(dtype="uint16", count=4001, vocab_size=4001, eos_id=0, sources=1, digest="d")
    (folder / "tokens" / META).write_text(meta.model_dump_json())
    text = '[data]\npath = "tokens"\nsequence_tokens = 8\nglobal_batch = 12\n[run]\nsteps = 9\n'
    (folder / "run.toml").write_text(text + '[checkpoint]\nroot = "run"\n')
    command = ["probe", "loader", "--config", "run.toml", "--seconds", "0.05", "--json"]
    found = json.loads(ends(0, *command, "--ranks-per-node", "4").out)
    cold = found["measurements"][0]["cold"]
    assert cold["samples"] == 3 * cold["batches"], "of a batch that 4 ranks share"
    assert cold["bytes"] == cold["samples"] * 9 * 8
    assert found["dropped_files"] == 3 - 1
    assert found["need"] is None
    journal(folder / "run", ("first_step", 100.0, 1), ("save_begun", 200.0, 2))
    found = json.loads(ends(0, *command, "--world-size", "2", "--set", "data.global_batch=4").out)
    cold = found["measurements"][0]["cold"]
    assert cold["samples"] == 2 * cold["batches"]
    assert found["need"]["steps_per_second"] == 0.01, "by the journal of its own root"


@pytest.mark.parametrize(
    ("kind", "rate", "text"),
    [
        ("ext4", 5e9, "5 GB/s for that from ext4 at /data, which other nodes do not see."),
        ("lustre", 0.2e9, "200 MB/s for that from Lustre at /data, shared with other nodes: under 500 MB/s, fine."),
        ("nfs4", 0.7e9, "700 MB/s for that from NFS at /data, shared with other nodes: much. With many nodes, copy"),
        ("gpfs", 2e9, "shared with other nodes: too much, over 1 GB/s. Copy the data to a disk of the node"),
        ("virtiofs", 2e9, "perhaps shared with other nodes: too much"),
    ],
)
def test_what_a_node_reads_from_a_shared_file_system(kind, rate, text):
    mount = Mount(1, "/data", kind, "server", ())
    found = _reading_text({"bytes_per_second": rate}, Need(1), (mount, FAMILIES[kind]))
    assert found is not None
    assert text in found
    assert _reading_text({"bytes_per_second": rate}, Need(1), None) is None


def test_notes_say_what_the_numbers_are_worth(monkeypatch, capsys):
    def one(rate, stored, called):
        return Pass(0.1, Weight(int(rate), int(rate), 10**6), 1.0, int(rate), int(rate), called, stored, False)

    def told(cold, warm, dropped=1):
        found = Probed([Measurement(2, cold, warm)], dropped=dropped)
        monkeypatch.setattr("ckptman.data.probe.probe_loader", lambda *given: found)
        main(["probe", "loader", "program.py:make_loader", "--steps-per-second", "100"])
        return " ".join(capsys.readouterr().out.split())

    good = told(one(200, 10**9, 10**9), one(200, 0, 10**9))
    assert "Data will not starve" in good
    assert not [each for each in ("Cold is not", "Nothing", "kernel", "epoch", "Rough") if each in good]
    assert "Cold is not cold" in told(one(200, 0, 10**9), one(200, 0, 10**9))
    assert "name its files with --data" in told(one(200, 0, 10**9), one(200, 0, 10**9), dropped=0)
    assert "Nothing was read from storage." in told(one(200, 0, 0), one(200, 0, 0))
    assert "The kernel does not tell" in told(one(200, None, None), one(200, None, None))
    assert "only the first epoch is slow" in told(one(50, 10**9, 10**9), one(200, 0, 10**9))


def test_ctrl_c_ends_it(monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptman.storage.io.isolated_process.IsolatedProcess.receive", interrupted)
    assert main(["probe", "loader", "program.py:make_loader"]) == 130
