"""`ckptman chain why`: the cause, its evidence, the reaction, and the next command."""

import json

import pytest

from ckptman.cli.app import main


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """A chain that the same error has stopped, in its second attempt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ckptman.jobs.evidence._file_of", lambda _: (str(tmp_path / "log"), 0))
    line = "echo 'KeyError: 1' >> log; exit 1"
    options = ["--scheduler", "local", "--crash-limit", "3", "--chain-dir", "ckptman-chains/c"]
    assert main(["submit", *options, "--", "bash", "-c", line]) == 8


def test_an_end_is_explained(chain, ends):
    lines = ends(0, "chain", "why").out.splitlines()
    assert lines[0] == "c: stopped"
    assert lines[1].startswith("attempt 2 crashed after ")
    assert [line.split()[0] for line in lines[2:]] == ["cause", "log", "reaction", "next"]
    assert lines[2] == "  cause     KeyError: 1 [exception]"
    assert lines[4] == "  reaction  the chain stops: the same error twice in a row, without a new checkpoint"
    assert lines[5] == "  next      correct the program or its data; then submit the command again"
    told = json.loads(ends(0, "chain", "why", "c", "--json").out)
    assert (told["cause"], told["reaction"], told["number"]) == ("exception", "hold", 2)
    assert "counts towards the limit of 3 crashes" in ends(0, "chain", "why", "--attempt", "1").out


def test_an_attempt_that_has_not_ended_or_does_not_exist(chain, ends, tmp_path):
    assert "has no attempt 7" in ends(3, "chain", "why", "--attempt", "7").err
    (tmp_path / "ckptman-chains/c/ended-0002.json").unlink()
    assert "attempt 2 of c has not ended" in ends(3, "chain", "why", "--attempt", "2").err
    (tmp_path / "ckptman-chains/c/ended-0001.json").unlink()
    assert "no attempt of c has ended" in ends(3, "chain", "why").err
