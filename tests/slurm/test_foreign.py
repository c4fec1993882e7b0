"""Programs that do not know ckptman, in chains on a real Slurm."""

import sys
from pathlib import Path

import pytest

from tests.helpers.scenarios import SRUN, Scene, script, submit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("foreign_run.py")


@pytest.mark.parametrize(("code", "launcher"), [(0, SRUN), (1, SRUN), (0, "exec"), (1, "")])
def test_a_program_that_saves_when_it_is_asked_to_stop(lab, tmp_path, code, launcher):
    line = f"{launcher} {sys.executable} {PROGRAM} --save out/ck --steps 120 --exit {code} $*"
    chain = submit(script(tmp_path, line), "--stall-limit", "2", "--crash-limit", "1", "--first", "--start-from=base")
    scene = Scene(lab, chain, "foreign_run.py")
    saved = tmp_path / "out/ck/latest_checkpointed_iteration.txt"
    for number in range(1, 5):
        before = int(saved.read_text()) if saved.exists() else 0
        lab.wait(lambda n=number: len(chain.attempts()) == n, 60, "the next attempt")
        lab.wait(lambda b=before: saved.exists() and int(saved.read_text()) > b, 60, "a checkpoint")
        lab.ask("scancel", chain.attempts()[-1].job_id)
        lab.wait(lambda n=number: n in chain.ends(), 60, "the end of the attempt")
        assert chain.ends()[number].committed is True, scene.log()
    scene.over(90)
    assert chain.state.state == "finished", scene.log()
    ends = [*chain.ends().values()]
    assert [each.ending for each in ends[:-1]] == ["interrupted" if code else "stopped"] * 4
    assert ends[-1].step == 120
    starts = [line for line in scene.log().splitlines() if line.startswith("start at")]
    assert starts[0] == "start at 0 base"
    assert all(not line.endswith("base") for line in starts[1:])
