"""The list of scenarios on a Slurm of small executables; and a controller that is slow, silent, or loses answers."""

from collections.abc import Mapping, Sequence

import pytest

from tests.helpers.scenarios import SCENARIOS, STOPPED, Scenario, names, play, warn
from tests.helpers.small_slurm import DENIED, FAILS, FULL, LOST, SmallSlurm, Trouble


@pytest.fixture
def lab(tmp_path, monkeypatch):
    with SmallSlurm(tmp_path / "slurm") as made:
        monkeypatch.chdir(tmp_path)
        for name, value in made.environ.items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("name", names(real=False))
def test_the_list(lab, tmp_path, name):
    play(SCENARIOS[name], lab, tmp_path)


def expire(scene, job):
    """The time limit comes."""
    scene.lab.ask("scontrol", "update", f"JobId={job}", "EndTime=now")


def test_the_time_limit_comes(lab, tmp_path):
    play(Scenario([expire], STOPPED), lab, tmp_path)


Troubles = Mapping[str, Sequence[Trouble | None]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param({"sbatch": [LOST, LOST]}, {"scancel": [LOST]}, id="what is done, and its answer lost"),
        pytest.param({"sbatch": [None, FAILS], "squeue": [FAILS]}, {"squeue": [FAILS]}, id="nobody answers"),
        pytest.param({"sbatch": [None, FULL]}, {"scancel": [DENIED]}, id="no room, and no right to cancel"),
    ],
)
def test_a_controller_in_trouble(lab, tmp_path, first, then):
    """`first`: what goes wrong from the submission on; `then`: from the end of the first attempt on."""

    def trouble(scene, job):
        lab.troubles |= {name: list(each) for name, each in then.items() if name == "squeue"}
        warn(scene, job)
        scene.until_ended(1, 60)
        lab.troubles |= {name: list(each) for name, each in then.items() if name != "squeue"}

    lab.troubles = {name: list(each) for name, each in first.items()}
    scene = play(Scenario([trouble], STOPPED), lab, tmp_path)
    assert len(scene.chain.jobs()) == 3
    assert not any(lab.troubles.values()), "all that was planned has gone wrong"


@pytest.mark.slow
def test_a_slow_controller(lab, tmp_path):
    lab.seconds = 0.2
    play(Scenario([warn], STOPPED), lab, tmp_path)
