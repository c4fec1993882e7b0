"""A Slurm that only pretends: small executables that note what they were called with, and answer as planned."""

import json
import os
import sys

from ckptman.jobs.slurm.commands import Slurm

PROGRAM = """#!{python} -S
import json, os, sys, time
from pathlib import Path
folder, name = Path({folder!r}), {name!r}
with open(folder / "calls.jsonl", "a") as calls:
    environ = {{key: value for key, value in os.environ.items() if key.startswith(("SLURM", "SBATCH", "CKPTMAN"))}}
    calls.write(json.dumps({{"argv": [name, *sys.argv[1:]], "environ": environ, "folder": os.getcwd()}}) + "\\n")
plan = folder / (name + ".json")
answers = json.loads(plan.read_text()) if plan.exists() else []
answer = answers[0] if answers else [0, "", "", 0]
if len(answers) > 1:
    plan.write_text(json.dumps(answers[1:]))
code, out, err, seconds = answer
time.sleep(seconds)
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


class FakeSlurm:
    """Executables in a folder. Each answers what was planned, one after the other, and the last again and again."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        for name in ("sbatch", "squeue", "scontrol", "scancel"):
            path = folder / name
            path.write_text(PROGRAM.format(python=sys.executable, folder=str(folder), name=name))
            path.chmod(0o755)

    def plan(self, name, *answers):
        """What a program answers: exit code, output, errors, and how many seconds it takes."""
        (self.folder / f"{name}.json").write_text(json.dumps([[*each, 0][:4] for each in answers]))

    @property
    def environ(self):
        return {"PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}"}

    @property
    def calls(self):
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def argv(self, name):
        """What a program was called with, each time."""
        return [each["argv"][1:] for each in self.calls if each["argv"][0] == name]

    @property
    def submissions(self):
        """What sbatch was called with, each time that it was not just a try."""
        return [each for each in self.argv("sbatch") if "--test-only" not in each]

    def client(self, environ=None, slept=None):
        """Ours, which calls these. It does not sleep, but notes for how long it would have."""
        return Slurm({**self.environ, **(environ or {})}, sleep=(slept if slept is not None else []).append)
