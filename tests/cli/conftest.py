"""What tests of verbs share."""

import pytest

from ckptman.cli.app import main


@pytest.fixture
def ends(capsys):
    """Run a verb, which has to end with this exit code: what it printed, as `out` and `err`."""

    def run(code, *words):
        capsys.readouterr()
        assert main([str(each) for each in words]) == code
        return capsys.readouterr()

    return run
