"""Real programs that do not know ckptman, in chains on a real Slurm: cut by time limits and killed, until their end.

They run on the CPU. Those whose package is not installed are skipped.
"""

import importlib.util
import re
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptman.jobs.newest_checkpoints import find_newest
from tests.helpers.scenarios import Scene, script, submit

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3000)]
PROGRAMS = Path(__file__).with_name("programs")
PAGE = Path(__file__).parents[2] / "docs/slurm.md"
ON_CPU = Path(__file__).parents[1] / "integrations/torchtitan_on_cpu.py"
PYTHON = Path(sys.executable).parent / "python"
RANKS = """export OMP_NUM_THREADS=1 WORLD_SIZE=$SLURM_NTASKS
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 9000))
srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec {} {}'"""
CUTS = 5
SECONDS = 300


def time_limit(scene, job):
    """Slurm looks at limits every 30 seconds, and the least is a minute: this one ends the job at the next look."""
    scene.lab.ask("scontrol", "update", f"JobId={job}", "EndTime=now+1")


def time_limit_with_a_signal(scene, job):
    """The signal of `--signal=...@30` comes first."""
    scene.lab.ask("scontrol", "update", f"JobId={job}", "EndTime=now+31")
    scene.until(lambda: not scene.runs(job), SECONDS, "the job runs on")
    scene.lab.ask("scontrol", "update", f"JobId={job}", "TimeLimit=9")  # of one that is requeued


def wait_for_its_own_end(scene, job):
    """The program has a time limit of its own."""


@dataclass(frozen=True)
class Program:
    """A program, and what happens to it.

    `row`: its name in the table of docs/slurm.md. `line`: the program and its arguments. `cut`: what ends the first
    attempts. `endings`, `reasons`: how they may end, and why. `starts`: what the program prints, with the step that it
    resumes from, which is `first` for a new run.
    """

    row: str
    package: str
    line: str
    steps: int = 2000
    directives: tuple[str, ...] = ()
    tasks: int = 1
    cut: object = time_limit
    endings: str = "interrupted"
    reasons: str = "SIGTERM|USR2|time limit"
    starts: str = r"^starts at (\d+)"
    first: int = 0


MEGATRON = f"{PROGRAMS}/megatron_loop.py --save out --load out --train-iters STEPS --save-interval 25"
LIGHTNING = f"{PROGRAMS}/lightning_fit.py --default_root_dir out --max_steps STEPS"
HUGGINGFACE = "--save_steps 25 --use_cpu --report_to none --disable_tqdm true"
ALL = {
    "megatron, exit signal handler": Program(
        "Megatron",
        "megatron.core",
        f"{MEGATRON} --exit-signal-handler",
        tasks=2,
        endings="interrupted|stopped",
    ),
    "megatron, warned by ckptman": Program(
        "Megatron",
        "megatron.core",
        f"{MEGATRON} --exit-signal-handler",
        tasks=2,
        directives=("--time=30",),
        endings="interrupted|stopped",
    ),
    "megatron, exit duration": Program(
        "Megatron",
        "megatron.core",
        f"{MEGATRON} --exit-duration-in-mins 0.2",
        steps=400,
        tasks=2,
        cut=wait_for_its_own_end,
        endings="stopped",
        reasons="exit code 0; not finished, as --done exits with [12]",
    ),
    "lightning": Program("Lightning", "lightning", LIGHTNING, endings="stopped"),
    "lightning, its own requeue": Program(
        "Lightning",
        "lightning",
        f"{LIGHTNING} --requeue",
        directives=("--signal=SIGUSR1@30",),
        cut=time_limit_with_a_signal,
        endings="stopped|interrupted",
        reasons="the job was requeued",
    ),
    "deepspeed": Program(
        "DeepSpeed",
        "deepspeed",
        f"{PROGRAMS}/deepspeed_engine.py --save out --steps STEPS",
    ),
    "huggingface": Program(
        "Hugging Face `Trainer`",
        "transformers",
        f"{PROGRAMS}/hf_trainer.py --output_dir out --max_steps STEPS {HUGGINGFACE}",
    ),
    "torchtitan": Program(
        "torchtitan",
        "torchtitan",
        f"{ON_CPU} out/losses {PROGRAMS}/torchtitan_train.py out STEPS",
        steps=300,
        starts=r"Training starts at step (\d+)",
        first=1,
    ),
}


def command(program):
    """The options of ckptman submit that the page gives, for the steps of this program."""
    (found,) = re.findall(
        rf"^\| {re.escape(program.row)} \| `ckptman submit (.*) train.sbatch`", PAGE.read_text(), re.M
    )
    return shlex.split(found.replace("100000", str(program.steps)))


def is_installed(package):
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture
def usual_lab(lab):
    """A cluster that waits for as long as most clusters do, until it kills."""
    conf = lab.folder / "slurm.conf"
    text = conf.read_text()
    conf.write_text(re.sub("KillWait=.*", "KillWait=30", text))
    lab.ask("scontrol", "reconfigure")
    yield lab
    conf.write_text(text)
    lab.ask("scontrol", "reconfigure")


@pytest.mark.parametrize("name", ALL)
def test_a_real_program_runs_to_its_end(usual_lab, tmp_path, name):
    program = ALL[name]
    if not is_installed(program.package):
        pytest.skip(f"{program.package} is not installed")
    steps = str(program.steps)
    (tmp_path / "slow").touch()
    (tmp_path / "out").mkdir()
    body = RANKS.format(PYTHON, program.line.replace("STEPS", steps))
    path = script(tmp_path, body, "--time=9", f"--ntasks={program.tasks}", "--mem=3000", *program.directives)
    chain = submit(path, *command(program))
    scene = Scene(usual_lab, chain, next(word for word in program.line.split() if word.startswith(f"{PROGRAMS}/")))

    def starts():
        return [int(step) - program.first for step in re.findall(program.starts, scene.log(), re.MULTILINE)]

    def newest():
        return max((each.step for each in find_newest(["out"], tmp_path).values()), default=0)

    left = []
    for number in range(1, CUTS + 2):
        scene.until(lambda n=number: len(starts()) >= n, SECONDS, f"attempt {number} does not start")
        if program.cut is not wait_for_its_own_end or number > CUTS:
            scene.until(lambda: newest() > starts()[-1], SECONDS, f"attempt {number} does not save")
        job = chain.attempts()[-1].job_id
        if number <= CUTS:
            program.cut(scene, job)
        else:
            scene.ranks(job)[-1].send_signal(signal.SIGKILL)
        scene.until_ended(number, SECONDS)
        left.append(newest())
    (tmp_path / "slow").unlink()
    scene.finishes(2 * SECONDS)
    ends = list(chain.ends().values())
    print(*ends, sep="\n")
    killed, finished = ends.pop(CUTS), ends.pop()  # an undisturbed attempt may come to a limit, too
    assert all(re.fullmatch(program.endings, end.ending) for end in ends), scene.log()
    assert all(re.search(program.reasons, end.reason) for end in ends)
    assert (killed.ending, finished.ending) == ("crashed", "finished")
    assert re.search("SIGKILL|exit code 137", killed.reason)
    assert all(end.committed for end in (*ends, killed))
    resumed, last = starts(), [0, *left]
    assert len(resumed) == len(chain.attempts()) == len(ends) + 2
    resumed = resumed[: len(last)]
    if program.cut is time_limit_with_a_signal:  # the checkpoint of a requeue is newer than its name says
        assert all(step >= saved for step, saved in zip(resumed, last))
    else:
        assert resumed == last
    assert newest() == program.steps
