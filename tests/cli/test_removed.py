"""An option that a verb no longer has."""

import pytest

from ckptman.cli import help
from ckptman.cli.app import main


@pytest.mark.parametrize("given", [["--old"], ["--old=3"], ["--old", "3"]])
def test_a_removed_option_names_its_replacement(monkeypatch, capsys, given):
    monkeypatch.setitem(help.REMOVED, ("list", "--old"), "use --new")
    assert main(["list", "/nowhere", *given]) == 2
    assert "--old was removed: use --new" in capsys.readouterr().err


def test_an_option_that_never_was_is_unknown(capsys):
    assert main(["list", "/nowhere", "--never"]) == 2
    assert "No such option: --never" in capsys.readouterr().err


def test_no_verb_has_an_option_that_was_removed():
    for verb, option in help.REMOVED:
        assert "was removed" in _said_of(verb, option)


def _said_of(verb, option):
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("ckptman.cli.app.complain", said.append)
        assert main([*verb.split(), option]) == 2
        return "".join(said)
