"""A stop request to a step of `srun`, which every process of the step gets: loaders' workers, too."""

import sys

import pytest

from ckptman.runtime.outcome import read_outcome
from ckptman.storage.format.paths import outcome_path
from tests.end_to_end.stop_program import KINDS
from tests.end_to_end.test_stop_requests import PROGRAM, SIGNALS
from tests.helpers.faulty_disk import drawn
from tests.slurm.cluster import lines_of

pytestmark = pytest.mark.timeout(600)
CASES = [(number, kind, loop) for number in SIGNALS for kind in KINDS for loop in ("loop", "lightning")]
JOB = """#!/bin/bash
#SBATCH --output=job.log
trap '' USR1
srun --ntasks 1 {python} {program} {root} '{kind}' {loop} > out.log 2>&1
echo $? > code
"""


@pytest.mark.parametrize("count", [1, pytest.param(len(CASES), marks=pytest.mark.campaign)])
def test_a_step_that_is_asked_to_stop(lab, tmp_path, count):
    for turn, (number, kind, loop) in enumerate(drawn(CASES, count)):
        print(number.name, kind, loop)
        folder = tmp_path / str(turn)
        folder.mkdir()
        root = folder / "run"
        text = JOB.format(python=sys.executable, program=PROGRAM, root=root, kind=kind, loop=loop)
        (folder / "job").write_text(text)
        job = lab.ask("sbatch", "--parsable", "--chdir", str(folder), str(folder / "job")).strip()
        log = folder / "out.log"
        lab.wait(lambda log=log: sum(each.startswith("step ") for each in lines_of(log)) > 5, 240, "no step ended")
        lab.ask("scancel", f"--signal={number.name.removeprefix('SIG')}", f"{job}.0")
        lab.wait(lambda: not lab.queue(), 240, f"the job did not end: {lines_of(log)[-5:]}")
        last = [int(each.split()[1]) for each in lines_of(log) if each.startswith("step ")][-1]
        outcome = read_outcome(outcome_path(root))
        assert lines_of(folder / "code") == ["75"], lines_of(log)[-20:]
        assert (outcome.state, outcome.step) == ("stopped", last)
        assert (root / f"step-{last:010}" / "manifest.json").exists()
