"""Every refusal is one clear message on stderr, its own exit code, no traceback, and nothing changed on disk."""

import json
import os
import subprocess
import sys

import pytest

from ckptman.catalog.verified import VERIFIED
from ckptman.cli.app import main
from tests.helpers.checkpoints import commit, flip_byte


def _future(root):
    manifest = commit(root, 9).path / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format_version": 99, "colour": "red"}))


def _future_and_present(root):
    commit(root, 8)
    _future(root)


def _damaged(root):
    flip_byte(commit(root, 9).path / "__0_0.distcp")


def _incomplete(root):
    (commit(root, 9).path / "__0_0.distcp").unlink()


def _garbled(root):
    (commit(root, 9).path / "manifest.json").write_text("{")


def _a_file(root):
    root.write_text("no folder")


def _good(root):
    commit(root, 9, metrics={"loss": 1.0, "dead": float("nan")})


def _empty(root):
    root.mkdir()


def _nothing(root):
    pass


CASES = [
    (_nothing, ["list", "ROOT"], 3, "there is no checkpoint root"),
    (_nothing, ["show", "ROOT"], 3, "there is no checkpoint root"),
    (_nothing, ["verify", "ROOT"], 3, "there is no checkpoint root"),
    (_nothing, ["prune", "ROOT"], 3, "there is no checkpoint root"),
    (_nothing, ["show", "ROOT/step-0000000009"], 3, "there is no checkpoint"),
    (_a_file, ["list", "ROOT"], 10, "is a file"),
    (_a_file, ["show", "ROOT"], 10, "is a file"),
    (_a_file, ["verify", "ROOT", "--all"], 10, "is a file"),
    (_a_file, ["prune", "ROOT", "--keep-last", "1"], 10, "is a file"),
    (_empty, ["show", "ROOT"], 3, "holds no checkpoint"),
    (_empty, ["verify", "ROOT", "--all"], 3, "holds no checkpoint"),
    (_good, ["show", "ROOT", "--step", "8"], 3, "no checkpoint of step 8; the latest there are: 9"),
    (_good, ["verify", "ROOT", "--step", "8"], 3, "no checkpoint of step 8"),
    (_good, ["verify", "ROOT", "--step", "9", "--all"], 2, "exclude each other"),
    (_good, ["verify", "ROOT/step-0000000009", "--all"], 2, "is one checkpoint"),
    (_good, ["show", "ROOT/step-0000000009", "--step", "9"], 2, "is one checkpoint"),
    (_good, ["verify", "ROOT", "--world-size", "1,two"], 2, "1,2,4"),
    (_good, ["verify", "ROOT", "--world-size", "0"], 2, "1,2,4"),
    (_good, ["verify", "ROOT", "--world-size", ""], 2, "1,2,4"),
    (_good, ["verify", "ROOT", "--threads", "0"], 2, "at least 1"),
    (_good, ["drain", "ROOT", "--threads", "0"], 2, "at least 1"),
    (_good, ["prune", "ROOT", "--keep-last", "-1"], 2, "0 never means all"),
    (_good, ["prune", "ROOT", "--keep-last", "0"], 2, "0 never means all"),
    (_good, ["prune", "ROOT", "--keep-every", "0"], 2, "at least 1"),
    (_good, ["prune", "ROOT", "--keep-best", "loss:0"], 2, "at least 1"),
    (_good, ["prune", "ROOT", "--keep-best", ":2"], 2, "name of a metric"),
    (_good, ["prune", "ROOT", "--keep-best", "lost"], 2, "ROOT: no checkpoint has the metric 'lost'; they have loss"),
    (_good, ["prune", "ROOT", "--keep-best", "loss:2:mxa"], 2, "has the metric 'loss:2:mxa'; they have loss"),
    (_good, ["prune", "ROOT", "--keep-best", "dead"], 2, "the metric 'dead' is a finite number in no checkpoint"),
    (_future, ["show", "ROOT"], 9, "format version 99"),
    (_future, ["verify", "ROOT"], 9, "upgrade ckptman"),
    (_future_and_present, ["show", "ROOT"], 9, "format version 99"),
    (_future_and_present, ["verify", "ROOT"], 9, "format version 99"),
    (_future_and_present, ["verify", "ROOT", "--all"], 9, "format version 99"),
    (_future, ["show", "ROOT/step-0000000009"], 9, "upgrade ckptman"),
    (_damaged, ["verify", "ROOT"], 4, "step 9"),
    (_damaged, ["verify", "ROOT/step-0000000009"], 4, "step 9"),
    (_incomplete, ["verify", "ROOT"], 4, "step 9"),
    (_incomplete, ["show", "ROOT"], 4, "__0_0.distcp is missing"),
    (_garbled, ["show", "ROOT"], 4, "manifest.json"),
    (_good, ["submit", "--scheduler", "slurm", "--", "true"], 3, "--scheduler local"),
    (_good, ["submit", "--scheduler", "pbs", "--", "true"], 2, "known: slurm, local"),
    (_good, ["submit", "--scheduler", "local", "--crash-limit", "0", "--", "true"], 2, "--crash-limit"),
    (_good, ["submit", "--scheduler", "local", "--max-attempts", "-1", "--", "true"], 2, "--max-attempts"),
]


