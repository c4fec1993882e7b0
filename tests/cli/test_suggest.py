"""Paths that are not there, or one level off: what was probably meant is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptman.cli.app import main
from tests.helpers.checkpoints import commit


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Return `runs/first/checkpoints`, from where the working directory is, with one checkpoint."""
    commit(tmp_path / "runs/first/checkpoints", 10)
    monkeypatch.chdir(tmp_path)
    return Path("runs/first/checkpoints")


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("list runs/frist/checkpoints", "runs/first/checkpoints"),
        ("path runs/first/chekpoints", "runs/first/checkpoints"),
        ("show run/first/checkpoints/step-0000000010", "runs/first/checkpoints/step-0000000010"),
        ("verify runs/first/checkpoints/step-10", "runs/first/checkpoints/step-0000000010"),
        ("verify runs/first", "runs/first/checkpoints"),
        ("path runs/first", "runs/first/checkpoints"),
        ("prune runs/first --keep-last 1", "runs/first/checkpoints"),
        ("pin runs/first --why x", "runs/first/checkpoints"),
        ("list runs/first/checkpoints/step-0000000010", "runs/first/checkpoints"),
        ("rollback runs/first/checkpoints/step-0000000010 --to-step 10 --why x", "runs/first/checkpoints"),
        ("simulate --trace=runs/frist", "runs/first"),
        ("doctor rusn", "runs"),
        ("export rusn out", "runs"),
    ],
)
def test_what_was_meant_is_said(command: str, meant: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) in (2, 3)
    assert capsys.readouterr().err.endswith(f". Did you mean {meant}?\n")


@pytest.mark.parametrize("command", ["list nowhere", "show nowhere/at/all", "verify runs/first/checkpoints --step 11"])
def test_where_nothing_is_alike_nothing_is_said(command: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 3
    told = capsys.readouterr().err
    assert "Did you mean" not in told
    assert told.count("\n") == 1


def test_a_listing_of_the_folder_above_names_the_root(root, capsys):
    assert main(["list", "runs/first"]) == 0
    assert capsys.readouterr().out.endswith("Did you mean runs/first/checkpoints?\n")
