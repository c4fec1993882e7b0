"""The bundled loop on a real Slurm, 2 nodes x 2 ranks: stopped and killed in many ways, it repeats the whole run."""

import pytest

from tests.helpers.scenarios import (
    cancel,
    cut_the_power,
    cut_the_power_of_the_first,
    end_without_a_controller,
    kill_a_rank,
    kill_slurmd,
    kill_slurmd_of_the_first,
    kill_srun,
    kill_the_batch_script,
    preempt,
    requeue,
    restart_the_controller,
    set_a_node_down,
    tell_the_tasks,
    warn,
)
from tests.slurm.bundled import INTERVAL, check, disturbed, paced


@pytest.mark.timeout(300)
def test_a_warning_and_a_killed_rank(lab, tokens, whole, tmp_path):
    scene = disturbed(lab, tmp_path, tokens, [warn, kill_a_rank])
    assert [end.ending for end in scene.chain.ends().values()] == ["stopped", "crashed", "finished"]
    check(tmp_path, whole, allowed=INTERVAL)


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("acts", "allowed"),
    [
        pytest.param([warn] * 4, 0, id="warned"),
        pytest.param([cancel, requeue, cancel, requeue], 0, id="cancelled and requeued"),
        pytest.param([tell_the_tasks, preempt, tell_the_tasks, preempt], 0, id="told and preempted"),
        pytest.param([kill_a_rank, kill_srun, kill_the_batch_script, kill_a_rank], 4 * INTERVAL, id="killed"),
        pytest.param([set_a_node_down, set_a_node_down], 2 * INTERVAL, id="a node set down"),
        pytest.param([cut_the_power, cut_the_power_of_the_first], 2 * INTERVAL, id="a node that dies"),
        pytest.param([restart_the_controller, end_without_a_controller], 0, id="a controller restarted"),
    ],
)
def test_all_in_turn(lab, tokens, whole, tmp_path, acts, allowed):
    scene = disturbed(lab, tmp_path, tokens, acts)
    assert len(scene.chain.attempts()) == len(acts) + 1
    check(tmp_path, whole, allowed)


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_slurmd_that_dies(lab, tokens, whole, tmp_path):
    disturbed(lab, tmp_path, tokens, [kill_slurmd, kill_slurmd_of_the_first], paced(0))
    check(tmp_path, whole, allowed=2 * INTERVAL)