@pytest.mark.parametrize(
    ("prepare", "arguments", "code", "message"), CASES, ids=[f"{c[0].__name__}-{'-'.join(c[1])}" for c in CASES]
)
def test_a_refusal_has_its_code_and_one_message(prepare, arguments, code, message, tmp_path, capsys):
    root = tmp_path / "root"
    prepare(root)
    before = _tree(tmp_path)
    assert main([each.replace("ROOT", str(root)) for each in arguments]) == code
    told = capsys.readouterr().err
    assert message.replace("ROOT", str(root)) in told
    assert told.startswith("Error: ")
    assert sum(line.startswith("Error: ") for line in told.splitlines()) == 1
    assert "[Errno" not in told
    assert "Traceback" not in told
    assert _tree(tmp_path) == before


def test_a_root_that_cannot_be_read_is_no_empty_root(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    assert main(["list", str(tmp_path)]) == 10


def test_the_traceback_is_there_for_those_who_ask(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CKPTMAN_TRACEBACK", "1")
    assert main(["list", str(tmp_path / "none")]) == 3
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert told.splitlines()[-1].startswith("Error: there is no checkpoint root")


def test_an_interrupt_is_130(tmp_path, monkeypatch):
    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "listdir", interrupt)
    assert main(["list", str(tmp_path)]) == 130


@pytest.mark.parametrize("checkpoints", [1, 200])
def test_a_reader_that_leaves_is_no_error(checkpoints, tmp_path):
    for step in range(1, checkpoints + 1):
        commit(tmp_path, step, ranks=1, sequence=step)
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(
        [sys.executable, "-c", "import ckptman.cli; ckptman.cli.main()", "list", str(tmp_path)],
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(write)
    assert (ran.returncode, ran.stderr) == (141, b"")


def _tree(folder):
    """What is there, but for what `verify --all` notes about those that are good."""
    paths = [path for path in sorted(folder.rglob("*")) if path.name != VERIFIED]
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


def test_without_standard_output_there_is_an_exit_code(tmp_path):
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        command = f"{sys.executable} -m ckptman list {tmp_path} {closed}"
        assert subprocess.run(["bash", "-c", command], timeout=60, capture_output=True).returncode == 0, closed


def test_a_bug_is_no_verdict(tmp_path, monkeypatch, capsys):
    """Python would end with 1, by which `ckptman diff` says that two checkpoints differ."""

    def broken(*_):
        raise ZeroDivisionError("of all things")

    _good(tmp_path)
    monkeypatch.setattr("ckptman.cli.list._summary", broken)
    assert main(["list", str(tmp_path)]) == 70
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "a bug of ckptman (ZeroDivisionError)" in told
