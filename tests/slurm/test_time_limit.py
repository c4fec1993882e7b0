"""A run of the bundled loop that is longer than Slurm's shortest time limit: no signal, and not one step twice."""

import pytest

from tests.slurm.bundled import begin, check, paced, script

STEP_SECONDS = 2.5


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_five_attempts_of_one_minute(lab, tokens, whole, tmp_path):
    path = script(tmp_path, tokens, program=paced(STEP_SECONDS), minutes=1, checkpoint__margin_seconds=10)
    scene = begin(lab, path)
    scene.finishes(800)
    *stopped, last = scene.chain.ends().values()
    assert len(stopped) >= 4
    assert last.ending == "finished"
    for end in stopped:
        assert end.ending == "stopped"
        assert "left before the deadline" in end.reason
    check(tmp_path, whole, allowed=0)
    begun = {each.number: each.begun_seconds for each in scene.chain.attempts()}
    for end in (*stopped, last):
        print(f"attempt {end.number}: {end.ended_seconds - begun[end.number]:.0f} s, to step {end.step}: {end.reason}")
