"""The bundled loop as a chain of jobs, 2 nodes x 2 ranks; and what it has to have done in the end."""

from pathlib import Path

from ckptman.runtime.journal import read_journal
from ckptman.storage.format.manifest import read_manifest
from ckptman.storage.format.paths import journal_path, step_folder
from tests.helpers.forkserver import programs
from tests.helpers.scenarios import Scene, submit

STEPS = 80
INTERVAL = 5
OWN_STEPS = INTERVAL + 5
"""So many steps an attempt does before something happens to it."""
SHAPE = {
    "model.dim": 16,
    "model.layers": 2,
    "model.heads": 2,
    "model.kv_heads": 1,
    "data.sequence_tokens": 12,
    "data.global_batch": 6,
    "data.micro_batch": 2,
    "optimizer.warmup_steps": 3,
    "parallel.device": "cpu",
    "run.steps": STEPS,
    "run.log": "steps.jsonl",
    "run.log_every": 1,
    "run.timeout_seconds": 60,
    "checkpoint.root": "ck",
    "checkpoint.every_steps": INTERVAL,
    "checkpoint.keep_last": 2,
}
TRAIN = "-m ckptman.train"
BODY = """#!/bin/bash
#SBATCH --time={minutes} --nodes=2 --ntasks-per-node=2 --output=log
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) OMP_NUM_THREADS=1
srun --kill-on-bad-exit=1 --ntasks=$((2 * SLURM_JOB_NUM_NODES)) {python} {program} --config run.toml {settings}
"""


def paced(seconds):
    """The loop, whose steps take that much longer; and what is to be held can be held."""
    return f"{Path(__file__).with_name('paced.py')} {seconds}"


def options(folder, tokens, settings):
    """What the loop is called with after `--config run.toml`: its shape, and `settings`, with __ for the dot."""
    (folder / "run.toml").write_text("")
    values = {**SHAPE, "data.path": tokens, **{key.replace("__", "."): each for key, each in settings.items()}}
    return [part for name, value in values.items() for part in ("--set", f"{name}={value}")]


def script(folder, tokens, *, program=TRAIN, minutes=5, **settings):
    """A batch script of the loop. `settings`: see `options`."""
    path = folder / "train.sbatch"
    path.write_text(
        BODY.format(
            python=programs() / "python",
            program=program,
            minutes=minutes,
            settings=" ".join(options(folder, tokens, settings)),
        )
    )
    return path


def begin(lab, path):
    return Scene(lab, submit(path), program="run.toml")


def steps(folder):
    """Steps and losses, in the order in which they were logged."""
    path = folder / "steps.jsonl"
    return [(each["step"], each["loss_hex"]) for each in read_journal(path)[0]] if path.exists() else []


def trains(scene, folder, number, own_steps=OWN_STEPS):
    """Wait until attempt `number` has done so many steps of its own; the id of its job."""
    scene.until(lambda: len(scene.chain.attempts()) >= number, 60, f"no attempt {number}")
    before = len(steps(folder))
    scene.until(lambda: len(steps(folder)) >= before + own_steps, 90, f"attempt {number} does not train")
    return scene.chain.attempts()[-1].job_id


def disturbed(lab, folder, tokens, acts, program=TRAIN):
    """A run, of which one attempt after the other is disturbed after some steps of its own; the last one is not."""
    scene = begin(lab, script(folder, tokens, program=program))
    for number, act in enumerate(acts, 1):
        act(scene, trains(scene, folder, number))
        scene.until_ended(number, 90)
    scene.finishes(120)
    return scene


def check(folder, whole, allowed):
    """The run is the whole run, and at most `allowed` steps were computed twice, besides those that it did while a save
    was being written that a crash cut off."""
    logged, expected = steps(folder), steps(whole)
    assert [step for step, _ in expected] == list(range(1, len(expected) + 1))
    assert dict(logged) == dict(expected)
    assert set(logged) == set(expected)
    assert len(logged) - len(expected) <= allowed + _done_while_saving(folder)
    assert _saved_bytes(folder, len(expected)) == _saved_bytes(whole, len(expected))


def _done_while_saving(folder):
    """Steps done behind the first save of an attempt that was begun and never durable."""
    logged, events = (read_journal(path)[0] for path in (folder / "steps.jsonl", journal_path(folder / "ck")))
    done, last, writing = 0, 0, []
    for each in sorted(logged + events, key=lambda each: each["time"]):
        match each["event"]:
            case "step":
                last = each["step"]
            case "save_begun":
                writing.append(each["step"])
            case "save_durable":
                writing.remove(each["step"])
            case "attempt_started" if writing:
                done, writing = done + last - writing[0], []
    return done


def _saved_bytes(folder, step):
    files = read_manifest(folder / "ck" / step_folder(step)).files
    return {name: each for name, each in files.items() if name != ".metadata"}
