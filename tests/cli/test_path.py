"""`ckptman path`: one path for a script, or exit code 3."""

import pytest

from ckptman.cli.app import main
from tests.helpers.checkpoints import commit


@pytest.fixture
def root(tmp_path):
    for step, loss in ((10, 0.5), (20, 0.25), (30, float("nan"))):
        commit(tmp_path, step, metrics={"loss": loss})
    (tmp_path / "step-0000000040").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ([], 30),
        (["--latest"], 30),
        (["--best", "loss"], 20),
        (["--best", "loss", "--max"], 10),
        (["--step", "10"], 10),
    ],
)
def test_one_path_is_printed_and_nothing_else(root, capsys, options, step):
    assert main(["path", str(root), *options]) == 0
    assert capsys.readouterr() == (f"{root}/step-{step:010d}\n", "")


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        (["--best", "los"], 3, "no checkpoint has a finite los, of the metrics loss"),
        (["--step", "40"], 3, "there is no checkpoint of step 40 that counts"),
        (["--best", "loss", "--step", "10"], 2, "exclude each other"),
        (["--max"], 2, "--best accuracy --max"),
    ],
)
def test_where_there_is_none_nothing_is_printed(root, capsys, options, code, why):
    assert main(["path", str(root), *options]) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert why in told.err


def test_an_empty_root_and_none_at_all_are_3(tmp_path, capsys):
    assert main(["path", str(tmp_path)]) == 3
    assert "there is no checkpoint that counts" in capsys.readouterr().err
    assert main(["path", str(tmp_path / "away")]) == 3
