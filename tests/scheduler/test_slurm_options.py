"""Options of sbatch: time limits, warnings, arrays, and which of several settings counts."""

import pytest

from ckptman.errors import ConfigError
from ckptman.forecast.save_costs import UNMEASURED_SECONDS, warning_seconds
from ckptman.policies.save_policies import BeforeDeadline
from ckptman.scheduler.slurm.batch_script import (
    Warned,
    array_tasks,
    in_force,
    limit_seconds,
    read_options,
    remarks,
    warned,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("2:00:00", 7200),
        ("1-0", 86400),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-00:00:30", 86430),
        ("04:00:00", 14400),
        ("2-01:02:03", 176523),
        ("0", None),
        ("UNLIMITED", None),
        ("", None),
        ("soon", None),
        ("1:2:3:4", None),
    ],
)
def test_time_limits(text, seconds):
    assert limit_seconds({"--time": text}) == seconds
    assert limit_seconds({}) is None


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("USR2@180", Warned("USR2", 180)),
        ("B:USR2@90", Warned("USR2", 90, True)),
        ("b:sigterm", Warned("TERM", 60, True)),
        ("R:10@5", Warned("10", 5)),
        ("RB:USR1@7", Warned("USR1", 7, True)),
        ("", None),
        ("@30", None),
        (f"USR2@{'9' * 400}", None),
    ],
)
def test_warnings(text, meant):
    assert warned({"--signal": text}) == meant


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("0-3", [0, 1, 2, 3]), ("7", [7]), ("1,3,5-7", [1, 3, 5, 6, 7]), ("0-15:4", [0, 4, 8, 12]), ("2,1,2", [1, 2])],
)
def test_tasks_of_an_array(text, tasks):
    assert array_tasks(text) == tasks


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-5:0", "0-3%2", "1,,2", "-1", "0-99999999999", "0-500,600-1200"])
def test_arrays_that_cannot_be_chains(text):
    with pytest.raises(ConfigError, match="--array="):
        array_tasks(text)


def test_the_command_line_counts_before_variables_and_those_before_the_script():
    script = read_options(["--time=10", "--signal=B:USR2@60", "-x", "n1", "--nodes=2"])
    variables = {"SBATCH_TIMELIMIT": "20", "SBATCH_SIGNAL": "B:USR2@70", "SBATCH_ARRAY_INX": "0-1"}
    found = in_force(script, variables, read_options(["--time", "30"]))
    assert found == {
        "--time": "30",
        "--signal": "B:USR2@70",
        "--exclude": "n1",
        "--nodes": "2",
        "--array": "0-1",
    }


def test_a_warning_leaves_room_for_what_the_last_save_needs():
    policy = BeforeDeadline()
    assert warning_seconds(None) == UNMEASURED_SECONDS
    for save in (0.0, 0.5, 10, 47, 600):
        found = warning_seconds(save)
        assert policy.safety * save + policy.margin_seconds + 30 <= found < policy.safety * save + 30 + 60
        assert found % 30 == 0


def test_what_a_user_should_know():
    assert [each for each in remarks({}) if "no --time" in each]
    assert list(remarks({"--time": "10"})) == []
    assert [each for each in remarks({"--time": "1", "--dependency": "afterok:17"}) if "afterok:17" in each]
    assert [each for each in remarks({"--time": "1", "--array": "0-3"}) if "SLURM_ARRAY_TASK_COUNT is 1" in each]
